"""The contents of a run's folders, on this machine and on its hosts; and the start of the agent on this machine.

A host with a run folder of its own gets the documents of its own workers. All folders have the same record.
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
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from msgspec import structs

import distflow
from distflow.cluster.processes import HostEntry, agent_name
from distflow.comm.addresses import worker_address
from distflow.comm.keys import key_file, make_keys, write_keys
from distflow.config.load import LoadedRecipe
from distflow.config.yamlfile import yaml_text
from distflow.errors import UserError
from distflow.flow.document import Place, document_text, worker_document
from distflow.flow.gpus import device_of_slot, first_gpus, gpus_on
from distflow.flow.plan import Plan, WorkerPlan
from distflow.launch.agent.host_facts import code_files
from distflow.launch.agent.start import agent_command, start_agent
from distflow.launch.deploy.hostfile import Host
from distflow.launch.deploy.placement import WorkerPlacement
from distflow.launch.run.folder import SUBFOLDERS, plugin_files, rewritten, shipped_files, shipped_names
from distflow.launch.run.record import FILE_NAME, RunRecord, WorkerEntry
from distflow.runtime.checkpoint.commit import step_of, term_file, term_text
from distflow.runtime.disk import replace_file

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
    """Where a run starts: at step 0 in term 0, or from a checkpoint."""

    term: int = 0
    checkpoint: Path | None = None


@dataclass(frozen=True, slots=True)
class CheckedHost:
    """What the preflight found out about one host."""

    run_dir: Path
    """The run folder there."""
    address: str
    """The address that workers on other hosts connect to."""
    same_folder: bool
    """Whether its run folder is that of the head, on a shared file system."""
    gpus: int
    missing_plugins: bool
    """Whether it lacks a plug-in file of the recipe or one that these import, or may have a different one."""
    missing_parts: tuple[Path, ...] = ()
    """Files of the checkpoint to resume from that it lacks, as paths on the head."""

    def entry(self, host: Host) -> HostEntry:
        """The host, as the agents know it."""
        return HostEntry(host.name, self.address, gpus=self.gpus, site=host.site)


@dataclass(frozen=True, slots=True)
class RunContents:
    """The contents of a run's folders: on this machine, and on its hosts if it has any."""

    loaded: LoadedRecipe
    plan: Plan
    beginning: Beginning
    head_dir: Path
    """The run folder on the launching machine."""
    placement: WorkerPlacement | None = None
    """None: all workers run on this machine."""
    checked: Mapping[int, CheckedHost] = field(default_factory=dict)
    """The hosts of `placement` by number, after the preflight."""
    gpus: int = 0
    """GPUs of this machine, if all workers run on it."""

    def record(self, host: int | None = None) -> RunRecord:
        """`run.json` for the folder of one host; None: for the head's."""
        limits = self.loaded.recipe.limits
        run_dir = self.head_dir if host is None else self.checked[host].run_dir
        hosts = self._hosts()
        # Ports on other hosts are not known yet; the agents fill them in.
        names = (*hosts, *map(agent_name, self.checked or [0]))
        roster = {name: "" if self.checked else worker_address(run_dir, name) for name in names}
        return RunRecord(
            name=run_dir.name,
            run_dir=str(run_dir),
            training_steps=self.loaded.recipe.run.training_steps,
            workers=tuple(
                WorkerEntry(
                    str(w.name),
                    "train" in w.roles,
                    w.threads,
                    hosts[str(w.name)],
                    w.python or "",
                    generates=self.plan.primary in w.generates,
                    gpus=gpus_on(w, self._device(w)),
                )
                for w in self.plan.workers
            ),
            roster=roster,
            drain_s=limits.drain_s,
            restarts=limits.restarts,
            restart_window_s=limits.restart_window_s,
            connect_s=limits.connect_s,
            host_silence_s=limits.host_silence_s,
            no_progress_s=limits.no_progress_s,
            hosts=tuple(self.checked[n].entry(self.host(n)) for n in sorted(self.checked)),
            gpus=self.gpus,
            launch_term=self.beginning.term,
            term=self.beginning.term,
            on_failure=self.loaded.recipe.layout.on_failure,
            started=time.time(),
        )

    def host(self, number: int) -> Host:
        """A host of the run, as described in the hosts file."""
        assert self.placement is not None, "a run on this machine has no hosts"
        return self.placement.hosts[number]

    def _hosts(self) -> dict[str, int]:
        """Host number of every worker, by name."""
        names = [str(worker.name) for worker in self.plan.workers]
        return {name: 0 if self.placement is None else self.placement.places[name].host for name in names}

    def _device(self, worker: WorkerPlan) -> str:
        """The device of a worker: on this machine alone it finds the GPU itself, by the same rule."""
        if self.placement is not None:
            place = self.placement.places[str(worker.name)]
            return device_of_slot(worker, place.slot, self.checked[place.host].gpus if self.checked else 0)
        if worker.device not in ("auto", "cuda") or not self.gpus:
            return worker.device
        return f"cuda:{first_gpus(self.plan.workers, self.gpus)[str(worker.name)]}"

    def documents(self, host: int = 0) -> dict[str, bytes]:
        """The documents of one host's workers, by path in its run folder."""
        place, checkpoint = self._place(host), self.beginning.checkpoint
        resume = None if checkpoint is None else str(place.run_dir / checkpoint.relative_to(self.head_dir))
        moved = self._moved_plugins(host)
        files = {}
        for worker in self.plan.workers:
            if str(worker.name) not in place.roster:
                continue
            document = worker_document(
                self.plan,
                worker.name,
                place,
                recipe_source=str(self.loaded.source),
                resume=resume,
                term=self.beginning.term,
            )
            if self.placement is not None:
                document["settings"]["device"] = self._device(worker)
            files[f"workers/{worker.name.file_stem}.yaml"] = document_text(rewritten(document, moved)).encode()
        return files

    def _place(self, host: int) -> Place:
        """The settings shared by the documents of a host's workers."""
        hosts = self._hosts()
        names = [*(name for name, number in hosts.items() if number == host), agent_name(host)]
        run_dir = self.checked[host].run_dir if self.checked else self.head_dir
        roster = {name: worker_address(run_dir, name, host) for name in names}
        if not self.checked:
            return Place(run_dir, roster)
        elsewhere = {name: number for name, number in hosts.items() if number}
        sites = {str(number): site for number in self.checked if (site := self.host(number).site)}
        return Place(run_dir, roster, host, self.checked[host].address, elsewhere, sites)

    def _moved_plugins(self, host: int) -> dict[Path, Path]:
        """Paths on a host of the plug-in files that were copied there, by their path on this machine."""
        if not self.checked or not self.checked[host].missing_plugins:
            return {}
        copies = shipped_names(plugin_files(self.loaded.resolved))
        return {file: self.checked[host].run_dir / name for file, name in copies.items()}

    def plugin_copies(self) -> dict[str, bytes]:
        """The recipe's plug-in files and what they import beside them, by path in the run folder."""
        return {name: file.read_bytes() for name, file in shipped_files(plugin_files(self.loaded.resolved)).items()}

    def description(self) -> dict[str, bytes]:
        """Recipe, overrides and environment of the launch, by path in the run folder."""
        return {
            "recipe.yaml": yaml_text(self.loaded.resolved).encode(),
            "overrides.txt": "".join(f"{override}\n" for override in self.loaded.overrides).encode(),
            "env.json": (json.dumps(environment(self.loaded.source), indent=1) + "\n").encode(),
        }

    def _term_file(self) -> dict[str, bytes]:
        """What makes later checkpoints of earlier terms void on a host, by path in its run folder."""
        term, checkpoint = self.beginning.term, self.beginning.checkpoint
        step = 0 if checkpoint is None else step_of(checkpoint)
        return {f"checkpoints/{term_file(term)}": term_text(term, step, self.plan.members).encode()} if term else {}

    def bundle(self, host: int) -> bytes:
        """A tar of everything needed by a host that does not share the run folder."""
        files = {
            **description_in(self.head_dir),
            FILE_NAME: self.record(host).as_text().encode(),
            **self.documents(host),
            **self.plugin_copies(),
            **self._term_file(),
        }
        return tar(files, key_of(self.head_dir), SUBFOLDERS)


