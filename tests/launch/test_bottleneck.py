"""Where time goes: measured by each worker, merged exactly, said in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distflow.launch.observe.alerts import verdict, where_time_went
from distflow.metrics.merge import MetricsReader


def split(
    trainer: float,
    rollout: float,
    generate: float = 0.5,
    score: float = 0.1,
    staleness: float = 1,
    environment: float = 0.0,
    **services: float,
) -> str:
    shares = {"trainer_idle": trainer, "rollout_idle": rollout, "generate": generate, "score": score}
    shares["environment"] = environment
    metrics = {f"perf/{name}_share": value for name, value in shares.items()}
    metrics |= {f"perf/idle_share/{name}": value for name, value in services.items()}
    return verdict({**metrics, "staleness/max": staleness})


@pytest.mark.parametrize(
    "found, expected",
    [
        (split(0.63, 0.04), "rollout-bound: trainers waited 63%, rollouts 4%"),
        (split(0.12, 0.55), "training-bound: trainers waited 12%, rollouts 55%"),
        (split(0.05, 0.08), "balanced: trainers waited 5%, rollouts 8%"),
        (
            split(0.5, 0.1, generate=0.2, score=0.7),
            "reward-bound: trainers waited 50%, rollouts 10%; rewards took 70%, generation 20%",
        ),
        (
            split(0.45, 0.4, staleness=0),
            "they take turns: trainers waited 45%, rollouts 40% (try layout.max_staleness=1)",
        ),
        (
            split(0.4, 0.68, staleness=0),
            "they take turns: trainers waited 40%, rollouts 68% (try layout.max_staleness=1)",
        ),
        (split(0.45, 0.4, staleness=1), "balanced: trainers waited 45%, rollouts 40%"),
        (verdict({"perf/trainer_idle_share": 0.5}), ""),
        (
            split(0.6, 0.05, generate=0.3, environment=0.5),
            "environments: trainers waited 60%, rollouts 5%; engines had nothing to decode 50% of the time",
        ),
        (split(0.6, 0.05, generate=0.5, environment=0.3), "rollout-bound: trainers waited 60%, rollouts 5%"),
        (split(0.1, 0.05, generate=0.3, environment=0.5), "balanced: trainers waited 10%, rollouts 5%"),
        (
            split(0.6, 0.55, judge=0.03, reference=0.7),
            "judge-bound: trainers waited 60%, rollouts 55%, judge 3% (give it more workers)",
        ),
        (split(0.1, 0.1, judge=0.03), "balanced: trainers waited 10%, rollouts 10%"),
    ],
)
def test_two_sides_that_wait_for_each_other(found: str, expected: str):
    assert found == expected


def test_one_worker_that_does_both():
    def colocated(generation: float, idle: float = 0.0, score: float = 0.1, environment: float = 0.0) -> str:
        shares = {"generation": generation, "rollout_idle": idle, "generate": 0.5, "score": score, "trainer_idle": 0.0}
        shares["environment"] = environment
        return verdict({f"perf/{name}_share": value for name, value in shares.items()})

    assert colocated(0.71) == "generation-bound: generation took 71% of a training step, training 29%"
    assert colocated(0.5) == "balanced: generation took 50% of a training step, training 50%"
    assert colocated(0.2) == "training-bound: generation took 20% of a training step, training 80%"
    assert colocated(0.8, score=0.6).startswith("reward-bound: ")
    assert colocated(0.8, environment=0.6).endswith("; engines had nothing to decode 60% of that time")
    assert colocated(0.8, idle=0.5).endswith("training 20%, 40% of it waiting for others")


def write(folder: Path, stem: str, *lines: dict[str, float]) -> None:
    (folder / "metrics").mkdir(exist_ok=True)
    with (folder / "metrics" / f"{stem}.jsonl").open("a") as file:
        file.writelines(json.dumps({"term": 0, **line}) + "\n" for line in lines)


def share(name: str, value: float, seconds: float) -> dict[str, float]:
    return {f"perf/{name}_share": value, f"perf/{name}_share.weight": seconds}


def test_the_window_is_merged_by_seconds_over_workers_and_steps(tmp_path: Path):
    write(
        tmp_path,
        "trainer-0",
        {"step": 1, **share("trainer_idle", 0.0, 50.0)},
        {"step": 2, **share("trainer_idle", 0.5, 1.0)},
        {"step": 3, **share("trainer_idle", 0.9, 3.0)},
    )
    write(tmp_path, "rollout-0", {"step": 3, **share("rollout_idle", 0.0, 1.0)})
    write(tmp_path, "rollout-1", {"step": 3, **share("rollout_idle", 0.4, 3.0)})
    reader = MetricsReader(tmp_path)
    reader.read()
    assert where_time_went(reader, 3, 2) == "rollout-bound: trainers waited 80%, rollouts 30%"
    write(tmp_path, "trainer-0", {"step": 3, **share("trainer_idle", 0.5, 3.0), "term": 1})
    write(tmp_path, "rollout-0", {"step": 3, **share("rollout_idle", 0.4, 3.0), "term": 1})
    reader.read()
    assert where_time_went(reader, 3, 1).startswith("balanced: "), "the newest term counts"


def test_time_before_the_present_term_does_not_count(tmp_path: Path):
    """What was waited for a restart least of all."""
    idle, busy = share("rollout_idle", 0.9, 100.0), share("rollout_idle", 0.1, 1.0)
    old, new = share("trainer_idle", 0.0, 100.0), share("trainer_idle", 0.8, 1.0)
    for step in range(1, 9):
        write(tmp_path, "trainer-0", {"step": step, **old})
        write(tmp_path, "rollout-0", {"step": step, **idle})
    for step in range(5, 7):
        write(tmp_path, "trainer-0", {"step": step, "term": 1, **new})
        write(tmp_path, "rollout-0", {"step": step, "term": 1, **busy})
    reader = MetricsReader(tmp_path)
    reader.read()
    for steps in (6, 20):
        assert where_time_went(reader, 6, steps) == "rollout-bound: trainers waited 80%, rollouts 10%"
    assert where_time_went(reader, 4, 4) == "training-bound: trainers waited 0%, rollouts 90%"
