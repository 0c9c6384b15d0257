"""`distflow launch` as users run it: a real command, a real agent, fake workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from distflow.cluster.processes import HostEntry
from distflow.comm.addresses import run_tag
from distflow.flow.lineage import processor
from distflow.launch.deploy.stop_run import stop_run
from distflow.launch.run.process_table import SEGMENTS, host_part, leftovers
from distflow.launch.run.record import FILE_NAME, RunRecord, read_record
from tests.launch.checkpoints import leave_checkpoint
from tests.launch.conftest import FAKE_WORKERS, WAIT_S, await_that, environment
from tests.warm_start import WarmProcess

LONG = "{fake: {steps: 10000}}"


class Launcher:
    """Runs the command with one folder of runs."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir = runs_dir
        self.heads: list[WarmProcess | subprocess.Popen[str]] = []

    def start(
        self, *arguments: str, backend: str = LONG, rollout: str = "{}", before: Sequence[str] = ()
    ) -> WarmProcess | subprocess.Popen[str]:
        """`before`: a command that executes ours, in an interpreter of its own."""
        settings = [f"layout.pools.trainer.backend_options={backend}", f"layout.pools.rollout.engine_options={rollout}"]
        command = ["launch", "quickstart", *settings, "--runs-dir", str(self.runs_dir), *FAKE_WORKERS, *arguments]
        head: WarmProcess | subprocess.Popen[str]
        if before:
            pipe = subprocess.PIPE
            whole = [*before, sys.executable, "-m", "distflow.launch", *command]
            head = subprocess.Popen(
                whole, stdout=pipe, stderr=pipe, text=True, env=environment(), start_new_session=True
            )
        else:
            head = WarmProcess("distflow.launch", command, environment=environment())
        self.heads.append(head)
        return head

    def run(self, *arguments: str, **behaviour: str) -> tuple[int, str, str]:
        head = self.start(*arguments, **behaviour)
        out, err = head.communicate(timeout=WAIT_S)
        return head.returncode, out, err

    def record(self, name: str) -> RunRecord:
        return read_record(self.runs_dir / name)

    def await_step(self, name: str) -> None:
        path = self.runs_dir / name / "metrics" / "trainer-0.jsonl"
        head = self.heads[-1]
        await_that(lambda: path.exists() or head.poll() is not None, f"{path}")
        assert head.poll() is None, head.communicate()
        await_that(lambda: "rollout/0" in self.record(name).pids, "all workers in run.json")

    def nothing_left(self, name: str) -> bool:
        return leftovers(host_part(self.record(name))) == []


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path / "runs")
    yield made
    for head in made.heads:
        if head.poll() is None:
            head.kill()
        head.communicate()
    for path in made.runs_dir.glob(f"*/{FILE_NAME}"):
        stop_run(path.parent, timeout_s=0.0)


def test_a_run_from_its_first_line_to_its_last(launcher):
    code, out, err = launcher.run("run.training_steps=8", backend="{fake: {steps: 8}}")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == str(launcher.runs_dir / "quickstart")
    steps = [line for line in lines if line.startswith("step ")]
    assert steps
    assert lines[1].startswith(("starting", "importing", "the workers load", "step "))
    assert steps[-1].startswith("step 8/8  score 0.500")
    assert any(line.strip().startswith("distflow metrics quickstart") for line in lines)
    folder = Path(lines[0])
    assert (folder / "overrides.txt").read_text().splitlines()[-1] == "run.training_steps=8"
    assert "training_steps: 8" in (folder / "recipe.yaml").read_text()
    assert json.loads((folder / "env.json").read_text())["cpu_count"] == os.cpu_count()
    assert launcher.nothing_left("quickstart")


@pytest.mark.parametrize("shell", ['exec "$@" >&-', '"$@" | head -1; exit ${PIPESTATUS[0]}'], ids=["closed", "head"])
def test_a_launch_goes_on_whoever_reads_what_it_prints(launcher, shell):
    before = ["bash", "-c", shell, "bash"]
    code, _, err = launcher.run("run.training_steps=200", backend="{fake: {steps: 200, step_s: 0.02}}", before=before)
    assert (code, err) == (0, "")
    assert launcher.record("quickstart").state == "done"
    assert launcher.nothing_left("quickstart")


