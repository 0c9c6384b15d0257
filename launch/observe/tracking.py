"""Gives the metrics of a run to one tracker: the program of its process. It reads the run folder, as `status` does.

Rows wait in the files that the workers write, so a slow tracker costs nobody anything. How far it has come stands in
`trackers/NAME/state.json`, written before a row is given away: after a restart of any process no row is given twice.

    metrics/*.jsonl ──lines──▶ StepRows ──a row that is complete──▶ tracker.log, tracker.samples
Reports to the worker, a JSON object a line: what is begun (`busy`, with the number of `rows` at stake), or that it is
`done`; rows `lost`, and `why`; how many rows wait (`behind`).
"""

from __future__ import annotations

import json
import os
import select
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from distflow.comm.tracker_processes import WRONG
from distflow.data.files import whole_lines
from distflow.errors import UserError
from distflow.flow.resolve import resolve
from distflow.flow.trackers import TrackedRun, Tracker
from distflow.launch.observe.file_sync import apart, refresh
from distflow.launch.run.record import FILE_NAME, RunRecord, read_record
from distflow.metrics.merge import TRAINED, Line, is_validation, merge_step
from distflow.runtime.disk import replace_file
from distflow.types import WorkerName

POLL_S, FETCH_EVERY_S = 0.5, 5.0
SETTLE_S = 10.0
"""A row is given away without workers that have not written their line of it so long after it was first seen."""
LAST_S = 2.0
"""The same at the end of the run."""
AHEAD, READ_BYTES = 256, 1 << 20
"""Training steps that are held here, and bytes of a file that are read at once; the others stay in the files."""
TEXT_CHARS = 4000
"""Longest text of a sample that is shown."""
LEFT_OUT = ("response_ids", "policy_versions", "term")
"""Keys of samples that are not shown."""


class Start(msgspec.Struct):
    """What the process is given: the contents of its start file."""

    run_dir: str
    name: str
    call: str
    options: dict[str, Any]
    samples: int
    recipe: dict[str, Any]
    term: int
    begins: int
    """Training steps that were done when the present term began."""


class _State(msgspec.Struct):
    id: str
    step: int = 0
    """The last training step that was given away."""
    validated: int = -1
    """The same of validation."""
    notes: dict[str, str] = msgspec.field(default_factory=dict)


@dataclass(slots=True)
class StepRow:
    """The lines of one training step so far."""

    seen: float
    lines: list[Line]


class StepRows:
    """Rows of a run that were not given away yet; `after`: the training step up to which all were."""

    def __init__(self, run_dir: Path, after: int, validated: int) -> None:
        self._folder = run_dir / "metrics"
        self._after = after
        self._validated = validated
        self._offsets: dict[Path, int] = {}
        self._last: dict[str, tuple[int, int]] = {}
        """Term and training step of each worker's newest line."""
        self._rows: dict[int, StepRow] = {}
        self._validation: dict[int, tuple[int, Line]] = {}
        self._begun: dict[int, int] = {}
        """First training step of each term."""

    def __len__(self) -> int:
        return len(self._rows) + len(self._validation)

    def read(self, now: float) -> None:
        """Read what is new, of files that are not far ahead."""
        for path in sorted(self._folder.glob("*.jsonl")):
            if self._last.get(path.stem, (0, 0))[1] <= self._after + AHEAD:
                lines, self._offsets[path] = whole_lines(path, self._offsets.get(path, 0), READ_BYTES)
                for text in lines:
                    self._take(path.stem, text, now)

    def validations(self) -> Iterator[tuple[int, Line]]:
        """Validation by training step, each once."""
        for step in sorted(self._validation):
            _, line = self._validation.pop(step)
            self._validated = max(self._validated, step)
            yield step, _values([line])

    def complete(self, workers: Sequence[str], now: float, settle_s: float) -> Iterator[tuple[int, dict[str, float]]]:
        """Training steps in order, each once, that all `workers` (by the stems of their files) have written."""
        for step in sorted(self._rows):
            row, newest = self._rows[step], max(self._begun, default=0)
            trained = any(TRAINED in line for line in row.lines)
            all_wrote = all(self._last.get(worker, (-1, 0)) >= (newest, step) for worker in workers)
            if not trained or not (all_wrote or now - row.seen >= settle_s):
                return
            del self._rows[step]
            self._after = step
            yield step, _values(row.lines)

    def _take(self, worker: str, text: bytes, now: float) -> None:
        try:
            line: Line = {name: value for name, value in json.loads(text).items() if value is not None}
            step, term = int(line["step"]), int(line["term"])
        except (ValueError, KeyError, AttributeError):
            return  # a worker was killed while it wrote this
        if is_validation(line):
            if step > self._validated and term >= self._validation.get(step, (term, line))[0]:
                self._validation[step] = term, line
            return
        self._last[worker] = term, step
        self._begun[term] = min(step, self._begun.get(term, step))
        if step <= self._after or any(step >= begun for later, begun in self._begun.items() if later > term):
            return
        for old in [one for one in self._rows if one >= self._begun[term]]:
            self._rows[old].lines = [other for other in self._rows[old].lines if other["term"] >= term]
        self._rows.setdefault(step, StepRow(now, [])).lines.append(line)


