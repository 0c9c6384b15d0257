"""When the next term of a training pool begins, and where: a function of the reports of all hosts."""

from __future__ import annotations

from distflow.launch.mesh.core import Mesh
from distflow.launch.mesh.renewal import is_broken, next_term
from distflow.launch.mesh.report import Report, Term, from_wire, to_wire
from distflow.launch.record import HostEntry

TRAINERS = {"trainer/0": 0, "trainer/1": 1}
ENTRY = HostEntry("node", "10.0.0.1")


def world(*terms: Term | None, own: int = 0) -> Mesh:
    """What host `own` knows of all hosts; None: no report yet."""
    mesh = Mesh(Report(own, ENTRY, term=terms[own] or Term(0)), set(range(len(terms))) - {own}, 60.0)
    for host, term in enumerate(terms):
        if host != own and term is not None:
            mesh.reports[host] = from_wire(to_wire(Report(host, ENTRY, serial=1, term=term)))
    return mesh


def ended(number: int, *checkpoints: int, step: int = 0, tries: int = 0) -> Term:
    return Term(number, step, tries, broken=True, ended=True, checkpoints=checkpoints)


def test_nothing_happens_while_nobody_was_killed() -> None:
    mesh = world(Term(0), Term(0))
    assert (is_broken(mesh), next_term(mesh, TRAINERS)) == (False, None)


def test_the_next_term_waits_until_no_training_worker_of_the_former_one_is_left() -> None:
    for other in (None, Term(0), Term(0, broken=True)):
        mesh = world(ended(0, 20), other)
        assert (is_broken(mesh), next_term(mesh, TRAINERS)) == (True, None)
    assert next_term(world(ended(0, 20), ended(0, 20)), TRAINERS) == Term(1, 20, 1)


def test_it_begins_at_the_newest_checkpoint_that_all_hosts_have() -> None:
    mesh = world(ended(0, 20, 40, 60), ended(0, 20, 40))
    assert next_term(mesh, TRAINERS) == Term(1, 40, 1)
    assert next_term(world(ended(0, 20), ended(0)), TRAINERS) == Term(1, 0, 1)


def test_every_host_comes_to_the_same() -> None:
    terms = [ended(3, 40, 60, step=40), ended(3, 60, 40, step=40), ended(3, step=40)]
    assert {next_term(world(*terms, own=host), TRAINERS) for host in range(3)} == {Term(4, 60, 1)}


def test_who_is_late_finds_the_others_in_the_next_term_already() -> None:
    mesh = world(Term(4, 60, 1), ended(3, 60, 80), own=1)
    assert is_broken(mesh)
    assert next_term(mesh, TRAINERS) == Term(4, 60, 1)


def test_terms_in_a_row_that_begin_at_the_same_step_are_counted() -> None:
    again = ended(5, 40, step=40, tries=2)
    assert next_term(world(again, again), TRAINERS) == Term(6, 40, 3)
    further = ended(5, 40, 45, step=40, tries=2)
    assert next_term(world(further, further), TRAINERS) == Term(6, 45, 1)