def fill(contents: RunContents) -> RunRecord:
    """Write the run folder of this machine: recipe.yaml, overrides.txt, env.json, workers/*.yaml and run.json.

    With hosts, also the run's key, the documents of all workers, and plug-in files for hosts that share the folder.
    Returns the record. Raises UserError when a file cannot be written.
    """
    try:
        return _fill(contents)
    except OSError as error:
        raise unwritable(contents.head_dir, error) from error


def _fill(contents: RunContents) -> RunRecord:
    run_dir = contents.head_dir
    _write_all(run_dir, contents.description())
    if contents.checked and not key_file(run_dir).exists():
        write_keys(key_file(run_dir), make_keys())
    if any(host.same_folder for host in contents.checked.values()):
        _write_all(run_dir, contents.plugin_copies())
    for stale in (run_dir / "workers").iterdir():
        stale.unlink()
    for host in contents.checked or [0]:
        _write_all(run_dir, contents.documents(host))
    record = contents.record()
    record.write()
    return record


def unwritable(run_dir: Path, error: OSError) -> UserError:
    """The UserError for a run folder that cannot be written."""
    return UserError(
        f"{run_dir}: cannot start the run: cannot write {error.filename or 'a file'} ({error.strerror}) — "
        "free some space, or choose another folder with --runs-dir"
    )


