"""The standard fields: what a step must have written into them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distflow.data.batch import Batch, Column, Ragged
from distflow.types import DROP_REASON, REWARD_PARTS

TOKENS = "response_ids"
A_TOKEN = (
    "response_mask",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "advantage",
    "return",
    "token_rewards",
    "token_advantage",
)
"""Fields with one value per response token: rows as long as those of `response_ids`."""
A_SAMPLE = ("reward", "score", "group", "sample", "finish_reason")
"""Fields with one value per sample."""
A_TEXT = (DROP_REASON, "prompt_text", "response_text", "task")


def wrong_shape(batch: Batch, written: Sequence[str]) -> str | None:
    """What a step should have written and what it wrote, for the first of these fields with a wrong shape.

    Other fields may have any shape.
    """
    for name in written:
        column = batch.columns.get(name)
        if column is None:
            continue
        if name in A_TOKEN and TOKENS in batch:
            complaint = _a_token(name, column, batch.ragged(TOKENS))
        elif name in A_SAMPLE or name.startswith(REWARD_PARTS):
            complaint = _a_sample(name, column, batch.rows)
        elif name in A_TEXT:
            complaint = _a_text(name, column)
        else:
            complaint = None
        if complaint is not None:
            return complaint
    return None


def _a_token(name: str, column: Column, responses: Ragged) -> str | None:
    if isinstance(column, Ragged):
        # Most steps write `responses.like(…)`, which shares the offsets.
        same = column.offsets is responses.offsets or torch.equal(column.offsets, responses.offsets)
        if same and column.values.dim() == 1:
            return None
    return (
        f"must write one value per response token into {name!r}, {responses.values.numel()} for this batch; it wrote "
        f"{_shown(column)} — {name}=responses.like(values) with responses = batch.ragged({TOKENS!r}), and for one "
        "value per sample values = values_B.repeat_interleave(responses.lengths)"
    )


def _a_sample(name: str, column: Column, rows: int) -> str | None:
    if not isinstance(column, Ragged) and tuple(column.shape) == (rows,):
        return None
    return f"must write one value per sample into {name!r}, a tensor of shape [{rows}]; it wrote {_shown(column)}"


def _a_text(name: str, column: Column) -> str | None:
    if isinstance(column, Ragged) and column.values.dtype == torch.uint8:
        return None
    return f"must write one text per sample into {name!r}; it wrote {_shown(column)} — {name}=Ragged.from_texts(texts)"


def _shown(column: Column) -> str:
    if isinstance(column, Ragged):
        return f"rows of {_counted(column.values.numel())} in all"
    return f"a tensor of shape {list(column.shape)}"


def _counted(count: int) -> str:
    return "1 value" if count == 1 else f"{count} values"
