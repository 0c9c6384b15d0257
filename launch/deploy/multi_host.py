"""Start the agents of a run on its hosts, all or none: preflight, run folders, agents, `mesh.begin`."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import click
import msgspec
from msgspec import structs

import distflow
from distflow.comm.client import ask
from distflow.comm.keys import key_file, read_keys
from distflow.data.decoding import Form
from distflow.errors import Problem, ProtocolError, UserError
from distflow.launch.agent.host_facts import HostFacts
from distflow.launch.agent.remote_helper import connect
from distflow.launch.agent.start import agent_command
from distflow.launch.deploy.fan_out import Fleet, Note, SshWays, Ways, reachable_address
from distflow.launch.deploy.folder_contents import (
    CODE,
    CheckedHost,
    RunContents,
    code_bundle,
    fill,
    with_agents,
)
from distflow.launch.deploy.host_checks import (
    GIB,
    clock_problems,
    code_here,
    link_problems,
    notes,
    problems_of,
)
from distflow.launch.deploy.hostfile import Host, HostsError
from distflow.launch.deploy.placement import WorkerPlacement, disk_for, needs_of
from distflow.launch.deploy.ssh import Transport
from distflow.launch.observe.file_sync import is_outside, record_of_agents
from distflow.launch.run.exit_status import log_file
from distflow.launch.run.folder import mode_of, plugin_files, shipped_files
from distflow.launch.run.record import FILE_NAME, HOSTS, RunRecord, read_record
from distflow.runtime.checkpoint.commit import COMMIT, step_of
from distflow.runtime.disk import replace_file

SHIP_S = 120.0
START_S = 60.0
TELL_EVERY_S = 10.0
"""How often to say how much of a checkpoint has been sent."""
_OWN_RECORD: Mapping[int, Path] = {}
AT_ONCE = 64
NO_AGENTS: Mapping[int, str] = {}
SSH_NOTES = f"{HOSTS}/ssh.json"
PATTERNS = (FILE_NAME, "metrics/*.jsonl", "workers/*.failure.json", "workers/*.troubles.txt")
_FETCHED = re.compile(rf"{re.escape(FILE_NAME)}|metrics/[^/\0]+\.jsonl|workers/[^/\0]+\.(failure\.json|troubles\.txt)")
"""PATTERNS again: whatever a host answers, nothing else is written here."""


_COMMITTED = re.compile(rf"checkpoints/step_\d+/{COMMIT}")


def _no_other_links(addresses: Mapping[int, str], ports: Mapping[int, int]) -> list[Problem]:
    return []


@dataclass(frozen=True, slots=True)
class HostsRequest:
    """A run to be started on hosts."""

    contents: RunContents
    """Without `checked` yet. The folder on this machine exists, and is empty unless the run is resumed."""
    resume: bool
    ship_code: bool
    environment: Mapping[str, str]
    """Variables for agents and workers, added to the environment of their hosts."""
    entry: str | None = None
    """module:function to run in the workers' processes; None: the real one."""

    @property
    def placement(self) -> WorkerPlacement:
        """Which worker runs on which host."""
        assert self.contents.placement is not None, "a run on this machine needs no preflight of hosts"
        return self.contents.placement

    @property
    def head_dir(self) -> Path:
        """The run folder on this machine."""
        return self.contents.head_dir

    @property
    def connect_s(self) -> float:
        """`limits.connect_s` of the recipe."""
        return self.contents.loaded.recipe.limits.connect_s

    def run_dir(self, host: int, here: int | None) -> Path:
        """The run folder on a host."""
        folder = self.placement.hosts[host].directory
        return self.head_dir if folder is None or host == here else Path(folder) / self.head_dir.name


@dataclass(frozen=True, slots=True)
class StartedAgents:
    """The agents of a started run."""

    addresses: Mapping[int, str]
    """tcp addresses, by host number."""
    notes: tuple[str, ...]
    run_dirs: Mapping[int, Path]
    """Run folders, by host number."""
    shares_folder: bool
    """Whether an agent writes to this machine's run folder."""


