"""What a run opens to the network without its key, and what crosses it in the clear: shown by `plan`, and tested."""

from __future__ import annotations

from dataclasses import dataclass

from distflow.flow.plan import Plan
from distflow.flow.sharding import divides_models

ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}
"""Engines whose libraries open ports, by a part of the engine's name."""


@dataclass(frozen=True, slots=True)
class Library:
    """Ports that a library opens in some workers (or their children), for anybody who reaches them."""

    name: str
    workers: tuple[str, ...]
    local: bool
    """On 127.0.0.1 whatever the run; else on the host's address in the run, which is 127.0.0.1 on one machine."""


def library_ports(plan: Plan) -> list[Library]:
    """All of them; what is ours takes the run's key, or is a Unix socket in a folder of the user's own."""
    found = []
    trainers = [worker for worker in plan.workers if str(worker.name) in plan.owners]
    if len(trainers) > 1 or divides_models(plan.recipe.layout.pools[trainers[0].name.pool]):
        found.append(Library("Gloo (on GPUs NCCL)", tuple(str(worker.name) for worker in trainers), local=False))
    for part, name in ENGINES.items():
        having = tuple(str(worker.name) for worker in plan.workers if part in (worker.engine or ""))
        if having:
            found.append(Library(f"{name} (torch's store, Gloo or NCCL)", having, local=True))
    return found


def network_lines(plan: Plan) -> list[str]:
    """For the page of a plan."""
    lines = []
    for library in library_ports(plan):
        where = "127.0.0.1" if library.local else "the host's address in the run (127.0.0.1 on one machine)"
        lines.append(f"ports without the run's key: {library.name} of {', '.join(library.workers)}, at {where}")
    everything = plan.recipe.security.encrypt == "all"
    weights = "encrypted" if everything else "in the clear, checked by digests (security.encrypt: all encrypts them)"
    lines.append(f"between hosts: control messages and samples encrypted; weights {weights}")
    if len(plan.owners) > 1:
        lines.append("between hosts: gradients in the clear, unauthenticated; keep training hosts in a private network")
    return lines
