"""What a lost, paused or drained rollout has produced is not produced again, and nobody waits for it."""

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from distflow.data.randomness import uniforms
from tests.e2e import buying_turns
from tests.e2e.long_turns import FIRST, NAMED
from tests.e2e.runs import Launch, Run
from tests.e2e.slow_engine import VOCABULARY, told

ENGINE = Path(__file__).with_name("slow_engine.py")
TOKENS, PROMPTS, SAMPLES = 150, 16, 4


def slow_run(launch: Launch, steps: int, *more: str, tokens: int = TOKENS) -> Run:
    """Samples of 150 tokens, 3 s each; nothing ends one early, so all take equally long."""
    return launch(
        "quickstart",
        f"run.training_steps={steps}",
        f"batch.prompts={PROMPTS}",
        f"batch.samples_per_prompt={SAMPLES}",
        f"flow.steps.sample.with.max_new_tokens={tokens}",
        "models.policy.init.max_position_embeddings=256",
        "models.policy.optimizer.lr=0.0",
        f"layout.pools.rollout.engine={ENGINE}:SlowEngine",
        "layout.pools.rollout.engine_options={poll_s: 0.02}",
        "layout.pools.rollout.slots=32",
        *more,
    )


def check(run: Run, steps: int) -> None:
    """Every position was trained once, and every sample has the tokens of an uninterrupted one."""
    lines = run.dumps()
    groups = Counter((line["uid"][2], line["sample"]) for line in lines)
    assert set(groups.values()) == {1}
    assert {position for position, _ in groups} == set(range(steps * PROMPTS))
    assert len(groups) == steps * PROMPTS * SAMPLES
    for line in lines:
        position, sample = line["uid"][2], line["sample"]
        drawn = (uniforms(0, "sample", position, SAMPLES, TOKENS)[sample] * VOCABULARY).astype(int).tolist()
        assert line["response_ids"] == drawn


def total(run: Run, metric: str) -> float:
    """Over all steps and workers, as their metrics files have it."""
    files = run.folder.glob("metrics/*.jsonl")
    rows: list[dict[str, Any]] = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return sum(row[metric] for row in rows if metric in row)


def generating(run: Run) -> Callable[[], bool]:
    """Both rollouts have taken up work."""
    logs = [run.folder / "logs" / f"rollout-{i}.log" for i in (0, 1)]
    return lambda: all(log.exists() and "connected to trainer/0" in log.read_text() for log in logs)


def end_in_the_middle(run: Run, worker: str, number: int, *, of: Sequence[str], tokens: int = 100) -> None:
    """Send a signal to a worker when one `of` the rollouts has so many tokens of its first samples."""
    pid = run.pid_of(worker)  # looked up before: on a busy machine that takes a while
    logs = [run.folder / "logs" / f"{name.replace('/', '-')}.log" for name in of]
    run.until(lambda: any(told(tokens) in log.read_text() for log in logs), f"token {tokens} of {of}")
    os.kill(pid, number)


def test_another_rollout_goes_on_where_a_killed_one_was(launch: Launch) -> None:
    run = slow_run(launch, 3, "layout.hedging=false")
    run.until(generating(run), "first contact")
    end_in_the_middle(run, "rollout/1", signal.SIGKILL, of=["rollout/1"])
    assert run.wait() == 0, run.output
    check(run, 3)
    assert total(run, "rollout/continued_samples") >= SAMPLES
    assert total(run, "rollout/continued_tokens") >= 30 * SAMPLES
    assert run.leftovers() == []


def two_turns(launch: Launch, steps: int, *more: str) -> Run:
    """Samples of two turns, of 0.4 and 2.6 s, with three tokens of the environment between."""
    call = f"flow.steps.sample.call={Path(__file__).with_name('long_turns.py')}:talk"
    return slow_run(launch, steps, call, "layout.hedging=false", *more, tokens=TOKENS - FIRST)


def check_turns(run: Run, steps: int, said: Mapping[tuple[int, int], Sequence[int]] | None = None) -> None:
    """As `check`; the random numbers are counted over the environment's tokens too. `said`: these, by position and
    sample, where they are not always the same."""
    lines = run.dumps()
    assert len({(line["uid"][2], line["sample"]) for line in lines}) == len(lines) == steps * PROMPTS * SAMPLES
    later, end = FIRST + len(NAMED), TOKENS + len(NAMED)
    for line in lines:
        drawn = (uniforms(0, "sample", line["uid"][2], SAMPLES, end)[line["sample"]] * VOCABULARY).astype(int).tolist()
        named = NAMED if said is None else said[line["uid"][2], line["sample"]]
        assert line["response_ids"] == [*drawn[:FIRST], *named, *drawn[later:]]
        written = [token for _, _, first, last in line["policy_versions"] for token in range(first, last)]
        assert written == [*range(FIRST), *range(later, end)]


