"""Learning is real: it comes from the updates, and the score from the generated text."""

import statistics

from tests.e2e.runs import Launch


def test_without_a_learning_rate_the_score_stays_at_chance(launch: Launch) -> None:
    run = launch("quickstart", "run.training_steps=60", "models.policy.optimizer.lr=0.0")
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
