"""`distflow worker`: run one worker by hand, from the recipe that `plan --write` or a run folder holds for it."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("document", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--incarnation",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Which life of this worker it is: one more than the last, if it ran before.",
)
def command(document: Path, incarnation: int) -> int:
    """Run the worker of DOCUMENT (YAML) in this process, until its part in the run is done."""
    from distflow.comm.addresses import leave_socket_dir
    from distflow.flow.document import read_worker_document
    from distflow.runtime.main import run_worker

    run_dir = Path(read_worker_document(document.resolve()).run_dir)
    code = run_worker(document.resolve(), incarnation)
    leave_socket_dir(run_dir)
    return code
