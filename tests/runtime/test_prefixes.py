"""Steps with a prefix: what they see, what they write, and how what they measure is called."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from distflow.data.batch import Batch, Ragged, RowRange, row_lengths
from distflow.data.prefixes import prompts_complaint
from distflow.errors import StepError
from distflow.exchange.sample_channel import _oldest
from distflow.flow.plan import StepPlan
from distflow.flow.recipe_check import plan_recipe
from distflow.runtime.further_generating import wrong_prompts
from distflow.runtime.metrics import MetricStore, PrefixedMetrics
from distflow.runtime.steps import StepContext, StepRunner
from distflow.types import Version

SOURCE = """\
import torch

from distflow import step


@step(role="score", reads=["response_ids"], writes=["reward"], may_write=["rewards/*", "drop_reason"])
def long(batch, ctx, *, spoil=False):
    assert "score" not in batch, "that of the policy"
    lengths = batch.ragged("response_ids").lengths.float()
    ctx.metrics.mean("actor/length", float(lengths.mean()))
    more = {"response_ids": batch.ragged("response_ids").like(batch.ragged("response_ids").values + 1)} if spoil else {}
    return batch.with_columns(reward=lengths, **{"rewards/tokens": lengths}, **more)
"""


def ragged(*rows: list[int]) -> Ragged:
    return Ragged.from_rows(rows, torch.int64)


def batch() -> Batch:
    return Batch(
        {
            "group": torch.tensor([7, 7]),
            "score": torch.tensor([0.0, 1.0]),
            "prompt_ids": ragged([1], [1]),
            "response_ids": ragged([2], [2]),
            "solver/prompt_ids": ragged([1, 2], [1, 2, 3]),
            "solver/response_ids": ragged([3, 4, 5], [6]),
        }
    )


@pytest.fixture
def steps(tmp_path: Path) -> tuple[StepRunner, MetricStore]:
    file = tmp_path / "steps.py"
    file.write_text(SOURCE)
    metrics = MetricStore()
    names = [*(f"solver/{name}" for name in ("response_ids", "reward", "rewards/*")), "drop_reason"]
    plans = [
        StepPlan(name, f"{file}:long", "score", "sample", None, settings, *parts, prefix="solver")
        for name, settings in (("judge", {}), ("spoiler", {"spoil": True}))
        for parts in [((names[0],), (names[1],), tuple(names[2:]))]
    ]
    contexts = {plan.name: StepContext(plan.name, metrics=PrefixedMetrics(metrics, "solver")) for plan in plans}
    return StepRunner("rollout/0", plans, contexts), metrics


def test_a_step_sees_a_further_models_samples_by_the_names_of_the_policys(
    steps: tuple[StepRunner, MetricStore],
) -> None:
    runner, metrics = steps
    given = batch()
    found = runner.call("judge", given)
    assert found.dense("solver/reward").tolist() == found.dense("solver/rewards/tokens").tolist() == [3.0, 1.0]
    assert set(found.columns) - set(given.columns) == {"solver/reward", "solver/rewards/tokens"}
    assert found["response_ids"] is given["response_ids"]
    assert metrics.drain()["solver/length"] == 2.0


def test_it_may_not_change_what_it_does_not_write(steps: tuple[StepRunner, MetricStore]) -> None:
    with pytest.raises(StepError, match=r"changed 'response_ids', which it does not declare to write"):
        steps[0].call("spoiler", batch())


def test_metrics_of_a_prefix_drop_the_names_of_actor_and_critic() -> None:
    store = MetricStore()
    metrics = PrefixedMetrics(store, "solver")
    metrics.mean("actor/loss", 2.0)
    metrics.max("critic/score/max", 1.0)
    metrics.add("reward/errors", 3)
    with metrics.timed("timing_s/solved"):
        pass
    assert metrics.counts() == {"reward/errors": 3}
    assert metrics.mean_so_far("actor/loss") == (2.0, 1.0)
    line = store.drain()
    assert {"solver/loss", "solver/score/max", "solver/reward/errors", "timing_s/solved"} <= set(line)


def test_tokens_and_versions_of_all_models_count() -> None:
    spans = Ragged(torch.tensor([[0, 4, 0, 1], [0, 4, 0, 1]]), torch.tensor([0, 1, 2]))
    later = Ragged(torch.tensor([[0, 5, 0, 3], [0, 3, 0, 1]]), torch.tensor([0, 1, 2]))
    both = batch().with_columns(**{"policy_versions": spans, "solver/policy_versions": later})
    assert row_lengths(both).tolist() == [1 + 1 + 2 + 3, 1 + 1 + 3 + 1]
    assert row_lengths(both.only(["solver/prompt_ids", "solver/response_ids"])).tolist() == [5, 4]
    oldest = _oldest(both)
    assert [oldest(RowRange(both, row, row + 1)) for row in (0, 1)] == [Version(0, 4), Version(0, 3)]


def prompts(**columns: Ragged | torch.Tensor) -> Batch:
    """Of one group, as the generate step of a further model sees them."""
    given = {
        "uid": torch.tensor([[0, 5, 7], [0, 5, 7]]),
        "group": torch.tensor([7, 7]),
        "sample": torch.tensor([0, 1]),
        "prompt_ids": ragged([1], [1, 2, 3]),
        "prompt_text": Ragged.from_texts(["a", "b"]),
        "task": Ragged.from_texts(["{}", '{"answer": 1}']),
    }
    return Batch({**given, **columns})


@pytest.mark.parametrize(
    ("columns", "wrong"),
    [
        ({}, None),
        ({"sample": torch.tensor([1, 0])}, r"has samples \[1, 0\] of groups \[7, 7\]; expected 0 to 1 of one group"),
        ({"group": torch.tensor([7, 8])}, "not the prompt position of its group"),
        ({"uid": torch.tensor([[0, 5], [0, 5]])}, r"uid of shape \[2, 2\]"),
        ({"prompt_ids": ragged([1], [])}, r"prompts of 0 to 1 tokens; expected 1 to 4 \(data.max_prompt_tokens\)"),
        ({"prompt_ids": ragged([1], [1] * 5)}, "prompts of 1 to 5 tokens"),
        ({"prompt_ids": ragged([1], [-1])}, "a negative token id"),
        ({"prompt_ids": torch.tensor([1, 2])}, "no rows of int64 token ids"),
        ({"prompt_text": ragged([1], [2])}, "no texts in prompt_text"),
        ({"task": Ragged.from_texts(["{}", "{"])}, "a task that is no JSON: Expecting"),
        ({"task": Ragged.from_texts(["{}", "[]"])}, "a task that is no JSON object"),
    ],
)
def test_prompts_for_a_further_model_are_checked(columns: dict[str, Ragged], wrong: str | None) -> None:
    found = prompts_complaint(prompts(**columns), samples=2, longest=4)
    assert (found is None) if wrong is None else re.search(wrong, found or ""), found


def test_who_wrote_a_wrong_prompt_is_told() -> None:
    plan = plan_recipe("quickstart", ["flow=self_play", "batch.samples_per_prompt=2"])[1]
    given = prompts(prompt_ids=ragged([1], [])).columns
    same = ("uid", "group", "sample")
    rows = Batch({name if name in same else f"solver/{name}": column for name, column in given.items()})
    told = wrong_prompts(plan, "solve", rows)
    assert told is not None
    assert told.startswith("has prompts of 0 to 1 tokens; expected 1 to 16 (data.max_prompt_tokens) — step 'propose' ")
