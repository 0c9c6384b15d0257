"""Computes the parts of a batch one after another, in as much memory as there is.

A micro-batch for which the memory does not suffice is computed again, in parts of half its size, where that is right:
the backend has forgotten what the failed one has left (`distflow.runtime.protocols.Repeats`), and no group is divided
whose samples are compared. The smaller size holds for the rest of the run. Elsewhere the run ends, and says how long
the rows are, and what to do.

What a train step counts and measures of a part, it writes when the part's backward is done, so that nothing counts
twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from distflow.data.batch import Batch, Ragged, part_lengths
from distflow.data.micro_batches import micro_batches
from distflow.errors import WorkerFailed
from distflow.log import logger
from distflow.parts import tokens_of, whole_lengths
from distflow.runtime.protocols import Backend, Repeats
from distflow.runtime.steps import StepContext, shown_uids

T = TypeVar("T")
Cut = Callable[[Batch, int, bool], Iterable[tuple[Tensor, Batch]]]
"""The parts of a batch within a budget of tokens, of a model that packs or not: the row numbers of each, and what is
computed of it."""
_ANSWER = ("prompt_ids", "response_ids")
_TOO_LITTLE = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "HIP out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",
)
"""How PyTorch says it where it does not raise OutOfMemoryError: libraries beside its own allocator, and a CPU's."""
log = logger(__name__)


class PartLoss(NamedTuple):
    """Loss that a train step has computed of one micro-batch."""

    total: Tensor
    """The summed loss, with a gradient."""
    denominator: float
    """What it is divided by, together with those of the other parts."""
    note: Callable[[], None]
    """Write the part's metrics."""
    additive: bool = True
    """Whether the denominators of all parts add up; else the same one holds for all."""


def cut_by(fields: Sequence[str], *, whole_groups: bool = False) -> Cut:
    """Micro-batches with these fields; see `distflow.data.micro_batches.micro_batches`."""

    def cut(batch: Batch, tokens: int, packs: bool) -> Iterator[tuple[Tensor, Batch]]:
        return micro_batches(batch, tokens, fields, whole_groups=whole_groups, packs=packs)

    return cut


def accumulate(
    batch: Batch, ctx: StepContext, loss_of: Callable[[Batch], PartLoss | None], cut: Cut, *, of: str = "actor"
) -> None:
    """Accumulate the gradient of a loss over a batch, part by part.

    `loss_of` returns that of a part, or None where nothing in it is trained on. `of`: what names of its metrics begin
    with. Adds the divisors to the context. Raises WorkerFailed if the memory does not suffice.
    """

    def compute(part: Batch) -> PartLoss | None:
        loss = loss_of(part)
        if loss is not None:
            ctx.backend.accumulate(loss.total)
        return loss

    for rows, loss in in_parts(batch, ctx, compute, cut):
        if loss is None:
            continue
        assert ctx.model is not None, "ctx.backend has looked the model up"
        if loss.additive:
            ctx.denominators[ctx.model] = ctx.denominators.get(ctx.model, 0.0) + loss.denominator
        else:
            ctx.fixed_denominators[ctx.model] = loss.denominator
        if not math.isfinite(value := float(loss.total.detach())):
            # Its gradient may be finite all the same: then the update is made, and nothing else would tell.
            ctx.metrics.add(f"{of}/nonfinite_losses", 1)
            log.warning(
                "training step %d: step %r on %s has a loss of %s in a micro-batch of %s",
                ctx.training_step + 1,
                ctx.step_name,
                ctx.worker,
                value,
                shown_uids(batch.select(rows)),
            )
        loss.note()


def in_micro_batches(batch: Batch, ctx: StepContext, compute: Callable[[Batch], Tensor]) -> Ragged:
    """One value for each response token of a batch, computed in micro-batches.

    `compute` returns those of a part [N], row after row. Raises WorkerFailed if the memory does not suffice.
    """
    if not len(batch):
        return batch.ragged("response_ids").like(torch.empty(0))
    (column,) = columns_in_micro_batches(batch, ctx, lambda part: (compute(part),))
    return column


