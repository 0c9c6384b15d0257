"""What `distflow plan --optimize` prints: a table of splits with a verdict, or the figures as plain data."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from distflow.sim.costs import CostSearch
from distflow.sim.notes import counted
from distflow.sim.plan_simulation import SimulationInput
from distflow.sim.predict import LEFT_OUT
from distflow.sim.report import shown_seconds
from distflow.sim.splits import Candidate, SplitSearch, StalenessChoice, limit_of

REFUSED = 3
"""Splits that are told to be refused, with the reason."""


def table(found: SplitSearch) -> list[list[str]]:
    """Columns that begin with their heads: the splits that were simulated."""
    rule = found.rule
    heads = ["", rule.generating_pool, rule.training_pool, "step s", "formula s"]
    heads += [f"{rule.generating_pool} busy", "slots used", f"{rule.training_pool} busy", "limited by"]
    rows = [heads]
    for one in found.candidates:
        if one.prediction is not None:
            making, training = one.prediction.pools
            slots = "" if making.slots_used is None else f"{making.slots_used:.0%}"
            cells = [_mark(found, one), str(one.split.rollouts), str(one.split.trainers), f"{one.step_s:.2f}"]
            cells += [f"{one.model.step_s:.2f}", f"{making.utilisation:.0%}", slots, f"{training.utilisation:.0%}"]
            rows.append([*cells, limit_of(one).name])
    return [list(column) for column in zip(*rows, strict=True)]


def _mark(found: SplitSearch, one: Candidate) -> str:
    marks = ["present"] if one is found.present else []
    marks += ["best"] if one is found.best and found.worth_it else []
    return ", ".join(marks)


def above(found: SplitSearch, inputs: SimulationInput) -> list[str]:
    """The lines before the table."""
    rule = found.rule
    simulated = sum(one.prediction is not None for one in found.candidates)
    each = ""
    if (rule.engine, rule.trainer) != (1, 1):
        each = f", {rule.engine} for a worker of {rule.generating_pool} and {rule.trainer} for one of "
        each += rule.training_pool
    if rule.used(rule.present) != rule.devices:
        each += f" (the present layout has {rule.used(rule.present)})"
    bound = "unbounded" if found.staleness is None else found.staleness
    return [
        f"simulated on {inputs.device.device}, {inputs.device.model}; {inputs.shown}",
        f"{counted(rule.devices, 'device')} between {rule.generating_pool} and {rule.training_pool}{each}; "
        f"max_staleness {bound}; {simulated} of {counted(len(found.candidates), 'split')} simulated, "
        f"{counted(found.steps, 'training step')} of each",
        "",
    ]


def below(found: SplitSearch, notes: Sequence[str]) -> list[str]:
    """The lines after the table: what to do, and why. `notes`: about the hosts."""
    limit = limit_of(found.present)
    lines = ["", *_left(found), *_verdict(found)]
    lines.append(f"what limits the present layout: {limit.name} — {limit.why}")
    lines += [_staleness(found, other) for other in found.others if other.candidate.prediction is not None]
    return [*lines, *notes, "", f"left out of simulations: {'; '.join(LEFT_OUT)}"]


def _left(found: SplitSearch) -> list[str]:
    """About the splits that were not simulated."""
    lines = []
    left = [one for one in found.candidates if one.prediction is None and not one.refused]
    if left:
        times = sorted({shown_seconds(end(one.model.step_s for one in left)) for end in (min, max)}, key=_number)
        lines.append(f"not simulated: {len(left)}, by the formula {' to '.join(times)} a training step")
    refused = [f"{one.split} is refused: {one.refused}" for one in found.candidates if one.refused]
    lines += refused[:REFUSED]
    lines += [f"and {len(refused) - REFUSED} more"] if len(refused) > REFUSED else []
    if lines:
        lines.append("")
    return lines


def _number(seconds: str) -> float:
    return float(seconds.partition(" ")[0])


def _verdict(found: SplitSearch) -> list[str]:
    best, present = found.best, found.present
    if not found.worth_it:
        than = "" if best is present else f" ({best.split} is {found.gain:.1%} faster)"
        of = counted(found.rule.devices, "device")
        if all(one.refused for one in found.candidates if one is not present):
            return [f"keep the present layout: of {of} there is no other split that can be had"]
        return [f"keep the present layout: of {of} no other split is clearly faster{than}"]
    words = " ".join(found.rule.words(best.split))
    took, now = shown_seconds(best.step_s), shown_seconds(present.step_s)
    return [f"best: {best.split}, {took} a training step in place of {now} ({-found.gain:+.0%}): {words}"]


def _staleness(found: SplitSearch, other: StalenessChoice) -> str:
    """What a larger bound would bring; whether samples may be that old is for the user to say."""
    one = other.candidate
    change = one.step_s / found.proposed.step_s - 1.0
    counts = " ".join(found.rule.words(one.split)) if one.split != found.proposed.split else ""
    words = f"layout.max_staleness={other.staleness}{' ' if counts else ''}{counts}"
    took = f"{shown_seconds(one.step_s)} a training step ({change:+.0%})"
    return f"with {words}: {took}, if the algorithm bears older samples"


def above_costs() -> list[str]:
    """The lines before the table of costs."""
    return ["", "the cheapest split of each site alone, by what a million trained response tokens cost:", ""]


def cost_table(found: SplitSearch, costs: CostSearch) -> list[list[str]]:
    """Columns that begin with their heads: the cheapest split of each site."""
    rule = found.rule
    rows = [
        ["site", "slots", rule.generating_pool, rule.training_pool, "used", "an hour", "step s", "a million tokens"]
    ]
    for one in costs.sites:
        counts = [len(one.site.slots), *one.candidate.split, len(one.slots)]
        figures = [f"{one.hourly:.2f}", f"{one.candidate.step_s:.2f}", f"{one.per_million:.4g}"]
        rows.append([one.site.name or "(none)", *map(str, counts), *figures])
    return [list(column) for column in zip(*rows, strict=True)]


def below_costs(found: SplitSearch, costs: CostSearch) -> list[str]:
    """The lines after it: what to type for the cheapest of all, and which sites are left out."""
    lines = [""]
    if costs.sites:
        best = costs.sites[0]
        longer = best.candidate.step_s / found.proposed.step_s
        lines.append(f"cheapest: {shlex.join(best.words)} with --include {best.include}, {best.hourly:g} an hour")
        lines.append(f"its training steps are {longer:.1f} times as long as those of the best split above")
    return [*lines, *(f"left out: {site or 'hosts without a site'} — {why}" for site, why in costs.left_out.items())]


def data(found: SplitSearch, costs: CostSearch, notes: Sequence[str]) -> dict[str, Any]:
    """For programs."""
    rule = found.rule
    return {
        "devices": rule.devices,
        "devices_of": {rule.generating_pool: rule.engine, rule.training_pool: rule.trainer},
        "max_staleness": found.staleness,
        "steps": found.steps,
        "present": _candidate(found, found.present),
        "best": _candidate(found, found.best),
        "gain": found.gain,
        "limit": dict(zip(("name", "why"), limit_of(found.present), strict=True)),
        "candidates": [_candidate(found, one) for one in found.candidates],
        "more_staleness": [
            {"max_staleness": other.staleness, **_candidate(found, other.candidate)} for other in found.others
        ],
        "costs": [
            {
                "site": one.site.name,
                "include": one.include,
                "hourly": one.hourly,
                "per_million_tokens": one.per_million,
                **_candidate(found, one.candidate),
                "overrides": list(one.words),
            }
            for one in costs.sites
        ],
        "sites_left_out": dict(costs.left_out),
        "not_simulated": list(LEFT_OUT),
        "notes": list(notes),
    }


def _candidate(found: SplitSearch, one: Candidate) -> dict[str, Any]:
    rule, prediction = found.rule, one.prediction
    told: dict[str, Any] = {
        "workers": {rule.generating_pool: one.split.rollouts, rule.training_pool: one.split.trainers},
        "devices": rule.used(one.split),
        "overrides": list(rule.words(one.split)),
        "simulated": prediction is not None,
        "step_s": one.step_s,
        "model_s": one.model.step_s,
    }
    if one.refused:
        told["refused"] = one.refused
    if prediction is not None:
        told["busy"] = {pool.name: pool.utilisation for pool in prediction.pools}
        told["slots"] = prediction.pools[0].slots_used
        told["tokens_s"] = prediction.tokens_s
        told["limited_by"] = limit_of(one).name
    return told
