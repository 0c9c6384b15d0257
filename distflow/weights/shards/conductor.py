"""Who is in the group that moves a model's weights in parts, and which version goes to whom: no socket, no clock.

The first trainer of the model decides. Members report to it what they are in and what they have done; a group is made
of all trainers and of the readers that are present, and made anew, with the next epoch, whenever one of these is lost,
fails or comes. A version is sent once every trainer has a copy of it, to the readers that are free at that moment. The
others take it by the links that always work, on which it has been announced before; so nobody waits for this one.

Example: trainer/0 and trainer/1 have reported what they hold, rollout/0 is present: epoch 0 of these three. All report
epoch 0. Version 3 is published, trainers report copies of 3: go, to rollout/0. It reports done 3, trainers do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from distflow.errors import UserError
from distflow.weights.manifest import DTYPE_BYTES, Manifest, TensorEntry
from distflow.weights.shards.messages import GO, GROUP, HeldRange, ShardGo, ShardGroup, ShardReport
from distflow.weights.shards.plan import Box, RankPart, TensorLayout, boxes_of, plan_pieces

SETTLE_S = 1.0
"""Readers that come within this time are taken into one group."""
FORM_S = 10.0
"""For making a group."""
SILENT_S = 4.0
"""A reader that has not reported for so long when a group has failed is left out until it reports again."""
WAIT_S = 0.3
"""How long a version waits for readers that are about to be free, if one is free already."""
AGAIN_S = (1.0, 60.0)
"""After a group has failed the next is made this much later, twice that after the second failure, up to the latter."""


class ShardMessage(NamedTuple):
    """A message to send; to the conductor's own worker too."""

    to: str
    kind: str
    body: Mapping[str, Any]


def tensor_layouts(
    entries: Sequence[TensorEntry], held: Sequence[Sequence[HeldRange]], targets: Iterable[int]
) -> list[TensorLayout]:
    """Where each published tensor is, and that each target wants all of it.

    Raises ValueError for tensors that trainers hold under other names, in other shapes or in other types.
    """
    ranges: dict[str, list[tuple[int, HeldRange]]] = {}
    for rank, own in enumerate(held):
        for one in own:
            ranges.setdefault(one.name, []).append((rank, one))
    targets, out = tuple(targets), []
    for entry in entries:
        found = ranges.get(entry.name, [])
        for _, one in found:
            if (one.shape, one.dtype) != (entry.shape, entry.dtype):
                raise ValueError(
                    f"{entry.name!r} is held as {one.dtype} {list(one.shape)} and published as {entry.dtype} "
                    f"{list(entry.shape)}"
                )
        sources = [RankPart(rank, box) for rank, one in found for box in boxes_of(one.shape, one.start, one.count)]
        wanted = tuple(RankPart(rank, Box.whole(entry.shape)) for rank in targets)
        out.append(TensorLayout(entry.name, entry.shape, DTYPE_BYTES[entry.dtype], tuple(sources), wanted))
    return out


