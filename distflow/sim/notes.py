"""Lines about what a simulation takes for granted of a plan, and where that may be far from what a run of it does."""

from __future__ import annotations

from distflow.flow.plan import Plan
from distflow.flow.sharding import divides_models
from distflow.flow.slots_fit import SlotsFit
from distflow.sim.latency import DeviceLatency
from distflow.sim.theory import LengthMoments
from distflow.sim.workload import Job

CUT = 0.2
"""Share of the responses that are cut off from which that is said."""
EMULATED = "distflow.testing.emulated:"


def early_notes(steps: int, wanted: int) -> list[str]:
    """Return a line where fewer training steps than were wanted could be simulated in time; otherwise none."""
    if steps >= wanted:
        return []
    return [
        f"note: ended early: {steps} of {counted(wanted, 'training step')} in the time that --limit allows — a larger "
        "one (--limit 600) goes on for longer; fewer samples a step (batch.prompts) take less"
    ]


def divided_notes(plan: Plan) -> list[str]:
    """Return a line where training workers divide a model among them and compute together; otherwise none."""
    pool, workers = plan.recipe.layout.pools[plan.home.name], plan.home.count
    if workers == 1 or not divides_models(pool):
        return []
    zero = pool.backend_options_of().get("zero", pool.zero)
    named = f"backend {pool.backend!r}" + ("" if zero is None else f" with ZeRO stage {zero}")
    return [
        f"note: {named} divides the model over the {workers} workers of {plan.home.name!r}: simulated is that each has "
        "all of it and computes alone, without what they send each other for every micro-batch; so training takes "
        "longer than this says"
    ]


def gpu_notes(device: DeviceLatency, engine: int, pool: str) -> list[str]:
    """A line where an engine of this pool has another number of GPUs than its times are of; otherwise none."""
    if engine in (0, device.gpus.engine):
        return []
    gpus = counted(engine, "GPU")
    return [
        f"note: an engine of {pool} has {gpus}, and the times of {device.device} are of {device.gpus.engine}: it is "
        f"simulated as fast as these — `distflow profile` measures a latency model of engines with {gpus}"
    ]


def slot_notes(fit: SlotsFit | None, context: float, pool: str) -> list[str]:
    """A line where an engine of this pool has more slots than memory for samples of so many tokens, as far as known."""
    if fit is None or fit.slots <= fit.samples(context):
        return []
    return [
        f"warning: the {fit.slots} slots of an engine of {pool} are more than its KV memory has room for samples "
        f"({fit.samples(context)} of the mean {context:,.0f} tokens): what waits or is computed again for it is not "
        "simulated"
    ]


def truncation_notes(job: Job, prompt_tokens: int | None, moments: LengthMoments) -> list[str]:
    """Lines where the recipe cuts off responses of these lengths, or prompts of so many tokens (None: its own)."""
    lines = []
    if (cut := moments.above(job.response_tokens)) >= CUT:
        lines.append(f"note: {cut:.0%} of the responses are cut off at {job.response_tokens} tokens (max_new_tokens)")
    if prompt_tokens is not None and prompt_tokens > job.prompt_tokens:
        lines.append(f"note: prompts are cut to {job.prompt_tokens} tokens (data.max_prompt_tokens)")
    return lines


def emulation_notes(plan: Plan) -> list[str]:
    """A line where emulated engines and backends of this plan have options, none of which a simulation asks for."""
    told = dict.fromkeys(
        f"{section} of {worker.name.pool} ({', '.join(options)})"
        for worker in plan.workers
        for kind, section, options in (
            (worker.engine, "engine_options", worker.engine_options),
            (worker.backend, "backend_options", worker.backend_options),
        )
        if (kind or "").startswith(EMULATED) and options
    )
    if not told:
        return []
    return [f"note: simulated is what --device and --lengths say: {' and '.join(told)} are not used"]


def counted(number: int, what: str) -> str:
    """`1 device`, `2 devices`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