def start_on_hosts(request: HostsRequest, ways: Ways, started: Callable[[], None]) -> StartedAgents:
    """Start the agents of all hosts. Raises HostsError, after undoing everything on the other hosts.

    `started` is called right before the hosts are told to keep them: from then on Ctrl-C must not raise.
    """
    hosts, head_dir = dict(enumerate(request.placement.hosts)), request.head_dir
    with nonce_in(head_dir) as name, Fleet(hosts, ways, name) as fleet:
        checked, notes = preflight(request, fleet)
        contents = replace(request.contents, checked=checked)
        fill(contents)
        mode = mode_of(head_dir)
        own = {n: {"folder": str(host.run_dir), "mode": mode} for n, host in checked.items() if not host.same_folder}
        fleet.must("unpack", own, limit_s=SHIP_S, payloads={n: contents.bundle(n) for n in own})
        _send_checkpoint(request, fleet, checked)
        agents = start_agents(request, fleet, checked)
        begin_agents(fleet.hosts, agents, head_dir, request.connect_s)
        shares = any(host.same_folder for host in checked.values())
        if not shares:
            # No agent writes to this folder; the head, status and stop read the agents' addresses from it.
            with_agents(read_record(head_dir), agents).write()
        started()
        fleet.must("keep", {n: {} for n in checked})
    return StartedAgents(agents, notes, {n: host.run_dir for n, host in checked.items()}, shares)


@contextmanager
def nonce_in(head_dir: Path) -> Iterator[str]:
    """Create a file by which another host recognises the head's own folder; gives its nonce."""
    name = os.urandom(8).hex()
    path = head_dir / f".nonce.{name}"
    path.touch()
    try:
        yield name
    finally:
        path.unlink(missing_ok=True)


def preflight(
    request: HostsRequest,
    fleet: Fleet,
    other_links: Callable[[Mapping[int, str], Mapping[int, int]], list[Problem]] = _no_other_links,
) -> tuple[dict[int, CheckedHost], tuple[str, ...]]:
    """Examine the hosts; raises HostsError with everything that is wrong with any of them.

    `other_links(addresses, ports)` returns problems with links to other hosts, while these listen on the ports.
    """
    problems = fleet.open()
    run_dirs = {n: request.run_dir(n, fleet.ways.here) for n in fleet.reached}
    if request.ship_code:
        problems += _ship_code(request, fleet, run_dirs)
    else:
        problems += fleet.ask(
            "environment", {n: {"set": dict(request.environment), "cwd": os.getcwd()} for n in run_dirs}
        )[1]
    head = code_here()
    plan = request.contents.plan
    needs = {n: replace(needs_of(plan, request.placement, n), head=head, resume=request.resume) for n in run_dirs}
    named = plugin_files(request.contents.loaded.resolved)
    # A run that is scaled from another of its hosts may have been launched from files that this one lacks.
    beside = shipped_files([file for file in named if file.exists()]).values()
    plugins = [str(file) for file in dict.fromkeys((*named, *beside))]
    checkpoints = {n: _checkpoint(request, n, run_dirs[n]) for n in run_dirs}
    paths = {n: (*needs[n].paths, *checkpoints[n], *plugins) for n in run_dirs}
    facts, lost = fleet.describe(run_dirs, paths, needs)
    problems += lost
    sharing = frozenset(n for n, found in facts.items() if found.same_folder)
    for n, found in facts.items():
        together = sharing if n in sharing else frozenset({n})
        held = found.checkpoints if request.resume else 0
        disk = disk_for(plan, request.placement, n, together, held, resume=request.resume)
        # A file that exists here can be sent.
        required = [path for path, here in checkpoints[n].items() if not here.exists()]
        problems += problems_of(fleet.hosts[n], found, replace(needs[n], disk=disk, paths=(*needs[n].paths, *required)))
    problems += _newer_checkpoints(request, fleet, facts) if request.resume else []
    problems += clock_problems(fleet.hosts, {n: found.clock_offset for n, found in facts.items()})
    addresses, ports, linked = _links(fleet, facts)
    problems += linked or other_links(addresses, ports)
    if problems:
        raise HostsError(list(dict.fromkeys(problems)))
    checked = {
        n: CheckedHost(
            run_dirs[n],
            addresses[n],
            found.same_folder,
            len(found.gpus),
            missing_plugins=n != fleet.ways.here and (not found.same_folder or bool(set(plugins) & set(found.missing))),
            missing_parts=tuple(here for path, here in checkpoints[n].items() if path in found.missing),
        )
        for n, found in facts.items()
    }
    return checked, tuple(note for n, found in facts.items() for note in notes(fleet.hosts[n], found))


