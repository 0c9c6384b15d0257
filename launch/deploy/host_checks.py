"""Whether hosts have what a plan needs: the same checks for `doctor`, for a launch here and on many hosts.

The checks are pure functions of `HostFacts`; only `facts_here` and `capacity` look at this machine.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any, Literal

from distflow.config.data_files import in_arrow
from distflow.config.hub import is_absent, is_data_absent, not_found
from distflow.config.paths import HUB_PREFIX, is_data_file, looks_like_path
from distflow.config.plugins import ENGINES, HUB, LIBRARIES, NIXL, PARQUET
from distflow.config.schema import Recipe
from distflow.data.files import first_row
from distflow.data.formats import PROMPT
from distflow.data.gold import ANSWER
from distflow.data.rows import check_columns, prompt_of
from distflow.errors import Problem, UserError
from distflow.flow.data_check import all_sources, columns_called_with
from distflow.flow.families import needs_gpu, only_on_gpus
from distflow.flow.lanes import nixl_pools
from distflow.flow.memory_fit import Capacity, HostCapacity, with_gpus
from distflow.flow.plan import Plan, WorkerPlan
from distflow.flow.sizes import configuration
from distflow.flow.step_declaration import read_declaration
from distflow.flow.step_settings import chosen_shipped
from distflow.flow.trackers import trackers_of
from distflow.launch.agent.host_facts import (
    SHM,
    CodeFacts,
    HostFacts,
    Space,
    abandoned,
    describe,
    describe_code,
    existing_part,
    gpus,
    memory,
    space,
)
from distflow.launch.deploy.interpreter_check import Interpreter, dotted, is_installed, needed, pip_install

if TYPE_CHECKING:
    from distflow.launch.deploy.hostfile import Host
    from distflow.launch.deploy.job_environment import JobSize
    from distflow.launch.deploy.placement import WorkerPlacement

Level = Literal["OK", "WARN", "FAIL"]
CLOCK_S = 5.0
"""Clocks that differ by more are refused: the hosts' logs and traces could not be read together."""
CLOCK_NOTE_S = 0.5
GIB = 1 << 30
SHARED = ("torch", "transformers", "pyzmq")
"""Packages that must have the same version on all hosts."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. FAIL: runs will not work; WARN: some may not, or not well."""

    name: str
    """What was checked: a resource, or the key of the recipe that asks for it."""
    level: Level
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Threshold:
    """How much of something is enough; below `fail` nothing works."""

    warn: float
    fail: float

    def level(self, found: float) -> Level:
        """The level for an amount of `found`."""
        return "FAIL" if found < self.fail else "WARN" if found < self.warn else "OK"


NOTHING = Threshold(0, 0)


def at_least(size: float) -> Threshold:
    """A threshold that refuses anything less."""
    return Threshold(size, size)


@dataclass(frozen=True, slots=True)
class Needs:
    """What the workers on one host need; memory and disk space are estimates, in bytes."""

    memory: Threshold = NOTHING
    """On a host without GPUs."""
    memory_beside_gpus: Threshold = NOTHING
    """On a host whose GPUs hold what can be kept there."""
    disk: Threshold = NOTHING
    shm: Threshold = NOTHING
    devices: tuple[tuple[str, str], ...] = ()
    """Key of the recipe, and the device it names: cuda (workers may share one) or cuda:N."""
    libraries: tuple[tuple[str, str], ...] = ()
    """Key of the recipe, and the engine, backend or optimizer (in LIBRARIES) it names for the host's own Python."""
    interpreters: tuple[Interpreter, ...] = ()
    paths: tuple[str, ...] = ()
    """Files and folders that workers read."""
    packages: tuple[str, ...] = ()
    """Packages to report the versions of."""
    head: CodeFacts | None = None
    """Code and versions of the head, which the host must match; None: it is the head."""
    resume: bool = False
    """Whether the run folder may exist already."""

    def question(self) -> dict[str, Any]:
        """Arguments for `describe` on the host."""
        return {
            "packages": self.packages if self.head is None else list(self.head.python.packages),
            "modules": [LIBRARIES[name].module for _, name in self.libraries],
            "pythons": [one.question() for one in self.interpreters],
        }


def facts_from(answer: Mapping[str, Any]) -> HostFacts:
    """Parse what `describe` returned; raises ProtocolError if it comes from another version."""
    from distflow.data.decoding import read  # most plans need not wait for it

    return read(answer, HostFacts, "description of a host")


