"""An owner that makes the samples of its ledgers itself, of the rows of the data: nobody generates, or asks for leases.

Its ledgers are those of any other owner. Whatever may be leased is leased to nobody and arrives at once, so that the
gate, the order, stealing, dealing, calls on arrival and checkpoints are the same as with generating workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from distflow.data.batch import Batch, Ragged
from distflow.exchange.messages import Lease, LeasePrompt, Outgoing, Result
from distflow.exchange.owner import OwnerCore
from distflow.exchange.sample_channel import InboundSamples, Post
from distflow.types import FINISH_REASONS, GivenResponse, Version

Make = Callable[[Sequence[Lease]], Batch]
"""The samples of these leases, each group whole, in any order."""


def samples_of(leases: Sequence[Lease | LeasePrompt], responses: Mapping[int, Sequence[GivenResponse]]) -> Batch:
    """A row for each response that the data gives for these leases, or prompts; `responses` by prompt position."""
    given = [(lease, responses[lease.uid.position]) for lease in leases]
    rows = [(lease, number, response) for lease, several in given for number, response in enumerate(several)]
    ids = Ragged.from_rows([response.token_ids for _, _, response in rows], torch.int64)
    trained = [response.mask or [response.trains] * len(response.token_ids) for _, _, response in rows]
    fields = rows[0][2].fields if rows else ()
    return Batch(
        {
            "uid": torch.tensor([lease.uid for lease, _, _ in rows], dtype=torch.int64),
            "group": torch.tensor([lease.uid.position for lease, _, _ in rows], dtype=torch.int64),
            "sample": torch.tensor([number for _, number, _ in rows], dtype=torch.int64),
            "prompt_ids": Ragged.from_rows([lease.prompt_ids for lease, _, _ in rows], torch.int64),
            "prompt_text": Ragged.from_texts([lease.prompt_text for lease, _, _ in rows]),
            "task": Ragged.from_texts([lease.task for lease, _, _ in rows]),
            "response_ids": ids,
            "response_mask": Ragged.from_rows(trained, torch.bool),
            "response_text": Ragged.from_texts([response.text for _, _, response in rows]),
            "finish_reason": torch.full((len(rows),), FINISH_REASONS.index("stop")),
            **{name: torch.tensor([float(response.fields[name]) for _, _, response in rows]) for name in fields},
        }
    )


class OwnSamples(InboundSamples):
    """`make` is called under the worker's lock, as soon as the prompts of some leases are there."""

    def __init__(
        self, core: OwnerCore, post: Post, later_bytes: int = 0, asked_for: Sequence[str] = (), *, make: Make
    ) -> None:
        super().__init__(core, post, later_bytes, asked_for)
        self._make = make

    def send(self, out: Iterable[Outgoing]) -> None:
        """Send the core's messages; what happened in it may have opened leases."""
        super().send(out)
        self._fill(time.monotonic())

    def _fill(self, now: float) -> None:
        if self.core.finished:
            return
        leases = [entry.lease for entry in iter(partial(self.core.draw, now), None)]
        if leases:
            batch = self._make(leases)
            size = batch.nbytes // len(leases)
            self.store([self._result(lease, size) for lease in leases], batch, now)

    def _result(self, lease: Lease, size: int) -> Result:
        # As if begun on the oldest weights that the lease allows: what is read depends on none.
        oldest = Version(lease.term, lease.min_version)
        return Result(self.core.name, 0, lease.term, lease.position, lease.attempt, size, oldest, "", 0, (), 0)
