"""What a user hears of while a run goes on: each thing once, and only what is worth it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from msgspec import structs

from distflow.cluster.processes import ProcessId
from distflow.launch.deploy.monitor import StatusReader
from distflow.launch.observe.alerts import (
    STEPS,
    Alerts,
    copy_troubles,
    counted_rewards,
    not_numbers,
    restarts,
    tracker_troubles,
    troubles,
)
from distflow.launch.observe.progress import PlainDisplay
from distflow.launch.run.record import RunRecord, WorkerEntry


def row(name: str, **counts: float) -> dict[str, object]:
    return {"name": name, "counts": {f"reward/{what}": value for what, value in counts.items()}}


def told(alerts: Alerts, *norms: float, **more: float) -> list[str]:
    """What is said of training steps with these gradient norms."""
    metrics = {f"group/{name}": value for name, value in more.items()}
    return [
        line
        for step, norm in enumerate(norms, start=1)
        for line in alerts.of_step(step, {"actor/grad_norm": norm, **metrics})
    ]


def test_the_first_reward_that_times_out_is_told_once():
    alerts = Alerts()
    assert list(alerts.of_workers([row("rollout/0", samples=9, timeouts=0, errors=0), {"name": "rollout/1"}])) == []
    (line,) = alerts.of_workers([row("rollout/0"), row("rollout/1", samples=3, timeouts=1)])
    assert line.startswith("warning: the reward function timed out on rollout/1: 1 of 3 samples so far — see its log")
    (line,) = alerts.of_workers([row("rollout/1", samples=9, timeouts=7, errors=1)])
    assert line.startswith("warning: the reward function raised an error on rollout/1: 1 of 9 samples")
    assert list(alerts.of_workers([row("rollout/1", samples=20, timeouts=9, errors=2)])) == []
    failed = {"name": "rollout/1", "counts": {"rollout/errors": 2.0}}
    (line,) = alerts.of_workers([failed, failed])
    assert line.startswith(
        "warning: 2 attempts at a sample failed in the generate step on rollout/1 so far — see its log"
    )


def test_a_reward_that_does_not_come_back_is_told_once():
    alerts, fine = Alerts(), {"name": "rollout/0", "counts": {"reward/samples": 8}}
    late = {"name": "rollout/1", "counts": {"reward/hanging": 1}}
    assert list(alerts.of_late_rewards([fine])) == []
    (line,) = alerts.of_late_rewards([fine, late])
    assert "does not come back on rollout/1, which waits for it — see its log; `timeout_s` beside" in line
    assert list(alerts.of_late_rewards([late])) == []


def test_whom_the_run_waits_for_outside_is_told_when_it_lasts_and_not_at_every_step():
    alerts = Alerts()

    def waiting(seconds: float, text: str = "a client to write 'reward'") -> list[str]:
        row = {"name": "trainer/0", "waits": [{"name": "x", "peers": [], "seconds": seconds}]}
        return list(alerts.of_outside([{**row, "outside": [{"on": "step reward", "text": text}]}, {"name": "r/0"}]))

    assert waiting(1.0) == []
    assert waiting(6.0) == ["the run waits for a client to write 'reward'"]
    assert waiting(90.0, "a client to write 'reward': 1 is there") == [], "the same wait"
    assert list(alerts.of_outside([{"name": "trainer/0"}])) == []
    assert waiting(9.0) == [], "a labeller is slow"
    assert waiting(61.0) == ["the run waits for a client to write 'reward'"]


def test_status_counts_rewards_that_failed_over_all_workers():
    rows = [row("rollout/0", samples=100, timeouts=3), row("rollout/1", samples=20, timeouts=1, errors=0), {}]
    assert counted_rewards(rows) == "rewards: 120 judged, 4 timed out"
    assert counted_rewards([row("rollout/0", samples=100, timeouts=0)]) == ""
    further = {"name": "rollout/0", "counts": {"solver/reward/samples": 9.0, "solver/reward/errors": 2.0}}
    assert counted_rewards([further, row("rollout/1", samples=3)]) == "rewards: 12 judged, 2 raised an error"


def test_status_tells_what_a_run_went_on_after():
    """Of any model, over all training steps, by the metrics that count it."""
    steps = [
        {"step": 1, "actor/loss": 0.1, "actor/grad_norm": 1.0, "actor/skipped_updates": 0.0},
        {"step": 2, "actor/skipped_updates": 1.0, "solver/skipped_updates": 2.0, "rollout/left_out": 3.0},
        {"step": 3, "actor/skipped_updates": 4.0, "perf/halved_microbatches": 1.0, "solver/rollout/left_out": 2.0},
        {"step": 4, "engine/bad_logprobs": 5.0, "rollout/left_out": 1.0, "rollout/dropped": 2.0},
        {"step": 5, "reward/errors": 2.0, "solver/reward/errors": 1.0, "reward/timeouts": 1.0, "rollout/errors": 8.0},
    ]
    assert list(troubles(steps)) == [
        "7 updates were skipped, since their gradients were not finite "
        "(actor/skipped_updates 5, solver/skipped_updates 2)",
        "5 samples came from an engine with log-probs that cannot be used (engine/bad_logprobs 5)",
        "1 micro-batches were halved, since the memory of a GPU did not hold them (perf/halved_microbatches 1)",
        "3 samples made the reward function raise an error (reward/errors 2, solver/reward/errors 1)",
        "1 samples made the reward function time out (reward/timeouts 1)",
        "8 attempts at a sample failed in the generate step (rollout/errors 8)",
        "6 samples were left out, and trained nothing (rollout/left_out 4, solver/rollout/left_out 2)",
        "2 groups were dropped, since the generate step or the reward failed on a sample of theirs (rollout/dropped 2)",
    ]
    assert list(troubles(steps[:1])) == []


def test_status_tells_of_losses_and_norms_that_are_no_numbers():
    steps = [{"step": n, "actor/loss": 1.0, "critic/grad_norm": 1.0, "perf/x": math.nan} for n in range(1, 6)]
    assert list(not_numbers(steps)) == []
    for n, name in ((1, "actor/loss"), (3, "actor/loss"), (4, "critic/grad_norm")):
        steps[n][name] = math.inf if n == 3 else math.nan
    assert list(not_numbers(steps)) == [
        "actor/loss was not a finite number in training step 4, and in 1 before",
        "critic/grad_norm was not a finite number in training step 5",
    ]


def test_status_tells_how_often_workers_were_started_again_and_from_where_training_went_on():
    entries = (WorkerEntry("rollout/0", trains=False), WorkerEntry("trainer/0", trains=True))
    record = RunRecord("mine", "/x", 9, entries, {}, drain_s=1.0, restarts=3, launch_term=2, term=2)
    rows = [{"name": "rollout/0", "incarnation": 0}, {"name": "trainer/0", "incarnation": 1}, {"name": "rollout/1"}]
    assert list(restarts(record, rows)) == []
    again = structs.replace(record, term=4, renewed="trainer/0 was killed; the training workers go on from step 3")
    rows[0]["incarnation"] = 2
    assert list(restarts(again, rows)) == [
        "training was restarted 2 times since the launch; the last time: trainer/0 was killed; the training workers "
        "go on from step 3",
        "rollout/0 was started again 2 times since the launch",
    ]


def test_gradients_that_stay_at_0_are_told():
    (line,) = told(Alerts(), 0.3, *[0.0] * 3 * STEPS, zero_std_frac=1.0)
    assert line.startswith(f"warning: actor/grad_norm has been 0 for {STEPS} training steps: nothing is learned — the ")
    assert "same reward" in line
    learnt = {"actor/grad_norm": 0.0, "group/zero_std_frac": 1.0, "critic/score/min": 1.0}
    alerts = Alerts()
    (line,) = [line for step in range(STEPS) for line in alerts.of_step(step + 1, learnt)]
    assert line.endswith("training steps: nothing more to learn, every sample gets the same reward and the score 1")
    (line,) = told(Alerts(), *[0.0] * STEPS, zero_std_frac=0.4)
    assert "look at the rewards" in line
    assert told(Alerts(), *[0.0] * (STEPS - 1), 0.1, *[0.0] * (STEPS - 1)) == []


@pytest.mark.parametrize("name", ["rollout_corr/kept", "solver/rollout_corr/kept"])
def test_corrections_that_leave_nothing_are_told(name: str):
    alerts = Alerts()
    lines = [
        line for step, kept in enumerate([1.0, 0.02, 0.004, 0.0], 1) for line in alerts.of_step(step, {name: kept})
    ]
    (line,) = lines
    assert line.startswith(
        "warning: training step 3: corrections for the policy that sampled leave 0.40% of the tokens"
    )
    assert f"({name})" in line


def test_rewards_that_do_not_differ_for_long_are_told():
    def of(steps: int, least: float = 0.0) -> list[str]:
        alerts = Alerts()
        counted = [{"group/equal_steps/max": float(n), "critic/score/min": least} for n in range(1, steps + 1)]
        return [line for metrics in counted for line in alerts.of_step(1, metrics)]

    assert of(19) == []
    (line,) = of(30)
    assert line.startswith("warning: for 20 training steps the samples of each prompt have all got the same reward")
    assert of(30, least=1.0) == [], "nothing more to learn"


@pytest.mark.parametrize("norm", [math.nan, math.inf, 5000.0])
def test_gradients_beyond_all_bounds_are_told(norm: float):
    (line,) = told(Alerts(), *[1.0] * STEPS, norm, norm, norm)
    assert line.startswith(f"warning: actor/grad_norm is {norm:.3g} in training step {STEPS + 1}, and 1 was usual")


def test_usual_gradients_are_not_worth_a_word():
    assert told(Alerts(), *[0.5, 3.0, 0.01, 40.0] * 20) == []
    assert told(Alerts(), 900.0, 1.0, 0.5) == []


def test_the_launching_command_says_what_the_metrics_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A value that is no number is null in the file, and nan here."""
    lines = [{"step": step, "term": 0, "timing_s/step": 1.0, "actor/grad_norm": 1.0} for step in (1, 2)]
    lines.append({**lines[0], "step": 3, "actor/grad_norm": None, "actor/loss": None, "actor/loss.weight": 2.0})
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "trainer-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    entry = WorkerEntry("trainer/0", trains=True)
    record = RunRecord("some", str(tmp_path), 9, (entry,), {}, drain_s=1.0, restarts=0, state="done")
    status_reader = StatusReader(tmp_path, PlainDisplay())
    assert "grad nan" in status_reader.read(record).figures
    status_reader.read(record)
    assert capsys.readouterr().out.count("warning: actor/grad_norm is nan in training step 3") == 1


