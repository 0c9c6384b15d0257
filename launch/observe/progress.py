"""Shows the progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
)
from rich.table import Table
from rich.text import Text

from distflow.errors import UserError
from distflow.launch.observe.alerts import outside_waits
from distflow.launch.observe.run_client import Row
from distflow.launch.observe.wait_graph import wait_graph
from distflow.launch.run.record import RunRecord
from distflow.metrics.autoscale import Autoscaler, ScaleDecision, StepSeen
from distflow.metrics.merge import MetricsReader
from distflow.types import WorkerName

BEHIND = 5
"""Training steps before the present one that are looked at, too, where autoscaling begins."""

PLAIN_EVERY_S = 2.0
STAGE_EVERY_S = 10.0
"""Between two lines of a file or a pipe on how far the first training step has come."""
OTHER_LINES = 8
"""Lines of the live page besides the workers."""
SHOWN = (
    ("score", "critic/score/mean", "{:.3f}"),
    ("reward", "critic/rewards/mean", "{:.3f}"),
    ("loss", "actor/loss", "{:.3g}"),
    ("grad", "actor/grad_norm", "{:.3g}"),
    ("tok/s", "perf/tokens_per_s", "{:,.0f}"),
    ("samples/s", "perf/samples_per_s", "{:,.0f}"),
    ("stale", "staleness/mean", "{:.2f}"),
)
"""Label, metric, format: what a line of progress shows, if the run measures it; fits into 80 columns."""
SCORE, REWARD, LOSS = "critic/score/mean", "critic/rewards/mean", "actor/loss"
BARS = "▁▂▃▄▅▆▇█"
LOADING = "the workers are loading their models and connecting; then the first training step begins"


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run."""

    record: RunRecord
    step: int
    """The last training step that all training workers have written (1-based; 0: none yet)."""
    metrics: Mapping[str, float]
    verdict: str = ""
    """Where the time of the last training steps went."""
    rows: Sequence[Row] = ()
    """The workers' own status rows, when they were last asked."""
    rewards: Sequence[float] = ()
    """Mean rewards of the training steps so far."""
    left_s: float | None = None
    """Remaining seconds at the current pace; None: not known yet."""

    @property
    def figures(self) -> str:
        """The main metrics, on one line."""
        # A policy's loss says little beside its score; where nothing is judged it says how well training goes.
        known = self.metrics.keys() - ({LOSS} if SCORE in self.metrics else set())
        shown = [f"{label} {form.format(self.metrics[name])}" for label, name, form in SHOWN if name in known]
        return "  ".join(shown)

    @property
    def stage(self) -> str:
        """What is happening before the first training step is done."""
        record, names = self.record, [entry.name for entry in self.record.workers]
        started = sum(name in record.pids for name in names)
        if record.state == "running":
            return arriving(self.rows) or LOADING
        if not record.pids:
            return "starting the host agent"
        if not started:
            whom = "for the worker" if len(names) == 1 else f"once for all {len(names)} workers of a host"
            return f"importing torch and other libraries, {whom}"
        return f"starting the workers: {started} of {len(names)} are running"

    def __str__(self) -> str:
        left = "" if self.left_s is None else f"left {duration(self.left_s)}"
        parts = (f"step {self.step}/{self.record.training_steps}", self.figures, left, self.verdict)
        return "  ".join(part for part in parts if part)


def arriving(rows: Sequence[Row]) -> str:
    """Say how far the open training step, or a validation, has come; empty while nothing is generated for it."""
    found = [one for row in rows for one in row.get("arriving", ())]
    told = []
    for kind, what in (("val", "validating"), ("train", "generating for training step {}")):
        of_kind = [one for one in found if one["kind"] == kind]
        groups, of, tokens = (sum(one[name] for one in of_kind) for name in ("groups", "of", "tokens"))
        if of > groups:
            told.append(f"{what.format(of_kind[0]['step'])}: {groups:,} of {of:,} prompts, {tokens:,} tokens so far")
    return "; ".join(told)


