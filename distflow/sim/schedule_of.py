"""The closed formulas for what is simulated."""

from __future__ import annotations

from distflow.sim.latency import DeviceLatency
from distflow.sim.predict import Load, on_one_host
from distflow.sim.theory import LengthMoments, Schedule, Side, SpeedUp, TheoryFleet, speed_up


def schedule_of(load: Load, device: DeviceLatency) -> Schedule:
    """A load in the terms of the model; without a bound of staleness, as if it were large."""
    weights, job, stale = device.weights, load.job, load.settings.max_staleness
    return Schedule(
        engines=load.rollouts,
        replicas=load.replicas,
        slots=load.slots,
        prompts=load.prompts,
        samples=job.samples,
        prompt_tokens=job.prompt_tokens,
        staleness=16 if stale is None else stale,
        streamed=load.streamed,
        balanced=load.stealing or load.dealing,
        passes=device.train.passes(job.epochs, job.forwards, recomputes=job.recomputes),
        transfer_s=0.0 if load.colocated else weights.arrives_s(one_host=on_one_host(load, device)),
        update_s=device.train.apply_s * job.updates + (0.0 if load.colocated else weights.publish_s),
        colocated=load.colocated,
        budget=job.budget,
        turns=job.turns,
    )


def speed_up_of(load: Load, device: DeviceLatency, moments: LengthMoments) -> SpeedUp | None:
    """What asynchrony brings by the theory, on as many devices; None if the memory is unknown, or both do not fit.

    Activations are recomputed, as what `DeviceMemory` says of their size takes for granted.
    """
    memory, job = device.memory, load.job
    if memory is None:
        return None
    row, weights = job.prompt_tokens + moments.mean, device.weights.bytes
    passes = device.train.passes(job.epochs, job.forwards, recomputes=True)
    train = Side(
        weights * memory.train_factor,
        row * memory.train_token,
        lambda batch: passes * device.train.seconds([row] * batch) / batch,
    )
    generate = Side(
        weights,
        row * memory.cache_token,
        lambda batch: moments.mean * device.decode.seconds(batch, row - moments.mean / 2) / batch,
    )
    devices = load.replicas if load.colocated else load.rollouts + load.replicas
    return speed_up(TheoryFleet(devices, memory.bytes, load.prompts * job.samples), train, generate)