def test_a_worker_that_was_started_again_is_told_once(tmp_path: Path):
    entries = (WorkerEntry("rollout/0", trains=False), WorkerEntry("rollout/1", trains=False, host=1))
    entries = (*entries, WorkerEntry("trainer/0", trains=True))

    def record(**pids: int) -> RunRecord:
        marks = {name.replace("_", "/"): ProcessId(pid, float(pid)) for name, pid in pids.items()}
        return RunRecord("mine", str(tmp_path), 9, entries, {}, drain_s=1.0, restarts=3, pids=marks)

    alerts = Alerts()
    assert list(alerts.of_processes(record())) == []
    assert list(alerts.of_processes(record(rollout_0=1, rollout_1=2, trainer_0=3))) == [], "the first time"
    assert list(alerts.of_processes(record(rollout_0=1))) == [], "it has ended, and is not started yet"
    (line,) = alerts.of_processes(record(rollout_0=1, rollout_1=5, trainer_0=6))
    assert (
        line == f"rollout/1 ended and was started again: `distflow logs {tmp_path} --worker agent/1` tells how it ended"
    )
    assert list(alerts.of_processes(record(rollout_0=1, rollout_1=5, trainer_0=6))) == []


def full(name: str, refused: float, **dropped: float) -> dict[str, object]:
    counts = {f"disk/dropped_{what}": count for what, count in dropped.items()}
    return {"name": name, "counts": {"disk/refused": refused, **counts}}


