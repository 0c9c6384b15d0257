"""The processes of one host, where no whole run is needed to see it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

from distflow.launch.agent.restart_policy import RestartPolicy
from distflow.launch.agent.start import RestartLimit
from distflow.launch.agent.worker_group import WorkerGroup
from distflow.launch.run.record import RunRecord, WorkerEntry


def test_a_worker_that_nobody_knows_and_that_has_just_ended_does_not_end_the_agent(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    core = RestartPolicy([WorkerEntry("rollout/0", False)], RestartLimit(3, 60.0), 30.0, lambda name, how: None)
    household = WorkerGroup(RunRecord("run", str(tmp_path), 9, (), {}, 30.0, 3), 0, "none", core, lambda *said: None)
    told = [{"started": "rollout/9", "incarnation": 0, "pid": gone.pid}]
    household._fork_server = SimpleNamespace(read=lambda: told, open=True)
    household._hear_fork_server()
    assert core.lives.keys() == {"rollout/0"}
    assert household.pids == {}
