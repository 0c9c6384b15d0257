"""Self-play of a proposer and a solver: what one has written becomes the prompts of the other."""

from __future__ import annotations

import json
from itertools import pairwise

import torch

from distflow.data.batch import Batch, Column, Ragged
from distflow.flow.step import step
from distflow.runtime.steps import StepContext
from distflow.types import FINISH_REASONS


@step(
    role="score",
    reads=["response_text", "finish_reason", "prompt_ids", "prompt_text", "task", "group"],
    writes=["solver/prompt_ids", "solver/prompt_text", "solver/task", "rewards/valid"],
    scope="group",
)
def propose(batch: Batch, ctx: StepContext) -> Batch:
    """Write the solver's prompt, `407=` to be answered by `407`, from what the proposer has written.

    A valid task is nothing but digits, ended by the proposer, and no other one of its group is the same: else all would
    soon be one and the same. `rewards/valid` [B] is 0 for anything else: there the solver gets the task of the data.
    """
    assert ctx.tokenizer is not None, "every worker has a tokenizer"
    valid = _valid(batch)
    written, prompts, tasks = (batch.texts(name) for name in ("response_text", "prompt_text", "task"))
    ids = [row.tolist() for row in batch.ragged("prompt_ids").rows()]
    for row in (row for row, fine in enumerate(valid) if fine):
        prompts[row], tasks[row] = f"{written[row]}=", json.dumps({"answer": written[row]})
        ids[row] = ctx.tokenizer.encode(prompts[row], begins=True)
    columns: dict[str, Column] = {
        "solver/prompt_ids": Ragged.from_rows(ids, torch.int64),
        "solver/prompt_text": Ragged.from_texts(prompts),
        "solver/task": Ragged.from_texts(tasks),
        "rewards/valid": torch.tensor(valid, dtype=torch.float32),
    }
    return batch.with_columns(**columns)


def _valid(batch: Batch) -> list[bool]:
    ended = (batch.dense("finish_reason") == FINISH_REASONS.index("stop")).tolist()
    written = batch.texts("response_text")
    valid = []
    for first, last in pairwise(batch.group_bounds()):
        had = set[str]()
        for row in range(first, last):
            text = written[row]
            valid.append(bool(ended[row]) and text.isascii() and text.isdecimal() and text not in had)
            had.add(text)
    return valid


@step(
    role="score",
    reads=["rewards/valid", "solver/reward", "solver/prompt_text"],
    writes=["reward", "score"],
    scope="sample",
    choices={"digits": ">= 1"},
)
def within_reach(batch: Batch, ctx: StepContext, *, digits: int = 3) -> Batch:
    """Write the proposer's `reward` [B]: 0 without a valid task; 1/2 for one, and up to 1/2 more for what the solver
    gets right of it, as a share of a task of so many `digits`, so that tasks grow as far as the solver can follow, up
    to that length.

    `score` [B] is 1 for a valid task.
    """
    valid, solved = batch.dense("rewards/valid"), batch.dense("solver/reward")
    lengths = torch.tensor([len(text) - 1 for text in batch.texts("solver/prompt_text")])
    return batch.with_columns(reward=valid * (1 + solved * lengths.clamp(max=digits) / digits) / 2, score=valid)
