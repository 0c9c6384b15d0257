"""Fills the run folder and starts the host agent on this machine; and fills those of a run on many hosts.

There, each host's folder has the documents of its own workers, and all share one record.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import platform
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from msgspec import structs

import distflow
from distflow.comm.addresses import worker_address
from distflow.comm.keys import key_file, make_keys, write_keys
from distflow.config.load import LoadedRecipe
from distflow.config.yamlfile import yaml_text
from distflow.errors import UserError
from distflow.flow.document import Place, worker_document
from distflow.flow.plan import Plan
from distflow.launch.agent.host_facts import code_files
from distflow.launch.agent.start import agent_command, start_agent
from distflow.launch.deploy.placement import Placing, device_of
from distflow.launch.run.folder import SUBFOLDERS, plugin_files, rewritten, shipped_names
from distflow.launch.run.record import AGENT, FILE_NAME, HostEntry, RunRecord, WorkerEntry, agent_name

GIT_S = 5.0
PACKAGES = (
    "distflow-rl",
    "torch",
    "transformers",
    "safetensors",
    "pyzmq",
    "msgpack",
    "hydra-core",
    "pydantic",
    "numpy",
)
CODE = "code"
SECRET, OPEN = 0o600, 0o644


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a run begins: term 0 at step 0, or at a checkpoint."""

    term: int = 0
    checkpoint: Path | None = None


def fill(run_dir: Path, loaded: LoadedRecipe, plan: Plan, beginning: Beginning) -> RunRecord:
    """Write recipe.yaml, overrides.txt, env.json, workers/*.yaml and run.json; returns the latter.

    Raises UserError when the disk refuses.
    """
    try:
        return _fill(run_dir, loaded, plan, beginning)
    except OSError as error:
        raise unwritable(run_dir, error) from error


def unwritable(run_dir: Path, error: OSError) -> UserError:
    """A run folder that the disk refuses to fill, as a UserError."""
    return UserError(
        f"{run_dir}: the run cannot be started: {error.filename or 'a file'} cannot be written ({error.strerror}) — "
        "make room, or choose another place with --runs-dir"
    )