def _ship_code(request: HostsRequest, fleet: Fleet, run_dirs: Mapping[int, Path]) -> list[Problem]:
    """Copy this machine's distflow to all hosts and put it first on their search path."""
    given = {n: {"folder": str(path), "mode": mode_of(request.head_dir)} for n, path in run_dirs.items()}
    code = code_bundle(Path(distflow.__file__).parent)
    problems = fleet.ask("unpack", given, limit_s=SHIP_S, payloads=dict.fromkeys(given, code))[1]
    places = {}
    for n, path in run_dirs.items():
        before = [request.environment["PYTHONPATH"]] if "PYTHONPATH" in request.environment else []
        search = os.pathsep.join([str(path / CODE), *before])
        places[n] = {"set": {**request.environment, "PYTHONPATH": search}, "cwd": os.getcwd()}
    return problems + fleet.ask("environment", places)[1]


def _checkpoint(request: HostsRequest, host: int, run_dir: Path) -> dict[str, Path]:
    """Files of the checkpoint that training workers of a host resume from: path there, and path on the head.

    All parts are needed, whichever worker wrote them; COMMIT comes last.
    """
    folder = request.contents.beginning.checkpoint
    if folder is None or not set(request.placement.on(host)) & set(request.contents.plan.members):
        return {}
    files = [folder / name for name in (*json.loads((folder / COMMIT).read_text())["parts"], COMMIT)]
    return {str(run_dir / path.relative_to(request.head_dir)): path for path in files}


def _newer_checkpoints(request: HostsRequest, fleet: Fleet, facts: Mapping[int, HostFacts]) -> list[Problem]:
    """Checkpoints on hosts that this machine, which is no host of the run, lacks: training would be repeated."""
    if fleet.ways.here is not None or any(found.same_folder for found in facts.values()):
        return []
    asked = {n: {"folder": found.run_dir, "patterns": (f"checkpoints/step_*/{COMMIT}",)} for n, found in facts.items()}
    answers, problems = fleet.ask("find", asked)
    here = request.contents.beginning.checkpoint
    for n, answer in sorted(answers.items()):
        steps = [step_of(Path(name).parent) for name in answer["files"] if _COMMITTED.fullmatch(name)]
        if max(steps, default=0) > (0 if here is None else step_of(here)):
            host, folder = fleet.hosts[n], facts[n].run_dir
            found = "none" if here is None else f"that of {step_of(here)}"
            text = f"{folder} has the checkpoint of training step {max(steps)}, and {request.head_dir} has {found}"
            hint = f"resume from {host.name}, where the run's folder is, or copy its checkpoints to this machine first"
            return [*problems, Problem(host.where, host.name, text, hint)]
    return problems


def _send_checkpoint(request: HostsRequest, fleet: Fleet, checked: Mapping[int, CheckedHost]) -> None:
    """Send the checkpoint to hosts with training workers that lack parts of it."""
    files = {
        n: [(path, host.run_dir / path.relative_to(request.head_dir)) for path in host.missing_parts]
        for n, host in checked.items()
        if host.missing_parts
    }
    send_parts(fleet, files)


def send_parts(fleet: Fleet, files: Mapping[int, Sequence[tuple[Path, Path]]]) -> None:
    """Send parts of a checkpoint, given as for `Fleet.send`; says how much, and how far it is. Raises HostsError."""
    sizes = {n: sum(path.stat().st_size for path, _ in missing) for n, missing in files.items()}
    names = {n: fleet.hosts[n].name for n in files}
    for n, size in sizes.items():
        click.echo(f"sending {size / GIB:.2f} GiB of the checkpoint to {names[n]}")
    fleet.send(files, _teller(sizes, names))


