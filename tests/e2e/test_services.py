"""Rewards and frozen models on workers of their own: the same run, whatever becomes of them while it goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import PACED, SMALL, TEACHER, Launch, Run, check_trained_once, cli
from tests.e2e.test_layout_invariance import norms, tokens
from tests.e2e.test_scale import scale

STEPS = 40
TWO = ("layout=services", "layout.pools.reward.count=2")
EXACT = "models.policy.dtype=float64"


def status(run: Run) -> dict[str, dict[str, Any]]:
    told = cli("status", run.name, "--json", "--runs-dir", str(run.folder.parent))
    return {row["name"]: row for row in json.loads(told.stdout)["workers"]} if told.returncode == 0 else {}


def answered(run: Run) -> dict[str, float]:
    """Requests that each service has answered so far."""
    rows = status(run)
    return {name: rows[name].get("counts", {}).get("calls/answered", 0) for name in rows if name.startswith("reward/")}


def by_file(run: Run) -> dict[str, float]:
    """The same over the whole run, by its metrics files."""
    lines = {
        path.stem: map(json.loads, path.read_text().splitlines())
        for path in (run.folder / "metrics").glob("reward-*.jsonl")
    }
    return {name: sum(line.get("calls/answered", 0) for line in found) for name, found in lines.items()}


def log(run: Run, worker: str) -> str:
    return (run.folder / "logs" / f"{worker.replace('/', '-')}.log").read_text()


KL = ["flow=grpo_kl", "flow.steps.update.with.kl_coef=0.1"]
STOLEN = ["layout.pools.trainer.count=2", "batch.tokens_per_microbatch=64", *SMALL]
LATER = ["layout.pools.reference.count=2", "batch.minibatches=2", "batch.ledgers=4", *SMALL]


@pytest.mark.parametrize(
    "recipe",
    [
        ["batch.prompts=16"],
        pytest.param(["run.deterministic=true", *SMALL, *KL], marks=pytest.mark.long),
        pytest.param([*KL, *STOLEN], marks=pytest.mark.long),
        pytest.param([*KL, *LATER], marks=pytest.mark.long),
        ["flow=ppo", *SMALL],
        ["flow=distill", "flow.steps.teacher.with.top_k=4", TEACHER, *STOLEN],
        pytest.param(["models.policy.lora.rank=4", "models.policy.quantize=nf4", *SMALL, *KL], marks=pytest.mark.long),
    ],
    ids=["rewards", "deterministic", "stolen", "mini-batches", "ppo", "teacher", "4 bits"],
)
def test_steps_elsewhere_give_the_same_run(launch: Launch, recipe: list[str]) -> None:
    runs = []
    for layout in (["layout=split"], TWO):
        there = [part for part in recipe if not part.startswith("layout.pools.reference") or layout is TWO]
        runs.append(launch("quickstart", EXACT, "run.training_steps=6", *layout, *there))
        assert runs[-1].wait() == 0, runs[-1].output
        assert runs[-1].leftovers() == []
    split, services = runs
    assert tokens(services) == tokens(split)
    assert norms(services) == pytest.approx(norms(split), rel=1e-6)
    assert all(count > 0 for count in by_file(services).values()), by_file(services)
    workers = [entry["name"] for entry in services.record()["workers"]]
    assert log(services, "agent/0").count("ended with exit code 0") == len(workers)
    assert ("reference/0" in workers) == bool({"flow=grpo_kl", "flow=distill"} & {*recipe})
    assert not any("perf/rollout_idle_share" in line for line in lines_of(services, "reward/0"))


def test_nothing_stands_still_where_all_slots_wait_for_rewards(launch: Launch) -> None:
    """All samples that the bound lets through are out for rewards, and no lease can be granted before they are in."""
    small = [*SMALL, "layout.pools.rollout.count=1", "layout.pools.rollout.slots=64", "run.training_steps=10"]
    run = launch("quickstart", "layout=services", *small)
    assert run.wait() == 0, run.output
    check_trained_once(run, 10)


def test_workers_that_generate_and_train_ask_too(launch: Launch) -> None:
    pools = [
        "layout.pools.worker.count=2",
        "layout.pools.worker.roles=[generate,train]",
        "layout.pools.judge.roles=[score]",
    ]
    apart, alone = (
        launch("quickstart", "layout=colocated", EXACT, *SMALL, "run.training_steps=5", *more) for more in (pools, [])
    )
    assert apart.wait() == 0, apart.output
    assert alone.wait() == 0, alone.output
    assert tokens(apart) == tokens(alone)
    assert norms(apart) == pytest.approx(norms(alone), rel=1e-6)


def test_a_killed_service_costs_nothing(launch: Launch) -> None:
    run = launch("quickstart", *PACED, *TWO, f"run.training_steps={STEPS}")
    run.until(lambda: run.steps_done() >= 5, "the fifth training step")
    trainer = run.pid_of("trainer/0")
    os.kill(run.pid_of("reward/1"), signal.SIGKILL)
    run.until(lambda: run.lives_of("reward/1") == 2, "the second life of reward/1")
    assert run.pid_of("trainer/0") == trainer, "a lost service ends no term"
    assert run.wait() == 0, run.output
    check_trained_once(run, STEPS)
    assert run.leftovers() == []


def test_a_run_without_a_service_waits_for_one_by_name(launch: Launch) -> None:
    run = launch("quickstart", *PACED, "layout=services", f"run.training_steps={STEPS}")
    run.until(lambda: run.steps_done() >= 5, "the fifth training step")
    agent = run.pid_of("agent/0")
    os.kill(agent, signal.SIGSTOP)  # else it starts the service again at once
    os.kill(run.pid_of("reward/0"), signal.SIGKILL)

    def waits() -> bool:
        told = [status(run).get(f"rollout/{number}", {}).get("waiting_for") or "" for number in (0, 1)]
        return any(text.startswith(("answers of 'reward' from reward/0", "a worker of pool 'reward'")) for text in told)

    run.until(waits, "the wait for a service", 60)
    done = run.steps_done()
    os.kill(agent, signal.SIGCONT)
    run.until(lambda: run.steps_done() > done + 1, "training with the new service")
    assert run.wait() == 0, run.output
    check_trained_once(run, STEPS)


def test_a_stopped_service_holds_nobody_up(launch: Launch) -> None:
    """What it has is asked of the other one; so is all that follows."""
    run = launch("quickstart", *PACED, *TWO, "run.training_steps=2000")
    run.until(lambda: run.steps_done() >= 5, "the fifth training step")
    stopped = run.pid_of("reward/0")
    os.kill(stopped, signal.SIGSTOP)
    begun, done, longest = time.monotonic(), run.steps_done(), 0.0
    last = begun
    while time.monotonic() < begun + 20:
        time.sleep(0.05)
        if run.steps_done() > done:
            longest, last, done = max(longest, time.monotonic() - last), time.monotonic(), run.steps_done()
    assert time.monotonic() - last < 10, "training stands still"
    assert longest < 10, f"training stood still for {longest:.1f} s"
    os.kill(stopped, signal.SIGCONT)
    before = answered(run)["reward/0"]
    assert status(run)["reward/1"]["version"] is None, "it has no weights"
    run.until(lambda: answered(run).get("reward/0", 0) > before, "answers of the one that goes on")
    assert cli("stop", run.name, "--runs-dir", str(run.folder.parent)).returncode == 0
    assert run.wait() == 130, run.output
    check_trained_once(run, run.metrics()[-1]["step"])


def test_services_and_rollouts_that_join_and_leave(launch: Launch) -> None:
    """Those added meet each other; one that leaves finishes what it began and gives back the rest."""
    run = launch("quickstart", *PACED, "layout=services", "layout.pools.rollout.count=1", "run.training_steps=200")
    run.until(lambda: run.steps_done() >= 3, "the third training step")
    assert "reward: 1 → 3; joining: reward/1, reward/2" in scale(run, "reward=3")
    run.until(lambda: len([1 for count in answered(run).values() if count > 0]) == 3, "answers of all three")
    assert "rollout: 1 → 2; joining: rollout/1" in scale(run, "rollout=2")
    run.until(lambda: "rollout/1" in {line["worker"] for line in run.dumps()}, "samples of the new rollout")
    assert "reward: 3 → 1; leaving" in scale(run, "reward=1")
    names = {"rollout/0", "rollout/1", "reward/0", "trainer/0"}
    run.until(lambda: {entry["name"] for entry in run.record()["workers"]} == names, "the end of two")
    assert run.steps_done() < 200, "the run was over before it was scaled down: train longer"
    os.kill(run.pid_of("reward/0"), signal.SIGTERM)  # it gives back what it has, and is started again
    run.until(lambda: run.lives_of("reward/0") == 2, "the second life of reward/0")
    assert run.wait() == 0, run.output
    check_trained_once(run, 200)
    for name in ("reward/0", "reward/1", "reward/2", "rollout/0", "rollout/1", "trainer/0"):
        assert "Traceback" not in log(run, name)
        assert "stacks" not in log(run, name)


def measured(run: Run, stem: str, term: int) -> list[int]:
    """Training steps of which a worker has written metrics in a term."""
    lines = map(json.loads, (run.folder / "metrics" / f"{stem}.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["term"] == term]


def test_a_killed_reference_costs_no_term_and_a_killed_trainer_no_service(launch: Launch) -> None:
    small = [*SMALL, "layout.pools.reference.count=2", "layout.pools.trainer.count=2", "run.save_every=2"]
    pace = "flow.steps.update.with.loss=" + PACED[-1].partition("=")[2]
    run = launch("quickstart", "flow=grpo_kl", "layout=services", *small, pace, f"run.training_steps={STEPS}")
    run.until(lambda: run.steps_done() >= 8, "the fourth training step")
    trainer = run.pid_of("trainer/0")
    os.kill(run.pid_of("reference/1"), signal.SIGKILL)
    run.until(lambda: run.lives_of("reference/1") == 2, "the second life of reference/1")
    assert run.pid_of("trainer/0") == trainer, "a lost service ends no term"
    services = [run.pid_of(name) for name in ("reward/0", "reference/0")]
    os.kill(trainer, signal.SIGKILL)
    run.until(lambda: run.lives_of("trainer/0") == 2, "the second life of trainer/0")
    assert run.wait() == 0, run.output
    assert [run.lives_of(name) for name in ("reward/0", "reference/0", "reference/1")] == [1, 1, 2], services
    assert run.metrics()[-1]["step"] == STEPS
    # What was measured before, and while all waited for the restart, is not taken for the new term's.
    again = set(measured(run, "trainer-0", 1))
    for stem in ("reference-0", "reward-0"):
        found = measured(run, stem, 1)
        assert found, f"{stem} answered nobody after the restart"
        # The other service may have answered everything of a training step.
        assert len(set(found)) == len(found)
        assert again.issuperset(found)
    assert run.leftovers() == []


SLOW = """
import time

