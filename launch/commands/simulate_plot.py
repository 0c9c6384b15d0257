"""The picture of `distflow simulate --plot`: what each pool does with its time, a bar for each simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.errors import UserError
from distflow.launch.commands.plot import COLOURS, DPI
from distflow.launch.commands.simulate_text import STATES

if TYPE_CHECKING:
    from distflow.launch.commands.simulate import Simulated

WIDTH_IN, BAR_IN, REST_IN = 9.0, 0.45, 1.9


def draw_shares(found: Sequence[Simulated], output: Path) -> None:
    """Draw and write it; raises UserError where that cannot be done."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    pools = found[0].prediction.pools
    figure = Figure(figsize=(WIDTH_IN, len(pools) * BAR_IN * len(found) + REST_IN), layout="constrained")
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
        raise UserError(
            f"--plot {output}: cannot be written ({error.strerror}) — give a file in a folder that exists"
        ) from error
