"""The commands that look at a run, against a run of fake workers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from distflow.cluster.processes import Failure
from distflow.config.load import load_recipe
from distflow.launch.cli import run as distflow
from distflow.launch.commands.export import best_step
from distflow.launch.commands.metrics import COUNTED
from distflow.launch.observe.run_summary import root_cause, summary
from distflow.launch.run.process_table import host_part, processes_of
from distflow.launch.run.record import RunRecord, WorkerEntry
from distflow.types import VALIDATION
from tests.launch.checkpoints import leave_checkpoint
from tests.launch.conftest import WAIT_S, await_that, environment

LONG = {"steps": 10_000}


@pytest.fixture
def going(fake_run):
    run = fake_run({"rollout/0": {}, "rollout/1": {}, "trainer/0": LONG})
    run.start()
    run.await_up("rollout/0", "rollout/1", "trainer/0")
    await_that(lambda: (run.run_dir / "metrics" / "trainer-0.jsonl").exists(), "the first training step")
    return run


def runs_dir(run) -> list[str]:
    return ["--runs-dir", str(run.run_dir.parent)]


def test_status_asks_the_workers_themselves(going, capsys):
    assert distflow(["status", "fake-0", "--json", *runs_dir(going)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["workers"]] == ["rollout/0", "rollout/1", "trainer/0"]
    for row in told["workers"]:
        assert (row["pid"], row["host"], row["state"]) == (going.pid(row["name"]), socket.gethostname(), "running")
    assert told["workers"][2]["step"] > 0
    assert distflow(["status", *runs_dir(going)]) == 0
    assert "rollout/1" in capsys.readouterr().out


def test_status_says_which_weights_go_between_hosts(going, capsys, monkeypatch):
    from distflow.launch.observe import run_client

    rows = run_client.worker_rows
    sent = {"chunks": 4, "sent_bytes": 4_000_000, "gone": 0, "refused": 0, "readers": 2}
    read = {**sent, "sent_bytes": 0, "readers": 0, "fetched_bytes": 3_000_000}
    told = {"trainer/0": [sent, sent], "rollout/0": [read], "rollout/1": [{**read, "read_bytes": 2_000_000}]}
    monkeypatch.setattr(
        run_client, "worker_rows", lambda *args: [{**row, "weights": told[row["name"]]} for row in rows(*args)]
    )
    assert distflow(["status", "fake-0", *runs_dir(going)]) == 0
    line = (
        "weights between hosts: rollout/0 has fetched 3.0 MB, rollout/1 has fetched 3.0 MB, 2.0 MB of that by NIXL, "
        "trainer/0 has sent 8.0 MB (4 connected)"
    )
    assert line in " ".join(capsys.readouterr().out.split())


def test_status_says_who_is_silent_and_who_has_ended(going, capsys, monkeypatch):
    import distflow.launch.commands.status as status

    monkeypatch.setattr(status, "ANSWER_S", 0.3)
    pid = going.pid("rollout/0")
    os.kill(pid, 19)
    try:
        distflow(["status", "--json", *runs_dir(going)])
        assert json.loads(capsys.readouterr().out)["workers"][0]["state"] == "no answer"
    finally:
        os.kill(pid, 18)
    distflow(["stop", *runs_dir(going)])
    capsys.readouterr()
    distflow(["status", "--json", *runs_dir(going)])
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == "stopped"
    assert {row["state"] for row in told["workers"]} == {"ended"}


def test_status_says_that_nothing_is_alive_of_a_run_that_was_killed(going, capsys):
    distflow(["status", "--json", *runs_dir(going)])
    assert json.loads(capsys.readouterr().out)["lost"] is False
    # First who could start others, then the others.
    for name in sorted(going.record().pids):
        os.kill(going.pid(name), signal.SIGKILL)
    going.agent.wait()
    await_that(lambda: not processes_of(host_part(going.record())), "the end of all its processes")
    assert distflow(["status", *runs_dir(going)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "fake-0: failed, " in lines[0]
    assert lines[1].startswith("cause: the host agent ended before the run did")
    assert lines[3] == (
        "none of its processes is alive — resume it with `distflow launch --resume --run fake-0 --runs-dir "
        f"{going.run_dir.parent}`, or clean up with `distflow stop {going.run_dir}`"
    )
    distflow(["status", "--json", *runs_dir(going)])
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["lost"]) == ("failed", True)
    distflow(["stop", *runs_dir(going)])
    assert "fake-0: failed; nothing of it is left running" in capsys.readouterr().out
    assert going.record().failure.message.startswith("the host agent ended before the run did")
    distflow(["status", "--json", *runs_dir(going)])
    assert json.loads(capsys.readouterr().out)["lost"] is False


def test_a_run_without_its_agent_and_fork_server_is_told_of(going, capsys):
    assert distflow(["status", *runs_dir(going)]) == 0
    assert "no host agent" not in capsys.readouterr().out
    for name in ("nursery/0", "agent/0"):
        os.kill(going.pid(name), signal.SIGKILL)
    going.agent.wait()
    told = (
        "no host agent of fake-0 answers: nothing restarts its workers — end it with `distflow stop "
        f"{going.run_dir}`, then continue with `distflow launch --resume --run fake-0 --runs-dir "
        f"{going.run_dir.parent}`"
    )
    assert distflow(["status", *runs_dir(going)]) == 0
    assert told in capsys.readouterr().out.splitlines()
    assert distflow(["scale", "fake-0", "rollout=1", *runs_dir(going)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("scale: no host agent of fake-0 answers, so no workers can be started — ")
    assert "Traceback" not in err
    command = [sys.executable, "-u", "-m", "distflow.launch", "watch", *runs_dir(going)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as watcher:
        limit = threading.Timer(WAIT_S, watcher.kill)
        limit.start()
        assert told in (line.strip() for line in watcher.stdout), "watch ended, or was ended, without that line"
        limit.cancel()
        watcher.kill()
    assert distflow(["stop", *runs_dir(going)]) == 0
    assert not processes_of(host_part(going.record()))


def test_status_of_a_run_that_has_ended_says_how_far_it_came_and_the_root_cause(fake_run, capsys):
    run = fake_run({"trainer/0": {"steps": 12}})
    run.run()
    assert distflow(["status", *runs_dir(run)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"{run.run_dir}: done after \d+ s, 12 of 100 training steps, score 0.500 \(mean of the last 10\)", line
    )
    run = fake_run({"trainer/0": {"steps": 12, "fail_at": 5, "how": "raise"}})
    run.run()
    assert distflow(["status", *runs_dir(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(rf"{run.run_dir}: failed after \d+ s, 5 of 100 training steps, score 0.500", lines[0])
    assert lines[1:] == [
        "cause: ZeroDivisionError",
        "in: step 'bonus' raised",
        f"log: {run.run_dir}/logs/trainer-0.log",
    ]
    assert distflow(["status", "--json", *runs_dir(run)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["score"], told["cause"]) == (5, 0.5, "ZeroDivisionError")
    assert 0 < told["seconds"] < 60


def test_status_of_a_folder_that_was_moved_is_of_that_folder(fake_run, capsys):
    run = fake_run({"trainer/0": {"steps": 12}})
    run.run()
    moved = run.run_dir.rename(run.run_dir.with_name("moved"))
    assert distflow(["status", "moved", *runs_dir(run)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    moved.rename(run.run_dir)
    assert re.match(rf"{moved}: done after \d+ s, 12 of 100 training steps, score 0.500", line)


def test_the_root_cause_is_what_was_raised_first():
    chained = (
        'Traceback (most recent call last):\n  File "mine.py", line 3, in load\n    open(path)\n'
        "FileNotFoundError: no such file: 'x'\n"
        "\nThe above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "ours.py", line 9, in begin\n    raise WorkerFailed()\n'
        "distflow.errors.WorkerFailed: the data source cannot be opened\n"
    )
    message = "the data source cannot be opened"
    assert root_cause(Failure("trainer/0", 3, "WorkerFailed", message, chained)) == (
        "FileNotFoundError: no such file: 'x'",
        message,
    )
    alone = 'Traceback\n  File "a.py", line 1\ndistflow.errors.UserError: a step must write a value\n'
    assert (
        root_cause(Failure("t/0", 2, "UserError", "a step must write a value", alone))[0] == "a step must write a value"
    )
    assert root_cause(Failure("t/0", 3, "WorkerFailed", "killed")) == ("killed", "")


def test_stop_says_for_whom_it_waits(fake_run, capsys):
    waits = [{"name": "the last checkpoint", "peers": ["trainer/1"], "seconds": 3.0}]
    run = fake_run({"rollout/0": {}, "trainer/0": {**LONG, "stubborn": True, "waits": waits}}, drain_s=600.0)
    run.start()
    run.await_up("rollout/0", "trainer/0")
    assert distflow(["stop", "--timeout", "4", *runs_dir(run)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("waiting for")]
    assert re.fullmatch(r"waiting for trainer/0 \(running, waits for the last checkpoint\), [23] s at most", lines[0])


def test_stop_lets_the_workers_leave_in_order_and_leaves_nothing(going, capsys):
    pids = {going.pid(name) for name in going.record().pids}
    assert distflow(["stop", "fake-0", *runs_dir(going)]) == 0
    out = capsys.readouterr().out
    assert all(f"process {pid} (distflow fake-0 " in out for pid in pids)
    assert "nothing of it is left" in out
    assert going.record().state == "stopped"
    assert going.leftovers() == []
    assert distflow(["stop", "fake-0", *runs_dir(going)]) == 0
    assert "(nothing was)" in capsys.readouterr().out


def test_stop_ends_a_run_whose_workers_and_agent_do_not_listen(fake_run, capsys):
    deaf = {"stubborn": True}
    run = fake_run({"rollout/0": {**deaf, "helper": True}, "trainer/0": {**LONG, **deaf}}, drain_s=600.0)
    agent = run.start()
    run.await_up("rollout/0", "trainer/0")
    os.kill(agent.pid, 19)
    assert distflow(["stop", "--timeout", "0.2", *runs_dir(run)]) == 0
    assert "sleep 600" in capsys.readouterr().out
    assert run.leftovers() == []
    assert (run.record().state, run.record().exit_code) == ("stopped", 130)


def test_stop_reaches_the_workers_when_the_agent_is_gone(going):
    going.agent.kill()
    going.agent.wait(10)
    assert distflow(["stop", *runs_dir(going)]) == 0
    assert going.leftovers() == []
    assert going.record().state == "stopped"


def test_logs_are_prefixed_and_can_be_narrowed(going, capsys):
    assert distflow(["logs", *runs_dir(going)]) == 0
    out = capsys.readouterr().out
    assert "rollout/0 | rollout/0 incarnation 0 is up" in out
    assert "agent/0 | " in out
    assert distflow(["logs", "--worker", "trainer/0", "-n", "1", *runs_dir(going)]) == 0
    assert capsys.readouterr().out == "trainer/0 | trainer/0 incarnation 0 is up\n"
    assert distflow(["logs", "--worker", "critic/0", *runs_dir(going)]) == 2
    assert "--worker critic/0: " in capsys.readouterr().err


def test_following_logs_ends_with_the_run(fake_run, capsys):
    run = fake_run({"trainer/0": {"steps": 10}})
    run.start()
    await_that(lambda: run.log("agent-0") != "", "the agent's log")
    assert distflow(["logs", "-f", "-n", "0", *runs_dir(run)]) == 0
    assert "agent/0 | " in capsys.readouterr().out
    assert run.record().state == "done"


def test_metrics_are_a_list_with_one_object_a_step(fake_run, capsys):
    run = fake_run({"trainer/0": {"steps": 12}})
    run.run()
    assert distflow(["metrics", "--json", *runs_dir(run)]) == 0
    steps = json.loads(capsys.readouterr().out)
    assert steps == [
        {"step": step, "term": 0, "critic/score/mean": 0.5, "timing_s/step": 0.25} for step in range(1, 13)
    ]
    assert distflow(["metrics", "fake-0", "--last", "3", *runs_dir(run)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()][-1] == ["12", "0.500", "0.250"]


def test_metrics_can_be_narrowed_to_some_and_written_as_csv(fake_run, capsys):
    run = fake_run({"trainer/0": {"steps": 2}})
    run.run()
    (run.run_dir / "metrics" / "trainer-0.jsonl").open("a").write('{"step": 2, "term": 0, "actor/loss": null}\n')
    where = ["metrics", *runs_dir(run)]
    assert distflow([*where, "--csv"]) == 0
    lines = ["step,actor/loss,critic/score/mean,term,timing_s/step", "1,,0.5,0,0.25", "2,,0.5,0,0.25"]
    assert capsys.readouterr().out.splitlines() == lines
    assert distflow([*where, "--csv", "--keys", "timing_s/step,critic/*", "--last", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == ["step,timing_s/step,critic/score/mean", "2,0.25,0.5"]
    assert distflow([*where, "--json", "--keys", "timing_s/step"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == {"step": 1, "timing_s/step": 0.25}
    assert distflow([*where, "--keys", "timing_s/step"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["step", "timing_s/step"],
        ["1", "0.25"],
        ["2", "0.25"],
    ]
    assert distflow([*where, "--keys", "critic/scor/mean"]) == 2
    assert "--keys critic/scor/mean: the run has no metric of this name — did you mean critic/score/mean" in (
        capsys.readouterr().err
    )
    assert distflow([*where, "--keys", "score"]) == 2
    assert "did you mean critic/score/mean" in capsys.readouterr().err


@pytest.mark.parametrize("form", [[], ["--json"], ["--csv"]])
def test_a_count_that_was_never_counted_is_0_and_no_wrong_name(tmp_path: Path, capsys, form: list[str]) -> None:
    (tmp_path / "mine" / "metrics").mkdir(parents=True)
    line = {"step": 1, "term": 0, "timing_s/step": 1.0, "critic/rewards/mean": 0.5, "rollout/errors": 2.0}
    (tmp_path / "mine" / "metrics" / "worker-0.jsonl").write_text(json.dumps(line) + "\n")
    where = ["metrics", str(tmp_path / "mine"), *form, "--keys"]
    assert distflow([*where, "reward/unjudged"]) == 0
    assert capsys.readouterr().err == "--keys reward/unjudged: 0, nothing was counted in these training steps\n"
    assert distflow([*where, "critic/rewards/mean,perf/halved_microbatches,rollout/errors"]) == 0
    out, err = capsys.readouterr()
    assert "0.5" in out
    assert err == "--keys perf/halved_microbatches: 0, nothing was counted in these training steps\n"
    assert distflow([*where, "critic/reward/mean,reward/unjudge"]) == 2
    assert "did you mean critic/rewards/mean" in capsys.readouterr().err


def test_counts_that_may_be_missing_are_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert [name for name in COUNTED if f"`{name}`" not in documented] == []


def test_a_key_with_a_slash_at_its_end_is_all_below_it_in_the_steps_that_have_it(fake_run, capsys):
    run = fake_run({"trainer/0": {"steps": 4}})
    run.run()
    with (run.run_dir / "metrics" / "trainer-0.jsonl").open("a") as file:
        for step in (2, 4):
            file.write(json.dumps({"step": step, "term": 0, "mine/a": step / 8, "mine/deep/b": 1.0}) + "\n")
    assert distflow(["metrics", "--keys", "mine/", *runs_dir(run)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [["step", "mine/a", "mine/deep/b"], ["2", "0.25", "1"], ["4", "0.5", "1"]]
    assert distflow(["metrics", "--keys", "step,mine/a", "--csv", "--last", "1", *runs_dir(run)]) == 0
    assert capsys.readouterr().out.splitlines() == ["step,mine/a", "4,0.5"]
    assert distflow(["metrics", "--keys", "step", "--csv", *runs_dir(run)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert distflow(["metrics", "--keys", "other/", *runs_dir(run)]) == 2
    assert "--keys other/: the run has no metric of this name" in capsys.readouterr().err
    assert distflow(["metrics", "--keys", "mine", *runs_dir(run)]) == 2
    assert "--keys mine: a group of metrics, not one — below it are mine/a, mine/deep/b; mine/ is" in (
        capsys.readouterr().err
    )
    assert distflow(["metrics", "--keys", "mine/deep", *runs_dir(run)]) == 2
    assert "below it are mine/deep/b; mine/deep/ is" in capsys.readouterr().err


@pytest.mark.parametrize(("form", "shown"), [("--json", '"mine/a": 0.5'), ("--csv", "4,0.5"), ("", "0.5")])
def test_the_metrics_that_there_are_are_shown_beside_those_that_are_not(fake_run, capsys, form, shown):
    run = fake_run({"trainer/0": {"steps": 4}})
    run.run()
    with (run.run_dir / "metrics" / "trainer-0.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "term": 0, "mine/a": 0.5}) + "\n")
    assert distflow(["metrics", "--keys", "mine/b,mine/a,nothing,mine", *filter(None, [form]), *runs_dir(run)]) == 2
    out, err = capsys.readouterr()
    assert shown in out
    assert "--keys" not in out
    assert [line.partition(" — ")[0] for line in err.splitlines()] == [
        "--keys mine/b: the run has no metric of this name",
        "--keys nothing: the run has no metric of this name",
        "--keys mine: a group of metrics, not one",
    ]
    assert "did you mean mine/a?" in err.splitlines()[0]


def test_status_tells_of_validation_and_of_the_best_checkpoint(fake_run, capsys):
    run = fake_run({"trainer/0": {"steps": 4}})
    run.run()
    rounds = {0: 0.0, 2: 0.5, 4: 0.25}
    with (run.run_dir / "metrics" / "trainer-0.jsonl").open("a") as file:
        for step, value in rounds.items():
            values = {"val/avg@4": value, "val/avg@4/ci95": 0.0212, "val/pass@4": 1.0, "val/easy/avg@4": 1.0}
            file.write(json.dumps({"step": step, "term": 0, **values}) + "\n")
    assert distflow(["status", *runs_dir(run)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1:2] == ["validation: avg@4 0.25 ±0.021 after training step 4 (best 0.5 after training step 2)"]
    assert "best checkpoint" not in "".join(told)
    with (run.run_dir / "metrics" / "trainer-0.jsonl").open("a") as file:
        for step, value in {2: 0.75, 4: 1.5}.items():
            file.write(json.dumps({"step": step, "term": 0, "val/loss": value}) + "\n")
    assert distflow(["status", *runs_dir(run)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "validation: loss 1.5 after training step 4 (best 0.75 after training step 2)" in told, "the lowest is best"

    kept = {"run": {"keep_best": "val/avg@4", "keep_best_mode": "max"}}
    (run.run_dir / "recipe.yaml").write_text(json.dumps(kept))
    for step in (2, 3, 4):
        leave_checkpoint(run.run_dir, step)
    assert distflow(["status", *runs_dir(run)]) == 0
    folder = run.run_dir / "checkpoints" / "step_000002"
    best = f"best checkpoint by run.keep_best (val/avg@4 0.5): {folder}"
    assert best in capsys.readouterr().out.splitlines()
    record = run.record()
    lines = list(summary(record, ["quickstart"], run.run_dir.parent))
    assert {told[1], best} <= set(lines)
    (kept,) = (line for line in lines if line.startswith("checkpoints: "))
    assert re.fullmatch(rf"checkpoints: 3, \d+\.\d MiB on disk, in {folder.parent}", kept)
    next_ones = {words[1]: words[2:] for words in map(str.split, lines[lines.index("try next:") + 1 :])}
    where = ["--runs-dir", str(run.run_dir.parent)]
    assert next_ones["plot"] == [record.name, *where]
    assert next_ones["export"] == [record.name, "--best", "--to", f"{record.name}-model", *where]
    assert best_step(run.run_dir, None) == 2
    assert distflow(["export", "--best", "--step", "3", "--to", "x", *runs_dir(run)]) == 2
    assert "--step and --best: give one of them" in capsys.readouterr().err


def test_metrics_that_make_too_long_lines_have_a_line_each(fake_run, capsys):
    run = fake_run({"trainer/0": {"steps": 30}})
    run.run()
    names = [f"mine/a_rather_long_name_{number:02}" for number in range(12)]
    with (run.run_dir / "metrics" / "trainer-0.jsonl").open("a") as file:
        for step in range(1, 31):
            file.write(json.dumps({"step": step, "term": 0, **dict.fromkeys(names, step / 7)}) + "\n")
    assert distflow(["metrics", "--keys", "mine/*", *runs_dir(run)]) == 0
    told = capsys.readouterr()
    rows = [line.split() for line in told.out.splitlines()]
    assert [row[0] for row in rows] == ["step", *names]
    assert rows[0][-1] == "30"
    shown = len(rows[0]) - 1
    assert 12 < shown < 30
    assert told.err == f"the last {shown} of 30 training steps; --csv prints all\n"
    assert distflow(["metrics", "--keys", "mine/*", "--last", "2", *runs_dir(run)]) == 0
    told = capsys.readouterr()
    assert (told.out.splitlines()[0].split(), told.err) == (["step", "29", "30"], "")


def sample(position, index, term, reward):
    common = {"step": 17, "term": term, "prompt": "1+1=", "response": "2", "finish_reason": "stop"}
    return {"uid": [0, position, position], "sample": index, "reward": reward, "score": reward, **common}


def test_rollouts_shows_the_newest_term_of_a_step(fake_run, capsys):
    run = fake_run({"trainer/0": {"steps": 1}})
    run.run()
    folder = run.run_dir / "rollouts" / "step_000017"
    assert distflow(["rollouts", *runs_dir(run)]) == 2
    assert "nothing was dumped yet" in capsys.readouterr().err
    folder.mkdir()
    # A line in the file ends with a newline, not where a model printed another kind of line break.
    odd = {**sample(1, 0, 1, 0.0), "response": "2\u2028\x85\x0c3"}
    samples = [odd, sample(0, 1, 1, 1.0), sample(0, 0, 1, 0.5), sample(0, 0, 0, 9.0)]
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in samples]
    (folder / "trainer-0.jsonl").write_text("".join(lines) + '{"half')
    assert distflow(["rollouts", "--json", *runs_dir(run)]) == 0
    assert [line["reward"] for line in json.loads(capsys.readouterr().out)] == [0.5, 1.0, 0.0]
    assert distflow(["rollouts", "--limit", "1", *runs_dir(run)]) == 0
    out = capsys.readouterr().out
    assert "training step 17: 1 of 3 samples" in out
    assert "prompt 0, sample 0, reward 0.500, score 0.500, stop" in out
    of_validation = run.run_dir / "rollouts" / "val" / "step_000017"
    of_validation.mkdir(parents=True)
    line = {**sample(0, 0, 1, 1.0), "uid": [2, 3, VALIDATION + 43]}
    (of_validation / "trainer-0.jsonl").write_text(json.dumps(line) + "\n")
    assert distflow(["rollouts", "--val", *runs_dir(run)]) == 0
    assert "-- prompt 3 of the validation data, sample 0, reward 1.000" in capsys.readouterr().out
    own = {"rewards": {"style": 0.25, "fives": None}, "advantage": [0.5] * 12, "mine/note": "odd"}
    (folder / "trainer-0.jsonl").write_text(json.dumps({**samples[0], **own}) + "\n")
    assert distflow(["rollouts", *runs_dir(run)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-3] == "   rewards   style 0.250, fives -"
    assert out[-2].startswith("   advantage [0.500, 0.500, 0.500, 0.5")
    assert out[-2].endswith(", … 12 values]")
    assert out[-1] == "   mine/note 'odd'"
    assert distflow(["rollouts", "--step", "16", *runs_dir(run)]) == 2
    assert "the nearest is step_000017" in capsys.readouterr().err


def test_rollouts_shows_the_sequences_of_a_sample_together(fake_run, capsys):
    run = fake_run({"trainer/0": {"steps": 1}})
    run.run()
    folder = run.run_dir / "rollouts" / "step_000017"
    folder.mkdir()
    cut = [
        {**sample(0, 0, 1, 0.5), "sequence": 1, "prompt": "so far 2, +1=", "response": "3"},
        {**sample(0, 1, 1, 1.0), "sequence": 0},
        {**sample(0, 0, 1, 0.5), "sequence": 0},
    ]
    (folder / "trainer-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in cut))
    assert distflow(["rollouts", "--limit", "1", *runs_dir(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "training step 17: 1 of 2 samples",
        "-- prompt 0, sample 0, reward 0.500, score 0.500, stop",
        "   prompt    '1+1='",
        "   response  '2'",
        "   prompt    'so far 2, +1='",
        "   response  '3'",
    ]
    assert distflow(["rollouts", "--limit", "1", "--json", *runs_dir(run)]) == 0
    assert [line["sequence"] for line in json.loads(capsys.readouterr().out)] == [0, 1]


def test_rollouts_tells_the_model_from_its_environment(fake_run, capsys):
    """By the versions of its tokens, whatever is trained on; of the tokenizer of the run: 2 to 11 are digits."""
    run = fake_run({"trainer/0": {"steps": 1}})
    run.run()
    folder = run.run_dir / "rollouts" / "step_000017"
    folder.mkdir()
    turns = [(0, 3, 0, 1), (0, 3, 2, 3), (0, 4, 3, 4)]
    lines = [
        {**sample(0, 0, 1, 0.5), "sequence": 0, "response_ids": [3, 4, 5, 6, 12], "policy_versions": turns},
        {**sample(0, 0, 1, 0.5), "sequence": 1, "response_ids": [3, 1], "policy_versions": [(0, 4, 0, 2)]},
        {**sample(0, 1, 1, 0.5), "sequence": 0, "response_ids": [3, 1], "policy_versions": [(0, 4, 1, 2)]},
    ]
    (folder / "trainer-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.run_dir / "recipe.yaml").write_text(yaml.safe_dump(load_recipe("quickstart").resolved))
    assert distflow(["rollouts", *runs_dir(run)]) == 0
    out = capsys.readouterr().out
    assert "[in brackets]: what the model wrote" in out
    shown = [line.split(None, 1)[1] for line in out.splitlines() if line.startswith("   response")]
    assert shown == ["'[1]2[34]='", "'2'", "'1[<eos>]'"]
    (run.run_dir / "recipe.yaml").unlink()
    assert distflow(["rollouts", *runs_dir(run)]) == 0
    out, err = capsys.readouterr()
    assert "note: what the model wrote is not told apart" in err
    assert "[" not in out


@pytest.mark.parametrize("command", ["status", "logs", "metrics", "rollouts", "stop"])
def test_an_unknown_run_is_refused_without_a_traceback(command, tmp_path, capsys):
    assert distflow([command, "nope", "--runs-dir", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "no run 'nope'" in err
    assert "Traceback" not in err


def test_before_the_first_training_step_metrics_says_why_there_are_none(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    RunRecord("mine", str(tmp_path / "mine"), 9, (WorkerEntry("trainer/0", True),), {}, 30.0, 3).write()
    assert distflow(["metrics", "--runs-dir", str(tmp_path)]) == 0
    assert "mine has no metrics yet: they come with the end of its first training step" in capsys.readouterr().err