def _teller(sizes: Mapping[int, int], names: Mapping[int, str]) -> Note:
    """Says every few seconds how much of the checkpoint each host has."""
    have: dict[int, dict[Path, int]] = {n: {} for n in sizes}
    told_at = dict.fromkeys(sizes, time.monotonic())

    def note(number: int, path: Path, count: int) -> None:
        have[number][path] = count
        if time.monotonic() >= told_at[number] + TELL_EVERY_S:
            told_at[number] = time.monotonic()
            there, all_of_it = sum(have[number].values()) / GIB, sizes[number] / GIB
            click.echo(f"{names[number]} has {there:.1f} of {all_of_it:.1f} GiB of the checkpoint")

    return note


def _links(fleet: Fleet, facts: Mapping[int, HostFacts]) -> tuple[dict[int, str], dict[int, int], list[Problem]]:
    """Address of each host, the port it listens on, and problems with the links between all pairs."""
    addresses: dict[int, str] = {}
    problems = []
    for n, found in facts.items():
        host = fleet.hosts[n]
        others = [name for other, name in fleet.ways.resolved.items() if other != n]
        address = reachable_address(host, found, fleet.ways.resolved[n], others)
        if address is None:
            hint = "give an address that the other hosts can reach: address=… on its line"
            problems.append(Problem(host.where, host.name, "its address cannot be determined from here", hint))
        else:
            addresses[n] = address
    faults, ports, lost = fleet.links(addresses)
    problems += [*lost, *link_problems(fleet.hosts, addresses, faults)]
    for n, port in ports.items() if fleet.ways.here is None else ():
        fault = connect(addresses[n], port, fleet.nonce)
        if fault is not None:
            hint = "launch from a host of the run, or from a machine that can reach all of them"
            problems.append(
                Problem(fleet.hosts[n].where, fleet.hosts[n].name, f"cannot be reached from here: {fault}", hint)
            )
    return addresses, ports, problems


def start_agents(
    request: HostsRequest, fleet: Fleet, checked: Mapping[int, CheckedHost], records: Mapping[int, Path] = _OWN_RECORD
) -> dict[int, str]:
    """Start all agents; returns their addresses. Raises HostsError with the log of each that did not start.

    `records`: files that agents read instead of the run.json of their run folder.
    """
    given = {}
    for n, there in checked.items():
        python = fleet.hosts[n].python or sys.executable
        record = str(records[n]) if n in records else FILE_NAME
        command = agent_command(there.run_dir, n, request.entry, record, python)
        log = log_file(there.run_dir, f"agent/{n}")
        given[n] = {"command": command, "log": str(log), "limit_s": START_S}
    answers, problems = fleet.ask("start", given, limit_s=START_S + 10.0)
    for n, answer in answers.items():
        if answer["agent"] is None:
            host = fleet.hosts[n]
            said = answer["log"].strip() or "no output"
            problems.append(Problem(host.where, host.name, f"its agent did not start: {said}", "see its log"))
    if problems:
        raise HostsError(problems)
    return {n: str(answer["agent"]["address"]) for n, answer in answers.items()}


def begin_agents(
    hosts: Mapping[int, Host],
    agents: Mapping[int, str],
    run_dir: Path,
    limit_s: float,
    others: Mapping[int, str] = NO_AGENTS,
) -> None:
    """Send `mesh.begin` to every agent and await its answer; raises HostsError naming those that did not answer.

    `others`: agents that run already; they are told of the new ones, so that they accept them. One that misses this
    message learns it from the reports of the rest.
    """
    keys = read_keys(key_file(run_dir))
    body = {"agents": {str(number): address for number, address in {**others, **agents}.items()}}

    def one(number: int) -> str | None:
        try:
            answer = ask({**others, **agents}[number], "mesh.begin", body, limit_s, keys)
        except ProtocolError as error:
            return str(error)
        return None if answer is not None else f"no answer to mesh.begin within {limit_s:g} s"

    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        numbers = [*agents, *others]
        faults = {n: fault for n, fault in zip(numbers, pool.map(one, numbers), strict=True) if n in agents}
    problems = [
        Problem(hosts[n].where, hosts[n].name, f"its agent at {agents[n]}: {fault}", "did the host go down?")
        for n, fault in faults.items()
        if fault is not None
    ]
    if problems:
        raise HostsError(problems)