def _write_all(run_dir: Path, files: Mapping[str, bytes]) -> None:
    """Replace each file atomically: a full disk must not damage those of an earlier launch."""
    for name, content in files.items():
        path = run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)


def start_first_agent(run_dir: Path, lock: int, entry: str | None) -> subprocess.Popen[bytes]:
    """Start the agent of this machine, which takes over `lock`. Raises UserError if the disk is full or read-only."""
    try:
        agent = start_agent(run_dir, agent_command(run_dir, entry=entry), lock=lock)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    os.close(lock)
    return agent


def environment(recipe: Path) -> dict[str, Any]:
    """Versions, commit and command needed to repeat a run of the recipe file `recipe`."""
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
    """Output of git for the checkout of this code; None if this is not a checkout or git is missing."""
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


def description_in(run_dir: Path) -> dict[str, bytes]:
    """What `RunContents.description` has written into a run folder, by path in it."""
    return {name: (run_dir / name).read_bytes() for name in ("recipe.yaml", "overrides.txt", "env.json")}


def key_of(run_dir: Path) -> dict[str, bytes]:
    """The run's key, by path in the run folder."""
    key = key_file(run_dir)
    return {str(key.relative_to(run_dir)): key.read_bytes()}


def code_bundle(package: Path) -> bytes:
    """A tar of the distflow package installed on this machine."""
    files = {f"{CODE}/distflow/{name}": path.read_bytes() for name, path in code_files(package)}
    return tar(files, {}, ())


def tar(files: Mapping[str, bytes], secrets: Mapping[str, bytes], folders: tuple[str, ...]) -> bytes:
    """A compressed archive of `files`, of `secrets` (mode 0600) and of empty `folders`."""
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
    return gzip.compress(buffer.getvalue(), 1)


def with_agents(record: RunRecord, agents: Mapping[int, str]) -> RunRecord:
    """The record, with the addresses at which the agents listen."""
    hosts = tuple(structs.replace(entry, agent=agents[number]) for number, entry in enumerate(record.hosts))
    return structs.replace(
        record, hosts=hosts, roster={**record.roster, **{agent_name(n): a for n, a in agents.items()}}
    )
