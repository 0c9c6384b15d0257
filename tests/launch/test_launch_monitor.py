"""What `launch` does about an agent that is gone. No processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from msgspec import structs

from distflow.cluster.processes import HostEntry
from distflow.comm.keys import key_file, make_keys, write_keys
from distflow.launch.deploy import launcher, monitor
from distflow.launch.deploy.launcher import LocalAgent
from distflow.launch.deploy.monitor import Monitor
from distflow.launch.observe.progress import PlainDisplay
from distflow.launch.run.record import RunRecord


def ended_process() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["true"])
    process.wait(timeout=60)
    return process


def test_an_agent_that_cannot_be_started_again_just_now_is_tried_again(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(launcher, "RETRY_S", 0.0)
    RunRecord("run", str(tmp_path), 9, (), {}, 30.0, 3, state="running").write()
    tries: list[str] = []

    def start_again() -> subprocess.Popen[bytes]:
        tries.append("tried")
        if len(tries) < 3:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return ended_process()

    agent = LocalAgent(tmp_path, ended_process, start_again, PlainDisplay())
    for _ in range(3):
        assert not agent.look().over
    assert len(tries) == 3
    assert "cannot be started now ([Errno 11] Resource temporarily unavailable)" in capsys.readouterr().out


def test_a_second_interrupt_after_all_agents_have_left_fetches_how_the_run_ended(tmp_path: Path, monkeypatch) -> None:
    write_keys(key_file(tmp_path), make_keys())
    hosts = (HostEntry("a", "127.0.0.1"),)
    record = RunRecord("run", str(tmp_path), 9, (), {}, 30.0, 3, state="running", hosts=hosts)
    ended = structs.replace(record, state="stopped", exit_code=130)
    monkeypatch.setattr(monitor, "record_by_ssh", lambda run_dir: ended)
    assert Monitor(tmp_path, PlainDisplay())._ask_to_stop(record, at_once=True)
    monkeypatch.undo()
    unreachable = Monitor(tmp_path, PlainDisplay())
    assert not unreachable._ask_to_stop(record, at_once=False)
    with pytest.raises(KeyboardInterrupt):
        unreachable._ask_to_stop(record, at_once=True)
