"""The commands that look at a run on two hosts, from either of them, with a run folder for both and one for each."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distflow.comm.keys import key_file, read_keys
from distflow.errors import ProtocolError
from distflow.launch.cli import run as distflow
from distflow.launch.observe import file_client
from distflow.launch.observe.file_client import FileClient
from distflow.launch.observe.file_server import LIST_FILES, READ_BYTES, FileServer
from distflow.launch.observe.file_sync import FileSync
from tests.launch.conftest import await_that
from tests.launch.many import Hosts

LONG = {"steps": 10_000}
TWO = {"rollout/0": (0, {}), "trainer/0": (0, LONG), "rollout/1": (1, {}), "trainer/1": (1, LONG)}
both = pytest.mark.parametrize("shared", [True, False], ids=["one folder", "a folder each"])


@pytest.fixture
def going(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    made: list[Hosts] = []

    def make(shared: bool, workers=TWO) -> Hosts:
        run = Hosts(tmp_path, workers, shared=shared)
        made.append(run)
        run.start()
        run.await_up()
        for host in (0, 1):
            await_that(lambda host=host: all(run.record(host).roster.values()), "all addresses in run.json")
        return run

    yield make
    for run in made:
        run.end()


def at(run: Hosts, host: int) -> list[str]:
    return ["--runs-dir", str(run.folders[host].parent)]


@both
@pytest.mark.parametrize("host", [0, 1])
def test_status_asks_all_workers_from_any_host(going, capsys, shared: bool, host: int):
    run = going(shared)
    assert distflow(["status", "--json", *at(run, host)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["silent_hosts"] == []
    rows = {row["name"]: (row["state"], row["host"], row["pid"]) for row in told["workers"]}
    assert rows == {name: ("running", f"node{where}", run.pid(name)) for name, (where, _) in TWO.items()}


def test_status_says_which_host_is_silent_and_asks_its_workers_all_the_same(going, capsys):
    run = going(True)
    run.kill_for_good(1)
    os.kill(run.pid("rollout/1"), signal.SIGSTOP)
    await_that(lambda: run.record().silent == (1,), "the silence in run.json")
    import distflow.launch.commands.status as status

    status.ANSWER_S, before = 0.5, status.ANSWER_S
    try:
        distflow(["status", "--json", *at(run, 0)])
        told = json.loads(capsys.readouterr().out)
        distflow(["status", *at(run, 0)])
        assert "node1: no message from its agent for 3 s or more" in capsys.readouterr().out
    finally:
        status.ANSWER_S = before
        os.kill(run.pid("rollout/1"), signal.SIGCONT)
    assert told["silent_hosts"] == ["node1"]
    states = {row["name"]: row["state"] for row in told["workers"]}
    assert states == {"rollout/0": "running", "trainer/0": "running", "rollout/1": "no answer", "trainer/1": "running"}


@both
@pytest.mark.parametrize("host", [0, 1])
def test_logs_and_metrics_of_all_hosts_can_be_read_on_any(going, capsys, shared: bool, host: int):
    run = going(shared)
    for name in ("trainer/0", "trainer/1"):
        path = run.folders[TWO[name][0]] / "metrics" / f"{name.replace('/', '-')}.jsonl"
        await_that(lambda path=path: path.exists() and path.read_text().count("\n") > 3, f"metrics of {name}")
    assert distflow(["logs", *at(run, host)]) == 0
    out = capsys.readouterr().out
    for name in (*TWO, "agent/0", "agent/1"):
        assert f"{name} | " in out
    assert distflow(["metrics", "--json", *at(run, host)]) == 0
    assert json.loads(capsys.readouterr().out)[2]["step"] == 3
    lines = {path.stem for path in (run.folders[host] / "metrics").iterdir()}
    assert lines == {"trainer-0", "trainer-1"}


@pytest.mark.parametrize("host", [0, 1])
def test_following_logs_brings_what_is_written_elsewhere(going, capsys, host: int):
    run = going(False)
    other = "rollout/1" if host == 0 else "rollout/0"
    follow = threading.Thread(target=distflow, args=(["logs", "-f", "-n", "0", *at(run, host)],), daemon=True)
    follow.start()
    copy = run.folders[host] / "logs" / f"{other.replace('/', '-')}.log"
    await_that(lambda: copy.exists() and "is up" in copy.read_text(), "the copy")
    with (run.folders[1 - host] / "logs" / f"{other.replace('/', '-')}.log").open("a") as file:
        file.write("something new\n")
    await_that(lambda: copy.exists() and "something new" in copy.read_text(), "the line in the copy")
    run.ask(0, "stop", {"reason": "test"})
    assert run.exit_codes() == [130, 130]
    follow.join(20)
    assert not follow.is_alive()
    assert f"{other} | something new" in capsys.readouterr().out


@both
@pytest.mark.parametrize("host", [0, 1])
def test_stop_works_on_any_host(going, capsys, shared: bool, host: int):
    run = going(shared)
    assert distflow(["stop", *at(run, host)]) == 0
    assert "nothing of it is left running" in capsys.readouterr().out
    assert run.exit_codes() == [130, 130]
    assert run.record(host).state == "stopped"
    assert run.leftovers() == []


def test_the_first_host_keeps_all_files_of_a_run_that_is_over(going):
    run = going(False)
    dump = run.folders[1] / "rollouts" / "step_000003" / "trainer-1.jsonl"
    dump.parent.mkdir()
    dump.write_bytes(os.urandom(3 * READ_BYTES + 17))
    (run.folders[1] / "prompts").mkdir()
    (run.folders[1] / "prompts" / "trainer-1.jsonl").write_text("1\n")
    for step, commit in ((2, True), (4, True), (5, False)):
        folder = run.folders[1] / "checkpoints" / f"step_{step:06d}"
        folder.mkdir()
        (folder / "model-trainer-1.safetensors").write_bytes(bytes([step]) * 1000)
        if commit:
            (folder / "COMMIT").write_text(f'{{"step": {step}}}')
    run.ask(1, "stop", {"reason": "test"})
    assert run.exit_codes() == [130, 130]
    copy = run.folders[0] / "rollouts" / "step_000003" / "trainer-1.jsonl"
    assert copy.read_bytes() == dump.read_bytes()
    for name in ("logs/rollout-1.log", "logs/trainer-1.log", "metrics/trainer-1.jsonl", "prompts/trainer-1.jsonl"):
        assert (run.folders[0] / name).read_bytes() == (run.folders[1] / name).read_bytes()
    kept = sorted(str(path.relative_to(run.folders[0])) for path in run.folders[0].glob("checkpoints/*/*"))
    assert kept == ["checkpoints/step_000004/COMMIT", "checkpoints/step_000004/model-trainer-1.safetensors"]


def test_only_what_is_new_is_fetched_and_what_was_written_anew_is_fetched_anew(going):
    run = going(False)
    source, copy = (run.folders[host] / "rollouts" / "step_000001" / "trainer-1.jsonl" for host in (1, 0))
    source.parent.mkdir()
    mirror = FileSync(run.record(), [1], 20.0)
    for content in (b"one\n" * 2000, b"one\n" * 3000, b"two\n" * 1000, b"ten\n" * 1000):
        source.write_bytes(content)
        mirror.fetch(["rollouts"])
        assert copy.read_bytes() == content
    assert mirror.faults == {}


def test_a_file_comes_whole_though_its_agent_stands_still_on_the_way(going, monkeypatch, tmp_path):
    """What has come is gone on from, and an answer that is late is not taken for the next one."""
    monkeypatch.setattr(file_client, "ANSWER_S", 0.3)
    run = going(False)
    source, copy = run.folders[1] / "logs" / "rollout-1.log.1", tmp_path / "copy"
    source.write_bytes(os.urandom(9 << 20))
    agent = run.agents[1].pid
    stopped: list[int] = []

    def note(have: int) -> None:
        if not stopped and have > 3 << 20:
            stopped.append(have)
            os.kill(agent, signal.SIGSTOP)
            threading.Timer(1.5, os.kill, (agent, signal.SIGCONT)).start()

    record = run.record()
    with FileClient(record.hosts[1].agent, read_keys(key_file(record.path)), 20.0) as client:
        client.copy("logs/rollout-1.log.1", copy, note=note)
    assert stopped
    assert copy.read_bytes() == source.read_bytes()


def test_a_host_that_does_not_answer_is_named(going, capsys, monkeypatch):
    import distflow.launch.observe.file_client as mirror

    monkeypatch.setattr(mirror, "ANSWER_S", 0.5)
    run = going(False)
    os.kill(run.agents[1].pid, signal.SIGSTOP)
    assert distflow(["metrics", *at(run, 0)]) == 0
    os.kill(run.agents[1].pid, signal.SIGCONT)
    assert "node1 does not answer: its metrics may be missing" in capsys.readouterr().err


# -- what is served


@pytest.fixture
def served(tmp_path: Path) -> FileServer:
    for path in ("keys/run.key", "logs/rollout-1.log", "logs/rollout-11.log", "metrics/rollout-1.jsonl", "run.json"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(path)
    (tmp_path / "logs" / "link").symlink_to(tmp_path / "keys")
    return FileServer(tmp_path, lambda: ["rollout/1"])


@pytest.mark.parametrize(
    "path",
    [
        "keys/run.key",
        "run.json",
        "logs/../keys/run.key",
        "/etc/passwd",
        "logs",
        "",
        "logs/link/run.key",
        "../x",
        "logs/.",
    ],
)
def test_nothing_outside_the_served_folders_can_be_read(served: FileServer, path: str):
    with pytest.raises(ProtocolError, match="is not a file below logs, metrics"):
        served.read({"path": path, "offset": 0, "size": 10})


def test_a_file_is_read_in_parts_of_bounded_size(served: FileServer):
    assert served.read({"path": "logs/rollout-1.log", "offset": 5, "size": 4}) == {"data": b"roll"}
    for offset, size in ((-1, 5), (1 << 64, 5), (0, 0), (0, READ_BYTES + 1)):
        with pytest.raises(ProtocolError, match="expected 0 or more, and 1 to"):
            served.read({"path": "logs/rollout-1.log", "offset": offset, "size": size})


def test_only_files_of_this_host_are_listed_page_by_page(served: FileServer, tmp_path: Path):
    listed = served.list({"folder": "logs", "after": ""})
    assert [(entry[0], entry[1]) for entry in listed["files"]] == [("logs/rollout-1.log", 18)]
    for number in range(LIST_FILES + 1):
        (tmp_path / "metrics" / f"rollout-1.{number:04d}").touch()
    first = served.list({"folder": "metrics", "after": ""})
    assert (len(first["files"]), first["more"]) == (LIST_FILES, True)
    last = served.list({"folder": "metrics", "after": first["files"][-1][0]})
    assert (len(last["files"]), last["more"]) == (2, False)
    with pytest.raises(ProtocolError, match="folder 'keys' is not served"):
        served.list({"folder": "keys", "after": ""})
