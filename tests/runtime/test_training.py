"""The training side against real leases: what it takes, when it takes it, and what it writes down."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch
from distflow.errors import NoProgressError, RunStopped, StepError, WorkerFailed
from distflow.exchange.ledger import RefillsExhausted
from distflow.flow.plan import StepPlan
from distflow.runtime.owner_side import look
from distflow.runtime.protocols import TokenScores
from distflow.runtime.steps import StepContext, StepRunner
from distflow.runtime.weight_publisher import Canaries
from distflow.runtime.worker import Worker
from distflow.types import WorkerName
from distflow.weights.canary import Canary, canary_rows
from tests.runtime.kit import GROUP, HOLDER, OWNER, PROMPT, TOKENS, World, lease_settings, positions

Make = Callable[..., World]
PADDED = GROUP * (len(PROMPT) + TOKENS)
"""Tokens of one group."""


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def world(settings: dict[str, Any] | None = None, **limits: Any) -> World:
        return World(tmp_path, lease_settings(**(settings or {})), **limits)

    return world


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics" / "trainer-0.jsonl").read_text().splitlines()]


def test_a_whole_run(make: Make, tmp_path: Path) -> None:
    world = make()
    seen = []
    for t in world.steps():
        world.generate_all()
        for batch in world.train(t):
            seen += positions(batch)
    assert sorted(seen) == list(range(12))
    assert len(set(seen)) == 12
    # The exact number of response tokens of each step, and the rate after it.
    tokens = 4 * GROUP * TOKENS
    assert [event for event in world.backend.events if event[0] == "apply"] == [("apply", tokens)] * 3
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [1, 2, 3]
    assert [line["actor/grad_norm"] for line in written] == [1.0, 2.0, 3.0]
    assert [line["actor/lr"] for line in written] == [1.0, 0.5, 0.25]
    world.wire.deliver()
    assert world.holder.run_finished
    assert world.training.finished
    world.training.finish()
    assert world.node.facts["state"] == "finished"


DROPS = """\
from distflow import Ragged, step


@step(role="score", reads=["group"], writes=["drop_reason"])
def dull(batch, ctx, *, only=None):
    groups = batch.dense("group").tolist()
    return batch.with_columns(drop_reason=Ragged.from_texts(["dull" if group == only else "" for group in groups]))
