"""Trackio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distflow.flow.trackers import TrackedRun


class Trackio:
    """Options are those of `trackio.init`; `trackio show` opens its page."""

    def __init__(self, run: TrackedRun, **options: Any) -> None:
        import trackio

        self._library = trackio
        given = {"project": "distflow", "name": run.id, "resume": "allow", "config": dict(run.recipe), **options}
        self._run = trackio.init(**given)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._library.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `Tracker`."""
        import pandas

        table = self._library.Table(dataframe=pandas.DataFrame(list(rows)))
        self._library.log({"samples": table}, step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._library.finish()