def facts_here(run_dir: Path, needs: Needs) -> HostFacts:
    """Facts about this machine, for a run in `run_dir`."""
    return facts_from(describe(str(run_dir.absolute()), nonce="", paths=needs.paths, **needs.question()))


_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})
"""Instructions of x86 processors, of which PyTorch's products of matrices need one."""


def capacity() -> Capacity:
    """Memory of this machine and of its GPUs, where known."""
    return Capacity(memory()["total"], tuple(gpu["memory"] for gpu in gpus() if gpu["memory"]))


def capacity_for(plan: Plan, placement: WorkerPlacement | None, gpu_gib: float | None = None) -> Capacity:
    """Return what the plan is judged by: the memory of this machine, or that of the hosts that it is for.

    `gpu_gib`: what each GPU has, before what is seen here and what the hosts file says.
    """
    seen = capacity()
    if placement is None:
        return seen if gpu_gib is None else with_gpus(plan, seen, gpu_gib)
    # Hosts of which nothing is said are taken to be like this one.
    like = min(seen.gpus, default=0)
    hosts = []
    for number, host in enumerate(placement.hosts):
        if firsts := {name: placement.places[name].slot for name in placement.on(number)}:
            gib = gpu_gib or host.gpu_gib
            each = like if gib is None else int(gib * GIB)
            each_gpu = (each,) * (max(host.slots) + 1) if each else ()
            ram = None if host.ram_gib is None else int(host.ram_gib * GIB)
            hosts.append(HostCapacity(host.name, each_gpu, firsts, gib is not None, ram))
    # Workers of other hosts do not share this one's memory.
    return Capacity(None, hosts=tuple(hosts))


def slow_here(plan: Plan) -> Iterator[str]:
    """Yield what this machine would compute many times slower than it need."""
    half = [name for name, model in plan.recipe.models.items() if model.dtype == "bfloat16"]
    if not half or _BFLOAT16 & _instructions():
        return
    devices = {worker.device for worker in plan.workers}
    # The driver is asked last: that takes longer than the rest.
    if "cpu" in devices or ("auto" in devices and not gpus()):
        keys = " ".join(f"models.{name}.dtype=float32" for name in half)
        yield (
            "bfloat16 takes this processor 10 to 30 times as long as float32: it has none of the instructions "
            f"{', '.join(sorted(_BFLOAT16))} — on a CPU write {keys}"
        )


