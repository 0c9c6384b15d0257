"""Random faults where weights are fetched: every promise is kept, and a core that breaks one is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distflow.sim.scenario import Crash
from distflow.types import Version
from distflow.weights.manifest import CHUNK_BYTES, Manifest
from distflow.weights.swarm import fetch_core
from distflow.weights.swarm.chunk_plan import ChunkDealer
from distflow.weights.swarm.fetch_actions import Landing
from distflow.weights.swarm.patience import Patience
from distflow.weights.swarm_messages import Content
from tests.search.lease_scenario import Pause
from tests.search.swarm_network import SwarmNetwork
from tests.search.weight_faults import judge_weights, weights_of
from tests.search.weight_scenario import LinkCut, WeightRecord, WeightScenario

SCENARIOS = 120


@pytest.mark.parametrize("part", range(4))
def test_no_scenario_breaks_a_promise(part: int) -> None:
    for seed in range(part, SCENARIOS, 4):
        assert judge_weights(seed) is None


def test_the_same_seed_is_the_same_run() -> None:
    assert weights_of(3) == weights_of(3) != weights_of(4)
    assert SwarmNetwork(weights_of(16)).run() == SwarmNetwork(weights_of(16)).run()


def test_a_run_without_faults_sends_a_version_once_and_readers_pass_it_on() -> None:
    scenario = WeightScenario(joins=(0.0, 0.0, 0.0, 5.0), chunks=20, publishes=(1.0,))
    record = SwarmNetwork(scenario).run()
    assert record.sent == {(Content(0, number), ""): 20 * CHUNK_BYTES for number in (1, 2)}
    assert record.passed_on == 2 * 2 * 20 + 20, "two of three each, and the late one only the last"
    assert {host: versions[-1] for host, versions in record.versions.items()} == dict.fromkeys(range(1, 5), (0, 2))


def whole_of(record: WeightRecord) -> list[Version]:
    """What was sent whole."""
    return [Version(content.term, content.number) for content, _ in record.sent if content.base < 0]


def test_a_version_is_sent_once_and_then_what_has_changed_whoever_comes_late() -> None:
    """The last reader gets its first version whole, of the other ones."""
    scenario = WeightScenario(
        joins=(0.0, 0.0, 8.5),
        chunks=20,
        delta_bytes=CHUNK_BYTES + 10,
        publishes=[float(at) for at in range(1, 13)],
        calm_at=13.0,
    )
    record = SwarmNetwork(scenario).run()
    deltas = {(Content(0, number, number - 1), ""): CHUNK_BYTES + 10 for number in range(2, 14)}
    assert record.sent == {(Content(0, 1), ""): 20 * CHUNK_BYTES, **deltas}
    assert record.versions[3] == [(0, number) for number in range(9, 14)]
    assert record.made == 2 * 12 + 4, "all but the first one of each"


@pytest.mark.parametrize("away_s, back, whole", [(1.9, 5, [1]), (2.9, 6, [1, 6])])
def test_a_reader_that_was_away_takes_three_deltas_and_for_longer_the_whole_version(
    away_s: float, back: int, whole: list[int]
) -> None:
    """Three of them are kept: four would be more than half of the version."""
    scenario = WeightScenario(
        joins=(0.0,),
        chunks=20,
        delta_bytes=3 * CHUNK_BYTES,
        publishes=[float(at) for at in range(1, 8)],
        crashes=(Crash(1, 1.9, away_s),),
        calm_at=8.0,
    )
    record = SwarmNetwork(scenario).run()
    assert record.versions[1] == [(0, number) for number in (1, 2, *range(back, 9))]
    assert whole_of(record) == [(0, number) for number in whole]
    assert record.made == len(record.versions[1]) - len(whole)


def test_a_publisher_that_is_killed_while_it_publishes_begins_with_a_whole_version_once_more() -> None:
    scenario = WeightScenario(
        joins=(0.0, 0.0),
        chunks=8,
        delta_bytes=CHUNK_BYTES,
        publishes=(1.0, 2.0, 8.0, 9.0),
        crashes=(Crash(0, 2.05, 1.0),),
        calm_at=10.0,
    )
    record = SwarmNetwork(scenario).run()
    assert whole_of(record) == [(0, 1), (1, 4)], "the third one was never announced"
    assert record.versions[1] == record.versions[2] == [(0, 1), (0, 2), (1, 4), (1, 5), (1, 6)]


def test_without_the_publisher_readers_finish_what_they_have_together() -> None:
    scenario = WeightScenario(
        joins=(0.0, 0.0, 0.0),
        chunks=8,
        rates=(8.0 * CHUNK_BYTES, 2.0 * CHUNK_BYTES),
        crashes=(Crash(0, 1.0, None),),
    )
    assert not SwarmNetwork(scenario).run().versions, "two chunks are nowhere"
    record = SwarmNetwork(replace(scenario, crashes=(Crash(0, 1.22, None),))).run()
    assert record.sent[Content(0, 1), ""] == 8 * CHUNK_BYTES
    assert record.seconds > 2.0, "they had much to give each other"
    assert dict(record.versions) == {host: [Version(0, 1)] for host in (1, 2, 3)}


def test_two_readers_with_wrong_bytes_are_not_asked_for_the_same_chunk_in_turn() -> None:
    """The search found (seed 1717) that the third one asked until it gave up, and the publisher had the chunk."""
    scenario = WeightScenario(joins=(5.0, 0.0, 0.0), chunks=1, liars=frozenset({2, 3}))
    record = SwarmNetwork(scenario).run()
    assert record.versions[1] == [Version(0, 1)]
    assert record.wrong <= 4, "each is asked once, and by the other one of them"
    assert record.seconds < 20.0


def test_a_process_that_was_stopped_for_long_goes_on_with_its_fetch() -> None:
    """The search found (seed 41) that it took the time in which it had not run for silence."""
    scenario = WeightScenario(
        joins=(0.0,),
        chunks=8,
        rates=(2.0 * CHUNK_BYTES,),
        no_progress_s=30.0,
        pauses=(Pause(1, 1.0, 100.0),),
        cuts=(LinkCut((0, 1), 0.7, 101.3, reset=True),),
    )
    record = SwarmNetwork(scenario).run()
    assert dict(record.ended) == {"well": 1}
    assert record.seconds > 101.0


@pytest.mark.parametrize(
    "where, what, instead",
    [
        (Landing, "right", property(lambda landing: True)),
        (fetch_core._Trouble, "ban", lambda trouble, now: None),
        (Patience, "urges", lambda patience, now: None),
        (Patience, "stood_still", lambda patience, seconds: None),
        (Patience, "heard", lambda patience, counts, now: None),
        (ChunkDealer, "gives", lambda dealer, *about, **how: True),
        (Manifest, "chain_from", lambda manifest, had: ()),
    ],
)
def test_a_core_without_a_rule_is_found(
    monkeypatch: pytest.MonkeyPatch, where: type, what: str, instead: object
) -> None:
    monkeypatch.setattr(where, what, instead)
    assert any(judge_weights(seed) is not None for seed in range(SCENARIOS))
