"""`distflow doctor`: check whether runs will work on this machine, and say what to do if not.

It also finds leftovers of dead runs: sockets without a listener, unmapped shared segments, processes without a run.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import click
import psutil
from packaging.requirements import Requirement

from distflow.config.plugins import LIBRARIES
from distflow.errors import UserError
from distflow.launch.agent.host_facts import CGROUP, PythonFacts, unwritable
from distflow.launch.deploy.host_checks import GIB, Finding, Needs, Threshold, facts_here, judge
from distflow.launch.deploy.interpreter_check import (
    PYTHON,
    ROOT,
    Interpreter,
    dotted,
    pip_install,
    requirements,
    unsatisfied,
    with_versions,
)
from distflow.launch.run.process_table import SEGMENTS, outputs_of
from distflow.launch.run.record import read_record

COLOURS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}
ENOUGH = Needs(
    memory=Threshold(2 * GIB, GIB / 2),
    memory_beside_gpus=Threshold(2 * GIB, GIB / 2),
    disk=Threshold(5 * GIB, GIB / 4),
    shm=Threshold(GIB, GIB / 16),
)
"""Enough for small runs."""
CONNECT_S = 1.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
TOOLS: Mapping[str, str] = {
    "ssh": "to start workers on other hosts",
    "sshd": "to take part as a host",
    "sbatch": "to start as a Slurm job",
}
SOCKETS = Path("/tmp")
LEFTOVERS, NAMED = "leftovers", 3
KINDS = {"sockets": "socket folders", "shared": "shared segments", "process": "processes", "job": "files of jobs"}
"""What leftovers are called, by the first word that is said of one."""
REMOVE_ALL = (
    "distflow doctor --json | {python} -c \"import json, sys; print(*(one['hint'] for one in "
    "json.load(sys.stdin)['findings'] if one['name'] == 'leftovers' and one['text'].startswith('{kind} ')), "
    "sep='\\n')\" | sh removes them; without `| sh` it lists what it would do"
)
YOUNG_S = 10.0
"""Newer files may belong to a run that is just starting, and are ignored."""
SOCKET_CONNECT_S = 0.2
TITLE = "distflow "
TORCH_S = 15.0
"""Importing torch takes about two seconds, three times as long where other programs use the processors too."""
TORCH_PROGRAM = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"cuda": torch.version.cuda, "devices": names, "threads": torch.get_num_threads()}))
"""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option(
    "--python", "pythons", multiple=True, metavar="PATH", help="Also check this Python, for layout.pools.NAME.python."
)
def command(as_json: bool, runs_dir: Path, pythons: tuple[str, ...]) -> int:
    """Check this machine: packages, torch, memory, sockets, leftovers of dead runs. Exit code 2: a check failed."""
    found = _examine(runs_dir, [str(Path(python).expanduser().absolute()) for python in pythons])
    failed = any(finding.level == "FAIL" for finding in found)
    if as_json:
        click.echo(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in found]}))
    else:
        _print(found)
    return 2 if failed else 0


def _examine(runs_dir: Path, pythons: list[str]) -> list[Finding]:
    torch = TorchProbe()
    needed = requirements()
    # Other Pythons may lack engines and backends; those they have are shown.
    asked = tuple(Interpreter(python, "python:", tuple(LIBRARIES)) for python in pythons)
    needs = replace(ENOUGH, packages=("torch", *(need.name for need in needed)), interpreters=asked)
    facts = facts_here(runs_dir, needs)
    judged = judge(facts, replace(needs, interpreters=tuple(replace(one, libraries=()) for one in asked)))
    return [
        check_python(facts.code.python.version),
        *check_packages(needed, facts.code.python, pinned_versions(gpu=bool(facts.gpus))),
        torch.finding(facts.code.python.packages["torch"], len(facts.gpus)),
        check_cpus(),
        *judged,
        check_temporary_files(),
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)),
        _attempt("Unix sockets", _unix_socket, "sandboxes and some file systems forbid them: run distflow outside"),
        _attempt("TCP on this machine", _loopback, "bring the interface up: ip link set lo up"),
        *check_tools(),
        *check_leftovers(),
    ]


def _print(found: list[Finding]) -> None:
    width = max(len(finding.name) for finding in found)
    for finding in _summed(found):
        level = click.style(f"{finding.level:<4}", fg=COLOURS[finding.level])
        click.echo(f"{level}  {finding.name:<{width}}  {finding.text}")
        if finding.hint:
            click.echo(f"{'':4}  {'':{width}}  → {finding.hint}")
    counts = [sum(finding.level == level for finding in found) for level in COLOURS]
    click.echo("{} ok, {} warnings, {} failures".format(*counts))