def test_the_turns_of_a_killed_rollout_are_replayed_on_another(launch: Launch) -> None:
    """It is killed in the second turns: the first ones, and what the environment said, are made again by the record."""
    run = two_turns(launch, 3)
    run.until(generating(run), "first contact")
    end_in_the_middle(run, "rollout/1", signal.SIGKILL, of=["rollout/1"])
    assert run.wait() == 0, run.output
    check_turns(run, 3)
    assert total(run, "rollout/continued_samples") >= SAMPLES
    assert total(run, "rollout/continued_tokens") > FIRST * total(run, "rollout/continued_samples")
    assert run.leftovers() == []


@pytest.mark.parametrize("where", [pytest.param("thread", marks=pytest.mark.long), "process"])
def test_what_a_tool_has_done_for_a_killed_rollout_is_not_done_again(
    launch: Launch, tmp_path: Path, where: str
) -> None:
    """Every second sample of it is in its second turn, and the tool has answered it, another answer each time; the
    others still wait for theirs."""
    step = f"flow.steps.sample.call={Path(buying_turns.__file__)}:buy"
    room = ("layout.pools.rollout.episodes=32", f"layout.pools.rollout.environments={where}")
    shop = f"flow.steps.sample.with.shop={tmp_path}"
    run = slow_run(launch, 2, step, shop, *room, "layout.hedging=false", tokens=TOKENS - FIRST)
    run.until(generating(run), "first contact")
    own = run.pids_of("rollout/1 episodes keeper")
    assert len(own) == (where == "process")
    end_in_the_middle(run, "rollout/1", signal.SIGKILL, of=["rollout/1"], tokens=75)
    run.until(lambda: not any(map(psutil.pid_exists, own)), "the end of its episodes")
    (tmp_path / "open").touch()
    assert run.wait() == 0, run.output
    assert total(run, "rollout/continued_samples") >= SAMPLES
    assert total(run, "rollout/continued_tokens") > FIRST * total(run, "rollout/continued_samples")
    assert total(run, "rollout/replay_differs") == 0
    orders = [json.loads(line) for line in (tmp_path / "orders").read_text().splitlines()]
    answers = {(position, sample): answer for position, sample, answer in orders}
    assert len(answers) == len(orders), "ordered twice"
    check_turns(run, 2, answers)
    assert run.leftovers() == []