class _SshHost(Form, frozen=True):
    host: Host
    run_dir: str


class _SshNotes(Form, frozen=True):
    """How a machine that is no host of a run reaches those that are: for the end of the run, when no agent answers."""

    config: str | None
    options: tuple[str, ...]
    hosts: dict[int, _SshHost]

    @property
    def transport(self) -> Transport:
        return Transport(None if self.config is None else Path(self.config), self.options)


def note_hosts(head_dir: Path, hosts: Mapping[int, Host], run_dirs: Mapping[int, Path], transport: Transport) -> None:
    """Keep in the run folder how further hosts of a run are reached by ssh, for `record_by_ssh`."""
    before = _read_notes(head_dir)
    found = {n: _SshHost(host, str(run_dirs[n])) for n, host in hosts.items()}
    config = None if transport.config is None else str(transport.config.absolute())
    notes = _SshNotes(config, transport.options, {**({} if before is None else before.hosts), **found})
    (head_dir / HOSTS).mkdir(exist_ok=True)
    replace_file(head_dir / SSH_NOTES, msgspec.json.encode(notes))


def forget_hosts(head_dir: Path) -> None:
    """Remove what `note_hosts` has kept of an earlier launch."""
    (head_dir / SSH_NOTES).unlink(missing_ok=True)


def _read_notes(head_dir: Path) -> _SshNotes | None:
    try:
        return msgspec.json.decode((head_dir / SSH_NOTES).read_bytes(), type=_SshNotes)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def record_by_ssh(head_dir: Path) -> RunRecord | None:
    """Fetch the record of a run, its metrics and failures from hosts that share no folder with this machine; None
    where that was not launched from here, or no host gives one."""
    notes = _read_notes(head_dir)
    if notes is None:
        return None
    hosts = {n: one.host for n, one in notes.hosts.items()}
    ways = SshWays(hosts, notes.transport)
    return fetch_record(hosts, ways, {n: Path(one.run_dir) for n, one in notes.hosts.items()}, head_dir)


def latest_record(run_dir: Path) -> RunRecord:
    """Read `run.json`, which a machine outside of the run first brings up to date: from its agents, and once none
    answers by ssh, with the metrics. Raises UserError as `read_record` does."""
    record = read_record(run_dir)
    if record.over or not is_outside(record):
        return record
    return record_of_agents(record) or record_by_ssh(run_dir) or record


def fetch_record(
    hosts: Mapping[int, Host], ways: Ways, run_dirs: Mapping[int, Path], head_dir: Path
) -> RunRecord | None:
    """Copy metrics, failures and the record into `head_dir`; returns the record, or None if no host has one.

    Hosts that cannot be reached are skipped; a record that says the run is over is preferred.
    """
    with Fleet(hosts, ways, nonce="") as fleet:
        fleet.open()
        given = {n: {"folder": str(run_dirs[n]), "patterns": PATTERNS} for n in fleet.reached}
        found = fleet.ask("find", given)[0]
        listed = {n: list(filter(_FETCHED.fullmatch, answer["files"])) for n, answer in found.items()}
        drafts = {n: f".{FILE_NAME}.{n}" for n, names in listed.items() if FILE_NAME in names}
        with suppress(HostsError):
            fleet.fetch(
                {
                    n: [(run_dirs[n] / name, head_dir / (drafts[n] if name == FILE_NAME else name)) for name in names]
                    for n, names in listed.items()
                }
            )
    records = []
    for name in drafts.values():
        # One that was cut off on the way is no record.
        with suppress(UserError):
            records.append(read_record(head_dir, name))
        (head_dir / name).unlink(missing_ok=True)
    if not records:
        return None
    best = structs.replace(max(records, key=lambda record: record.over), run_dir=str(head_dir))
    best.write()
    return best