def test_a_worker_that_fails_gives_its_exit_code_and_the_users_frames_first(launcher):
    code, _, err = launcher.run(backend="{fake: {steps: 9, fail_at: 2, how: raise}}")
    assert code == 3
    lines = err.splitlines()
    assert lines[0] == "File bonus.py, line 3"
    assert "quickstart: trainer/0 failed (StepError): step 'bonus' raised" in lines
    assert lines[-2:] == [f"log: {launcher.runs_dir}/quickstart/logs/trainer-0.log", "exit code 3"]
    assert "Traceback (most recent call last)" not in err


@pytest.mark.parametrize("exit_code", [1, 2, 7])
def test_exit_codes_of_workers_are_the_runs(launcher, exit_code):
    code, _, err = launcher.run(backend=f"{{fake: {{steps: 9, fail_at: 1, how: 'exit:{exit_code}'}}}}")
    assert code == (3 if exit_code == 7 else exit_code)
    by_code = ": a plug-in or a library has ended its process, by os._exit for example" if exit_code == 7 else ""
    assert f"ended with exit code {exit_code} without giving a reason{by_code} — see its log" in err
    assert "trainer/0 | trainer/0 incarnation 0 is up" in err


def test_killing_the_head_does_not_matter(launcher):
    head = launcher.start(backend="{fake: {steps: 40, step_s: 0.05}}")
    launcher.await_step("quickstart")
    head.kill()
    await_that(lambda: launcher.record("quickstart").over, "the end of the run")
    assert launcher.record("quickstart").state == "done"
    await_that(lambda: launcher.nothing_left("quickstart"), "the agent's own end")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_everything_and_leaves_nothing(launcher, number):
    head = launcher.start()
    launcher.await_step("quickstart")
    head.send_signal(number)
    out, err = head.communicate(timeout=WAIT_S)
    assert head.returncode == 130, err
    assert "interrupted — draining and saving" in out
    assert "launch --resume --run quickstart" in out
    assert launcher.record("quickstart").state == "stopped"
    assert launcher.nothing_left("quickstart")


def test_the_second_interrupt_does_not_wait(launcher):
    deaf = "{fake: {steps: 10000, stubborn: true}}"
    head = launcher.start("limits.drain_s=600", backend=deaf, rollout=deaf)
    launcher.await_step("quickstart")
    head.send_signal(signal.SIGINT)
    await_that(lambda: "stopping" in agent_log(launcher), "the agent's word about the first interrupt")
    head.send_signal(signal.SIGINT)
    head.communicate(timeout=WAIT_S)
    assert head.returncode == 130
    assert launcher.nothing_left("quickstart")


def agent_log(launcher: Launcher) -> str:
    return (launcher.runs_dir / "quickstart" / "logs" / "agent-0.log").read_text()


def test_an_interrupt_without_an_agent_still_ends_everything(launcher):
    head = launcher.start()
    launcher.await_step("quickstart")
    os.kill(launcher.record("quickstart").pids["agent/0"].pid, signal.SIGKILL)
    head.send_signal(signal.SIGINT)
    head.communicate(timeout=WAIT_S)
    assert head.returncode == 130
    assert launcher.nothing_left("quickstart")


def test_the_head_starts_the_agent_again(launcher, tmp_path):
    """Killed at first sight, before it has a fork server; and later together with it: nobody else could."""
    trained = tmp_path / "trained"
    head = launcher.start(backend=f"{{fake: {{steps: 10000, step_s: 0.05, until: {trained}}}}}", before=["env"])

    def killed() -> bool:
        for child in psutil.Process(head.pid).children():
            # Another child is git, for an instant.
            with suppress(psutil.Error):
                if "distflow.launch.agent.agent" in child.cmdline():
                    child.kill()
                    return True
        return False

    await_that(killed, "the agent's process")
    launcher.await_step("quickstart")
    before = launcher.record("quickstart").pids
    for name in ("agent/0", "nursery/0"):
        os.kill(before[name].pid, signal.SIGKILL)
    taken = "the previous agent was killed; taking over its workers"
    await_that(lambda: taken in agent_log(launcher), "the third agent")
    trained.touch()
    out, _ = head.communicate(timeout=WAIT_S)
    assert head.returncode == 0
    assert out.count("the host agent was killed; restarting it") == 2
    assert f"starting {next(iter(before))}, incarnation 1" not in agent_log(launcher)
    assert launcher.nothing_left("quickstart")


