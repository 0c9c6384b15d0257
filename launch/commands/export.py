"""`distflow export`: the trained model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", required=False)
@click.option("--step", type=click.IntRange(min=1), help="Training step.  [default: the newest whole checkpoint]")
@click.option("--to", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Folder to make.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(run: str | None, step: int | None, to: Path, runs_dir: Path) -> None:
    """Write a checkpoint of RUN (default: the newest) for transformers, load it again and compare log-probs."""
    from distflow.launch.observe.file_sync import refresh
    from distflow.launch.run.export import export_checkpoint
    from distflow.launch.run.folder import find_run

    run_dir = find_run(run, runs_dir)
    for host in refresh(run_dir, ("checkpoints",)):
        click.echo(f"{host} does not answer: its checkpoints may be missing", err=True)
    for line in export_checkpoint(run_dir, step, to):
        click.echo(line)
