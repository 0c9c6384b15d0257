"""`distflow stop`: end a run and verify that nothing is left of it."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", required=False)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=None,
    help="Seconds without progress that the run gets to save and exit; 0: it ends at once, and saves nothing.  "
    "[default: the recipe's limits.drain_s + 10]",
)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(run: str | None, timeout: float | None, runs_dir: Path) -> None:
    """Stop RUN (default: the newest): it saves and exits, or is killed; prints what was ended and removed."""
    from distflow.launch.deploy.stop_run import stop_run
    from distflow.launch.run.folder import find_run
    from distflow.launch.run.record import read_record

    run_dir = find_run(run, runs_dir)
    lines = stop_run(run_dir, read_record(run_dir).drain_s + 10 if timeout is None else timeout, tell=click.echo)
    for line in lines:
        click.echo(f"ended: {line}")
    click.echo(
        f"{run_dir}: {read_record(run_dir).state}; nothing of it is left running" + ("" if lines else " (nothing was)")
    )