def test_two_simultaneous_launches_are_two_runs(launcher):
    heads = [launcher.start(backend="{fake: {steps: 5}}") for _ in range(2)]
    firsts = [head.communicate(timeout=WAIT_S)[0].splitlines()[0] for head in heads]
    assert [head.returncode for head in heads] == [0, 0]
    assert {Path(first).name for first in firsts} == {"quickstart", "quickstart-2"}


def test_a_name_in_use_is_refused_and_nothing_is_started(launcher):
    assert launcher.run("--run", "mine", backend="{fake: {steps: 2}}")[0] == 0
    before = (launcher.runs_dir / "mine" / FILE_NAME).read_text()
    code, out, err = launcher.run("--run", "mine")
    assert (code, out) == (2, "")
    assert f"{launcher.runs_dir}/mine exists already" in err
    assert "--resume" in err
    assert (launcher.runs_dir / "mine" / FILE_NAME).read_text() == before


def test_a_running_run_cannot_be_resumed(launcher):
    launcher.start("--run", "mine")
    launcher.await_step("mine")
    code, _, err = launcher.run("--run", "mine", "--resume")
    assert code == 2
    assert "this run is still running" in err


def test_resume_opens_a_new_term_from_the_newest_whole_checkpoint(launcher):
    launcher.run("--run", "mine", backend="{fake: {steps: 4}}")
    folder = launcher.runs_dir / "mine"
    leave_checkpoint(folder, 2)
    (folder / "checkpoints" / "step_000003").mkdir()
    code, out, _ = launcher.run("--run", "mine", "--resume", backend="{fake: {first: 3, steps: 5}}")
    assert code == 0
    assert out.splitlines()[:3] == [
        str(folder),
        "ignored: step_000003: it has no COMMIT, so it was not finished",
        f"resuming after training step 2, from {folder}/checkpoints/step_000002",
    ]
    assert launcher.record("mine").term == 1
    text = (folder / "workers" / "trainer-0.yaml").read_text()
    assert "term: 1" in text
    assert f"resume: {folder}/checkpoints/step_000002" in text
    lines = [json.loads(line) for line in (folder / "metrics" / "trainer-0.jsonl").read_text().splitlines()]
    assert [(line["term"], line["step"]) for line in lines][-3:] == [(1, 3), (1, 4), (1, 5)]


def test_resume_does_not_throw_away_a_run_whose_checkpoints_lack_parts(launcher):
    """On hosts with folders of their own, say, of which one was lost before the first could fetch its part."""
    launcher.run("--run", "mine", backend="{fake: {steps: 4}}")
    folder = launcher.runs_dir / "mine"
    record = launcher.record("mine")
    hosts = (HostEntry("node0", "127.0.0.1"), HostEntry("node1", "127.0.0.2"))
    workers = tuple(structs.replace(entry, host=int(entry.trains)) for entry in record.workers)
    structs.replace(record, hosts=hosts, workers=workers).write()
    saved = [leave_checkpoint(folder, step) for step in (2, 3)]
    for one in saved:
        (one / "worker-trainer-0.json").unlink()
    (folder / "rollouts" / "step_000004").mkdir()
    before = sorted(path for path in folder.rglob("*") if path.parent.name != "hosts")
    code, out, err = launcher.run("--run", "mine", "--resume")
    assert (code, "begins again" in out) == (2, False)
    assert f"{saved[1]} lacks worker-trainer-0.json (written by trainer/0 on node1), and there is no older" in err
    assert f"copy them to {saved[1]}; to restart at training step 1 anyway, move step_000003, step_0000" in err
    assert sorted(path for path in folder.rglob("*") if path.parent.name != "hosts") == before
    (saved[1] / "worker-trainer-0.json").write_text("{")
    code, _, err = launcher.run("--run", "mine", "--resume")
    assert code == 2
    cut = "its part worker-trainer-0.json (written by trainer/0 on node1) has 1 bytes, COMMIT says"
    assert f"{saved[1]} is incomplete: {cut}" in err
    assert f"copy it to {saved[1]};" in err
    (saved[1] / "COMMIT").write_text("cut sh")
    (saved[0] / "worker-trainer-0.json").write_text("other bytes")
    code, _, err = launcher.run("--run", "mine", "--resume")
    assert (code, f"{saved[1]} is incomplete: its COMMIT cannot be read" in err) == (2, True)
    for one in saved:
        one.rename(folder / one.name)
    code, out, _ = launcher.run("--run", "mine", "--resume", backend="{fake: {steps: 2}}")
    assert (code, "restarting at training step 1" in out) == (0, True)


