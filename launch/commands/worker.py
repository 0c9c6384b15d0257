"""`distflow worker`: run one worker by hand, from the recipe that `plan --write` or a run folder holds for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from distflow.errors import UserError


@click.command()
@click.argument("document", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--incarnation",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of earlier starts of this worker: one more than last time if it ran before.",
)
def command(document: Path, incarnation: int) -> int:
    """Run the worker of DOCUMENT (YAML) until its part in the run is done, with its own Python if it names one."""
    from distflow.flow.document import read_worker_document
    from distflow.types import WorkerName

    document = document.resolve()
    found = read_worker_document(document)
    name = WorkerName.parse(found.worker)
    pool = found.recipe.layout.pools[name.pool]
    # Settings of the document are merged into the pool's.
    python = pool.each[str(name.index)].python or pool.python
    if python is not None and python != sys.executable:
        _hand_over(python, document, incarnation, Path(found.run_dir))
    from distflow.runtime.main import run_by_hand

    return run_by_hand(document, incarnation)


def _hand_over(python: str, document: Path, incarnation: int, run_dir: Path) -> None:
    """Replace this process by `python`; raises UserError if it cannot be executed."""
    from distflow.comm.processes import module_command
    from distflow.launch.agent.start import environment_of

    environment = environment_of(python, os.environ, run_dir)
    command = [*module_command(python, "distflow.runtime.main"), str(document), str(incarnation)]
    try:
        os.execve(python, command, environment)
    except OSError as error:
        key = "settings.python"
        raise UserError(f"{document}: {key} — {python}: {error.strerror}; correct it, or leave it out") from error
