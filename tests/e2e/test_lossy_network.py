"""Of all messages one in ten is lost, one in ten comes twice, and the first of each kind to each peer never arrives."""

import pytest

from tests.e2e.runs import Launch, check_trained_once

STEPS = 8


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["layout=async"], marks=pytest.mark.long),
        ["layout=split", "layout.pools.trainer.count=2", "batch.tokens_per_microbatch=256"],
        pytest.param(
            ["layout=colocated", "layout.pools.worker.count=2", "layout.max_staleness=1"], marks=pytest.mark.long
        ),
    ],
    ids=["1 trainer", "2 trainers", "2 colocated"],
)
def test_lost_and_doubled_messages_lose_and_double_nothing(launch: Launch, layout: list[str]) -> None:
    run = launch("quickstart", *layout, f"run.training_steps={STEPS}", "--worker-entry", "tests.e2e.lossy:run_worker")
    assert run.wait() == 0, run.output
    check_trained_once(run, STEPS, prompts=32)
    assert run.leftovers() == []
