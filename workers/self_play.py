"""Self-play of a proposer and a solver: what one has written becomes the prompts of the other."""

from __future__ import annotations

import json

import torch

from distflow.data.batch import Batch, Column, Ragged
from distflow.flow.step import step
from distflow.runtime.steps import StepContext
from distflow.types import FINISH_REASONS


@step(
    role="score",
    reads=["response_text", "finish_reason", "prompt_ids", "prompt_text", "task"],
    writes=["solver/prompt_ids", "solver/prompt_text", "solver/task", "rewards/valid"],
    scope="sample",
)
def propose(batch: Batch, ctx: StepContext) -> Batch:
    """Write the solver's prompt, `407=` to be answered by `407`, from digits that the proposer has written and ended.

    Anything else is no task: `rewards/valid` [B] is 0 there, and the solver gets the task of the data instead.
    """
    assert ctx.tokenizer is not None, "every worker has a tokenizer"
    ended = (batch.dense("finish_reason") == FINISH_REASONS.index("stop")).tolist()
    written = batch.texts("response_text")
    valid = [end and text.isascii() and text.isdecimal() for end, text in zip(ended, written, strict=True)]
    prompts, tasks = batch.texts("prompt_text"), batch.texts("task")
    ids = [row.tolist() for row in batch.ragged("prompt_ids").rows()]
    for row in (row for row, fine in enumerate(valid) if fine):
        prompts[row], tasks[row] = f"{written[row]}=", json.dumps({"answer": written[row]})
        ids[row] = ctx.tokenizer.encode(prompts[row])
    columns: dict[str, Column] = {
        "solver/prompt_ids": Ragged.from_rows(ids, torch.int64),
        "solver/prompt_text": Ragged.from_texts(prompts),
        "solver/task": Ragged.from_texts(tasks),
        "rewards/valid": torch.tensor(valid, dtype=torch.float32),
    }
    return batch.with_columns(**columns)


@step(role="score", reads=["rewards/valid", "solver/reward"], writes=["reward", "score"], scope="sample")
def half_solved(batch: Batch, ctx: StepContext) -> Batch:
    """Write the proposer's `reward` [B]: 0 without a valid task, else 1/2 + 2·p·(1 − p) for the share p that the solver
    got right, which is 1 for a task that is half solved, and 1/2 for one that is too easy or too hard.

    `score` [B] is 1 for a valid task.
    """
    valid, solved = batch.dense("rewards/valid"), batch.dense("solver/reward")
    return batch.with_columns(reward=valid * (0.5 + 2 * solved * (1 - solved)), score=valid)
