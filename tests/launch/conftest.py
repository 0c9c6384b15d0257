from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.comm.addresses import worker_address
from distflow.launch.deploy.stop_run import stop_run
from distflow.launch.run.folder import SUBFOLDERS
from distflow.launch.run.process_table import host_part, leftovers, processes_of
from distflow.launch.run.record import AGENT, RunRecord, WorkerEntry, read_record
from distflow.types import WorkerName
from tests.polling import eventually
from tests.warm_start import WarmProcess

FAKE = "distflow.testing.fake_worker:run_worker"
FAKE_PLUG_INS = (
    "layout.pools.trainer.backend=distflow.testing.fakes:FakeBackend",
    "layout.pools.rollout.engine=distflow.testing.fakes:FakeEngine",
)
"""Whose options are for the fake workers to read: the plan checks those of real ones."""
FAKE_WORKERS = ("--worker-entry", FAKE, *FAKE_PLUG_INS)
REPOSITORY = Path(__file__).resolve().parents[2]
WAIT_S = 30.0


def environment() -> dict[str, str]:
    """Child processes find the checkout, installed or not."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def await_that(condition: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
    eventually(condition, what, limit_s, 0.05)


class FakeRun:
    """A run folder with fake workers, and the agent that runs them."""

    def __init__(self, run_dir: Path, behaviour: Mapping[str, Mapping[str, Any]], **limits: Any) -> None:
        self.run_dir = run_dir
        for sub in SUBFOLDERS:
            (run_dir / sub).mkdir(parents=True)
        names = list(behaviour)
        roster = {name: worker_address(run_dir, name) for name in [*names, AGENT]}
        for name, fake in behaviour.items():
            document = {
                "worker": name,
                "run_dir": str(run_dir),
                "term": 0,
                "host": 0,
                "address": None,
                "roster": roster,
                "settings": {"engine_options": {"fake": dict(fake)}},
            }
            path = run_dir / "workers" / f"{WorkerName.parse(name).file_stem}.yaml"
            path.write_text(yaml.safe_dump(document))
        entries = tuple(WorkerEntry(name, name.startswith("trainer")) for name in names)
        limits = {"drain_s": 5.0, "restarts": 3, **limits}
        RunRecord(run_dir.name, str(run_dir), 100, entries, roster, started=time.time(), **limits).write()
        self.agent: WarmProcess | subprocess.Popen[bytes] | None = None

    def start(self, *, cold: bool = False) -> WarmProcess | subprocess.Popen[bytes]:
        """`cold`: see tests/warm_start."""
        module, arguments = "distflow.launch.agent.agent", [str(self.run_dir), "--entry", FAKE]
        with (self.run_dir / "logs" / "agent-0.log").open("ab") as log:
            if cold:
                command = [sys.executable, "-m", module, *arguments]
                self.agent = subprocess.Popen(
                    command, stdout=log, stderr=log, env=environment(), start_new_session=True
                )
            else:
                self.agent = WarmProcess(module, arguments, environment=environment(), output=log)
        return self.agent

    def run(self) -> int:
        return self.start().wait(timeout=WAIT_S)

    def record(self) -> RunRecord:
        return read_record(self.run_dir)

    def log(self, name: str) -> str:
        path = self.run_dir / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def pid(self, name: str) -> int:
        return self.record().pids[name].pid

    def await_up(self, *names: str, incarnation: int = 0) -> None:
        for name in names:
            stem = name.replace("/", "-")
            text = f"{name} incarnation {incarnation} is up"
            await_that(lambda stem=stem, text=text: text in self.log(stem), text)
        await_that(lambda: set(names) <= set(self.record().pids), "marks of the workers in run.json")

    def await_another(self, name: str, than: int) -> int:
        """Wait until another process of this name is in run.json; returns its number."""

        def known() -> bool:
            return name in self.record().pids and self.pid(name) != than

        await_that(known, f"another {name}")
        return self.pid(name)

    def await_over(self) -> RunRecord:
        """Wait until run.json says how the run ended, and the agent, whoever started it, has left."""
        part = host_part(self.record())
        await_that(lambda: self.record().over and not processes_of(part), "the end of the run and its agent")
        return self.record()

    def leftovers(self) -> list[str]:
        return leftovers(host_part(self.record()))


@pytest.fixture
def fake_run(tmp_path: Path) -> Iterator[Callable[..., FakeRun]]:
    made: list[FakeRun] = []

    def make(behaviour: Mapping[str, Mapping[str, Any]], **limits: Any) -> FakeRun:
        made.append(FakeRun(tmp_path / "runs" / f"fake-{len(made)}", behaviour, **limits))
        return made[-1]

    yield make
    for run in made:
        stop_run(run.run_dir, timeout_s=0.0)
        if run.agent is not None:
            run.agent.wait(timeout=WAIT_S)