def _summed(found: list[Finding]) -> Iterator[Finding]:
    """Leave all findings as they are but leftovers of one kind: if they are many, one line tells of them."""
    kinds: dict[str, list[Finding]] = {}
    for finding in found:
        kind = finding.text.partition(" ")[0] if finding.name == LEFTOVERS and finding.hint else ""
        if kind:
            kinds.setdefault(kind, []).append(finding)
        else:
            yield finding
    for kind, alike in kinds.items():
        if len(alike) <= NAMED:
            yield from alike
            continue
        first = ", ".join(finding.hint.split()[-1] for finding in alike[:NAMED])
        text = f"{len(alike)} {KINDS.get(kind, kind)} of dead runs: {first}, …"
        yield replace(alike[0], text=text, hint=REMOVE_ALL.format(python=shlex.quote(sys.executable), kind=kind))


def check_python(version: tuple[int, ...]) -> Finding:
    """Python and the operating system."""
    text = f"{dotted(version)} on {platform.system()} {platform.release()} ({platform.machine()})"
    if platform.system() != "Linux":
        return Finding("python", "FAIL", text, "use Linux: shared memory, process titles and signals rely on it")
    if version < PYTHON:
        return Finding("python", "FAIL", text, f"use Python {dotted(PYTHON)} or newer")
    return Finding("python", "OK", text)


def check_packages(needed: list[Requirement], python: PythonFacts, pins: Mapping[str, str]) -> Iterator[Finding]:
    """Missing or unsuitable packages; else versions that differ from the tested ones."""
    if wrong := unsatisfied(needed, python.packages):
        text = f"needed: {with_versions(wrong, python.packages)}"
        yield Finding("packages", "FAIL", text, pip_install(sys.executable, wrong))
        return
    yield Finding("packages", "OK", f"all {len(needed)} requirements installed")
    other = [
        f"{name} {version} (tested: {pins[name]})"
        for name, version in python.packages.items()
        if name in pins and version is not None and version.partition("+")[0] != pins[name]
    ]
    if other:
        hint = "nothing, unless something fails: `make venv` installs the tested versions"
        yield Finding("versions", "WARN", ", ".join(other), hint)


def pinned_versions(*, gpu: bool) -> dict[str, str]:
    """Tested versions by package, with or without a GPU; empty if distflow does not run from a checkout."""
    path = ROOT / "requirements" / f"constraints-{'cuda' if gpu else 'cpu'}.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


class TorchProbe:
    """Imports torch in a separate process, started at once and awaited at the end."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._deadline = time.monotonic() + TORCH_S
        self._process = subprocess.Popen([sys.executable, "-c", TORCH_PROGRAM], stdout=pipe, stderr=pipe, text=True)

    def finding(self, version: str | None, gpus: int) -> Finding:
        """The result; kills a process that takes too long. `gpus`: the number that nvidia-smi shows."""
        try:
            out, err = self._process.communicate(timeout=max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            text = f"{version}; not imported within {TORCH_S:g} s"
            return Finding("torch", "WARN", text, "the machine may be busy or the disk slow: try again")
        if version is None:
            return Finding("torch", "FAIL", "not installed", "see requirements/ for the build to install")
        if self._process.returncode != 0:
            last = (err.strip().splitlines() or ["no message"])[-1]
            return Finding("torch", "FAIL", f"{version} cannot be imported: {last}", "reinstall it")
        return _torch_line(version, json.loads(out), gpus)


def _torch_line(version: str, told: dict[str, object], gpus: int) -> Finding:
    devices = told["devices"]
    assert isinstance(devices, list), "the program above prints a list"
    build = f"CUDA {told['cuda']}" if told["cuda"] else "CPU build"
    text = f"{version} ({build}), {', '.join(devices) or 'no GPU'}, {told['threads']} threads by default"
    if gpus and not devices:
        return Finding(
            "torch", "WARN", text, "this machine has a GPU: install the build of requirements/constraints-cuda.txt"
        )
    return Finding("torch", "OK", text)


def check_cpus() -> Finding:
    """CPUs that this process may use, and variables that limit threads."""
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count()
    text = f"{usable} of {there} usable" if usable != there else f"{usable}"
    limit = _cpu_limit(CGROUP / "cpu.max")
    if limit is not None and limit < usable:
        text += f", limited to the CPU time of {limit:g} CPUs"
    variables = [f"{name}={os.environ[name]}" for name in THREAD_VARIABLES if name in os.environ]
    text += f"; {', '.join(variables)} (workers get layout.pools.NAME.threads instead)" if variables else ""
    return Finding("CPUs", "OK", text)


def check_temporary_files() -> Finding:
    """Whether /tmp is writable."""
    reason = unwritable(Path("/tmp"))
    if reason is not None:
        return Finding("/tmp", "FAIL", reason, "runs keep their sockets there: make it writable")
    return Finding("/tmp", "OK", "writable")


def check_open_files(limits: tuple[int, int]) -> Finding:
    """The limit of open files; a worker needs a few dozen, and a few more per peer."""
    soft, hard = limits
    infinite = soft == resource.RLIM_INFINITY
    level = "OK" if infinite else Threshold(1024, 256).level(soft)
    text = "unlimited" if infinite else f"{soft} (at most {'unlimited' if hard < 0 else hard})"
    return Finding("open files", level, text, "" if level == "OK" else "raise it: ulimit -n 4096")


def check_tools() -> Iterator[Finding]:
    """Programs needed only for runs on several hosts."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    for name, purpose in TOOLS.items():
        found = shutil.which(name, path=path)
        yield Finding(name, "OK", found if found is not None else f"not found; needed only {purpose}")


