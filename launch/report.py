"""The last words of `launch`: how the run ended, where things are, what to try next."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from distflow.launch.ending import STOPPED
from distflow.launch.merge import MetricsReader
from distflow.launch.record import Failure, RunRecord
from distflow.launch.verdict import where_time_went

MEAN_OF = 10
HOST_PEAK, DEVICE_PEAK = "memory/host_peak_gb/max", "memory/device_peak_gb/max"
LOG_LINES = 15


def command_name() -> str:
    """What to type for `distflow`: as it is found on the PATH, else the path it was started by."""
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
    seconds = (record.ended or record.started) - record.started
    reached = int(steps[-1]["step"]) if steps else 0
    yield f"{record.name}: {record.state} after {seconds:.0f} s, {reached} of {record.training_steps} training steps"
    scores = [step["critic/score/mean"] for step in steps[-MEAN_OF:] if "critic/score/mean" in step]
    if scores:
        yield f"score, mean of the last {len(scores)} training steps: {sum(scores) / len(scores):.3f}"
    went = where_time_went(reader, reached, reached)
    if went:
        yield went
    yield from _memory(steps)
    yield f"results: {record.run_dir}"
    where = "" if runs_dir == Path("runs") else f" --runs-dir {runs_dir}"
    yield "try next:"
    if record.state == "stopped":
        yield f"  {me} launch {again} --run {record.name} --resume{where}"
    yield f"  {me} metrics {record.name} --last 10{where}"
    yield f"  {me} rollouts {record.name}{where}"
    yield f"  {me} status {record.name}{where}"
    yield f"  {me} plan {again} --worker {record.workers[0].name}"


def _memory(steps: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """The most that any worker had, where it was measured."""
    peaks = {
        place: max((step[name] for step in steps if name in step), default=0.0)
        for place, name in (("of memory", HOST_PEAK), ("of a GPU", DEVICE_PEAK))
    }
    shown = [f"{peak:.2f} GiB {place}" for place, peak in peaks.items() if peak]
    if shown:
        yield f"the largest worker had up to {', and one '.join(shown)}"


def failure_report(record: RunRecord, failure: Failure) -> Iterator[str]:
    """Lines about why a run failed: the user's frames first, then where to read on.

    Frames are shown where code is at fault, the user's or ours; other messages say by themselves what to do.
    """
    if failure.traceback and (failure.error == "StepError" or failure.exit_code == 1):
        yield failure.traceback.rstrip()
    elif failure.error == "WorkerFailed" and Path(failure.log).is_file():
        lines = Path(failure.log).read_text(errors="replace").splitlines()
        yield from (f"{failure.worker} | {line}" for line in lines[-LOG_LINES:])
    yield f"{record.name}: {failure.worker} failed ({failure.error}): {failure.message}"
    yield f"log: {failure.log}"
    if record.exit_code == STOPPED:
        yield "it failed while the run was being stopped: its last checkpoint may be missing"
    yield f"exit code {record.exit_code}"
