"""What a step with a `prefix` sees of a batch: the samples of a further model, by the names of those of the policy.

Example, prefix solver: fields group, reward, solver/reward → the step sees group, and solver/reward as reward; what it
writes as score is solver/score in the batch.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from distflow.data.batch import Batch, Column, Ragged
from distflow.types import IDENTITY, prefixed


def own_fields(batch: Batch, prefix: str) -> Batch:
    """The batch as a step with this prefix sees it; the batch itself without one."""
    if not prefix:
        return batch
    lead = f"{prefix}/"
    known = {name: column for name, column in batch.columns.items() if name in IDENTITY}
    return Batch(known | {n.removeprefix(lead): column for n, column in batch.columns.items() if n.startswith(lead)})


def with_own(batch: Batch, seen: Batch, written: Batch, prefix: str) -> Batch:
    """The batch with what a step has written; `seen`: what it was given, `written`: that with its new columns."""
    if not prefix:
        return written
    new = {name: column for name, column in written.columns.items() if column is not seen.columns.get(name)}
    return batch.with_columns(**{prefixed(name, prefix): column for name, column in new.items()}) if new else batch


def prompts_complaint(rows: Batch, samples: int, longest: int) -> str | None:
    """What is wrong with one group's prompts for a further model, as its generate step sees them; None: nothing.

    `samples`: of each group; `longest`: most tokens of a prompt.
    """
    uid, group, numbers = (rows[name] for name in ("uid", "group", "sample"))
    if not (isinstance(uid, Tensor) and isinstance(group, Tensor) and isinstance(numbers, Tensor)):
        return "has more than one value a row in uid, group or sample"
    if uid.shape != (rows.rows, 3) or not bool((uid[:, 2] == group).all()):
        return f"has uid of shape {list(uid.shape)}, not the prompt position of its group in each row"
    if numbers.tolist() != list(range(samples)) or len(set(group.tolist())) != 1:
        return f"has samples {numbers.tolist()} of groups {group.tolist()}; expected 0 to {samples - 1} of one group"
    return _tokens_complaint(rows["prompt_ids"], longest) or _texts_complaint(rows)


def _tokens_complaint(column: Column, longest: int) -> str | None:
    if not isinstance(column, Ragged) or column.values.dtype != torch.int64 or column.values.dim() != 1:
        return "has prompt_ids that are no rows of int64 token ids"
    lengths = column.lengths
    if not 1 <= int(lengths.min()) <= int(lengths.max()) <= longest:
        return (
            f"has prompts of {int(lengths.min())} to {int(lengths.max())} tokens; expected 1 to {longest} "
            "(data.max_prompt_tokens)"
        )
    return None if int(column.values.min()) >= 0 else "has a negative token id"


def _texts_complaint(rows: Batch) -> str | None:
    for name in ("prompt_text", "task"):
        column = rows[name]
        if not isinstance(column, Ragged) or column.values.dtype != torch.uint8:
            return f"has no texts in {name}"
        try:
            texts = column.texts()
            tasks = [json.loads(text) for text in texts] if name == "task" else []
        except ValueError as error:
            return f"has a {name} that is no {'JSON' if name == 'task' else 'text'}: {error}"
        if any(not isinstance(task, dict) for task in tasks):
            return "has a task that is no JSON object"
    return None
