"""`distflow metrics`: one line per training step, merged over the workers."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distflow.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 200
"""Width of a table written to a pipe or a file."""
TABLE = (
    ("step", "step", "{:.0f}"),
    ("score", "critic/score/mean", "{:.3f}"),
    ("reward", "critic/rewards/mean", "{:.3f}"),
    ("grad norm", "actor/grad_norm", "{:.3g}"),
    ("loss", "actor/loss", "{:.3g}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("length", "response_length/mean", "{:.1f}"),
    ("staleness", "staleness/mean", "{:.2f}"),
    ("samples/s", "perf/samples_per_s", "{:,.1f}"),
    ("trainer idle", "perf/trainer_idle_share", "{:.0%}"),
    ("rollout idle", "perf/rollout_idle_share", "{:.0%}"),
    ("step s", "timing_s/step", "{:.3f}"),
)


@click.command()
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="All metrics, as a JSON list with one object per training step.")
@click.option("--csv", "as_csv", is_flag=True, help="As CSV, one line per training step.")
@click.option("--keys", metavar="NAMES", help="Only these metrics, as in critic/score/mean,actor/*.")
@click.option("--last", type=click.IntRange(min=1), help="Only the last N training steps.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(run: str | None, as_json: bool, as_csv: bool, keys: str | None, last: int | None, runs_dir: Path) -> None:
    """Show metrics per training step of RUN (default: the newest), merged over its workers."""
    from distflow.launch.run.folder import find_run

    steps = read_steps(find_run(run, runs_dir), lambda line: click.echo(line, err=True))
    steps = steps if last is None else steps[-last:]
    names = None if keys is None else _chosen(keys, steps)
    if names is not None:
        steps = [{name: step[name] for name in ("step", *names) if name in step} for step in steps]
    if as_json:
        click.echo(json.dumps([finite(step) for step in steps]))
    elif as_csv:
        _print_csv(names, steps)
    else:
        _print_table(steps, TABLE if names is None else [TABLE[0], *((name, name, "{:.6g}") for name in names)])


def read_steps(run_dir: Path, tell: Callable[[str], None]) -> list[dict[str, float]]:
    """The merged metrics of a run, one mapping per training step; `tell` gets lines about what is missing."""
    from distflow.launch.observe.file_sync import refresh
    from distflow.launch.run.metrics_merge import MetricsReader

    for line in refresh(run_dir, ("metrics",), "metrics"):
        tell(line)
    reader = MetricsReader(run_dir)
    reader.read()
    if reader.malformed:
        tell(f"{run_dir}/metrics: {reader.malformed} incomplete lines were skipped")
    return reader.merged()


def _chosen(keys: str, steps: list[dict[str, float]]) -> list[str]:
    """The metrics that match, in the order given; raises UserError for a name that matches none."""
    there = list(dict.fromkeys(name for step in steps for name in step if name != "step"))
    chosen: list[str] = []
    for key in [part.strip() for part in keys.split(",") if part.strip()]:
        found = [name for name in there if fnmatchcase(name, key)]
        if not found and steps and key != "step":
            near = get_close_matches(key, there, n=3) or [name for name in there if key in name][:3]
            hint = f"did you mean {', '.join(near)}?" if near else "`--json` prints all metrics"
            raise UserError(f"--keys {key}: the run has no metric of this name — {hint}")
        chosen += found
    return list(dict.fromkeys(chosen))


def _print_csv(names: list[str] | None, steps: list[dict[str, float]]) -> None:
    """One column per metric that any training step has; cells without a finite number are empty."""
    columns = ["step", *(names if names is not None else sorted({name for step in steps for name in step} - {"step"}))]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for step in steps:
        writer.writerow(step[name] if name in step and math.isfinite(step[name]) else "" for name in columns)


def finite(step: dict[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinity, which JSON lacks, by null."""
    return {name: value if math.isfinite(value) else None for name, value in step.items()}


def _print_table(steps: list[dict[str, float]], table_columns: Sequence[tuple[str, str, str]]) -> None:
    """One line per training step; one per metric if these lines were too long, of the last steps that have room."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    columns = [column for column in table_columns if any(column[1] in step for step in steps)]
    found = [
        [label, *(form.format(step[name]) if name in step else "" for step in steps)] for label, name, form in columns
    ]
    if sum(_room(cells) for cells in found) > console.width:
        several = [_room(cells) for cells in zip(*found, strict=True)]
        shown = max(1, sum(sum(several[-last:]) <= console.width - several[0] for last in range(1, len(several))))
        if shown < len(steps):
            click.echo(f"the last {shown} of {len(steps)} training steps; --csv prints all", err=True)
        found = [list(row) for row in zip(*([cells[0], *cells[-shown:]] for cells in found), strict=True)]
    console.print(_table(found))


def _room(cells: Sequence[str]) -> int:
    return max(map(len, cells), default=0) + 1


def _table(columns: Sequence[Sequence[str]]) -> Table:
    """A table of columns that begin with their heads."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for head, *_ in columns:
        table.add_column(head, justify="right", overflow="fold")
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*row)
    return table