def slow(sample):
    time.sleep(0.03)
    return float(sample.response == sample.prompt)
"""


def test_a_rollout_that_leaves_hands_back_what_waits_for_its_rewards(launch: Launch, tmp_path: Path) -> None:
    """Its finished samples are not generated again; each is judged, wherever it goes."""
    (tmp_path / "rewards.py").write_text(SLOW)
    slow = [f"flow.steps.reward.with.function={tmp_path}/rewards.py:slow", "limits.drain_s=8"]
    run = launch("quickstart", *SMALL, "layout=services", "run.training_steps=8", *slow)
    run.until(lambda: run.steps_done() >= 2, "the second training step")
    assert "rollout: 2 → 1; leaving" in scale(run, "rollout=1")
    assert run.wait() == 0, run.output
    check_trained_once(run, 8)
    lines = lines_of(run, "rollout/0") + lines_of(run, "rollout/1")
    assert sum(line.get("rollout/lost_tokens", 0) for line in lines) == 0
    assert "Traceback" not in log(run, "rollout/1")


REWARDS = """
import time

def picky(sample):
    if sample.prompt.startswith("1"):
        raise ValueError(f"cannot judge {sample.prompt}")
    return float(sample.response == sample.prompt)

def wrong(sample):
    return ctx
"""

KEEPS = """
from distflow import step

