"""The wait-for graph of the workers: edges from their status rows, and where chains of waiting end. Pure.

Example: trainer/0 waits for samples from rollout/0 and rollout/1; rollout/0 waits for leases from trainer/0; rollout/1
does not answer. All chains of edges end at rollout/1: everything waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
UNRESPONSIVE = "no answer"
GONE = ("gone", "ended")
SERVING = "serving"
"""State of a worker that only answers calls."""
CYCLE_S = 2.0
"""In healthy runs workers wait for each other for moments; a cycle that lasts longer than this is reported."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """`worker` has waited for `what` from the peers for `since_s` seconds."""

    worker: str
    what: str
    peers: tuple[str, ...]
    since_s: float

    def __str__(self) -> str:
        source = f" from {', '.join(self.peers)}" if self.peers else ""
        return f"{self.worker} waits for {self.what}{source} since {self.since_s:.1f} s"

    def as_json(self) -> dict[str, Any]:
        """As `status --json` has it."""
        return {"worker": self.worker, "for": self.what, "from": list(self.peers), "since_s": self.since_s}


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """The waits at one moment. `states`: by worker, as it reports; `silent`: why workers do not answer."""

    waits: tuple[Waiting, ...]
    states: Mapping[str, str]
    silent: Mapping[str, str]
    generating: frozenset[str] = frozenset()
    """Workers that generate samples."""

    def lines(self) -> list[str]:
        """In words: a line per wait and per silent worker, then the verdict."""
        lines = [str(wait) for wait in self.waits]
        lines += [f"{name} does not answer: it is {why}" for name, why in self.silent.items()]
        return [*lines, *([self.verdict()] if self.verdict() else [])]

    def verdict(self) -> str:
        """Where the chains end, in one line; empty: nothing to report."""
        waits = any(wait.peers for wait in self.waits)
        ends = self._ends()
        trouble = self.trouble()
        if not trouble and waits and len(ends) == 1 and self._all_reach(ends):
            return f"everything waits for {ends[0]}, which is {self._state(ends[0])}"
        return trouble

    def trouble(self) -> str:
        """The verdict if something is wrong, else empty."""
        if self.generating and all(map(self._is_gone, self.generating)) and self._waits_for_samples():
            names = ", ".join(sorted(self.generating))
            return f"no generating worker is left ({names}): nothing is sampled until one of them is restarted"
        ends = self._ends()
        held = [name for name in ends if name in self.silent or self._is_gone(name)]
        if held:
            names = ", ".join(held)
            who = "everything waits for" if self._all_reach(held) else f"{self._count(held)} for"
            return f"{who} {names}, which {self._fault(held)}"
        cycle = self._cycle()
        if cycle:
            names = ", ".join(cycle)
            return f"{names} wait for each other (deadlock): see their logs and `distflow stacks`"
        return ""

    def _waits_for_samples(self) -> bool:
        """Whether a worker still needs samples (rather than writing its last checkpoint, say)."""
        return any(wait.what.startswith("samples") for wait in self.waits)

    def _edges(self) -> dict[str, set[str]]:
        edges: dict[str, set[str]] = {}
        for wait in self.waits:
            edges.setdefault(wait.worker, set()).update(wait.peers)
        return edges

    def _reach(self, start: str) -> set[str]:
        """All workers that chains from one worker lead to, including itself."""
        edges, seen, front = self._edges(), {start}, [start]
        while front:
            for peer in edges.get(front.pop(), ()):
                if peer not in seen:
                    seen.add(peer)
                    front.append(peer)
        return seen

    def _ends(self) -> list[str]:
        """Workers that others wait for and that do not wait themselves."""
        named = {peer for wait in self.waits for peer in wait.peers}
        return sorted(named - {wait.worker for wait in self.waits if wait.peers})

    def _cycle(self) -> list[str]:
        """Workers that wait only for each other, if all of them have waited for a while."""
        since = {wait.worker: wait.since_s for wait in self.waits if wait.peers}
        for start in sorted(since):
            reach = self._reach(start)
            if len(reach) > 1 and all(since.get(name, 0.0) >= CYCLE_S for name in reach):
                return sorted(reach)
        return []

    def _all_reach(self, ends: Iterable[str]) -> bool:
        """Whether all other workers wait, directly or indirectly, for one of these. A service that nobody asks for
        anything has nothing to wait for.
        """
        waiting = {wait.worker for wait in self.waits if wait.peers}
        unasked = {wait.worker for wait in self.waits if not wait.peers and self._state(wait.worker) == SERVING}
        others = set(self.states) - set(ends) - unasked
        return others <= waiting and all(self._reach(name) & set(ends) for name in waiting)

    def _count(self, ends: Iterable[str]) -> str:
        reaching = [wait.worker for wait in self.waits if self._reach(wait.worker) & set(ends)]
        return f"{', '.join(reaching)} ultimately {'waits' if len(reaching) == 1 else 'wait'}"

    def _is_gone(self, name: str) -> bool:
        return self._state(name) in GONE

    def _state(self, name: str) -> str:
        return self.states.get(name, "not known here")

    def _fault(self, held: Sequence[str]) -> str:
        if any(name in self.silent for name in held):
            return "does not answer" if len(held) == 1 else "do not answer"
        states = " and ".join(dict.fromkeys(map(self._state, held)))
        return f"is {states}" if len(held) == 1 else f"are {states}"


def wait_graph(rows: Iterable[Row], why_silent: Mapping[str, str]) -> WaitGraph:
    """The graph of status rows. `why_silent`: the process states of workers that do not answer, by name."""
    known = list(rows)
    states = {str(row["name"]): str(row["state"]) for row in known}
    silent = {name: why_silent.get(name, "running") for name, state in states.items() if state == UNRESPONSIVE}
    generating = frozenset(str(row["name"]) for row in known if row.get("generates"))
    return WaitGraph(tuple(_waits(known)), states, silent, generating)


def _waits(rows: Iterable[Row]) -> Iterator[Waiting]:
    for row in rows:
        # Only rows of workers that have answered contain waits.
        for wait in row.get("waits", ()):
            yield Waiting(str(row["name"]), str(wait["name"]), tuple(wait["peers"]), float(wait["seconds"]))
