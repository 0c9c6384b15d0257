"""The disk of a run fills up while it trains, and a worker is killed meanwhile: the run goes on and says so."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from tests.disks import SmallDisk
from tests.e2e.runs import PACED, Run, cli


def test_a_run_trains_through_a_full_disk_and_one_that_cannot_save_its_end_has_failed(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "disk", size_kb=48 << 10) as disk:
        settings = [*PACED, "run.training_steps=100", "run.save_every=20"]
        run = Run(disk.folder, f"full-{os.getpid()}", ["quickstart", *settings])
        try:
            run.until(lambda: run.steps_done() >= 10, "training")
            disk.fill()
            (rollout,) = run.pids_of("rollout/1")
            os.kill(rollout, signal.SIGKILL)
            run.until(lambda: run.pids_of("rollout/1") not in ([], [rollout]), "another life of rollout/1")
            before = run.version()
            run.until(lambda: run.version() > before + 5, "training on a full disk")
            disk.free()
            run.until(lambda: run.steps_done() > before + 5, "metrics after that")
            run.until(lambda: run.version() >= 75, "most of the training steps")
            disk.fill()
            assert run.wait() == 3
            assert f"disk full at {run.folder}: training goes on" in run.output
            for command in ("status", "stop"):
                told = cli(command, run.name, "--runs-dir", str(disk.folder)).stdout
                assert f"{run.folder}: failed" in told
            assert run.record()["state"] == "failed"
            assert re.search("checkpoint", run.record()["failure"]["message"])
            steps = [line["step"] for line in run.metrics()]
            assert steps[0] == 1
            assert any("disk/dropped_metrics" in line for line in run.metrics())
            assert "nanobind" not in (run.folder / "logs" / "agent-0.log").read_text()
        finally:
            run.end()


def test_a_run_begins_though_its_disk_fills_up_before_its_workers_have_begun(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "disk", size_kb=48 << 10) as disk:
        run = Run(disk.folder, f"early-{os.getpid()}", ["quickstart", "run.training_steps=100", *PACED])
        try:
            # `status` finds the run by its record, in which the agent notes what it has started.
            record = run.folder / "run.json"
            run.until(lambda: record.exists() and "nursery/0" in run.record()["pids"], "the fork server")
            disk.fill()
            run.until(lambda: run.version() >= 2, "training on a full disk")
            disk.free()
            assert run.wait() == 0, run.output
            assert run.metrics()[-1]["step"] == 100
        finally:
            run.end()
