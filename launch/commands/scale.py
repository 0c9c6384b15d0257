"""`distflow scale`: add or remove workers while the run continues, with `--hosts` on hosts that join it.

Agents that join begin with the addresses of all others, which learn of them from their heartbeats; then workers start
there. No agent knows of a new one before that, so a failed preflight leaves no trace in the run.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import yaml
from msgspec import structs

from distflow.comm.addresses import place_of
from distflow.config.load import LoadedRecipe, recipe_from_mapping
from distflow.data.metrics_merge import MetricsReader
from distflow.errors import DistflowError, Problem, UserError
from distflow.launch.agent.scaling import plan_documents
from distflow.launch.deploy.fan_out import Fleet, SshWays
from distflow.launch.deploy.folder_contents import Beginning, CheckedHost, RunContents, description_in, key_of, tar
from distflow.launch.deploy.host_checks import link_problems
from distflow.launch.deploy.hostfile import Host, read_hosts
from distflow.launch.deploy.job_environment import forwarded
from distflow.launch.deploy.monitor import Monitor
from distflow.launch.deploy.multi_host import SHIP_S, HostsRequest, begin_agents, nonce_in, preflight, start_agents
from distflow.launch.deploy.placement import WorkerPlacement, likely_slots
from distflow.launch.deploy.ssh import Transport
from distflow.launch.observe.progress import RunStatus
from distflow.launch.observe.run_client import answer_of_an_agent, ask_all
from distflow.launch.run.folder import SUBFOLDERS, find_run, mode_of, plugin_files, shipped_files
from distflow.launch.run.record import FILE_NAME, HOSTS, HostEntry, RunRecord, agent_name, read_record
from distflow.sim.autoscale import Autoscaler, AutoscaleRule, ScaleDecision, StepSeen, check_pool
from distflow.types import WorkerName

AUTO = "auto"
BEHIND = 5
"""Training steps before the present one that are looked at, too, where the command begins."""
ANSWER_S = 10.0
"""The agent plans the new workers before it answers."""
REACH_S = 30.0
POLL_S = 0.1


@click.command()
@click.argument("run")
@click.argument("change", metavar="POOL=N|auto")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--hosts", type=click.Path(path_type=Path), metavar="FILE", help="Place new workers on these hosts only.")
@click.option("--ssh-config", type=click.Path(path_type=Path), metavar="FILE", help="Configuration file for ssh.")
@click.option("--ssh-options", default="", metavar="WORDS", help="More arguments for the ssh command.")
@click.option(
    "--forward", multiple=True, metavar="NAMES", help="More environment variables to forward to new hosts: A,B_*."
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a variable on new hosts.")
@click.option("--ship-code", is_flag=True, help="Copy this machine's distflow to new hosts.")
@click.option("--min", "least", type=click.IntRange(min=1), metavar="A", help="Of auto: the fewest workers.  [1]")
@click.option(
    "--max", "most", type=click.IntRange(min=1), metavar="B", help="Of auto: the most workers.  [twice the present]"
)
def command(run: str, change: str, runs_dir: Path, least: int | None, most: int | None, **given: Any) -> int | None:
    """Set the number of workers of POOL to N. New ones join; those with the highest numbers hand back their work and
    leave.

    Hosts of FILE that are not in the run yet join it first. With POOL=auto the command stays, and adds and removes
    workers of a pool that generates by what the run measures, until it ends; Ctrl-C leaves the run as it is.
    """
    pool, count = _parse(change)
    record = read_record(find_run(run, runs_dir))
    if record.over:
        raise UserError(f"scale: {record.name} is over ({record.state}) — only a running run can be scaled")
    if count is None:
        if given["hosts"] is not None:
            raise UserError("scale --hosts: only with a number, as in rollout=3 — add hosts first, then use auto")
        _refuse_without_hosts(given)
        return _scale_by_itself(record, pool, least, most)
    if least is not None or most is not None:
        raise UserError(f"--min, --max: only with {pool}=auto")
    _set(record, pool, count, given)
    return None


def _set(record: RunRecord, pool: str, count: int, given: Mapping[str, Any]) -> None:
    slots = _slots_for(record, pool, count, given)
    body = {"pool": pool, "count": count, "slots": {str(number): free for number, free in slots.items()}}
    answer = _ask(record, "scale", body)
    if answer["was"] == answer["now"]:
        click.echo(f"{pool} has {count} workers already")
        return
    click.echo(_changed(pool, answer))


def _slots_for(record: RunRecord, pool: str, count: int, given: Mapping[str, Any]) -> Mapping[int, int]:
    """Slots for new workers by host number, after adding new hosts to the run; empty: any host will do."""
    if given["hosts"] is None:
        _refuse_without_hosts(given)
        return {}
    environment = forwarded(os.environ, given["forward"], given["settings"])
    wanted = _HostsToAdd(pool, count, read_hosts(given["hosts"]), environment, given["ship_code"])
    added = _add_hosts(record, wanted, Transport(given["ssh_config"], tuple(shlex.split(given["ssh_options"]))))
    for note in added.notes:
        click.echo(f"note: {note}")
    if added.joined:
        click.echo(f"hosts joined: {', '.join(added.joined)}")
    return added.slots


def _refuse_without_hosts(given: Mapping[str, Any]) -> None:
    useless = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if useless:
        raise UserError(f"{', '.join(useless)}: only for hosts that join — name them with --hosts FILE")


def _parse(change: str) -> tuple[str, int | None]:
    """The pool, and how many workers; None: as many as the run shows to be good."""
    pool, equals, count = change.partition("=")
    if pool and equals and count == AUTO:
        return pool, None
    if not (pool and equals and count.lstrip("-").isdecimal()):
        raise UserError(f"{change!r}: expected POOL=N or POOL={AUTO}, for example rollout=3")
    return pool, int(count)


def _scale_by_itself(record: RunRecord, pool: str, least: int | None, most: int | None) -> int:
    """Scale until the run is over; returns its exit code."""
    present = _check_auto(record, pool)
    rule = AutoscaleRule(least or 1, 2 * present if most is None else most)
    if rule.most < rule.least:
        raise UserError(f"scale {pool}={AUTO}: --min {rule.least} is more than --max {rule.most}")
    click.echo(
        f"{record.name}: {pool} has {present} workers, and will have {rule.least} to {rule.most}; Ctrl-C leaves it"
    )
    try:
        ended = Monitor(record.path, _AutoDisplay(record, pool, Autoscaler(rule, present))).only_look()
    except KeyboardInterrupt:
        click.echo(f"no longer scaling; {record.name} continues with the workers that it has")
        return 0
    click.echo(f"{record.name}: {ended.state}")
    return 0 if ended.exit_code is None else ended.exit_code


def _check_auto(record: RunRecord, pool: str) -> int:
    """How many workers the pool has now; raises UserError for one that cannot be scaled by what the run measures."""
    present = len(_names(record, pool))
    # The agent refuses a pool that there is not, and one that trains; else nothing changes.
    _ask(record, "scale", {"pool": pool, "count": max(1, present), "slots": {}})
    check_pool(plan_documents(record.path, pool, present), pool)
    return present


def _names(record: RunRecord, pool: str) -> list[str]:
    return [entry.name for entry in record.workers if WorkerName.parse(entry.name).pool == pool]


class _AutoDisplay:
    """Looks at each training step that the monitor shows, and scales the pool."""

    def __init__(self, record: RunRecord, pool: str, scaler: Autoscaler) -> None:
        self._record, self._pool, self._scaler = record, pool, scaler
        self._reader = MetricsReader(record.path)
        self._done = self._decided = 0
        """The last training step that was looked at, and the one after which the last change was decided."""
        self._since: float | None = None
        """When it was decided; None: the pool is as it is to be."""

    def __enter__(self) -> None:
        self._do(self._scaler.begin())

    def __exit__(self, *raised: object) -> None:
        """The run goes on."""

    def show(self, status: RunStatus) -> None:
        """Look at the training steps that are whole: all before the last one."""
        if status.record.state != "running" or not status.step:
            return
        self._record = status.record
        self._reader.read()
        self._done = max(self._done, status.step - 1 - BEHIND)
        while self._done < status.step - 1:
            self._done += 1
            if self._all_there():
                self._look(self._done)

    def say(self, text: str) -> None:
        """Other news of the run."""
        click.echo(text)

    def finish(self, status: RunStatus) -> None:
        """The run is over."""

    def _all_there(self) -> bool:
        """Whether the workers are those that are to be there, and all have generated since the last change."""
        names, term, now = _names(self._record, self._pool), self._record.term, time.monotonic()
        if len(names) != self._scaler.count:
            if self._since is None or now - self._since > self._record.no_progress_s:
                click.echo(f"step {self._done}: {self._pool} has {len(names)} workers, not {self._scaler.count}")
                self._scaler.found(len(names))
                self._decided, self._since = self._done, None
            return False
        if self._reader.last_step([WorkerName.parse(name).file_stem for name in names], term) <= self._decided:
            return False
        self._since = None
        return True

    def _look(self, step: int) -> None:
        seen = StepSeen.of(self._reader.step(step))
        if seen is None:
            return
        decision = self._scaler.see(seen)
        if self._scaler.kept:
            click.echo(f"step {step}: {self._pool} stays at {self._scaler.count}: {self._scaler.kept}")
        self._do(decision)

    def _do(self, decision: ScaleDecision | None) -> None:
        if decision is None:
            return
        body = {"pool": self._pool, "count": decision.count, "slots": {}}
        try:
            answer = _ask(self._record, "scale", body)
        except UserError as error:
            # Of the places for workers, or since the run is ending.
            click.echo(f"step {self._done}: {self._pool}={decision.count} was refused: {error}")
            self._scaler.refused(len(_names(self._record, self._pool)))
            return
        self._decided, self._since = self._done, time.monotonic()
        click.echo(f"step {self._done}: {decision.why}")
        click.echo(f"  {_changed(self._pool, answer)}")


def _changed(pool: str, answer: Mapping[str, Any]) -> str:
    does = "joining" if answer["now"] > answer["was"] else "leaving when they have handed back their work"
    names = [f"{name} on {host}" if host else name for name, host in answer["hosts"].items()]
    return f"{pool}: {answer['was']} → {answer['now']}; {does}: {', '.join(names)}"


@dataclass(frozen=True, slots=True)
class _HostsToAdd:
    """The request."""

    pool: str
    count: int
    hosts: Sequence[Host]
    """Where new workers may go; may include hosts that are in the run already."""
    environment: Mapping[str, str]
    ship_code: bool


@dataclass(frozen=True, slots=True)
class _AddedHosts:
    """The result: where the new workers may go."""

    slots: Mapping[int, int]
    """Number of worker slots, by host number."""
    notes: tuple[str, ...]
    joined: tuple[str, ...]
    """Names of the hosts that joined the run."""


def _add_hosts(record: RunRecord, wanted: _HostsToAdd, transport: Transport) -> _AddedHosts:
    """Start agents on the hosts that are not yet in the run. Raises HostsError, after undoing everything on them."""
    further = [host for host in wanted.hosts if host.name not in {entry.name for entry in record.hosts}]
    body = {"pool": wanted.pool, "count": wanted.count, "hosts": len(further)}
    answer = _ask(record, "hosts.reserve", body)
    here = tuple(HostEntry(**entry) for entry in answer["hosts"])
    names = [*(entry.name for entry in here), *(host.name for host in further)]
    numbers = {name: number for number, name in enumerate(names)}
    added = _AddedHosts({numbers[host.name]: len(host.slots) for host in wanted.hosts}, (), ())
    try:
        _check(wanted, answer["was"])
        if further:
            said = _Addition(record, wanted, here, further, answer["was"]).start(transport)
            added = replace(added, notes=said, joined=tuple(host.name for host in further))
    finally:
        if not added.joined:
            _ask(record, "hosts.release", {})
    return added


def _check(wanted: _HostsToAdd, was: int) -> None:
    more, slots = wanted.count - was, sum(len(host.slots) for host in wanted.hosts)
    if more <= 0:
        raise UserError(
            f"scale --hosts: {wanted.pool} has {was} workers already, and --hosts is only for adding "
            "workers — ask for more, or leave out --hosts"
        )
    if slots < more:
        raise UserError(
            f"scale --hosts: {more} more workers, but the hosts together have {slots} slots — add hosts or slots"
        )


class _Addition:
    def __init__(
        self, record: RunRecord, wanted: _HostsToAdd, here: Sequence[HostEntry], further: Sequence[Host], was: int
    ) -> None:
        self._record = record
        self._here = here
        self._hosts = {len(here) + n: host for n, host in enumerate(further)}
        plan = plan_documents(record.path, wanted.pool, wanted.count)
        placement = WorkerPlacement((*map(_as_host, here), *further), likely_slots(plan, wanted.pool, self._hosts, was))
        self._request = HostsRequest(
            RunContents(_loaded(record.path), plan, Beginning(term=record.term), record.path, placement),
            resume=False,
            ship_code=wanted.ship_code,
            environment=wanted.environment,
        )

    def start(self, transport: Transport) -> tuple[str, ...]:
        """Preflight, create run folders, start agents; returns notes."""
        head_dir, limit_s = self._record.path, self._request.connect_s
        ways = SshWays(self._hosts, transport)
        with nonce_in(head_dir) as nonce, Fleet(self._hosts, ways, nonce) as fleet:
            checked, said = preflight(self._request, fleet, lambda *new: self._links_to_run(fleet, *new))
            records = self._fill(fleet, checked)
            agents = start_agents(self._request, fleet, checked, records)
            others = {n: entry.agent for n, entry in enumerate(self._here) if n not in self._record.silent}
            # From here on they belong to the run: if this process is interrupted they stay to its end, without workers.
            fleet.must("keep", {n: {} for n in checked})
            begin_agents(self._hosts, agents, head_dir, limit_s, others)
        self._await_known(limit_s)
        return said

    def _await_known(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not self._hosts.keys() <= set(_ask(self._record, "status", {})["hosts"]):
            if time.monotonic() > deadline:
                names = ", ".join(host.name for host in self._hosts.values())
                raise DistflowError(f"scale: agents run on {names}, but the other agents did not hear from them "
                                    f"within limits.connect_s ({limit_s:g} s) — see logs/agent-*.log")  # fmt: skip
            time.sleep(POLL_S)

    def _fill(self, fleet: Fleet, checked: Mapping[int, CheckedHost]) -> dict[int, Path]:
        """Write what the agents read. In a shared folder each gets a record of its own: run.json has another writer."""
        entries = [checked[n].entry(self._hosts[n]) for n in sorted(checked)]
        record = structs.replace(self._record, hosts=(*self._here, *entries))
        shared = {n: Path(HOSTS) / f"{n}.json" for n, host in checked.items() if host.same_folder}
        for path in shared.values():
            (self._record.path / path).write_text(record.as_text())
        own = {n: host for n, host in checked.items() if n not in shared}
        folders = {n: structs.replace(record, run_dir=str(host.run_dir)) for n, host in own.items()}
        payloads = {n: self._bundle(folders[n], host) for n, host in own.items()}
        mode = mode_of(self._record.path)
        given = {n: {"folder": str(host.run_dir), "mode": mode} for n, host in own.items()}
        fleet.must("unpack", given, limit_s=SHIP_S, payloads=payloads)
        return shared

    def _bundle(self, record: RunRecord, host: CheckedHost) -> bytes:
        head_dir, resolved = self._record.path, self._request.contents.loaded.resolved
        # From the run folder what was copied there for this machine.
        copies = shipped_files(plugin_files(resolved), head_dir) if host.missing_plugins else {}
        files = {**description_in(head_dir), **{copy: file.read_bytes() for copy, file in copies.items()}}
        files[FILE_NAME] = record.as_text().encode()
        return tar(files, key_of(head_dir), SUBFOLDERS)

    def _links_to_run(self, fleet: Fleet, addresses: Mapping[int, str], ports: Mapping[int, int]) -> list[Problem]:
        """Problems with the links between the new hosts and those of the run, in both directions."""
        record = self._record
        there = {n: entry for n, entry in enumerate(self._here) if n not in record.silent and entry.agent}
        listeners = [[str(n), *_tcp_address(entry.agent)] for n, entry in there.items()]
        # Agents do not send the nonce: it is enough that they accept the connection.
        found, lost = fleet.ask("connect", {n: {"nonce": "", "targets": listeners} for n in addresses}, limit_s=REACH_S)
        faults = {(n, int(to)): why for n, answer in found.items() for to, why in answer["faults"].items() if why}
        targets = [[str(n), addresses[n], port] for n, port in ports.items()]
        asked = structs.replace(record, roster={agent_name(n): entry.agent for n, entry in there.items()})
        body = {"nonce": fleet.nonce, "targets": targets}
        for name, answer in ask_all(asked, list(asked.roster), "hosts.reach", body, REACH_S).items():
            number = int(name.rpartition("/")[2])
            reached = dict.fromkeys(map(str, ports), "its agent did not answer") if answer is None else answer["faults"]
            faults |= {(number, int(to)): str(why) for to, why in reached.items() if why}
        hosts = {**self._hosts, **{n: _as_host(entry) for n, entry in there.items()}}
        all_addresses = {n: entry.address for n, entry in there.items()} | dict(addresses)
        return [*lost, *link_problems(hosts, all_addresses, faults)]


def _ask(record: RunRecord, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return answer_of_an_agent(record, kind, body, ANSWER_S, "scale")


def _loaded(run_dir: Path) -> LoadedRecipe:
    source = run_dir / "recipe.yaml"
    resolved = yaml.safe_load(source.read_text())
    recipe = recipe_from_mapping(resolved, lambda key: str(source))
    return LoadedRecipe(recipe, source, resolved, (), lambda key: str(source))


def _as_host(entry: HostEntry) -> Host:
    """A host of the run, in the form of a hosts file entry."""
    return Host(entry.name, (), FILE_NAME, address=entry.address)


def _tcp_address(address: str) -> tuple[str, int]:
    host, _, port = place_of(address).removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)