def duration(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as bars, scaled between their minimum and maximum; a missing one is a blank."""
    shown = values[-width:]
    known = [value for value in shown if math.isfinite(value)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(BARS) - 1
    return "".join(
        BARS[round((value - low) / span * top) if span else 0] if math.isfinite(value) else " " for value in shown
    )


class Display(AbstractContextManager[None], Protocol):
    """Where the monitor shows a run; to be used as a context."""

    def show(self, status: RunStatus) -> None:
        """Show the status; called several times a second."""
        ...

    def say(self, text: str) -> None:
        """Show one line that stays."""
        ...

    def finish(self, status: RunStatus) -> None:
        """Show the last status: the run is over."""
        ...


class PlainDisplay:
    """Lines for a file or a pipe: the start, the first training step, at most one step every two seconds, the last."""

    def __init__(self) -> None:
        self._step = 0
        self._at = 0.0
        self._stages: set[str] = set()
        """What was said of how the run begins."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, *raised: object) -> None:
        """Nothing to restore."""

    def show(self, status: RunStatus) -> None:
        """Print a line if there is something new and it is time."""
        if not status.step and not status.record.over and status.stage not in self._stages:
            # What only grows is not said each time it does.
            counts, now = bool(arriving(status.rows)), time.monotonic()
            if not counts or now - self._at >= STAGE_EVERY_S:
                self._at = now if counts else self._at
                self._stages.add(status.stage)
                self.say(status.stage)
        if status.step > self._step and (self._step == 0 or time.monotonic() - self._at >= PLAIN_EVERY_S):
            self._print(status)

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def finish(self, status: RunStatus) -> None:
        """Print the last training step."""
        if status.step > self._step:
            self._print(status)

    def _print(self, status: RunStatus) -> None:
        self._step, self._at = status.step, time.monotonic()
        print(status, flush=True)


class LiveDisplay:
    """A bar, the figures, and who waits for whom."""

    def __init__(self, console: Console, training_steps: int) -> None:
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[elapsed]}"),
            TextColumn("{task.fields[left]}"),
            console=console,
        )
        self._task = self._bar.add_task("training", total=training_steps, elapsed="", left="")
        self._workers: Group | None = None
        self._live = Live(console=console, refresh_per_second=4)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *raised: object) -> None:
        # In any case, so that the terminal gets its cursor back.
        self._live.stop()

    def show(self, status: RunStatus) -> None:
        """Redraw the page."""
        if status.rows:
            self._workers = worker_page(status.rows, max(1, self._live.console.height - OTHER_LINES))
        stage = Text(f"{status.stage} …", no_wrap=True, overflow="ellipsis")
        self._update_bar(status)
        more: list[RenderableType] = [
            *([] if status.step else [stage]),
            *([] if self._workers is None else [self._workers]),
        ]
        self._live.update(self._page(status, *more))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._live.console.print(text, highlight=False, markup=False)

    def finish(self, status: RunStatus) -> None:
        """Leave the last status on the terminal, without the workers."""
        self._update_bar(status)
        self._live.update(self._page(status))

    def _update_bar(self, status: RunStatus) -> None:
        record = status.record
        elapsed = (record.ended or time.time()) - record.started
        left = "" if status.left_s is None or record.over else f"left {duration(status.left_s)}"
        self._bar.update(self._task, completed=status.step, elapsed=duration(elapsed), left=left)

    def _page(self, status: RunStatus, *more: RenderableType) -> Group:
        # Always one line each: a page that changes its height flickers.
        trend = sparkline(status.rewards, self._live.console.width - len("reward "))
        texts = (status.figures, f"reward {trend}" if trend else "", status.verdict)
        lines = (Text(text, no_wrap=True, overflow="ellipsis") for text in texts)
        return Group(self._bar, *lines, *more)


def make_display(training_steps: int) -> Display:
    """Live on a terminal, plain elsewhere."""
    if sys.stdout.isatty():
        return LiveDisplay(Console(), training_steps)
    return PlainDisplay()


def worker_page(rows: Sequence[Row], most: int) -> Group:
    """The workers' status, and which workers block others, if any do; or whom outside of the run they wait for."""
    trouble = wait_graph(rows, {}).trouble() or "; ".join(outside_waits(rows))
    return Group(worker_table(rows, most), Text(trouble, no_wrap=True, overflow="ellipsis"))