def _write(path: Path, text: str) -> None:
    """In one step: a full disk must not cost what an earlier life of the run has left there."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _fill(run_dir: Path, loaded: LoadedRecipe, plan: Plan, beginning: Beginning) -> RunRecord:
    _write(run_dir / "recipe.yaml", yaml.safe_dump(loaded.resolved, sort_keys=False, allow_unicode=True))
    _write(run_dir / "overrides.txt", "".join(f"{override}\n" for override in loaded.overrides))
    _write(run_dir / "env.json", json.dumps(environment(loaded.source), indent=1) + "\n")
    roster = {str(worker.name): worker_address(run_dir, str(worker.name)) for worker in plan.workers}
    roster[AGENT] = worker_address(run_dir, AGENT)
    for stale in (run_dir / "workers").iterdir():
        stale.unlink()
    for worker in plan.workers:
        document = worker_document(
            plan,
            worker.name,
            Place(run_dir, roster),
            recipe_source=str(loaded.source),
            resume=None if beginning.checkpoint is None else str(beginning.checkpoint),
            term=beginning.term,
        )
        (run_dir / "workers" / f"{worker.name.file_stem}.yaml").write_text(yaml_text(document))
    limits = loaded.recipe.limits
    record = RunRecord(
        name=run_dir.name,
        run_dir=str(run_dir),
        training_steps=loaded.recipe.run.training_steps,
        workers=tuple(
            WorkerEntry(
                str(w.name), "train" in w.roles, w.threads, python=w.python or "", generates=w.generates is not None
            )
            for w in plan.workers
        ),
        roster=roster,
        drain_s=limits.drain_s,
        restarts=limits.restarts,
        restart_window_s=limits.restart_window_s,
        connect_s=limits.connect_s,
        host_silence_s=limits.host_silence_s,
        no_progress_s=limits.no_progress_s,
        launch_term=beginning.term,
        term=beginning.term,
        on_failure=loaded.recipe.layout.on_failure,
        started=time.time(),
    )
    record.write()
    return record


def start_first_agent(run_dir: Path, lock: int, entry: str | None) -> subprocess.Popen[bytes]:
    """Start the agent of this machine, which takes over `lock`. Raises UserError when the disk refuses."""
    try:
        agent = start_agent(run_dir, agent_command(run_dir, entry=entry), lock=lock)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    os.close(lock)
    return agent


def environment(recipe: Path) -> dict[str, Any]:
    """What one needs to know of this machine to repeat a run of the recipe in this file."""
    installed = {name: _version(name) for name in PACKAGES}
    return {
        "recipe": str(recipe),
        "distflow": distflow.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name, version in installed.items() if version is not None},
        "hostname": socket.gethostname(),
        "cpu_count": os.cpu_count(),
        "commit": _git(["rev-parse", "HEAD"]),
        "modified": bool(_git(["status", "--porcelain", "--untracked-files=no"])),
        "command": sys.argv,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(arguments: Sequence[str]) -> str | None:
    """What git says about the checkout that this code stands in; None if it is no checkout or there is no git."""
    root = Path(distflow.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@dataclass(frozen=True, slots=True)
class Site:
    """One host as it was found."""

    run_dir: Path
    """The run folder there."""
    address: str
    """What workers on other hosts connect to."""
    same_folder: bool
    """The head's run folder, on a shared file system."""
    gpus: int
    missing_plugins: bool
    """It lacks a plug-in file of the recipe, or cannot be trusted to have the same one."""
    missing_parts: tuple[Path, ...] = ()
    """Files of the head's folder that it lacks of the checkpoint to go on from."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A planned run, spread over its hosts."""

    loaded: LoadedRecipe
    plan: Plan
    placing: Placing
    sites: Mapping[int, Site]
    beginning: Beginning
    head_dir: Path
    """The run folder on the launching machine."""

    def record(self, host: int | None) -> RunRecord:
        """`run.json` as it stands in the folder of one host; None: in the head's."""
        limits = self.loaded.recipe.limits
        run_dir = self.head_dir if host is None else self.sites[host].run_dir
        seats = self.placing.seats
        workers = tuple(
            WorkerEntry(
                str(w.name),
                "train" in w.roles,
                w.threads,
                seats[str(w.name)].host,
                w.python or "",
                generates=w.generates is not None,
            )
            for w in self.plan.workers
        )
        # Nobody knows yet where they will listen; the agents fill it in.
        roster = dict.fromkeys((*seats, *map(agent_name, self.sites)), "")
        names = [found.name for found in self.placing.hosts]
        return RunRecord(
            name=run_dir.name,
            run_dir=str(run_dir),
            training_steps=self.loaded.recipe.run.training_steps,
            workers=workers,
            roster=roster,
            drain_s=limits.drain_s,
            restarts=limits.restarts,
            restart_window_s=limits.restart_window_s,
            connect_s=limits.connect_s,
            host_silence_s=limits.host_silence_s,
            no_progress_s=limits.no_progress_s,
            hosts=tuple(HostEntry(names[n], self.sites[n].address) for n in sorted(self.sites)),
            launch_term=self.beginning.term,
            term=self.beginning.term,
            on_failure=self.loaded.recipe.layout.on_failure,
            started=time.time(),
        )


def fill_head(spread: Spread) -> None:
    """Write the head's own run folder: what was asked for, the run's key, the record, and all workers' documents."""
    run_dir = spread.head_dir
    (run_dir / "recipe.yaml").write_bytes(_recipe(spread))
    (run_dir / "overrides.txt").write_bytes(_overrides(spread))
    (run_dir / "env.json").write_text(json.dumps(environment(spread.loaded.source), indent=1) + "\n")
    if not key_file(run_dir).exists():
        write_keys(key_file(run_dir), make_keys())
    for stale in (run_dir / "workers").iterdir():
        stale.unlink()
    for host, site in spread.sites.items():
        files = host_documents(spread, host) | (plugin_copies(spread) if site.same_folder else {})
        for name, content in files.items():
            path = run_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    spread.record(None).write()