def test_a_disk_that_is_full_is_told_when_it_happens_and_when_it_is_over():
    alerts = Alerts()
    assert list(alerts.of_disk([{"name": "rollout/0"}, full("trainer/0", 0)], "/runs/mine", 0.0)) == []
    (line,) = alerts.of_disk([full("rollout/0", 0), full("trainer/0", 3)], "/runs/mine", 2.0)
    assert line.startswith("disk full at /runs/mine: training goes on")
    assert "reported by trainer/0" in line
    assert list(alerts.of_disk([full("trainer/0", 9)], "/runs/mine", 4.0)) == [], "once"
    assert list(alerts.of_disk([full("trainer/0", 9)], "/runs/mine", 10.0)) == []
    rows = [full("trainer/0", 9, dumps=2), full("rollout/0", 1, metrics=1)]
    assert list(alerts.of_disk(rows, "/runs/mine", 12.0)) == [], "another worker, the same disk"
    (line,) = alerts.of_disk(rows, "/runs/mine", 30.0)
    assert line == "the disk has room again; dropped: 2 dumps, 1 metrics"
    (line,) = alerts.of_disk([full("trainer/0", 10)], "/runs/mine", 40.0)
    assert line.startswith("disk full at /runs/mine"), "each time"


def test_trackers_and_copies_that_fail_are_told_once_and_counted():
    alerts = Alerts()
    fine = {"name": "trainer/0", "counts": {"checkpoint/copied/count": 2.0}}
    counts = {"trackers/wandb/failures": 2.0, "trackers/wandb/dropped": 1.0, "trackers/mine/failures": 1.0}
    failing = {"name": "trainer/0", "counts": {**fine["counts"], **counts, "checkpoint/copy_failed/count": 3.0}}
    assert [*alerts.of_trackers([fine, {"name": "rollout/0"}]), *alerts.of_copies([fine, {"name": "rollout/0"}])] == []
    assert [*tracker_troubles([fine]), *copy_troubles([fine])] == []
    lines = [*alerts.of_trackers([failing]), *alerts.of_copies([failing])]
    assert lines == [
        "warning: tracker mine failed, training goes on — see the log of trainer/0",
        "warning: tracker wandb failed, training goes on — see the log of trainer/0",
        "warning: a checkpoint could not be copied to run.copy_to — see the log of trainer/0",
    ]
    assert [*alerts.of_trackers([failing]), *alerts.of_copies([failing])] == []
    assert [*tracker_troubles([failing]), *copy_troubles([failing])] == [
        "tracker mine on trainer/0: failed 1 times, rows lost: 0",
        "tracker wandb on trainer/0: failed 2 times, rows lost: 1",
        "copies to run.copy_to by trainer/0: 2 made, 3 tries failed",
    ]
