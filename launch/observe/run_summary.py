"""The last lines of `launch`: how the run ended, where its results are, what to try next."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from distflow.cluster.processes import STOPPED, Failure
from distflow.config.schema import StopConfig
from distflow.config.yamlfile import yaml_value
from distflow.launch.observe.alerts import where_time_went
from distflow.launch.run.exit_status import goes_on_from
from distflow.launch.run.record import RunRecord
from distflow.launch.run.resume import best_checkpoint
from distflow.metrics.merge import MetricsReader, validated
from distflow.runtime.checkpoint.commit import checkpoints_of, commits
from distflow.runtime.process_record import read_troubles
from distflow.types import VAL, VAL_LOSS

MEAN_OF = 10
HOST_PEAK, DEVICE_PEAK = "memory/host_peak_gb/max", "memory/device_peak_gb/max"
LOG_LINES = 15
CHAINED = "\nThe above exception was the direct cause of the following exception:\n"


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run has come."""

    state: str
    step: int
    """The last training step in the metrics (1-based); 0: none."""
    training_steps: int
    score: float | None
    """Mean score of the last `scored` training steps; None: not measured."""
    scored: int
    seconds: float | None
    """From its last launch to its end, or until now; None: its end was not recorded."""
    resumed: bool = False
    """Whether that launch went on from an earlier one."""

    def __str__(self) -> str:
        since = "for" if self.state in ("starting", "running") else "after"
        how_long = "" if self.seconds is None else f" {since} {self.seconds:.0f} s"
        how_long += " since it was resumed" if how_long and self.resumed else ""
        return f"{self.state}{how_long}, {self.step} of {self.training_steps} training steps"


def progress_of(record: RunRecord, steps: Sequence[Mapping[str, float]]) -> RunProgress:
    """`steps`: the merged metrics, one mapping per training step."""
    scores = [step["critic/score/mean"] for step in steps[-MEAN_OF:] if "critic/score/mean" in step]
    until = record.ended if record.over else time.time()
    return RunProgress(
        record.state,
        int(steps[-1]["step"]) if steps else 0,
        record.training_steps,
        sum(scores) / len(scores) if scores else None,
        len(scores),
        None if until is None else until - record.started,
        record.launch_term > 0,
    )


def root_cause(failure: Failure) -> tuple[str, str]:
    """The original error, and where it happened (empty if the error tells everything)."""
    lines = failure.traceback.split(CHAINED)[0].rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith(" ")]
    # A message may have several lines; the first one follows the last frame.
    error = next(iter(lines[frames[-1] + 1 :] if frames else lines[-1:]), "")
    text = error.partition(": ")[2]
    if not error or (text and text in failure.message):
        return failure.message, ""
    return error, failure.message


def command_name() -> str:
    """What to type for `distflow`: the name if it is on the PATH, else the path that it was started by."""
    started = Path(sys.argv[0])
    if started.name != "distflow" or shutil.which("distflow") == str(started.absolute()):
        return "distflow"
    here = Path.cwd()
    return str(
        started.absolute().relative_to(here) if started.is_absolute() and started.is_relative_to(here) else started
    )


def summary(record: RunRecord, recipe: Sequence[str], runs_dir: Path) -> Iterator[str]:
    """Lines about a run that is over and did not fail. `recipe`: its name or file, and the overrides."""
    again, me = shlex.join(recipe), command_name()
    reader = MetricsReader(record.path)
    reader.read()
    steps = reader.merged()
    progress = progress_of(record, steps)
    yield f"{record.name}: {progress}"
    if record.state == "stopped" and not progress.step:
        yield f"there was nothing to save before the end of the first training step: {goes_on_from(record.path)}"
    if record.state == "done" and progress.step < record.training_steps:
        yield from reached(_goal_of(record.path), steps)
    if progress.score is not None:
        yield f"score, mean of the last {progress.scored} training steps: {progress.score:.3f}"
    chosen = best_checkpoint(record.path, steps)
    yield from held_out(steps, chosen)
    went = where_time_went(reader, progress.step, progress.step)
    if went:
        yield went
    yield from _memory(steps)
    yield from _on_disk(record.path)
    yield f"results: {record.run_dir}"
    folder = runs_dir if runs_dir.resolve() == record.path.parent.resolve() else record.path.parent
    where = "" if folder.resolve() == Path("runs").resolve() else f" --runs-dir {shlex.quote(str(folder))}"
    yield "try next:"
    if record.state == "stopped" and progress.step:
        yield f"  {me} launch --resume --run {record.name}{where}"
    if progress.step:
        yield f"  {me} metrics {record.name} --last 10{where}"
        yield f"  {me} rollouts {record.name}{where}"
        yield f"  {me} plot {record.name}{where}"
    if next(commits(checkpoints_of(record.path)), None) is not None:
        best = "" if chosen is None else " --best"
        yield f"  {me} export {record.name}{best} --to {record.name}-model{where}"
        if any(entry.generates for entry in record.workers):
            yield f"  {me} evaluate {record.name}{best}{where}"
    # What validates alone may have had a model that lay in a folder just for this.
    if not record.training_steps:
        yield f"  {me} rollouts {record.name} --val{where}"
    else:
        yield f"  {me} plan {again} --worker {record.workers[0].name}"


