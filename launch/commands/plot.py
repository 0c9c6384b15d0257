"""`distflow plot`: the curves of runs, as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distflow.config.outputs import cannot_write
from distflow.errors import UserError, did_you_mean
from distflow.launch.commands.metrics import chosen_keys, read_runs
from distflow.launch.observe.file_sync import Steps
from distflow.metrics.merge import validated

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from distflow.sim.plan_simulation import Simulated

INSTALL = "pip install 'distflow-rl[plot]'"
WIDTH_IN, HEIGHT_IN, LEGEND_IN, DPI = 3.2, 2.3, 0.35, 110
COLOURS = ("#3066be", "#e4572e", "#2a9d5c", "#8e5bd0", "#d19a00", "#17a2b8", "#c2417c", "#6b7280")
"""Of the runs, in turn."""
LETTER_IN, HANDLE_IN = 0.09, 0.65
"""In the legend: the width of a letter, and of what stands beside a name."""
GREY = "#6b7280"
SHARES_IN, BAR_IN, REST_IN = 9.0, 0.45, 1.9
"""Of the picture of simulations."""
SHARES = "shares of time"
STYLES = ("-", "--", ":", "-.")
"""Of several metrics in one panel."""
WINDOWS = 40
"""The bold line is a mean over this part of all training steps, the faint one shows each of them."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram over training steps."""

    title: str
    metrics: tuple[tuple[str, str], ...]
    """Metric and label; all that a run has are drawn."""
    first: bool = False
    """Only the first of them that any run has."""
    outcome: bool = False
    """What training is for: drawn also if it never changes, which is news."""


