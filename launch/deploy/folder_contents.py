"""Fills a run folder and starts its host agent."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

import distflow
from distflow.comm.addresses import worker_address
from distflow.config.load import LoadedRecipe
from distflow.config.yamlfile import yaml_text
from distflow.errors import UserError
from distflow.flow.document import Place, worker_document
from distflow.flow.plan import Plan
from distflow.launch.agent.start import agent_command, start_agent
from distflow.launch.run.record import AGENT, RunRecord, WorkerEntry

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
    """A run folder that the disk refuses to fill, for people."""
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
