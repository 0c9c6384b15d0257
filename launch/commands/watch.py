"""`distflow watch`: the live page of a run, at any time and from any of its hosts."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", required=False)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(run: str | None, runs_dir: Path) -> int:
    """Show the progress of RUN (default: the newest) until it is over; Ctrl-C stops watching, not the run.

    Returns the exit code of the run.
    """
    from distflow.launch.deploy.monitor import Monitor
    from distflow.launch.observe.progress import make_display
    from distflow.launch.observe.run_summary import tell_end
    from distflow.launch.run.folder import find_run
    from distflow.launch.run.record import read_record

    run_dir = find_run(run, runs_dir)
    first = read_record(run_dir)
    try:
        record = Monitor(run_dir, make_display(first.training_steps)).only_look()
    except KeyboardInterrupt:
        click.echo(f"no longer watching; {first.name} continues — `distflow stop {first.name}` ends it")
        return 0
    return tell_end(record, runs_dir)
