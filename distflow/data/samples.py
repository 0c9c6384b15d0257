"""Samples of several sequences: each sequence is a row of the batch, and what belongs to the sample stands on all rows
(the text of the data's prompt, which may be long, on the first).

Rewards, advantages, means over sequences and metrics count samples, not rows. Where every sample is one row (field
`sequence` is absent, or 0 throughout), all views here are the batch itself. Which samples count where they are compared
with each other, `counts` says.

Shapes: B rows (sequences), S samples, N tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from distflow.data.batch import Batch, Column, Ragged
from distflow.types import A_TOKEN, FINISH_REASONS, LEFT_OUT, REWARD, SEQUENCE, TOKENS, Scores, Uid

SHARE = "sample_share"
"""[B] float64: how much of its sample each row is, by tokens trained on; the shares of a sample add up to 1."""
PROMPT_TEXT = "prompt_text"
MASK = "response_mask"
FINISHED = "finish_reason"
OUT_OF_LOSS = "out_of_loss"
"""[B] bool, only while a model is updated: rows whose tokens `batch.mask_truncated: loss` keeps out of the loss. Their
samples count all the same."""
_OF_SEQUENCES = ("prompt_ids", "policy_versions", SEQUENCE, "sequence_prompt")
"""Fields of which a sample has none of its own."""


def has_several(batch: Batch) -> bool:
    """Whether a sample has more than one row."""
    return SEQUENCE in batch and bool(batch.dense(SEQUENCE).any())


def sample_bounds(batch: Batch) -> list[int]:
    """Row numbers at which samples begin, and the number of rows as the last entry: [0, 1, 3] for 1 row and 2 rows."""
    if SEQUENCE not in batch:
        return [*range(batch.rows + 1)]
    return [*(batch.dense(SEQUENCE) == 0).nonzero().flatten().tolist(), batch.rows]


def by_sample(batch: Batch) -> Batch:
    """One row a sample: of fields with a value per response token its sequences one behind the other, in the order in
    which they ended; of others, what the last sequence has. Fields that only sequences have are left out.

    The tokens keep their order, so values for them go back by `batch.ragged("response_ids").like(values)`.
    """
    if not has_several(batch):
        return batch
    bounds = torch.tensor(sample_bounds(batch))
    offsets = batch.ragged(TOKENS).offsets
    last, joined = bounds[1:] - 1, offsets[bounds]
    columns: dict[str, Column] = {}
    for name, column in batch.columns.items():
        if name in _OF_SEQUENCES:
            continue
        if not isinstance(column, Ragged):
            columns[name] = column[last]
        elif _a_token(name, column, offsets):
            columns[name] = Ragged(column.values, joined)
        else:
            columns[name] = column.select(bounds[:-1] if name == PROMPT_TEXT else last)
    return Batch(columns)


def sequence_ends(batch: Batch) -> Ragged | None:
    """The last token of each sequence, in rows of samples, as bool; None where every sample is one row."""
    if not has_several(batch):
        return None
    responses = batch.ragged(TOKENS)
    ends = torch.zeros(len(responses.values), dtype=torch.bool)
    ends[responses.offsets[1:][responses.lengths > 0] - 1] = True
    return by_sample(batch).ragged(TOKENS).like(ends)


def to_rows(batch: Batch, of_samples: Tensor) -> Tensor:
    """[S, …] → [B, …]: what samples have, on each of their rows."""
    return of_samples.repeat_interleave(torch.tensor(sample_bounds(batch)).diff(), 0)


def last_rows(batch: Batch) -> Batch:
    """The last sequence of each sample: the one with its final response; with the text of the data's prompt."""
    if not has_several(batch):
        return batch
    *first, _ = bounds = sample_bounds(batch)
    last = batch.select([end - 1 for end in bounds[1:]])
    if PROMPT_TEXT not in batch:
        return last
    return last.with_columns(**{PROMPT_TEXT: batch.ragged(PROMPT_TEXT).select(torch.tensor(first))})


def counts(batch: Batch) -> Tensor:
    """[S] bool: which samples count in what compares them: means, deviations and baselines of groups and of batches,
    whitening, filters, and metrics of scores, rewards and advantages.

    One that is left out (field `left_out`) does not, nor one without a token trained on, such as the greedy sample that
    is only a baseline. Where neither field is there, all do.
    """
    samples = by_sample(batch)
    found_S = torch.ones(samples.rows, dtype=torch.bool)
    if MASK in samples:
        mask = samples.ragged(MASK)
        before = torch.cat([torch.zeros(1, dtype=torch.int64), mask.values.long().cumsum(0)])
        found_S = before[mask.offsets].diff() > 0
    if OUT_OF_LOSS in samples:
        found_S = found_S | samples.dense(OUT_OF_LOSS)
    return found_S & ~left_out(samples)


def compared(batch: Batch, *, baseline: bool) -> Tensor:
    """[S] bool: samples whose rewards tell whether a group has something to learn from: those that count, and where
    the flow has a `baseline`, the samples without a token trained on, since one of them is what the others are compared
    with."""
    return ~left_out(by_sample(batch)) if baseline else counts(batch)


