"""Difficulty pools in whole runs: what is trained on is the same on all layouts, and when a run is resumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.whole_runs import Network, WholeRun, in_memory

PROMPTS, STEPS = 40, 9
JUDGE = '''
def judge(sample):
    """By the last digit of the prompt: always solved, never, or by what was sampled."""
    kind = int(sample.prompt[-2]) % 4
    return 1.0 if kind == 0 else 0.0 if kind == 1 else float(sum(map(ord, sample.response)) % 2)
'''
DIFFICULTY = (
    "data.difficulty={retire_solved: 1, retire_unsolved: 2, "
    "pools: {hard: {up_to: 0.4}, medium: {up_to: 0.9, weight: 0.6}, easy: {up_to: 1, weight: 0.3}}}"
)
BASE = (
    "layout=split",
    "batch.prompts=8",
    "batch.ledgers=4",
    f"run.training_steps={STEPS}",
    "run.save_every=1",
    "run.keep_checkpoints=100",
)


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    with in_memory():
        yield


def go(folder: Path, *settings: str, term: int = 0, network: Network | None = None) -> dict[int, Counter[str]]:
    """The prompts of each training step."""
    folder.mkdir(exist_ok=True)
    (folder / "judge.py").write_text(JUDGE)
    lines = [json.dumps({"prompt": f"{number:03}=", "answer": "1"}) for number in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    here = (f"data.source={folder}/prompts.jsonl", f"flow.steps.reward.with.function={folder}/judge.py:judge")
    WholeRun(folder, [*BASE, *here, *settings], network, term=term).go()
    return trained(folder)


def trained(folder: Path) -> dict[int, Counter[str]]:
    found: dict[int, Counter[str]] = {}
    for file in sorted(folder.glob("rollouts/step_*/*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            if line["sample"] == 0:
                found.setdefault(line["step"], Counter())[f"{line['prompt']} at {line['uid'][2]}"] += 1
    return found


def metrics(folder: Path, worker: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics" / f"{worker}.jsonl").read_text().splitlines()]


ONE, TWO = ("layout.pools.rollout.count=1",), ("layout.pools.trainer.count=2",)
SOLVED, UNSOLVED = 0, 1


def kind(prompt: str) -> int:
    return int(prompt.partition("=")[0][-1]) % 4


def test_retired_prompts_are_left_out_whatever_the_layout(tmp_path: Path) -> None:
    one = go(tmp_path / "one", DIFFICULTY, *ONE)
    assert sorted(one) == [*range(1, STEPS + 1)]
    assert one == go(tmp_path / "two", DIFFICULTY, *TWO)
    visits: dict[str, list[int]] = {}
    for step, places in one.items():
        for place in places:
            visits.setdefault(place.partition(" ")[0], []).append(step)
    assert len(visits) == PROMPTS
    assert {len(steps) for prompt, steps in visits.items() if kind(prompt) == SOLVED} == {1}
    for steps in (steps for prompt, steps in visits.items() if kind(prompt) == UNSOLVED):
        assert len([step for step in steps if step < steps[-1]]) < 2, "one that is retired is not visited any more"
    assert max(map(len, visits.values())) > 2
    lines = metrics(tmp_path / "one", "trainer-0")
    last = lines[-1]
    assert last["data/retired_solved"] >= sum(kind(prompt) == SOLVED for prompt in visits)
    assert last["data/unseen"] == 0
    assert sum(line["data/passed_over"] for line in lines) > 0
    counts = [last[f"data/{name}"] for name in ("pool/hard", "pool/medium", "pool/easy")]
    assert sum(counts) + last["data/retired_solved"] + last["data/retired_unsolved"] == PROMPTS
    both = [metrics(tmp_path / "two", worker)[-1] for worker in ("trainer-0", "trainer-1")]
    assert [line["data/retired_solved"] for line in both] == [last["data/retired_solved"]] * 2


@pytest.mark.parametrize(("flow", "staleness"), [("dapo", 0), ("grpo", 1)])
def test_a_run_that_is_resumed_goes_on_with_the_same_prompts(tmp_path: Path, flow: str, staleness: int) -> None:
    """Also by fewer training workers. Groups that were dropped count as visits."""
    settings = (DIFFICULTY, f"flow={flow}", f"layout.max_staleness={staleness}", "layout.refresh=at_bound")
    whole = go(tmp_path / "whole", *settings, *ONE)
    go(tmp_path / "cut", *settings, *TWO, "run.stop_after=5")
    assert go(tmp_path / "cut", *settings, *ONE, term=1) == whole
    last = metrics(tmp_path / "whole", "trainer-0")[-1]
    assert metrics(tmp_path / "cut", "trainer-0")[-1]["data/retired_solved"] == last["data/retired_solved"]
    if flow == "dapo":
        solved = {place for places in whole.values() for place in places if kind(place) == SOLVED}
        assert last["data/retired_solved"] > len(solved)
