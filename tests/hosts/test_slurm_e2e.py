"""`launch --slurm` with a real Slurm of two nodes whose names only Slurm knows, in a folder whose name needs quotes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from distflow.launch.run.process_table import host_part, leftovers, sweep
from distflow.launch.run.record import RunRecord, read_record
from tests.e2e.runs import PACED, SMALL
from tests.hosts.slurm import Slurm, why_not
from tests.hosts.test_training_on_hosts import check_exactly_once
from tests.launch.conftest import await_that

STEPS = 5
LONG = 20_000


class Login:
    """Where a user of the cluster sits."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm = slurm
        self.runs_dir = folder / "my 100%j runs"
        self.run_dir = self.runs_dir / "quickstart"

    def launch(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "distflow.launch", "launch", "quickstart"]
        return self.slurm.call(*command, "--runs-dir", str(self.runs_dir), *arguments)

    def status(self) -> str:
        done = self.slurm.call(sys.executable, "-m", "distflow.launch", "status", "--runs-dir", str(self.runs_dir))
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def submit(self, *arguments: str) -> str:
        """Returns the number of the job."""
        done = self.launch(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        folder, job = done.stdout.splitlines()
        assert folder == str(self.run_dir)
        return job.partition(":")[0].removeprefix("job ")

    def record(self) -> RunRecord:
        return read_record(self.run_dir)

    def log(self, job: str) -> str:
        return (self.run_dir / "logs" / f"slurm-{job}.log").read_text()

    def steps(self) -> int:
        path = self.run_dir / "metrics" / "trainer-0.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def leftovers(self) -> list[str]:
        """Sockets and shared segments of the run on either node."""
        return [line for host in range(2) for line in leftovers(host_part(self.record(), host))]

    def checkpoints(self) -> list[int]:
        return sorted(
            int(path.parent.name.removeprefix("step_")) for path in self.run_dir.glob("checkpoints/step_*/COMMIT")
        )


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if (why := why_not()) is not None:
        pytest.skip(why)
    with Slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def login(slurm: Slurm, tmp_path: Path) -> Iterator[Login]:
    yield Login(slurm, tmp_path)
    slurm.call("scancel", "--user=root")
    slurm.await_idle()


def test_the_script_of_a_dry_run_is_one_that_sbatch_takes(login: Login, tmp_path: Path) -> None:
    settings = "nodes=2,time=5:00,cpus-per-task=2,export=NONE,signal=TERM@60,comment=two words"
    done = login.launch("--slurm", settings, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    script = tmp_path / "slurm.sh"
    script.write_text(done.stdout)
    tried = login.slurm.call("sbatch", "--test-only", str(script))
    assert tried.returncode == 0, tried.stderr
    assert "using 4 processors on nodes n[1-2] in partition all" in tried.stderr
    assert not login.runs_dir.exists()


@pytest.mark.parametrize(
    "setting, said",
    [
        ("nonsense=1", "unrecognized option '--nonsense=1'"),
        ("partition=none", "Invalid partition name specified"),
        ("time=soon", "Invalid --time specification"),
    ],
)
def test_what_sbatch_refuses_is_told_and_takes_no_name(login: Login, setting: str, said: str) -> None:
    done = login.launch("--run", "quickstart", "--slurm", f"nodes=2,{setting}")
    assert done.returncode == 2
    assert "--slurm: sbatch rejected the job: " in done.stderr
    assert said in done.stderr
    assert "correct the --slurm settings" in done.stderr
    assert not login.runs_dir.exists()


def test_status_says_where_a_job_stands_that_has_not_begun(login: Login) -> None:
    job = login.submit("--slurm", "nodes=2,begin=now+1hour")
    login.slurm.await_state(job, "PENDING")
    assert f"queued; job {job} is PENDING (BeginTime), submitted 0 min ago" in login.status()
    assert login.slurm.call("scancel", job).returncode == 0
    login.slurm.await_state(job, "CANCELLED")
    assert "not begun; " in login.status()
    assert "submit it again after `rm -r " in login.status()


def _tells(log: Path, text: str) -> bool:
    return log.exists() and text in log.read_text()


def test_a_sweep_is_an_array_of_jobs_each_with_its_own_run(login: Login) -> None:
    sweep = ["--sweep", "run.seed=0,1", "--run", "swept", "--slurm", "nodes=1"]
    done = login.launch(f"run.training_steps={STEPS}", "layout=colocated", *SMALL, *sweep)
    assert (done.returncode, done.stderr) == (0, "")
    folders = [login.runs_dir / f"swept-seed-{seed}" for seed in range(2)]
    *shown, job, table = done.stdout.splitlines()
    assert shown == [str(folder) for folder in folders]
    words = shlex.join(map(str, folders))
    assert table == f"an array of 2 runs: `distflow metrics {words}`"
    number = job.partition(":")[0].removeprefix("job ")
    for seed, folder in enumerate(folders):
        log = folder / "logs" / f"slurm-{number}_{seed}.log"
        await_that(partial(_tells, log, "done after"), "the end of a run", limit_s=120)
        record = read_record(folder)
        assert (record.state, record.exit_code) == ("done", 0), log.read_text()
        assert yaml.safe_load((folder / "recipe.yaml").read_text())["run"]["seed"] == seed
    again = login.launch(*sweep)
    assert again.returncode != 0, "names that are taken"
    assert sorted(login.runs_dir.iterdir()) == folders


def test_a_job_runs_on_two_nodes_to_its_end(login: Login) -> None:
    """Its script gets nothing of the submitter's environment, and srun gets the CPUs that sbatch was asked for."""
    job = login.submit(f"run.training_steps={STEPS}", *SMALL, "--slurm", "nodes=2,export=NONE,cpus-per-task=2")
    state = login.slurm.await_state(job, "COMPLETED", "FAILED", "CANCELLED")
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), login.log(job)
    assert f"step {STEPS}/{STEPS}" in login.log(job)
    record = login.record()
    assert (record.state, record.exit_code) == ("done", 0)
    assert {entry.host for entry in record.workers} == {0, 1}
    assert len({host.name for host in record.hosts}) == 2
    check_exactly_once([login.run_dir], STEPS)
    assert login.checkpoints() == [STEPS]
    assert (login.slurm.processes(), login.leftovers()) == ([], [])


def test_a_cancelled_job_saves_and_leaves_nothing(login: Login) -> None:
    """scancel sends SIGTERM to every process of the job at once, the workers included."""
    job = login.submit(f"run.training_steps={LONG}", *PACED, "--slurm", "nodes=2")
    await_steps(login, job, 3)
    assert any("trainer/0" in title for title in login.slurm.processes())
    assert login.slurm.call("scancel", job).returncode == 0
    login.slurm.await_idle()
    assert (login.slurm.processes(), login.leftovers()) == ([], [])
    assert login.slurm.job(job)["JobState"] == "CANCELLED"
    record = login.record()
    assert (record.state, record.exit_code, record.failure) == ("stopped", 130, None), login.log(job)
    assert login.checkpoints() == [login.steps()], login.log(job)
    assert "--resume" in login.log(job)


@pytest.mark.long
def test_a_job_that_is_put_back_into_the_queue_goes_on(login: Login) -> None:
    job = login.submit("run.training_steps=120", *PACED, "--slurm", "nodes=2")
    await_steps(login, job, 3)
    assert login.slurm.call("scontrol", "requeue", job).returncode == 0
    login.slurm.await_state(job, "PENDING")
    assert login.record().state == "stopped"
    (saved,) = login.checkpoints()
    assert 3 <= saved < 120, "it was over before it was put back: train longer"
    # Slurm would begin again two minutes later.
    assert login.slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now").returncode == 0
    login.slurm.await_state(job, "COMPLETED", "FAILED")
    record = login.record()
    assert (record.state, record.term) == ("done", 1), login.log(job)
    # One log tells of both.
    assert "stopped after" in login.log(job)
    assert f"resuming after training step {saved}" in login.log(job)
    check_exactly_once([login.run_dir], 120)


@pytest.mark.long
def test_with_no_kill_a_run_goes_on_without_a_node(login: Login) -> None:
    """By default Slurm puts the whole job back into the queue when one of its nodes fails."""
    job = login.submit("run.training_steps=120", *PACED, "--slurm", "nodes=2,no-kill=set")
    await_steps(login, job, 3)
    trainer = next(entry.host for entry in login.record().workers if entry.trains)
    lost = ["n2", "n1"][trainer]
    node = ["scontrol", "update", f"nodename={lost}"]
    assert login.slurm.call(*node, "state=down", "reason=test").returncode == 0
    assert login.steps() < 120, "it was over before the node was lost: train longer"
    try:
        login.slurm.await_state(job, "COMPLETED", "FAILED")
    finally:
        login.slurm.call(*node, "state=resume")
        # Slurm kills what runs there, as a failing machine would; nobody is left to clean up.
        sweep(login.run_dir, 1 - trainer)
    assert login.record().state == "done", login.log(job)
    assert f"Node failure on {lost}" in login.log(job)
    check_exactly_once([login.run_dir], 120)


def await_steps(login: Login, job: str, steps: int) -> None:
    def state() -> str:
        return login.slurm.job(job)["JobState"]

    login.slurm.await_state(job, "RUNNING")
    await_that(lambda: login.steps() >= steps or state() != "RUNNING", f"{steps} training steps")
    assert state() == "RUNNING", login.log(job)