def _attempt(name: str, action: Callable[[], str], hint: str) -> Finding:
    try:
        return Finding(name, "OK", action())
    except OSError as error:
        return Finding(name, "FAIL", f"not usable: {error}", hint)


def _unix_socket() -> str:
    with tempfile.TemporaryDirectory(prefix="distflow-doctor-", dir="/tmp") as folder:
        address = f"{folder}/socket"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            _connect_to(server, address)
    return "work"


def _loopback() -> str:
    with socket.socket(socket.AF_INET) as server:
        server.bind(("127.0.0.1", 0))
        _connect_to(server, server.getsockname())
    return "works"


def _connect_to(server: socket.socket, address: str | tuple[str, int]) -> None:
    server.listen(1)
    with socket.socket(server.family) as client:
        client.settimeout(CONNECT_S)
        client.connect(address)


def _cpu_limit(path: Path) -> float | None:
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def check_leftovers(sockets: Path = SOCKETS, segments: Path = SEGMENTS) -> list[Finding]:
    """One finding per leftover of this user, or one that says there are none."""
    found = [*dead_sockets(sockets), *dead_segments(segments), *lost_processes()]
    return found or [Finding(LEFTOVERS, "OK", "none from dead runs")]


def dead_sockets(root: Path) -> Iterator[Finding]:
    """Socket folders without a listener, and exit-code files whose process is gone."""
    for path in filter(_is_old, sorted(root.glob(f"distflow-{os.getuid()}-*"))):
        if path.suffix == ".exit":
            if not _is_locked(path):
                yield Finding(LEFTOVERS, "WARN", f"job {path}: the process that created it is gone", _removal(path))
        elif not any(map(_listens, path.iterdir())):
            yield Finding(LEFTOVERS, "WARN", f"sockets {path}: nothing listens there", _removal(path))


def dead_segments(root: Path) -> Iterator[Finding]:
    """Shared segments that no process has mapped."""
    old = [path for path in sorted(root.glob("distflow-*")) if _is_old(path)]
    mapped = _mapped_files() if old else ""
    for path in old:
        if str(path) not in mapped:
            size = path.stat().st_size / 2**20
            yield Finding(LEFTOVERS, "WARN", f"shared segment {path} ({size:.1f} MiB): unused", _removal(path))


def lost_processes() -> Iterator[Finding]:
    """Processes with the title of a run that is over, or whose folder is gone."""
    for process in psutil.process_iter():
        try:
            title = " ".join(process.cmdline()).strip()
            mine = process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if not (mine and title.startswith(TITLE)):
            continue
        run_dir = _run_of(process.pid)
        if run_dir is not None and _is_over(run_dir):
            text = f"process {process.pid} ({title}): its run in {run_dir} is over"
            here = (run_dir / "run.json").exists()
            hint = f"distflow stop {shlex.quote(str(run_dir))}" if here else f"kill {process.pid}"
            yield Finding(LEFTOVERS, "WARN", text, hint)


def _is_old(path: Path) -> bool:
    """Whether a file belongs to this user and is not new."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.getuid() and time.time() - found.st_mtime > YOUNG_S


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SOCKET_CONNECT_S)
        try:
            client.connect(str(path))
        except TimeoutError:
            # There is a listener, but it is slow.
            return True
        except OSError:
            return False
    return True


def _mapped_files() -> str:
    """The mappings of all processes; psutil's `memory_maps` adds sizes, which takes ten times as long."""
    maps = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            maps.append(path.read_text(errors="replace"))
        except OSError:
            # The process has ended, or is another user's.
            continue
    return "\n".join(maps)


def _run_of(pid: int) -> Path | None:
    """The run folder whose logs a process writes to; None: it writes to none."""
    for output in outputs_of(pid):
        log = Path(str(output).removesuffix(" (deleted)"))
        if log.suffix == ".log" and log.parent.name == "logs":
            return log.parent.parent
    return None


def _is_over(run_dir: Path) -> bool:
    try:
        return read_record(run_dir).over
    except UserError:
        # The folder was removed, or is no longer that of a run.
        return True


def _removal(path: Path) -> str:
    return f"rm -r {shlex.quote(str(path))}"
