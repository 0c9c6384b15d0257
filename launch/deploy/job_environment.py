"""Cluster jobs: this process's node and job, from the environment set by torchrun, SkyPilot, Kubernetes or Slurm; the
batch script for Slurm; and the environment variables forwarded from the launching machine to agents and workers.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from distflow.errors import UserError

DEFAULT_PORT = 29_400
_JOB_PORTS = range(20_000, 32_000)
"""Slurm jobs without MASTER_PORT use one of these, by job number, so that two jobs rarely share one. The ports above
are those that Linux gives to connections by itself."""
_PART = re.compile(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*")
FORWARDED = (
    "PYTHONPATH",
    "CUDA_*",
    "NCCL_*",
    "GLOO_*",
    "UCX_*",
    "HF_HOME",
    "TORCH_*",
    "OMP_*",
    "DISTFLOW_*",
)
"""Names and patterns; not PATH, HOME and the like, which are specific to a host."""
OF_A_HOST = ("CUDA_VISIBLE_DEVICES",)
"""Specific to a host although a pattern takes them: forwarded only if named."""
RUN_KEY = "DISTFLOW_RUN_KEY"
SUBMIT_S = 60.0
QUEUE_S = 10.0
_UNREACHED = re.compile(r"controller|connect|socket timed out|unable to establish|communication", re.IGNORECASE)
"""What sbatch says when nobody has looked at the job."""
_OURS = ("ntasks", "ntasks-per-node", "output", "error", "job-name", "array")
_FOR_SRUN = ("cpus-per-task", "no-kill")
_STEP = ("--ntasks-per-node=1", "--export=ALL", "--kill-on-bad-exit=0", "--wait=0")
"""Regardless of the cluster and --slurm export=…: tasks get the secret, and one that ends does not end the others."""
_KEY = re.compile(r"[a-z][a-z-]*")
_TYPE = r"[^:,]*[^:,0-9][^:,]*"
_GPUS = re.compile(rf"(?:{_TYPE}:)?(?P<count>[0-9]+)")
_GRES = re.compile(rf"gpu(?::{_TYPE})?(?::(?P<count>[0-9]+))?")
"""How many GPUs, as options of Slurm say it: 8, h100:8; among other resources gpu, gpu:8, gpu:h100, gpu:h100:8."""
_OF_A_NODE = ("gpus-per-node", "gres", "gpus-per-task")
"""Options that say how many GPUs each node has: a node has one task."""


class JobRefused(UserError):
    """Slurm rejected the job, or its batch script cannot be written."""


@dataclass(frozen=True, slots=True)
class JobNode:
    """One process of a job that has one or more processes on each node."""

    rank: int
    """Rank of the node; the others connect to node 0."""
    nodes: int
    master: str
    """Name or address of node 0."""
    port: int
    local_rank: int = 0
    """Among the processes of this node: 0 is active, the others wait for the end."""
    slots: int | None = None
    """Worker slots of this node; None: the job does not say."""
    names: tuple[str, ...] = ()
    """Names of all nodes by rank, if the job gives them."""
    spare: str | None = None
    """Address to try if `master` does not resolve, if the job gives one."""

    def name(self, rank: int) -> str:
        """The name of a node for messages."""
        return f"node {rank}" + (f" ({self.names[rank]})" if rank < len(self.names) else "")


@dataclass(frozen=True, slots=True)
class JobSize:
    """The nodes and GPUs that a job asks Slurm for."""

    nodes: int
    gpus_each: int | None
    """GPUs of each node; None: the job does not say."""
    gpus: int | None
    """GPUs of all nodes together; None: the job does not say."""
    where: str
    """The options that say it, for messages."""


def read_node(environment: Mapping[str, str]) -> JobNode:
    """The node of this process; raises UserError naming what is missing from the environment."""
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
        "--env: this process is not part of a known kind of job — start it with torchrun (which sets GROUP_RANK), "
        "SkyPilot (SKYPILOT_NODE_RANK), as an indexed Job or JobSet of Kubernetes (JOB_COMPLETION_INDEX), or Slurm "
        "(SLURM_NODEID)"
    )


def _torchrun(environment: Mapping[str, str]) -> JobNode:
    job = _Job("torchrun", environment)
    local = job.number("LOCAL_WORLD_SIZE")
    world = job.number("WORLD_SIZE")
    if world % local:
        raise UserError(
            f"--env: torchrun has {world} processes, {local} on this node — start the same number on every node"
        )
    # The agent of torchrun has its own store at MASTER_PORT.
    taken = "TORCHELASTIC_USE_AGENT_STORE" in environment and environment["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    return JobNode(
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
        rank=job.number("SLURM_NODEID"),
        nodes=len(names),
        master=environment["MASTER_ADDR"] if "MASTER_ADDR" in environment else names[0],
        port=job.number("MASTER_PORT", _JOB_PORTS[job.number("SLURM_JOB_ID", 0) % len(_JOB_PORTS)]),
        local_rank=job.number("SLURM_LOCALID", 0),
        slots=slots or None,
        names=names,
        # Where srun was started: on node 0, in a batch script. Slurm's node names may not resolve.
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
            raise UserError(f"--env: the job's nodes: {part!r} is not a node list such as gpu-[01-03,7]")
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
    """The variables of `environment` to forward, those named in `more`, and those set by `settings` (NAME=VALUE).

    Raises UserError for a name that is not set, or a setting without `=`.
    """
    names = [name for text in more for name in text.split(",") if name]
    unset = [name for name in names if "*" not in name and name not in environment]
    if unset:
        raise UserError(
            f"--forward {','.join(unset)}: not set here — set it, or give it a value: --set {unset[0]}=VALUE"
        )
    kept = {RUN_KEY, *(name for name in OF_A_HOST if name not in names)}
    patterns = (*FORWARDED, *names)
    found = {n: v for n, v in environment.items() if n not in kept and any(fnmatchcase(n, p) for p in patterns)}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise UserError(f"--set {setting}: expected NAME=VALUE")
        found[name] = value
    return found


def slurm_settings(words: Sequence[str]) -> dict[str, str]:
    """Options of sbatch from `nodes=4,time=2:00:00`, given once or several times; raises UserError."""
    found: dict[str, str] = {}
    for word in (part for text in words for part in text.split(",")):
        key, equals, value = word.strip().partition("=")
        if not equals or not value or not _KEY.fullmatch(key) or not value.isprintable():
            raise UserError(f"--slurm {word}: expected KEY=VALUE, an option of sbatch, such as nodes=4 or time=2:00:00")
        if key in _OURS:
            ours = "the launcher sets this itself (one task per node; --sweep makes an array)"
            raise UserError(f"--slurm {word}: {ours} — leave it out")
        if key in found:
            raise UserError(f"--slurm {word}: {key} is given twice — give it once")
        found[key] = value
    if "nodes" not in found:
        raise UserError("--slurm: the number of nodes is missing — give it as --slurm nodes=4")
    if not found["nodes"].isdecimal() or int(found["nodes"]) < 1:
        raise UserError(f"--slurm nodes={found['nodes']}: expected a whole number ≥ 1, such as nodes=4")
    return found


def job_size(settings: Mapping[str, str], environment: Mapping[str, str]) -> JobSize:
    """The size of a job with these options of sbatch, of which the environment may replace some (`SBATCH_GRES`)."""
    nodes, where = int(settings["nodes"]), f"--slurm nodes={settings['nodes']}"
    for key in (*_OF_A_NODE, "gpus"):
        variable = f"SBATCH_{key.upper().replace('-', '_')}"
        replaced = variable in environment
        text = environment[variable] if replaced else settings.get(key, "")
        if count := _gpus(_GRES if key == "gres" else _GPUS, text):
            told = f"{where} {variable}={text}" if replaced else f"{where},{key}={text}"
            each = count if key in _OF_A_NODE or nodes == 1 else None
            return JobSize(nodes, each, count if each is None else nodes * each, told)
    return JobSize(nodes, None, None, where)


def _gpus(form: re.Pattern[str], text: str) -> int:
    """GPUs that an option of Slurm asks for; 0: it says nothing of them."""
    found = [form.fullmatch(part.strip()) for part in text.split(",")]
    return sum(int(one["count"] or 1) for one in found if one is not None)


def render_job(settings: Mapping[str, str], runs: Sequence[tuple[Path, Sequence[str]]], folder: Path) -> str:
    """The batch script: the command of a run, in `folder`, on every node of the job; of several runs, of an array.

    `runs`: the folder and the command of each.
    """
    first, array = runs[0][0], len(runs) > 1
    options = {
        "job-name": f"distflow-{first.name}",
        # A requeued job continues the same log.
        "open-mode": "append",
        **settings,
        **({"array": f"0-{len(runs) - 1}"} if array else {}),
        "ntasks-per-node": "1",
        "output": f"{_escaped(first)}/logs/slurm-{'%A_%a' if array else '%j'}.log",
    }
    # Not every version of Slurm passes these from sbatch to srun.
    again = [f"--{key}={options[key]}" for key in _FOR_SRUN if key in options]
    step = ["srun", *_STEP, *again]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {shlex.quote(f'--{key}={value}')}" for key, value in options.items()),
            "set -euo pipefail",
            f"cd {shlex.quote(str(folder))}",
            "# The secret shared by the nodes of this job; new for every job.",
            "DISTFLOW_RUN_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
            "export DISTFLOW_RUN_KEY",
            *(_cases(runs, step) if array else [f"exec {shlex.join([*step, *runs[0][1]])}"]),
            "",
        ]
    )


def _escaped(path: Path) -> str:
    """A path in an option of sbatch that replaces %j and the like."""
    return str(path).replace("%", "%%")


def _cases(runs: Sequence[tuple[Path, Sequence[str]]], step: Sequence[str]) -> Iterator[str]:
    """Lines by which each job of an array starts its own run, with the output in that run's folder."""
    yield 'log="logs/slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.log"'
    yield 'case "$SLURM_ARRAY_TASK_ID" in'
    for number, (run_dir, command) in enumerate(runs):
        yield f"{number}) run={shlex.quote(str(run_dir))}; set -- {shlex.join(command)};;"
    yield "esac"
    yield 'mkdir -p "$run/logs"'
    yield f'exec {shlex.join(step)} "$@" >> "$run/$log" 2>&1'