def _values(lines: list[Line]) -> dict[str, float]:
    return {name: value for name, value in merge_step(lines).items() if name not in ("step", "term")}


class Following:
    """One tracker and how far it has come. `tell` reports to the worker."""

    def __init__(self, start: Start, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._start = start
        self._tell = tell
        self._run_dir = Path(start.run_dir)
        self._folder = self._run_dir / "trackers" / start.name
        self._state = self._read_state()
        self._rows = StepRows(self._run_dir, self._state.step, self._state.validated)
        self._shown: dict[int, tuple[float, tuple[int, ...]]] = {}
        """Training steps whose samples are still to be shown: since when, and the sizes of the files."""
        self._fetch_at = 0.0
        self._tracker = self._make()

    def go_on(self, *, settle_s: float, last: bool = False) -> int:
        """Give away what is complete; returns how many rows that were."""
        self._fetch()
        now, given = time.monotonic(), 0
        self._rows.read(now)
        for step, values in self._rows.validations():
            self._state.validated = max(step, self._state.validated)
            self._give(f"validation after training step {step}", 1, partial(self._tracker.log, step, values))
            given += 1
        for step, values in self._rows.complete(self._workers(), now, settle_s):
            self._state.step = step
            self._give(f"training step {step}", 1, partial(self._tracker.log, step, values))
            given += 1
            if self._start.samples:
                self._shown[step] = now, ()
        self._show_samples(now, last=last)
        return given

    def close(self) -> None:
        """The run is over: give away what is left."""
        deadline, over, given = time.monotonic() + LAST_S, False, 0
        while given or not over:
            # The other workers may be about to write their last lines.
            over = time.monotonic() >= deadline or self._all_given()
            given = self.go_on(settle_s=0.0 if over else SETTLE_S, last=over)
            if not (over or given):
                time.sleep(POLL_S / 5)
        self._give("its end", 0, self._tracker.close)

    def _all_given(self) -> bool:
        asked = self._start.recipe["run"]["training_steps"]
        return self._state.step >= asked and not len(self._rows) and not self._shown

    def _make(self) -> Tracker:
        self._folder.mkdir(parents=True, exist_ok=True)
        run = TrackedRun(self._run_dir.name, self._state.id, self._start.recipe, self._folder, self._state.notes)
        made: Tracker = resolve(self._start.call)(run, **self._start.options)
        self._save()
        return made

    def _read_state(self) -> _State:
        try:
            return msgspec.json.decode((self._folder / "state.json").read_bytes(), type=_State)
        except FileNotFoundError:
            pass
        record = self._record()
        launched = 0 if record is None else record.launch_term
        began = "" if record is None else str(record.started)
        own = xxhash.xxh3_64(f"{self._run_dir.name} {began}".encode()).hexdigest()[:8]
        # Another host was given what came before a later term of the same launch.
        after = self._start.begins if self._start.term > launched else 0
        return _State(f"{self._run_dir.name}-{own}", after, after if after else -1)

    def _save(self) -> None:
        replace_file(self._folder / "state.json", msgspec.json.encode(self._state))

    def _record(self) -> RunRecord | None:
        return read_record(self._run_dir) if (self._run_dir / FILE_NAME).is_file() else None

    def _workers(self) -> list[str]:
        """The workers of the run, by the stems of their files."""
        record = self._record()
        return [WorkerName.parse(entry.name).file_stem for entry in (() if record is None else record.workers)]

    def _fetch(self) -> None:
        """Bring the metrics of hosts with run folders of their own here."""
        record = self._record()
        if record is not None and time.monotonic() >= self._fetch_at and apart(record):
            self._fetch_at = time.monotonic() + FETCH_EVERY_S
            refresh(self._run_dir, ("metrics",), "metrics")

    def _give(self, what: str, rows: int, call: Callable[[], None]) -> None:
        """Call the tracker; what it refuses is lost."""
        self._save()
        self._tell({"busy": what, "rows": rows, "behind": len(self._rows)})
        try:
            call()
        except Exception as error:
            # A user's or a library's code: whatever it raises costs this row only.
            print(f"{what}: {error!r}", flush=True)
            self._tell({"lost": rows, "why": f"{what}: {type(error).__name__}: {error}"})
        else:
            self._save()
            self._tell({"done": True})

    def _show_samples(self, now: float, *, last: bool) -> None:
        """Show samples of training steps whose dumps have been written: files that no longer grow."""
        for step, (since, before) in list(self._shown.items()):
            files = sorted((self._run_dir / "rollouts" / f"step_{step:06d}").glob("*.jsonl"))
            sizes = tuple(path.stat().st_size for path in files)
            rows = self._samples(files) if sizes and (sizes == before or last) else []
            if rows:
                self._give(f"samples of training step {step}", 0, partial(self._tracker.samples, step, rows))
            if rows or now - since > SETTLE_S:
                del self._shown[step]
            else:
                self._shown[step] = since, sizes

    def _samples(self, files: list[Path]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in files:
            with path.open("rb") as file:
                while len(found) < self._start.samples and (line := file.readline()).endswith(b"\n"):
                    found.append(_shown(json.loads(line)))
        keys = dict.fromkeys(key for row in found for key in row)
        return [{key: row.get(key) for key in keys} for row in found]


def _shown(sample: Mapping[str, Any]) -> dict[str, Any]:
    """What is shown of a sample: numbers, and texts that are not too long."""
    flat = {**sample, **{f"rewards/{name}": value for name, value in sample.get("rewards", {}).items()}}
    plain = {key: value for key, value in flat.items() if isinstance(value, str | int | float) and key not in LEFT_OUT}
    return {key: value[:TEXT_CHARS] if isinstance(value, str) else value for key, value in plain.items()}


def follow(start_file: str, reports: str) -> int:
    """Give the rows of a run to a tracker until the standard input ends; returns the exit code."""
    line = int(reports)
    os.set_inheritable(line, False)

    def tell(report: Mapping[str, Any]) -> None:
        os.write(line, json.dumps(report).encode() + b"\n")

    made = False
    try:
        tell({"busy": "its construction"})
        following = Following(msgspec.json.decode(Path(start_file).read_bytes(), type=Start), tell)
        made = True
        tell({"done": True})
        while not select.select([0], [], [], POLL_S)[0]:
            following.go_on(settle_s=SETTLE_S)
        following.close()
    except Exception as error:
        # The top of a process: a service that does not answer, a full disk. Later it may work.
        traceback.print_exc()
        tell({"why": f"{type(error).__name__}: {error}"})
        # Options that it does not take, a package that is not there: no later start would do better.
        return WRONG if not made and isinstance(error, UserError | TypeError | ImportError) else 1
    return 0
