"""Steps that train on compared and labelled responses: what they read of a row, and that parts of a batch add up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.data.batch import Batch, Ragged
from distflow.data.micro_batches import micro_batches
from distflow.data.responses import DataRow
from distflow.errors import UserError
from distflow.runtime.protocols import BackendSpec
from distflow.runtime.steps import StepContext
from distflow.testing.backend_contract import tiny_model
from distflow.workers import preference
from distflow.workers.backends.torch_backend import TorchBackend
from distflow.workers.supervised import sft

Step = Callable[..., Batch]


def row(**task: Any) -> DataRow:
    return DataRow(task, lambda: row(response="next", label=True), "prompt 3 (pairs.jsonl:4)")


def test_a_pair_is_the_chosen_and_the_rejected_response() -> None:
    assert [one.text for one in preference.pair(row(chosen="a", rejected="b"))] == ["a", "b"]
    assert [one.text for one in preference.pair(row(answer="a", rejected="b"))] == ["a", "b"]
    with pytest.raises(UserError, match="no column 'rejected'; there are chosen — data.fields.rejected=COLUMN"):
        preference.pair(row(chosen="a"))


def test_pairs_of_equals_are_told_some_of_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preference, "_equal", set())
    with caplog.at_level(logging.WARNING):
        for number in [3, *range(3, 20)]:
            preference.pair(DataRow({"chosen": "a", "rejected": "a"}, row, f"prompt {number} (pairs.jsonl:{number})"))
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "data: prompt 3 (pairs.jsonl:3) has the same text as chosen and rejected, which teaches nothing"
    assert len(told) == 5
    assert "prompt 7 " in told[-1]
    assert told[-1].endswith("which teaches nothing; further ones are not told")


def test_labelled_responses_have_one_of_the_next_row_beside_them() -> None:
    found = preference.labelled(row(response="a", label=False))
    assert [(one.text, one.fields["label"], one.trains) for one in found] == [("a", 0.0, True), ("next", 0.0, False)]
    found = preference.labelled(row(chosen="a", rejected="b"))
    assert [(one.text, one.fields["label"], one.trains) for one in found] == [
        ("a", 1.0, True),
        ("b", 0.0, True),
        ("next", 0.0, False),
    ]


@pytest.mark.parametrize("label", [{"label": "good"}, {"label": 2}, {"label": None}])
def test_a_label_is_a_bool(label: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"the column 'label' is '.*'; expected true or false \(1 or 0\)"):
        preference.labelled(row(response="a", **label))


def test_a_label_that_is_missing_is_looked_for() -> None:
    with pytest.raises(UserError, match=r"there is no column 'label'; there are response — data\.fields\.label=COLUMN"):
        preference.labelled(row(response="a"))


def batch() -> Batch:
    """Four groups of two; the last sample of each third group is not trained on in `mask`."""
    generator = torch.Generator().manual_seed(1)
    lengths = [2, 3, 1, 4, 3, 3, 5, 2]
    ids = Ragged.from_rows([torch.randint(2, 9, (n,), generator=generator) for n in lengths], torch.int64)
    prompts = [torch.randint(2, 9, (2 + n // 2,), generator=generator) for n in range(8)]
    trained = torch.tensor([n not in (1, 5) for n in range(8)])
    return Batch(
        {
            "group": torch.arange(4).repeat_interleave(2) * 3,
            "sample": torch.arange(8) % 2,
            "prompt_ids": Ragged.from_rows(prompts, torch.int64),
            "prompt_text": Ragged.from_texts([f"{n}2=" for n in range(8)]),
            "response_text": Ragged.from_texts([str(7 * n) for n in range(8)]),
            "response_ids": ids,
            "response_mask": ids.like(trained.repeat_interleave(ids.lengths)),
            "ref_logprobs": ids.like(-2 * torch.rand(sum(lengths), generator=generator, dtype=torch.float64)),
            "label": torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]),
        }
    )


def context(head: str, tokens: int) -> StepContext:
    section = {**tiny_model(head=head), "dtype": "float64", "tokenizer": "chars:0123456789="}
    backend = TorchBackend(BackendSpec(section, "cpu", True, 0, 10, {}))
    return StepContext("update", models={"policy": backend}, model="policy", tokens_per_microbatch=tokens)


def gradient(step: Step, head: str, tokens: int, **settings: Any) -> tuple[Tensor, float, dict[str, float]]:
    ctx = context(head, tokens)
    given = batch()
    if step is preference.kto:
        given = preference.kl_point(given, ctx)
    step(given, ctx, **settings)
    backend = ctx.models["policy"]
    assert isinstance(backend, TorchBackend)
    found = torch.cat([p.grad.flatten() for p in backend._parameters.values() if p.grad is not None])
    return found, ctx.denominators["policy"], ctx.metrics.drain()


@pytest.mark.parametrize(
    "step, head, count, settings",
    [
        (sft, "tokens", 17, {}),
        (sft, "tokens", 6, {"aggregate": "seq-mean-token-mean"}),
        (preference.dpo, "tokens", 4, {"label_smoothing": 0.1}),
        (preference.dpo, "tokens", 4, {"loss": "ipo"}),
        (preference.kto, "tokens", 6, {"desirable_weight": 1.3}),
        (preference.bradley_terry, "score", 4, {}),
    ],
)
def test_the_split_into_micro_batches_changes_nothing(
    step: Step, head: str, count: int, settings: dict[str, Any]
) -> None:
    whole, denominator, metrics = gradient(step, head, 0, **settings)
    parts, same, others = gradient(step, head, 14, **settings)
    assert (denominator, same) == (count, count)
    assert float(whole.abs().max()) > 0
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-12)
    assert {name: others[name] for name in others if not name.startswith("timing")} == pytest.approx(metrics, rel=1e-9)
    assert metrics["actor/loss"] > 0


def test_the_point_of_comparison_is_a_mean_over_mismatched_responses() -> None:
    ctx = context("tokens", 0)
    given = batch()
    scores = ctx.backend.score(given, temperature=1.0, grad=False, entropy=False)
    ratios = ((scores.logprobs_BT - given.padded("ref_logprobs")) * scores.mask_BT).sum(1)
    expected = max(0.0, float(ratios[[1, 5]].mean()))
    assert preference.kl_point(given, ctx).dense("kl_point").tolist() == pytest.approx([expected] * 8)
    far = given.with_columns(ref_logprobs=given.ragged("response_ids").like(torch.full((23,), -50.0)))
    assert preference.kl_point(far, ctx).dense("kl_point")[0] > 50
    near = given.with_columns(ref_logprobs=given.ragged("response_ids").like(torch.zeros(23)))
    assert preference.kl_point(near, ctx).dense("kl_point").tolist() == [0.0] * 8, "never below 0"
    with pytest.raises(UserError, match="no sample of this training step is there to be compared by"):
        preference.kl_point(given.select(torch.tensor([0, 2])), ctx)


@pytest.mark.parametrize("rows", [[0, 1, 2], [1, 0, 2, 3], [0, 3], [0, 2, 1, 3]])
def test_groups_that_are_no_pairs_are_refused(rows: list[int]) -> None:
    ctx = context("tokens", 0)
    with pytest.raises(UserError, match=r"step 'update' compares pairs.* let distflow.workers.preference:pair read"):
        preference.dpo(batch().select(torch.tensor(rows)), ctx)


def test_label_smoothing_is_not_for_ipo() -> None:
    with pytest.raises(UserError, match="label_smoothing=0.1 is for loss=sigmoid, and loss is ipo"):
        preference.dpo(batch(), context("tokens", 0), loss="ipo", label_smoothing=0.1)


def test_a_text_that_is_too_long_is_named() -> None:
    long = batch().with_columns(response_text=Ragged.from_texts(["7" * 5000, *["1"] * 7]))
    with pytest.raises(UserError, match=r"prompt and response at position 0 have 5003 tokens, and the model takes \d+"):
        preference.bradley_terry(long, context("score", 0))


@pytest.mark.parametrize("tokens", [0, 1, 9, 14, 20, 40])
def test_groups_stay_whole_in_a_micro_batch(tokens: int) -> None:
    given = batch()
    parts = [rows.tolist() for rows, _ in micro_batches(given, tokens, whole_groups=True)]
    assert sorted(row for part in parts for row in part) == list(range(8))
    assert all(part[n + 1] == part[n] + 1 and part[n] % 2 == 0 for part in parts for n in range(0, len(part), 2))
    lengths = (given.ragged("prompt_ids").lengths + given.ragged("response_ids").lengths).tolist()
    fits = [len(part) * max(lengths[row] for row in part) <= tokens or len(part) == 2 for part in parts]
    assert tokens == 0 or all(fits)
