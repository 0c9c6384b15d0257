"""Samples of several sequences: the same run on any layout, whatever dies on the way, and after a resume."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from distflow.data.randomness import uniforms
from tests.e2e.breaking_turns import FIRST, NAMED
from tests.e2e.runs import PROMPTS, SAMPLES, SMALL, Launch, Run
from tests.e2e.slow_engine import VOCABULARY
from tests.e2e.test_layout_invariance import compare, norms, tokens
from tests.e2e.test_partial import PROMPTS as SLOW_PROMPTS
from tests.e2e.test_partial import SAMPLES as SLOW_SAMPLES
from tests.e2e.test_partial import TOKENS, end_in_the_middle, generating, slow_run, total
from tests.e2e.test_ppo import critic

STEPS = Path(__file__).with_name("breaking_turns.py")
BREAKING = (f"flow.steps.sample.call={STEPS}:alternate", "flow.steps.sample.with.max_new_tokens=4", *SMALL)
EXACT = "models.policy.dtype=float64"
DIVIDED = ("layout.pools.trainer.count=2", "layout.pools.trainer.backend=fsdp")
A_GROUP = [1, 2, 1, 3] * (SAMPLES // 4)
"""How many sequences its samples have."""


def check_sequences(run: Run, steps: int) -> None:
    """All sequences of a sample are there, and have its reward; metrics count samples."""
    lines = run.dumps()
    counts = Counter((line["uid"][2], line["sample"]) for line in lines)
    assert counts == {(p, n): A_GROUP[n] for p in range(steps * PROMPTS) for n in range(SAMPLES)}
    rewards = {(line["uid"][2], line["sample"], line["reward"], line["score"]) for line in lines}
    assert len(rewards) == len(counts)
    prompts = {line["uid"][2]: line["prompt"] for line in lines if line["sequence"] == 0}
    for line in lines:
        mine, first = line["prompt"], prompts[line["uid"][2]]
        assert mine.endswith(first)
        assert (len(mine) > len(first)) == (line["sequence"] > 0)
    for line in run.metrics():
        assert line["sequences/mean"] == sum(A_GROUP) / SAMPLES
        step = [found for found in lines if found["step"] == line["step"] and found["sequence"] == 0]
        assert line["critic/rewards/mean"] == pytest.approx(sum(found["reward"] for found in step) / len(step))


@pytest.mark.parametrize("aggregate", ["seq-mean-token-mean", pytest.param("token-mean", marks=pytest.mark.long)])
def test_one_worker_or_several_give_the_same_run(launch: Launch, aggregate: str) -> None:
    settings = (*BREAKING, f"flow.steps.update.with.aggregate={aggregate}", "batch.tokens_per_microbatch=128", EXACT)
    colocated, split = compare(launch, ["colocated", "2+2"], 4, 1e-6, *settings)
    check_sequences(split, 4)
    for line in colocated.metrics():
        assert line["perf/samples_per_s"] * line["timing_s/step"] == pytest.approx(PROMPTS * SAMPLES, rel=1e-3)


def test_a_divided_model_cuts_the_sequences_of_a_sample_apart(launch: Launch) -> None:
    """Its rows are in whatever rounds they fit, and count as one sample."""
    settings = (
        *BREAKING,
        "flow.steps.update.with.aggregate=seq-mean-token-mean",
        "batch.tokens_per_microbatch=64",
        EXACT,
    )
    whole, divided = [launch("quickstart", *settings, "run.training_steps=3", *more) for more in ((), DIVIDED)]
    for run in (whole, divided):
        assert run.wait() == 0, run.output
        check_sequences(run, 3)
    assert tokens(divided) == tokens(whole)
    assert norms(divided) == pytest.approx(norms(whole), rel=1e-6)


def test_rewards_from_another_worker_are_those_of_the_samples(launch: Launch) -> None:
    """It gets the rows of a sample together, and judges the last one."""
    runs = [
        launch("quickstart", *BREAKING, EXACT, "run.training_steps=3", f"layout={n}") for n in ("split", "services")
    ]
    for run in runs:
        assert run.wait() == 0, run.output
        check_sequences(run, 3)
    here, there = runs
    assert tokens(there) == tokens(here)
    assert norms(there) == pytest.approx(norms(here), rel=1e-6)
    assert any(line["reward"] for line in here.dumps())


def test_a_critic_learns_of_sequences_wherever_it_is(launch: Launch) -> None:
    mean = [f"flow.steps.{step}.with.aggregate=seq-mean-token-mean" for step in ("update", "critic_update")]
    lam = ["flow.steps.gae.with.lam=0.9", "flow.steps.gae.with.gamma=0.95"]
    here, there = compare(
        launch,
        ["colocated", "2+2, 1 critic"],
        4,
        1e-6,
        "flow=ppo",
        *BREAKING,
        *mean,
        *lam,
        "batch.minibatches=2",
        "batch.ledgers=4",
        EXACT,
    )
    check_sequences(there, 4)
    for found, expected in zip(critic(there), critic(here), strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_resumed_run_equals_an_undisturbed_one(launch: Launch) -> None:
    settings = [*BREAKING, "run.training_steps=6", "run.deterministic=true"]
    whole = launch("quickstart", *settings)
    assert whole.wait() == 0, whole.output
    first = launch("quickstart", *settings, "run.stop_after=3")
    assert first.wait() == 0, first.output
    rest = launch("quickstart", *settings, "--resume", name=first.name)
    assert rest.wait() == 0, rest.output
    assert tokens(rest) == tokens(whole)
    assert norms(rest) == norms(whole)
    check_sequences(rest, 6)


def test_the_sequences_of_a_killed_rollout_are_replayed_on_another(launch: Launch) -> None:
    """It is killed in the second turns, every second of which has a prompt of its own."""
    call = f"flow.steps.sample.call={STEPS}:summarise"
    run = slow_run(launch, 3, call, "layout.hedging=false", tokens=TOKENS - FIRST)
    run.until(generating(run), "first contact")
    end_in_the_middle(run, "rollout/1", signal.SIGKILL, of=["rollout/1"])
    assert run.wait() == 0, run.output
    _check_drawn(run, 3)
    assert total(run, "rollout/continued_samples") >= SLOW_SAMPLES
    assert total(run, "rollout/continued_tokens") > FIRST * total(run, "rollout/continued_samples")
    assert run.leftovers() == []


def _check_drawn(run: Run, steps: int) -> None:
    """Every token has the random number of its place among all tokens of its sequence."""
    lines = run.dumps()
    found = {(line["uid"][2], line["sample"], line["sequence"]): line["response_ids"] for line in lines}
    assert len(found) == len(lines) == steps * SLOW_PROMPTS * SLOW_SAMPLES * 3 // 2
    for position in range(steps * SLOW_PROMPTS):
        about = (position, SLOW_SAMPLES, TOKENS + 5)
        streams = [uniforms(0, kind, *about) * VOCABULARY for kind in ("sample", "sample/1")]
        drawn = zip(*(stream.astype(int).tolist() for stream in streams), strict=True)
        for sample, (numbers, further) in enumerate(drawn):
            later = FIRST + len(NAMED)
            second = further[: TOKENS - FIRST] if sample % 2 else numbers[later : later + TOKENS - FIRST]
            if sample % 2:
                assert found[position, sample, 0] == numbers[:FIRST]
                assert found[position, sample, 1] == second
            else:
                assert found[position, sample, 0] == [*numbers[:FIRST], *NAMED, *second]