def remember(context):
    context.state["seen"] = 1

@step(role="score", reads=["response_ids"], writes=["reward", "score"])
def mine(batch, ctx):
    remember(ctx)
    return batch
"""


def test_what_a_service_drops_is_replaced(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    judged = [
        f"flow.steps.reward.with.function={tmp_path}/rewards.py:picky",
        "flow.steps.reward.with.max_error_rate=1.0",
    ]
    run = launch("quickstart", *SMALL, "layout=services", "run.training_steps=4", *judged)
    assert run.wait() == 0, run.output
    lines = run.metrics()
    assert sum(line.get("group/dropped", 0) for line in lines) > 0
    assert sum(line.get("reward/errors", 0) for line in lines) > 0
    prompts = {line["prompt"] for line in run.dumps()}
    assert prompts
    assert not any(prompt.startswith("1") for prompt in prompts)
    assert len(tokens(run)) == 4 * 8 * 8


ONE_FAILS = """
import os
from pathlib import Path

judged, fails = 0, None

def tenth(sample):
    global judged, fails
    if fails is None:
        try:
            os.close(os.open(Path(__file__).parent / "first", os.O_CREAT | os.O_EXCL))
            fails = False
        except FileExistsError:
            fails = True
    judged += 1
    if fails and judged % 10 == 0:
        raise ValueError("cannot judge this")
    return float(sample.response == sample.prompt)
