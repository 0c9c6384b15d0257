"""The workers of benchmark `step`: the cores, channel and endpoints of real ones, without a model.

A generating worker has its samples ready and finishes each group as soon as it is leased. A training worker owns
ledgers; it takes groups as they arrive and reads every byte of them once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from benchmarks.parts.worker import MeasuredWorker
from distflow.comm.keys import NetworkListener
from distflow.data.batch import Batch, Column, Ragged, RowRange, join
from distflow.exchange.lease_client import HolderCore
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import LeasePrompt
from distflow.exchange.owner import OwnerCore
from distflow.exchange.owner_links import Home
from distflow.exchange.sample_channel import ArrivedGroup, InboundSamples, OutboundSamples
from distflow.types import Uid

GROUP = 8
LEDGERS = 8
PROMPT = (1, 2)
FIELDS = {
    "response_ids": torch.int64,
    "attention_mask": torch.int64,
    "position_ids": torch.int64,
    "logprobs": torch.float32,
    "ref_logprobs": torch.float32,
    "advantages": torch.float32,
}
"""As many and of the same types as those of the other systems."""
TOKEN_BYTES = sum(dtype.itemsize for dtype in FIELDS.values())
SLOTS = 256
"""Samples that a generating worker takes at a time."""
IDLE_S = 0.25


@dataclass(frozen=True, slots=True)
class StepSetting:
    """What all workers of the benchmark know."""

    owners: tuple[str, ...]
    holders: tuple[str, ...]
    roster: Mapping[str, str]
    samples: int
    tokens: int
    steps: int
    listener: NetworkListener | None = None
    """Of a worker whose peers are on other hosts."""

    @property
    def share(self) -> int:
        """Samples of a training step that a worker generates, or trains on."""
        return self.samples // len(self.owners)

    @property
    def groups(self) -> int:
        """Of a training step."""
        return self.samples // GROUP

    def lease_settings(self) -> LeaseSettings:
        """The settings of leases, at staleness 0."""
        group_bytes = GROUP * (self.tokens * TOKEN_BYTES + 1024)
        memory = 2 * self.groups * group_bytes
        return LeaseSettings(
            LEDGERS, self.groups // LEDGERS, GROUP, 0, self.steps, memory, lambda prompt: group_bytes, len(PROMPT)
        )


class _Table:
    """Samples that a worker has generated, ready to be finished under any lease."""

    def __init__(self, rows: int, tokens: int) -> None:
        self._rows = rows
        self._next = 0
        offsets = torch.arange(0, (rows + 1) * tokens, tokens)
        values = {name: torch.ones(rows * tokens, dtype=dtype) for name, dtype in FIELDS.items()}
        self._columns = {name: Ragged(column, offsets) for name, column in values.items()}

    def groups(self, positions: Sequence[int], version: int) -> Batch:
        """The next samples, as groups of these positions, made of this policy version."""
        rows = GROUP * len(positions)
        first = self._next if self._next + rows <= self._rows else 0
        self._next = first + rows
        tokens = int(self._columns["response_ids"].lengths[0])
        columns: dict[str, Column] = {
            "group": torch.tensor(positions).repeat_interleave(GROUP),
            "policy_versions": Ragged(torch.tensor([[0, version, 0, tokens]] * rows), torch.arange(rows + 1)),
        }
        return Batch({**columns, **{name: column.slice(first, first + rows) for name, column in self._columns.items()}})


def generate(name: str, pipe: Connection, setting: StepSetting) -> None:
    """Finish the groups of all leases as they come. Orders: "usage"; and None to end."""
    worker = MeasuredWorker(name, setting.roster, setting.listener)
    settings = setting.lease_settings()
    holder = HolderCore(name, 0, setting.owners, settings, home=Home(setting.holders.index(name)))
    samples = OutboundSamples(holder, worker.post)
    table = _Table(max(SLOTS, setting.share), setting.tokens)
    worker.start(samples.on_message, lambda now: samples.send(holder.tick(now)))
    worker.meet(pipe)
    orders = threading.Thread(target=_obey, args=(pipe, worker), daemon=True)
    orders.start()
    while orders.is_alive():
        with worker.changed:
            leases = holder.take_granted()
            if leases:
                batch = table.groups([lease.position for lease in leases], leases[0].min_version)
                samples.finish(batch, {}, time.monotonic())
            samples.send(holder.want(SLOTS, time.monotonic()))
            if not leases:
                worker.changed.wait(IDLE_S)
    worker.endpoint.close()


def _obey(pipe: Connection, worker: MeasuredWorker) -> None:
    """Tell what has been used whenever it is asked; ends with the orders."""
    with suppress(EOFError):
        while pipe.recv() is not None:
            with worker.changed:
                pipe.send(worker.usage())


def train(name: str, pipe: Connection, setting: StepSetting) -> None:
    """Train on the samples of own ledgers. Orders: "step"; "usage"; None to end."""
    worker = MeasuredWorker(name, setting.roster, setting.listener)
    number = setting.owners.index(name)
    owner = OwnerCore(name, setting.lease_settings(), range(number, LEDGERS, len(setting.owners)), _prompt_at)
    samples = InboundSamples(owner, worker.post)
    worker.start(samples.on_message, lambda now: samples.send(owner.tick(now)))
    worker.meet(pipe)
    trained = 0
    while (order := pipe.recv()) is not None:
        if order == "step":
            _train_step(worker, owner, samples, trained)
            trained += 1
        pipe.send(worker.usage())
    worker.endpoint.close()


def _train_step(worker: MeasuredWorker, owner: OwnerCore, samples: InboundSamples, version: int) -> None:
    with worker.changed:
        if version > owner.version:
            samples.send(owner.advance(version, time.monotonic()))
    while not owner.step_complete():
        with worker.changed:
            worker.until(lambda: bool(owner.consumable()))
            positions = owner.consumable()
            samples.send(owner.take(positions, time.monotonic()))
            groups = samples.pop(positions)
        for batch in _joined(groups):
            _read(batch)


def _joined(groups: Sequence[ArrivedGroup]) -> Iterator[Batch]:
    """Groups that came together lie side by side."""
    arrived: dict[int, list[RowRange]] = {}
    for group in groups:
        arrived.setdefault(id(group.rows.batch), []).append(group.rows)
    for ranges in arrived.values():
        yield join(sorted(ranges, key=lambda rows: rows.start))


def _read(batch: Batch) -> None:
    """Every byte once, as the other systems do."""
    for name in FIELDS:
        batch.ragged(name).values.sum()


def _prompt_at(position: int) -> LeasePrompt:
    return LeasePrompt(Uid(0, position, position), PROMPT, "", "")
