"""Place workers on hosts and their GPUs, and estimate what the workers of a host need.

The estimates are rough: good enough to refuse what cannot work, no guarantee that the rest will.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from distflow.cluster.gossip import least_silence_s
from distflow.config.paths import looks_like_path
from distflow.config.schema import ModelConfig, Recipe
from distflow.errors import Problem, Problems, RecipeError, UserError, did_you_mean
from distflow.flow.estimate import PROCESS, divides_gradients, estimate, state_bytes
from distflow.flow.gpus import width
from distflow.flow.lanes import Whereabouts
from distflow.flow.memory import group_bytes
from distflow.flow.memory_fit import counted_twice
from distflow.flow.plan import Plan, WorkerPlan, leaders_of, publisher_for
from distflow.flow.sizes import CHAINED, FETCHED, PINNED, PUBLISHED, ModelSize, model_size
from distflow.launch.deploy.host_checks import GIB, Needs, Threshold, at_least, needs_of_workers
from distflow.launch.deploy.hostfile import Host, HostsError
from distflow.launch.deploy.job_environment import JobSize

MIB = 1 << 20
RUN_FOLDER_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """Where one worker runs."""

    host: int
    """Host number, in the order of the file."""
    slot: int


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """Which worker of a run is on which host."""

    hosts: tuple[Host, ...]
    places: Mapping[str, WorkerSlot]
    """By worker name, in plan order."""

    def on(self, host: int) -> list[str]:
        """Names of the workers on one host."""
        return [name for name, place in self.places.items() if place.host == host]

    @property
    def where(self) -> Whereabouts:
        """The host of each worker, and where the hosts stand."""
        sites = {number: host.site for number, host in enumerate(self.hosts) if host.site}
        return Whereabouts({name: place.host for name, place in self.places.items()}, sites)


def place_workers(
    plan: Plan, hosts: Sequence[Host], origin: Callable[[str], str] = lambda key: "recipe"
) -> WorkerPlacement:
    """Spread each pool round-robin over its allowed hosts; raises HostsError if slots or hosts are lacking.

    `origin`: where a key of the recipe comes from, for what is said of it.

    Workers among which the backend divides their models go to one host, if one has slots for all: the network carries
    each layer otherwise.

    A worker whose engine splits a model over several GPUs takes that many consecutive slots, one without a model the
    last slot. Pools pinned to fewer slots choose first. Example: rollout ×3 and trainer ×1 on `a slots=2`, `b slots=2`:
    rollout/0 on a, rollout/1 on b, rollout/2 on a, trainer/0 on b.
    """
    problems = Problems(origin)
    allowed = {name: _allowed(name, plan, hosts, problems) for name in dict.fromkeys(w.name.pool for w in plan.workers)}
    if problems:
        raise HostsError(problems)
    room = {pool: sum(len(hosts[number].slots) for number in numbers) for pool, numbers in allowed.items()}
    free = [list(host.slots) for host in hosts]
    places: dict[str, WorkerSlot] = {}
    turn = 0
    pools = {pool: [worker for worker in plan.workers if worker.name.pool == pool] for pool in allowed}
    for pool in sorted(pools, key=lambda pool: (room[pool], not _divides_state(pools[pool]))):
        workers = pools[pool]
        whole = _whole(workers, allowed[pool], free)
        for worker in workers:
            number = whole if whole is not None else _next(turn, allowed[pool], free, max(1, width(worker)))
            if number is None:
                raise HostsError([_too_few(plan, pool, hosts, {n: free[n] for n in allowed[pool]})])
            places[str(worker.name)] = WorkerSlot(number, _take(free[number], width(worker)))
            turn = number + 1
    placement = WorkerPlacement(tuple(hosts), {str(worker.name): places[str(worker.name)] for worker in plan.workers})
    _check_gradients(plan, placement, problems)
    _check_silence(plan, len(hosts), problems)
    if problems:
        raise HostsError(problems)
    return placement


def check_job(plan: Plan, job: JobSize, origin: Callable[[str], str]) -> None:
    """Refuse what a job of this size has no places for, before it is submitted: RecipeError for pools that are pinned
    to nodes which it lacks, HostsError for too few GPUs. Where the job does not say how many it gets, nobody knows."""
    if problems := [*_pin_problems(plan, job.nodes, origin)]:
        raise RecipeError(problems)
    if job.gpus_each is not None:
        slots = tuple(range(job.gpus_each))
        nodes = [Host(f"node {number}", slots, f"{job.where}:{number}") for number in range(job.nodes)]
        place_workers(plan, nodes, origin)
    elif job.gpus is not None and (lacking := _lacking(plan, job.gpus, f"the {job.nodes} nodes together have")):
        raise HostsError([Problem(job.where, "slots", *lacking)])


def _pin_problems(plan: Plan, nodes: int, origin: Callable[[str], str]) -> Iterator[Problem]:
    """Find pools that are pinned to what a job of so many nodes does not have."""
    for name, pool in plan.recipe.layout.pools.items():
        key = f"layout.pools.{name}.hosts"
        for pin in pool.hosts:
            if isinstance(pin, str):
                what = f"pinned to {pin!r}, but which nodes a job gets is known only when it begins"
                hint = f"pin by number, as in {key}=[0] for the first node of the job"
                yield Problem(origin(key), key, what, hint)
            elif pin >= nodes:
                hint = f"they have the numbers 0 to {nodes - 1}"
                yield Problem(origin(key), key, f"there is no node {pin} in a job of {nodes}", hint)


def check_numbers(plan: Plan, here: str, origin: Callable[[str], str]) -> None:
    """Raise HostsError for pins by number where this machine stands in the file, but not first, and so gets number 0
    in the run."""
    for name, pool in plan.recipe.layout.pools.items():
        if any(isinstance(pin, int) for pin in pool.hosts):
            hint = f"move the line of {here} to the top of the hosts file, or pin by name"
            what = "hosts are pinned by number, and this machine, which is number 0 of a run, is not the first one"
            key = f"layout.pools.{name}.hosts"
            raise HostsError([Problem(origin(key), key, what, hint)])


def likely_slots(new: Sequence[str], hosts: Mapping[int, Host]) -> dict[str, WorkerSlot]:
    """Where new workers are likely to go, by number of the hosts that may take them.

    An estimate of what the hosts need; the agents decide in the end.
    """
    load = Counter(dict.fromkeys(hosts, 0))
    places = {}
    for name in new:
        free = [n for n, host in hosts.items() if load[n] < len(host.slots)]
        if free:
            number = min(free, key=lambda n: (load[n], n))
            places[name] = WorkerSlot(number, hosts[number].slots[load[number]])
            load[number] += 1
    return places


def begin_with(placement: WorkerPlacement, first: int) -> WorkerPlacement:
    """The same placement, with host `first` renumbered to 0."""
    order = [first, *(number for number in range(len(placement.hosts)) if number != first)]
    places = {name: WorkerSlot(order.index(place.host), place.slot) for name, place in placement.places.items()}
    return WorkerPlacement(tuple(placement.hosts[number] for number in order), places)


def placement_lines(plan: Plan, placement: WorkerPlacement) -> list[str]:
    """One line per host: number, name, workers, and the source of weights if not shared memory; then notes."""
    where = placement.where
    read = [(model, leaders_of(plan.home_of(model).members, where.hosts)) for model in plan.generating]
    lines = []
    for number, host in enumerate(placement.hosts):
        names = placement.on(number)
        workers = [_shown(plan, name, placement.places[name]) for name in names]
        taken = slots_of(worker for worker in plan.workers if str(worker.name) in names)
        text = ", ".join(workers) or "no workers — leave this host out"
        here = {model for worker in plan.workers if str(worker.name) in names for model in worker.generates}
        given = [leaders for model, leaders in read if model in here and number not in leaders]
        far = [publisher_for(number, leaders, host.site, where.sites) for leaders in given]
        if far:
            text += f"; weights over the network, from {' and '.join(dict.fromkeys(far))}"
        name = f"{host.name} at {host.site}" if host.site else host.name
        lines.append(f"{number}  {name}  {taken} of {len(host.slots)} slots  {text}")
    return [*lines, *_divided_lines(plan, placement), *_checkpoint_lines(plan, placement)]


def _checkpoint_lines(plan: Plan, placement: WorkerPlacement) -> list[str]:
    """A line where one host has all checkpoints, as far as is known before the hosts are looked at."""
    training = {placement.places[name].host for name in plan.members}
    if plan.recipe.run.copy_to is not None or len(training) > 1:
        return []
    (number,) = training
    return [
        f"note: only {placement.hosts[number].name} trains: unless the run folder is on a shared file system, all "
        "checkpoints are lost with it — run.copy_to keeps a copy elsewhere"
    ]


def shared_memory_lines(plan: Plan, placement: WorkerPlacement | None) -> list[str]:
    """How much room weights take in /dev/shm: on each host, or on this machine alone."""
    if placement is None:
        found = [("this machine", needs_here(plan).shm.warn)]
    else:
        found = [(host.name, needs_of(plan, placement, number).shm.warn) for number, host in enumerate(placement.hosts)]
    return [f"{name}  {size / GIB:.2f}" if size >= GIB / 100 else f"{name}  <0.01" for name, size in found if size]


def _divided_lines(plan: Plan, placement: WorkerPlacement) -> list[str]:
    """A line for each pool whose models are divided over workers of several hosts."""
    lines = []
    for pool in plan.pools:
        workers = [worker for worker in plan.workers if worker.name.pool == pool.name]
        hosts = {placement.places[str(worker.name)].host for worker in workers}
        if _divides_state(workers) and len(hosts) > 1:
            names = ", ".join(placement.hosts[number].name for number in sorted(hosts))
            lines.append(
                f"note: the models of pool {pool.name!r} are divided over {names}, so each micro-batch waits for the "
                f"network — one host with {len(workers)} slots would take all of it"
            )
    return lines


def _divides_state(workers: Sequence[WorkerPlan]) -> bool:
    """Whether workers of a pool divide models, or their gradients, among them."""
    return len(workers) > 1 and any("train" in one.roles and divides_gradients(one) for one in workers)


def _whole(workers: Sequence[WorkerPlan], allowed: Sequence[int], free: Sequence[Sequence[int]]) -> int | None:
    """The host with most free slots if it takes all these workers, and they divide models; None: spread them."""
    wide = slots_of(workers)
    fits = [number for number in allowed if len(free[number]) >= wide]
    if not fits or not _divides_state(workers):
        return None
    # Consecutive slots can be lacking only for engines over several GPUs, which do not train.
    return max(fits, key=lambda number: (len(free[number]), -number))


def _check_gradients(plan: Plan, placement: WorkerPlacement, problems: Problems) -> None:
    """Refuse `security.encrypt: all` where it cannot be guaranteed: Gloo and NCCL do not encrypt."""
    security, key = plan.recipe.security, "security.encrypt"
    homes = [{placement.places[name].host for name in pool.members} for pool in plan.pools if pool.homes]
    hosts = sorted(next((home for home in homes if len(home) > 1), set()))
    if security.encrypt != "all" or security.trusted_network or len(hosts) < 2:
        return
    names = ", ".join(placement.hosts[number].name for number in hosts)
    message = f"all does not encrypt gradients, and training workers on {names} exchange them over the network"
    hint = (
        "security.trusted_network: true, if no one else has access to the network (a private one, or WireGuard "
        "between the hosts); or pin the training pool to one host with layout.pools.NAME.hosts"
    )
    problems.add(key, message, hint)


def _check_silence(plan: Plan, hosts: int, problems: Problems) -> None:
    """Refuse a limit within which agents of many hosts cannot tell whether most of them hear each other."""
    given, least = plan.recipe.limits.host_silence_s, least_silence_s(hosts)
    if given > least:
        return
    message = f"{given:g} s is too short for {hosts} hosts, whose agents need {least:g} s to know that most hear them"
    problems.add("limits.host_silence_s", message, f"raise it: 30 s, or at least {least + 1:g} s")


def _shown(plan: Plan, name: str, place: WorkerSlot) -> str:
    worker = next(worker for worker in plan.workers if str(worker.name) == name)
    last = place.slot + width(worker) - 1
    gpus = f"cuda:{place.slot}" if last == place.slot else f"cuda:{place.slot}-{last}"
    return f"{name} ({gpus})" if worker.device == "cuda" and width(worker) else name


def _allowed(pool: str, plan: Plan, hosts: Sequence[Host], problems: Problems) -> list[int]:
    pins = plan.recipe.layout.pools[pool].hosts
    names = [host.name for host in hosts]
    found: set[int] = set()
    for pin in pins:
        if isinstance(pin, int):
            matches = {pin} & {*range(len(names))}
            what, hint = f"there is no host {pin}", f"the {len(names)} hosts have the numbers 0 to {len(names) - 1}"
        else:
            matches = {n for n, name in enumerate(names) if fnmatchcase(name, pin)}
            what, hint = f"no host matches {pin!r}", did_you_mean(pin, names)
        if not matches:
            problems.add(f"layout.pools.{pool}.hosts", what, hint)
        found |= matches
    return sorted(found) if pins else [*range(len(names))]


def _next(turn: int, allowed: Sequence[int], free: Sequence[Sequence[int]], slots: int) -> int | None:
    order = [(turn + step) % len(free) for step in range(len(free))]
    return next((n for n in order if n in allowed and _consecutive(free[n], slots) is not None), None)


def _consecutive(free: Sequence[int], count: int) -> int | None:
    """Index of the first `count` consecutive slots; None if there are none."""
    places = range(len(free) - count + 1)
    return next((at for at in places if free[at + count - 1] - free[at] == count - 1), None)


def _take(free: list[int], gpus: int) -> int:
    """The first slot of a worker that is placed here; one without a GPU takes the last, and leaves GPUs to others."""
    if gpus == 0:
        return free.pop()
    first = _consecutive(free, gpus)
    assert first is not None, "this host has room"
    slot = free[first]
    del free[first : first + gpus]
    return slot


def _too_few(plan: Plan, pool: str, hosts: Sequence[Host], left: Mapping[int, Sequence[int]]) -> Problem:
    """Say what a pool lacks; `left`: slots that the workers before have left on each host that it may run on."""
    workers = [worker for worker in plan.workers if worker.name.pool == pool]
    there = sum(len(hosts[number].slots) for number in left)
    widest = max(width(worker) for worker in workers)
    have = f"the {len(hosts)} hosts together have" if len(hosts) > 1 else f"{hosts[0].name} has"
    if len(left) == len(hosts) and (lacking := _lacking(plan, there, have)):
        message, hint = lacking
    elif widest > 1:
        names = ", ".join(
            f"{hosts[n].name} has {len(slots)} of {len(hosts[n].slots)} left" for n, slots in left.items()
        )
        message = (
            f"no host has {widest} consecutive slots left for each worker of pool {pool!r}, as its engine needs: "
            f"{len(workers)} workers take {slots_of(workers)} slots, and where one lacks them, {names}"
        )
        hint = f"give hosts more slots, or lower layout.pools.{pool}.count or the GPUs in its engine_options"
    else:
        names = ", ".join(hosts[number].name for number in left)
        message = f"pool {pool!r} has {len(workers)} workers, but the hosts that it may run on ({names}) have {there}"
        hint = f"give these hosts more slots, add hosts to layout.pools.{pool}.hosts, or lower its count"
    return Problem(hosts[0].where.rpartition(":")[0], "slots", message, hint)


def _lacking(plan: Plan, there: int, have: str) -> tuple[str, str] | None:
    """Say that all slots together are fewer than the workers take, and what to do; None: they are enough."""
    if (needed := slots_of(plan.workers)) <= there:
        return None
    taken = f" take {needed} slots" if needed > len(plan.workers) else ""
    hint = "add hosts or slots, or lower the counts of the layout's pools"
    if taken:
        wide = max(plan.workers, key=width).name.pool
        hint += f", or the GPUs in engine_options of {wide!r}"
    return f"{len(plan.workers)} workers{taken}, but {have} {there}", hint


def slots_of(workers: Iterable[WorkerPlan]) -> int:
    """Slots that workers take together."""
    return sum(max(1, width(worker)) for worker in workers)


def needs_here(plan: Plan, *, resume: bool = False) -> Needs:
    """What all workers need on this machine; if the run is resumed, its checkpoints have their place already.

    Of the disk only room for checkpoints: a run goes on when its logs and metrics find none.
    """
    places = {str(worker.name): WorkerSlot(0, slot) for slot, worker in enumerate(plan.workers)}
    placement = WorkerPlacement((), places)
    disk = 0 if resume else _saved(plan, 1.0, whole=True)
    return replace(needs_of(plan, placement, 0), disk=at_least(disk))


def needs_of(plan: Plan, placement: WorkerPlacement, host: int) -> Needs:
    """What the workers on one host need."""
    names = set(placement.on(host))
    workers = [worker for worker in plan.workers if str(worker.name) in names]
    homes = {worker.name.pool for worker in workers}
    published = {model: plan.home_of(model).name in homes for model in plan.generating}
    weights = {model: _weights(plan.recipe.models[model]) for model in published}
    # Without a publisher on the host, one of its workers fetches the weights into shared memory, for all of them.
    read = {model for worker in workers for model in worker.generates if not published[model]}
    shm = FETCHED * sum(weights[model] for model in read)
    own = [model for model, here in published.items() if here]
    several = len(placement.hosts) > 1
    versions = PUBLISHED + (PINNED if several else 0)
    shm += versions * sum(weights[model] + (_rounded(plan.recipe, model) if several else 0) for model in own)
    beside = shm  # which is memory, too
    if several and plan.recipe.weights.encoding != "full":
        # Deltas are kept for other hosts, where they were made and where they were fetched; not in /dev/shm.
        beside += int(CHAINED * sum(weights[model] for model in {*own, *read}))
    beside -= counted_twice(workers)
    beside_gpus = beside + sum(_memory(worker, plan, on_gpu=worker.device != "cpu") for worker in workers)
    return replace(
        needs_of_workers(plan, names),
        memory=at_least(beside + sum(_memory(worker, plan, on_gpu=False) for worker in workers)),
        memory_beside_gpus=at_least(beside_gpus),
        disk=disk_for(plan, placement, host, frozenset(range(len(placement.hosts)))),
        shm=at_least(shm),
        paths=tuple(dict.fromkeys(path for worker in workers for path in _paths(worker, plan))),
    )


def _rounded(recipe: Recipe, model: str) -> int:
    """Bytes of a version of a model that is rounded for other hosts; 0 if it is sent as it is."""
    size, encoding = _size(recipe.models[model]), recipe.weights.encoding
    narrow = {"bf16": 2, "fp8": 1}.get(encoding)
    if size is None or narrow is None or size.dtype_bytes <= narrow:
        return 0
    return size.trained * narrow


def _memory(worker: WorkerPlan, plan: Plan, *, on_gpu: bool) -> int:
    """Host memory in bytes held from the start; what phases need on top may be less than planned."""
    found = estimate(plan, worker, on_gpu=on_gpu)
    return max(found.host + (0 if on_gpu else found.held), found.loading, PROCESS)


def _size(model: ModelConfig) -> ModelSize | None:
    """The size of a model; None: unknown on this machine."""
    try:
        return model_size(model)
    except UserError:
        return None


def _weights(model: ModelConfig) -> int:
    """Bytes of a version of a model, as far as they are known here."""
    size = _size(model)
    return 0 if size is None else size.published


def disk_for(
    plan: Plan, placement: WorkerPlacement, host: int, together: frozenset[int], held: int = 0, *, resume: bool = False
) -> Threshold:
    """What a run takes on the disk of a host.

    `together`: the hosts that write into the same run folder as this one, which is among them; `held`: bytes of
    checkpoints that are there already; `resume`: whether hosts that train get a whole one there before the run begins.
    """
    here = placement.on(host)
    members = [name for name in here if name in plan.members]
    # Where hosts come to a run, the training workers are elsewhere, and not in the placement.
    places = (placement.places.get(name) for name in plan.members)
    writers = sum(place is not None and place.host in together for place in places)
    # The first host collects at the end what it lacks of the newest one.
    whole = 0 in together or (resume and bool(members))
    share = writers / len(plan.members)
    saved = _saved(plan, share, whole=whole) if members or (whole and share < 1) else 0
    return at_least(RUN_FOLDER_BYTES + max(0, saved - held) + _dumped(plan, sum(name in plan.owners for name in here)))


def _saved(plan: Plan, share: float, *, whole: bool) -> int:
    """Bytes of checkpoints in a folder that gets this share of each, and of all Hugging Face folders of the policy.

    `whole`: one of them is completed there. Models of unknown size are not counted.
    """
    sizes = {name: _size(model) for name, model in plan.recipe.models.items()}
    run, policy = plan.recipe.run, sizes[plan.primary]
    # The best one in addition to the newest, and one being written.
    newest = -(-run.training_steps // max(1, run.save_every)) if run.keep_checkpoints is None else run.keep_checkpoints
    kept = min(newest + (run.keep_best is not None), run.training_steps) + 1
    state = sum(state_bytes(size) for name in plan.trained_models if (size := sizes[name]) is not None)
    folders = run.training_steps // run.hf_every if run.hf_every and policy is not None and share else 0
    completed = state * (1 - share) if whole else 0
    return round(kept * state * share + completed) + (folders * policy.weights if policy is not None else 0)


def _dumped(plan: Plan, owners: int) -> int:
    """Bytes of samples dumped by `owners` training workers, limited by the recipe."""
    run, batch = plan.recipe.run, plan.batch
    if not run.dump_rollouts:
        return 0
    tokens = plan.recipe.data.max_prompt_tokens, plan.response_tokens
    steps = -(-run.training_steps // run.dump_rollouts)
    everything = steps * batch.prompts * group_bytes(batch.samples_per_prompt, *tokens)
    return owners * min(run.dump_limit_mb * MIB, everything // len(plan.owners))


def _paths(worker: WorkerPlan, plan: Plan) -> Iterable[str]:
    for name in (*worker.models, *worker.generates):
        model = plan.recipe.models[name]
        for path in (model.path, model.tokenizer):
            if path is not None and looks_like_path(path):
                yield path