class ShardConductor:
    """Of the group of `model` in one term; `trainers` in order, the first of which this is."""

    def __init__(self, model: str, term: int, trainers: Sequence[str]) -> None:
        self._model = model
        self._term = term
        self._trainers = tuple(trainers)
        self._reports: dict[str, ShardReport] = {}
        self._heard_at: dict[str, float] = {}
        self._present: tuple[str, ...] = ()
        self._changed_at = 0.0
        self._suspects: set[str] = set()
        self._newest: Manifest | None = None
        self._newest_at = 0.0
        self._sent = -1
        """The last version that was sent."""
        self._told: dict[str, int] = {}
        """The last version that each member of the group was told to send or take."""
        self._members: tuple[str, ...] = ()
        self._held: dict[str, tuple[HeldRange, ...]] = {}
        self._formed = False
        self._form_until = 0.0
        self._form_at = 0.0
        self._failures = 0
        self._fits = False
        self.epoch = -1

    @property
    def members(self) -> tuple[str, ...]:
        """Of the group that all have made; none if there is none."""
        return self._members if self._formed else ()

    def report(self, sender: str, report: ShardReport, now: float) -> list[ShardMessage]:
        """Take what a member says of itself."""
        if report.term != self._term:
            return []
        self._reports[sender], self._heard_at[sender] = report, now
        self._suspects.discard(sender)
        if report.held and sender in self._trainers:
            self._held[sender] = report.held
        return self.tick(self._present, now)

    def announce(self, manifest: Manifest, now: float) -> list[ShardMessage]:
        """A version was published. Raises UserError if trainers do not hold what is published."""
        self._newest, self._newest_at = manifest, now
        return self.tick(self._present, now)

    def lost(self, name: str, now: float) -> list[ShardMessage]:
        """A worker has left or died."""
        self._reports.pop(name, None)
        if name in self._members:
            self._disband(now, failed=False)
        return self.tick([one for one in self._present if one != name], now)

    def tick(self, present: Sequence[str], now: float) -> list[ShardMessage]:
        """Look what is to be done; `present`: the readers that are there."""
        if tuple(present) != self._present:
            self._present, self._changed_at = tuple(present), now
        if self._members:
            self._look_at_group(now)
        if not self._members:
            return self._form(now)
        return self._go(now)

    def _look_at_group(self, now: float) -> None:
        there = [name in self._reports and self._reports[name].epoch == self.epoch for name in self._members]
        if not self._formed:
            self._formed = all(there)
            if not self._formed and now > self._form_until:
                self._disband(now, failed=True)
        elif not all(there):
            self._disband(now, failed=True)
        elif self._idle(self._members) and self._settled(now) and set(self._wanted()) - set(self._members):
            self._disband(now, failed=False)

    def _disband(self, now: float, *, failed: bool) -> None:
        if failed:
            self._failures += 1
            silent = (name for name in self._members if now - self._heard_at.get(name, -SILENT_S) >= SILENT_S)
            self._suspects.update(name for name in silent if name not in self._trainers)
            self._form_at = now + min(AGAIN_S[0] * 2 ** (self._failures - 1), AGAIN_S[1])
        self._members, self._formed = (), False
        self._told.clear()

    def _wanted(self) -> tuple[str, ...]:
        return tuple(name for name in self._present if name not in self._suspects)

    def _settled(self, now: float) -> bool:
        return now - self._changed_at >= SETTLE_S

    def _form(self, now: float) -> list[ShardMessage]:
        readers, newest = self._wanted(), self._newest
        if not readers or newest is None or now < self._form_at or not self._settled(now):
            return []
        if not all(name in self._held for name in self._trainers):
            return []
        held = tuple(self._held[name] for name in self._trainers)
        self._check(newest, held)
        self.epoch += 1
        self._members, self._formed, self._form_until = (*self._trainers, *readers), False, now + 2 * FORM_S
        group = ShardGroup(self._model, self._term, self.epoch, self._members, held)
        return self._to(self._members, GROUP, group)

    def _check(self, manifest: Manifest, held: Sequence[Sequence[HeldRange]]) -> None:
        if self._fits:
            return
        try:
            plan_pieces(tensor_layouts(manifest.entries, held, [len(held)]))
        except ValueError as error:
            raise UserError(
                f"weights.link: collective: {manifest.title} cannot be sent in the parts that the trainers hold: "
                f"{error} — set weights.link to auto for this model"
            ) from error
        self._fits = True

    def _idle(self, members: Iterable[str]) -> bool:
        return all(self._reports[name].done >= self._told.get(name, -1) for name in members)

    def _go(self, now: float) -> list[ShardMessage]:
        newest = self._newest
        if not self._formed or newest is None or newest.version.number <= self._sent:
            return []
        number, readers = newest.version.number, self._members[len(self._trainers) :]
        have = all(number in self._reports[name].numbers for name in self._trainers)
        if not have or not self._idle(self._trainers):
            return []
        free = tuple(name for name in readers if self._reports[name].free and self._idle([name]))
        if not free or (len(free) < len(readers) and now - self._newest_at < WAIT_S):
            return []
        self._sent, self._failures = number, 0
        told = (*self._trainers, *free)
        self._told |= dict.fromkeys(told, number)
        return self._to(told, GO, ShardGo(self._model, self.epoch, free, newest))

    def _to(self, members: Sequence[str], kind: str, what: ShardGroup | ShardGo) -> list[ShardMessage]:
        body: dict[str, Any] = msgspec.to_builtins(what, builtin_types=(bytes,))
        return [ShardMessage(name, kind, body) for name in members]
