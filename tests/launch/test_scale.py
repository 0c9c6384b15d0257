"""Workers join and leave while the run goes on; the workers are fakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.config.yamlfile import yaml_text
from distflow.flow.recipe_check import plan_recipe
from distflow.launch.cli import run as distflow
from distflow.launch.deploy.folder_contents import Beginning, RunContents, fill, start_first_agent
from distflow.launch.deploy.stop_run import stop_run
from distflow.launch.run.folder import claim, create_run_folder
from distflow.launch.run.process_table import host_part, leftovers
from distflow.launch.run.record import read_record
from tests.launch.conftest import FAKE, FAKE_PLUG_INS, WAIT_S, await_that
from tests.launch.many import Hosts

FAKES = (
    *FAKE_PLUG_INS,
    "layout.pools.trainer.backend_options={fake: {steps: 100000}}",
    "layout.pools.rollout.engine_options={fake: {}}",
    "layout.pools.rollout.count=1",
)


class OneHost:
    """A planned run of fake workers: one that generates, one that trains."""

    def __init__(self, runs_dir: Path) -> None:
        loaded, plan = plan_recipe("quickstart", FAKES)
        self.run_dir = create_run_folder(runs_dir, "elastic", explicit=True)
        fill(RunContents(loaded, plan, Beginning(), self.run_dir))
        self.agent = start_first_agent(self.run_dir, claim(self.run_dir), FAKE)
        self.await_log("trainer/0", "trainer/0 incarnation 0 is up")
        self.await_log("rollout/0", "rollout/0 incarnation 0 is up")

    def await_log(self, name: str, text: str) -> None:
        await_that(lambda: text in self.log(name), f"{text!r} in the log of {name}")

    def log(self, name: str) -> str:
        path = self.run_dir / "logs" / f"{name.replace('/', '-')}.log"
        return path.read_text() if path.exists() else ""

    def workers(self) -> list[str]:
        return [entry.name for entry in read_record(self.run_dir).workers]

    def scale(self, *arguments: str) -> int:
        return distflow(["scale", "elastic", *arguments, "--runs-dir", str(self.run_dir.parent)])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[OneHost]:
    made = OneHost(tmp_path / "runs")
    yield made
    stop_run(made.run_dir, timeout_s=0.0)
    made.agent.wait(timeout=WAIT_S)


def test_workers_join_and_leave_and_nobody_else_is_disturbed(run: OneHost, capsys):
    before = dict(read_record(run.run_dir).pids)
    assert run.scale("rollout=3") == 0
    assert "rollout: 1 → 3; joining: rollout/1, rollout/2" in capsys.readouterr().out
    for name in ("rollout/1", "rollout/2"):
        run.await_log(name, f"{name} incarnation 0 is up")
        for other in ("trainer/0", "rollout/0"):
            run.await_log(other, f"knows {name} ipc")
    assert run.workers() == ["rollout/0", "rollout/1", "rollout/2", "trainer/0"]
    document = yaml.safe_load((run.run_dir / "workers" / "rollout-2.yaml").read_text())
    assert document["recipe"]["layout"]["pools"]["rollout"]["count"] == 3
    assert set(document["roster"]) >= {"agent/0", "trainer/0", "rollout/0", "rollout/2"}
    assert run.scale("rollout=1") == 0
    assert (
        "rollout: 3 → 1; leaving when they have handed back their work: rollout/1, rollout/2" in capsys.readouterr().out
    )
    await_that(lambda: run.workers() == ["rollout/0", "trainer/0"], "run.json without the workers that left")
    for name in ("rollout/1", "rollout/2"):
        run.await_log("trainer/0", f'lost {{"worker": "{name}", "incarnation": 0, "reason": "exit code 0"}}')
        run.await_log("agent/0", f"{name} ended with exit code 0")
        assert "incarnation 1" not in run.log(name)
    after = read_record(run.run_dir).pids
    assert {name: after[name] for name in before} == before


def test_a_resume_goes_on_with_the_number_that_was_scaled_to(run: OneHost):
    assert run.scale("rollout=3") == 0
    await_that(lambda: resumed(run) == 3, "3 in the recipe of the run")
    assert run.scale("rollout=2") == 0
    await_that(lambda: resumed(run) == 2, "2 in the recipe of the run")


def test_a_number_that_the_recipe_does_not_allow_is_not_kept(run: OneHost):
    recipe = run.run_dir / "recipe.yaml"
    written = yaml.safe_load(recipe.read_text())
    written["layout"]["pools"]["rollout"] |= {"count": 2, "each": {"1": {"slots": 3}}}
    recipe.write_text(yaml.safe_dump(written))
    assert run.scale("rollout=2") == 0
    run.await_log("rollout/1", "rollout/1 incarnation 0 is up")
    assert run.scale("rollout=1") == 0
    run.await_log("agent/0", "--resume will go on with the former number of workers of rollout: ")
    assert resumed(run) == 2


def resumed(run: OneHost) -> int:
    """The number of generating workers that `--resume` would begin with."""
    _, plan = plan_recipe(str(run.run_dir / "recipe.yaml"), (), resolved=True)
    return plan.pool("rollout").count


def test_a_worker_that_comes_back_is_a_new_life_of_it(run: OneHost):
    assert run.scale("rollout=2") == 0
    run.await_log("rollout/1", "rollout/1 incarnation 0 is up")
    assert run.scale("rollout=1") == 0
    # At once: it may still be leaving.
    assert run.scale("rollout=2") == 0
    run.await_log("rollout/1", "rollout/1 incarnation 1 is up")
    await_that(lambda: run.workers() == ["rollout/0", "rollout/1", "trainer/0"], "run.json with both")


def test_a_worker_that_joined_is_restarted_like_any_other_and_told_the_roster(run: OneHost):
    assert run.scale("rollout=2") == 0
    run.await_log("rollout/1", "rollout/1 incarnation 0 is up")
    await_that(lambda: "rollout/1" in read_record(run.run_dir).pids, "its mark")
    os.kill(read_record(run.run_dir).pids["rollout/0"].pid, signal.SIGKILL)
    run.await_log("rollout/0", "rollout/0 incarnation 1 is up")
    # Its document was written when there was no rollout/1.
    await_that(lambda: run.log("rollout/0").count("knows rollout/1 ipc") == 2, "the roster after the restart")


REFUSED = {
    "trainer=9": "8 ledgers are too few for 9 training workers",
    "trainer=0": "trainer=0; expected 1 to 4096 workers",
    "reward=2": "there is no pool 'reward'; this run has rollout, trainer",
    "rollout=0": "rollout=0; expected 1 to 4096 workers",
    "rollout=-1": "rollout=-1; expected 1 to 4096 workers",
    "rollout=many": "expected POOL=N or POOL=auto, for example rollout=3",
    "rollout": "expected POOL=N or POOL=auto, for example rollout=3",
}


def test_what_cannot_be_scaled_is_refused_with_the_reason(run: OneHost, capsys):
    for change, message in REFUSED.items():
        assert run.scale(change) == 2, change
        err = capsys.readouterr().err
        assert message in err
        assert "Traceback" not in err
    assert run.workers() == ["rollout/0", "trainer/0"]


def test_it_is_said_either_how_many_or_who_leaves(run: OneHost, capsys):
    assert run.scale() == 2
    assert "expected POOL=N or POOL=auto, for example rollout=3, or --leave HOST" in capsys.readouterr().err
    assert run.scale("rollout=2", "--leave", "gpu-1") == 2
    assert "rollout=2 and --leave are both given — give only one of them at a time" in capsys.readouterr().err
    assert run.scale("--leave", "gpu-1") == 2
    assert "--leave gpu-1: elastic is on this machine alone" in capsys.readouterr().err


def test_a_run_is_scaled_by_itself_by_one_process_at_a_time(run: OneHost, capsys):
    assert run.scale("trainer=auto") == 2
    assert "pool 'trainer' trains, and auto is for pools that do not — give it a number" in capsys.readouterr().err
    where = ["--runs-dir", str(run.run_dir.parent)]
    command = [sys.executable, "-m", "distflow.launch", "scale", "elastic", "rollout=auto", *where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        try:
            assert "elastic: rollout has 1 workers, and will have 1 to 2" in first.stdout.readline()
            assert run.scale("rollout=auto") == 2
            assert f"another `distflow scale {run.run_dir} …=auto` is at work" in capsys.readouterr().err
            first.send_signal(signal.SIGINT)
            assert first.wait(WAIT_S) == 130
            assert "no longer scaling; elastic continues with the workers that it has" in first.stdout.read()
        finally:
            first.kill()
    # The lock went with the process. A run that somebody else stops is no error of this command.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second:
        assert second.stdout is not None
        try:
            assert "rollout has 1 workers" in second.stdout.readline()
            stop_run(run.run_dir, timeout_s=0.0)
            assert second.wait(WAIT_S) == 0
            assert "elastic is over (stopped): nothing is left to scale" in second.stdout.read()
        finally:
            second.kill()


def test_the_same_number_changes_nothing(run: OneHost, capsys):
    assert run.scale("rollout=1") == 0
    assert "rollout has 1 workers already" in capsys.readouterr().out


def test_a_run_that_ends_or_is_over_is_not_scaled(run: OneHost, capsys):
    stop_run(run.run_dir, timeout_s=20.0)
    assert run.scale("rollout=2") == 2
    assert "elastic is over (stopped)" in capsys.readouterr().err
    assert leftovers(host_part(read_record(run.run_dir))) == []


def test_hosts_cannot_come_to_a_run_that_listens_on_its_own_machine_alone(run: OneHost, tmp_path: Path, capsys):
    (tmp_path / "hosts").write_text("elsewhere slots=2\n")
    assert run.scale("rollout=2", "--hosts", str(tmp_path / "hosts")) == 2
    assert "continue with launch --resume --hosts FILE" in capsys.readouterr().err
    assert run.scale("rollout=2", "--ship-code") == 2
    assert "--ship-code: only for hosts that join" in capsys.readouterr().err
    assert run.workers() == ["rollout/0", "trainer/0"]


# -- on two hosts

TWO = {"rollout/0": (0, {}), "trainer/0": (1, {"steps": 100_000})}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    made: list[Hosts] = []

    def make(*overrides: str, shared: bool) -> Hosts:
        run = Hosts(tmp_path, TWO, shared=shared)
        made.append(run)
        loaded, _ = plan_recipe("quickstart", [*FAKES, *overrides])
        for folder in run.folders:
            (folder / "recipe.yaml").write_text(yaml_text(loaded.resolved))
        run.start()
        run.await_up()
        return run

    yield make
    for run in made:
        run.end()


def scale(run: Hosts, host: int, count: int, only: tuple[int, ...] = ()) -> dict[str, Any]:
    answer = run.ask(host, "scale", {"pool": "rollout", "count": count, "slots": dict.fromkeys(map(str, only), 99)})
    assert answer is not None
    assert answer.pop("trains", False) is False
    assert {*answer.pop("joining", ()), *answer.pop("leaving", ())} == answer.get("hosts", {}).keys()
    return answer


@pytest.mark.parametrize("shared", [True, False], ids=["one folder", "a folder each"])
def test_any_agent_may_be_asked_and_new_workers_go_where_there_are_fewest(hosts, shared: bool):
    run = hosts(shared=shared)
    assert scale(run, 1, 3) == {"was": 1, "now": 3, "hosts": {"rollout/1": "node1", "rollout/2": "node0"}}
    run.workers = {**run.workers, "rollout/1": (1, {}), "rollout/2": (0, {})}
    for name in ("rollout/1", "rollout/2"):
        run.await_log(name, f"{name} incarnation 0 is up")
    run.await_log("trainer/0", "knows rollout/2 tcp")
    run.await_log("rollout/0", "knows rollout/1 tcp")
    for host in (0, 1):
        names = ["rollout/0", "rollout/1", "rollout/2", "trainer/0"]
        await_that(lambda h=host, n=names: [w.name for w in run.record(h).workers] == n, "run.json with all workers")
    assert scale(run, 0, 1) == {"was": 3, "now": 1, "hosts": {"rollout/1": "node1", "rollout/2": "node0"}}
    run.await_log("agent/1", "rollout/1 ended with exit code 0")
    run.await_log("agent/0", "rollout/2 ended with exit code 0")
    run.await_log("rollout/0", 'lost {"worker": "rollout/1", "incarnation": 0')
    for host in (0, 1):
        await_that(lambda h=host: len(run.record(h).workers) == 2, "run.json without them")
    run.ask(0, "stop", {"reason": "test"})
    assert run.exit_codes() == [130, 130]
    assert run.leftovers() == []


def test_the_workers_of_a_host_that_leaves_are_replaced_by_others_elsewhere(hosts):
    run = hosts(shared=False)
    body = {"pool": "rollout", "count": 1, "slots": {}, "leaving": [0]}
    answer = run.ask(1, "scale", body)
    assert (answer["joining"], answer["leaving"]) == (["rollout/1"], ["rollout/0"])
    run.workers = {**run.workers, "rollout/1": (1, {})}
    run.await_log("rollout/1", "rollout/1 incarnation 0 is up")
    run.await_log("agent/0", "rollout/0 ended with exit code 0")
    for host in (0, 1):
        names = ["rollout/1", "trainer/0"]
        await_that(lambda h=host, n=names: [w.name for w in run.record(h).workers] == n, "run.json without it")
    assert scale(run, 0, 2)["hosts"] == {"rollout/0": "node0"}, "where it had been before"


def test_new_workers_go_only_where_their_pool_is_pinned_to(hosts):
    run = hosts("layout.pools.rollout.hosts=[*0]", shared=True)
    assert scale(run, 1, 3)["hosts"] == {"rollout/1": "node0", "rollout/2": "node0"}
    error = scale(run, 0, 4, only=(1,))["error"]
    assert error == ("scale: layout.pools.rollout.hosts allows only *0, none of node1 — add one with --hosts")


def test_new_workers_can_be_kept_to_some_hosts_and_the_last_decision_counts(hosts):
    run = hosts(shared=True)
    assert scale(run, 0, 3, only=(1,))["hosts"] == {"rollout/1": "node1", "rollout/2": "node1"}
    run.workers = {**run.workers, "rollout/1": (1, {}), "rollout/2": (1, {})}
    run.await_log("rollout/2", "rollout/2 incarnation 0 is up")
    assert scale(run, 1, 2)["hosts"] == {"rollout/2": "node1"}
    run.await_log("agent/1", "rollout/2 ended with exit code 0")
    assert scale(run, 0, 2) == {"was": 2, "now": 2, "hosts": {}}
    assert scale(run, 0, 4, only=(7,))["error"].startswith("scale: none of the hosts [7] answers")
