"""The generating side: what may start, what is taken back, and how it waits."""

from pathlib import Path

import pytest

from distflow.errors import NoProgressError, RunStopped
from distflow.exchange.messages import Cancel, Outgoing
from distflow.testing.fakes import FakeEngine
from distflow.types import Span
from tests.runtime.kit import GROUP, HOLDER, OWNER, TOKENS, World, lease_settings


def world(folder: Path, slots: int = 16, **changes: int) -> World:
    return World(folder, lease_settings(**changes), engine=FakeEngine(slots=slots))


def test_nothing_starts_without_weights(tmp_path: Path) -> None:
    made = world(tmp_path)
    assert made.submit() == []
    assert made.holder.held() == [0, 1, 2, 3], "leases are fetched while the weights are on their way"
    with pytest.raises(NoProgressError, match=r"weights of version 0 or newer from trainer/0 .* no sign of progress"):
        made.feed.wait_if_idle()
    made.training.publish("policy", 0)
    assert made.submit() == [0, 1, 2, 3]


def test_a_lease_waits_for_its_version_of_the_weights(tmp_path: Path) -> None:
    made = world(tmp_path)
    steps = made.steps()
    t = next(steps)
    made.generate_all()
    announced = []
    made.feed.on_version(announced.append)
    list(map(made.accumulate, made.training.receive(t)))
    # The owner opens the next step; the announcement of its weights is late.
    made.inbound.send(made.owner.advance(1, made.now))
    made.wire.deliver()
    assert made.submit() == []
    assert made.holder.held() == [4, 5, 6, 7]
    with pytest.raises(NoProgressError, match=r"weights of version 1 or newer from trainer/0"):
        made.feed.wait_if_idle()
    made.training.apply("policy")
    made.training.publish("policy", 1)
    made.feed.wait_if_idle()
    assert made.submit() == [4, 5, 6, 7]
    assert announced == [1]
    groups = [group for _ in range(TOKENS) for group in made.decode()]
    assert {sample.spans for group in groups for sample in group.samples} == {(Span(0, 1, 0, TOKENS),)}


def test_leases_are_taken_as_far_as_whole_groups_fit(tmp_path: Path) -> None:
    made = world(tmp_path, slots=3 * GROUP - 1)
    next(made.steps())
    assert made.submit() == [0, 1]
    # One group more is fetched ahead.
    assert made.holder.held() == [0, 1, 2]
    made.decode()
    assert made.submit() == []
    made.finish([group for _ in range(TOKENS - 1) for group in made.decode()])
    assert made.submit() == [2, 3]


def test_a_cancelled_group_is_aborted_and_its_lease_forgotten(tmp_path: Path) -> None:
    made = world(tmp_path, slots=2 * GROUP)
    next(made.steps())
    assert made.submit() == [0, 1]
    assert 2 in made.holder.held()
    made.decode()
    made.inbound.send([Outgoing(HOLDER, Cancel(OWNER, 0, 0, (0, 2)))])
    made.wire.deliver()
    cancelled = made.feed.cancelled()
    assert cancelled == [0], "position 2 was queued: the engine does not know it"
    partial = made.engine.abort(cancelled)
    assert [len(sample.token_ids) for sample in partial] == [1, 1]
    made.feed.discard(partial)
    assert made.feed._metrics.drain()["rollout/aborted_samples"] == GROUP
    assert [group.lease.position for _ in range(TOKENS) for group in made.decode()] == [1]
    assert made.feed.cancelled() == []


def test_groups_are_frozen_between_training_steps_and_go_on_with_new_weights(tmp_path: Path) -> None:
    """Colocated, s = 1: the first step's set is whole while groups of the second are half done."""
    made = world(tmp_path, slots=4 * GROUP, max_staleness=1, announce_closed=True)
    steps = made.steps()
    t = next(steps)
    feed = made.feed.until_closed(t)
    assert made.submit() == [0, 1, 2, 3]
    early = [group for _ in range(TOKENS) for group in made.decode()]
    assert made.submit() == [4, 5, 6, 7]
    made.decode()
    assert feed.open()
    made.finish(early)
    assert not feed.open()
    made.train(t)
    next(steps)
    assert made.feed.until_closed(1).open()
    assert made.engine.progress() == {position: GROUP for position in (4, 5, 6, 7)}
    made.submit()
    late = [group for _ in range(TOKENS - 1) for group in made.decode()]
    assert [group.lease.position for group in late] == [4, 5, 6, 7]
    assert {sample.spans for group in late for sample in group.samples} == {(Span(0, 0, 0, 1), Span(0, 1, 1, TOKENS))}


def test_an_idle_worker_waits_for_leases_from_its_owner_by_name(tmp_path: Path) -> None:
    made = world(tmp_path)
    next(made.steps())
    made.generate_all()
    with pytest.raises(NoProgressError, match=r"waiting for leases from trainer/0 .* no sign of progress for 0\.2 s"):
        made.feed.wait_if_idle()
    assert "timing_s/wait_leases" in made.feed._metrics.drain()


def test_a_busy_worker_does_not_wait(tmp_path: Path) -> None:
    made = world(tmp_path)
    next(made.steps())
    made.submit()
    made.decode()
    made.feed.wait_if_idle()
    assert made.engine.progress()


def test_the_feed_ends_with_the_run_and_with_a_stop(tmp_path: Path) -> None:
    made = world(tmp_path, training_steps=1)
    steps = made.steps()
    t = next(steps)
    made.generate_all()
    assert made.feed.open()
    made.train(t)
    made.wire.deliver()
    assert not made.feed.open()
    made.holder_node.board.stop("asked to")
    with pytest.raises(RunStopped, match="asked to"):
        made.feed.open()


def test_progress_reaches_the_owner(tmp_path: Path) -> None:
    made = world(tmp_path)
    next(made.steps())
    made.submit()
    made.decode()
    made.decode()
    before = made.owner.progress_count
    made.outbound.send(made.holder.tick(made.now + 5))
    made.wire.deliver()
    assert made.owner.progress_count > before
    assert [lease.tokens for lease in made.owner.open_leases()] == [2 * GROUP] * 4
    assert {lease.workers for lease in made.owner.open_leases()} == {("rollout/0",)}
