"""Scales pools while the run goes on: who decides, where new workers go, and what they start from.

Any agent may be asked. It decides on which host each worker of the pool is to run, and numbers the decision, which
spreads with its report. The highest number wins, and every agent does its own part: it starts the workers that its host
lacks and drains those that are no longer wanted. Only pools that do not train are elastic: the size of the training
pool is part of the batch arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import structs

from distflow.comm.addresses import worker_address
from distflow.data.decoding import Form, Whole, read
from distflow.errors import UserError
from distflow.launch.agent.restart_policy import Action, RestartPolicy
from distflow.launch.cluster import cluster_view
from distflow.launch.cluster.gossip import Gossip
from distflow.launch.cluster.host_report import DesiredWorkers, HostedWorker, Term
from distflow.launch.run.record import RunRecord, WorkerEntry, agent_name, sites_of
from distflow.log import logger
from distflow.types import MOST_WORKERS, WorkerName

if TYPE_CHECKING:
    from distflow.flow.plan import Plan, WorkerPlan

RETRY_S = 1.0
log = logger(__name__)
RESERVED_S = 180.0
"""For the preflight and the start of further hosts."""


class _Request(Form, frozen=True):
    pool: str
    count: int


class _Scale(_Request, frozen=True):
    slots: dict[Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,5}\Z")], Whole]


class _Reserve(_Request, frozen=True):
    hosts: Annotated[int, msgspec.Meta(ge=0, le=MOST_WORKERS)]


class Scaling:
    """The part that one agent takes in it."""

    def __init__(self, record: RunRecord, host: int, core: RestartPolicy) -> None:
        self._record = record
        self._host = host
        self._core = core
        self._trains = {_pool(entry.name): entry.trains for entry in record.workers}
        self._planned: dict[str, dict[str, int]] = {pool: {} for pool in self._trains}
        for entry in record.workers:
            self._planned[_pool(entry.name)][entry.name] = entry.host
        self._gpus = record.hosts[host].gpus if record.hosts else record.gpus
        self._decided: dict[str, DesiredWorkers] = {}
        self._refused_at: float | None = None
        """When the disk last refused the documents of new workers; None: it has room."""
        self._reserved: tuple[int, float] | None = None
        """The number of hosts that there will be, and until when the reservation holds."""

    def wanted(self, mesh: Gossip) -> dict[str, DesiredWorkers]:
        """The last decision about each pool that was scaled, including our own."""
        found = cluster_view.wanted(mesh)
        for pool, decision in self._decided.items():
            if pool not in found or decision.stamp > found[pool].stamp:
                found[pool] = decision
        return found

    def ask(self, body: Mapping[str, Any], mesh: Gossip) -> dict[str, Any]:
        """Decide on {"pool", "count", "slots"}; answers {"was", "now", "hosts": {new or leaving worker: host's name}}.

        `slots`: worker slots by host, for the only hosts that may take new workers; empty: any host, however full.
        Raises UserError with the reason if it cannot be done.
        """
        request = read(body, _Scale, "scale")
        pool, count = request.pool, request.count
        before = self._present(pool, mesh)
        self._check(pool, count)
        slots = {int(host): number for host, number in request.slots.items()}
        new = [name for name in (f"{pool}/{i}" for i in range(count)) if name not in before]
        gpus = None
        if new:
            gpus = _Gpus(mesh, plan_documents(self._record.path, pool, count), new)
            for name, host in self._coming(mesh):
                gpus.hold(name, host)
        after = self._placed(pool, count, before, mesh, slots, gpus)
        changed = {name: host for name, host in {**before, **after}.items() if (name in before) != (name in after)}
        if changed:
            number = max((known.stamp[0] for known in self.wanted(mesh).values()), default=0) + 1
            self._decided[pool] = DesiredWorkers((number, self._host), after)
        names = {name: mesh.reports[host].entry.name if host in mesh.reports else "" for name, host in changed.items()}
        return {"was": len(before), "now": count, "hosts": names}

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
            lives = self._core.lives
            ours = [name for name, host in decision.hosts.items() if host == self._host]
            new = [name for name in ours if name not in lives or lives[name].drained]
            if new:
                for entry in self._prepared(pool, len(decision.hosts), new, mesh.own.term, now):
                    know(entry.name, worker_address(self._record.path, entry.name, self._host))
                    actions += self._core.grow(entry)
            for name in [name for name in lives if _pool(name) == pool and name not in decision.hosts]:
                actions += self._core.shrink(name)
        return actions

    def _prepared(self, pool: str, count: int, names: list[str], term: Term, now: float) -> list[WorkerEntry]:
        """Workers that can be started; none while the disk refuses their documents."""
        if self._refused_at is not None and now - self._refused_at < RETRY_S:
            return []
        try:
            entries = self._write(pool, count, names, term)
        except (OSError, _NoGpuError) as error:
            if self._refused_at is None:
                log.error("%s cannot be prepared yet: %s", ", ".join(names), error)
            self._refused_at = now
            return []
        self._refused_at = None
        return entries

    def _present(self, pool: str, mesh: Gossip) -> Mapping[str, int]:
        if pool not in self._trains:
            raise UserError(f"scale: there is no pool {pool!r}; this run has {', '.join(self._trains)}")
        decided = self.wanted(mesh)
        return decided[pool].hosts if pool in decided else self._planned[pool]

    def _coming(self, mesh: Gossip) -> list[tuple[str, int]]:
        """Workers that were decided on and that their host has not reported yet, and their hosts."""
        decided = (pair for decision in self.wanted(mesh).values() for pair in decision.hosts.items())
        return [(name, host) for name, host in decided if name not in _living(mesh, host)]

    def _check(self, pool: str, count: int) -> None:
        if self._core.winding_up:
            raise UserError(f"scale: the run is {self._core.phase} and starts no more workers — scale the next run")
        if self._trains[pool]:
            elastic = [name for name, trains in self._trains.items() if not trains]
            raise UserError(
                f"scale: pool {pool!r} trains; only other pools are elastic ({', '.join(elastic) or 'none here'}) — "
                f"stop the run, and continue with --resume layout.pools.{pool}.count={count}"
            )
        if not 1 <= count <= MOST_WORKERS:
            raise UserError(f"scale: {pool}={count}; expected 1 to {MOST_WORKERS} workers")

    def _placed(
        self,
        pool: str,
        count: int,
        before: Mapping[str, int],
        mesh: Gossip,
        slots: Mapping[int, int],
        gpus: _Gpus | None,
    ) -> dict[str, int]:
        """The host of each worker: present ones stay, new ones go where slot and GPU are free and the pool has fewest.

        `gpus`: those that new workers take; None if there are none.
        """
        silent = mesh.silent()
        hosts = [
            host for host in sorted({self._host, *mesh.others}) if host not in silent and (host in slots or not slots)
        ]
        if not hosts:
            raise UserError(f"scale: none of the hosts {sorted(slots)} answers — see `distflow status`")
        hosts = self._allowed(pool, hosts, mesh) if self._record.hosts and count > len(before) else hosts
        placed = {f"{pool}/{i}": before[f"{pool}/{i}"] for i in range(count) if f"{pool}/{i}" in before}
        taken = Counter(host for host in hosts for name in _living(mesh, host) if name not in before)
        for name in (f"{pool}/{i}" for i in range(count)):
            if name not in placed:
                load = Counter(placed.values())
                free = [host for host in hosts if not slots or load[host] + taken[host] < slots[host]]
                if not free:
                    short = count - len(placed)
                    raise UserError(f"scale: not enough slots: {short} workers cannot be placed — add hosts or slots")
                assert gpus is not None, "this worker is new"
                placed[name] = gpus.take(name, sorted(free, key=lambda host: (load[host], host)))
                if placed[name] in silent:
                    agent = agent_name(placed[name])
                    raise UserError(
                        f"scale: {name} was on the host of {agent}, which does not answer — end its processes there"
                    )
        return placed

    def _allowed(self, pool: str, hosts: list[int], mesh: Gossip) -> list[int]:
        """Those of the hosts that the recipe lets workers of this pool run on."""
        patterns = plan_documents(self._record.path, pool, 1).recipe.layout.pools[pool].hosts
        names = {host: mesh.reports[host].entry.name for host in hosts if host in mesh.reports}
        found = [host for host in hosts if not patterns or any(fnmatchcase(names.get(host, ""), p) for p in patterns)]
        if not found:
            allowed, there = ", ".join(patterns), ", ".join(names.values())
            raise UserError(
                f"scale: layout.pools.{pool}.hosts allows only {allowed}, none of {there} — add one with --hosts"
            )
        return found

    def _device(self, worker: WorkerPlan, given: Sequence[tuple[int, ...]]) -> str:
        """The device of a new worker: GPUs of this host that nobody uses.

        One that is still leaving keeps its GPUs and gets them again. `given`: GPUs of other new workers.
        """
        from distflow.flow.gpus import free_gpu, takes_free_gpu, width

        lives, name = self._core.lives, str(worker.name)
        if not takes_free_gpu(worker, self._gpus):
            return worker.device
        if name in lives and lives[name].state != "ended" and lives[name].entry.gpus:
            return f"cuda:{lives[name].entry.gpus[0]}"
        held = [life.entry.gpus for life in lives.values() if life.standing != "left"]
        first = free_gpu(Counter(n for used in (*held, *given) for n in used), self._gpus, width(worker))
        if first is None:
            raise _NoGpuError(f"no GPU here is free for {worker.name} yet")
        return f"cuda:{first}"

    def _write(self, pool: str, count: int, names: list[str], now: Term) -> list[WorkerEntry]:
        from distflow.config.load import recipe_to_mapping
        from distflow.config.yamlfile import yaml_text
        from distflow.flow.document import Place, worker_document
        from distflow.flow.gpus import gpus_on
        from distflow.launch.run.folder import plugin_files, rewritten, shipped_names

        record, host = self._record, self._host
        plan = plan_documents(record.path, pool, count)
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
            document = worker_document(plan, name, place, recipe_source=source, term=now.number)
            document["members"] = list(now.members) or None
            planned = plan.worker(name)
            device = document["settings"]["device"] = self._device(planned, [one.gpus for one in entries])
            document["begins"] = [] if now.begun is None else [list(pair) for pair in now.begun.begins]
            document = rewritten(document, shipped)
            (record.path / "workers" / f"{name.file_stem}.yaml").write_text(yaml_text(document))
            generates, used = plan.primary in planned.generates, gpus_on(planned, device)
            entries.append(WorkerEntry(str(name), False, planned.threads, host, planned.python or "", generates, used))
        return entries


class _NoGpuError(UserError):
    """There is no free GPU yet."""


class _Gpus:
    """The GPUs of the hosts: each of the `new` workers takes some that no worker of the run uses."""

    def __init__(self, mesh: Gossip, plan: Plan, new: Sequence[str]) -> None:
        self._mesh, self._plan = mesh, plan
        workers = {host: report.workers.items() for host, report in mesh.reports.items()}
        self._users = {
            host: Counter(n for name, hosted in there if _holds(name, hosted, new) for n in hosted.gpus)
            for host, there in workers.items()
        }

    def take(self, name: str, hosts: Sequence[int]) -> int:
        """Choose one of these hosts, the best one first; or the one where a worker of this name has run before.

        Raises UserError if none has a free GPU.
        """
        from distflow.flow.gpus import width

        former = _former(name, self._mesh)
        candidates = hosts if former is None else [former]
        found = next((host for host in candidates if self.hold(name, host)), None)
        if found is None:
            raise UserError(f"scale: {self._refusal(name, candidates, width(self._worker(name)))}")
        return found

    def hold(self, name: str, host: int) -> bool:
        """Hold what a worker will take of a host; whether there is enough."""
        from distflow.flow.gpus import free_gpu, takes_free_gpu, width

        worker, count = self._worker(name), self._count(host)
        if not takes_free_gpu(worker, count):
            return True
        first = free_gpu(self._users[host], count, width(worker))
        if first is not None:
            self._users[host].update(range(first, first + width(worker)))
        return first is not None

    def _worker(self, name: str) -> WorkerPlan:
        """As planned; for a pool whose own scaling is not in this plan, its first worker."""
        pool = [worker for worker in self._plan.workers if worker.name.pool == _pool(name)]
        return next((worker for worker in pool if str(worker.name) == name), pool[0])

    def _count(self, host: int) -> int:
        return self._mesh.reports[host].entry.gpus if host in self._mesh.reports else 0

    def _refusal(self, name: str, hosts: Sequence[int], wide: int) -> str:
        pool, named = _pool(name), [self._mesh.reports[host].entry.name for host in hosts]
        where = f"{', '.join(named)} {'has' if len(named) == 1 else 'have'}" if all(named) else "this machine has"
        needed = f"{wide} consecutive GPUs" if wide > 1 else "a GPU"
        further = "add a host with --hosts, " if all(named) else ""
        return (
            f"{name} needs {needed} that no other worker uses, and of {sum(map(self._count, hosts))} GPUs {where} "
            f"none to spare — scale another pool down, {further}or let it share one: stop the run, and continue with "
            f"--resume layout.pools.{pool}.count=… layout.pools.{pool}.device=cuda:N"
        )


def plan_documents(run_dir: Path, pool: str, count: int) -> Plan:
    """The plan of a run's recipe with `count` workers in one pool; raises RecipeError if it cannot be planned."""
    # Imported late: an agent is light, and few runs are ever scaled.
    import yaml

    from distflow.config.load import recipe_from_mapping
    from distflow.flow.planner import make_plan

    source = run_dir / "recipe.yaml"
    recipe = recipe_from_mapping(yaml.safe_load(source.read_text()), lambda key: str(source))
    layout = recipe.layout
    pools = {**layout.pools, pool: layout.pools[pool].model_copy(update={"count": count})}
    recipe = recipe.model_copy(update={"layout": layout.model_copy(update={"pools": pools})})
    return make_plan(recipe, lambda key: str(source))


def _pool(name: str) -> str:
    return WorkerName.parse(name).pool


def _living(mesh: Gossip, host: int) -> list[str]:
    report = mesh.report(host)
    return [] if report is None else [name for name, hosted in report.workers.items() if hosted.living]


def _holds(name: str, hosted: HostedWorker, new: Sequence[str]) -> bool:
    """Whether a worker keeps its GPUs: one that has ended may be restarted, one that leaves may return to them."""
    return hosted.state != "left" and name not in new


def _former(name: str, mesh: Gossip) -> int | None:
    """The host where a worker of this name has run before: there its incarnations are counted and its files are."""
    found = [host for host, report in mesh.reports.items() if name in report.workers]
    return found[0] if found else None