def held_out(steps: Sequence[Mapping[str, float]], chosen: tuple[Path, float, str] | None) -> Iterator[str]:
    """Tell what validation found last and at its best, and which checkpoint is the best; nothing without these.

    `chosen`: that checkpoint, as `best_checkpoint` finds it.
    """
    for name in validated(steps):
        found = {int(step["step"]): step[name] for step in steps if name in step and math.isfinite(step[name])}
        if found:
            sign = -1 if name == VAL_LOSS else 1
            last, best = max(found), max(found, key=lambda step: (sign * found[step], step))
            half = next((step[f"{name}/ci95"] for step in reversed(steps) if f"{name}/ci95" in step), math.nan)
            around = f" ±{half:.2g}" if math.isfinite(half) else ""
            better = "" if best == last else f" (best {found[best]:.3g} {_after(best)})"
            yield f"validation: {name.removeprefix(VAL)} {found[last]:.3g}{around} {_after(last)}{better}"
    if chosen is not None:
        folder, value, metric = chosen
        yield f"best checkpoint by run.keep_best ({metric} {value:.3g}): {folder}"


def _after(step: int) -> str:
    return f"after training step {step}" if step else "before training"


def reached(goal: StopConfig | None, steps: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """How `run.stop_when` is met after these training steps; nothing if it is not."""
    value = None if goal is None else goal.newest(steps)
    if goal is not None and value is not None and goal.met_by(value):
        yield f"run.stop_when is met: {goal} (it is {value:.4g})"


def _goal_of(run_dir: Path) -> StopConfig | None:
    kept = yaml_value((run_dir / "recipe.yaml").read_text())["run"].get("stop_when")
    return None if kept is None else StopConfig.model_validate(kept)


def tell_end(record: RunRecord, runs_dir: Path, recipe: Sequence[str] = ()) -> int:
    """Print the last lines about a finished run, those about a failure to stderr; returns its exit code.

    `recipe`: what it was launched with; by default the recipe in the run folder is named.
    """
    assert record.exit_code is not None, "a run that is over has an exit code"
    if record.failure is not None:
        for line in failure_report(record, record.failure):
            click.echo(line, err=True)
    for line in read_troubles(record.path):
        click.echo(f"warning: {line}", err=True)
    if record.state != "failed":
        for line in summary(record, recipe or [str(record.path / "recipe.yaml")], runs_dir):
            click.echo(line)
    return record.exit_code


def _memory(steps: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """The peak memory over all workers, if it was measured."""
    peaks = {
        place: max((step[name] for step in steps if name in step), default=0.0)
        for place, name in (("host", HOST_PEAK), ("GPU", DEVICE_PEAK))
    }
    shown = [f"{peak:.2f} GiB {place}" for place, peak in peaks.items() if peak]
    if shown:
        yield f"peak memory of a worker: {', '.join(shown)}"


def _on_disk(run_dir: Path) -> Iterator[str]:
    """Say what the checkpoints take, as far as they lie on this machine."""
    root = checkpoints_of(run_dir)
    kept = [folder for folder in root.glob("step_*") if folder.is_dir()]
    if kept:
        size = sum(file.stat().st_size for folder in kept for file in folder.rglob("*") if file.is_file())
        unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
        yield f"checkpoints: {len(kept)}, {size / unit:.1f} {name} on disk, in {root}"


def failure_report(record: RunRecord, failure: Failure) -> Iterator[str]:
    """Lines about why a run failed: the user's frames first, then where to read more.

    Frames are shown for errors in code, the user's or ours; other messages tell by themselves what to do.
    """
    if failure.traceback and (failure.error == "StepError" or failure.exit_code == 1):
        yield failure.traceback.rstrip()
    elif failure.error == "WorkerFailed" and Path(failure.log).is_file():
        lines = Path(failure.log).read_text(errors="replace").splitlines()
        yield from (f"{failure.worker} | {line}" for line in lines[-LOG_LINES:])
    yield f"{record.name}: {failure.worker} failed ({failure.error}): {failure.message}"
    yield f"log: {failure.log}"
    if record.exit_code == STOPPED:
        yield (
            "it failed while the run was being stopped, and may have saved no last checkpoint: "
            f"{goes_on_from(record.path)}"
        )
    yield f"exit code {record.exit_code}"