def worker_table(rows: Sequence[Row], most: int) -> Table:
    """A line per worker, `most` at most: those that do not answer first, then those that wait longest."""
    table = Table(box=None, pad_edge=False, expand=True)
    for name in ("worker", "state", "step", "version"):
        table.add_column(name, no_wrap=True)
    table.add_column("waits for", no_wrap=True, overflow="ellipsis", ratio=1)
    shown = rows if len(rows) <= most else sorted(rows, key=_less_urgent)[: most - 1]
    for row in shown:
        cells = (row["name"], row["state"], row["step"], row["version"], row["waiting_for"])
        table.add_row(*("" if cell is None else str(cell) for cell in cells))
    if len(shown) < len(rows):
        table.add_row(f"… {len(rows) - len(shown)} more")
    return table


def _less_urgent(row: Row) -> tuple[bool, float]:
    waits = row.get("waits", [])
    return row["state"] != "no answer", -max((wait["seconds"] for wait in waits), default=0.0)


def names_in(record: RunRecord, pool: str) -> list[str]:
    """The workers of a pool."""
    return [entry.name for entry in record.workers if WorkerName.parse(entry.name).pool == pool]


class AutoscaleDisplay:
    """Looks at each training step that the monitor shows, and has the pool scaled.

    `scale(record, count)` does it and returns what happens, in words; it raises UserError if it is refused.
    """

    def __init__(
        self, record: RunRecord, pool: str, scaler: Autoscaler, scale: Callable[[RunRecord, int], str]
    ) -> None:
        self._record, self._pool, self._scaler, self._scale = record, pool, scaler, scale
        self._reader = MetricsReader(record.path)
        self._done = self._decided = 0
        """The last training step that was looked at, and the one after which the last change was decided."""
        self._since: float | None = None
        """When it was decided; None: the pool is as it is to be."""
        self._looked = False
        """Whether the run was looked at: what is said before that is old."""

    def __enter__(self) -> None:
        self._do(self._scaler.begin())

    def __exit__(self, *raised: object) -> None:
        """The run goes on."""

    def show(self, status: RunStatus) -> None:
        """Look at the training steps that are whole: all before the last one."""
        self._looked = True
        if status.record.state != "running" or not status.step:
            return
        self._record = status.record
        self._reader.read()
        self._done = max(self._done, status.step - 1 - BEHIND)
        while self._done < status.step - 1:
            self._done += 1
            if self._all_there():
                self._look(self._done)

    def say(self, text: str) -> None:
        """Other news of the run."""
        if self._looked:
            click.echo(text)

    def finish(self, status: RunStatus) -> None:
        """The run is over."""

    def _all_there(self) -> bool:
        """Whether the workers are those that are to be there, and all have generated since the last change."""
        names, term, now = names_in(self._record, self._pool), self._record.term, time.monotonic()
        if len(names) != self._scaler.count:
            if self._since is None or now - self._since > self._record.no_progress_s:
                click.echo(f"step {self._done}: {self._pool} has {len(names)} workers, not {self._scaler.count}")
                self._scaler.found(len(names))
                self._decided, self._since = self._done, None
            return False
        if self._reader.last_step([WorkerName.parse(name).file_stem for name in names], term) <= self._decided:
            return False
        self._since = None
        return True

    def _look(self, step: int) -> None:
        seen = StepSeen.of(self._reader.step(step))
        if seen is None:
            return
        decision = self._scaler.see(seen)
        if self._scaler.kept:
            click.echo(f"step {step}: {self._pool} stays at {self._scaler.count}: {self._scaler.kept}")
        self._do(decision)

    def _do(self, decision: ScaleDecision | None) -> None:
        if decision is None:
            return
        try:
            told = self._scale(self._record, decision.count)
        except UserError as error:
            # Of the places for workers, or since the run is ending.
            click.echo(f"step {self._done}: {self._pool}={decision.count} was refused: {error}")
            self._scaler.refused(len(names_in(self._record, self._pool)))
            return
        self._decided, self._since = self._done, time.monotonic()
        click.echo(f"step {self._done}: {decision.why}")
        click.echo(f"  {told}")
