"""The training steps on samples of several sequences: what they count is samples."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.data.batch import Batch, Ragged
from distflow.data.samples import by_sample, sample_bounds
from distflow.flow.resolve import resolve
from distflow.runtime.protocols import BackendSpec
from distflow.runtime.steps import StepContext
from distflow.testing.backend_contract import tiny_model
from distflow.workers.backends.torch_backend import TorchBackend
from distflow.workers.critic import critic_update, gae
from distflow.workers.shaping import token_rewards
from distflow.workers.trainer import advantage, baseline, batch_advantage, update

SEQUENCES = [[3], [2, 4], [1, 2, 2], [5], [4, 1], [2], [3], [2, 2]]
"""The lengths of each sample's sequences; two groups of four samples."""
UNTRAINED = 3
"""A row that is not trained on: the first sequence of sample 2."""


def batch() -> Batch:
    drawn = torch.Generator().manual_seed(7)
    counts = torch.tensor([len(sample) for sample in SEQUENCES])
    lengths = [length for sample in SEQUENCES for length in sample]
    responses = Ragged.from_rows([torch.randint(1, 13, (n,), generator=drawn) for n in lengths], torch.int64)
    tokens = len(responses.values)
    mask = torch.rand(tokens, generator=drawn) < 0.8
    mask[responses.offsets[1:] - 1] = True
    mask[responses.offsets[UNTRAINED] : responses.offsets[UNTRAINED + 1]] = False
    prompts = [torch.randint(2, 13, (1 + row % 3,), generator=drawn) for row in range(len(lengths))]

    def a_token() -> Ragged:
        return responses.like(-torch.rand(tokens, dtype=torch.float64, generator=drawn))

    return Batch(
        {
            "group": (torch.arange(len(SEQUENCES)) // 4).repeat_interleave(counts),
            "sample": (torch.arange(len(SEQUENCES)) % 4).repeat_interleave(counts),
            "sequence": torch.cat([torch.arange(len(sample)) for sample in SEQUENCES]),
            "prompt_ids": Ragged.from_rows(prompts, torch.int64),
            "response_ids": responses,
            "response_mask": responses.like(mask),
            "rollout_logprobs": a_token(),
            "ref_logprobs": a_token(),
            "values": a_token(),
            "finish_reason": (torch.arange(len(SEQUENCES)) % 2).repeat_interleave(counts),
            "reward": torch.rand(len(SEQUENCES), generator=drawn).repeat_interleave(counts),
            "baseline": torch.rand(len(SEQUENCES), generator=drawn).repeat_interleave(counts),
        }
    )


def backend(**changes: Any) -> TorchBackend:
    return TorchBackend(BackendSpec(tiny_model(**changes), "cpu", True, 0, 10, {}))


def ctx(model: TorchBackend | None = None, **changes: Any) -> StepContext:
    models = {} if model is None else {"policy": model}
    return StepContext("step", models=models, model="policy", temperature=0.9, **changes)


@pytest.mark.parametrize(
    ("step", "settings"),
    [
        (advantage, {"function": "grpo"}),
        (advantage, {"function": "grpo", "normalize": "none"}),
        (advantage, {"function": "rloo"}),
        (advantage, {"function": "opo"}),
        (advantage, {"function": "remax"}),
        (batch_advantage, {"function": "grpo", "normalize": "batch_std"}),
        (batch_advantage, {"function": "reinforce_plus_plus", "gamma": 0.9}),
        (batch_advantage, {"function": "reinforce_plus_plus_baseline"}),
    ],
)
def test_advantages_are_those_of_the_samples(step: Any, settings: dict[str, Any]) -> None:
    given = token_rewards(batch(), ctx())
    found = step(given, ctx(), **settings).ragged("advantage")
    alone = step(by_sample(given), ctx(), **settings).ragged("advantage")
    assert torch.equal(found.values, alone.values)
    assert torch.equal(found.offsets, given.ragged("response_ids").offsets)


def test_the_mean_of_a_group_counts_each_sample_once() -> None:
    given = batch()
    found = advantage(given, ctx(), normalize="none").ragged("advantage")
    rewards = given.dense("reward")[sample_bounds(given)[:-1]].view(2, 4)
    expected = (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()
    shown = [row[0].item() for row in found.rows()]
    assert shown == pytest.approx([a for a, sample in zip(expected, SEQUENCES, strict=True) for _ in sample], abs=1e-6)


def test_the_baseline_is_of_a_sample_of_which_no_sequence_is_trained_on() -> None:
    given = batch().select(range(7))
    masks = given.ragged("response_mask")
    mask = masks.values.clone()
    mask[masks.offsets[1] : masks.offsets[3]] = False
    found = baseline(given.with_columns(response_mask=masks.like(mask)), ctx()).dense("baseline")
    assert found.tolist() == [given.dense("reward")[1].item()] * 7, "sample 2 has one such sequence, sample 1 only such"


def test_the_reward_of_a_sample_stands_in_its_last_sequence() -> None:
    given = batch()
    rows = list(token_rewards(given, ctx()).ragged("token_rewards").rows())
    bounds = sample_bounds(given)
    for row, rewards in enumerate(rows):
        expected = [0.0] * len(rewards)
        if row + 1 in bounds:
            expected[-1] = given.dense("reward")[row].item()
        assert rewards.tolist() == pytest.approx(expected), row


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7)])
def test_each_sequence_ends_with_the_return_of_what_follows(gamma: float, lam: float) -> None:
    given = token_rewards(batch(), ctx(), kl_coef=0.1)
    found = gae(given, ctx(), gamma=gamma, lam=lam)
    bounds = sample_bounds(given)
    for first, end in itertools.pairwise(bounds):
        behind = 0.0
        for row in reversed(range(first, end)):
            mask = given.ragged("response_mask").row(row).tolist()
            values, rewards = (given.ragged(name).row(row).tolist() for name in ("values", "token_rewards"))
            trained = [t for t, kept in enumerate(mask) if kept]
            next_value, running, total = behind, 0.0, behind
            expected, returns = [0.0] * len(mask), [0.0] * len(mask)
            for t in reversed(trained):
                running = rewards[t] + gamma * next_value - values[t] + gamma * lam * running
                next_value, total = values[t], rewards[t] + gamma * total
                expected[t], returns[t] = running, running + values[t]
            behind = total
            assert found.ragged("token_advantage").row(row).tolist() == pytest.approx(expected, abs=1e-9), row
            assert found.ragged("return").row(row).tolist() == pytest.approx(returns, abs=1e-9), row


