"""Learning is real: it comes from the updates, and the score from the generated text."""

import statistics

import pytest

from tests.e2e.runs import SMALL, Launch


def test_without_a_learning_rate_the_score_stays_at_chance(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, "run.training_steps=60", "models.policy.optimizer.lr=0.0")
    assert run.wait() == 0, run.output
    scores = [line["critic/score/mean"] for line in run.metrics()]
    assert statistics.mean(scores[-30:]) < 0.02


def test_with_it_the_reward_rises_and_scores_are_those_of_the_text(launch: Launch) -> None:
    run = launch("quickstart", "run.training_steps=120")
    assert run.wait() == 0, run.output
    rewards = [line["critic/rewards/mean"] for line in run.metrics()]
    assert statistics.mean(rewards[-10:]) > statistics.mean(rewards[:10]) + 0.2
    for line in run.dumps():
        exact = line["response"] == line["prompt"].rstrip("=") and line["finish_reason"] == "stop"
        assert line["score"] == float(exact), line


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_every_seed_learns_the_task(launch: Launch, seed: int) -> None:
    """The quickstart as shipped: the mean exact-match score of the last 10 training steps is at least 0.9."""
    run = launch("quickstart", f"run.seed={seed}")
    assert run.wait(240) == 0, run.output
    scores = [line["critic/score/mean"] for line in run.metrics()]
    assert statistics.mean(scores[-10:]) >= 0.9


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_staleness_one_learns_as_well_as_staleness_zero(launch: Launch, seed: int) -> None:
    """At equal training steps the mean score of the last 10 steps differs by at most 0.05."""
    scores = []
    for layout in ("split", "async"):
        run = launch("quickstart", f"layout={layout}", f"run.seed={seed}")
        assert run.wait(140) == 0, run.output
        lines = run.metrics()
        assert max(line["staleness/max"] for line in lines) <= (layout == "async")
        scores.append(statistics.mean(line["critic/score/mean"] for line in lines[-10:]))
    assert abs(scores[0] - scores[1]) <= 0.05, scores


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2, 11])
@pytest.mark.parametrize("several", [False, True], ids=["one-update", "two-by-four"])
def test_ppo_learns_the_task(launch: Launch, seed: int, several: bool) -> None:
    """One update a training step ends at 0.9 or more. Eight of them are there within 200 training steps; at so large a
    learning rate the policy does not always stay there.
    """
    updates = ["batch.epochs=2", "batch.minibatches=4", "run.training_steps=200"]
    entropy = "flow.steps.update.with.entropy_coef=0.01"
    run = launch("quickstart", "flow=ppo", f"run.seed={seed}", *([*updates, entropy] if several else []))
    assert run.wait(400) == 0, run.output
    scores = [line["critic/score/mean"] for line in run.metrics()]
    tens = [statistics.mean(scores[end - 10 : end]) for end in range(10, len(scores) + 1)]
    assert (max(tens) if several else tens[-1]) >= 0.9
