"""The generating side: what may start, what is taken back, and how it waits."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from distflow.errors import NoProgressError, RunStopped
from distflow.exchange.lease_client import HolderCore
from distflow.exchange.messages import Cancel, Grant, Outgoing
from distflow.testing.fakes import FakeEngine
from distflow.types import Span, Version
from tests.runtime.kit import GROUP, HOLDER, OWNER, TOKENS, World, lease_settings


def world(folder: Path, slots: int = 16, **changes: Any) -> World:
    return World(folder, lease_settings(**changes), engine=FakeEngine(slots=slots))


def test_nothing_starts_without_weights(tmp_path: Path) -> None:
    made = world(tmp_path)
    assert made.submit() == []
    assert made.holder.held() == [0, 1, 2, 3], "leases are fetched while the weights are on their way"
    with pytest.raises(NoProgressError, match=r"weights of version 0 or newer from trainer/0 .* no sign of progress"):
        made.loop.wait_if_idle()
    made.training.publish("policy", 0)
    assert made.submit() == [0, 1, 2, 3]


def test_a_lease_waits_for_its_version_of_the_weights(tmp_path: Path) -> None:
    made = world(tmp_path)
    steps = made.steps()
    t = next(steps)
    made.generate_all()
    announced = []
    made.loop.on_version(announced.append)
    list(map(made.accumulate, made.training.receive(t)))
    # The owner opens the next step; the announcement of its weights is late.
    made.inbound.send(made.owner.advance(1, made.now))
    made.wire.deliver()
    assert made.submit() == []
    assert made.holder.held() == [4, 5, 6, 7]
    with pytest.raises(NoProgressError, match=r"weights of version 1 or newer from trainer/0"):
        made.loop.wait_if_idle()
    made.training.apply("policy")
    made.training.publish("policy", 1)
    made.loop.wait_if_idle()
    assert made.submit() == [4, 5, 6, 7]
    assert announced == [Version(0, 1)]
    groups = [group for _ in range(TOKENS) for group in made.decode()]
    spans = {call.spans for group in groups for sample in group.samples for call in sample.calls}
    assert spans == {(Span(0, 1, 0, TOKENS),)}


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
    made.loop.prepare()
    assert list(made.engine.progress()) == [1], "position 2 was queued: the engine does not know it"
    lost = made.loop._metrics.drain()
    assert (lost["rollout/aborted_samples"], lost["rollout/lost_tokens"]) == (GROUP, GROUP)
    assert [group.lease.position for _ in range(TOKENS) for group in made.decode()] == [1]


def test_groups_are_frozen_between_training_steps_and_go_on_with_new_weights(tmp_path: Path) -> None:
    """Colocated, s = 1: the first step's set is whole while groups of the second are half done."""
    made = world(tmp_path, slots=4 * GROUP, max_staleness=1, announce_closed=True)
    steps = made.steps()
    t = next(steps)
    loop = made.loop.until_closed(t)
    assert made.submit() == [0, 1, 2, 3]
    early = [group for _ in range(TOKENS) for group in made.decode()]
    assert made.submit() == [4, 5, 6, 7]
    made.decode()
    assert loop.open()
    made.finish(early)
    assert not loop.open()
    made.train(t)
    next(steps)
    assert made.loop.until_closed(1).open()
    assert made.engine.progress() == {position: GROUP for position in (4, 5, 6, 7)}
    made.submit()
    late = [group for _ in range(TOKENS - 1) for group in made.decode()]
    assert [group.lease.position for group in late] == [4, 5, 6, 7]
    spans = {call.spans for group in late for sample in group.samples for call in sample.calls}
    assert spans == {(Span(0, 0, 0, 1), Span(0, 1, 1, TOKENS))}