"""


def one_fails(folder: Path, rate: float) -> list[str]:
    """Of two workers that judge, the second to begin, so never alone, fails on a tenth of its samples."""
    (folder / "rewards.py").write_text(ONE_FAILS)
    (folder / "first").unlink(missing_ok=True)
    function = f"flow.steps.reward.with.function={folder}/rewards.py:tenth"
    return [*PACED, function, f"flow.steps.reward.with.max_error_rate={rate}", "flow.steps.reward.with.on_error=zero"]


@pytest.mark.parametrize(
    "layout", [pytest.param(TWO, marks=pytest.mark.long), ("layout=split",)], ids=["services", "split"]
)
def test_failures_are_counted_over_all_workers_that_judge(launch: Launch, tmp_path: Path, layout: list[str]) -> None:
    """Alone, the one that fails is beyond the bound; with the other it is not. Nor does it hide beside it."""
    run = launch("quickstart", *layout, *one_fails(tmp_path, 0.09), f"run.training_steps={STEPS}")
    assert run.wait() == 0, run.output
    told = sorted(metrics["reward/errors"] for metrics in counts_of(run))
    assert told[0] == 0
    assert told[1] >= 10
    run = launch("quickstart", *layout, *one_fails(tmp_path, 0.02), "run.training_steps=2000")
    assert run.wait() == 3, run.output
    said = re.search(r"(\d+) of (\d+) samples failed, more than max_error_rate=0.02 allows", run.output)
    assert said is not None, run.output
    assert 0.02 < int(said[1]) / int(said[2]) < 0.09, said[0]
    assert int(said[2]) >= 100


def counts_of(run: Run) -> list[dict[str, float]]:
    """What each worker that judges has counted."""
    found = []
    for path in (run.folder / "metrics").glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if any("reward/samples" in line for line in lines):
            names = ("reward/samples", "reward/errors")
            found.append({name: sum(line.get(name, 0) for line in lines) for name in names})
    return found


def test_what_fails_on_a_service_ends_the_run_with_the_rows_that_it_had(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "keeps.py").write_text(KEEPS)
    run = launch("quickstart", *SMALL, "layout=services", f"flow.steps.reward.call={tmp_path}/keeps.py:mine")
    assert run.wait() == 2, run.output
    assert "step 'reward'" in run.output
    assert "ctx.state: step 'reward' runs on reward/0 for other workers" in run.output
    (tmp_path / "rewards.py").write_text(REWARDS)
    judged = [f"flow.steps.reward.with.function={tmp_path}/rewards.py:wrong", "flow.steps.reward.with.on_error=stop"]
    run = launch("quickstart", *SMALL, "layout=services", *judged)
    assert run.wait() == 3, run.output
    assert "in step 'reward' on reward/0, training step 1, uid (epoch, prompt, position) (0, " in run.output


def lines_of(run: Run, worker: str) -> list[dict[str, float]]:
    text = (run.folder / "metrics" / f"{worker.replace('/', '-')}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
