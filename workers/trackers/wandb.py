"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distflow.flow.trackers import TrackedRun

STEP = "training_step"
"""What all curves are drawn over: its own steps could not go back, and validation comes later than its step."""


class Wandb:
    """Options are those of `wandb.init`; `mode: offline` needs no network, and `wandb sync` sends it later."""

    def __init__(self, run: TrackedRun, **options: Any) -> None:
        import wandb

        self._table = wandb.Table
        given = {
            "project": "distflow",
            "name": run.name,
            "id": run.id,
            "resume": "allow",
            "dir": str(run.folder),
            "config": dict(run.recipe),
            **options,
        }
        self._run = wandb.init(**given)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({**values, STEP: step})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `Tracker`."""
        names = list(rows[0])
        table = self._table(columns=names, data=[[row[name] for name in names] for row in rows])
        self._run.log({"samples": table, STEP: step})

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()
