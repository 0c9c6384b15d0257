"""PPO with a critic beside the policy: the same on any layout, exact after a resume, and it learns."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, Launch, Run
from tests.e2e.test_layout_invariance import LAYOUTS, compare

PPO = ("flow=ppo", *SMALL)
TWO_BY_FOUR = ("batch.epochs=2", "batch.minibatches=4")


def critic(run: Run) -> list[tuple[float, float]]:
    return [(line["critic/grad_norm"], line["critic/vf_loss"]) for line in run.metrics()]


@pytest.mark.parametrize(
    "layouts",
    [["colocated", "1+1", "2+2, 1 critic", "2+1, 2 critics"], pytest.param([*LAYOUTS], marks=[pytest.mark.long])],
    ids=["some", "all"],
)
def test_policy_and_critic_take_the_same_steps_on_any_layout(launch: Launch, layouts: list[str]) -> None:
    reference, *others = compare(launch, layouts, 10, 1e-6, *PPO, "models.policy.dtype=float64")
    assert critic(reference)[-1][0] > 0
    for run in others:
        for found, expected in zip(critic(run), critic(reference), strict=True):
            assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("flow", "layouts"),
    [
        ("grpo", ["colocated", "2+2"]),
        ("ppo", ["colocated", "2+2, 3 critics"]),
        pytest.param("grpo", [*LAYOUTS], marks=[pytest.mark.long]),
        pytest.param("ppo", [*LAYOUTS], marks=[pytest.mark.long]),
    ],
    ids=["grpo", "ppo", "grpo, all", "ppo, all"],
)
def test_several_updates_a_step_are_the_same_on_any_layout(launch: Launch, layouts: list[str], flow: str) -> None:
    """Mini-batches by rank in their ledger: no matter who owns it."""
    several = (f"flow={flow}", *TWO_BY_FOUR, "run.training_steps=4", "models.policy.dtype=float64")
    reference, *others = compare(launch, layouts, 4, 1e-6, *several)
    assert all(0 < line["actor/pg_clipfrac"] < 1 for line in reference.metrics())
    if flow == "ppo":
        for run in others:
            for found, expected in zip(critic(run), critic(reference), strict=True):
                assert found == pytest.approx(expected, rel=1e-6)


def test_rows_reach_a_critic_of_its_own_while_samples_still_arrive(launch: Launch) -> None:
    """Without whitening the policy is trained as samples arrive; groups that one trainer takes from another, too."""
    advantage = 'flow.steps.advantage={call: "distflow.workers.trainer:advantage", with: {function: grpo}}'
    streamed = [*PPO, "~flow.steps.whiten", advantage, "batch.tokens_per_microbatch=128", "models.policy.dtype=float64"]
    reference, own = compare(launch, ["colocated", "2+2, 1 critic"], 4, 1e-6, *streamed)
    for found, expected in zip(critic(own), critic(reference), strict=True):
        assert found == pytest.approx(expected, rel=1e-6)
    assert all(line["critic/groups/count"] == 8 for line in own.metrics())


def test_log_probs_are_computed_while_samples_still_arrive(launch: Launch, tmp_path: Path) -> None:
    """Though training waits for the whole batch: those of whole micro-batches, each group once, on any replica."""
    plugin = Path(__file__).with_name("awaited_forward.py")
    settings = ["layout.pools.rollout.count=1", "layout.pools.rollout.slots=8", "layout.pools.trainer.count=2"]
    settings += ["batch.minibatches=2", "batch.ledgers=4", "batch.tokens_per_microbatch=128", "run.training_steps=3"]
    settings += ["layout.pools.trainer.backend_options={packed: false}"]
    for step, function in (("old_logprobs", "old_logprobs"), ("reward", "reward")):
        settings += [f"flow.steps.{step}.call={plugin}:{function}", f"flow.steps.{step}.with.folder={tmp_path}"]
    run = launch("quickstart", *PPO, *settings)
    assert run.wait() == 0, run.output
    for t in range(3):
        computed = [list(map(int, line.split())) for line in (tmp_path / f"step-{t}").read_text().splitlines()]
        assert sorted(group for groups in computed for group in groups) == [*range(8 * t, 8 * t + 8)], computed
        assert all(len(groups) <= 2 for groups in computed), f"16 to 24 rows of 8 tokens fill a micro-batch: {computed}"


@pytest.mark.long
def test_a_resumed_run_equals_an_undisturbed_one(launch: Launch) -> None:
    """Both models, their optimizers and their schedules, to the last bit, with several updates a step."""
    settings = ["flow=ppo", "batch.prompts=16", "batch.epochs=2", "batch.minibatches=2", "run.deterministic=true"]
    settings += ["run.training_steps=8", "models.critic.optimizer.schedule=cosine"]
    whole = launch("quickstart", *settings)
    assert whole.wait() == 0, whole.output
    first = launch("quickstart", *settings, "run.stop_after=3")
    assert first.wait() == 0, first.output
    second = launch("quickstart", *settings, "--resume", name=first.name)
    assert second.wait() == 0, second.output
    names = ("actor/grad_norm", "actor/lr", "critic/grad_norm", "critic/lr", "critic/vf_loss", "critic/rewards/mean")
    found, expected = ([[line[name] for name in names] for line in run.metrics()] for run in (second, whole))
    assert found == expected
    assert len({line[3] for line in expected}) > 1, "the critic's own schedule"


def test_the_critic_learns_what_to_expect_and_the_reward_rises(launch: Launch) -> None:
    run = launch("quickstart", "flow=ppo", "run.training_steps=120")
    assert run.wait() == 0, run.output
    lines = run.metrics()
    rewards = [line["critic/rewards/mean"] for line in lines]
    assert statistics.mean(rewards[-10:]) > statistics.mean(rewards[:10]) + 0.2
    assert statistics.mean(line["critic/vf_explained_var"] for line in lines[-10:]) > 0.2


def test_a_policy_that_has_moved_far_enough_rests_while_its_critic_goes_on(launch: Launch) -> None:
    """Its schedule keeps pace with the training steps, on all replicas alike."""
    settings = [*PPO, "batch.prompts=16", "batch.epochs=3", "batch.minibatches=2", "run.training_steps=4"]
    settings += ["models.policy.optimizer.schedule=linear", "layout.pools.trainer.count=2"]
    plain = launch("quickstart", *settings)
    early = launch("quickstart", *settings, "batch.target_kl=1e-9")
    assert (plain.wait(), early.wait()) == (0, 0), plain.output + early.output
    assert [line["actor/epochs"] for line in plain.metrics()] == [3.0] * 4
    assert [line["actor/epochs"] for line in early.metrics()] == [1.0] * 4
    # Rates of the last update of a step: the sixth, or the second.
    lr = 1e-3
    for run, last in ((plain, 5), (early, 1)):
        expected = [lr * (1 - (6 * t + last) / 24) for t in range(4)]
        assert [line["actor/lr"] for line in run.metrics()] == pytest.approx(expected, rel=1e-9)
    # In the first step both see the same samples, and train the critic on them equally often.
    losses = [run.metrics()[0]["critic/vf_loss"] for run in (plain, early)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_critic_is_trained_alone_at_first(launch: Launch) -> None:
    run = launch("quickstart", *PPO, "run.training_steps=4", "batch.critic_warmup=2")
    assert run.wait() == 0, run.output
    lines = run.metrics()
    assert ["actor/grad_norm" in line for line in lines] == [False, False, True, True]
    assert all("critic/grad_norm" in line and "critic/score/mean" in line for line in lines)


def test_a_kl_term_in_the_reward(launch: Launch) -> None:
    reference = "flow.steps.reference={call: 'distflow.workers.reference:ref_logprobs', model: reference}"
    for coefficient in ("0.5", "0.0"):
        kl = f"flow.steps.token_rewards.with.kl_coef={coefficient}"
        run = launch("quickstart", *PPO, "run.training_steps=4", reference, kl)
        assert run.wait() == 0, run.output
        assert all(("critic/kl" in line) == (coefficient == "0.5") for line in run.metrics())


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2, 11])
def test_every_seed_learns_the_task(launch: Launch, seed: int) -> None:
    """The quickstart as shipped but for the flow: a mean score of at least 0.9 in the last 10 training steps."""
    run = launch("quickstart", "flow=ppo", f"run.seed={seed}")
    assert run.wait(600) == 0, run.output
    scores = [line["critic/score/mean"] for line in run.metrics()]
    assert statistics.mean(scores[-10:]) >= 0.9
