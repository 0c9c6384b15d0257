"""The critic's update, which notes what each replica trains on: for each update its groups, with the lengths and the
micro-batches of their rows."""

import json
from pathlib import Path

from distflow import Batch, StepContext, step
from distflow.data.batch import group_ranges, part_lengths
from distflow.data.micro_batches import MICRO_BATCH
from distflow.runtime.protocols import Priced, packs
from distflow.workers.critic import critic_update as real


@step(
    role="train",
    reads=["prompt_ids", "response_ids", "response_mask", "values", "return"],
    writes=[],
    scope="sample",
)
def critic_update(
    batch: Batch, ctx: StepContext, *, folder: str = "", clip: float = 0.5, aggregate: str = "token-mean"
) -> Batch:
    """Append a line to the replica's file in `folder`: what attention adds to the cost of a row, whether the
    model packs, and the groups."""
    lengths, parts = part_lengths(batch), batch.dense(MICRO_BATCH).tolist()
    groups = {
        p: (lengths[rows.start : rows.stop], parts[rows.start : rows.stop]) for p, rows in group_ranges(batch).items()
    }
    quadratic = ctx.backend.quadratic if isinstance(ctx.backend, Priced) else 0.0
    with (Path(folder) / ctx.worker.replace("/", "-")).open("a") as file:
        file.write(json.dumps([quadratic, packs(ctx.backend), groups]) + "\n")
    return real(batch, ctx, clip=clip, aggregate=aggregate)
