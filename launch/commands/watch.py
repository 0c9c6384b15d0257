"""`distflow watch`: the live page of a run, any time and from any of its hosts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from distflow.launch.run.record import RunRecord

POLL_S = 0.2
ANSWER_S = 2.0
LOOK_EVERY_S = 2.0
UNREACHED_S = 20.0
"""Without an answer of any agent, after which a run that goes on elsewhere, if it does, cannot be watched from here."""


@click.command()
@click.argument("run", required=False)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(run: str | None, runs_dir: Path) -> int:
    """Show how RUN (default: the newest) goes on, until it is over; Ctrl-C ends the watching, not the run.

    Returns the exit code of the run.
    """
    from distflow.launch.observe.monitor import Monitor
    from distflow.launch.observe.progress import make_display
    from distflow.launch.observe.run_summary import tell_end
    from distflow.launch.run.folder import find_run
    from distflow.launch.run.record import read_record

    run_dir = find_run(run, runs_dir)
    first = read_record(run_dir)
    try:
        record = Monitor(run_dir, make_display(first.training_steps)).watch(_looking(run_dir), poll_s=POLL_S)
    except KeyboardInterrupt:
        click.echo(f"no longer watching; {first.name} goes on — `distflow stop {first.name}` ends it")
        return 0
    return tell_end(record, runs_dir)


def _looking(run_dir: Path) -> Callable[[], RunRecord]:
    """What gives the record as of now: as it is written here, and as an agent tells it if it is not written here."""
    from msgspec import structs

    from distflow.errors import DistflowError
    from distflow.launch.observe.run_client import ask_any_agent
    from distflow.launch.run.exit_status import as_it_ended
    from distflow.launch.run.process_table import is_lost
    from distflow.launch.run.record import read_record

    looked_at = heard_at = time.monotonic()
    told: str | None = None

    def look() -> RunRecord:
        nonlocal looked_at, heard_at, told
        record, now = read_record(run_dir), time.monotonic()
        if record.over:
            return record
        if now - looked_at >= LOOK_EVERY_S:
            looked_at = now
            answer = ask_any_agent(record, "status", {}, ANSWER_S)
            if answer is not None:
                heard_at, told = now, str(answer["state"])
            elif is_lost(record):
                record = read_record(run_dir)
                return record if record.over else as_it_ended(record)
            elif record.hosts and now - heard_at > UNREACHED_S:
                raise DistflowError(f"{run_dir}: no host agent of this run can be reached from here any more")
        return structs.replace(record, state="running") if told == "running" else record

    return look
