"""TensorBoard's event files, written by its own package without TensorFlow or torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distflow.flow.trackers import TrackedRun


class TensorBoard:
    """Writes into `trackers/NAME` of the run folder, or into `logdir`/RUN: `tensorboard --logdir runs` shows them."""

    def __init__(self, run: TrackedRun, *, logdir: str | None = None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._tensor = event_pb2.Event, summary_pb2, tensor_pb2.TensorProto
        folder = run.folder if logdir is None else Path(logdir).expanduser() / run.name
        self._writer = EventFileWriter(str(folder))
        if "began" not in run.notes:
            run.notes["began"] = "yes"
            self._text("recipe", 0, f"```\n{json.dumps(run.recipe, indent=2)}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        scalars = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, scalars)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `Tracker`."""
        names = list(rows[0])
        lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
        lines += ["| " + " | ".join(_cell(row[name]) for name in names) + " |" for row in rows]
        self._text("samples", step, "\n".join(lines))

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()

    def _text(self, tag: str, step: int, text: str) -> None:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        # 7: DT_STRING.
        tensor = self._tensor(dtype=7, string_val=[text.encode()])
        about = self._summary.SummaryMetadata(plugin_data=plugin)
        self._add(step, [self._summary.Summary.Value(tag=tag, metadata=about, tensor=tensor)])

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
