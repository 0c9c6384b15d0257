"""What `distflow simulate` prints: a page of one simulation, a table of several, or their figures as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distflow.sim.account import COLOCATED, DECODE, FIRST, LATER, LEASES, LOADS, OTHERS, STALLED, TRAIN, UPDATE, WEIGHTS
from distflow.sim.latency import DeviceLatency
from distflow.sim.notes import counted
from distflow.sim.plan_simulation import Simulated, SimulationInput
from distflow.sim.predict import LEFT_OUT, PoolUse, Prediction

STATES: Mapping[str, str] = {
    DECODE: "generates",
    LEASES: "waits for leases: all that max_staleness or memory allows is leased",
    WEIGHTS: "waits for newer weights, which its leases need",
    STALLED: "computes prompts or environments",
    LOADS: "loads new weights",
    COLOCATED: "trains (colocated)",
    TRAIN: "trains",
    FIRST: "waits for the first samples of the step",
    LATER: "waits for more samples of the step",
    OTHERS: "waits for other replicas, after the last sample",
    UPDATE: "optimizer step, and publishing weights",
}
"""States of `distflow.sim.account`."""
LEAST = 0.0005
"""Shares below it are not shown."""


def page(found: Simulated, inputs: SimulationInput) -> list[str]:
    """For people."""
    one, model = found.prediction, found.model
    lines = [
        f"simulated on {inputs.device.device}, {inputs.device.model}; {inputs.shown}",
        *found.notes,
        "",
        f"training step      {shown_seconds(one.step_s)}   ({counted(len(one.steps), 'step')}, "
        f"{shown_seconds(min(one.steps))} to {shown_seconds(max(one.steps))})",
        f"  schedule model   {shown_seconds(model.step_s)}   training alone {shown_seconds(model.train_s)}, "
        f"decoding alone {shown_seconds(model.rate_s)}, longest sample {shown_seconds(model.critical_s)}",
        f"  ideal            {shown_seconds(found.ideal_s)}   all work over all devices, as if each could do either: "
        f"{found.ideal_s / one.step_s:.0%} of the step",
        *_theory(found),
        *_weights(one, inputs.device),
        f"samples            {one.samples_s:,.1f} a second, {one.tokens_s:,.0f} response tokens a second",
    ]
    for pool in one.pools:
        lines += ["", f"{pool.name}: {pool.workers} worker(s), busy {pool.utilisation:.1%}{_slots(pool, found)}"]
        lines += [f"  {share:6.1%}  {STATES[state]}" for state, share in pool.shares.items() if share >= LEAST]
    histogram = ", ".join(f"{lag}: {share:.1%}" for lag, share in one.staleness.items())
    lines += [
        "",
        f"staleness          {histogram}   (versions: groups)",
        f"never trained on   {one.never_trained:,} of {one.produced:,} tokens generated",
        f"messages           {one.messages_group:.1f} a group; the busiest worker, {one.busiest}: "
        f"{one.busiest_messages_s:,.1f} messages and {one.busiest_bytes_s / 1e6:,.2f} MB a second",
        "bytes a step       " + ", ".join(f"{link} {_bytes(n)}" for link, n in one.bytes_step.items()),
        "",
        f"not simulated: {'; '.join(LEFT_OUT)}",
        f"took {one.took_s:.1f} s of a core",
    ]
    return lines


def _weights(one: Prediction, device: DeviceLatency) -> list[str]:
    """How a version of the weights gets from the trainers to the engines, unless in place."""
    if not one.arrives_s:
        return []
    where = "through the memory of one host" if one.one_host else "between hosts, over a link"
    weights = device.weights
    return [
        f"new weights        {shown_seconds(weights.publish_s)} to publish, {shown_seconds(one.arrives_s)} under way "
        f"{where}, {shown_seconds(weights.swap_s)} to load"
    ]


def _theory(found: Simulated) -> list[str]:
    theory = found.theory
    if theory is None:
        return []
    return [
        f"  asynchrony       × {theory.factor:.2f} in theory, long tails apart: {shown_seconds(theory.sync_s)} with "
        f"both models on all devices, {shown_seconds(theory.async_s)} with {theory.training_share:.0%} of them for "
        "training"
    ]


def table(found: Sequence[Simulated]) -> list[list[str]]:
    """Columns that begin with their heads: the values, then what came of them."""
    columns = [[word.partition("=")[0] for word in found[0].words]]
    heads = [[head] for head in columns[0]]
    for one in found:
        for column, word in zip(heads, one.words, strict=True):
            column.append(word.partition("=")[2])
    pools = found[0].prediction.pools
    figures = [
        ["step s"],
        ["model s"],
        ["ideal s"],
        ["samples/s"],
        *([f"{pool.name} busy"] for pool in pools),
        ["staleness"],
        ["never trained"],
    ]
    for one in found:
        prediction = one.prediction
        mean = sum(lag * share for lag, share in prediction.staleness.items())
        busy = [f"{pool.utilisation:.0%}" for pool in prediction.pools]
        lost = prediction.never_trained / max(1, prediction.produced)
        cells = [
            f"{prediction.step_s:.1f}",
            f"{one.model.step_s:.1f}",
            f"{one.ideal_s:.1f}",
            f"{prediction.samples_s:.1f}",
            *busy,
        ]
        for column, cell in zip(figures, [*cells, f"{mean:.2f}", f"{lost:.1%}"], strict=True):
            column.append(cell)
    return heads + figures


def data(found: Simulated) -> dict[str, Any]:
    """For programs."""
    one = found.prediction
    return {
        "overrides": list(found.words),
        "step_s": one.step_s,
        "steps_s": list(one.steps),
        "model_s": found.model.step_s,
        "ideal_s": found.ideal_s,
        "notes": list(found.notes),
        "theory": None if found.theory is None else {"sync_s": found.theory.sync_s, "async_s": found.theory.async_s},
        "kv_samples": found.fitting,
        "samples_s": one.samples_s,
        "tokens_s": one.tokens_s,
        "pools": {
            pool.name: {
                "workers": pool.workers,
                "busy": pool.utilisation,
                "slots": pool.slots_used,
                "shares": dict(pool.shares),
            }
            for pool in one.pools
        },
        "staleness": {str(lag): share for lag, share in one.staleness.items()},
        "tokens": {"generated": one.produced, "trained": one.trained},
        "messages_a_group": one.messages_group,
        "bytes_a_step": dict(one.bytes_step),
        "busiest": {"worker": one.busiest, "messages_s": one.busiest_messages_s, "bytes_s": one.busiest_bytes_s},
        "not_simulated": list(LEFT_OUT),
        "took_s": one.took_s,
    }


def _slots(pool: PoolUse, found: Simulated) -> str:
    if pool.slots_used is None:
        return ""
    shown = f", slots in use {pool.slots_used:.1%}"
    if found.fit is None:
        return shown
    return (
        f"{shown} of {found.fit.slots}, KV memory for {found.fitting} samples of the mean {found.context:,.0f} tokens"
    )


def shown_seconds(value: float) -> str:
    """`4.21 s`, `84.2 s`."""
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"