def lack_others(batch: Batch) -> Tensor:
    """[S] bool: samples that count and have nothing to be compared with, since all others of their group do not count
    and one of them was left out."""
    samples, counted_S = by_sample(batch), counts(batch)
    found_S, out_S = torch.zeros_like(counted_S), left_out(samples)
    for first, end in pairwise(samples.group_bounds()) if bool(out_S.any()) else ():
        if bool(out_S[first:end].any()) and int(counted_S[first:end].sum()) == 1:
            found_S[first:end] = counted_S[first:end]
    return found_S


def untrained_where_left_out(batch: Batch) -> Batch:
    """The batch with no token trained on, of any model, in rows with a reason in `left_out`."""
    if LEFT_OUT not in batch or not batch.ragged(LEFT_OUT).values.numel():
        return batch
    kept_B = ~left_out(batch)
    masks = {name: batch.ragged(name) for name in batch.columns if name.rpartition("/")[2] == MASK}
    cleared = {n: mask.like(mask.values & kept_B.repeat_interleave(mask.lengths)) for n, mask in masks.items()}
    return batch.with_columns(**cleared)


def unrewarded_where_failed(batch: Batch) -> Batch:
    """The batch with reward and score 0 for samples on which the generate step of their model failed."""
    columns: dict[str, Column] = {}
    for name in (name for name in batch.columns if name.rpartition("/")[2] == FINISHED):
        failed_B = failed(batch, name)
        rewards = [field for field in (REWARD, "score") if bool(failed_B.any())]
        for own in (name.removesuffix(FINISHED) + field for field in rewards):
            columns |= {own: batch.dense(own).masked_fill(failed_B, 0.0)} if own in batch else {}
    return batch.with_columns(**columns) if columns else batch


def failed(batch: Batch, field: str = FINISHED) -> Tensor:
    """[B] bool: rows of samples on which the generate step failed."""
    if field not in batch:
        return torch.zeros(batch.rows, dtype=torch.bool)
    return batch.dense(field) == FINISH_REASONS.index("error")


def out_of_loss(batch: Batch) -> Batch:
    """The batch as steps that train a model see it under `batch.mask_truncated: loss`: no token of a response that was
    cut off is trained on, and field `out_of_loss` says which samples count nevertheless (DAPO, arXiv 2503.14476,
    section 3.4). Samples without a token trained on have nothing to leave out."""
    cut_S = (by_sample(batch).dense("finish_reason") == FINISH_REASONS.index("length")) & counts(batch)
    cut_B, mask = to_rows(batch, cut_S), batch.ragged(MASK)
    kept = mask.values & ~cut_B.repeat_interleave(mask.lengths)
    return batch.with_columns(response_mask=mask.like(kept), out_of_loss=cut_B)


def in_loss_again(masked: Batch, before: Batch) -> Batch:
    """`masked`, what `out_of_loss` made of a batch, with the masks that the batch had before."""
    columns = {name: column for name, column in masked.columns.items() if name != OUT_OF_LOSS}
    return Batch({name: before[name] if name == MASK else column for name, column in columns.items()})


def left_out(batch: Batch) -> Tensor:
    """[B] bool: rows with a reason to be left out."""
    if LEFT_OUT not in batch:
        return torch.zeros(batch.rows, dtype=torch.bool)
    return batch.ragged(LEFT_OUT).lengths > 0


def group_scores(batch: Batch) -> dict[Uid, Scores]:
    """What the samples of each group scored: field `score`, or without it the reward; none if nothing judged them.

    Samples that are left out have none, and groups of which all are left out are missing.
    """
    field = next((name for name in ("score", REWARD) if name in batch), None)
    if field is None or "uid" not in batch:
        return {}
    rows = last_rows(batch.only([name for name in ("uid", "group", SEQUENCE, LEFT_OUT, field) if name in batch]))
    if LEFT_OUT in rows:
        rows = rows.select((~left_out(rows)).nonzero().flatten())
    scores, uids, bounds = rows.dense(field).tolist(), rows.dense("uid").tolist(), rows.group_bounds()
    return {Uid(*uids[a]): tuple(scores[a:b]) for a, b in pairwise(bounds)}


def on_all_rows(batch: Batch, last: Batch, written: Batch) -> Batch:
    """`written`, a batch with the rows of `last`, `last_rows(batch)`, with the rows of `batch` again: new columns hold
    for all sequences of a sample."""
    if last is batch:
        return written
    index = to_rows(batch, torch.arange(last.rows))
    return Batch(
        {
            name: batch[name] if name in last and column is last[name] else _select(column, index)
            for name, column in written.columns.items()
        }
    )


def with_shares(batch: Batch) -> Batch:
    """The batch with field `sample_share`, if a sample has more than one row. Needs all rows of each sample."""
    if not has_several(batch):
        return batch
    tokens = torch.stack([row.sum() for row in batch.ragged("response_mask").rows()]).double()
    of_samples = torch.stack([tokens[a:b].sum() for a, b in pairwise(sample_bounds(batch))])
    return batch.with_columns(**{SHARE: tokens / to_rows(batch, of_samples).clamp(min=1)})


def with_share(fields: Sequence[str], batch: Batch) -> list[str]:
    """These fields, with `sample_share` if the batch has it."""
    return [*fields, SHARE] if SHARE in batch else [*fields]


def _a_token(name: str, column: Ragged, offsets: Tensor) -> bool:
    if name == TOKENS or name in A_TOKEN:
        return True
    return column.values.dtype != torch.uint8 and torch.equal(column.offsets, offsets)


def _select(column: Column, index: Tensor) -> Column:
    return column.select(index) if isinstance(column, Ragged) else column[index]