"""


def test_groups_that_have_arrived_cannot_be_dropped_any_more(make: Make, tmp_path: Path) -> None:
    """A step may still write no reason; and before they are sent it may write one, on the same worker."""
    path = tmp_path / "drops.py"
    path.write_text(DROPS)
    plans = [
        StepPlan(f"drop {only}", f"{path}:dull", "score", "sample", None, {"only": only}, ("group",), ("drop_reason",))
        for only in (2, 99)
    ]
    runner = StepRunner(OWNER, plans, {plan.name: StepContext(plan.name) for plan in plans})
    world = make()
    worker = Worker(WorkerName.parse(OWNER), runner, (), None, world.training, None)
    t = next(world.steps())
    generated = Batch({"group": torch.tensor([2, 2])})
    assert worker.call("drop 2", generated).texts("drop_reason") == ["dull", "dull"]
    world.generate_all()
    (batch,) = worker.receive("samples", t)
    assert sorted(positions(batch)) == [0, 1, 2, 3]
    assert worker.call("drop 99", batch).texts("drop_reason") == [""] * 8
    said = (
        r"^step 'drop 2' \(.*:dull\) on trainer/0 wrote drop_reason 'dull' for 2 of 8 samples, with uids .*"
        r"\(0, 2, 2\) in hand: .* let the pool that generates run 'drop 2' \(`roles`, `steps` of layout\.pools\), "
        r"or let it drop nothing"
    )
    with pytest.raises(StepError, match=said):
        worker.call("drop 2", batch)


def test_verdicts_of_a_slow_reward_are_signs_of_progress(make: Make) -> None:
    """Generation is over, and judging takes longer than `limits.no_progress_s`: the trainer waits on."""
    world = make()
    judged = 0

    def judge() -> None:
        nonlocal judged
        for _ in range(20):
            threading.Event().wait(0.05)
            judged += 1
            world.node.membership.news += 1

    judging = threading.Thread(target=judge)
    judging.start()
    with pytest.raises(NoProgressError, match="samples of training step 1"):
        next(world.training.receive(next(world.steps())))
    assert judged == 20
    judging.join()


@pytest.mark.parametrize(("publishes", "divided"), [(True, False), (False, True), (False, False)])
def test_every_version_is_published_with_its_canary(make: Make, publishes: bool, divided: bool) -> None:
    """Of a divided model those that publish nothing take part in it; of others only who publishes computes it."""
    world = make()
    world.backend.lockstep = divided
    training = world.training
    canaries = {"policy": Canaries(canary_rows(13, 20), "float32")}
    publishing = world.publishing(publishes=publishes, canaries=canaries)
    training._parts = replace(training._parts, publishing=publishing)
    training.publish("policy", 0)
    scored = [event for event in world.backend.events if event[0] == "score"]
    assert scored == [("score", 4)] * (publishes or divided)
    newest = world.inbox._newest
    assert (newest is None) is not publishes
    if newest is not None:
        assert newest.canary == Canary(canary_rows(13, 20), ((0.0,) * 18,) * 4, "float32")


def test_weights_that_are_not_finite_are_not_published(make: Make) -> None:
    world = make()
    score = world.backend.score

    def diverged(batch: Batch, **how: Any) -> TokenScores:
        return replace(score(batch, **how), logprobs_BT=score(batch, **how).logprobs_BT / 0.0)

    world.backend.score = diverged
    training = world.training
    canaries = {"policy": Canaries(canary_rows(13, 20), "float32")}
    training._parts = replace(training._parts, publishing=world.publishing(canaries=canaries))
    message = "the weights of version 3 of policy contain NaN or inf: training has diverged — .*models.policy.optimizer"
    with pytest.raises(WorkerFailed, match=message):
        training.publish("policy", 3)
    assert world.inbox._newest is None


def test_batches_begin_as_soon_as_the_token_budget_is_full(make: Make) -> None:
    world = make(tokens_per_microbatch=2 * PADDED)
    steps = world.steps()
    t = next(steps)
    world.submit()
    stream = world.training.receive(t)
    groups = [group for _ in range(TOKENS) for group in world.decode()]
    assert len(groups) == 4
    # Position 0 alone is below the budget, so the stream goes on waiting, and says for what.
    world.finish(groups[:1])
    with pytest.raises(NoProgressError, match=r"samples of training step 1 from rollout/0 .* no sign of progress"):
        next(stream)
    world.finish(groups[1:3])
    stream = world.training.receive(t)
    assert positions(next(stream)) == [1, 2]
    world.finish(groups[3:])
    assert [positions(batch) for batch in stream] == [[3]]


def test_what_was_trained_on_before_the_last_group_came(make: Make, tmp_path: Path) -> None:
    world = make(tokens_per_microbatch=PADDED)
    steps = world.steps()
    t = next(steps)
    world.submit()
    groups = [group for _ in range(TOKENS) for group in world.decode()]
    stream = world.training.receive(t)
    for there in (groups[:1], groups[1:2], groups[2:]):
        world.finish(there)
        world.accumulate(next(stream))
    assert list(stream) == []
    world.training.apply("policy")
    world.training.publish("policy", t + 1)
    world.training.save(t + 1)
    world.settle()
    next(steps)
    assert lines(tmp_path)[0]["perf/overlap_share"] == 0.25, "the second came in time, the others did not"


def test_what_is_left_below_the_budget_is_the_last_batch(make: Make) -> None:
    world = make(tokens_per_microbatch=100 * PADDED)
    t = next(world.steps())
    world.generate_all()
    assert [positions(batch) for batch in world.training.receive(t)] == [[0, 1, 2, 3]]


def test_unstreamed_training_waits_for_the_whole_set_and_takes_it_in_order(make: Make) -> None:
    world = make(streamed=False, tokens_per_microbatch=1)
    t = next(world.steps())
    world.submit()
    groups = [group for _ in range(TOKENS) for group in world.decode()]
    world.finish(groups[:0:-1])
    with pytest.raises(NoProgressError, match="samples of training step 1"):
        next(world.training.receive(t))
    world.finish(groups[:1])
    assert [positions(batch) for batch in world.training.receive(t)] == [[0, 1, 2, 3]]


def test_nothing_to_train_on_is_an_error_and_not_a_step(make: Make) -> None:
    world = make()
    t = next(world.steps())
    world.generate_all()
    list(world.training.receive(t))
    with pytest.raises(WorkerFailed, match=r"training step 1: nothing to train 'policy' on .*response_mask"):
        world.training.apply("policy")
    assert ("apply", 0.0) not in world.backend.events


def test_a_denominator_serves_one_step_only(make: Make) -> None:
    world = make()
    t = next(world.steps())
    world.generate_all()
    world.train(t)
    assert world.context.denominators == {}


def test_dropped_groups_are_replaced_until_the_refills_are_exhausted(make: Make) -> None:
    world = make({"max_refills": 1})
    t = next(world.steps())
    world.submit()
    groups = [group for _ in range(TOKENS) for group in world.decode()]
    world.finish(groups, {0: "too dull", 3: "too long"})
    assert world.submit() == [4, 5]
    more = [group for _ in range(TOKENS) for group in world.decode()]
    assert [group.lease.position for group in more] == [4, 5]
    world.finish(more, {4: "too dull"})
    look(world.inbound, world.node.board, world.now)
    with pytest.raises(RefillsExhausted, match=r"training step 1, ledger 0: 2 groups were dropped \(too dull: 2\)"):
        list(world.training.receive(t))


@pytest.mark.parametrize(
    "limits, expected",
    [
        ({}, [3]),
        ({"save_every": 1}, [1, 2, 3]),
        ({"save_every": 2}, [2, 3]),
        ({"stop_after": 2}, [2]),
        ({"stop_after": 2, "save_every": 1}, [1, 2]),
    ],
    ids=str,
)
def test_checkpoints_are_written_when_they_are_due(
    make: Make, tmp_path: Path, limits: dict[str, Any], expected: list[int]
) -> None:
    world = make(**limits)
    for t in world.steps():
        world.generate_all()
        world.train(t)
    found = sorted(tmp_path.glob("checkpoints/step_*/COMMIT"))
    assert [int(path.parent.name.removeprefix("step_")) for path in found] == expected
    part = json.loads((found[-1].parent / "worker-trainer-0.json").read_text())
    assert part["ledger"]["version"] == expected[-1]
    assert len(lines(tmp_path)) == expected[-1]


def test_a_stop_saves_after_the_last_whole_step_once(make: Make, tmp_path: Path) -> None:
    world = make()
    steps = world.steps()
    world.training.save_now()
    assert not list(tmp_path.glob("checkpoints/step_*")), "before the first step there is nothing to save"
    t = next(steps)
    world.generate_all()
    world.train(t)
    assert next(steps) == 1
    world.node.board.stop("enough")
    with pytest.raises(RunStopped, match="enough"):
        list(world.training.receive(1))
    world.training.save_now()
    folder = tmp_path / "checkpoints" / "step_000001"
    written = (folder / "COMMIT").stat().st_mtime_ns
    world.training.save_now()
    assert (folder / "COMMIT").stat().st_mtime_ns == written


def test_dumps_tell_of_every_sample_that_was_trained_on(make: Make, tmp_path: Path) -> None:
    world = make(dump_rollouts=2)
    for t in world.steps():
        world.generate_all()
        world.train(t)
    world.training.close()
    folders = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert folders == ["step_000001", "step_000003"]
    samples = [json.loads(line) for line in (tmp_path / "rollouts/step_000003/trainer-0.jsonl").open()]
    assert sorted((line["uid"][2], line["sample"]) for line in samples) == [
        (p, g) for p in range(8, 12) for g in (0, 1)
    ]
    for line in samples:
        assert line["step"] == 3
        assert line["term"] == 0
        assert line["worker"] == HOLDER
        assert line["prompt"] == f"{line['uid'][2]}="
        assert line["reward"] == line["uid"][2]
        assert len(line["response_ids"]) == TOKENS
        assert line["policy_versions"] == [[0, 2, 0, TOKENS]]
        assert line["finish_reason"] == "length"
        assert line["rewards"] == {}


def test_staleness_is_counted_from_the_oldest_token_of_a_group(make: Make, tmp_path: Path) -> None:
    """With s = 1, the groups of the second step are generated by version 0 while the first one is trained."""
    world = make({"max_staleness": 1})
    steps = world.steps()
    t = next(steps)
    assert sorted(world.generate_all()) == list(range(8))
    world.train(t)
    t = next(steps)
    world.train(t)
    t = next(steps)
    assert sorted(world.generate_all()) == [8, 9, 10, 11]
    world.train(t)
    assert list(steps) == []
    written = lines(tmp_path)
    assert [line["staleness/max"] for line in written] == [0, 1, 0]
    assert [line["staleness/mean"] for line in written] == [0, 1, 0]
    assert [line["staleness/mean.weight"] for line in written] == [4, 4, 4]


def test_workers_that_do_not_leave_are_left_behind(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    world = make()
    next(world.steps())
    world.submit()
    world.wire.lose = lambda to, message: message.kind == "finished"
    world.training.dismiss()
    assert "the generating workers to leave from rollout/0" in caplog.text
    assert "shutting down without waiting for them" in caplog.text


def test_closing_gives_everything_back(make: Make) -> None:
    world = make()
    next(world.steps())
    world.training.close()
    assert world.backend.events[-1] == ("close", None)
