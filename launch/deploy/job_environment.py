"""Which node of which job this process is, as torchrun, SkyPilot, Kubernetes or Slurm tell it in the environment.

And which environment variables the agents and workers on other hosts get from the launching machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from distflow.errors import UserError

DEFAULT_PORT = 29_400
_JOB_PORTS = 20_000
"""Slurm jobs without MASTER_PORT meet at a port from here on, by their number, so that two jobs rarely share one."""
_PART = re.compile(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*")
FORWARDED = (
    "PYTHONPATH",
    "CUDA_*",
    "NCCL_*",
    "GLOO_*",
    "HF_HOME",
    "TORCH_*",
    "OMP_*",
    "DISTFLOW_*",
)
"""Names and patterns; not PATH, HOME and the like, which belong to their host."""
SECRET = "DISTFLOW_RUN_KEY"


@dataclass(frozen=True, slots=True)
class JobNode:
    """One process of a job that has one or more processes on each node."""

    launcher: str
    rank: int
    """Of the node: node 0 lets the others in."""
    nodes: int
    master: str
    """Name or address of node 0."""
    port: int
    local_rank: int = 0
    """Among the processes of this node: 0 acts, the others wait for the end."""
    slots: int | None = None
    """Worker slots of this node; None: the job does not say."""
    names: tuple[str, ...] = ()
    """Of all nodes by rank, where the job tells."""
    spare: str | None = None
    """Address to try where nobody knows `master`, if the job tells one."""

    def name(self, rank: int) -> str:
        """A node for messages."""
        return f"node {rank}" + (f" ({self.names[rank]})" if rank < len(self.names) else "")


def read_node(environment: Mapping[str, str]) -> JobNode:
    """This process's place in its job; raises UserError that says what is missing of each kind of job."""
    for sign, read in (
        ("GROUP_RANK", _torchrun),
        ("SKYPILOT_NODE_RANK", _skypilot),
        ("JOB_COMPLETION_INDEX", _indexed),
    ):
        if sign in environment:
            return read(environment)
    if "SLURM_NODEID" in environment:
        return _slurm(environment)
    raise UserError(
        "--env: this process belongs to no job that is known here — start it by torchrun (which sets GROUP_RANK), by "
        "SkyPilot (SKYPILOT_NODE_RANK), as an indexed Job or JobSet of Kubernetes (JOB_COMPLETION_INDEX), or by Slurm "
        "(SLURM_NODEID)"
    )


def _torchrun(environment: Mapping[str, str]) -> JobNode:
    job = _Job("torchrun", environment)
    local = job.number("LOCAL_WORLD_SIZE")
    world = job.number("WORLD_SIZE")
    if world % local:
        raise UserError(f"--env: torchrun has {world} processes, {local} on this node — start as many on every node")
    # The agent of torchrun keeps its own store at MASTER_PORT.
    taken = "TORCHELASTIC_USE_AGENT_STORE" in environment and environment["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    return JobNode(
        launcher="torchrun",
        rank=job.number("GROUP_RANK"),
        nodes=world // local,
        master=job.text("MASTER_ADDR"),
        port=job.number("MASTER_PORT") + taken,
        local_rank=job.number("LOCAL_RANK"),
        slots=local if local > 1 else None,
    )


def _skypilot(environment: Mapping[str, str]) -> JobNode:
    job = _Job("SkyPilot", environment)
    addresses = tuple(job.text("SKYPILOT_NODE_IPS").split())
    slots = job.number("SKYPILOT_NUM_GPUS_PER_NODE", 0)
    return JobNode(
        launcher="SkyPilot",
        rank=job.number("SKYPILOT_NODE_RANK"),
        nodes=len(addresses),
        master=addresses[0],
        port=job.number("MASTER_PORT", DEFAULT_PORT),
        slots=slots or None,
        names=addresses,
    )


def _indexed(environment: Mapping[str, str]) -> JobNode:
    job = _Job("Kubernetes", environment)
    nodes = next((name for name in ("NNODES", "PET_NNODES") if name in environment), "WORLD_SIZE")
    return JobNode(
        launcher="Kubernetes",
        rank=job.number("JOB_COMPLETION_INDEX"),
        nodes=job.number(nodes),
        master=job.text("MASTER_ADDR"),
        port=job.number("MASTER_PORT", DEFAULT_PORT),
    )


def _slurm(environment: Mapping[str, str]) -> JobNode:
    job = _Job("Slurm", environment)
    # A step may have fewer nodes than its job; the nodes are counted within the step.
    step = "SLURM_STEP_NODELIST" in environment
    names = tuple(expand(job.text("SLURM_STEP_NODELIST" if step else "SLURM_JOB_NODELIST")))
    slots = job.number("SLURM_GPUS_ON_NODE", 0)
    return JobNode(
        launcher="Slurm",
        rank=job.number("SLURM_NODEID"),
        nodes=len(names),
        master=environment["MASTER_ADDR"] if "MASTER_ADDR" in environment else names[0],
        port=job.number("MASTER_PORT", _JOB_PORTS + job.number("SLURM_JOB_ID", 0) % 20_000),
        local_rank=job.number("SLURM_LOCALID", 0),
        slots=slots or None,
        names=names,
        # Where srun was started: on node 0, in a batch script. Slurm may know nodes by names that nothing else knows.
        spare=environment.get("SLURM_LAUNCH_NODE_IPADDR"),
    )


def expand(text: str) -> Iterator[str]:
    """Names of nodes as Slurm writes them: `gpu-[01-03,7],login` is gpu-01, gpu-02, gpu-03, gpu-7, login."""
    for part in _PART.findall(text):
        yield from _expand_one(part.strip())


def _expand_one(part: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, after = rest.partition("]")
    for numbers in inside.split(","):
        first, dash, last = numbers.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(f"--env: the job's nodes: {part!r} is no list of nodes, such as gpu-[01-03,7]")
        for number in range(int(first), int(last if dash else first) + 1):
            yield from (f"{before}{number:0{len(first)}d}{end}" for end in _expand_one(after))


class _Job:
    """Reads the variables of one kind of job."""

    def __init__(self, launcher: str, environment: Mapping[str, str]) -> None:
        self._launcher = launcher
        self._environment = environment

    def text(self, name: str) -> str:
        if name in self._environment and self._environment[name].strip():
            return self._environment[name].strip()
        raise UserError(f"--env: {self._launcher} job without {name} — set it to the same on all nodes")

    def number(self, name: str, otherwise: int | None = None) -> int:
        if otherwise is not None and name not in self._environment:
            return otherwise
        text = self.text(name)
        if not text.isdecimal():
            raise UserError(f"--env: {name}={text}: expected a whole number")
        return int(text)


def forwarded(environment: Mapping[str, str], more: Sequence[str], settings: Sequence[str]) -> dict[str, str]:
    """Variables of `environment` that go along, with those named in `more` and set by `settings` (NAME=VALUE).

    Raises UserError for a name that is not set, or a setting without `=`.
    """
    names = [name for text in more for name in text.split(",") if name]
    unset = [name for name in names if "*" not in name and name not in environment]
    if unset:
        raise UserError(
            f"--forward {','.join(unset)}: not set here — set it, or give it a value: --set {unset[0]}=VALUE"
        )
    patterns = (*FORWARDED, *names)
    found = {n: v for n, v in environment.items() if n != SECRET and any(fnmatchcase(n, p) for p in patterns)}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise UserError(f"--set {setting}: expected NAME=VALUE")
        found[name] = value
    return found