def test_a_large_checkpoint_is_said_to_be_checked(launcher):
    launcher.run("--run", "mine", backend="{fake: {steps: 2}}")
    part = leave_checkpoint(launcher.runs_dir / "mine", 2) / "worker-trainer-0.json"
    os.truncate(part, 3 << 30)
    code, out, err = launcher.run("--run", "mine", "--resume")
    assert (code, "is incomplete" in err) == (2, True)
    assert out.splitlines()[1] == "checking the checkpoint (3 GB)"


def test_resume_names_what_the_recipe_has_changed_and_refuses_what_it_must_not(launcher):
    launcher.run("--run", "mine", backend="{fake: {steps: 2}}")
    leave_checkpoint(launcher.runs_dir / "mine", 2)
    code, out, err = launcher.run("--run", "mine", "--resume", "run.seed=7", "data.with.digits=2")
    assert (code, "resumes after" in out) == (2, False)
    assert "step_000002 was written with another recipe: data.with.digits was 3, is 2; run.seed was 0, is 7" in err
    layout = ["layout.pools.trainer.count=2", "run.training_steps=50", "limits.drain_s=9"]
    loose = ["models.policy.optimizer.lr=0.5", "layout.max_staleness=1"]
    code, out, _ = launcher.run("--run", "mine", "--resume", *layout, *loose, backend="{fake: {first: 3, steps: 5}}")
    assert code == 0
    assert [line for line in out.splitlines() if "changed" in line] == [
        "changed since the checkpoint: layout.max_staleness was 0, is 1",
        "changed since the checkpoint: models.policy.optimizer.lr was 0.001, is 0.5",
        "changed since the checkpoint: run.training_steps was 600, is 50",
    ]