def _instructions() -> frozenset[str]:
    """Return the flags of this machine's processor; all that are looked for where they cannot be told."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return _BFLOAT16
    return frozenset(word for line in lines if line.startswith("flags") for word in line.split()) or _BFLOAT16


def needs_of_workers(plan: Plan, names: Collection[str] | None = None) -> Needs:
    """Devices, libraries and Pythons needed by these workers (None: all of the plan), without memory or disk."""
    workers = [worker for worker in plan.workers if names is None or str(worker.name) in names]
    others: dict[str, list[WorkerPlan]] = {}
    for worker in workers:
        if worker.python is not None:
            others.setdefault(worker.python, []).append(worker)
    own = [worker for worker in workers if worker.python is None]
    devices = [(_key(plan, worker, "device"), worker.device) for worker in workers if worker.device.startswith("cuda")]
    devices += [(key, "cuda") for worker in workers if worker.device == "auto" for key in _on_gpus(plan, worker)]
    return Needs(
        devices=tuple(dict.fromkeys(devices)),
        libraries=tuple(dict.fromkeys(found for worker in own for found in _libraries(plan, worker))),
        interpreters=tuple(
            Interpreter(
                python,
                _key(plan, of[0], "python"),
                tuple(dict.fromkeys(name for worker in of for _, name in _libraries(plan, worker))),
            )
            for python, of in others.items()
        ),
    )


def code_here() -> CodeFacts:
    """Code and package versions of this machine, which all hosts of a run must match."""
    from distflow.data.decoding import read

    return read(describe_code(SHARED, ()), CodeFacts, "description of this machine's code")


def problems_here(
    plan: Plan, where: Callable[[str], str], *, ask_pythons: bool = True, devices: bool = True
) -> list[Problem]:
    """What this machine lacks to run all workers of a plan; `where` gives file and line of a key of the recipe.

    `ask_pythons`: also ask the interpreters of pools that name one, which takes a moment, unless there is none.
    `devices`: also look for GPUs.
    """
    if lacking := [need for need in needed() if not is_installed(need.name)]:
        text = f"{sys.executable} lacks packages that workers import: {', '.join(need.name for need in lacking)}"
        return [Problem("this machine", "python", text, pip_install(sys.executable, lacking))]
    needs = needs_of_workers(plan)
    absent = tuple(one for one in needs.interpreters if which(one.python) is None)
    needs = needs if ask_pythons else replace(needs, interpreters=absent)
    needs = needs if devices else replace(needs, devices=())
    if not (needs.devices or needs.libraries or needs.interpreters):
        return []
    found = _of_recipe(facts_here(Path(), needs), needs)
    return [Problem(where(one.name), one.name, one.text, one.hint) for one in found if one.level == "FAIL"]


def job_notes(plan: Plan, where: Callable[[str], str], job: JobSize) -> Iterator[str]:
    """Yield what the nodes of a job may lack, as far as it shows on the machine that submits it."""
    yield from plan.missing
    yield from map(str, problems_here(plan, where, ask_pythons=False, devices=False))
    yield from map(str, absent_models(plan.recipe, where))
    keys = [key for key, _ in needs_of_workers(plan).devices]
    keys += [
        _key(plan, one, "engine") for one in plan.workers if one.device == "auto" and one.engine == ENGINES["vllm"]
    ]
    if keys and job.gpus is None:
        yield (
            f"{job.where}: asks for no GPUs, which {keys[0]} needs — add them, such as gpus-per-node=8, unless nodes "
            "of this partition come with theirs"
        )


def absent_models(recipe: Recipe, where: Callable[[str], str]) -> Iterator[Problem]:
    """Yield a problem for each model of the hub that this machine can have from nowhere."""
    paths = {model.path: name for name, model in reversed(recipe.models.items()) if model.path is not None}
    for path, name in paths.items():
        if not looks_like_path(path) and is_absent(path):
            reason, _, cure = not_found(path).partition(" — ")
            key = f"models.{name}.path"
            yield Problem(where(key), key, f"{path}: {reason}", cure)


def absent_data(plan: Plan, where: Callable[[str], str]) -> Iterator[Problem]:
    """Yield a problem for each data set of the hub that this machine can have from nowhere."""
    for key, source in all_sources(plan.recipe):
        if source.source.startswith(HUB_PREFIX) and is_data_absent(name := source.source.removeprefix(HUB_PREFIX)):
            reason, _, cure = not_found(name, data=True).partition(" — ")
            key = f"{key}.source"
            yield Problem(where(key), key, f"the data set hub:{name} cannot be loaded: {reason}", cure)


def row_problems(plan: Plan, where: Callable[[str], str]) -> Iterator[Problem]:
    """Yield what is wrong with the first rows of files."""
    called = {} if plan.reads is not None else columns_called_with(plan)
    for key, source in all_sources(plan.recipe):
        try:
            if is_data_file(source.source) and (found := first_row(Path(source.source), **source.with_)) is not None:
                _check_first(*found, source.fields, called)
        except UserError as error:
            message, _, cure = str(error).partition(" — ")
            yield Problem(where(f"{key}.source"), f"{key}.source", message, cure)


def _check_first(place: str, row: Mapping[str, Any], fields: Mapping[str, str], called: Mapping[str, str]) -> None:
    """Raise UserError unless a row has a prompt and all columns with which reward functions are called."""
    try:
        check_columns(list(row), fields)
        there = prompt_of(row, fields).task if called else {}
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    for column, function in called.items():
        if column not in (*there, ANSWER, PROMPT):  # those that a conversation may have without a column
            raise UserError(
                f"{place} has no column {column!r}, with which reward {function} is called; there are "
                f"{', '.join(there) or 'none besides the prompt'} — data.fields.{column}=COLUMN, or a default for this "
                "parameter"
            )


def space_problems(runs_dir: Path, needs: Needs) -> list[Problem]:
    """What this machine lacks of memory and room for a run in `runs_dir`; looks at its GPUs only if that decides."""
    folder = existing_part(runs_dir.absolute())
    spaces = [Space(**found) for found in (memory(), space(folder), space(SHM))]
    beside = needs.memory_beside_gpus.fail <= spaces[0].free < needs.memory.fail and bool(gpus())
    wanted = needs.memory_beside_gpus if beside else needs.memory
    found = _judged(str(folder), spaces, wanted, needs, abandoned())
    return [Problem("this machine", one.name, one.text, one.hint) for one in found if one.level == "FAIL"]


def problems_of(host: Host, facts: HostFacts, needs: Needs) -> list[Problem]:
    """Everything that keeps a host of a hosts file out of the run."""
    found = judge(facts, needs)
    return [Problem(host.where, host.name, f"{one.name}: {one.text}", one.hint) for one in found if one.level == "FAIL"]


def judge(facts: HostFacts, needs: Needs) -> list[Finding]:
    """Check a host against what is needed of it."""
    return [
        *_code(facts.code, needs),
        *_of_recipe(facts, needs),
        *_space(facts, needs),
        _run_folder(facts, needs),
        *_paths(facts, needs),
    ]


def _of_recipe(facts: HostFacts, needs: Needs) -> list[Finding]:
    """Checks of what keys of the recipe ask for; findings are named by the key."""
    return [*_libraries_found(facts.code, needs), *_devices(facts, needs), *_interpreters(facts, needs)]


def _code(code: CodeFacts, needs: Needs) -> Iterator[Finding]:
    head = needs.head
    if head is None:
        return
    if code.distflow is None:
        yield Finding(
            "code",
            "FAIL",
            f"distflow is not installed for Python {dotted(code.python.version)} there",
            "install it there, forward PYTHONPATH, or copy the code of this machine with --ship-code",
        )
    elif code.digest != head.digest:
        version = f" (version {code.distflow}, here {head.distflow})" * (code.distflow != head.distflow)
        yield Finding(
            "code",
            "FAIL",
            f"distflow in {code.package} has the digest {code.digest}, here it is {head.digest}{version}",
            "install the same code on all hosts, or copy this machine's with --ship-code",
        )
    ours, theirs = dotted(head.python.version), dotted(code.python.version)
    if code.python.version[:2] != head.python.version[:2]:
        yield Finding("python", "FAIL", f"{theirs} there, {ours} here", "give a Python of the same version: python=…")
    for name, here in head.python.packages.items():
        found = code.python.packages[name]
        if found != here:
            hint = f"install {name}=={here} there, or give another Python: python=…"
            yield Finding(name, "FAIL", f"{found or 'missing'} there, {here or 'missing'} here", hint)


def _libraries_found(code: CodeFacts, needs: Needs) -> Iterator[Finding]:
    lacking: dict[str, list[tuple[str, str]]] = {}
    for key, name in needs.libraries:
        if not code.python.modules[LIBRARIES[name].module]:
            lacking.setdefault(LIBRARIES[name].module, []).append((key, name))
    python, last = shlex.quote(code.executable), [*lacking][-1:]
    by_pip = [packages for found in lacking.values() if (packages := LIBRARIES[found[0][1]].packages)]
    for module, found in lacking.items():
        key, name = found[0]
        text = f"needs the package {module!r}, which is not installed for {code.executable}"
        text += f" ({', '.join(other for other, _ in found[1:])} too)" if found[1:] else ""
        pool = key.split(".")[2] if key.startswith("layout.") else "NAME"
        hint = LIBRARIES[name].install.format(python=python)
        if len(by_pip) > 1 and [module] == last:
            hint += f"; all {len(by_pip)} at once: {python} -m pip install {' '.join(by_pip)}"
        if len(lacking) == 1:
            hint += f"; or name a Python that has it: layout.pools.{pool}.python=PATH"
        yield Finding(key, "FAIL", text, hint)


def _interpreters(facts: HostFacts, needs: Needs) -> Iterator[Finding]:
    for one, told in zip(needs.interpreters, facts.pythons, strict=True):
        wrong = one.judge(told)
        yield from (Finding(one.key, "FAIL", text, hint) for text, hint in wrong)
        if not wrong:
            yield Finding(one.key, "OK", one.summary(told))


def _space(facts: HostFacts, needs: Needs) -> Iterator[Finding]:
    memory_needed = needs.memory_beside_gpus if facts.gpus else needs.memory
    return _judged(facts.run_dir, (facts.memory, facts.disk, facts.shm), memory_needed, needs, facts.abandoned)


def _judged(
    folder: str, found: Sequence[Space], memory_needed: Threshold, needs: Needs, left: Sequence[str]
) -> Iterator[Finding]:
    """`found`: memory, disk of the folder, and shared memory; `left`: files there of runs that were killed."""
    shm = math.ceil((found[2].total - found[2].free + needs.shm.warn) / GIB)
    spaces = (
        ("memory", "", found[0], memory_needed, "use fewer workers on this host, or stop other programs"),
        (
            "disk",
            f"{folder}: ",
            found[1],
            needs.disk,
            "free some space, or give another folder: --runs-dir or dir=…",
        ),
        (
            "shared memory",
            "/dev/shm: ",
            found[2],
            needs.shm,
            f"{_removal(left)}make it larger: mount -o remount,size={shm}G {SHM}, or --shm-size={shm}g for a container",
        ),
    )
    for name, place, room, threshold, hint in spaces:
        if name == "disk" and not room.total:
            continue  # nothing can be kept there at all, as in /proc: making the folder says so
        level = threshold.level(room.free)
        text = f"{place}{room.free / GIB:.1f} of {room.total / GIB:.1f} GiB free"
        if level == "OK":
            yield Finding(name, level, text)
        else:
            yield Finding(name, level, f"{text}, about {threshold.warn / GIB:.1f} GiB needed", hint)


def _removal(files: Sequence[str]) -> str:
    if not files:
        return ""
    runs = sorted({re.sub(r"-t\d+-\d+$", "", name) for name in files})
    names = " ".join(f"{shlex.quote(name)}*" for name in runs)
    return f"some of it is of runs that no process here uses: rm {names}; or "


def _run_folder(facts: HostFacts, needs: Needs) -> Finding:
    if facts.unwritable is not None:
        hint = "give a writable folder: --runs-dir or dir=…"
        return Finding("run folder", "FAIL", f"{facts.run_dir}: {facts.unwritable}", hint)
    if facts.taken and not facts.same_folder and needs.head is not None and not needs.resume:
        hint = "choose another name with --run, give another folder with dir=…, or remove it"
        return Finding("run folder", "FAIL", f"{facts.run_dir} already exists there, and is not this machine's", hint)
    return Finding("run folder", "OK", f"{facts.run_dir} is writable")


def _devices(facts: HostFacts, needs: Needs) -> Iterator[Finding]:
    count = len(facts.gpus)
    for key, device in needs.devices:
        if int(device.partition(":")[2] or 0) >= count:
            text = f"{device}, but this host has {count} GPU{'s' * (count != 1)} available (by nvidia-smi)"
            others = {"attn_implementation": "sdpa, eager or auto", "engine": "torch"}
            wanted = others.get(key.rpartition(".")[2], "auto or cpu")
            hint = f"set {wanted}, or pin the pool to hosts with GPUs: layout.pools.NAME.hosts"
            yield Finding(key, "FAIL", text, hint)


def _paths(facts: HostFacts, needs: Needs) -> Iterator[Finding]:
    for path in needs.paths:
        if path in facts.missing:
            text = f"{path} does not exist, and workers on this host read it"
            yield Finding("files", "FAIL", text, "copy it to the same path there, or share the file system")


def notes(host: Host, facts: HostFacts) -> Iterator[str]:
    """What is worth knowing but no reason to refuse a host."""
    if CLOCK_NOTE_S < abs(facts.clock_offset) <= CLOCK_S:
        yield f"{host.name}: clock is off by {facts.clock_offset:+.1f} s; traces are corrected for this, logs are not"
    if facts.hidden_gpus and not facts.gpus:
        yield f"{host.name}: CUDA_VISIBLE_DEVICES hides all of its {facts.hidden_gpus} GPUs, so workers run on the CPU"


def clock_problems(hosts: Mapping[int, Host], offsets: Mapping[int, float]) -> list[Problem]:
    """Hosts whose clocks differ too much from the head's."""
    return [
        Problem(
            hosts[number].where,
            hosts[number].name,
            f"clock is off by {offset:+.1f} s; at most {CLOCK_S:g} s are allowed",
            "synchronise the clocks of all hosts with NTP",
        )
        for number, offset in offsets.items()
        if abs(offset) > CLOCK_S
    ]


