"""`distflow plan`: what each worker will do, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from distflow.errors import UserError
from distflow.launch.commands.simulate import load_options, simulation_input

if TYPE_CHECKING:
    from distflow.config.load import LoadedRecipe
    from distflow.flow.document import Place
    from distflow.flow.memory_fit import Capacity
    from distflow.flow.plan import Plan
    from distflow.launch.deploy.hostfile import Host
    from distflow.launch.deploy.placement import WorkerPlacement
    from distflow.sim.costs import CostSearch, PoolNeed, SiteOffer
    from distflow.sim.plan_simulation import SimulationInput
    from distflow.sim.predict import Load
    from distflow.sim.splits import PoolSplit, SplitSearch

NOT_MOVED: Mapping[Path, Path] = MappingProxyType({})


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--worker", metavar="NAME", help="Print the script of one worker, for example rollout/0.")
@click.option("--write", type=click.Path(path_type=Path), metavar="DIR", help="Write one YAML and script per worker.")
@click.option(
    "--hosts", type=click.Path(path_type=Path), metavar="FILE", help="Also show which worker runs on which host."
)
@click.option("--include", metavar="HOSTS", help="Only these hosts and slots, as in gpu-1@gpu-2:0,2.")
@click.option("--exclude", metavar="HOSTS", help="All but these hosts and slots.")
@click.option(
    "--gpu-gib",
    type=click.FloatRange(min=0.0, min_open=True),
    metavar="N",
    help="Memory of a GPU, in GiB, in place of what is seen here.  [default: gpu_gib= of each host of --hosts, if any]",
)
@click.option("--mermaid", is_flag=True, help="Print pools and edges as a Mermaid flowchart.")
@click.option("--svg", type=click.Path(path_type=Path), metavar="FILE", help="Draw pools and edges into an SVG file.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option(
    "--optimize", is_flag=True, help="Instead: propose how many workers generate and train, by simulating splits."
)
@click.option(
    "--devices",
    type=click.IntRange(min=2),
    metavar="N",
    help="Of --optimize: devices to divide.  [default: those of the layout]",
)
@load_options
@click.pass_context
def command(context: click.Context, /, recipe: str, overrides: tuple[str, ...], **given: Any) -> int:
    """Show workers, steps, pools, edges, models and batch arithmetic of RECIPE (a shipped name or a file).

    With --optimize, propose a split of its devices between generation and training; --device, --lengths, --trace,
    --prompt-tokens and --steps say what to simulate, as in `distflow simulate`.
    """
    optimize = given.pop("optimize")
    load = {name: given.pop(name) for name in ("devices", "device", "lengths", "trace", "prompt_tokens", "steps")}
    pages = {name: given[name] for name in ("worker", "write", "mermaid", "svg", "gpu_gib")}
    for name in pages if optimize else load:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option}: {'not together with' if optimize else 'only with'} --optimize — leave it out")
    hosts = _hosts(given.pop("hosts"), given.pop("include"), given.pop("exclude"))
    if optimize:
        return _optimize(recipe, overrides, load, hosts, as_json=given["as_json"])
    form = "mermaid" if given.pop("mermaid") else "json" if given["as_json"] else "page"
    del given["as_json"]
    return _show_plan(recipe, overrides, hosts=hosts, form=form, **given)


def _show_plan(
    recipe: str,
    overrides: Sequence[str],
    *,
    worker: str | None,
    write: Path | None,
    hosts: tuple[Host, ...],
    svg: Path | None,
    gpu_gib: float | None,
    form: str,
) -> int:
    from distflow.flow.recipe_check import plan_recipe
    from distflow.launch.deploy.host_checks import capacity_for

    loaded, plan = plan_recipe(recipe, overrides, need_files=False)
    placement = _placement(loaded, plan, hosts) if hosts else None
    for line in _written(loaded, plan, write, svg, placement):
        click.echo(line)
    if worker is not None:
        click.echo(_script(plan, worker), nl=False)
    elif form == "mermaid":
        from distflow.flow.graph_text import mermaid as flowchart

        click.echo(flowchart(plan), nl=False)
    elif form == "json":
        import json

        from distflow.flow.lanes import ONE_HOST
        from distflow.flow.plan_text import plan_data

        where = ONE_HOST if placement is None else placement.where
        data = plan_data(plan, capacity_for(plan, placement, gpu_gib), where)
        click.echo(json.dumps({**data, "hosts": _host_lines(plan, placement)}, indent=1))
    elif write is None and svg is None:
        _show(plan, placement, capacity_for(plan, placement, gpu_gib))
    return 0


def _optimize(
    recipe: str, overrides: Sequence[str], given: Mapping[str, Any], hosts: Sequence[Host], *, as_json: bool
) -> int:
    """Propose a split of the devices between the pool that generates and the one that trains."""
    from distflow.errors import RecipeError
    from distflow.flow.recipe_check import plan_recipe
    from distflow.launch.deploy.hostfile import HostsError, select
    from distflow.sim import splits, splits_report
    from distflow.sim.costs import cheapest, pool_needs, slots_of_others
    from distflow.sim.notes import emulation_notes, truncation_notes
    from distflow.sim.predict import load_of

    _, plan = plan_recipe(recipe, overrides, need_files=False)
    inputs = simulation_input(given, timeline=False)
    offers = _offers(hosts)
    rule = splits.split_rule(plan, inputs.device, given["devices"])
    needs = pool_needs(plan, rule, [host.name for host in hosts])
    if hosts and given["devices"] is None:
        left = sum(len(host.slots) for host in hosts) - slots_of_others(needs, rule)
        rule = splits.split_rule(plan, inputs.device, left, option="--hosts")

    def load_for(split: PoolSplit, stale: int | None) -> Load:
        bound = () if stale is None else (f"layout.max_staleness={stale}",)
        loaded, other = plan_recipe(recipe, (*overrides, *rule.words(split), *bound), need_files=False)
        # The present layout is what others are compared with, on whatever hosts it is.
        if hosts and split != rule.present:
            try:
                _placement(loaded, other, hosts)
            except HostsError as error:
                raise RecipeError(error.problems) from error
        return _on_hosts(load_of(other, prompt_tokens=inputs.prompt_tokens), hosts)

    trials = splits.Trials(rule, load_for, inputs, given["steps"], lambda line: click.echo(line, err=True))
    found = splits.search(trials)

    def fits(words: Sequence[str], include: str) -> bool:
        try:
            loaded, other = plan_recipe(recipe, (*overrides, *words), need_files=False)
            _placement(loaded, other, select(hosts, include, None))
        except (RecipeError, HostsError):
            return False
        return True

    costs = cheapest(trials, offers, needs, fits)
    notes = [*emulation_notes(plan), *truncation_notes(trials.here.job, inputs.prompt_tokens, trials.moments)]
    notes += _link_notes(needs[rule.training_pool], found, hosts)
    if as_json:
        import json

        click.echo(json.dumps(splits_report.data(found, costs, notes), indent=1))
    else:
        _show_splits(found, inputs, notes, costs if offers else None)
    return 0


def _show_splits(found: SplitSearch, inputs: SimulationInput, notes: Sequence[str], costs: CostSearch | None) -> None:
    """As text; `costs`: where hosts have any."""
    from distflow.launch.commands.metrics import print_columns
    from distflow.sim import splits_report

    click.echo("\n".join(splits_report.above(found, inputs)))
    print_columns(splits_report.table(found))
    click.echo("\n".join(splits_report.below(found, notes)))
    if costs is not None:
        click.echo("\n".join(splits_report.above_costs()))
        print_columns(splits_report.cost_table(found, costs))
        click.echo("\n".join(splits_report.below_costs(found, costs)))


def _on_hosts(load: Load, hosts: Sequence[Host]) -> Load:
    """Whether weights cross links is known if the hosts are."""
    return replace(load, one_host=len(hosts) == 1) if hosts else load


def _hosts(path: Path | None, include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Those that are selected of a file; empty: no file is given."""
    from distflow.launch.deploy.hostfile import read_hosts

    if path is not None:
        return read_hosts(path, include, exclude)
    if include is not None or exclude is not None:
        raise UserError("--include, --exclude: they choose among the hosts of a file — name it with --hosts FILE")
    return ()