def test_resume_tells_of_data_that_has_changed(launcher, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1="}\n')
    data = f"data.source={rows}"
    launcher.run("--run", "mine", data, backend="{fake: {steps: 2}}")
    leave_checkpoint(launcher.runs_dir / "mine", 2, data)
    for text, told in ((rows.read_text(), 0), ('{"prompt": "2="}\n', 1)):
        rows.write_text(text)
        code, out, _ = launcher.run("--run", "mine", "--resume", data, backend="{fake: {first: 3, steps: 2}}")
        assert (code, out.count("changed since the checkpoint: what is in data.source, rows.jsonl, has")) == (0, told)


def test_resume_says_what_may_change_the_last_bits_of_a_run_that_promises_them(launcher):
    deterministic = "run.deterministic=true"
    launcher.run("--run", "mine", deterministic, backend="{fake: {steps: 2}}")
    there = {"processor": "Another One avx2", "training workers": 1, "threads of trainer": "1"}
    leave_checkpoint(launcher.runs_dir / "mine", 2, deterministic, arithmetic=there)
    threads = "layout.pools.trainer.threads=2"
    code, out, _ = launcher.run("--run", "mine", "--resume", deterministic, threads, backend="{fake: {first: 3}}")
    assert code == 0
    assert [line for line in out.splitlines() if "last bits" in line] == [
        f"run.deterministic: processor was Another One avx2, is {processor()}: from here on the last bits may differ",
        "run.deterministic: threads of trainer was 1, is 2: from here on the last bits may differ",
    ]


def test_resume_without_a_run_starts_nothing(launcher):
    code, _, err = launcher.run("--resume")
    assert code == 2
    assert "there is no run 'quickstart'" in err


def test_resume_of_a_run_that_is_done_is_checked_and_tidied_up_as_any_other(launcher):
    two = "run.training_steps=2"
    launcher.run(two, backend="{fake: {steps: 2}}")
    folder = launcher.runs_dir / "quickstart"
    leave_checkpoint(folder, 2, two)
    code, out, err = launcher.run("--resume", two, "run.seed=7")
    assert (code, out) == (2, f"{folder}\n")
    assert "step_000002 was written with another recipe: run.seed was 0, is 7" in err
    segment = SEGMENTS / f"distflow-{run_tag(folder)}-trainer-0-t0-0"
    segment.touch()
    record = launcher.record("quickstart")
    structs.replace(record, state="running", exit_code=None, ended=None).write()
    code, out, _ = launcher.run("--resume", "run.training_steps=1")
    assert code == 0
    assert "the checkpoint is of training step 2, and run.training_steps is 1: nothing is left to train" in out
    assert not segment.exists()
    assert launcher.record("quickstart").state == "done"
    code, out, _ = launcher.run("--resume", two)
    assert (code, out) == (0, f"{folder}\nall 2 training steps are done — raise run.training_steps to continue\n")
    for stop in (1, 2):
        code, out, _ = launcher.run("--resume", "run.training_steps=9", f"run.stop_after={stop}")
        told = f"the checkpoint is of training step 2, and run.stop_after is {stop}: nothing is left to train in this"
        assert (code, told in out, "raise run.stop_after, or run.stop_after=null" in out) == (0, True, True)
    (folder / "hf" / "draft_000002").mkdir(parents=True)
    code, out, _ = launcher.run("--resume", two, "run.hf_every=2")
    to = folder / "hf" / "step_000002"
    assert f"{to} was not finished: `distflow export {folder} --step 2 --to {to}` creates it" in out
    assert not list((folder / "hf").iterdir())


def test_a_full_disk_refuses_a_launch_and_leaves_the_name_free(launcher):
    full = ["sh", "-c", 'ulimit -f 0; exec "$@"', "full"]
    head = launcher.start("--run", "mine", before=full)
    _, err = head.communicate(timeout=WAIT_S)
    assert head.returncode == 2, err
    assert f"{launcher.runs_dir}/mine: cannot start the run: cannot write a file (File too large)" in err
    assert "Traceback" not in err
    assert not launcher.runs_dir.exists()
    launcher.run("--run", "mine", backend="{fake: {steps: 2}}")
    before = {path: path.read_bytes() for path in (launcher.runs_dir / "mine").glob("*.*")}
    head = launcher.start("--run", "mine", "--resume", before=full)
    _, err = head.communicate(timeout=WAIT_S)
    assert head.returncode == 2, err
    assert "Traceback" not in err
    assert {path: path.read_bytes() for path in (launcher.runs_dir / "mine").glob("*.*")} == before


def test_detach_returns_with_the_workers_running(launcher):
    code, out, _ = launcher.run("--detach")
    assert code == 0
    assert f"running; `distflow status {launcher.runs_dir / 'quickstart'}`" in out
    assert launcher.record("quickstart").state == "running"


def test_dry_run_shows_the_plan_and_takes_no_name(launcher):
    code, out, _ = launcher.run("--dry-run")
    assert code == 0
    assert "rollout/0" in out
    assert not launcher.runs_dir.exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run.trainig_steps=3"], "did you mean"),
        (["--run", "a/b"], "run name 'a/b'"),
        (["--hostz", "x"], "No such option"),
        (["--hosts", "x"], "--hosts x: cannot be read"),
        (["--include", "x"], "give --hosts"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(launcher, arguments, message):
    code, out, err = launcher.run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert not launcher.runs_dir.exists()
