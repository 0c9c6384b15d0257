"""Runs as a user starts them: `distflow launch …` in a process of its own, watched from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.polling import Patience
from tests.warm_start import WarmProcess

WAIT_S = 180.0
PROMPTS, SAMPLES = 8, 8
SMALL = (f"batch.prompts={PROMPTS}",)
"""A quarter of the quickstart's batch, where it matters what becomes of samples and not how many there are."""
TEACHER = (
    "models.teacher={init: {model_type: qwen2, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, "
    "num_attention_heads: 2, num_key_value_heads: 2}, tokenizer: 'chars:0123456789=', dtype: float64}"
)
"""A fresh one, which nothing is to be learnt from."""
PACED = (*SMALL, f"flow.steps.update.with.loss={Path(__file__).with_name('paced_loss.py')}:loss")
"""And training steps last a while in which there is time for something to happen, and others have the processor."""


class Run:
    """One launched run, and what can be seen of it."""

    def __init__(
        self,
        runs_dir: Path,
        name: str,
        arguments: list[str],
        cwd: Path | None = None,
        *,
        cold: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: of the launch command, if not ours; only of a cold one."""
        self.name = name
        self.folder = runs_dir / name
        launch = ["launch", *arguments, "--run", name, "--runs-dir", str(runs_dir)]
        self.process: WarmProcess | subprocess.Popen[str]
        if cold:
            command = [sys.executable, "-m", "distflow.launch", *launch]
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=cwd,
                env=environment,
                start_new_session=True,
            )
        else:
            self.process = WarmProcess("distflow.launch", launch, cwd, merged=True)
        self.output = ""

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """The exit code of the launch command."""
        self.output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode

    def record(self) -> dict[str, Any]:
        """run.json."""
        return json.loads((self.folder / "run.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        """As `distflow metrics --json` gives them."""
        return json.loads(cli("metrics", self.name, "--json", "--runs-dir", str(self.folder.parent)).stdout)

    def dumps(self) -> list[dict[str, Any]]:
        """All lines of all rollout dumps."""
        files = sorted(self.folder.glob("rollouts/step_*/*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def steps_done(self) -> int:
        """Training steps that the trainer has finished, by its metrics file."""
        files = [*self.folder.glob("metrics/trainer-*.jsonl"), *self.folder.glob("metrics/worker-*.jsonl")]
        return sum(file.read_text().count("\n") for file in files)

    def saved(self) -> list[int]:
        """The training steps after which a whole checkpoint was saved, in order."""
        commits = self.folder.glob("checkpoints/step_*/COMMIT")
        return sorted(int(path.parent.name.removeprefix("step_")) for path in commits)

    def version(self) -> int:
        """Of the policy, as the training worker tells it: also while nothing can be written."""
        told = cli("status", self.name, "--json", "--runs-dir", str(self.folder.parent))
        rows = json.loads(told.stdout)["workers"] if told.returncode == 0 else []
        return max((row["version"] or 0 for row in rows), default=0)

    def processes(self) -> list[psutil.Process]:
        """Every process of the run, by title."""
        return [process for process, _ in titled_processes(self.name, self.folder)]

    def pids_of(self, worker: str) -> list[int]:
        """Every process that ends its title with this: one, or none, or two if one follows the other."""
        titled = titled_processes(self.name, self.folder)
        return [process.pid for process, title in titled if title.endswith(f" {worker}")]

    def pid_of(self, worker: str) -> int:
        """The process of a worker, by title."""
        for pid in self.pids_of(worker):
            return pid
        raise LookupError(f"no process of {worker}")

    def lives_of(self, worker: str) -> int:
        """How often a worker of this host was started."""
        return (self.folder / "logs" / "agent-0.log").read_text().count(f"starting {worker}, incarnation")

    def until(self, ready: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
        """Wait for something that can be seen from outside; fails at once when the run has ended without it."""
        patience = Patience(timeout_s)
        while not ready():
            # Without `launch` its workers may go on; and what is waited for may come with their end.
            if self.process.poll() is not None and not self.processes():
                if ready():
                    return
                code = self.wait()
                raise AssertionError(f"{what} did not happen; the run ended with {code}:\n{self.output}")
            assert not patience.over, f"{what} did not happen, and for {timeout_s} s nothing has worked on it"
            time.sleep(0.05)

    def leftovers(self) -> list[str]:
        """What a run must not leave behind: processes, shared segments, sockets."""
        from distflow.comm.addresses import run_tag, socket_dir

        found = [f"process {process.pid}" for process in self.processes()]
        found += [str(path) for path in Path("/dev/shm").glob(f"distflow-{run_tag(self.folder)}-*")]
        return found + ([str(socket_dir(self.folder))] if socket_dir(self.folder).exists() else [])

    def end(self) -> None:
        """Whatever the test left running, and what that leaves behind when it is killed."""
        from distflow.launch.run.process_table import sweep

        living = self.processes()
        for process in [*living, *([self.process] if self.process.poll() is None else [])]:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if living:
            psutil.wait_procs(living, timeout=10)
            sweep(self.folder)


def titled_processes(run: str, folder: Path) -> list[tuple[psutil.Process, str]]:
    """The processes of a run, each with its title, which is read once: the process may end right after it.

    Another run may have the same name, and be another test's; only those of this one write to its folder.
    """
    from distflow.launch.run.process_table import outputs_of

    found = []
    for process in psutil.process_iter():
        try:
            title = " ".join(process.cmdline())
            if not title.startswith(f"distflow {run} ") or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if any(folder in path.parents for path in outputs_of(process.pid)):
                found.append((process, title.rstrip()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def cli(*arguments: str, cwd: Path | None = None, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Another `distflow` command, to its end."""
    process = WarmProcess("distflow.launch", arguments, cwd)
    out, err = process.communicate(timeout_s)
    return subprocess.CompletedProcess(["distflow", *arguments], process.wait(), out, err)


def check_trained_once(run: Run, steps: int, prompts: int = PROMPTS) -> None:
    """As `check_positions`, of all that a run has dumped."""
    check_positions(run.dumps(), steps, prompts)


def check_positions(dumped: list[dict[str, Any]], steps: int, prompts: int) -> None:
    """Every position of so many training steps was trained, once, with all its samples."""
    groups = Counter((tuple(line["uid"]), line["sample"]) for line in dumped)
    assert set(groups.values()) == {1}
    assert {uid[2] for uid, _ in groups} == set(range(steps * prompts))
    assert len(groups) == steps * prompts * SAMPLES


Launch = Callable[..., Run]
