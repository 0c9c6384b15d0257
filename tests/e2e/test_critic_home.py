"""PPO with the critic on workers of its own: killed, cut off, stopped and resumed, both homes are at one step."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from distflow.exchange.dealing import Offer, deal, in_rounds
from distflow.parts import CostRule
from tests.e2e.runs import PACED, PROMPTS, Launch, Run, check_trained_once, cli
from tests.e2e.test_trainer_recovery import steps_of_term

STEPS = 20
CRITIC = ("flow=ppo", "layout=critic", *PACED)


def steps_of(run: Run, stem: str) -> list[tuple[int, int]]:
    """Term and training step of each line that a worker has written."""
    lines = (run.folder / "metrics" / f"{stem}.jsonl").read_text().splitlines()
    return [(int(line["term"]), int(line["step"])) for line in map(json.loads, lines)]


def check_homes_go_back(run: Run, victim: str, stems: Sequence[str], steps: int) -> None:
    """Kill a worker that trains: all whose files have these stems go on behind one checkpoint of every five steps."""
    run.until(run.saved, "a checkpoint")
    os.kill(run.pid_of(victim), signal.SIGKILL)
    assert run.wait() == 0, run.output
    check_trained_once(run, steps)
    again = min(steps_of_term(run, 1))
    assert again % 5 == 1, "behind a checkpoint"
    for stem in stems:
        assert [step for term, step in steps_of(run, stem) if term == 1] == list(range(again, steps + 1)), stem


@pytest.mark.parametrize("victim", ["critic/1", "trainer/0"])
def test_whoever_trains_dies_both_homes_go_back_to_one_step(launch: Launch, victim: str) -> None:
    run = launch("quickstart", *CRITIC, f"run.training_steps={STEPS}", "run.save_every=5")
    check_homes_go_back(run, victim, ("trainer-0", "critic-0", "critic-1"), STEPS)
    assert run.lives_of("rollout/0") == 1, "a rollout stays"
    assert run.leftovers() == []


def test_a_critic_that_dies_between_two_updates_of_a_step(launch: Launch, tmp_path: Path) -> None:
    """The same run as without: what it had applied of the step is forgotten with the rest."""
    call = f"flow.steps.critic_update.call={Path(__file__).with_name('killed_critic.py')}:critic_update"
    settings = [*CRITIC, call, "batch.minibatches=2", "batch.ledgers=4"]
    settings += ["run.training_steps=9", "run.save_every=3", "models.policy.dtype=float64"]
    runs = []
    for name in ("killed", "whole"):
        mark = tmp_path / name
        if name == "whole":
            mark.write_text("")
        runs.append(launch("quickstart", *settings, f"flow.steps.critic_update.with.once={mark}"))
        assert runs[-1].wait() == 0, runs[-1].output
        check_trained_once(runs[-1], 9)
    killed, whole = ([[line[n] for n in ("critic/grad_norm", "actor/grad_norm")] for line in r.metrics()] for r in runs)
    assert runs[0].record()["term"] == 1
    for found, expected in zip(killed, whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


def test_divided_critics_answer_side_by_side(launch: Launch) -> None:
    """Requests that wait for a version are shared by both, and each brings its own to the rounds."""
    divided = ["layout.pools.critic.backend=fsdp", "batch.tokens_per_microbatch=128"]
    run = launch("quickstart", *CRITIC, *divided, "layout.max_staleness=1", f"run.training_steps={STEPS}")
    assert run.wait() == 0, run.output
    check_trained_once(run, STEPS)
    answered, idle = [], []
    for stem in ("critic-0", "critic-1"):
        lines = list(map(json.loads, (run.folder / "metrics" / f"{stem}.jsonl").read_text().splitlines()))
        answered.append(sum(line.get("calls/answered", 0.0) for line in lines))
        idle.append(sum(line.get("lockstep/idle_rounds", 0.0) for line in lines))
    assert sum(answered) == STEPS * PROMPTS, "each request once"
    assert min(answered) > 0.4 * sum(answered), f"answered {answered}"
    # One behind the other, each request would cost the other replica an idle round.
    assert sum(idle) < 0.5 * sum(answered), f"idle {idle} in rounds for {answered} requests"


def test_the_groups_of_all_owners_are_dealt_to_critics_together(launch: Launch, tmp_path: Path) -> None:
    """By mini-batch, in rounds that match: what each replica has follows from the lengths of all."""
    call = f"flow.steps.critic_update.call={Path(__file__).with_name('noting_critic.py')}:critic_update"
    settings = ["layout.pools.trainer.count=2", "layout.pools.critic.backend=fsdp", "batch.tokens_per_microbatch=256"]
    settings += ["batch.prompts=16", "batch.ledgers=4", "batch.minibatches=2", "run.training_steps=3"]
    run = launch("quickstart", *CRITIC, *settings, call, f"flow.steps.critic_update.with.folder={tmp_path}")
    assert run.wait() == 0, run.output
    check_trained_once(run, 3, 16)
    noted = [[json.loads(line) for line in (tmp_path / f"critic-{i}").read_text().splitlines()] for i in range(2)]
    assert [len(lines) for lines in noted] == [6, 6]
    for updates in zip(*noted, strict=True):
        cost = CostRule(256, updates[0][0], packs=updates[0][1])
        hands = [{int(p): numbers for p, (_, numbers) in groups.items()} for *_, groups in updates]
        offers = {int(p): Offer(int(p) % 2, n) for *_, groups in updates for p, (n, _) in groups.items()}
        assert len(offers) == 8
        dealt = deal(offers, 2, cost)
        assert [sorted(hand) for hand in hands] == dealt, "as one would deal the groups of all owners"
        first = min(number for hand in hands for numbers in hand.values() for number in numbers)
        cut = in_rounds(dealt, offers, cost, first)
        assert hands == [{p: [*numbers] for p, numbers in hand.items()} for hand in cut]


def test_a_cut_link_loses_and_doubles_nothing(launch: Launch) -> None:
    settings = [
        *CRITIC,
        f"run.training_steps={STEPS}",
        "layout.pools.trainer.count=2",
        "batch.tokens_per_microbatch=256",
    ]
    run = launch("quickstart", *settings, "--worker-entry", "tests.e2e.cut_link:run_worker")
    assert run.wait() == 0, run.output
    assert (run.folder / "workers" / "cut").exists()
    assert run.record()["term"] == 0, "nobody died"
    check_trained_once(run, STEPS)
    assert all(line["critic/groups/count"] == 8 for line in run.metrics()), "each group trained the critic once"
    assert run.leftovers() == []


@pytest.mark.long
def test_lost_and_doubled_messages_lose_and_double_nothing(launch: Launch) -> None:
    run = launch("quickstart", *CRITIC, "run.training_steps=6", "--worker-entry", "tests.e2e.lossy:run_worker")
    assert run.wait() == 0, run.output
    check_trained_once(run, 6)
    assert all(line["critic/groups/count"] == 8 for line in run.metrics())


@pytest.mark.parametrize(
    "settings", [["layout.pools.trainer.count=2"], ["batch.minibatches=2", "batch.ledgers=4"]], ids=["2", "1"]
)
def test_a_stopped_run_has_both_models_at_one_step(launch: Launch, settings: list[str]) -> None:
    run = launch("quickstart", *CRITIC, "run.training_steps=400", *settings)
    run.until(lambda: run.steps_done() >= 6, "some training steps")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.output
    newest = run.folder / "checkpoints" / f"step_{run.saved()[-1]:06d}"
    names = {path.name for path in newest.iterdir()}
    assert {"model-policy-trainer-0.safetensors", "model-critic-critic-0.safetensors"} <= names
    assert run.leftovers() == []
    done = max(int(line["step"]) for line in run.metrics())
    again = launch("quickstart", *CRITIC, *settings, "--resume", f"run.training_steps={done + 3}", name=run.name)
    assert again.wait() == 0, again.output
    check_trained_once(again, done + 3)


def test_a_resumed_run_equals_an_undisturbed_one(launch: Launch) -> None:
    """To the last bit."""
    settings = ["flow=ppo", "layout=critic", "batch.prompts=16", "batch.epochs=2", "batch.minibatches=2"]
    settings += ["run.deterministic=true", "run.training_steps=6", "layout.pools.trainer.count=2"]
    whole = launch("quickstart", *settings)
    first = launch("quickstart", *settings, "run.stop_after=3")
    assert (whole.wait(), first.wait()) == (0, 0), whole.output + first.output
    second = launch("quickstart", *settings, "--resume", name=first.name)
    assert second.wait() == 0, second.output
    names = ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "critic/rewards/mean")
    found, expected = ([[line[name] for name in names] for line in run.metrics()] for run in (second, whole))
    assert found == expected


def test_other_numbers_of_replicas_go_on_from_one_checkpoint(launch: Launch, tmp_path: Path) -> None:
    """Each home deals its own parts anew."""
    first = launch("quickstart", *CRITIC, "run.training_steps=6", "run.stop_after=3", "layout.pools.trainer.count=2")
    assert first.wait() == 0, first.output
    counts = ["layout.pools.trainer.count=1", "layout.pools.critic.count=3"]
    second = launch("quickstart", *CRITIC, "run.training_steps=6", *counts, "--resume", name=first.name)
    assert second.wait() == 0, second.output
    check_trained_once(second, 6)
    to = ["--to", str(tmp_path / "critic"), "--runs-dir", str(second.folder.parent)]
    done = cli("export", second.name, "--model", "critic", *to)
    assert done.returncode == 0, done.stderr
    assert "values of 8 texts differ by at most" in done.stdout
    assert json.loads((tmp_path / "critic" / "config.json").read_text())["architectures"][0].endswith("Classification")
    wrong = cli("export", second.name, "--model", "judge", *to)
    assert "--model judge: this run trains policy, critic" in wrong.stderr