def submit(script: Path) -> tuple[str, list[str]]:
    """Submit the script with sbatch; returns the job id, and lines of warnings. Raises JobRefused with the message of
    sbatch, or UserError."""
    try:
        done = _asked(["sbatch", "--parsable", str(script)], SUBMIT_S)
    except FileNotFoundError:
        raise UserError(
            f"--slurm: sbatch not found — run this on a login node of the cluster, or submit {script} there"
        ) from None
    except OSError as error:
        raise UserError(f"--slurm: sbatch cannot be started ({error}) — submit {script} by hand") from error
    except subprocess.TimeoutExpired:
        raise UserError(f"--slurm: sbatch did not answer within {SUBMIT_S:g} s — try `sbatch {script}`") from None
    said = "; ".join([*_lines(done.stderr), *_lines(done.stdout)]) or "it said nothing"
    if done.returncode != 0:
        code = f" (exit code {done.returncode})"
        if _UNREACHED.search(said):
            hint = "submit it again when the cluster answers (`sinfo`)"
            raise JobRefused(f"--slurm: sbatch could not reach the cluster: {said}{code} — {hint}")
        raise JobRefused(f"--slurm: sbatch rejected the job: {said}{code} — correct the --slurm settings")
    # NUMBER or NUMBER;CLUSTER; a site may have wrapped sbatch in something that takes no option and says it in words.
    number = re.search(r"[0-9]+", done.stdout.strip().rpartition("\n")[2])
    if number is None:
        raise UserError(f"--slurm: sbatch named no job: {said} — look with `squeue --me` whether there is one")
    return number[0], _lines(done.stderr)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def ask_queue(number: str) -> tuple[str, str]:
    """Ask squeue for the state of a job, such as PENDING, and its reason; ("", why) if there is no answer, and
    ("", "") if it does not know the job any more."""
    try:
        done = _asked(["squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T %r"], QUEUE_S)
    except OSError as error:
        return "", f"squeue cannot be started here ({error.strerror}): on a login node, `squeue --jobs={number}`"
    except subprocess.TimeoutExpired:
        return "", f"squeue did not answer within {QUEUE_S:g} s"
    if done.returncode != 0:
        unknown = "invalid job id" in done.stderr.lower()
        return "", "" if unknown else f"squeue failed: {'; '.join(_lines(done.stderr)) or done.returncode}"
    state, _, reason = done.stdout.strip().partition("\n")[0].partition(" ")
    return state, "" if reason.strip() in ("None", "(null)") else reason.strip()


def _asked(words: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False)
