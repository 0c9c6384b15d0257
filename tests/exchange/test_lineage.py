"""What generating workers keep when the owners restart: each position is trained exactly once over both lives."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from distflow.errors import ProtocolError
from distflow.exchange.messages import Ack, Cancel, Finished, Result
from distflow.exchange.owner import OwnerCore
from distflow.types import Version
from tests.exchange.lease_asker import Asker, granted, kinds
from tests.exchange.test_lease_client import asks, grant, new_holder
from tests.exchange.test_lease_properties import doom, long_tail
from tests.search.lease_network import FaultyNetwork
from tests.search.lease_scenario import SMALL, FaultRecord, FaultScenario, Renewal, prompt_at


def run(scenario: FaultScenario) -> FaultRecord:
    return FaultyNetwork(scenario).run()


def test_a_version_survives_if_every_later_term_began_at_it_or_behind_it() -> None:
    begins = {1: 20, 3: 40}
    assert all(Version(*v).survives(begins) for v in [(0, 20), (1, 40), (2, 40), (3, 999)])
    assert not any(Version(*v).survives(begins) for v in [(0, 21), (1, 41), (2, 41)])


def long_groups(renewal: Renewal, **changes: object) -> FaultScenario:
    limits = replace(SMALL, training_steps=3, partial_rollouts=True, **changes)
    return FaultScenario(limits, owners=2, workers=2, slots=16, seconds=lambda _: 20.0, tokens=40, renewals=[renewal])


def test_groups_on_the_weights_of_the_checkpoint_go_on() -> None:
    """The owners are lost while the first training step is generated: nothing has been trained since version 0."""
    scenario = long_groups(Renewal(15.0, 1))
    record, undisturbed = run(scenario), run(replace(scenario, renewals=()))
    assert record.kept == 8
    assert record.trained == undisturbed.trained
    assert record.produced == undisturbed.produced, "not a token was generated twice"


def test_groups_go_on_although_their_prompts_have_yet_to_be_read() -> None:
    """The owners of the next term cannot lease anything yet when they hear of the groups that workers go on with."""
    for seed in range(5):
        scenario = replace(long_groups(Renewal(15.0, 1)), read_s=3.0, seed=seed)
        record, undisturbed = run(scenario), run(replace(scenario, renewals=()))
        assert record.kept >= 6
        assert record.trained == undisturbed.trained
        assert record.produced < 1.03 * undisturbed.produced, "hardly a token was generated twice"


def test_groups_on_later_weights_are_generated_again() -> None:
    """A checkpoint after two training steps, lost in the second one: version 1 does not survive."""
    scenario = replace(long_groups(Renewal(35.0, 2)), save_every=2)
    record, undisturbed = run(scenario), run(replace(scenario, renewals=()))
    assert record.kept == 0
    assert record.trained == undisturbed.trained
    assert record.produced > undisturbed.produced


def busy_when_terms_begin(seed: int, workers: int, groups_at_once: int, **changes: object) -> FaultScenario:
    """A term every 12 s, from a checkpoint of every third training step."""
    draw = random.Random(seed)
    return FaultScenario(
        replace(SMALL, max_staleness=3, training_steps=6, **changes),
        workers=workers,
        slots=4 * groups_at_once,
        seconds=uneven(seed),
        tokens=20,
        renewals=[Renewal(draw.uniform(12 * i, 12 * i + 12), 1) for i in range(1, 8)],
        save_every=3,
        seed=seed,
    )


def test_no_token_of_abandoned_weights_is_trained_on() -> None:
    """A term begins while announced weights wait to be loaded."""
    for seed in (2, 4, 14):
        assert run(replace(busy_when_terms_begin(seed, 2, 3, partial_rollouts=True), load_s=2.0)).kept > 0


def test_a_group_that_is_granted_anew_while_its_reward_is_computed_is_generated_once_more() -> None:
    for seed in (10, 16):
        scenario = replace(busy_when_terms_begin(seed, 1, 6), step_s=3.0)
        assert run(scenario).trained == run(replace(scenario, renewals=())).trained


def uneven(seed: int) -> Callable[[int], float]:
    return lambda position: random.Random(seed * 7919 + position).lognormvariate(1.0, 0.8)


def test_a_group_that_was_cancelled_is_not_the_result_of_its_next_lease() -> None:
    """It finishes in the decode step in which the word of the term came, before its worker has read of either."""
    holder = new_holder()
    holder.want(100, 0.0)
    holder.handle(grant(0, 1), 0.0)
    holder.take_granted()
    holder.begin_term(1, ["trainer/0"], {1: 0}, Version(0, 1), 1.0)
    holder.want(100, 1.0)
    holder.handle(grant(0, 1, term=1, ask=2), 1.0)
    holder.report(0, 7, 1)
    assert holder.finished(0, Version(0, 1), 10, "", 1.0) == []
    assert (holder.take_acked(), holder.take_cancelled()) == ([0], [0, 1])
    assert [lease.position for lease in holder.take_granted()] == [0, 1]
    sent = holder.finished(0, Version(1, 0), 10, "", 2.0)
    assert [item.message.oldest for item in sent if isinstance(item.message, Result)] == [Version(1, 0)]


def test_a_result_from_abandoned_weights_is_refused_though_they_are_new_enough() -> None:
    snapshot = {
        "version": 1,
        "batch_ledgers": 4,
        "groups_per_ledger": 2,
        "ledgers": [{"ledger": j, "frontier": 2, "dropped": [], "trained": []} for j in range(4)],
    }
    limits = replace(SMALL, max_staleness=1)
    owner = OwnerCore("trainer/0", limits, range(4), prompt_at, term=1, snapshot=snapshot, begins={1: 1})
    asker = Asker(owner)
    position = granted(asker.ask(1))[0].position
    abandoned = structs.replace(asker.result(position), oldest=Version(0, 2))
    assert not owner.keeps(abandoned)
    assert kinds(owner.handle(abandoned, 0.0)) == [Cancel]
    surviving = structs.replace(abandoned, oldest=Version(0, 1))
    assert owner.keeps(surviving)
    assert kinds(owner.handle(surviving, 0.0)) == [Ack]


def test_a_finished_group_goes_on_only_if_its_own_weights_survive() -> None:
    holder = new_holder()
    holder.want(100, 0.0)
    holder.handle(grant(0, 1), 0.0)
    holder.take_granted()
    holder.finished(0, Version(0, 2), 10, "", 0.0)
    holder.finished(1, Version(0, 1), 10, "", 0.0)
    holder.begin_term(2, ["trainer/0"], {1: 1, 2: 1}, Version(1, 1), 1.0)
    assert holder.held() == [1]


@st.composite
def scenarios(draw: st.DrawFn) -> FaultScenario:
    seed = draw(st.integers(0, 2**20))
    limits = replace(
        SMALL,
        groups_per_ledger=draw(st.integers(1, 3)),
        max_staleness=draw(st.integers(0, 3)),
        training_steps=draw(st.integers(1, 5)),
        max_refills=10**6,
        partial_rollouts=draw(st.sampled_from([True, True, False])),
        hedging=draw(st.booleans()),
    )
    renewals = draw(st.lists(st.builds(Renewal, st.floats(0.0, 25.0), st.integers(1, 4)), max_size=3))
    return FaultScenario(
        replace(limits, memory_bytes=400 * limits.groups_per_ledger * 4 * draw(st.sampled_from([1, 100]))),
        owners=draw(st.integers(1, 4)),
        workers=draw(st.integers(1, 4)),
        slots=4 * draw(st.integers(1, 4)),
        seconds=long_tail(seed, False),
        dropped=doom(draw(st.sampled_from([0.0, 0.3])), seed),
        tokens=draw(st.sampled_from([1, 10])),
        loss=draw(st.sampled_from([0.0, 0.2])),
        duplicates=draw(st.sampled_from([0.0, 0.2])),
        delay_s=draw(st.sampled_from([0.01, 2.0])),
        save_every=draw(st.integers(1, 3)),
        seed=seed,
        renewals=renewals,
        step_s=draw(st.sampled_from([0.0, 1.0])),
        load_s=draw(st.sampled_from([0.0, 2.0])),
        read_s=draw(st.sampled_from([0.0, 0.0, 3.0])),
    )


@settings(max_examples=60)
@given(scenarios())
def test_whatever_is_kept_every_position_ends_once(scenario: FaultScenario) -> None:
    record = run(scenario)
    assert record.trained == run(replace(scenario, renewals=())).trained
    assert max(record.lags, default=0) <= (scenario.settings.max_staleness or 0)


def test_a_pool_that_shrank_has_other_owners() -> None:
    holder = new_holder(owners=3, home=2)
    asked = asks(holder.want(100, 0.0))
    assert [to for to, *_ in asked] == ["trainer/2"]
    holder.handle(grant(2, owner="trainer/2"), 0.0)
    holder.take_granted()
    assert holder.begin_term(1, ["trainer/0", "trainer/2"], {1: 0}, None, 1.0) == []
    assert (holder.owners, holder.take_cancelled(), holder.held()) == (("trainer/0", "trainer/2"), [2], [])
    # Ledger 2 of 4 is now the first owner's, ledger 3 the second's.
    asked = asks(holder.want(100, 1.0))
    assert [(to, number) for to, number, *_ in asked] == [("trainer/0", 2)]
    holder.handle(grant(2, 6, term=1, ask=2), 1.0)
    holder.handle(grant(3, owner="trainer/2", term=1), 1.0)
    assert [lease.position for lease in holder.take_granted()] == [2, 6, 3]
    with pytest.raises(ProtocolError, match="unknown owner 'trainer/1'"):
        holder.handle(grant(1, owner="trainer/1"), 2.0)
    for owner in ("trainer/0", "trainer/2"):
        holder.handle(Finished(owner, 1), 3.0)
    assert holder.run_finished


def test_what_is_known_of_the_owners_is_not_undone_by_late_word() -> None:
    holder = new_holder(owners=2)
    holder.begin_term(2, ["trainer/0"], {2: 0}, None, 1.0)
    holder.want(100, 0.0)
    holder.handle(grant(0, 1, term=2), 0.0)
    holder.begin_term(1, ["trainer/0", "trainer/1"], {1: 0}, None, 1.0)
    holder.begin_term(2, ["trainer/0"], {2: 0}, None, 1.0)
    assert (holder.owners, holder.held()) == (("trainer/0",), [0, 1])