def link_problems(
    hosts: Mapping[int, Host], addresses: Mapping[int, str], faults: Mapping[tuple[int, int], str]
) -> list[Problem]:
    """One problem for all broken links, with a matrix of which host cannot reach which."""
    if not faults:
        return []
    pairs = [
        f"  {hosts[a].name} cannot reach {hosts[b].name} at {addresses[b]}: {fault}" for (a, b), fault in faults.items()
    ]
    names = [hosts[number].name for number in addresses]
    message = "\n".join(["some hosts cannot reach each other", *pairs, *_matrix(names, list(addresses), faults), ""])
    hint = (
        "let the hosts of a run open TCP connections to each other on all ports, or give an address that the others "
        "can reach: address=… on the host's line"
    )
    source = next(iter(hosts.values())).where.rpartition(":")[0]
    return [Problem(source, "links", message, hint)]


def _matrix(names: Sequence[str], numbers: Sequence[int], faults: Mapping[tuple[int, int], str]) -> Iterator[str]:
    width = max(len(name) for name in (*names, "from\\to"))
    yield "  " + "  ".join(word.ljust(width) for word in ("from\\to", *names)).rstrip()
    for row, name in zip(numbers, names, strict=True):
        cells = ["-" if row == column else "NO" if (row, column) in faults else "ok" for column in numbers]
        yield "  " + "  ".join(word.ljust(width) for word in (name, *cells)).rstrip()