def host_documents(spread: Spread, host: int) -> dict[str, bytes]:
    """The documents of the workers of one host, by path below its run folder."""
    site = spread.sites[host]
    names = spread.placing.on(host)
    roster = {name: worker_address(site.run_dir, name, host) for name in (*names, agent_name(host))}
    elsewhere = {name: seat.host for name, seat in spread.placing.seats.items() if seat.host}
    place = Place(site.run_dir, roster, host, site.address, elsewhere)
    copies = shipped_names(plugin_files(spread.loaded.resolved)) if site.missing_plugins else {}
    moved = {file: site.run_dir / name for file, name in copies.items()}
    checkpoint = spread.beginning.checkpoint
    files = {}
    for worker in spread.plan.workers:
        if str(worker.name) not in names:
            continue
        document = worker_document(
            spread.plan,
            worker.name,
            place,
            recipe_source=str(spread.loaded.source),
            resume=None if checkpoint is None else str(site.run_dir / checkpoint.relative_to(spread.head_dir)),
            term=spread.beginning.term,
        )
        document["settings"]["device"] = device_of(worker, spread.placing.seats[str(worker.name)], site.gpus)
        files[f"workers/{worker.name.file_stem}.yaml"] = yaml_text(rewritten(document, moved)).encode()
    return files


def plugin_copies(spread: Spread) -> dict[str, bytes]:
    """The recipe's plug-in files, by path below the run folder."""
    return {name: file.read_bytes() for file, name in shipped_names(plugin_files(spread.loaded.resolved)).items()}


def bundle(spread: Spread, host: int) -> bytes:
    """A tar of all that a host needs whose run folder is its own."""
    record = spread.record(host)
    files = {
        "recipe.yaml": _recipe(spread),
        "overrides.txt": _overrides(spread),
        "env.json": (spread.head_dir / "env.json").read_bytes(),
        FILE_NAME: record.as_text().encode(),
        **host_documents(spread, host),
        **plugin_copies(spread),
    }
    return tar(files, key_of(spread.head_dir), SUBFOLDERS)


def key_of(run_dir: Path) -> dict[str, bytes]:
    """The run's key, by path below the run folder."""
    key = key_file(run_dir)
    return {str(key.relative_to(run_dir)): key.read_bytes()}


def code_bundle(package: Path) -> bytes:
    """A tar of this machine's distflow, as it lies where it is installed."""
    files = {f"{CODE}/distflow/{name}": path.read_bytes() for name, path in code_files(package)}
    return tar(files, {}, ())


def tar(
    files: Mapping[str, bytes], secrets: Mapping[str, bytes], folders: tuple[str, ...], *, compressed: bool = True
) -> bytes:
    """An archive of files, of files for their owner alone, and of empty folders."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for mode, group in ((OPEN, files), (SECRET, secrets)):
            for name, content in group.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode, entry.mtime = len(content), mode, int(time.time())
                archive.addfile(entry, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), 1) if compressed else buffer.getvalue()


def with_agents(record: RunRecord, agents: Mapping[int, str]) -> RunRecord:
    """The record with the addresses at which the agents were found to listen."""
    hosts = tuple(structs.replace(entry, agent=agents[number]) for number, entry in enumerate(record.hosts))
    return structs.replace(record, hosts=hosts)


def _recipe(spread: Spread) -> bytes:
    return yaml.safe_dump(spread.loaded.resolved, sort_keys=False, allow_unicode=True, encoding="utf-8")


def _overrides(spread: Spread) -> bytes:
    return "".join(f"{override}\n" for override in spread.loaded.overrides).encode()