def test_an_idle_worker_waits_for_leases_from_its_owner_by_name(tmp_path: Path) -> None:
    made = world(tmp_path)
    next(made.steps())
    made.generate_all()
    with pytest.raises(NoProgressError, match=r"waiting for leases from trainer/0 .* no sign of progress for 0\.2 s"):
        made.loop.wait_if_idle()
    assert "timing_s/wait_leases" in made.loop._metrics.drain()


def test_an_idle_worker_waits_while_its_own_ledgers_make_progress(tmp_path: Path) -> None:
    made = world(tmp_path)
    next(made.steps())
    made.generate_all()
    before = made.loop._signs_of_life()
    assert made.loop._signs_of_life() == before
    made.loop._node.work_done()
    assert made.loop._signs_of_life() != before


def test_a_busy_worker_does_not_wait(tmp_path: Path) -> None:
    made = world(tmp_path)
    next(made.steps())
    made.submit()
    made.decode()
    made.loop.wait_if_idle()
    assert made.engine.progress()


def test_the_loop_ends_with_the_run_and_with_a_stop(tmp_path: Path) -> None:
    made = world(tmp_path, training_steps=1)
    steps = made.steps()
    t = next(steps)
    made.generate_all()
    assert made.loop.open()
    made.train(t)
    made.wire.deliver()
    assert not made.loop.open()
    made.holder_node.board.stop("asked to")
    with pytest.raises(RunStopped, match="asked to"):
        made.loop.open()


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


def with_layout(folder: Path, overrides: list[str], slots: int = 16, **changes: Any) -> World:
    return World(folder, lease_settings(**changes), engine=FakeEngine(slots=slots), overrides=overrides)


@pytest.mark.parametrize("policy", ["eager", "when_idle", "at_bound"])
def test_when_newer_weights_are_taken(tmp_path: Path, policy: str) -> None:
    """s = 2: version 1 is announced while version 0 may still be used for all that is leased."""
    made = with_layout(tmp_path, [f"layout.refresh={policy}"], slots=4 * GROUP, max_staleness=2, training_steps=9)
    steps = made.steps()
    t = next(steps)
    assert made.submit() == [0, 1, 2, 3]
    made.finish([group for _ in range(TOKENS) for group in made.decode()])
    assert made.submit() == [4, 5, 6, 7]
    made.decode()
    made.train(t)
    assert made.submit() == []
    assert made.engine.version == Version(0, 1 if policy == "eager" else 0), "in mid-sample"
    made.finish([group for _ in range(TOKENS) for group in made.decode()])
    made.loop.prepare()
    assert made.engine.version == Version(0, 0 if policy == "at_bound" else 1), "nothing is running"
    # Positions 8 … 11 belong to step 2 (from version 0 on), 12 … 15 to step 3 (from version 1 on).
    made.finish([group for _ in range(TOKENS) for group in made.decode()])
    made.submit()
    made.submit()
    assert 12 in made.engine.progress()
    assert made.engine.version == Version(0, 1)


def test_deferred_weights_do_not_keep_a_worker_awake(tmp_path: Path) -> None:
    """They are announced, and nobody needs them: the worker waits for leases all the same."""
    made = with_layout(tmp_path, ["layout.refresh=at_bound"], max_staleness=2, training_steps=9)
    t = next(made.steps())
    made.generate_all()
    made.wire.lose = lambda to, message: message.kind == "grant"
    made.train(t)
    made.wire.deliver()
    assert made.inbox.waiting
    with pytest.raises(NoProgressError, match="waiting for leases"):
        made.loop.wait_if_idle()