def _libraries(plan: Plan, worker: WorkerPlan) -> Iterator[tuple[str, str]]:
    """The key that asks for a library, and its name in LIBRARIES."""
    for kind, name in (("engine", worker.engine), ("backend", worker.backend)):
        if name is not None and name in LIBRARIES:
            yield _key(plan, worker, kind), name
    homes = plan.pool(worker.name.pool).homes
    trackers = trackers_of(plan.recipe.run) if plan.primary in homes else ()
    yield from ((f"run.trackers.{one.name}", one.call) for one in trackers if one.call in LIBRARIES)
    yield from (("weights.link", NIXL) for model in plan.generating if worker.name.pool in nixl_pools(plan, model))
    place = f"copy_to:{(plan.recipe.run.copy_to or '').partition('://')[0]}"
    if homes and place in LIBRARIES:
        yield "run.copy_to", place
    for model in homes:
        if plan.recipe.models[model].optimizer.name in LIBRARIES:
            yield f"models.{model}.optimizer.name", plan.recipe.models[model].optimizer.name
        if plan.recipe.models[model].lora is not None:
            yield f"models.{model}.lora", "lora"
    for model in (*homes, *plan.pool(worker.name.pool).frozen):
        chosen = plan.recipe.models[model].attn_implementation
        chosen = "hub kernel" if "@" in chosen else chosen
        if chosen in LIBRARIES:
            yield f"models.{model}.attn_implementation", chosen
    yield from _of_rewards(plan, plan.pool(worker.name.pool).steps)
    if str(worker.name) in plan.owners:
        yield from _of_data(plan.recipe)


