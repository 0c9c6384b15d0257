"""A colocated worker whose sides take turns on the device trains exactly as one in which both stay."""

from __future__ import annotations

import json

import pytest

from tests.e2e.runs import Launch, Run
from tests.e2e.test_layout_invariance import norms, tokens

COLOCATED = ["layout=colocated", "run.training_steps=4", "batch.prompts=16", "flow.steps.sample.with.max_new_tokens=12"]
OFFLOAD = "layout.pools.worker.offload=true"


def pair(launch: Launch, *settings: str) -> tuple[Run, Run]:
    runs = launch("quickstart", *COLOCATED, *settings), launch("quickstart", *COLOCATED, *settings, OFFLOAD)
    for run in runs:
        assert run.wait() == 0, run.output
        assert run.leftovers() == []
    return runs


def test_tokens_and_gradients_are_those_of_a_run_without(launch: Launch) -> None:
    """With a checkpoint after each training step, which is still being copied when generation begins."""
    stays, moves = pair(launch, "run.save_every=1")
    assert tokens(moves) == tokens(stays)
    assert norms(moves) == norms(stays)
    assert list(moves.folder.glob("checkpoints/step_000004/COMMIT"))
    (line, *_) = [json.loads(text) for text in (moves.folder / "metrics" / "worker-0.jsonl").read_text().splitlines()]
    assert line["timing_s/offload"] > 0
    assert line["memory/host_peak_gb/max"] > 0.1
    assert "peak memory of a worker: 0." in moves.output


@pytest.mark.long
@pytest.mark.parametrize("refresh", ["eager", "at_bound"])
def test_open_samples_come_back_as_they_were(launch: Launch, refresh: str) -> None:
    """Nothing is learnt: which tokens come from which version is then a matter of time, and the tokens are not."""
    late = ["layout.max_staleness=1", "layout.pools.worker.slots=100", "models.policy.optimizer.lr=0.0"]
    stays, moves = pair(launch, *late, f"layout.refresh={refresh}")
    assert tokens(moves) == tokens(stays)
    assert norms(moves) == pytest.approx(norms(stays), rel=1e-4)
    if refresh == "eager":
        spans = [len(line["policy_versions"]) for line in moves.dumps()]
        assert max(spans) > 1, "no sample was open while the worker trained"


@pytest.mark.long
@pytest.mark.parametrize(
    "backend", [["backend=fsdp"], ["backend=deepspeed", "zero=3"], ["backend=deepspeed", "zero=2"]], ids=str
)
def test_models_that_are_divided_leave_and_come_back(launch: Launch, backend: list[str]) -> None:
    settings = [f"layout.pools.worker.{setting}" for setting in ["count=2", *backend]]
    frozen = ["flow=grpo_kl"] if backend != ["backend=deepspeed", "zero=3"] else []
    stays, moves = pair(launch, *settings, *frozen)
    assert tokens(moves) == tokens(stays)
    assert norms(moves)[:2] == pytest.approx(norms(stays)[:2], rel=1e-4)
