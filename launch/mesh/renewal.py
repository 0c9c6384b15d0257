"""When a training worker was killed, its pool begins anew from the last checkpoint, as its next term: who must end for
that, when it may begin, and at which training step. No process, socket or clock in here.

Every agent ends the training workers of its own host, then reports which checkpoints it has. The next term begins once
the agents of all hosts with training workers have said so: then none of the former term is left anywhere. Where it
begins follows from these reports alone, so all agents come to the same; one that is late finds others in the next term.

Example: trainer/1 on host 1 is killed in term 0. Host 1 reports term 0 broken; host 0 ends trainer/0 and reports it
ended, with checkpoints 20 and 40; host 1 has the same. Both begin term 1 at training step 40.
"""

from __future__ import annotations

from collections.abc import Mapping

from distflow.launch.mesh.core import Mesh
from distflow.launch.mesh.report import Report, Term


def is_broken(mesh: Mesh) -> bool:
    """Whether the pool's present term, as our own report has it, is over by anybody's account."""
    own = mesh.own.term
    return any(r.term.number > own.number or (r.term.number == own.number and r.term.broken) for r in _reports(mesh))


def next_term(mesh: Mesh, trainers: Mapping[str, int]) -> Term | None:
    """The term to begin now, once our own workers have ended; None: not yet. `trainers`: host by name."""
    own = mesh.own.term
    ahead = [report.term for report in _reports(mesh) if report.term.number > own.number]
    if ahead:
        newest = max(ahead, key=lambda term: term.number)
        return Term(newest.number, newest.step, newest.tries, reason=newest.reason)
    reports = [mesh.report(host) for host in sorted(set(trainers.values()))]
    there = [report.term for report in reports if report is not None and report.term.ended]
    if not is_broken(mesh) or len(there) < len(reports):
        return None
    common = set.intersection(*(set(term.checkpoints) for term in there))
    step = max(common, default=0)
    reason = next((term.reason for term in there if term.reason), "")
    return Term(own.number + 1, step, own.tries + 1 if step == own.step else 1, reason=reason)


def _reports(mesh: Mesh) -> list[Report]:
    return list(mesh.reports.values())
