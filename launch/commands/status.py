"""`distflow status`: what each worker does, by its own account."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

ANSWER_S = 2.0
WIDTH = 200
"""Of a table that goes into a pipe or a file."""


@click.command()
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(run: str | None, as_json: bool, runs_dir: Path) -> None:
    """Ask the workers of RUN (default: the newest) what they do and whom they wait for."""
    from distflow.launch.asking import worker_rows
    from distflow.launch.record import read_record
    from distflow.launch.runs import find_run

    record = read_record(find_run(run, runs_dir))
    rows = worker_rows(record, ANSWER_S)
    if as_json:
        click.echo(json.dumps({"run": record.name, "state": record.state, "workers": rows}))
        return
    click.echo(f"{record.run_dir}: {record.state}" + ("" if record.failure is None else f" — {record.failure.message}"))
    _print_table(rows)


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("name", "pid", "host", "state", "step", "version", "waiting_for")
    table = Table(*(column.replace("_", " ") for column in columns), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*("" if row[column] is None else str(row[column]) for column in columns))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
