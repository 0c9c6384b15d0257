"""`distflow trace`: one picture of what all workers did when."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("run", required=False)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File to write, *.json."
)
@click.option("--last", type=click.IntRange(min=1), help="Only the last N training steps.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(run: str | None, output: Path, last: int | None, runs_dir: Path) -> None:
    """Merge the traces of RUN's workers (default: the newest) into one file that Perfetto and Chrome open."""
    from distflow.errors import UserError
    from distflow.launch.observe.trace_merge import merged_trace
    from distflow.launch.run.folder import find_run

    run_dir = find_run(run, runs_dir)
    trace = merged_trace(run_dir, last)
    try:
        output.write_text(json.dumps(trace, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"-o {output}: cannot be written ({error.strerror}) — give a file in a folder that exists"
        ) from error
    events = trace["traceEvents"]
    spans, arrows = (sum(event["ph"] == kind for event in events) for kind in "Xs")
    workers = sum(event["name"] == "process_name" for event in events)
    click.echo(f"{output}: {spans} spans and {arrows} arrows of {workers} workers — open it at ui.perfetto.dev")
    dropped = trace["otherData"]["events dropped"]
    if dropped:
        click.echo(f"{dropped} events are missing: they came faster than they could be written", err=True)
