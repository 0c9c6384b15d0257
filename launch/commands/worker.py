"""Single workers: `distflow worker` runs one by hand, from the recipe that `plan --write` or a run folder holds for it;
`distflow logs` prints their logs, side by side.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click

from distflow.errors import UserError

POLL_S = 0.2
FETCH_EVERY_S = 1.0
"""How often to fetch from hosts that do not share the run folder."""


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


@click.command()
@click.argument("run", required=False)
@click.option("--worker", help="Only this worker, for example rollout/0 or agent/0.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing until the run is over.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=20, show_default=True, help="Number of last lines of each log."
)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def logs(run: str | None, worker: str | None, follow: bool, lines: int, runs_dir: Path) -> None:
    """Print the logs of RUN (default: the newest)."""
    from distflow.launch.deploy.multi_host import latest_record
    from distflow.launch.observe.file_sync import refresh
    from distflow.launch.run.folder import find_run

    run_dir = find_run(run, runs_dir)
    for line in refresh(run_dir, ("logs",), "logs"):
        click.echo(line, err=True)
    fetched = time.monotonic()
    offsets = {path: _print_last(path, lines) for path in _logs(run_dir, worker)}
    while follow:
        over = latest_record(run_dir).over
        if time.monotonic() - fetched > FETCH_EVERY_S:
            refresh(run_dir, ("logs",), "logs")
            fetched = time.monotonic()
        # Logs that have appeared meanwhile are printed from their beginning.
        offsets = {path: _print_new(path, offsets) for path in _logs(run_dir, worker)}
        if over:
            return
        time.sleep(POLL_S)


def _logs(run_dir: Path, worker: str | None) -> list[Path]:
    paths = sorted((run_dir / "logs").glob("*.log"))
    if worker is None:
        return paths
    wanted = [path for path in paths if path.stem == worker.replace("/", "-")]
    if not wanted:
        known = ", ".join("/".join(path.stem.rsplit("-", 1)) for path in paths)
        raise UserError(f"--worker {worker}: {run_dir}/logs has no log of this worker — there are: {known}")
    return wanted


def _print_last(path: Path, lines: int) -> int:
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    kept = whole.splitlines()
    _echo(path, kept[len(kept) - min(lines, len(kept)) :])
    return len(whole)


def _print_new(path: Path, offsets: Mapping[Path, int]) -> int:
    offset = offsets.get(path, 0)
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    _echo(path, whole.splitlines())
    return offset + len(whole)


def _echo(path: Path, lines: list[bytes]) -> None:
    for line in lines:
        click.echo(f"{'/'.join(path.stem.rsplit('-', 1))} | {line.decode(errors='replace')}")