def _of_rewards(plan: Plan, names: Collection[str]) -> Iterator[tuple[str, str]]:
    for step in plan.steps:
        if step.name not in names:
            continue
        spec = read_declaration(step.call).spec
        for setting in spec.plugins:
            for call in chosen_shipped(step.settings.get(setting), spec.choices.get(setting, ())):
                if call in LIBRARIES:
                    yield f"flow.steps.{step.name}.with.{setting}", call


def _of_data(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for section, source in all_sources(recipe):
        key = f"{section}.source"
        if source.source.startswith(HUB_PREFIX):
            yield key, HUB
        elif is_data_file(source.source) and in_arrow(Path(source.source), source.with_.get("split")):
            yield key, PARQUET
        elif source.source in LIBRARIES:
            yield key, source.source


def _on_gpus(plan: Plan, worker: WorkerPlan) -> Iterator[str]:
    """Yield the keys of what this worker's engine or backends cannot compute on a CPU."""
    pool = plan.pool(worker.name.pool)
    for model in pool.generates:
        if only_on_gpus(configuration(plan.recipe.models[model]), worker.engine or ""):
            yield _key(plan, worker, "engine")
    for model in (*pool.homes, *pool.frozen):
        if needs_gpu(plan.recipe.models[model].attn_implementation):
            yield f"models.{model}.attn_implementation"


def _key(plan: Plan, worker: WorkerPlan, setting: str) -> str:
    """The key of a worker's setting: of its pool, or its own."""
    pool, index = f"layout.pools.{worker.name.pool}", str(worker.name.index)
    each = plan.recipe.layout.pools[worker.name.pool].each
    own = index in each and each[index].model_dump().get(setting) is not None
    return f"{pool}.each.{index}.{setting}" if own else f"{pool}.{setting}"