PANELS = (
    Panel("score", (("critic/score/mean", ""),), outcome=True),
    Panel("reward", (("critic/rewards/mean", ""),), outcome=True),
    Panel("response length, tokens", (("response_length/mean", ""),)),
    Panel("entropy", (("actor/entropy", ""),)),
    Panel("KL", tuple((f"{name}", name) for name in ("actor/kl_loss", "critic/kl", "actor/ppo_kl")), first=True),
    Panel("staleness, versions", (("staleness/mean", ""),)),
    Panel(
        SHARES,
        (
            ("perf/trainer_idle_share", "trainers idle"),
            ("perf/rollout_idle_share", "rollouts idle"),
            ("perf/generate_share", "generating"),
            ("perf/score_share", "scoring"),
        ),
    ),
)


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]…")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A .png, .svg or .pdf file.  [default: RUN.png, curves.png of several]",
)
@click.option("--keys", metavar="NAMES", help="One panel for each of these metrics, as in critic/score/mean,val/.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(runs: tuple[str, ...], output: Path | None, keys: str | None, runs_dir: Path) -> int:
    """Draw score, validation, reward, response length, entropy, KL, staleness and shares of time of RUN (default: the
    newest).

    Several runs are drawn over each other.
    """
    check_output("-o", output or Path("curves.png"))
    found = read_runs(runs, runs_dir)
    output = output or Path("curves.png" if len(found) > 1 else f"{Path(next(iter(found))).name}.png")
    every = [step for steps in found.values() for step in steps]
    if not every:
        raise UserError(f"{', '.join(found)}: no training step has been done yet — there is nothing to draw")
    asked, missing = ([], []) if keys is None else chosen_keys(keys, every)
    wanted = _usual(every) if keys is None else [Panel(name, ((name, ""),)) for name in asked]
    constant = [] if keys is not None else [panel for panel in wanted if _is_dull(panel, every)]
    panels = [panel for panel in wanted if _drawn(panel, every) and panel not in constant]
    for panel in wanted:
        if panel not in panels:
            names = ", ".join(name for name, _ in _drawn(panel, every) or panel.metrics)
            why = f"{names} never changes" if panel in constant else f"no run has {names}"
            click.echo(f"note: no {panel.title.partition(',')[0]}: {why}", err=True)
    if not panels:
        found_none = "no run has a metric of the usual panels — choose some with --keys"
        raise UserError(f"plot: {found_none}" if keys is None else f"--keys {keys}: there is nothing to draw")
    figure = draw(panels, found)
    try:
        figure.savefig(output, dpi=DPI)
    except OSError as error:
        raise cannot_write("-o", output, error) from error
    click.echo(f"{output}: {len(panels)} panels of {', '.join(found)}")
    for line in missing:
        click.echo(line, err=True)
    return 2 if missing else 0


def _usual(steps: Steps) -> list[Panel]:
    """What is drawn if nothing else is asked for."""
    validation = [Panel(f"validation, {name}", ((name, ""),), outcome=True) for name in validated(steps)]
    return [PANELS[0], *validation, *PANELS[1:]]


def check_output(option: str, output: Path) -> None:
    """Before anything is read: raises UserError for a kind of file that is not known, or without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise UserError(f"plot: needs matplotlib ({error}) — {INSTALL}") from error
    kinds = FigureCanvasAgg.get_supported_filetypes()
    suffix = output.suffix.removeprefix(".")
    if suffix not in kinds:
        raise UserError(f"{option} {output}: unknown kind of picture {output.suffix!r} — {did_you_mean(suffix, kinds)}")


def _drawn(panel: Panel, steps: Steps) -> list[tuple[str, str]]:
    """The metrics of a panel that there are."""
    there = [metric for metric in panel.metrics if any(math.isfinite(step.get(metric[0], math.nan)) for step in steps)]
    return there[:1] if panel.first else there


def _is_dull(panel: Panel, steps: Steps) -> bool:
    """Tell whether nothing in a panel ever changes, as the staleness of a run that takes turns."""
    values = [{step[name] for step in steps if name in step} for name, _ in _drawn(panel, steps)]
    return len(steps) > 1 and not panel.outcome and bool(values) and max(map(len, values)) == 1


def draw(panels: Sequence[Panel], runs: Mapping[str, Steps]) -> Figure:
    """The panels in rows of three or four. A colour is a run; where there is one run, a metric."""
    from matplotlib.figure import Figure

    columns = min(len(panels), 3 if len(panels) <= 6 else 4)
    rows = math.ceil(len(panels) / columns)
    width = WIDTH_IN * columns
    side_by_side = max(1, min(len(runs), 4, int(width / _legend_width(runs))))
    lines = math.ceil(len(runs) / side_by_side)
    figure = Figure(figsize=(width, HEIGHT_IN * rows + LEGEND_IN * (lines + 1) / 2), layout="constrained")
    every = [step for steps in runs.values() for step in steps]
    for place, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, place)
        metrics = _drawn(panel, every)
        for (run, steps), (at, (name, label)) in product(enumerate(runs.values()), enumerate(metrics)):
            alone = len(runs) == 1
            _curve(axes, steps, name, COLOURS[(at if alone else run) % len(COLOURS)], STYLES[0 if alone else at % 4])
            if len(metrics) > 1 and run == 0:
                axes.plot([], [], STYLES[0 if alone else at % 4], color=COLOURS[at] if alone else GREY, label=label)
        _dress(axes, panel, metrics)
    handles = [figure.axes[0].plot([], [], color=colour)[0] for colour, _ in zip(cycle(COLOURS), runs, strict=False)]
    figure.legend(handles, list(runs), loc="outside upper center", ncols=side_by_side, frameon=False)
    return figure


def _legend_width(names: Iterable[str]) -> float:
    """Inches that the longest name takes in the legend, with its line."""
    return LETTER_IN * max(map(len, names)) + HANDLE_IN


def _curve(axes: Axes, steps: Steps, name: str, colour: str, style: str) -> None:
    """Each training step faintly, and their mean over a window."""
    import numpy as np

    drawn = [step for step in steps if name in step and math.isfinite(step[name])]
    x, y = np.array([step["step"] for step in drawn]), np.array([step[name] for step in drawn])
    window = len(drawn) // WINDOWS
    if window < 2:
        axes.plot(x, y, style, color=colour, linewidth=1.6, marker="o" if len(drawn) == 1 else "")
        return
    axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.25)
    weights = np.ones(window)
    mean = np.convolve(y, weights, "same") / np.convolve(np.ones(len(y)), weights, "same")
    axes.plot(x, mean, style, color=colour, linewidth=1.8)


def _dress(axes: Axes, panel: Panel, metrics: Sequence[tuple[str, str]]) -> None:
    axes.set_title(panel.title, fontsize=10, loc="left", color="#222222")
    if panel.first:
        axes.set_title(metrics[0][0], fontsize=8, loc="right", color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(labelsize=8, colors="#555555")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_xlabel("training step", fontsize=8, color="#555555")
    axes.margins(x=0.01)
    low, high = axes.dataLim.intervaly
    if panel.title == SHARES:
        axes.set_ylim(0, 1)
    elif low == high:
        # A constant: else it would seem to tremble about it.
        axes.set_ylim(low - 0.5, high + 0.5)
    if len(metrics) > 1:
        axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_shares(found: Sequence[Simulated], output: Path) -> None:
    """What each pool does with its time in simulations, a bar for each; raises UserError if it cannot be written."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from distflow.sim.report import STATES

    pools = found[0].prediction.pools
    figure = Figure(figsize=(SHARES_IN, len(pools) * BAR_IN * len(found) + REST_IN), layout="constrained")
    drawn: dict[str, str] = {}
    for place, pool in enumerate(pools):
        axes = figure.add_subplot(len(pools), 1, place + 1)
        labels = [" ".join(one.words) or f"{one.prediction.step_s:.1f} s a step" for one in found]
        left = [0.0] * len(found)
        for number, state in enumerate(STATES):
            shares = [one.prediction.pools[place].shares.get(state, 0.0) for one in found]
            if any(shares):
                colour = COLOURS[number % len(COLOURS)]
                drawn[state] = colour
                axes.barh(labels, shares, left=left, color=colour)
                left = [done + share for done, share in zip(left, shares, strict=True)]
        axes.set_xlim(0, 1)
        axes.set_title(f"{pool.name}, share of time", fontsize=9)
        axes.invert_yaxis()
    names = [STATES[state].partition(":")[0] for state in drawn]
    handles = [Patch(color=colour) for colour in drawn.values()]
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    try:
        figure.savefig(output, dpi=DPI)
    except OSError as error:
        raise cannot_write("--plot", output, error) from error
