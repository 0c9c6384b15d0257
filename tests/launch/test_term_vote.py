"""When the next term of a training pool begins, with whom, and where: a function of the reports of all hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from distflow.cluster.cluster_view import Rules, View
from distflow.cluster.host_report import (
    Choice,
    DesiredWorkers,
    HostReport,
    Saved,
    Successor,
    Term,
    choose,
    from_wire,
    to_wire,
)
from distflow.cluster.processes import HostEntry
from distflow.cluster.term_vote import (
    SCALED,
    Begin,
    Break,
    Pool,
    Standstill,
    Stop,
    elected,
    is_to_end,
    propose,
    why_broken,
)

RESTART, SHRINK = Rules(False, 60.0, 3), Rules(True, 60.0, 3)
LONG_AGO = 75.0


def world(*terms: Term | None, own: int = 0, silent: tuple[int, ...] = ()) -> View:
    """What host `own` knows of all hosts, with one training worker each; None: no report yet."""
    entry = HostEntry("node", "10.0.0.1")
    known = {h: from_wire(to_wire(HostReport(h, entry, term=t))).term for h, t in enumerate(terms) if t is not None}
    hosts = range(len(terms))
    ages = {host: LONG_AGO if host in silent else 0.5 for host in hosts if host != own}
    return View(own, {f"trainer/{h}": h for h in hosts}, {h: f"h{h}" for h in hosts}, known, ages, ages)


def began(number: int, step: int = 0, tries: int = 1, members: tuple[str, ...] = ()) -> Term:
    return Term(number, Successor(number, step, tries, members, 0, ((number, step),), "trainer/1 was killed"))


def ended(term: Term, *checkpoints: int, given_up: tuple[str, ...] = (), missing: tuple[str, ...] = ()) -> Term:
    saved = tuple(Saved(step, 0, missing) for step in checkpoints)
    return structs.replace(term, broken=True, ended=True, checkpoints=saved, given_up=given_up)


def next_of(view: View, rules: Rules = RESTART) -> Successor:
    found = propose(view, rules)
    assert isinstance(found, Successor), found
    return found


def test_nothing_happens_while_nobody_was_killed() -> None:
    assert why_broken(world(Term(0), Term(0)), RESTART, alive=True) is None


def test_the_next_term_waits_until_no_training_worker_of_the_former_one_is_left() -> None:
    for other in (None, Term(0), Term(0, broken=True)):
        found = propose(world(ended(Term(0), 20), other), RESTART)
        assert found == Standstill("h1 to end its training workers")
    found = next_of(world(ended(Term(0), 20), ended(Term(0), 20)))
    assert (found.number, found.step, found.tries, found.members) == (1, 20, 1, ("trainer/0", "trainer/1"))


def test_it_begins_at_the_newest_checkpoint_that_is_whole_on_all_hosts_together() -> None:
    assert next_of(world(ended(Term(0), 20, 40), ended(Term(0), 20))).step == 40
    assert next_of(world(ended(Term(0)), ended(Term(0)))).step == 0
    apart = [ended(Term(0), 40, missing=("b",)), ended(Term(0), 40, missing=("a",))]
    assert next_of(world(*apart)).step == 40


def test_every_host_comes_to_the_same() -> None:
    terms = [ended(began(3, 40), 40, 60), ended(began(3, 40), 60, 40), ended(began(3, 40))]
    assert len({next_of(world(*terms, own=host)) for host in range(3)}) == 1


def test_who_is_late_finds_the_others_in_the_next_term_already() -> None:
    view = world(began(4, 60), ended(Term(3), 60, 80), own=1)
    assert why_broken(view, RESTART, alive=True)
    pool = Pool(RESTART, 3, 600.0)
    pool.note("elsewhere", alive=False, look=lambda: ((), ()))
    view = replace(view, terms={**view.terms, 1: pool.term})
    assert pool.act(view, alive=False, lacks=lambda term: "", now=0.0) == Begin(view.terms[0].begun)


def test_terms_in_a_row_that_begin_at_the_same_step_are_counted() -> None:
    again = ended(began(5, 40, tries=2), 40)
    assert next_of(world(again, again)).tries == 3
    further = ended(began(5, 40, tries=2), 40, 45)
    assert (next_of(world(further, further)).step, next_of(world(further, further)).tries) == (45, 1)
    over = propose(world(ended(began(5, 40, tries=3), 40)), RESTART)
    assert isinstance(over, Standstill)
    assert over.hopeless
    assert "4 times in a row now since the checkpoint of training step 40 (limits.restarts: 3)" in over.why


def test_a_pool_that_shrinks_goes_on_without_who_cannot_come_back() -> None:
    terms = [ended(Term(0), 20), ended(Term(0), 20, given_up=("trainer/1",))]
    assert next_of(world(*terms), RESTART).members == ("trainer/0", "trainer/1")
    found = next_of(world(*terms), SHRINK)
    assert found.members == ("trainer/0",)
    assert "trainer/1 cannot come back (1 training workers are left)" in found.reason


def test_the_last_training_worker_cannot_be_done_without() -> None:
    found = propose(world(ended(Term(0), 20, given_up=("trainer/0",))), SHRINK)
    assert found == Standstill("trainer/0 cannot come back, and no training worker is left", hopeless=True)


def test_the_last_worker_of_a_home_cannot_be_done_without() -> None:
    view = world(ended(Term(0), 20), ended(Term(0), 20), ended(Term(0), 20, given_up=("critic/0",)))
    view = replace(view, hosts={"trainer/0": 0, "trainer/1": 1, "critic/0": 2})
    why = "critic/0 cannot come back, and pool 'critic' has no other worker to train its models"
    assert propose(view, SHRINK) == Standstill(why, hopeless=True)
    assert next_of(view, RESTART).members == ("trainer/0", "trainer/1", "critic/0")


@pytest.mark.parametrize(
    ("rules", "why"),
    [(RESTART, "with layout.on_failure: restart, training cannot continue without them"), (SHRINK, None)],
)
def test_a_host_that_is_gone_takes_its_training_workers_along(rules: Rules, why: str | None) -> None:
    terms = [ended(Term(0), 20), ended(Term(0), 20), Term(0)]
    assert propose(world(*terms), rules) == Standstill("h2 to end its training workers")
    found = propose(world(*terms, silent=(2,)), rules)
    if why is None:
        assert isinstance(found, Successor)
        assert found.members == ("trainer/0", "trainer/1")
    else:
        assert isinstance(found, Standstill)
        assert why in found.why


def test_no_part_goes_on_without_more_than_half() -> None:
    found = propose(world(ended(Term(0), 20), Term(0), silent=(1,)), SHRINK)
    assert isinstance(found, Standstill)
    assert "only 1 of 2 training workers are on hosts that can be heard here" in found.why


def test_a_host_that_others_cannot_hear_ends_its_training_workers() -> None:
    view = world(Term(0), Term(0), Term(0))
    deaf = replace(view, unseen_s={1: 60.0, 2: 60.0})
    assert "was cut off from the hosts of most of them" in str(why_broken(deaf, SHRINK, alive=True))
    assert why_broken(replace(view, unseen_s={1: 60.0, 2: 59.0}), SHRINK, alive=True) is None
    assert why_broken(deaf, SHRINK, alive=False) is None


def test_silence_breaks_a_pool_only_after_the_silent_host_must_have_ended() -> None:
    view = world(Term(0), Term(0), Term(0))
    assert why_broken(replace(view, unheard_s={2: 74.0}), SHRINK, alive=True) is None
    assert why_broken(replace(view, unheard_s={2: 75.0}), SHRINK, alive=True) == "nothing was heard from h2 for 75 s"


def test_a_host_has_one_vote_and_begins_only_what_it_voted_for() -> None:
    pool = Pool(SHRINK, 0, 600.0)
    pool.note("killed", alive=False, look=lambda: ((), ()))
    others = ended(Term(0))
    view = world(pool.term, others, others)
    assert pool.act(view, alive=False, lacks=lambda term: "", now=0.0) is None
    assert pool.term.vote is None, "the others have not said yet that they want the same"
    proposing = structs.replace(others, proposal=pool.term.proposal)
    view = world(pool.term, proposing, proposing)
    assert pool.act(view, alive=False, lacks=lambda term: "room", now=1.0) is None
    assert pool.term.vote is None, "it cannot begin yet"
    assert pool.term.waits == "room"
    assert pool.act(view, alive=False, lacks=lambda term: "", now=2.0) is None
    voted = structs.replace(proposing, vote=pool.term.vote)
    assert pool.act(world(pool.term, voted, proposing), alive=False, lacks=lambda t: "", now=3.0) is None
    move = pool.act(world(pool.term, voted, voted), alive=False, lacks=lambda term: "", now=4.0)
    assert move == Begin(voted.vote)
    assert pool.put_off("room on the disk of h0", now=5.0) is None
    assert (pool.term.vote, pool.term.waits) == (voted.vote, "room on the disk of h0")
    assert pool.act(world(pool.term, voted, voted), alive=False, lacks=lambda term: "", now=6.0) == move
    pool.began(move.term)
    assert pool.term == Term(1, voted.vote)


def test_a_wait_for_what_a_host_lacks_has_its_name_everywhere_and_lasts_while_there_is_progress() -> None:
    """Of two hosts one fetches parts of a checkpoint for hours, which is no standstill on the other either."""
    pools = [Pool(RESTART, 0, 600.0), Pool(RESTART, 0, 600.0)]
    for pool in pools:
        pool.note("killed", alive=False, look=lambda: ((), ()))

    def act(now: float, fetching: str) -> list[object]:
        def one(host: int, lacks: str) -> object:
            view = world(*(pool.term for pool in pools), own=host)
            return pools[host].act(view, alive=False, lacks=lambda term: lacks, now=now)

        return [one(0, ""), one(1, fetching)]

    for turn in range(10):
        assert act(500.0 * turn, f"h1 to fetch a ({turn} GiB so far)") == [None, None]
    assert pools[1].term.waits == "h1 to fetch a (9 GiB so far)"
    assert act(4501.0, "h1 to fetch a (9 GiB so far)") == [None, None]
    for stop in act(5102.0, "h1 to fetch a (9 GiB so far)"):
        assert isinstance(stop, Stop)
        assert "waited 600 s (limits.no_progress_s) for h1 to fetch a (9 GiB so far)" in stop.why


def test_a_host_that_follows_into_a_term_says_what_it_waits_for_and_not_for_ever() -> None:
    view = world(began(4, 60, members=("trainer/0", "trainer/1")), ended(Term(3), 60), own=1)
    pool = Pool(RESTART, 3, 600.0)
    pool.note("elsewhere", alive=False, look=lambda: ((), ()))
    assert pool.act(view, alive=False, lacks=lambda term: "room on the disk of h1", now=0.0) is None
    assert pool.term.waits == "room on the disk of h1"
    stop = pool.act(view, alive=False, lacks=lambda term: "room on the disk of h1", now=600.0)
    assert isinstance(stop, Stop)
    without = world(began(4, 60, members=("trainer/0",)), ended(Term(3), 60), own=1)
    assert pool.act(without, alive=False, lacks=lambda term: "room on the disk of h1", now=700.0) is None


def test_a_pool_that_stands_still_for_too_long_ends_the_run() -> None:
    pool = Pool(SHRINK, 0, 600.0)
    pool.note("h0 was cut off", alive=False, look=lambda: ((), ()))
    view = world(pool.term, Term(0), silent=(1,))
    assert pool.act(view, alive=False, lacks=lambda term: "", now=10.0) is None
    assert pool.act(view, alive=False, lacks=lambda term: "", now=609.0) is None
    stop = pool.act(view, alive=False, lacks=lambda term: "", now=610.0)
    assert isinstance(stop, Stop)
    assert "h0 was cut off; then the training workers waited 600 s (limits.no_progress_s) for h1" in stop.why


def test_the_first_thing_is_to_end_the_own_workers() -> None:
    move = Pool(RESTART, 0, 600.0).act(world(Term(0), ended(Term(0))), alive=True, lacks=lambda term: "", now=0.0)
    assert isinstance(move, Break)


def test_parts_that_only_a_lost_host_had_are_named() -> None:
    lost = {0: [Saved(40, 0, ("b",)), Saved(20, 0)], 1: [Saved(40, 0, ("a", "b"))]}
    names = {0: "h0", 1: "h1"}
    assert choose(lost, names) == Choice(20, 0, "the checkpoint of training step 40 lacks b on h0, h1")
    nothing = choose({0: [Saved(40, 0, ("b",))]}, names)
    assert nothing.step is None
    assert "lacks b on h0, h1 — copy them back" in nothing.lacking


def scaled(view: View, number: int, pool: str, hosts: dict[str, int]) -> View:
    return replace(view, wanted={**view.wanted, pool: DesiredWorkers((number, 0), hosts)})


def test_a_decision_to_scale_is_taken_up_by_the_next_term_and_no_other() -> None:
    view = scaled(world(Term(0), Term(0)), 1, "trainer", {"trainer/0": 0, "trainer/1": 1, "trainer/2": 1})
    assert is_to_end(view, RESTART)
    left = structs.replace(ended(Term(0), 7), reason=SCALED)
    found = next_of(replace(view, terms={0: left, 1: ended(Term(0))}))
    assert (found.members, found.hosts) == (("trainer/0", "trainer/1", "trainer/2"), (0, 1, 1))
    assert (found.step, found.tries, found.scaled) == (7, 1, (("trainer", 1, 0),))
    assert found.reason == "pool trainer goes from 2 to 3 training workers (trainer/0, trainer/1, trainer/2)"
    begun = Term(1, found)
    view = replace(view, terms={0: begun, 1: begun})
    assert dict(view.members) == {"trainer/0": 0, "trainer/1": 1, "trainer/2": 1}
    assert not is_to_end(view, RESTART), "it is taken up"
    assert is_to_end(scaled(view, 2, "trainer", {"trainer/0": 0}), RESTART)
    again = next_of(replace(view, terms={0: ended(begun, 7), 1: ended(begun)}))
    assert (again.members, again.tries) == (found.members, 2), "a death right after it counts as one"


def test_who_is_scaled_down_leaves_and_the_others_vote_with_it() -> None:
    view = scaled(world(ended(Term(0), 7), ended(Term(0)), ended(Term(0))), 1, "trainer", {"trainer/0": 0})
    found = next_of(view)
    assert (found.members, found.hosts) == (("trainer/0",), (0,))
    voted = {host: structs.replace(term, vote=found, proposal=found) for host, term in view.terms.items()}
    assert elected(replace(view, terms=voted), RESTART) == found
    only_who_stays = {**view.terms, 0: voted[0]}
    assert elected(replace(view, terms=only_who_stays), RESTART) is None, "one of three is no majority"


def test_a_term_waits_until_a_host_on_which_training_begins_has_what_it_begins_from() -> None:
    first = ended(Term(0), 7)
    view = replace(world(first, Term(0)), hosts={"trainer/0": 0})
    view = scaled(view, 1, "trainer", {"trainer/0": 0, "trainer/1": 1})
    pool, other = Pool(RESTART, 0, 600.0), Pool(RESTART, 0, 600.0)
    pool.note(SCALED, alive=False, look=lambda: ((Saved(7, 0),), ()))

    def act(one: Pool, own: int, lacks: str = "", unheard_s: float = 0.5) -> object:
        seen = replace(view, host=own, terms={0: pool.term, 1: other.term}, unheard_s={1 - own: unheard_s})
        return one.act(seen, alive=False, lacks=lambda term: lacks, now=1.0)

    assert act(pool, 0) is None
    assert pool.term.vote is not None
    assert isinstance(act(other, 1), Break)
    other.note("elsewhere", alive=False, look=lambda: ((), ()))
    assert act(other, 1, "h1 to fetch a") is None
    assert (other.term.vote, other.term.waits) == (None, "h1 to fetch a")
    assert act(pool, 0) is None, "the other one is not ready"
    assert act(pool, 0, unheard_s=LONG_AGO) == Begin(pool.term.vote), "but is not waited for for ever"
    act(other, 1)
    assert other.term.vote == pool.term.vote
    move = act(pool, 0)
    assert move == Begin(pool.term.vote)
    pool.began(move.term)
    assert pool.term.checkpoints == (Saved(7, 0),), "who is late fetches it from there"


def test_a_decision_for_a_host_that_cannot_be_heard_is_dropped_once_and_for_all() -> None:
    there = world(Term(0), Term(0), silent=(1,))
    wanted = {"trainer/0": 0, "trainer/1": 1}
    view = scaled(replace(there, hosts={"trainer/0": 0}), 1, "trainer", wanted)
    assert not is_to_end(view, RESTART)
    found = next_of(replace(view, terms={**view.terms, 0: ended(Term(0), 7)}))
    assert (found.members, found.scaled) == (("trainer/0",), (("trainer", 1, 0),))
    assert found.reason.endswith("pool trainer stays as it is, since h1 cannot be heard")
    back = replace(view, terms={0: Term(1, found), 1: Term(1, found)}, unheard_s={1: 0.5})
    assert not is_to_end(back, RESTART)


def test_training_moves_off_a_host_that_died_if_most_of_the_pool_is_left() -> None:
    dead = world(ended(Term(0), 7), ended(Term(0)), Term(0), silent=(2,))
    assert isinstance(propose(dead, RESTART), Standstill)
    found = next_of(scaled(dead, 1, "trainer", {"trainer/0": 0, "trainer/1": 1, "trainer/3": 1}))
    assert (found.members, found.hosts) == (("trainer/0", "trainer/1", "trainer/3"), (0, 1, 1))
    half = world(ended(Term(0), 7), Term(0), silent=(1,))
    waits = propose(scaled(half, 1, "trainer", {"trainer/0": 0, "trainer/2": 0}), RESTART)
    assert isinstance(waits, Standstill)
    assert "a pool goes on only with more than half of its workers" in waits.why


def test_a_pool_that_does_not_change_keeps_its_place() -> None:
    view = replace(world(ended(Term(0), 7)), hosts={"trainer/0": 0, "critic/0": 0})
    found = next_of(scaled(view, 3, "trainer", {"trainer/0": 0, "trainer/1": 0}))
    assert found.members == ("trainer/0", "trainer/1", "critic/0")
    assert next_of(scaled(view, 3, "critic", {"critic/1": 0})).members == ("trainer/0", "critic/1")
