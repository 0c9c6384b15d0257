"""Where a worker's time went in one training step, as shares that merge exactly: each with its weight in seconds."""

from __future__ import annotations

from collections.abc import Mapping

STEP = "timing_s/step"
GENERATE = "timing_s/gen"
PHASE = "timing_s/generation"
"""Seconds of a training step that a colocated worker gives to generating, before it turns to training."""
TRAINER_WAITS = "timing_s/wait_samples"
WAITS = "timing_s/wait_"
Share = tuple[float, float]
"""Value between 0 and 1, and its weight in seconds."""


def time_shares(timings: Mapping[str, float], roles: Mapping[str, float], interval_s: float) -> dict[str, Share]:
    """Shares for one line of metrics. `timings`: metrics `timing_s/…`; `roles`: seconds in steps by role.

    A training worker: `perf/trainer_idle_share`, of the time in which it could train. A generating worker:
    `perf/rollout_idle_share`, `perf/generate_share` and `perf/score_share`, of the time in which it could generate,
    which is `interval_s` (since the line before) unless the worker is colocated. A colocated one also tells
    `perf/generation_share`, how much of a training step its generating phase takes.
    """
    shares: dict[str, Share] = {}
    generating_s = interval_s
    if STEP in timings:
        step_s = timings[STEP]
        generating_s = timings.get(PHASE, 0.0)
        shares |= _share("perf/trainer_idle_share", timings.get(TRAINER_WAITS, 0.0), step_s - generating_s)
        if PHASE in timings:
            shares |= _share("perf/generation_share", generating_s, step_s)
    waits = [name for name in timings if name.startswith(WAITS) and name != TRAINER_WAITS]
    if GENERATE in timings or (waits and STEP not in timings):
        shares |= _share("perf/rollout_idle_share", sum(timings[name] for name in waits), generating_s)
        shares |= _share("perf/generate_share", timings.get(GENERATE, 0.0), generating_s)
        shares |= _share("perf/score_share", roles.get("score", 0.0), generating_s)
    return shares


def _share(name: str, part_s: float, whole_s: float) -> dict[str, Share]:
    # Parts are measured by themselves and may pass the whole by a hair.
    return {name: (min(1.0, part_s / whole_s), whole_s)} if whole_s > 0 else {}
