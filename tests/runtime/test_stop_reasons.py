"""Whatever ends a run ends it on every layout, at once and for that reason; what holds it up ends nothing, and is told
by everyone who waits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.e2e import failing_episodes
from tests.runtime import stop_reasons
from tests.runtime.whole_runs import WholeRun, in_memory

HERE, BAD = stop_reasons.__file__, stop_reasons.BAD_ROW
FAILING = failing_episodes.__file__
SMALL = ("batch.prompts=4", "batch.ledgers=2", "batch.max_refills=3", "run.training_steps=500", "run.save_every=0")
LAYOUTS = {
    "colocated": ["layout=colocated"],
    "colocated-2": ["layout=colocated", "layout.pools.worker.count=2"],
    "split": ["layout=split"],
    "async": ["layout=async", "layout.pools.trainer.count=2"],
    "services": ["layout=services", "layout.pools.reward.count=2"],
    "critic": ["layout=critic", "flow=ppo"],
}
REASONS = {
    "equal rewards": (
        [
            "flow.steps.filter={call: 'distflow.workers.shaping:dynamic_sampling', with: {keep_every: 0}}",
            f"flow.steps.reward.with.function={HERE}:equal",
        ],
        r"RefillsExhausted: training step \d+, .*groups were dropped \(equal rewards: \d+\) while 2 are wanted",
    ),
    "a step's own drop": (
        [f"flow.steps.mine={{call: '{HERE}:drops_all'}}"],
        r"RefillsExhausted: training step 1, .*groups were dropped \(too dull: \d+\)",
    ),
    "dropped failures": (
        [
            f"flow.steps.reward.with.function={HERE}:for_some_prompts",
            "flow.steps.reward.with.max_error_rate=1.0",
            "batch.max_refills=0",
        ],
        r"RefillsExhausted: training step \d+, .*groups were dropped \(reward error: \d+\)",
    ),
    "too many failures": (
        [f"flow.steps.reward.with.function={HERE}:for_some_prompts", "flow.steps.reward.with.on_error=zero"],
        r"StepError: (?s:.*)odd ones cannot be judged(?s:.*)samples failed, more than max_error_rate=0.05 allows",
    ),
    "nothing but failures": (
        [f"flow.steps.reward.with.function={HERE}:never", "flow.steps.reward.with.on_error=zero"],
        r"StepError: (?s:.*)no judge is there(?s:.*)all of the first \d+ samples failed",
    ),
    "corrections that leave nothing": (
        ["flow.steps.update.with.correction={geometric_mask: [2.0, 3.0]}"],
        r"WorkerFailed: for 3 training steps in a row, up to step 3, corrections .*saved behind training step 3",
    ),
    "rewards that never differ": (
        [f"flow.steps.reward.with.function={HERE}:equal", f"data.source={HERE}:few", "batch.prompts=2"],
        r"WorkerFailed: in none of the 50 training steps since the run began.*Everything is saved behind .* step 50",
    ),
    "updates without a norm": (
        [f"flow.steps.update.with.loss={HERE}:no_number", "limits.bad_steps=2"],
        r"WorkerFailed: model 'policy' has stayed as it was for 2 .*up to step 2 .*: no norm .* behind training step 2",
    ),
    "samples without a token to train on": (
        [f"flow.steps.sample.call={HERE}:trains_nothing", "limits.bad_steps=2"],
        r"WorkerFailed: model 'policy' has stayed as it was for 2 .*up to step 2 .*: no sample had a token to train on",
    ),
    "an engine without log-probs": (
        [f"layout.pools.GENERATES.engine={HERE}:NoLogprobs", "batch.prompts=16", "batch.max_refills=99"],
        r"WorkerFailed: .*NoLogprobs on .*, version \d+ of term 0: 100 of its last 100 samples came with log-probs",
    ),
    "groups without two samples": (
        [
            f"flow.steps.sample.call={FAILING}:half",
            "flow.steps.sample.with={on_error: leave_out, max_error_rate: 1.0}",
            "batch.max_refills=0",
        ],
        r"RefillsExhausted: .*dropped \(samples left out, ConnectionError: \d+\) .*on_error and max_error_rate of that",
    ),
    "no reward for any sample": (
        [f"flow.steps.reward.with.function={HERE}:unrewarded", "batch.max_refills=0"],
        r"RefillsExhausted: .*dropped \(samples left out, reward missing \(unrewarded returned None or NaN\): \d+\) "
        r".*No step failed: .* Return a number for each",
    ),
    "episodes that fail": (
        [
            f"flow.steps.sample.call={FAILING}:half",
            "flow.steps.sample.with.on_error=leave_out",
            # More than may be dropped before a heartbeat has told what all workers have counted.
            "batch.max_refills=9999",
        ],
        r"StepError: (?s:.*)step 'sample' failed on \d+ of \d+ samples, more than max_error_rate=0\.25",
    ),
    "prompts that raise": (
        [f"data.source={HERE}:broken", "data.with={bad: raises}", "data.shuffle=false"],
        rf"StepError: (?s:.*)the disk with the prompts is gone(?s:.*)at prompt position ({BAD}|{BAD + 1})",
    ),
    "rows that are no prompts": (
        [f"data.source={HERE}:broken", "data.with={bad: text}", "data.shuffle=false"],
        r"UserError: .*there is no column 'prompt'",
    ),
}
SOON_S = 20.0
"""A run that does not hear of its end goes on for limits.no_progress_s=30, and then says something else."""


def some(layouts: list[str]) -> list[ParameterSet]:
    """All layouts, those but these in the long tests."""
    return [pytest.param(name, marks=[] if name in layouts else [pytest.mark.long]) for name in LAYOUTS]


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    with in_memory():
        yield


COMPARED = ("rewards that never differ", "groups without two samples")
"""Reasons of flows whose advantages compare the samples of a prompt, as the critic's does not."""


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        pytest.param(*layout.values, reason, marks=layout.marks)
        for layout in some(["colocated", "colocated-2", "split"])
        for reason in REASONS
        if layout.values != ("critic",) or reason not in COMPARED
    ],
)
def test_every_reason_ends_the_run_on_every_layout(tmp_path: Path, layout: str, reason: str) -> None:
    overrides, said = REASONS[reason]
    generates = "worker" if layout.startswith("colocated") else "rollout"
    run = WholeRun(tmp_path, [*SMALL, *LAYOUTS[layout], *(one.replace("GENERATES", generates) for one in overrides)])
    with pytest.raises(AssertionError) as ended:
        run.go(SOON_S)
    assert re.search(said, str(ended.value)), str(ended.value)
    assert "NoProgressError" not in str(ended.value)


@pytest.mark.parametrize("layout", some(["colocated-2", "services", "critic"]))
def test_all_who_wait_say_for_whom_outside_and_nothing_ends(tmp_path: Path, layout: str) -> None:
    fed = ["data.source=distflow.data.fed:by_clients", "data.with={rows: 64, ahead: 8}", "data.shuffle=false"]
    run = WholeRun(tmp_path, [*SMALL, *LAYOUTS[layout], *fed])
    told: list[float] = []

    def look(seconds: float) -> None:
        names = [str(worker.name) for worker in run.plan.workers]
        waits = [run.sessions[name]._board.waits() for name in names if name in run.sessions]
        whom = "while the run waits for clients to put prompts (Client.put_prompts), row 1 of 64,"
        if len(waits) == len(names) and all(one and one[0]["name"].count(whom) == 1 for one in waits):
            assert all(one[0]["peers"] == [] for one in waits), "none of them has anything to do"
            told.append(time.monotonic())
            for name in names:
                run.stop(name)

    run.go(SOON_S, look)
    assert told
    assert set(run.ended.values()) == {"stopped"}
