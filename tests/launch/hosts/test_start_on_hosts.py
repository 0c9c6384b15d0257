"""`launch --hosts` with a real probe and real run folders; ssh leads back to this machine, the agents are stand-ins."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from pathlib import Path

import pytest
import yaml

from distflow.launch.cli import run as distflow
from distflow.launch.deploy import launcher
from distflow.launch.deploy.fan_out import SshWays
from distflow.launch.deploy.hostfile import parse_hosts
from distflow.launch.deploy.launch_request import Options, recipe_of
from distflow.launch.deploy.launcher import launch_on
from distflow.launch.deploy.multi_host import StartedAgents
from distflow.launch.deploy.placement import place_workers
from distflow.launch.deploy.ssh import Transport
from distflow.launch.run.record import read_record
from distflow.runtime.checkpoint.commit import begins
from tests.interpreters import make_interpreter
from tests.launch.conftest import FAKE_WORKERS, await_that

SHARED = ("a slots=2", "b slots=1")


def own(folder, *lines):
    """Hosts with run folders of their own."""
    return [f"{line} dir={folder / line.split()[0]}" for line in lines]


def told(run_dir: Path, number: int) -> dict:
    return json.loads((run_dir / "agents" / f"{number}.json").read_text())


def documents(run_dir: Path) -> dict[str, dict]:
    return {path.stem: yaml.safe_load(path.read_text()) for path in (run_dir / "workers").glob("*.yaml")}


def test_agents_begin_on_hosts_that_share_the_run_folder(hosts):
    code, out, err = hosts.run(hosts.file(*SHARED), "--detach", "--set", "COLOUR=blue 'n green")
    assert (code, err) == (0, "")
    run_dir = hosts.runs_dir / "quickstart"
    assert out.splitlines()[0] == str(run_dir)
    record = read_record(run_dir)
    assert [(host.name, host.address) for host in record.hosts] == [("a", "127.0.0.2"), ("b", "127.0.0.3")]
    assert {entry.name: entry.host for entry in record.workers} == {"rollout/0": 0, "rollout/1": 1, "trainer/0": 0}
    first, second = told(run_dir, 0), told(run_dir, 1)
    assert first["agents"] == second["agents"]
    assert first["agents"]["1"].startswith("tcp://127.0.0.3:")
    assert (first["workers"], second["workers"]) == (["rollout/0", "trainer/0"], ["rollout/1"])
    assert second["environment"]["COLOUR"] == "blue 'n green"
    assert second["environment"]["OMP_NUM_THREADS"] == "1"
    found = documents(run_dir)["rollout-1"]
    assert (found["host"], found["address"]) == (1, "127.0.0.3")
    assert set(found["roster"]) == {"rollout/1", "agent/1"}
    assert stat.S_IMODE((run_dir / "keys" / "run.key").stat().st_mode) == 0o600
    assert not list(run_dir.glob(".nonce*"))


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("/none/bin/python", "No such file or directory — correct python= on the line of localhost"),
        ("{folder}/plain", "Permission denied — correct python="),
        ("{folder}", "Permission denied — correct python="),
        ("{folder}/empty", "Exec format error — correct python="),
        ("/bin/true", "the connection was lost: exit code 0, without any output — try by hand: /bin/true -c"),
    ],
)
def test_a_python_of_this_machine_that_does_not_start_is_named(tmp_path, capsys, python, why):
    (tmp_path / "plain").touch()
    (tmp_path / "empty").touch(mode=0o755)
    python = python.format(folder=tmp_path)
    (tmp_path / "hosts").write_text(f"localhost slots=3 python={python}\n")
    runs = tmp_path / "runs"
    assert distflow(["launch", "quickstart", "--hosts", str(tmp_path / "hosts"), "--runs-dir", str(runs)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path}/hosts:1: localhost — ")
    assert why in line
    assert not runs.exists()


def test_without_ssh_on_this_machine_every_other_host_is_refused_by_name(tmp_path, capsys, monkeypatch):
    (tmp_path / "hosts").write_text("localhost\nx slots=2\ny slots=2\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert distflow(["launch", "quickstart", "--hosts", str(tmp_path / "hosts"), "--runs-dir", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    why = "ssh cannot be started on this machine: No such file or directory — install the OpenSSH client"
    assert [why in line for line in lines] == [True, True]
    assert [line.split()[1] for line in lines] == ["x", "y"]


def test_hosts_with_folders_of_their_own_get_what_they_need(hosts, tmp_path):
    plugin = tmp_path / "own"
    plugin.mkdir()
    (plugin / "mine.py").write_text("def judge(sample):\n    return 1.0\n")
    reward = f"flow.steps.reward.with.function={plugin}/mine.py:judge"
    code, _, err = hosts.run(hosts.file(*own(tmp_path, *SHARED)), reward, "--detach")
    assert (code, err) == (0, "")
    there = tmp_path / "b" / "quickstart"
    assert set(documents(there)) == {"rollout-1"}
    found = documents(there)["rollout-1"]
    assert found["run_dir"] == str(there)
    copy = found["recipe"]["flow"]["steps"]["reward"]["with"]["function"]
    assert copy == f"{there}/plugins/0/mine.py:judge"
    assert (there / "plugins/0/mine.py").read_text() == (plugin / "mine.py").read_text()
    assert stat.S_IMODE((there / "keys" / "run.key").stat().st_mode) == 0o600
    assert read_record(there).run_dir == str(there)
    assert told(there, 1)["workers"] == ["rollout/1"]
    # The head keeps no agent's folder, so it writes down itself where they are.
    assert read_record(hosts.runs_dir / "quickstart").hosts[1].agent == told(there, 1)["agents"]["1"]


def test_the_head_stays_interrupts_and_fetches_how_the_run_ended(hosts, tmp_path):
    head = hosts.start(hosts.file(*own(tmp_path, *SHARED)))
    await_that(lambda: (tmp_path / "b/quickstart/agents/1.json").exists(), "mesh.begin on the second host")
    run = hosts.runs_dir / "quickstart"
    await_that(lambda: read_record(run).state == "running", "the head's record of the running run")
    head.send_signal(signal.SIGINT)
    out, err = head.communicate(timeout=60)
    assert head.returncode == 130, err
    assert "interrupted — draining and saving" in out
    assert read_record(run).state == "stopped"


def test_a_run_on_hosts_can_be_resumed(hosts, tmp_path):
    """With real agents and fake workers; each host has a folder of its own, which is there from the first time."""
    path = hosts.file(*own(tmp_path, *SHARED))
    path.write_text(path.read_text().replace(f"python={hosts.python}", f"python={hosts.warm}"))
    fake = [*FAKE_WORKERS, "run.training_steps=9", "--run", "mine"]
    for term, steps in enumerate(("{steps: 2}", "{first: 1, steps: 3}")):
        backend = f"layout.pools.trainer.backend_options={{fake: {steps}}}"
        code, out, err = hosts.run(path, backend, *fake, *["--resume"][:term])
        assert (code, err) == (0, ""), out
        assert [read_record(tmp_path / name / "mine").term for name in "ab"] == [term, term]
    assert "no complete checkpoint yet: restarting at training step 1" in out


def test_who_has_no_checkpoint_of_a_run_does_not_start_it_over_beside_those_of_its_hosts(hosts, tmp_path, capsys):
    path = hosts.file(*own(tmp_path, *SHARED))
    path.write_text(path.read_text().replace(f"python={hosts.python}", f"python={hosts.warm}"))
    fake = [*FAKE_WORKERS, "run.training_steps=9", "--run", "mine"]
    backend = "layout.pools.trainer.backend_options={fake: {steps: 2}}"
    assert hosts.run(path, backend, *fake)[0] == 0
    commit = tmp_path / "b" / "mine" / "checkpoints" / "step_000400" / "COMMIT"
    commit.parent.mkdir(parents=True)
    commit.touch()
    code, _, err = hosts.run(path, backend, *fake, "--resume")
    assert code == 2
    assert f"b — {tmp_path}/b/mine has the checkpoint of training step 400, and {hosts.runs_dir}/mine has none" in err
    assert read_record(tmp_path / "b" / "mine").term == 0
    commit.unlink()
    code, out, err = hosts.run(path, backend, *fake, "--resume")
    assert (code, err) == (0, ""), out
    assert begins(tmp_path / "b" / "mine" / "checkpoints") == {1: 0}, "what an earlier term saved later is void there"
    assert distflow(["launch", "--run", "mine", "--runs-dir", str(hosts.runs_dir), "--resume"]) == 2
    assert "have folders of their own — resume it on a, or with --hosts" in capsys.readouterr().err


def test_who_stops_reading_the_output_does_not_cost_agents_that_run_their_folder(tmp_path, monkeypatch):
    def echo(text: str) -> None:
        if text.startswith("note: "):
            raise BrokenPipeError

    options = Options(
        recipe="quickstart", overrides=(), name=None, runs_dir=tmp_path / "runs", resume=False, recipe_as_written=False,
        detach=True, dry_run=False, sweep=(), hosts=None, include=None, exclude=None, ssh_config=None,
        ssh_options="", forward=(), settings=(), ship_code=False, env=False, slurm=(), prepared=False,
        worker_entry=None,
    )  # fmt: skip
    loaded, plan = recipe_of(options, need_files=False)
    placing = place_workers(plan, parse_hosts("here slots=3", "hosts"))
    started = StartedAgents({}, ("here: its clock is off by +1.5 s",), {}, shares_folder=True)
    monkeypatch.setattr(launcher, "start_on_hosts", lambda request, ways, hear: started)
    monkeypatch.setattr(launcher.click, "echo", echo)
    with pytest.raises(BrokenPipeError):
        launch_on(options, loaded, plan, placing, SshWays({}, Transport()))
    assert (tmp_path / "runs" / "quickstart").is_dir()


def test_an_interrupt_just_after_the_agents_have_begun_is_meant_for_the_run(hosts, tmp_path):
    """The head closes its lines then: it must neither remove its folder nor leave agents that nobody watches."""
    ssh = hosts.folder / "bin/ssh"
    ssh.write_text(ssh.read_text().replace('exec sh -c "$3"', 'sh -c "$3"; sleep 2'))
    head = hosts.start(hosts.file(*own(tmp_path, *SHARED)))
    await_that(lambda: (tmp_path / "b/quickstart/agents/1.json").exists(), "mesh.begin on the second host")
    time.sleep(0.5)
    head.send_signal(signal.SIGINT)
    out, err = head.communicate(timeout=60)
    assert head.returncode == 130, err
    assert "interrupted — draining and saving" in out
    assert read_record(hosts.runs_dir / "quickstart").state == "stopped"


def other_code(folder: Path) -> str:
    other = folder / "other" / "distflow"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text('__version__ = "0.0.9"\n')
    return f"PYTHONPATH={other.parent}"


def test_the_code_can_be_shipped(hosts, tmp_path):
    plain = hosts.file(*own(tmp_path, *SHARED))
    code, _, err = hosts.run(plain, "--detach", "--set", other_code(tmp_path), "--ship-code")
    assert (code, err) == (0, "")
    there = tmp_path / "b" / "quickstart"
    assert (there / "code/distflow/launch/agent/agent.py").is_file()
    assert told(there, 1)["environment"]["PYTHONPATH"] == f"{there}/code:{tmp_path}/other"


def test_a_python_without_distflow_is_named_with_the_cure(hosts, tmp_path):
    bare = hosts._write("bin/bare", f'#!/bin/sh\nexec {hosts.python} -I -S "$@"\n')
    path = hosts.file(*SHARED)
    path.write_text(path.read_text().replace(f"python={hosts.python}", f"python={bare}"))
    code, _, err = hosts.run(path, "--set", "PYTHONPATH=/nowhere")
    assert code == 2
    assert "hosts:2: b — code: distflow is not installed for Python" in err
    assert "copy the code of this machine with --ship-code" in err
    assert "b — torch: missing there" in err
    nothing_left(hosts)


def test_the_python_of_a_pool_is_asked_on_the_hosts_of_its_workers(hosts, tmp_path):
    bare = make_interpreter(tmp_path / "v", packages=False)
    code, _, err = hosts.run(hosts.file(*SHARED), f"layout.pools.rollout.each.1.python={bare}")
    assert code == 2
    assert f"hosts:2: b — layout.pools.rollout.each.1.python: {bare} lacks packages that workers import: torch" in err
    assert "hosts:1: a" not in err
    nothing_left(hosts)
    python = make_interpreter(tmp_path / "w")
    code, _, err = hosts.run(hosts.file(*SHARED), f"layout.pools.rollout.python={python}", "--detach")
    assert (code, err) == (0, "")
    workers = read_record(hosts.runs_dir / "quickstart").workers
    assert [entry.python for entry in workers] == [str(python), str(python), ""]
    assert documents(hosts.runs_dir / "quickstart")["rollout-1"]["settings"]["python"] == str(python)


def nothing_left(hosts, *folders):
    assert not hosts.runs_dir.exists()
    assert [folder for folder in folders if folder.exists()] == []
    await_that(lambda: hosts.processes() == [], "the end of all that was started")


def test_all_problems_of_all_hosts_are_reported_at_once_and_nothing_is_left(hosts, tmp_path):
    lines = own(tmp_path, "a", "down", "alice@refused", "unknown")
    (tmp_path / "file").touch()
    code, _, err = hosts.run(hosts.file(*lines, f"full dir={tmp_path}/file"))
    assert code == 2
    assert "hosts:2: down — ssh: connect to host down port 22: Connection timed out — is the host up" in err
    assert "hosts:3: refused — alice@refused: Permission denied" in err
    assert "ssh-copy-id alice@refused" in err
    assert "hosts:4: unknown — Host key verification failed. — connect once by hand" in err
    assert f"hosts:5: full — run folder: {tmp_path}/file/quickstart: nothing can be created in {tmp_path}/file" in err
    assert "Traceback" not in err
    nothing_left(hosts, tmp_path / "a")


def test_another_version_of_the_code_is_refused(hosts, tmp_path):
    code, _, err = hosts.run(hosts.file(*SHARED), "--set", other_code(tmp_path))
    assert code == 2
    assert err.count("has the digest") == 2
    assert "(version 0.0.9, here 0.1.0)" in err
    nothing_left(hosts)


def test_an_address_that_the_host_does_not_have(hosts):
    code, _, err = hosts.run(hosts.file("a slots=2", "b address=203.0.113.7"))
    assert code == 2
    assert "hosts:2: b — it cannot listen on 203.0.113.7" in err
    nothing_left(hosts)


def test_an_agent_that_does_not_start_takes_the_others_with_it(hosts, tmp_path):
    code, _, err = hosts.run(hosts.file(*own(tmp_path, *SHARED)), env={"DISTFLOW_TEST_REFUSE": "1"})
    assert code == 2
    assert "hosts:2: b — its agent did not start: the stand-in agent refuses to start" in err
    nothing_left(hosts, tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_head_that_ends_before_the_run_has_begun_leaves_nothing_on_the_hosts(hosts, tmp_path, number):
    """The agents are slow to start, and the head dies while it waits for them."""
    slow = hosts._write("bin/slow", f'#!/bin/sh\ncase $1 in -m) exec sleep 50;; esac\nexec {hosts.python} "$@"\n')
    path = hosts.file(*own(tmp_path, *SHARED))
    path.write_text(path.read_text().replace(f"python={hosts.python}\n", f"python={slow}\n"))
    head = hosts.start(path)
    await_that(lambda: (tmp_path / "b/quickstart/logs/agent-1.log").exists(), "the start of the agents")
    os.kill(head.pid, number)
    _, err = head.communicate(timeout=60)
    await_that(lambda: not (tmp_path / "b").exists() and not (tmp_path / "a").exists(), "the hosts' tidying up")
    if number == signal.SIGINT:
        assert head.returncode == 130, err
        assert err.strip() == ""
        nothing_left(hosts)


def test_dry_run_shows_the_placement_and_contacts_nobody(hosts):
    code, out, err = hosts.run(hosts.file("down slots=2", "unknown"), "--dry-run")
    assert (code, err) == (0, "")
    assert "0  down  2 of 2 slots  rollout/0, trainer/0" in out
    assert not hosts.runs_dir.exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--forward", "NO_SUCH_THING"], "--forward NO_SUCH_THING: not set here"),
        (["--set", "X"], "--set X: expected NAME=VALUE"),
        (["--include", "c"], "there is no host 'c'"),
        (["layout.pools.rollout.count=9"], "10 workers, but the 2 hosts together have 3"),
    ],
)
def test_bad_arguments_are_refused_before_anybody_is_contacted(hosts, arguments, message):
    code, _, err = hosts.run(hosts.file(*SHARED), *arguments)
    assert code == 2
    assert message in err
    assert not hosts.runs_dir.exists()
