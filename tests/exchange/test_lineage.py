"""What generating workers keep when the owners begin anew: each position is trained exactly once over both lives."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.testing.lease_network import SMALL, LeaseNetwork, Scenario
from distflow.testing.lease_scenario import Record, Renewal
from distflow.types import Version
from tests.exchange.test_lease_properties import doom, long_tail


def run(scenario: Scenario) -> Record:
    return LeaseNetwork(scenario).run()


def test_a_version_survives_if_every_later_term_began_at_it_or_behind_it() -> None:
    begins = {1: 20, 3: 40}
    assert all(Version(*v).survives(begins) for v in [(0, 20), (1, 40), (2, 40), (3, 999)])
    assert not any(Version(*v).survives(begins) for v in [(0, 21), (1, 41), (2, 41)])


def long_groups(renewal: Renewal, **changes: object) -> Scenario:
    limits = replace(SMALL, training_steps=3, partial_rollouts=True, **changes)
    return Scenario(
        limits, owners=2, workers=2, groups_at_once=4, seconds=lambda _: 20.0, tokens=40, renewals=[renewal]
    )


def test_groups_on_the_weights_of_the_checkpoint_go_on() -> None:
    """The owners are lost while the first training step is generated: nothing has been trained since version 0."""
    scenario = long_groups(Renewal(15.0, 1))
    record, undisturbed = run(scenario), run(replace(scenario, renewals=()))
    assert record.kept == 8
    assert record.trained == undisturbed.trained
    assert record.produced == undisturbed.produced, "not a token was generated twice"


def test_groups_on_later_weights_are_generated_again() -> None:
    """A checkpoint after two training steps, lost in the second one: version 1 does not survive."""
    scenario = replace(long_groups(Renewal(35.0, 2)), save_every=2)
    record, undisturbed = run(scenario), run(replace(scenario, renewals=()))
    assert record.kept == 0
    assert record.trained == undisturbed.trained
    assert record.produced > undisturbed.produced


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
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
    return Scenario(
        replace(limits, memory_bytes=400 * limits.groups_per_ledger * 4 * draw(st.sampled_from([1, 100]))),
        owners=draw(st.integers(1, 4)),
        workers=draw(st.integers(1, 4)),
        groups_at_once=draw(st.integers(1, 4)),
        seconds=long_tail(seed, False),
        dropped=doom(draw(st.sampled_from([0.0, 0.3])), seed),
        tokens=draw(st.sampled_from([1, 10])),
        loss=draw(st.sampled_from([0.0, 0.2])),
        duplicates=draw(st.sampled_from([0.0, 0.2])),
        delay_s=draw(st.sampled_from([0.01, 2.0])),
        save_every=draw(st.integers(1, 3)),
        seed=seed,
        renewals=renewals,
    )


@settings(max_examples=60, deadline=None)
@given(scenarios())
def test_whatever_is_kept_every_position_ends_once(scenario: Scenario) -> None:
    record = run(scenario)
    assert record.trained == run(replace(scenario, renewals=())).trained
    assert max(record.lags, default=0) <= (scenario.settings.max_staleness or 0)
