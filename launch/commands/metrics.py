"""`distflow metrics`: one line per training step, merged over the workers."""

from __future__ import annotations

import csv
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distflow.errors import UserError
from distflow.launch.observe.file_sync import Steps, finite, read_steps
from distflow.metrics.merge import validated

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


MEAN_OF = 10
"""Training steps that the mean of a comparison is over, unless --last says otherwise."""
HIGHER = ("critic/score/*", "critic/rewards/*", "val/*", "perf/*_per_s", "perf/throughput", "rollout_corr/ess")
LOWER = ("timing_s/*", "perf/*_idle_share", "*/errors", "*/timeouts")
"""Metrics of which more is better, or less. The others have no best value."""
COUNTED = (
    "reward/unjudged",
    "reward/errors",
    "reward/timeouts",
    "reward/hanging",
    "reward/too_long",
    "rollout/errors",
    "rollout/left_out",
    "rollout/dropped",
    "group/dropped",
    "actor/empty_updates",
    "critic/empty_updates",
    "actor/skipped_updates",
    "critic/skipped_updates",
    "actor/nonfinite_losses",
    "critic/nonfinite_losses",
    "engine/bad_logprobs",
    "weights/canary_skipped",
    "perf/halved_microbatches",
)
"""Counts of docs/metrics.md that are there only once something was counted."""
KINDS = ("last", "best", "mean")
NAMED = 8
"""Metrics of a group that are named where a metric was asked for."""
Figures = dict[str, dict[str, float | None]]
"""By metric and kind."""


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]…")
@click.option("--json", "as_json", is_flag=True, help="All metrics, as a JSON list with one object per training step.")
@click.option("--csv", "as_csv", is_flag=True, help="As CSV, one line per training step.")
@click.option("--keys", metavar="NAMES", help="Only these metrics, as in critic/score/mean,actor/*,val/.")
@click.option(
    "--last",
    type=click.IntRange(min=1),
    help=f"Only the last N training steps; of several runs, the mean is over these.  [default: all; {MEAN_OF}]",
)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(
    runs: tuple[str, ...], as_json: bool, as_csv: bool, keys: str | None, last: int | None, runs_dir: Path
) -> int:
    """Show metrics per training step of RUN (default: the newest), merged over its workers.

    Several runs are compared: the last value of each metric, the best one, and the mean over the last training steps.
    Names in --keys that no metric has are told behind the others; then the exit code is 2.
    """
    found = read_runs(runs, runs_dir)
    where = "" if runs_dir.resolve() == Path("runs").resolve() else f" --runs-dir {shlex.quote(str(runs_dir))}"
    for run, steps in found.items():
        if not steps:
            _tell(
                f"{run} has no metrics yet: they come with the end of its first training step — `distflow status "
                f"{run}{where}` tells how far that has come"
            )
    every = [step for steps in found.values() for step in steps]
    names, missing = (None, []) if keys is None else chosen_keys(keys, every)
    _show(found, names, last, as_json=as_json, as_csv=as_csv)
    for key in [] if keys is None or not every else _asked(keys):
        if key in COUNTED and not any(key in step for step in every):
            _tell(f"--keys {key}: 0, nothing was counted in these training steps")
    for line in missing:
        _tell(line)
    return 2 if missing else 0


def _show(
    found: Mapping[str, Steps], names: list[str] | None, last: int | None, *, as_json: bool, as_csv: bool
) -> None:
    if len(found) > 1 and not as_csv:
        compared = {run: figures(steps, names, last or MEAN_OF) for run, steps in found.items()}
        if as_json:
            click.echo(json.dumps([{"run": run, "metrics": metrics} for run, metrics in compared.items()]))
        else:
            print_comparison(compared, names)
        return
    shown = {run: _cut(steps, names, last) for run, steps in found.items()}
    steps = next(iter(shown.values()))
    if as_csv:
        _print_csv(names, shown)
    elif as_json:
        click.echo(json.dumps([finite(step) for step in steps]))
    else:
        columns = [(name, name, "{:.6g}") for name in names or ()]
        usual = [*((name, name, "{:.3f}") for name in validated(steps)), *TABLE[1:]]
        _print_table(steps, [TABLE[0], *(usual if names is None else columns)])


def read_runs(runs: Sequence[str], runs_dir: Path) -> dict[str, Steps]:
    """The merged metrics of these runs, or of the newest, by name; by path where two have the same name."""
    from distflow.launch.deploy.multi_host import latest_record
    from distflow.launch.run.folder import find_run
    from distflow.launch.run.record import FILE_NAME

    folders = list(dict.fromkeys(find_run(run, runs_dir) for run in runs or (None,)))
    for folder in folders:
        if (folder / FILE_NAME).is_file():
            latest_record(folder)
    names = [folder.name for folder in folders]
    labels = [folder.name if names.count(folder.name) == 1 else str(folder) for folder in folders]
    return {label: read_steps(folder, _tell) for label, folder in zip(labels, folders, strict=True)}


def _tell(line: str) -> None:
    click.echo(line, err=True)


