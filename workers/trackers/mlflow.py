"""MLflow."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from distflow.flow.trackers import TrackedRun

_NO_NAME = re.compile(r"[^\w\-. :/]")
"""What names of its metrics may not have."""


class Mlflow:
    """Options `tracking_uri` and `experiment`; all others are those of `mlflow.start_run`.

    Without `tracking_uri` and MLFLOW_TRACKING_URI, a database in `trackers/NAME` of the run folder.
    """

    def __init__(
        self, run: TrackedRun, *, tracking_uri: str | None = None, experiment: str = "distflow", **options: Any
    ) -> None:
        import mlflow

        self._library = mlflow
        # Setting it also sets the variable.
        local = tracking_uri is None and "MLFLOW_TRACKING_URI" not in os.environ
        if local or tracking_uri is not None:
            mlflow.set_tracking_uri(tracking_uri or f"sqlite:///{run.folder / 'mlflow.db'}")
        if local and mlflow.get_experiment_by_name(experiment) is None:
            mlflow.create_experiment(experiment, artifact_location=(run.folder / "artifacts").as_uri())
        mlflow.set_experiment(experiment)
        known = run.notes.get("run_id")
        again = {"run_id": known} if known else {"run_name": run.name}
        run.notes["run_id"] = mlflow.start_run(**{**again, **options}).info.run_id
        if not known:
            mlflow.log_text(json.dumps(run.recipe, indent=2), "recipe.json")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._library.log_metrics({_NO_NAME.sub("_", name): value for name, value in values.items()}, step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `Tracker`."""
        text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        self._library.log_text(text, f"samples/step_{step:06d}.jsonl")

    def close(self) -> None:
        """See `Tracker`."""
        self._library.end_run()
