"""From which checkpoint a term can begin, if every host tells what it has of each: the newest one that is whole.

Where hosts have run folders of their own, each has the parts of its own training workers. A checkpoint is whole as long
as every part of it lies on one of the hosts that are left: those that lack it get it from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from distflow.launch.cluster.host_report import Saved


@dataclass(frozen=True, slots=True)
class Choice:
    """Where to begin. `step` 0: at the beginning, since nothing was saved; None: what was saved cannot be used."""

    step: int | None
    term: int = 0
    """The one that wrote it."""
    lacking: str = ""
    """Which newer ones (or all, if `step` is None) cannot be used, and why: a sentence for people."""


def choose(checkpoints: Mapping[int, Iterable[Saved]], names: Mapping[int, str]) -> Choice:
    """`checkpoints`: what each host has. All that take part give the same, so that all come to the same."""
    found: dict[tuple[int, int], list[set[str]]] = {}
    for saved in (saved for host in sorted(checkpoints) for saved in checkpoints[host]):
        found.setdefault((saved.step, saved.term), []).append(set(saved.missing))
    lacking: list[str] = []
    for (step, term), missing in sorted(found.items(), reverse=True):
        nowhere = sorted(set.intersection(*missing))
        if not nowhere:
            return Choice(step, term, "; ".join(lacking))
        where = ", ".join(name for host, name in sorted(names.items()) if name)
        on = f" on {where}" if where else ""
        lacking.append(f"the checkpoint of training step {step} lacks {', '.join(nowhere)}{on}")
    if not found:
        return Choice(0)
    cure = "bring them back from the host that wrote them, and go on with --resume"
    return Choice(None, 0, f"{'; '.join(lacking)} — {cure}")