def test_with_gamma_one_every_sequence_ends_with_the_samples_reward() -> None:
    given = token_rewards(batch(), ctx())
    returns = gae(given, ctx()).ragged("return")
    for row, mask in enumerate(given.ragged("response_mask").rows()):
        wanted = given.dense("reward")[row].item()
        assert returns.row(row)[mask].tolist() == pytest.approx([wanted] * int(mask.sum()), abs=1e-6)


def per_sample(given: Batch, losses: list[Tensor], aggregate: str) -> Tensor:
    """The mean over samples, from the losses of each row's trained tokens."""
    bounds = sample_bounds(given)
    whole = [torch.cat(losses[a:b]) for a, b in itertools.pairwise(bounds)]
    sums = {
        "token-mean": lambda: torch.cat(losses).mean(),
        "seq-mean-token-sum": lambda: torch.stack([sample.sum() for sample in whole]).mean(),
        "seq-mean-token-mean": lambda: torch.stack([sample.mean() for sample in whole]).mean(),
        "seq-mean-token-sum-norm/7": lambda: torch.stack([sample.sum() / 7 for sample in whole]).mean(),
    }
    return sums[aggregate]()


AGGREGATES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm/7"]


@pytest.mark.parametrize("tokens", [0, 16, 1])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_an_update_is_the_gradient_written_out(aggregate: str, tokens: int) -> None:
    """Whichever micro-batches the rows of a sample are in."""
    model, twin = backend(), backend()
    given = advantage(batch(), ctx())
    context = ctx(model, tokens_per_microbatch=tokens)
    update(given, context, aggregate=aggregate, tis=None)
    norm = model.apply(context.denominators["policy"])
    losses = []
    for row in range(given.rows):
        mask = given.ragged("response_mask").row(row)
        new = twin.score(given.slice(row, row + 1), temperature=0.9, grad=True, entropy=False).logprobs_BT[0]
        a = given.ragged("advantage").row(row).double()
        losses.append((-a * (new - new.detach()).exp())[mask])
    loss = per_sample(given, losses, aggregate)
    twin.accumulate(loss)
    assert norm == pytest.approx(twin.apply(1.0), rel=1e-9)
    metrics = context.metrics.drain()
    assert metrics["actor/loss"] == pytest.approx(float(loss.detach()), rel=1e-9)
    expected = len(SEQUENCES) if aggregate != "token-mean" else float(given.ragged("response_mask").values.sum())
    assert context.denominators["policy"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_a_critics_update_is_the_gradient_written_out(aggregate: str) -> None:
    model, twin = backend(head="value"), backend(head="value")
    given = gae(token_rewards(batch(), ctx()), ctx())
    context = ctx(model, tokens_per_microbatch=16)
    critic_update(given, context, clip=None, aggregate=aggregate)
    losses = []
    for row in range(given.rows):
        found = twin.values(given.slice(row, row + 1), grad=True).values_BT[0]
        squares = (found - given.ragged("return").row(row)).square() / 2
        losses.append(squares[given.ragged("response_mask").row(row)])
    twin.accumulate(per_sample(given, losses, aggregate))
    assert model.apply(context.denominators["policy"]) == pytest.approx(twin.apply(1.0), rel=1e-9)


def test_metrics_count_samples() -> None:
    given, context = advantage(batch(), ctx()), ctx(backend())
    update(given, context)
    found = context.metrics.drain()
    rewards = given.dense("reward")[sample_bounds(given)[:-1]].double()
    lengths = [sum(sample) for sample in SEQUENCES]
    expected = {
        "critic/rewards/mean": float(rewards.mean()),
        "critic/rewards/mean.weight": len(SEQUENCES),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": max(lengths),
        "response_length/clip_ratio": 0.5,
        "sequences/mean": given.rows / len(SEQUENCES),
        "sequences/max": 3,
        "prompt_length/mean.weight": given.rows,
        "group/zero_std_frac": 0.0,
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6), name


def test_a_step_over_sequences_writes_what_belongs_to_the_sample_on_each_of_its_rows() -> None:
    """The one that the documentation names."""
    rows = batch()
    written = resolve(str(Path(__file__).parents[2] / "recipes" / "two_turns.py") + ":written")
    masks = iter(row.sum().item() for row in rows.ragged("response_mask").rows())
    counts = [sum(next(masks) for _ in sample) for sample in SEQUENCES]
    expected = [count for count, sample in zip(counts, SEQUENCES, strict=True) for _ in sample]
    assert written(rows, ctx())["rewards/written"].tolist() == expected
    alone = written(rows.only(["response_ids", "response_mask"]), ctx())
    assert alone["rewards/written"].sum() == rows.ragged("response_mask").values.sum(), "a row is a sample"