def test_what_running_samples_have_reaches_the_owner_and_the_next_worker(tmp_path: Path) -> None:
    made = world(tmp_path, partial_rollouts=True)
    next(made.steps())
    made.submit()
    made.decode()
    made.outbound.send(made.holder.tick(made.now + 5))
    made.wire.deliver()
    made.owner.worker_lost(HOLDER, 0, made.now)
    other = World(tmp_path / "other", made.settings)
    other.owner, other.inbound = made.owner, made.inbound
    other.holder = HolderCore(HOLDER, 1, [OWNER], made.settings)
    leases = []
    for item in made.owner.handle(other.holder.want(100, made.now)[0].message, made.now):
        other.holder.handle(item.message, made.now)
        leases += other.holder.take_granted()
    assert [lease.position for lease in leases] == [0, 1, 2, 3]
    assert {len(sample.token_ids) for lease in leases for sample in lease.begun} == {1}
    assert [len(lease.begun) for lease in leases] == [GROUP] * 4
    other.loop._count(leases[0])
    found = other.loop._metrics.drain()
    assert (found["rollout/continued_samples"], found["rollout/continued_tokens"]) == (GROUP, GROUP)


@pytest.mark.parametrize("looked", [False, True])
def test_what_a_cancelled_group_has_is_not_told_of_the_next_lease_of_its_position(
    tmp_path: Path, *, looked: bool
) -> None:
    """Cancelled and granted anew after the last look at the leases: the engine has the group for one more step."""
    made = world(tmp_path, slots=2 * GROUP, partial_rollouts=True)
    next(made.steps())
    assert made.submit() == [0, 1]
    anew = Grant(OWNER, 0, 0, 99, 99, (structs.replace(made.loop._core._running[0].lease, attempt=2),))
    made.inbound.send([Outgoing(HOLDER, Cancel(OWNER, 0, 0, (0,))), Outgoing(HOLDER, anew)])
    made.wire.deliver()
    if looked:
        assert made.loop._something()
    else:
        made.decode()
    found = {position: made.holder._link_of(position).held[position] for position in (0, 1)}
    assert {position: (held.tokens, len(held.outputs)) for position, held in found.items()} == {
        0: (0, 0),
        1: (0, 0) if looked else (GROUP, GROUP),
    }
    made.submit()
    assert found[0].lease.attempt == 2
    assert made.engine.progress() == {0: 0, 1: 0 if looked else GROUP}, "the former group has left the engine"


def test_a_drained_worker_hands_everything_back(tmp_path: Path) -> None:
    made = world(tmp_path, slots=2 * GROUP, partial_rollouts=True)
    next(made.steps())
    assert made.submit() == [0, 1]
    made.decode()
    made.loop.drain()
    assert not made.loop.open()
    made.loop.wait_if_idle()
    condition = made.holder_node.board.condition
    leaving = threading.Thread(target=made.loop.hand_back)
    leaving.start()
    deadline = time.monotonic() + 20
    while leaving.is_alive() and time.monotonic() < deadline:
        with condition:
            made.wire.deliver()
            condition.notify_all()
        leaving.join(0.01)
    assert not leaving.is_alive()
    assert made.holder.held() == []
    assert made.engine.progress() == {}
    assert {lease.workers for lease in made.owner.open_leases()} == {()}
    kept = {entry.lease.position: entry.kept for entry in made.owner.ledgers.unfinished()}
    assert [kept[p] is not None and kept[p].tokens for p in (0, 1, 2)] == [GROUP, GROUP, False]


def test_an_owner_that_is_gone_does_not_keep_a_drained_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = with_layout(tmp_path, ["limits.drain_s=0.2"], partial_rollouts=True)
    next(made.steps())
    made.submit()
    made.loop.drain()
    made.loop.hand_back()
    assert "waiting for the owners to take over leases and results" in caplog.text


def test_a_loop_that_is_over_stays_so_and_says_in_which_term_it_ended(tmp_path: Path) -> None:
    """Its worker is on the way out when training restarts: its agent starts it again."""
    made = world(tmp_path)
    next(made.steps())
    made.submit()
    assert made.loop.open()
    assert made.loop.over_in is None
    made.inbound.send(made.owner.finish(made.now))
    made.wire.deliver()
    assert not made.loop.open()
    made.holder.begin_term(1, (OWNER,), {1: 0}, None, made.now)
    assert not made.holder.run_finished
    assert not made.loop.open()
    assert made.loop.over_in == 0