def _offers(hosts: Sequence[Host]) -> list[SiteOffer]:
    """The devices of each site with their prices; none where the file names no prices. Raises HostsError."""
    from distflow.errors import Problem
    from distflow.launch.deploy.hostfile import HostsError
    from distflow.sim.costs import PaidSlot, SiteOffer

    without = [host for host in hosts if host.cost is None]
    if without and len(without) < len(hosts):
        hint = "give each host its price, cost=2.5 for a slot and hour, or none of them"
        raise HostsError([Problem(host.where, host.name, "has no cost=, and others have", hint) for host in without])
    if without:
        return []
    sites = {host.site: [other for other in hosts if other.site == host.site] for host in hosts}
    return [
        SiteOffer(name, tuple(PaidSlot(host.name, slot, host.cost or 0.0) for host in there for slot in host.slots))
        for name, there in sites.items()
    ]


def _link_notes(trains: PoolNeed, found: SplitSearch, hosts: Sequence[Host]) -> list[str]:
    """About the links between the hosts, which no simulation knows."""
    if len(hosts) < 2:
        return []
    lines = ["links between hosts are taken to be all alike, and fast enough for gradients"]
    pool, trainers = found.rule.training_pool, found.proposed.split.trainers
    sites = {host.site: [other for other in hosts if other.site == host.site] for host in hosts}
    used = {host.site for host in hosts if trains.may_use(host.name)}
    if len(used) < 2 or trainers < 2:
        return lines
    room = {site: sum(len(host.slots) for host in there if trains.may_use(host.name)) for site, there in sites.items()}
    site = next((site for site in sites if room[site] >= trainers * trains.each), max(sites, key=lambda one: room[one]))
    names = ", ".join(host.name for host in sites[site] if trains.may_use(host.name))
    pin = f"'layout.pools.{pool}.hosts=[{names}]'"
    return [*lines, f"those between sites are slow: pin {pool} to one of them, such as {pin} (docs/sites.md)"]


