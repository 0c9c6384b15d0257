"""`distflow scale`: add or remove workers while the run continues, with `--hosts` on hosts that join it.

Agents that join begin with the addresses of all others, which learn of them from their heartbeats; then workers start
there. No agent knows of a new one before that, so a failed preflight leaves no trace in the run.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from distflow.cluster.processes import STOPPED, HostEntry, agent_name
from distflow.comm.addresses import place_of
from distflow.config.load import LoadedRecipe, recipe_from_mapping
from distflow.config.yamlfile import yaml_value
from distflow.errors import DistflowError, Problem, UserError, did_you_mean
from distflow.flow.recipe_check import plan_resized
from distflow.launch.deploy.fan_out import Fleet, SshWays
from distflow.launch.deploy.folder_contents import Beginning, CheckedHost, RunContents, description_in, key_of, tar
from distflow.launch.deploy.host_checks import link_problems
from distflow.launch.deploy.hostfile import Host, read_hosts
from distflow.launch.deploy.job_environment import forwarded
from distflow.launch.deploy.monitor import Monitor
from distflow.launch.deploy.multi_host import (
    SHIP_S,
    HostsRequest,
    begin_agents,
    latest_record,
    nonce_in,
    note_hosts,
    preflight,
    start_agents,
)
from distflow.launch.deploy.placement import WorkerPlacement, likely_slots
from distflow.launch.deploy.ssh import Transport
from distflow.launch.observe.file_sync import is_outside
from distflow.launch.observe.progress import AutoscaleDisplay, names_in
from distflow.launch.observe.run_client import answer_of_an_agent, ask_all
from distflow.launch.run.folder import SUBFOLDERS, find_run, mode_of, plugin_files, run_word, shipped_files, try_lock
from distflow.launch.run.record import FILE_NAME, HOSTS, RunRecord
from distflow.metrics.autoscale import Autoscaler, AutoscaleRule, check_pool
from distflow.types import WorkerName

AUTO = "auto"
AUTO_LOCK = ".autoscale.lock"
"""In the run folder, held by the process that scales the run by itself."""
ANSWER_S = 10.0
"""The agent plans the new workers before it answers."""
REACH_S = 30.0
POLL_S = 0.1


@click.command()
@click.argument("run")
@click.argument("change", metavar="[POOL=N|POOL=auto|--leave HOST]", required=False)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--leave", multiple=True, metavar="HOST", help="Move all workers of this host to others.")
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
def command(
    run: str,
    change: str | None,
    leave: tuple[str, ...],
    runs_dir: Path,
    least: int | None,
    most: int | None,
    **given: Any,
) -> int | None:
    """Set the number of workers of POOL to N. New ones join; those with the highest numbers hand back their work and
    leave. A pool that trains saves after its training step, and goes on from there with its new number of workers.

    With --leave, other hosts get the workers of a host instead, so that it can be taken away. Hosts of FILE that are
    not in the run yet join it first. With POOL=auto the command stays, and adds and removes workers of a pool that
    generates by what the run measures, until it ends; Ctrl-C leaves the run as it is.
    """
    record = latest_record(find_run(run, runs_dir))
    if record.over:
        raise UserError(f"scale: {record.name} is over ({record.state}) — only a running run can be scaled")
    if change is not None and not leave and change.endswith(f"={AUTO}"):
        if given["hosts"] is not None:
            raise UserError("scale --hosts: only with a number, as in rollout=3 — add hosts first, then use auto")
        _refuse_without_hosts(given)
        return _scale_by_itself(record, change.removesuffix(f"={AUTO}"), least, most)
    changes = _changes(record, change, leave, more_hosts=given["hosts"] is not None and bool(record.hosts))
    if least is not None or most is not None:
        raise UserError("--min, --max: only with POOL=auto")
    slots = _slots_for(record, changes, given)
    body = {"slots": {str(number): free for number, free in slots.items()}, "leaving": sorted(changes.leaving)}
    pool, *others = changes.counts
    further = {other: changes.counts[other] for other in others}
    answer = _ask(record, "scale", {**body, "pool": pool, "count": changes.counts[pool], "further": further})
    for name, one in {pool: answer, **answer.get("further", {})}.items():
        click.echo(_told(name, one))
    return None


@dataclass(frozen=True, slots=True)
class _Changes:
    """The request."""

    counts: Mapping[str, int]
    """By pool, how many workers it is to have."""
    leaving: frozenset[int] = frozenset()
    """Numbers of hosts that are to have none."""
    moving: Mapping[str, int] = field(default_factory=dict)
    """By pool, how many it has on these."""


def _changes(record: RunRecord, change: str | None, leave: Sequence[str], *, more_hosts: bool) -> _Changes:
    if change is not None and leave:
        raise UserError(f"scale: {change} and --leave are both given — give only one of them at a time")
    if change is None and not leave:
        raise UserError(f"scale: expected POOL=N or POOL={AUTO}, for example rollout=3, or --leave HOST")
    if change is not None:
        pool, count = _parse(change)
        return _Changes({pool: count})
    if len(record.hosts) < 2 and not more_hosts:
        where = record.hosts[0].name if record.hosts else "this machine"
        hint = "add a host to take its workers with --hosts FILE"
        if not record.hosts:
            stop = f"`distflow stop {run_word(record.path)}`"
            hint = f"to move it, end it with {stop} and go on with launch --resume --hosts FILE"
        raise UserError(f"--leave {', '.join(leave)}: {record.name} is on {where} alone — {hint}")
    numbers = {host.name: number for number, host in enumerate(record.hosts)}
    for name in leave:
        if name not in numbers:
            raise UserError(f"--leave {name}: no host of {record.name} — {did_you_mean(name, numbers)}")
    leaving = frozenset(numbers[name] for name in leave)
    moving = Counter(WorkerName.parse(entry.name).pool for entry in record.workers if entry.host in leaving)
    if not moving:
        raise UserError(f"--leave {', '.join(leave)}: no worker of {record.name} is there")
    counts = Counter(WorkerName.parse(entry.name).pool for entry in record.workers)
    return _Changes({pool: counts[pool] for pool in moving}, leaving, moving)


def _told(pool: str, answer: Mapping[str, Any]) -> str:
    """What happens now, in words."""
    if not answer["hosts"]:
        return f"{pool} has {answer['now']} workers already"
    trains, joining, leaving = answer["trains"], answer["joining"], answer["leaving"]
    named = {name: f"{name} on {host}" if host else name for name, host in answer["hosts"].items()}
    does = [f"joining: {', '.join(named[name] for name in joining)}"] if joining else []
    how = "leaving" if trains else "leaving when they have handed back their work"
    does += [f"{how}: {', '.join(named[name] for name in leaving)}"] if leaving else []
    does += ["the pool saves after its training step, and goes on from there in a new term"] if trains else []
    return f"{pool}: {answer['was']} → {answer['now']}; {'; '.join(does)}"


def _slots_for(record: RunRecord, changes: _Changes, given: Mapping[str, Any]) -> Mapping[int, int]:
    """Slots for new workers by host number, after adding new hosts to the run; empty: any host will do."""
    if given["hosts"] is None:
        _refuse_without_hosts(given)
        return {}
    environment = forwarded(os.environ, given["forward"], given["settings"])
    wanted = _HostsToAdd(changes, read_hosts(given["hosts"]), environment, given["ship_code"])
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


def _parse(change: str) -> tuple[str, int]:
    pool, equals, count = change.partition("=")
    if not (pool and equals and count.lstrip("-").isdecimal()):
        raise UserError(f"{change!r}: expected POOL=N or POOL={AUTO}, for example rollout=3")
    return pool, int(count)


def _scale_by_itself(record: RunRecord, pool: str, least: int | None, most: int | None) -> int:
    """Scale until the run is over; returns the exit code: 0, or that of a run that failed, or 130 after Ctrl-C."""
    present = _check_auto(record, pool)
    rule = AutoscaleRule(least or 1, 2 * present if most is None else most)
    if rule.most < rule.least:
        raise UserError(f"scale {pool}={AUTO}: --min {rule.least} is more than --max {rule.most}")
    _lock(record.path)
    click.echo(
        f"{record.name}: {pool} has {present} workers, and will have {rule.least} to {rule.most}; Ctrl-C leaves it"
    )

    def scale(now: RunRecord, count: int) -> str:
        return _told(pool, _ask(now, "scale", {"pool": pool, "count": count, "slots": {}}))

    try:
        ended = Monitor(record.path, AutoscaleDisplay(record, pool, Autoscaler(rule, present), scale)).only_look()
    except KeyboardInterrupt:
        click.echo(f"no longer scaling; {record.name} continues with the workers that it has")
        return STOPPED
    click.echo(f"{record.name} is over ({ended.state}): nothing is left to scale")
    return ended.exit_code or 1 if ended.state == "failed" else 0


def _lock(run_dir: Path) -> None:
    """Keep others from scaling this run by themselves until this process ends. Raises UserError if one does."""
    try:
        locked = try_lock(run_dir / AUTO_LOCK)
    except OSError as error:
        raise UserError(f"scale: {run_dir} cannot be written ({error.strerror}) — it must be yours to write") from error
    if locked is None:
        raise UserError(
            f"scale: another `distflow scale {run_word(run_dir)} …={AUTO}` is at work, and two would undo each other's "
            "changes — end that one first (Ctrl-C)"
        )


def _check_auto(record: RunRecord, pool: str) -> int:
    """How many workers the pool has now; raises UserError for one that cannot be scaled by what the run measures."""
    present = len(names_in(record, pool))
    # The agent refuses a pool that there is not; else nothing changes.
    if _ask(record, "scale", {"pool": pool, "count": max(1, present), "slots": {}})["trains"]:
        number = f"give it a number, for example {pool}={present + 1}"
        raise UserError(f"scale {pool}={AUTO}: pool {pool!r} trains, and {AUTO} is for pools that do not — {number}")
    check_pool(plan_resized(record.path, {pool: present}), pool)
    return present


@dataclass(frozen=True, slots=True)
class _HostsToAdd:
    """For which changes, and how."""

    changes: _Changes
    hosts: Sequence[Host]
    """Where new workers may go; may include hosts that are in the run already."""
    environment: Mapping[str, str]
    ship_code: bool

    def more(self, was: int) -> dict[str, int]:
        """How many new workers each pool needs. `was`: how many the only one has, where none leave hosts."""
        changes = self.changes
        return {pool: changes.moving.get(pool, count - was) for pool, count in changes.counts.items()}


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
    pool, count = next(iter(wanted.changes.counts.items()))
    body = {"pool": pool, "count": count, "hosts": len(further)}
    answer = _ask(record, "hosts.reserve", body)
    here = tuple(HostEntry(**entry) for entry in answer["hosts"])
    names = [*(entry.name for entry in here), *(host.name for host in further)]
    numbers = {name: number for number, name in enumerate(names)}
    added = _AddedHosts({numbers[host.name]: len(host.slots) for host in wanted.hosts}, (), ())
    try:
        _check(record, wanted, answer["was"])
        if further:
            said = _Addition(record, wanted, here, further, answer["was"]).start(transport)
            added = replace(added, notes=said, joined=tuple(host.name for host in further))
    finally:
        if not added.joined:
            _ask(record, "hosts.release", {})
    return added


def _check(record: RunRecord, wanted: _HostsToAdd, was: int) -> None:
    """Refuse what finds no places before any host joins."""
    busy = Counter(record.hosts[entry.host].name for entry in record.workers)
    leaving = {record.hosts[number].name for number in wanted.changes.leaving}
    open_to = [host for host in wanted.hosts if host.name not in leaving]
    more, slots = sum(wanted.more(was).values()), sum(max(0, len(host.slots) - busy[host.name]) for host in open_to)
    free = "free " if any(busy[host.name] for host in open_to) else ""
    if more <= 0:
        raise UserError(
            f"scale --hosts: {', '.join(wanted.changes.counts)} has {was} workers already, and --hosts is only for "
            "adding workers — ask for more, or leave out --hosts"
        )
    if slots < more:
        raise UserError(
            f"scale --hosts: {more} more workers, but the hosts together have {slots} {free}slots — add hosts or "
            "slots; nothing was changed"
        )


class _Addition:
    def __init__(
        self, record: RunRecord, wanted: _HostsToAdd, here: Sequence[HostEntry], further: Sequence[Host], was: int
    ) -> None:
        self._record = record
        self._here = here
        self._hosts = {len(here) + n: host for n, host in enumerate(further)}
        more, moving = wanted.more(was), wanted.changes.moving
        until = {pool: count + moving.get(pool, 0) for pool, count in wanted.changes.counts.items()}
        plan = plan_resized(record.path, until, spanning=True)
        new = [f"{pool}/{index}" for pool in more for index in range(until[pool] - more[pool], until[pool])]
        placement = WorkerPlacement((*map(_as_host, here), *further), likely_slots(new, self._hosts))
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
            if is_outside(self._record):
                note_hosts(head_dir, self._hosts, {n: host.run_dir for n, host in checked.items()}, transport)
            begin_agents(self._hosts, agents, head_dir, limit_s, others)
        self._await_known(limit_s)
        return said

    def _await_known(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not self._hosts.keys() <= set(map(int, _ask(self._record, "status", {})["hosts"])):
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
    resolved = yaml_value(source.read_text())
    recipe = recipe_from_mapping(resolved, lambda key: str(source))
    return LoadedRecipe(recipe, source, resolved, (), lambda key: str(source))


def _as_host(entry: HostEntry) -> Host:
    """A host of the run, in the form of a hosts file entry."""
    return Host(entry.name, (), FILE_NAME, address=entry.address)


def _tcp_address(address: str) -> tuple[str, int]:
    host, _, port = place_of(address).removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)
