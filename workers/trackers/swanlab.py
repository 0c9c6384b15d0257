"""SwanLab."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from distflow.flow.trackers import TrackedRun


class Swanlab:
    """Options are those of `swanlab.init`; `mode: offline` or `local` needs no network."""

    def __init__(self, run: TrackedRun, **options: Any) -> None:
        import swanlab

        self._library = swanlab
        given = {
            "project": "distflow",
            "experiment_name": run.name,
            "id": run.id,
            "resume": "allow",
            "logdir": str(run.folder),
            "config": dict(run.recipe),
            **options,
        }
        swanlab.init(**given)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._library.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `Tracker`."""
        texts = [self._library.Text(json.dumps(row, ensure_ascii=False, indent=1)) for row in rows]
        self._library.log({"samples": texts}, step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._library.finish()
