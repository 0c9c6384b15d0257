"""Scales pools while the run goes on: who decides, where new workers go, and what they start from.

Any agent may be asked. It decides on which host each worker of the pool is to run, and numbers the decision, which
spreads with its report. The highest number wins, and every agent does its own part: it starts the workers that its host
lacks and drains those that are no longer wanted. Who trains shares ledgers and sums with all others that do: the next
term takes such a decision up as a whole (`distflow/cluster/term_vote.py`), and what is done here for it is to write
documents.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import structs

from distflow.cluster.cluster_view import FreeGpus, members_of, take_newer, takes_up
from distflow.cluster.gossip import Gossip, least_silence_s
from distflow.cluster.host_report import DesiredWorkers, Successor, Term
from distflow.cluster.processes import agent_name
from distflow.comm.addresses import worker_address
from distflow.comm.beats import HostNumber
from distflow.data.decoding import Form, Whole, read
from distflow.errors import UserError
from distflow.launch.agent.restart_policy import Action, RestartPolicy
from distflow.launch.run.folder import note_sizes, recipe_in
from distflow.launch.run.record import RunRecord, WorkerEntry, sites_of
from distflow.log import logger
from distflow.types import MOST_WORKERS, WorkerName

if TYPE_CHECKING:
    from distflow.flow.plan import WorkerPlan

RETRY_S = 1.0
log = logger(__name__)
RESERVED_S = 180.0
"""For the preflight and the start of further hosts."""


class _Request(Form, frozen=True):
    pool: str
    count: int


class _Scale(_Request, frozen=True):
    slots: dict[Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,5}\Z")], Whole]
    leaving: frozenset[HostNumber] = frozenset()
    further: dict[str, int] = msgspec.field(default_factory=dict)


class _Reserve(_Request, frozen=True):
    hosts: Annotated[int, msgspec.Meta(ge=0, le=MOST_WORKERS)]


class _Room(NamedTuple):
    """Where new workers of a pool may go."""

    slots: Mapping[int, int]
    """Worker slots by host; empty: any host, however full."""
    leaving: Container[int]
    """Hosts that are to have none."""
    taken: Mapping[str, int]
    """New workers of other pools, and their hosts."""


class Scaling:
    """The part that one agent takes in it."""

    def __init__(self, record: RunRecord, host: int, core: RestartPolicy) -> None:
        self._record = record
        self._host = host
        self._core = core
        self._trains = {_pool(entry.name): entry.trains for entry in record.workers}
        self._trainers = {entry.name: entry.host for entry in record.workers if entry.trains}
        self._planned: dict[str, dict[str, int]] = {pool: {} for pool in self._trains}
        for entry in record.workers:
            self._planned[_pool(entry.name)][entry.name] = entry.host
        self._gpus = record.hosts[host].gpus if record.hosts else record.gpus
        self._decided: dict[str, DesiredWorkers] = {}
        """The last known decision about each pool that was scaled."""
        self._noted: dict[str, tuple[int, int]] = {}
        """The last decision about each pool whose number of workers the run's recipe has."""
        self._looked = -1
        """The revision of the reports whose decisions we know."""
        self._refused_at: float | None = None
        """When the disk last refused the documents of new workers; None: it has room."""
        self._reserved: tuple[int, float] | None = None
        """The number of hosts that there will be, and until when the reservation holds."""

    def training(self, mesh: Gossip) -> dict[str, DesiredWorkers]:
        """Those about pools that train."""
        return {pool: decision for pool, decision in self.wanted(mesh).items() if self._trains[pool]}

    def wanted(self, mesh: Gossip) -> dict[str, DesiredWorkers]:
        """The last decision about each pool that was scaled, including our own."""
        for report in map(mesh.report, mesh.changed_since(self._looked)):
            take_newer(self._decided, {} if report is None else report.wanted)
        self._looked = mesh.revision
        return dict(self._decided)

    def ask(self, body: Mapping[str, Any], mesh: Gossip) -> dict[str, Any]:
        """Decide on {"pool", "count", "slots", "leaving", "further"}; answers {"was", "now", "trains", "joining",
        "leaving", "hosts": {new or leaving worker: host's name}}.

        `slots`: worker slots by host, for the only hosts that may take new workers; empty: any host, however full.
        `leaving`: hosts that are to have none. `further`: how many workers other pools are to have; answers of them are
        in "further". Raises UserError with the reason if any of it cannot be done: then nothing is.
        """
        request = read(body, _Scale, "scale")
        slots = {int(host): number for host, number in request.slots.items()}
        before, after, new = dict[str, Mapping[str, int]](), dict[str, dict[str, int]](), dict[str, int]()
        for pool, count in {request.pool: request.count, **request.further}.items():
            before[pool] = self._present(pool, mesh)
            self._check(pool, count)
            after[pool] = self._placed(pool, count, before[pool], mesh, _Room(slots, request.leaving, dict(new)))
            if self._trains[pool]:
                self._check_encryption(pool, after[pool])
            new |= {name: host for name, host in after[pool].items() if name not in before[pool]}
        # All of it is possible.
        told = {pool: self._decide(pool, before[pool], after[pool], mesh) for pool in after}
        return {**told.pop(request.pool), **({"further": told} if told else {})}

    def _decide(self, pool: str, before: Mapping[str, int], after: dict[str, int], mesh: Gossip) -> dict[str, Any]:
        changed = {name: host for name, host in {**before, **after}.items() if (name in before) != (name in after)}
        if changed:
            number = max((known.stamp[0] for known in self.wanted(mesh).values()), default=0) + 1
            self._decided[pool] = DesiredWorkers((number, self._host), after)
        names = {name: mesh.reports[host].entry.name if host in mesh.reports else "" for name, host in changed.items()}
        joining, gone = ([name for name in changed if (name in before) == known] for known in (False, True))
        told = {"joining": joining, "leaving": gone, "trains": self._trains[pool]}
        return {"was": len(before), "now": len(after), "hosts": names, **told}

    def reserve(self, body: Mapping[str, Any], mesh: Gossip, now: float) -> dict[str, Any]:
        """Reserve numbers for {"hosts"} further hosts, to bring {"pool"} to {"count"} workers.

        Answers {"was": workers of the pool, "hosts": entries of the present hosts}; the reserved numbers follow theirs.
        They are kept until `release`, or for `RESERVED_S`, within which their agents must have reported. Raises
        UserError with the reason if it cannot be done.
        """
        request = read(body, _Reserve, "hosts.reserve")
        pool, count, further = request.pool, request.count, request.hosts
        was = len(self._present(pool, mesh))
        self._check(pool, count)
        if not self._record.hosts:
            raise UserError(
                "scale --hosts: this run was started without --hosts, so its workers listen on this machine only — "
                "stop it, and continue with launch --resume --hosts FILE"
            )
        known = dict(enumerate(self._record.hosts)) | {host: report.entry for host, report in mesh.reports.items()}
        coming = self._reserved is not None and now < self._reserved[1] and len(known) < self._reserved[0]
        if coming or known.keys() != set(range(len(known))) or not known.keys() >= set(mesh.others):
            raise UserError("scale --hosts: other hosts are being added right now — try again when they have joined")
        least = least_silence_s(len(known) + further)
        if self._record.host_silence_s <= least:
            raise UserError(
                f"scale --hosts: limits.host_silence_s of this run, {self._record.host_silence_s:g} s, is too short "
                f"for {len(known) + further} hosts — stop it, and continue with --resume and more than {least:g} s"
            )
        self._reserved = (len(known) + further, now + RESERVED_S)
        return {"was": was, "hosts": [structs.asdict(known[host]) for host in range(len(known))]}

    def release(self) -> dict[str, Any]:
        """Give up the reserved numbers: their hosts will not join."""
        self._reserved = None
        return {}

    def apply(self, mesh: Gossip, know: Callable[[str, str], None], now: float) -> list[Action]:
        """Do this host's part of the decisions. Raises UserError if a new worker cannot be planned.

        Files that the disk refuses are written again later.
        """
        actions: list[Action] = []
        if self._core.winding_up:
            return actions
        for pool, decision in self.wanted(mesh).items():
            if self._trains[pool]:
                continue
            lives = self._core.lives
            ours = [name for name, host in decision.hosts.items() if host == self._host]
            new = [name for name in ours if name not in lives or lives[name].drained]
            self._note_size(pool, decision)
            if new:
                for entry in self._prepared(decision.hosts, new, mesh.own.term, now):
                    know(entry.name, worker_address(self._record.path, entry.name, self._host))
                    actions += self._core.grow(entry)
            for name in [name for name in lives if _pool(name) == pool and name not in decision.hosts]:
                actions += self._core.shrink(name)
        return actions

    def _note_size(self, pool: str, decision: DesiredWorkers) -> None:
        """Write the number of workers of a pool into the run's recipe, for `--resume`; again later if the disk refuses
        it. Pools that train have theirs written by the next term."""
        from distflow.flow.recipe_check import plan_resized

        if self._noted.get(pool) == decision.stamp:
            return
        try:
            # A recipe that cannot be planned, as with settings of a worker that has left, must not be written.
            plan_resized(self._record.path, {pool: len(decision.hosts)})
            note_sizes(self._record.path, decision.hosts)
        except UserError as error:
            log.error("--resume will go on with the former number of workers of %s: %s", pool, error)
        except OSError as error:
            log.error("the new number of workers of %s cannot be kept for --resume yet: %s", pool, error)
            return
        self._noted[pool] = decision.stamp

    def joining(self, term: Successor, before: Term) -> list[WorkerEntry]:
        """Those that train here in a term and did not in the one `before`: their documents are written.

        If it takes up a decision, the run's recipe says from now on how many there are. Raises OSError, and UserError
        if one cannot be planned.
        """
        members, former = members_of(term, self._trainers), members_of(before.begun, self._trainers)
        if takes_up(term, before) and members.keys() != former.keys():
            note_sizes(self._record.path, members)
        new = [name for name, host in members.items() if host == self._host and name not in former]
        return self._write(members, new, Term(term.number, term)) if new else []

    def memory(self, term: Successor, before: Term) -> dict[str, int]:
        """MiB that each training worker must be able to reserve for samples, by pool, if the term takes up a decision.

        A pool that shrinks is planned to be able to do so.
        """
        from distflow.flow.recipe_check import plan_resized
        from distflow.flow.rescaling import sizes

        if not takes_up(term, before) or self._record.on_failure == "shrink":
            return {}
        counts = sizes(members_of(term, self._trainers))
        plan = plan_resized(self._record.path, counts)
        return {pool: plan.worker(WorkerName(pool, 0)).sample_memory_mb for pool in counts}

    def _prepared(self, pool: Mapping[str, int], names: list[str], term: Term, now: float) -> list[WorkerEntry]:
        """Workers that can be started; none while the disk refuses their documents."""
        if self._refused_at is not None and now - self._refused_at < RETRY_S:
            return []
        try:
            entries = self._write(pool, names, term)
        except (OSError, NoGpuError) as error:
            if self._refused_at is None:
                log.error("%s cannot be prepared yet: %s", ", ".join(names), error)
            self._refused_at = now
            return []
        self._refused_at = None
        return entries

    def _present(self, pool: str, mesh: Gossip) -> Mapping[str, int]:
        if pool not in self._trains:
            raise UserError(f"scale: there is no pool {pool!r}; this run has {', '.join(self._trains)}")
        decided, begun = self.wanted(mesh).get(pool), mesh.own.term.begun
        if not self._trains[pool]:
            return self._planned[pool] if decided is None else decided.hosts
        taken_up = () if begun is None else begun.scaled
        if decided is not None and all((pool, *decided.stamp) > one for one in taken_up if one[0] == pool):
            return decided.hosts
        return {name: host for name, host in members_of(begun, self._trainers).items() if _pool(name) == pool}

    def _coming(self, mesh: Gossip) -> list[tuple[str, int]]:
        """Workers that were decided on and that their host has not reported yet, and their hosts."""
        decided = (pair for decision in self.wanted(mesh).values() for pair in decision.hosts.items())
        return [(name, host) for name, host in decided if name not in _living(mesh, host)]

    def _check(self, pool: str, count: int) -> None:
        if self._core.winding_up:
            raise UserError(f"scale: the run is {self._core.phase} and starts no more workers — scale the next run")
        if not 1 <= count <= MOST_WORKERS:
            raise UserError(f"scale: {pool}={count}; expected 1 to {MOST_WORKERS} workers")
        if self._trains[pool]:
            self._check_training(pool, count)

    def _check_training(self, pool: str, count: int) -> None:
        """Refuse what a pool that trains could not go on with. Raises UserError, also for what cannot be planned."""
        from distflow.flow.recipe_check import plan_resized

        hint = f"stop the run, and continue with --resume layout.pools.{pool}.count={count}"
        if not self._core.renews:
            raise UserError(f"scale: pool {pool!r} trains, and layout.on_failure: stop allows no second term — {hint}")
        if recipe_in(self._record.path).run.deterministic:
            raise UserError(
                f"scale: run.deterministic promises the same bits for one number of training workers only — {hint}"
            )
        plan_resized(self._record.path, {pool: count})

    def _check_encryption(self, pool: str, after: Mapping[str, int]) -> None:
        """Refuse `security.encrypt: all` where it cannot be guaranteed: gradients between hosts are not encrypted."""
        security = recipe_in(self._record.path).security
        if len(set(after.values())) > 1 and security.encrypt == "all" and not security.trusted_network:
            raise UserError(
                f"scale: security.encrypt: all does not encrypt gradients, which {', '.join(after)} would exchange "
                f"over the network — keep pool {pool!r} on one host, by --hosts FILE or layout.pools.{pool}.hosts"
            )

    def _placed(
        self,
        pool: str,
        count: int,
        before: Mapping[str, int],
        mesh: Gossip,
        room: _Room,
    ) -> dict[str, int]:
        """The host of each worker: present ones stay, new ones go where slot and GPU are free and the pool has fewest.

        A name that was used on a host is used again there alone. Raises UserError if there is no room.
        """
        slots, leaving = room.slots, room.leaving
        stay = [name for name, host in before.items() if host not in leaving]
        placed = {name: before[name] for name in sorted(stay, key=_index)[:count]}
        if len(placed) == count:
            return placed
        hosts = [host for host in self._candidates(pool, mesh, slots) if host not in leaving]
        coming = {**dict(self._coming(mesh)), **room.taken}
        living = {name: host for host in hosts for name in _living(mesh, host)}
        taken = Counter(host for name, host in {**living, **coming}.items() if name not in before)
        gpus = self._free_gpus(pool, count, before, mesh)
        for name, host in room.taken.items():
            gpus.hold(name, host)
        for name in (f"{pool}/{index}" for index in itertools.count()):
            load = Counter(placed.values())
            free = [host for host in hosts if not slots or load[host] + taken[host] < slots[host]]
            if not free:
                short = count - len(placed)
                raise UserError(
                    f"scale: not enough slots: {short} workers of {pool} cannot be placed; nothing was changed — add "
                    "hosts or slots"
                )
            former = _former(name, mesh)
            there = [host for host in free if former in (None, host)]
            if name not in before and there:
                placed[name] = gpus.take(name, sorted(there, key=lambda host: (load[host], host)))
            if len(placed) == count:
                break
        return placed

    def _candidates(self, pool: str, mesh: Gossip, slots: Mapping[int, int]) -> list[int]:
        """Hosts that new workers may go to."""
        silent = mesh.silent()
        hosts = [
            host for host in sorted({self._host, *mesh.others}) if host not in silent and (host in slots or not slots)
        ]
        if not hosts:
            raise UserError(f"scale: none of the hosts {sorted(slots)} answers — see `distflow status`")
        return self._allowed(pool, hosts, mesh) if self._record.hosts else hosts

    def _free_gpus(self, pool: str, count: int, before: Mapping[str, int], mesh: Gossip) -> FreeGpus:
        """GPUs that new workers of a pool may take."""
        from distflow.flow.recipe_check import plan_resized

        known = (name for report in mesh.reports.values() for name in report.workers)
        leaving = {name for name in known if _pool(name) == pool and name not in before}
        gpus = FreeGpus(mesh, plan_resized(self._record.path, {pool: count}), leaving)
        for name, host in self._coming(mesh):
            gpus.hold(name, host)
        return gpus

    def _allowed(self, pool: str, hosts: list[int], mesh: Gossip) -> list[int]:
        """Those of the hosts that the recipe lets workers of this pool run on."""
        pins = recipe_in(self._record.path).layout.pools[pool].hosts
        numbers, patterns = ([pin for pin in pins if isinstance(pin, kind)] for kind in (int, str))
        names = {host: mesh.reports[host].entry.name for host in hosts if host in mesh.reports}
        found = [
            host
            for host in hosts
            if not pins or host in numbers or any(fnmatchcase(names.get(host, ""), str(p)) for p in patterns)
        ]
        if not found:
            allowed, there = ", ".join(map(str, pins)), ", ".join(names.values())
            raise UserError(
                f"scale: layout.pools.{pool}.hosts allows only {allowed}, none of {there} — add one with --hosts"
            )
        return found

    def _device(self, worker: WorkerPlan, given: Sequence[tuple[int, ...]], members: Container[str]) -> str:
        """The device of a new worker: GPUs of this host that nobody uses.

        One that is still leaving keeps its GPUs and gets them again. `given`: GPUs of other new workers; `members`:
        who trains in the term under way.
        """
        from distflow.flow.gpus import free_gpu, takes_free_gpu, width

        lives, name = self._core.lives, str(worker.name)
        if not takes_free_gpu(worker, self._gpus):
            return worker.device
        if name in lives and lives[name].state != "ended" and lives[name].entry.gpus:
            return f"cuda:{lives[name].entry.gpus[0]}"
        there = [life for life in lives.values() if life.entry.name in members or not life.entry.trains]
        held = [life.entry.gpus for life in there if life.standing != "left"]
        first = free_gpu(Counter(n for used in (*held, *given) for n in used), self._gpus, width(worker))
        if first is None:
            raise NoGpuError(f"no GPU here is free for {worker.name} yet")
        return f"cuda:{first}"

    def _write(self, pool: Mapping[str, int], names: list[str], term: Term) -> list[WorkerEntry]:
        """Write the documents of new workers of a pool that is to have these ones in a term."""
        from distflow.config.load import recipe_to_mapping
        from distflow.flow.document import Place, document_text, worker_document
        from distflow.flow.gpus import gpus_on
        from distflow.flow.recipe_check import plan_resized
        from distflow.flow.rescaling import renewed, span
        from distflow.launch.run.folder import plugin_files, rewritten, shipped_names

        record, host = self._record, self._host
        members = members_of(term.begun, self._trainers)
        plan = plan_resized(record.path, span([*members, *pool]), spanning=True)
        own = [*self._core.lives, *names, agent_name(host)]
        roster = {name: worker_address(record.path, name, host) for name in own}
        address = record.hosts[host].address if record.hosts else None
        elsewhere = {entry.name: entry.host for entry in record.workers if entry.host}
        place = Place(record.path, roster, host, address, elsewhere, sites_of(record.hosts))
        source = str(record.path / "recipe.yaml")
        copies = shipped_names(plugin_files(recipe_to_mapping(plan.recipe)))
        shipped = {file: path for file, copy in copies.items() if (path := record.path / copy).exists()}
        entries: list[WorkerEntry] = []
        for name in map(WorkerName.parse, names):
            document = worker_document(plan, name, place, recipe_source=source, term=term.number)
            document = renewed(document, members) | {"members": list(term.members) or None}
            planned = plan.worker(name)
            device = document["settings"]["device"] = self._device(planned, [one.gpus for one in entries], members)
            document["begins"] = [] if term.begun is None else [list(pair) for pair in term.begun.begins]
            document = rewritten(document, shipped)
            (record.path / "workers" / f"{name.file_stem}.yaml").write_text(document_text(document))
            generates, used = plan.primary in planned.generates, gpus_on(planned, device)
            trains, python = self._trains[name.pool], planned.python or ""
            entries.append(WorkerEntry(str(name), trains, planned.threads, host, python, generates, used))
        return entries


class NoGpuError(UserError):
    """There is no free GPU yet."""


def _pool(name: str) -> str:
    return WorkerName.parse(name).pool


def _index(name: str) -> int:
    return WorkerName.parse(name).index


def _living(mesh: Gossip, host: int) -> list[str]:
    report = mesh.report(host)
    return [] if report is None else [name for name, hosted in report.workers.items() if hosted.living]


def _former(name: str, mesh: Gossip) -> int | None:
    """The host where a worker of this name has run before: there its incarnations are counted and its files are."""
    found = [host for host, report in mesh.reports.items() if name in report.workers]
    return found[0] if found else None