def columns_in_micro_batches(
    batch: Batch, ctx: StepContext, compute: Callable[[Batch], Sequence[Tensor]]
) -> tuple[Ragged, ...]:
    """Compute several columns as `in_micro_batches` does one, of a batch that is not empty: one value or more for
    each token.

    `compute` returns those of a part, [N, …] each.
    """
    lengths, rows = batch.ragged("response_ids").lengths, dict[int, tuple[Tensor, ...]]()
    for numbers, found in in_parts(batch, ctx, compute, cut_by(_ANSWER)):
        columns = zip(*(torch.split(values, lengths[numbers].tolist()) for values in found), strict=True)
        rows.update(zip(numbers.tolist(), columns, strict=True))
    together = zip(*(rows[row] for row in range(len(batch))), strict=True)
    return tuple(batch.ragged("response_ids").like(torch.cat(values)) for values in together)


def in_parts(batch: Batch, ctx: StepContext, compute: Callable[[Batch], T], cut: Cut) -> Iterator[tuple[Tensor, T]]:
    """Compute all parts of a batch, cut by `ctx.tokens_per_microbatch`; yield the rows of each and what it gave.

    Every row is in exactly one part that is yielded. Raises WorkerFailed if the memory does not suffice.
    """
    left = torch.arange(len(batch))
    while len(left):
        here = batch if len(left) == len(batch) else batch.select(left)
        undone = torch.ones(len(left), dtype=torch.bool)
        for rows, part in cut(here, ctx.tokens_per_microbatch, ctx.packs):
            found, trouble = _attempt(compute, part)
            if found is None:
                # Cut anew, with all that is still to come.
                _halve(here.select(rows), ctx, trouble, cut)
                break
            undone[rows] = False
            yield left[rows], found[0]
        left = left[undone]


def _attempt(compute: Callable[[Batch], T], part: Batch) -> tuple[tuple[T] | None, str]:
    """Return what was computed; or None, and what PyTorch said, if the memory does not suffice.

    What was allocated until then is free once this has returned, since the error, with its frames, is gone.
    """
    try:
        return (compute(part),), ""
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error).partition("\n")[0] or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory does not suffice, of a GPU or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _TOO_LITTLE)


def _halve(part: Batch, ctx: StepContext, trouble: str, cut: Cut) -> None:
    """Let further parts have at most half the tokens of this one. Raises WorkerFailed where that helps nothing."""
    backend, before, rows = ctx.backend, ctx.tokens_per_microbatch, len(part)
    longest = max(whole_lengths(part_lengths(part)))
    forgotten = isinstance(backend, Repeats) and backend.forget_failed()
    # It does nothing where no GPU is in use.
    torch.cuda.empty_cache()
    alone = len([*cut(part, 1, ctx.packs)]) == 1
    if alone or not forgotten:
        raise WorkerFailed(_too_little(part, ctx, trouble, _why_not(backend, rows, forgotten=forgotten)))
    half = tokens_of(part_lengths(part), packs=ctx.packs) // 2
    ctx.tokens_per_microbatch = max(1, min(half, before // 2) if before else half)
    ctx.metrics.add("perf/halved_microbatches", 1)
    log.warning(
        "step %r on %s: out of memory (%s) in a micro-batch of %d rows of up to %d tokens; it is computed again in "
        "parts of at most %d tokens, and so are all further ones (batch.tokens_per_microbatch is %s)",
        ctx.step_name,
        ctx.worker,
        trouble,
        rows,
        longest,
        ctx.tokens_per_microbatch,
        before or "without limit",
    )


def _why_not(backend: Backend, rows: int, *, forgotten: bool) -> str:
    if backend.lockstep:
        return "the model is divided over training workers, which compute each micro-batch together, and only once"
    if not forgotten:
        return "gradients of a part of it may be among those of earlier ones, so that it cannot be computed again"
    if rows == 1:
        return "a single row cannot be halved"
    return "the samples of a group, which are compared, stay together"


def _too_little(part: Batch, ctx: StepContext, trouble: str, why: str) -> str:
    longest, section = max(whole_lengths(part_lengths(part))), f"models.{ctx.model}"
    return (
        f"training step {ctx.training_step + 1}: step {ctx.step_name!r} on {ctx.worker} is out of memory ({trouble}) "
        f"in a micro-batch of {len(part)} rows of up to {longest} tokens, prompt and response, {shown_uids(part)}; "
        f"{why}. Set batch.tokens_per_microbatch lower (it is {ctx.tokens_per_microbatch or 'without limit'}; a single "
        f"row of {longest} tokens is computed whatever it says), {section}.gradient_checkpointing: true or dtype: "
        "bfloat16; make rows shorter (data.max_prompt_tokens, max_new_tokens); or divide the model: backend fsdp"
    )
