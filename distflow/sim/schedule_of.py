"""The schedule model of what is simulated."""

from __future__ import annotations

from distflow.sim.latency import DeviceLatency
from distflow.sim.predict import Load
from distflow.sim.theory import Schedule
from distflow.sim.workload import FORWARD


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
        passes=job.epochs + job.forwards * FORWARD,
        transfer_s=0.0 if load.colocated else weights.bytes / weights.link_bytes_s,
        update_s=device.train.apply_s * job.updates + (0.0 if load.colocated else weights.publish_s),
        colocated=load.colocated,
    )