def _show(plan: Plan, placement: WorkerPlacement | None, seen: Capacity) -> None:
    from distflow.flow.plan_text import render_page

    if placement is None:
        click.echo(render_page(plan, seen))
    else:
        click.echo(render_page(plan, seen, placement.where))
        click.echo("\n".join(["", "hosts", *(f"  {line}" for line in _host_lines(plan, placement))]))
    if room := _shared_memory(plan, placement):
        title = "room for weights in /dev/shm, which is part of the memory above, in GiB"
        click.echo("\n".join(["", title, *(f"  {line}" for line in room)]))


def _written(
    loaded: LoadedRecipe, plan: Plan, write: Path | None, svg: Path | None, placement: WorkerPlacement | None
) -> list[str]:
    """Write what was asked for; returns the lines to show."""
    from distflow.flow.lanes import ONE_HOST

    lines, option = [], ""
    try:
        if write is not None:
            option = f"--write {write}"
            lines += _write(write.resolve(), loaded, plan, placement)
        if svg is not None:
            from distflow.flow.plan_svg import render_svg

            option = f"--svg {svg}"
            where = ONE_HOST if placement is None else placement.where
            svg.write_text(render_svg(plan, where), encoding="utf-8")
            lines.append(str(svg))
    except OSError as error:
        place = "a folder" if option.startswith("--write") else "a file in a folder"
        raise UserError(
            f"{option}: {error.filename or 'a file'} cannot be written ({error.strerror}) — give {place} "
            "you can write to, on a disk with free space"
        ) from error
    return lines


def _placement(loaded: LoadedRecipe, plan: Plan, hosts: Sequence[Host]) -> WorkerPlacement:
    from distflow.launch.deploy.placement import place_workers

    return place_workers(plan, hosts, loaded.origin)


def _host_lines(plan: Plan, placement: WorkerPlacement | None) -> list[str]:
    from distflow.launch.deploy.placement import placement_lines

    return [] if placement is None else placement_lines(plan, placement)


def _shared_memory(plan: Plan, placement: WorkerPlacement | None) -> list[str]:
    from distflow.launch.deploy.placement import shared_memory_lines

    return shared_memory_lines(plan, placement)


def _script(plan: Plan, worker: str) -> str:
    from distflow.flow.script import render_script
    from distflow.types import WorkerName

    try:
        return render_script(plan, WorkerName.parse(worker))
    except (LookupError, ValueError) as error:
        raise UserError(f"command line: --worker — {error}") from error


