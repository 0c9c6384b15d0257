"""Any engine with any backend: exchanged from the command line, and the run learns all the same."""

import importlib.util
import statistics
from pathlib import Path

import pytest

from distflow.workers.smollm2 import main
from tests.e2e.runs import SMALL, Launch, check_trained_once

TRAINER = "layout.pools.trainer"
SGLANG = ["layout.pools.rollout.engine=sglang", "layout.pools.rollout.count=1"]
LIMIT_S = 1500.0
needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here")

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def backend(name: str, *, zero: int | None = None, count: int = 1) -> list[str]:
    more = [] if zero is None else [f"{TRAINER}.zero={zero}"]
    return [f"{TRAINER}.backend={name}", f"{TRAINER}.count={count}", *more]


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(backend("fsdp"), id="torch-fsdp"),
        pytest.param(backend("deepspeed", zero=1), id="torch-zero1"),
        pytest.param(backend("deepspeed", zero=2), id="torch-zero2"),
        pytest.param(backend("deepspeed", zero=3), id="torch-zero3"),
        pytest.param(SGLANG, id="sglang-torch", marks=needs_sglang),
        pytest.param([*SGLANG, *backend("deepspeed", zero=2)], id="sglang-zero2", marks=needs_sglang),
    ],
)
def test_the_quickstart_learns(launch: Launch, chosen: list[str]) -> None:
    """The mean exact-match score of the last 10 training steps is at least 0.9, as with torch and torch."""
    run = launch("quickstart", *chosen)
    assert run.wait(LIMIT_S) == 0, run.output
    scores = [line["critic/score/mean"] for line in run.metrics()]
    assert len(scores) == 600
    assert statistics.mean(scores[-10:]) >= 0.9
    assert run.leftovers() == []


@pytest.mark.parametrize(
    "name, zero", [("torch", None), ("fsdp", None), ("deepspeed", 0), *(("deepspeed", zero) for zero in (1, 2, 3))]
)
def test_backends_agree(launch: Launch, name: str, zero: int | None) -> None:
    """One or two workers, on the same tokens: single precision, three training steps."""
    whole = numbers(launch, backend("torch"))
    for count in (1, 2):
        assert numbers(launch, backend(name, zero=zero, count=count)) == pytest.approx(whole, rel=1e-5, abs=1e-5)


def numbers(launch: Launch, chosen: list[str]) -> list[float]:
    """Losses, entropies and norms of the gradient."""
    run = launch("quickstart", *SMALL, *chosen, "layout.pools.rollout.count=1", "run.training_steps=3")
    assert run.wait(LIMIT_S) == 0, run.output
    check_trained_once(run, 3)
    return [line[name] for line in run.metrics() for name in ("actor/loss", "actor/entropy", "actor/grad_norm")]


@needs_sglang
@pytest.mark.smollm2
def test_a_real_model_with_sglang_and_deepspeed(launch: Launch, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("reasoning_gym")
    model = tmp_path / "model"
    assert main([str(model)]) == 0
    small = ["run.training_steps=2", "batch.prompts=2", "batch.ledgers=2", "batch.samples_per_prompt=2"]
    chosen = [
        *SGLANG,
        *backend("deepspeed", zero=2),
        *small,
        "flow.steps.sample.with.max_new_tokens=12",
    ]
    run = launch("reasoning", f"models.policy.path={model}", *chosen)
    assert run.wait(LIMIT_S) == 0, run.output
    lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["rollout_corr/ratio/max"] == pytest.approx(1.0, abs=2e-2) for line in lines)
    assert run.leftovers() == []
