"""`distflow profile`: a latency model of a recipe's own engine and backend, measured on this machine."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distflow.config.outputs import cannot_write, check_writable
from distflow.errors import UserError

if TYPE_CHECKING:
    from distflow.bench.profiling import Measurements
    from distflow.sim.latency import DeviceLatency


@click.command(name="profile")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.yaml")
def profile(recipe: str, overrides: tuple[str, ...], output: Path) -> int:
    """Measure how long the engine and the backend of RECIPE take on this machine, and write a latency model.

    `distflow simulate` and the emulated engine take the file as a device. Needs the recipe's model and its device, and
    nothing of a run; what has no figure here (links between hosts) is assumed, and the file says so.
    """
    from distflow.bench.profiling import measure
    from distflow.flow.recipe_check import plan_recipe

    if output.suffix != ".yaml":
        raise UserError(f"-o {output}: a latency model is told from a shipped name by its ending: expected .yaml")
    check_writable("-o", output)
    _, plan = plan_recipe(recipe, overrides)
    measured = measure(plan, lambda what: click.echo(f"measuring: {what}", err=True))
    model = plan.recipe.models[plan.primary]
    words = shlex.join(["distflow", "profile", recipe, *overrides])
    of = f"{model.path or f'models.{plan.primary} of {recipe}'}, {model.dtype}"
    latency, notes = _latency(measured, of, words, recomputed=model.gradient_checkpointing)
    _write(output, latency)
    for note in notes:
        click.echo(note)
    click.echo(f"{output}: use it as `device: {output}` of an emulated engine, or simulate with it")
    return 0


def _latency(measured: Measurements, model: str, words: str, *, recomputed: bool) -> tuple[DeviceLatency, list[str]]:
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


def _write(path: Path, latency: DeviceLatency) -> None:
    from distflow.config.yamlfile import yaml_text

    values = asdict(latency)
    values["sources"] = list(latency.sources)
    try:
        path.write_text(yaml_text(values), encoding="utf-8")
    except OSError as error:
        raise cannot_write("-o", path, error) from None
