"""`distflow simulate`: what a recipe would do on given devices, in virtual time; and `distflow profile`."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from distflow.config.outputs import cannot_write, check_writable
from distflow.errors import UserError

if TYPE_CHECKING:
    from distflow.sim.fluid_engine import SampleTurns
    from distflow.sim.latency import DeviceLatency
    from distflow.sim.plan_simulation import Simulated, SimulationInput
    from distflow.sim.predict import Prediction
    from distflow.sim.profiling import Measurements

DEVICE = "h100-qwen2.5-7b"
MOST = 100
"""Simulations that one command makes."""
MOST_TURN_S = 3600.0
LIMIT_S = 45.0
TELL_S, TELL_FILE_S = 2.0, 10.0
"""How often a simulation tells how far it is: on a terminal, and elsewhere."""
DISTRIBUTION = {"median": 900.0, "sigma": 1.1, "prompt_share": 0.6}
Command = TypeVar("Command", bound=Callable[..., Any])


def load_options(command: Command) -> Command:
    """What to simulate a recipe on."""
    file = click.Path(dir_okay=False, path_type=Path)
    for option in (
        click.option(
            "--device",
            default=DEVICE,
            show_default=True,
            metavar="NAME|FILE",
            help="Latency model of device and model size: a shipped name, or a .yaml file.",
        ),
        click.option(
            "--lengths",
            metavar="KEY=VALUE,…",
            help="Response lengths: median (tokens, 900), sigma (of the logarithm, 1.1), prompt_share (0.6).",
        ),
        click.option("--trace", type=file, metavar="FILE", help="Measured lengths: a line of them for each prompt."),
        click.option(
            "--prompt-tokens",
            type=click.IntRange(min=1),
            metavar="N",
            help="Tokens of a prompt.  [default: half of the longest]",
        ),
        click.option(
            "--steps",
            type=click.IntRange(1, 1000),
            metavar="N",
            help="Simulated steps that count.  [default: the least multiple of 1 + max_staleness from 8 on; fewer for "
            "--optimize where that takes long]",
        ),
    ):
        command = option(command)
    return command


def _output_options(command: Command) -> Command:
    """Where to write what."""
    file = click.Path(dir_okay=False, path_type=Path)
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON."),
        click.option("-o", "--output", type=file, metavar="FILE", help="Write a timeline for Perfetto, *.json."),
        click.option("--plot", type=file, metavar="FILE", help="Draw the shares of time: .png, .svg or .pdf."),
    ):
        command = option(command)
    return command


def _turn_options(command: Command) -> Command:
    """How samples of several turns go on."""
    tokens = click.IntRange(min=1)
    command = click.option("--turn-s", type=float, metavar="S", help="Seconds of its environment after each turn.")(
        command
    )
    return click.option("--turn-tokens", type=tokens, metavar="N", help="Tokens of each turn of a sample.")(command)


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE[,VALUE…]]…")
@load_options
@click.option(
    "--limit",
    type=click.FloatRange(min=0.0, min_open=True),
    metavar="SECONDS",
    help="End each simulation after so long, with the training steps that it has by then.  "
    f"[default: {LIMIT_S:g}, or when two have ended, if that takes longer]",
)
@_turn_options
@_output_options
def command(
    recipe: str,
    overrides: tuple[str, ...],
    **given: Any,
) -> int:
    """Predict step time, idle time by cause, staleness and traffic of RECIPE on devices that need not be there.

    The cores of a run decide, in virtual time. Several values of a key (layout.pools.rollout.count=8,16) give a table.
    """
    outputs = {name: given.pop(name) for name in ("as_json", "output", "plot")}
    turns, limit_s = _turns(given.pop("turn_tokens"), given.pop("turn_s")), given.pop("limit")
    inputs = replace(simulation_input(given, timeline=outputs["output"] is not None), turns=turns)
    if outputs["plot"] is not None:
        from distflow.launch.commands.plot import check_output

        check_output("--plot", outputs["plot"])
    combinations = _combinations(overrides)
    if outputs["output"] is not None and len(combinations) > 1:
        raise UserError("-o: a timeline is that of one simulation — give one value of each key")
    for option, name in (("-o", "output"), ("--plot", "plot")):
        if outputs[name] is not None:
            check_writable(option, outputs[name])
    from distflow.sim.predict import LEAST_ENDED

    # Only a limit that somebody gave may end it with nothing to say.
    limits = (LIMIT_S, LEAST_ENDED) if limit_s is None else (limit_s, 0)
    found = []
    for number, (words, differing) in enumerate(combinations, start=1):
        which = f"{number} of {len(combinations)}: " if len(combinations) > 1 else ""
        with _Progress(which, *limits) as progress:
            found.append(_simulated(recipe, words, differing, replace(inputs, watch=progress.tell)))
    _show(found, inputs, outputs)
    return 0


def simulation_input(given: Mapping[str, Any], *, timeline: bool) -> SimulationInput:
    """How to simulate, by the options `load_options`. Raises UserError."""
    from distflow.sim.latency import load
    from distflow.sim.lengths import Lognormal, read_trace
    from distflow.sim.plan_simulation import SimulationInput

    device = load(given["device"])
    about = (given["prompt_tokens"], given["steps"], timeline)
    if given["trace"] is not None:
        if given["lengths"] is not None:
            raise UserError("--trace: has all lengths itself — leave out --lengths")
        return SimulationInput(device, read_trace(given["trace"]), f"lengths of {given['trace']}", *about)
    values = distribution(given["lengths"] or "")
    shown = ", ".join(f"{name} {value:g}" for name, value in values.items())
    return SimulationInput(device, Lognormal(**values), f"lognormal lengths, {shown}", *about)


def _turns(tokens: int | None, seconds: float | None) -> SampleTurns:
    from distflow.sim.fluid_engine import SampleTurns

    if (tokens is None) != (seconds is None):
        raise UserError("--turn-tokens and --turn-s: a turn has both — give both, or none")
    if seconds is not None and not 0.0 <= seconds <= MOST_TURN_S:
        raise UserError(f"--turn-s {seconds:g}: expected seconds from 0 to {MOST_TURN_S:g}, an hour for each turn")
    return SampleTurns(tokens or 0, seconds or 0.0)


def distribution(text: str) -> dict[str, float]:
    """median=…,sigma=…,prompt_share=…, each with a default. Raises UserError."""
    from distflow.sim.lengths import MOST_MEDIAN, MOST_SIGMA

    values = dict(DISTRIBUTION)
    given: set[str] = set()
    for word in filter(None, text.split(",")):
        key, _, value = word.partition("=")
        try:
            values[key.strip()], known = float(value), key.strip() in DISTRIBUTION
        except ValueError:
            known = False
        if not known:
            raise UserError(f"--lengths {word}: expected {', '.join(f'{key}=…' for key in DISTRIBUTION)} with numbers")
        if key.strip() in given:
            raise UserError(f"--lengths {text}: {key.strip()} is given twice — leave one out")
        given.add(key.strip())
    median, sigma = 1 <= values["median"] <= MOST_MEDIAN, 0 <= values["sigma"] <= MOST_SIGMA
    if not (median and sigma and 0 <= values["prompt_share"] <= 1):
        raise UserError(
            f"--lengths {text}: expected median from 1 to {MOST_MEDIAN:g}, sigma from 0 to {MOST_SIGMA:g} and "
            "prompt_share from 0 to 1"
        )
    return values


def _combinations(overrides: Sequence[str]) -> list[tuple[list[str], tuple[str, ...]]]:
    """The overrides of each simulation, and those in which they differ."""
    from distflow.config.compose import listed_values

    listed = [(word.partition("=")[0], listed_values(word.partition("=")[2])) for word in overrides]
    for key, count in Counter(key.lstrip("+~") for key, _ in listed).items():
        if count > 1:
            raise UserError(f"{key}: given {count} times — give it once, several values as one list: {key}=1,2,3")
    choices = [[f"{key}={value}" for value in values] for key, values in listed]
    found = [
        (list(words), tuple(word for word, each in zip(words, choices, strict=True) if len(each) > 1))
        for words in product(*choices)
    ]
    if len(found) > MOST:
        raise UserError(f"these values give {len(found)} simulations: expected at most {MOST}")
    return found


def _simulated(recipe: str, overrides: Sequence[str], differing: tuple[str, ...], inputs: SimulationInput) -> Simulated:
    from distflow.flow.recipe_check import plan_recipe
    from distflow.sim.notes import counted
    from distflow.sim.plan_simulation import simulate_plan
    from distflow.sim.predict import EndedEarly

    _, plan = plan_recipe(recipe, overrides, need_files=False)
    try:
        return simulate_plan(plan, inputs, differing)
    except EndedEarly as error:
        raise UserError(
            f"simulate: {counted(error.args[0], 'training step')} had ended when the time of --limit was over, too few "
            "to measure one — give more of it, such as --limit 600, or a smaller step (batch.prompts)"
        ) from None


class _Progress:
    """Tells on stderr how far a simulation is, and when it has taken long enough."""

    def __init__(self, which: str, limit_s: float, least: int) -> None:
        """`which`: of several simulations, as each line begins; `least`: steps before which it is not long enough."""
        self._which, self._limit_s, self._least = which, limit_s, least
        self._rewrites = sys.stderr.isatty()
        self._every_s = TELL_S if self._rewrites else TELL_FILE_S
        self._began = time.monotonic()
        self._tell_at = self._began + self._every_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._rewrites:
            click.echo("\r\x1b[K", nl=False, err=True)

    def tell(self, ended: int, made: int) -> bool:
        """Say it if it is time; returns whether the simulation is to end."""
        now = time.monotonic()
        long = now - self._began >= self._limit_s
        if now >= self._tell_at:
            self._tell_at = now + self._every_s
            text = f"{self._which}{ended} of {made} training steps simulated in {now - self._began:.0f} s"
            if long and ended < self._least:
                text += f"; {self._least} are needed to measure one, then it ends (batch.prompts: a smaller step)"
            click.echo(f"\r{text}\x1b[K" if self._rewrites else text, nl=not self._rewrites, err=True)
        return long and ended >= self._least


def _show(found: Sequence[Simulated], inputs: SimulationInput, outputs: Mapping[str, Any]) -> None:
    from distflow.sim import report

    if outputs["as_json"]:
        figures = [report.data(one) for one in found]
        click.echo(json.dumps(figures if len(found) > 1 else figures[0], indent=1))
    elif len(found) > 1:
        from distflow.launch.commands.metrics import print_columns

        print_columns(report.table(found))
        for note in dict.fromkeys(note for one in found for note in one.notes):
            click.echo(note)
    else:
        click.echo("\n".join(report.page(found[0], inputs)))
    if outputs["output"] is not None:
        from distflow.launch.commands.trace import write_trace

        write_trace(outputs["output"], _timeline(found[0].prediction))
        click.echo(f"{outputs['output']}: open it at ui.perfetto.dev", err=True)
    if outputs["plot"] is not None:
        from distflow.launch.commands.plot import draw_shares

        draw_shares(found, outputs["plot"])
        click.echo(f"{outputs['plot']}: shares of time", err=True)


def _timeline(prediction: Prediction) -> dict[str, Any]:
    """A trace of the steps that count, in the form of `distflow trace`."""
    from distflow.launch.commands.trace import TraceSpan, Track, tracks_trace
    from distflow.sim.report import STATES

    begin, end = prediction.began, prediction.ended
    tracks = []
    for worker, spans in prediction.spans.items():
        kept = [
            TraceSpan(
                STATES[span.state].partition(":")[0],
                span.state,
                1,
                1e6 * (max(span.begin, begin) - begin),
                1e6 * (min(span.end, end) - begin),
            )
            for span in spans
            if span.end > begin and span.begin < end
        ]
        tracks.append(Track(worker, threads={1: "simulated"}, spans=kept))
    return tracks_trace(tracks, {"simulated": True, "step_s": prediction.step_s})


@click.command(name="profile")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.yaml")
def profile(recipe: str, overrides: tuple[str, ...], output: Path) -> int:
    """Measure how long the engine and the backend of RECIPE take on this machine, and write a latency model.

    `distflow simulate` and the emulated engine take the file as a device. Needs the recipe's model and its device, and
    nothing of a run; what has no figure here (links between hosts) is assumed, and the file says so.
    """
    from distflow.flow.recipe_check import plan_recipe
    from distflow.sim.profiling import measure

    if output.suffix != ".yaml":
        raise UserError(f"-o {output}: a latency model is told from a shipped name by its ending: expected .yaml")
    check_writable("-o", output)
    _, plan = plan_recipe(recipe, overrides)
    measured = measure(plan, lambda what: click.echo(f"measuring: {what}", err=True))
    model = plan.recipe.models[plan.primary]
    words = shlex.join(["distflow", "profile", recipe, *overrides])
    of = f"{model.path or f'models.{plan.primary} of {recipe}'}, {model.dtype}"
    latency, notes = _fitted(measured, of, words, recomputed=model.gradient_checkpointing)
    _write_latency(output, latency)
    for note in notes:
        click.echo(note)
    click.echo(f"{output}: use it as `device: {output}` of an emulated engine, or simulate with it")
    return 0


def _fitted(measured: Measurements, model: str, words: str, *, recomputed: bool) -> tuple[DeviceLatency, list[str]]:
    """The fitted model, and what to know about it."""
    from distflow.sim.fitting import fit_decode, fit_training
    from distflow.sim.latency import DeviceCount, DeviceLatency, WeightLatency

    decode, off_decode = fit_decode(measured.decode, measured.prefill)
    fitted, off_train = fit_training(measured.train, measured.apply_s)
    train = replace(fitted, recomputed=recomputed)
    moved = measured.weights
    weights = WeightLatency(moved.nbytes, moved.publish_s, moved.swap_s, moved.copy_bytes_s)
    notes = [
        f"decode step: max({_short(decode.floor_s)}, {_short(decode.sample_s)} a sample), and "
        f"{_short(decode.context_s)} a token of context; {len(measured.decode)} measured, {off_decode}",
        f"forward and backward: {_short(train.latency_s)}, {_short(train.token_s)} a token, {_short(train.pair_s)} "
        f"a pair of tokens in a row; {len(measured.train)} measured, {off_train}",
        f"weights: {moved.nbytes / 1e6:.1f} MB, published in {_short(moved.publish_s)}, loaded in "
        f"{_short(moved.swap_s)}; optimizer step: {_short(train.apply_s)}",
    ]
    sources = (
        f"measured: {words}",
        f"decode steps {off_decode}",
        f"forward and backward {off_train}",
        "assumed, not measured: link_bytes_s",
    )
    gpus = DeviceCount(engine=measured.engine_gpus)
    return DeviceLatency(_device_name(measured.device), model, sources, decode, train, weights, gpus=gpus), notes


def _short(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _device_name(device: str) -> str:
    import torch

    from distflow.flow.lineage import processor

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else processor()


def _write_latency(path: Path, latency: DeviceLatency) -> None:
    from distflow.config.yamlfile import yaml_text

    values = asdict(latency)
    values["sources"] = list(latency.sources)
    try:
        path.write_text(yaml_text(values), encoding="utf-8")
    except OSError as error:
        raise cannot_write("-o", path, error) from None