def test_samples_begin_anew_where_their_environment_cannot_be_replayed(launch: Launch, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    text = Path(__file__).with_name("long_turns.py").read_text()
    own.write_text(text.replace('environment=["replay", "repeatable"]', "environment=[]"))
    run = two_turns(launch, 3, f"flow.steps.sample.call={own}:talk")
    run.until(generating(run), "first contact")
    end_in_the_middle(run, "rollout/1", signal.SIGKILL, of=["rollout/1"])
    assert run.wait() == 0, run.output
    check_turns(run, 3)
    assert total(run, "rollout/continued_samples") == 0


def test_a_terminated_rollout_hands_back_what_it_holds_and_comes_back(launch: Launch) -> None:
    run = slow_run(launch, 3, "layout.hedging=false")
    run.until(generating(run), "first contact")
    end_in_the_middle(run, "rollout/1", signal.SIGTERM, of=["rollout/1"])
    assert run.wait() == 0, run.output
    check(run, 3)
    assert "rollout/1 ended with signal 15" in (run.folder / "logs" / "agent-0.log").read_text()
    assert run.lives_of("rollout/1") == 2
    trainer = (run.folder / "logs" / "trainer-0.log").read_text()
    assert "rollout/1 is gone (incarnation 0): it left the run" in trainer
    assert total(run, "rollout/lost_tokens") == 0
    assert total(run, "rollout/continued_tokens") >= 10 * total(run, "rollout/continued_samples") > 0


def test_a_rollout_that_stands_still_holds_no_step_up(launch: Launch) -> None:
    run = slow_run(launch, 5)
    run.until(generating(run), "first contact")
    run.until(lambda: run.steps_done() >= 1, "the first training step")
    stopped = run.pid_of("rollout/1")
    os.kill(stopped, signal.SIGSTOP)
    run.until(lambda: run.steps_done() >= 3, "two steps without it")
    os.kill(stopped, signal.SIGCONT)
    assert run.wait() == 0, run.output
    check(run, 5)
    assert total(run, "rollout/hedged_groups") >= 1
    assert "ended with signal" not in (run.folder / "logs" / "agent-0.log").read_text()


def test_a_rollout_that_is_not_heard_of_loses_its_leases_without_hedging_too(launch: Launch) -> None:
    """As one does whose host has no power; here it comes back, and may deliver what nobody else has finished."""
    run = slow_run(launch, 4, "layout.hedging=false", "limits.host_silence_s=2")
    run.until(generating(run), "first contact")
    stopped = run.pid_of("rollout/1")
    run.until(lambda: run.steps_done() >= 1, "the first training step")
    os.kill(stopped, signal.SIGSTOP)
    run.until(lambda: run.steps_done() >= 3, "two steps without it")
    os.kill(stopped, signal.SIGCONT)
    assert run.wait() == 0, run.output
    check(run, 4)
    log = (run.folder / "logs" / "trainer-0.log").read_text()
    assert "no message from rollout/1 for limits.host_silence_s" in log
    assert total(run, "rollout/hedged_groups") == 0


DRAINED = """
import threading, time
from pathlib import Path

def script(w):
    leases = w.leases()

    def drain():
        for _ in range(1200):
            if any({told!r} in log.read_text() for log in Path({runs!r}).glob("*/logs/rollout-1.log")):
                break
            time.sleep(0.05)
        leases.drain()

    threading.Thread(target=drain, daemon=True).start()
    for group in w.generate("sample", leases):
        group = w.call("reward", group)
        w.send("samples", group)
"""


def test_a_drained_rollout_leaves_in_order_and_its_samples_go_on(launch: Launch, tmp_path: Path) -> None:
    script = tmp_path / "drained.py"
    script.write_text(DRAINED.format(told=told(50), runs=str(tmp_path / "runs")))
    run = slow_run(launch, 2, "layout.hedging=false", f"layout.pools.rollout.each.1.script={script}")
    assert run.wait() == 0, run.output
    check(run, 2)
    assert "rollout/1 ended with exit code 0" in (run.folder / "logs" / "agent-0.log").read_text()
    trainer = (run.folder / "logs" / "trainer-0.log").read_text()
    assert trainer.index("rollout/1 is gone (incarnation 0): it left the run") < trainer.index("rollout/0 is gone")
    assert total(run, "rollout/lost_tokens") == 0
    assert total(run, "rollout/continued_tokens") >= 10 * total(run, "rollout/continued_samples") > 0


@pytest.mark.parametrize("layout", ["async", "colocated"])
def test_without_a_bound_every_position_is_trained_once_across_a_resume(launch: Launch, layout: str) -> None:
    """Positions are trained in order of arrival; a checkpoint knows those that were ahead."""
    settings = [f"layout={layout}", "layout.max_staleness=unbounded", "run.training_steps=12", "batch.prompts=16"]
    settings += ["layout.pools.rollout.slots=24"] if layout == "async" else ["layout.pools.worker.slots=24"]
    first = launch("quickstart", *settings, "run.stop_after=5")
    assert first.wait() == 0, first.output
    second = launch("quickstart", *settings, "--resume", name=first.name)
    assert second.wait() == 0, second.output
    groups = Counter((line["uid"][2], line["sample"]) for line in second.dumps())
    assert set(groups.values()) == {1}
    assert {position for position, _ in groups} == set(range(12 * 16))
    assert second.leftovers() == []


def test_what_is_generated_on_the_weights_of_the_checkpoint_goes_on_when_the_training_worker_is_lost(
    launch: Launch,
) -> None:
    run = slow_run(launch, 2)
    run.until(generating(run), "first contact")
    end_in_the_middle(run, "trainer/0", signal.SIGKILL, of=["rollout/0", "rollout/1"], tokens=50)
    assert run.wait() == 0, run.output
    check(run, 2)
    said = [(run.folder / "logs" / f"rollout-{i}.log").read_text() for i in (0, 1)]
    kept = [int(number) for text in said for number in re.findall(r"term 1 .*: (\d+) groups continue here", text)]
    assert sum(kept) >= 12, "of 16 that had been begun"
    assert run.leftovers() == []