def _write(folder: Path, loaded: LoadedRecipe, plan: Plan, placement: WorkerPlacement | None) -> list[str]:
    """Write one YAML and one script per worker, with hosts also keys and plug-in files; returns the lines to show."""
    from distflow.comm.addresses import worker_address
    from distflow.flow.document import Place
    from distflow.flow.gpus import shown_gpus
    from distflow.types import WorkerName

    folder.mkdir(parents=True, exist_ok=True)
    names = [str(worker.name) for worker in plan.workers]
    if placement is None:
        alone = Place(folder, {name: worker_address(folder, name) for name in names})
        files = [_write_worker(folder, loaded, plan, name, alone) for name in names]
        takes = _gpus_here(plan)
        return [
            f"{folder / file}    run it with: distflow worker {folder / file}{takes[name]}"
            for name, file in zip(names, files, strict=True)
        ]
    places = _places(folder, plan, placement)
    copies = _write_plugins(folder, loaded)
    lines = []
    for number, place in places.items():
        host = placement.hosts[number]
        moved = {file: place.run_dir / copy for file, copy in copies.items()}
        written = {name: _write_worker(folder, loaded, plan, name, place, moved) for name in placement.on(number)}
        command = "distflow worker" if host.python is None else f"{host.python} -m distflow.launch worker"
        lines.append(f"on {host.name}, once it has {place.run_dir} (rsync -a {folder}/ {host.login}:{place.run_dir}/):")
        takes = {
            name: _as_comment(shown_gpus(plan.worker(WorkerName.parse(name)), slot))
            for name, slot in place.slots.items()
        }
        lines += [f"    {command} {place.run_dir / file}{takes.get(name, '')}" for name, file in written.items()]
    return lines


def _gpus_here(plan: Plan) -> dict[str, str]:
    """Say for each worker of a run on this machine which GPUs it takes by itself; nothing where there are none."""
    from distflow.flow.gpus import first_gpus, shown_gpus
    from distflow.launch.agent.host_facts import gpus

    count = len(gpus())
    firsts = first_gpus(plan.workers, count)
    return {str(w.name): _as_comment(shown_gpus(w, firsts[str(w.name)])) if count else "" for w in plan.workers}


def _as_comment(text: str) -> str:
    """Return text as it may stand behind a command for a shell."""
    return f"  # {text}" if text else ""


def _write_worker(
    folder: Path, loaded: LoadedRecipe, plan: Plan, name: str, place: Place, moved: Mapping[Path, Path] = NOT_MOVED
) -> str:
    """Write the document and the script of a worker; returns the document's file name. `moved`: its plug-in files."""
    from distflow.flow.document import document_text, worker_document
    from distflow.flow.script import render_script
    from distflow.launch.run.folder import rewritten
    from distflow.types import WorkerName

    worker = WorkerName.parse(name)
    script, file = f"{worker.file_stem}.py", f"{worker.file_stem}.yaml"
    document = worker_document(plan, worker, place, recipe_source=str(loaded.source), script=script)
    (folder / script).write_text(render_script(plan, worker), encoding="utf-8")
    (folder / file).write_text(document_text(rewritten(document, moved)), encoding="utf-8")
    return file


def _places(folder: Path, plan: Plan, placement: WorkerPlacement) -> dict[int, Place]:
    """Say for each host with workers where they listen, and where those of the others do; makes the keys for it."""
    from distflow.comm.addresses import port_beforehand, worker_address
    from distflow.comm.keys import key_file, listening_on, own_keys, public_hex
    from distflow.flow.document import Place
    from distflow.flow.gpus import width
    from distflow.launch.deploy.hostfile import addresses_of
    from distflow.types import WorkerName

    hosts, where = placement.hosts, placement.where
    used = [number for number in range(len(hosts)) if placement.on(number)]
    addresses = addresses_of({number: hosts[number] for number in used})
    own_keys(folder, key_file(folder).stem)
    ports = {name: port_beforehand(folder, number) for number, name in enumerate(where.hosts)}
    public = {name: public_hex(own_keys(folder, WorkerName.parse(name).file_stem)) for name in where.hosts}
    afar = {
        name: f"{listening_on(addresses[number], ports[name])}#{public[name]}" for name, number in where.hosts.items()
    }
    places = {}
    for here in used:
        directory = hosts[here].directory
        run_dir = folder if directory is None else Path(directory) / folder.name
        near = {name: worker_address(run_dir, name, here) for name in placement.on(here)}
        elsewhere = {name: number for name, number in where.hosts.items() if number}
        sites = {str(number): site for number, site in where.sites.items()}
        slots = {name: placement.places[name].slot for name in near if width(plan.worker(WorkerName.parse(name)))}
        places[here] = Place(run_dir, afar | near, here, addresses[here], elsewhere, sites, ports, slots)
    return places


def _write_plugins(folder: Path, loaded: LoadedRecipe) -> dict[Path, str]:
    """Copy the recipe's own files into the folder; returns where each went."""
    from distflow.launch.run.folder import plugin_files, shipped_files, shipped_names

    files = plugin_files(loaded.resolved)
    for name, file in shipped_files(files).items():
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    return shipped_names(files)
