"""Random faults where weights are fetched: every promise is kept, and a core that breaks one is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distflow.sim.scenario import Crash
from distflow.sim.swarm_network import SwarmNetwork
from distflow.sim.weight_faults import judge_weights, weights_of
from distflow.sim.weight_scenario import WeightScenario
from distflow.types import Version
from distflow.weights.manifest import CHUNK_BYTES
from distflow.weights.swarm import fetch_core
from distflow.weights.swarm.chunk_plan import ChunkDealer
from distflow.weights.swarm.fetch_actions import Landing
from distflow.weights.swarm.patience import Patience

SCENARIOS = 150
FOUND = (20, 76, 86, 196, 1717)
"""Seeds that broke a promise once: a chunk was asked for that had just been dealt on another connection; one landed on
a connection that was given up; a process that had been stopped took that for silence; of two readers with wrong bytes
each was asked for the same chunk again and again."""


@pytest.mark.parametrize("part", range(4))
def test_no_scenario_breaks_a_promise(part: int) -> None:
    for seed in range(part, SCENARIOS, 4):
        assert judge_weights(seed) is None


@pytest.mark.parametrize("seed", FOUND)
def test_what_broke_a_promise_once_is_mended(seed: int) -> None:
    assert judge_weights(seed) is None


def test_the_same_seed_is_the_same_run() -> None:
    assert weights_of(3) == weights_of(3) != weights_of(4)
    assert SwarmNetwork(weights_of(16)).run() == SwarmNetwork(weights_of(16)).run()


def test_a_run_without_faults_sends_a_version_once_and_readers_pass_it_on() -> None:
    scenario = WeightScenario(joins=(0.0, 0.0, 0.0, 5.0), chunks=20, publishes=(1.0,))
    record = SwarmNetwork(scenario).run()
    assert record.sent == {(Version(0, number), ""): 20 * CHUNK_BYTES for number in (1, 2)}
    assert record.passed_on == 2 * 2 * 20 + 20, "two of three each, and the late one only the last"
    assert {host: versions[-1] for host, versions in record.versions.items()} == dict.fromkeys(range(1, 5), (0, 2))


def test_without_the_publisher_readers_finish_what_they_have_together() -> None:
    scenario = WeightScenario(
        joins=(0.0, 0.0, 0.0),
        chunks=8,
        rates=(8.0 * CHUNK_BYTES, 2.0 * CHUNK_BYTES),
        crashes=(Crash(0, 1.0, None),),
    )
    assert not SwarmNetwork(scenario).run().versions, "two chunks are nowhere"
    record = SwarmNetwork(replace(scenario, crashes=(Crash(0, 1.22, None),))).run()
    assert record.sent[Version(0, 1), ""] == 8 * CHUNK_BYTES
    assert record.seconds > 2.0, "they had much to give each other"
    assert dict(record.versions) == {host: [Version(0, 1)] for host in (1, 2, 3)}


@pytest.mark.parametrize(
    "where, what, instead",
    [
        (Landing, "right", property(lambda landing: True)),
        (fetch_core._Trouble, "ban", lambda trouble, now: None),
        (Patience, "urges", lambda patience, now: None),
        (Patience, "stood_still", lambda patience, seconds: None),
        (Patience, "heard", lambda patience, counts, now: None),
        (ChunkDealer, "gives", lambda dealer, *about, **how: True),
    ],
)
def test_a_core_without_a_rule_is_found(
    monkeypatch: pytest.MonkeyPatch, where: type, what: str, instead: object
) -> None:
    monkeypatch.setattr(where, what, instead)
    assert any(judge_weights(seed) is not None for seed in range(SCENARIOS))