def _cut(steps: Steps, names: Sequence[str] | None, last: int | None) -> Steps:
    """The last training steps, and of the metrics that were asked for those in which there is one of them."""
    if names is None:
        return steps if last is None else steps[-last:]
    wanted = [name for name in names if name != "step"]
    having = [step for step in steps if not wanted or any(name in step for name in wanted)]
    kept = having if last is None else having[-last:]
    return [{name: step[name] for name in ("step", *names) if name in step} for step in kept]


def chosen_keys(keys: str, steps: Steps) -> tuple[list[str], list[str]]:
    """The metrics that match, in the order given, and a line about each name that matches none; raises UserError with
    these lines where nothing matches. Counts that may be missing, since they are 0, are no wrong names.

    `val/` is all below it, as `val/*` is.
    """
    there = list(dict.fromkeys(name for step in steps for name in step if name != "step"))
    chosen, missing = list[str](), list[str]()
    asked = _asked(keys)
    for key in asked:
        found = [name for name in there if fnmatchcase(name, f"{key}*" if key.endswith("/") else key)]
        if not found and steps and key not in ("step", *COUNTED):
            missing.append(_missing(key, there))
        chosen += found
    if missing and len(missing) == len(asked):
        raise UserError("\n".join(missing))
    return list(dict.fromkeys(chosen)), missing


def _asked(keys: str) -> list[str]:
    return [part.strip() for part in keys.split(",") if part.strip()]


def _missing(key: str, there: Sequence[str]) -> str:
    """Say that there is no such metric, and what may be meant: what is below it, or has nearly that name."""
    below = [name for name in there if name.startswith(f"{key}/")]
    if below:
        more = f", … {len(below)} in all" if len(below) > NAMED else ""
        return (
            f"--keys {key}: a group of metrics, not one — below it are {', '.join(below[:NAMED])}{more}; {key}/ is all "
            "of them"
        )
    near = get_close_matches(key, there, n=3) or [name for name in there if key in name][:3]
    hint = f"did you mean {', '.join(near)}?" if near else "`--json` prints all metrics"
    return f"--keys {key}: the run has no metric of this name — {hint}"


def figures(steps: Steps, names: Sequence[str] | None, last: int) -> Figures:
    """The last value of each metric, the best, and the mean over the last training steps; None: there is none."""
    there = dict.fromkeys(name for step in steps for name in step if name not in ("step", "term"))
    found: Figures = {"step": dict.fromkeys(KINDS)}
    if steps:
        found["step"]["last"] = steps[-1]["step"]
    for name in there if names is None else [name for name in names if name in there]:
        values = [step[name] for step in steps if name in step and math.isfinite(step[name])]
        recent = [step[name] for step in steps[-last:] if name in step and math.isfinite(step[name])]
        found[name] = {
            "last": values[-1] if values else None,
            "best": _best(name, values),
            "mean": math.fsum(recent) / len(recent) if recent else None,
        }
    return found


def _best(name: str, values: Sequence[float]) -> float | None:
    for better, patterns in ((max, HIGHER), (min, LOWER)):
        if values and any(fnmatchcase(name, pattern) for pattern in patterns):
            return better(values)
    return None


def print_comparison(compared: Mapping[str, Figures], names: Sequence[str] | None = None) -> None:
    """A line for each metric (default: the main ones), three columns for each run; as many runs as have room."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    columns = TABLE if names is None else [TABLE[0], *((name, name, "{:.6g}") for name in names)]
    rows = [column for column in columns if any(column[1] in one for one in compared.values())]
    head = ["", *(label for label, _, _ in rows)]
    shown = [head]
    for run, found in compared.items():
        cells = [[kind, *(_cell(found, name, kind, form) for _, name, form in rows)] for kind in KINDS]
        cells[0][0] = f"{run}\n{KINDS[0]}"
        if len(shown) > 1 and sum(map(_room, [*shown, *cells])) > console.width:
            console.print(_table(shown))
            console.print()
            shown = [head]
        shown += cells
    console.print(_table(shown))


def _cell(found: Figures, name: str, kind: str, form: str) -> str:
    value = found[name][kind] if name in found else None
    return "" if value is None else form.format(value)


def _print_csv(names: list[str] | None, runs: Mapping[str, Steps]) -> None:
    """One column per metric that any training step has; cells without a finite number are empty."""
    there = sorted({name for steps in runs.values() for step in steps for name in step} - {"step"})
    columns = ["step", *(there if names is None else names)]
    several = len(runs) > 1
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*(["run"] if several else []), *columns])
    for run, steps in runs.items():
        for step in steps:
            cells = [step[name] if name in step and math.isfinite(step[name]) else "" for name in columns]
            writer.writerow([*([run] if several else []), *cells])


def _print_table(steps: Steps, table_columns: Sequence[tuple[str, str, str]]) -> None:
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


def print_columns(columns: Sequence[Sequence[str]]) -> None:
    """A table of columns that begin with their heads."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else WIDTH).print(_table(columns))


def _room(cells: Sequence[str]) -> int:
    return max((len(line) for cell in cells for line in cell.splitlines()), default=0) + 1


def _table(columns: Sequence[Sequence[str]]) -> Table:
    """A table of columns that begin with their heads."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for head, *_ in columns:
        table.add_column(head, justify="right", overflow="fold")
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*row)
    return table
