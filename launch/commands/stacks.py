"""`distflow stacks`: where each worker is in its code, even if it is stuck."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", required=False)
@click.option("--worker", help="Only this worker, for example rollout/0.")
@click.option("--all", "everything", is_flag=True, help="All threads, not only those in your code or in the script.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(run: str | None, worker: str | None, everything: bool, runs_dir: Path) -> None:
    """Show where RUN's workers (default: the newest) are in your code and in the script, and what each waits for."""
    from distflow.errors import UserError
    from distflow.launch.observe.run_client import stacks_of
    from distflow.launch.run.folder import find_run
    from distflow.launch.run.record import read_record

    record = read_record(find_run(run, runs_dir))
    names = [entry.name for entry in record.workers]
    if worker is not None and worker not in names:
        raise UserError(f"--worker {worker}: {record.name} has no such worker — there are: {', '.join(names)}")
    for found in stacks_of(record, names if worker is None else [worker], everything=everything):
        process = "" if found.pid is None else f" (pid {found.pid})"
        click.echo(f"{found.worker}{process} {found.note}")
        for line in found.text.splitlines():
            click.echo(f"    {line}")
