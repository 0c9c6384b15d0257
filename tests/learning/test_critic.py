"""The steps of an actor-critic flow, each against its formula written out."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.algorithms import advantages
from distflow.data.batch import Batch, Ragged
from distflow.errors import UserError
from distflow.runtime.protocols import BackendSpec
from distflow.runtime.steps import StepContext
from distflow.testing.backend_contract import tiny_model
from distflow.workers.backends.torch_backend import TorchBackend
from distflow.workers.critic import critic_update, gae, values, whiten
from distflow.workers.shaping import token_rewards

ROWS = 8


def critic() -> TorchBackend:
    return TorchBackend(BackendSpec(tiny_model(head="value"), "cpu", True, 0, 10, {}))


def ctx(backend: TorchBackend | None = None, **changes: Any) -> StepContext:
    models = {} if backend is None else {"critic": backend}
    return StepContext("step", models=models, model="critic", **changes)


def drawn(seed: int, count: int) -> Tensor:
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def batch() -> Batch:
    """Prompts of 1 to 4 tokens, responses of 1 to 6, one row in which no token is trained on."""
    picked = torch.Generator().manual_seed(5)
    lengths = [int(n) for n in torch.randint(1, 7, (ROWS,), generator=picked)]
    responses = Ragged.from_rows([torch.randint(1, 13, (n,), generator=picked) for n in lengths], torch.int64)
    total = len(responses.values)
    mask = torch.rand(total, generator=picked) < 0.7
    mask[responses.offsets[3] : responses.offsets[4]] = False
    prompts = [torch.randint(2, 13, (1 + row % 4,), generator=picked) for row in range(ROWS)]
    return Batch(
        {
            "prompt_ids": Ragged.from_rows(prompts, torch.int64),
            "response_ids": responses,
            "response_mask": responses.like(mask),
            "reward": torch.rand(ROWS, generator=picked),
            "rollout_logprobs": responses.like(-drawn(1, total).abs()),
            "ref_logprobs": responses.like(-drawn(2, total).abs()),
            "values": responses.like(drawn(3, total)),
            "return": responses.like(drawn(4, total)),
        }
    )


@pytest.mark.parametrize("tokens", [0, 12])
def test_values_come_back_in_order(tokens: int) -> None:
    backend, given = critic(), batch()
    critic_update(given, ctx(backend))
    backend.apply(1.0)
    found = values(given, ctx(backend, tokens_per_microbatch=tokens)).ragged("values")
    assert found.offsets.equal(given.ragged("response_ids").offsets)
    for row in range(ROWS):
        alone = backend.values(given.slice(row, row + 1), grad=False).values_BT[0]
        torch.testing.assert_close(found.row(row), alone, rtol=0, atol=1e-12)
    assert len(values(given.slice(0, 0), ctx(backend)).ragged("values")) == 0


@pytest.mark.parametrize("kl, old", [(None, False), ("k1", False), ("k3", True)])
def test_rewards_of_tokens(kl: str | None, old: bool) -> None:
    given, context = batch(), ctx()
    total = len(given.ragged("response_ids").values)
    if old:
        given = given.with_columns(old_logprobs=given.ragged("response_ids").like(-drawn(9, total).abs()))
    settings: dict[str, Any] = {} if kl is None else {"kl_coef": 0.1, "kl": kl}
    found = token_rewards(given, context, **settings).ragged("token_rewards")
    divergences = []
    for row in range(ROWS):
        mask = given.ragged("response_mask").row(row).tolist()
        trained = [t for t, kept in enumerate(mask) if kept]
        for t in range(len(mask)):
            expected = float(given.dense("reward")[row]) if trained and t == trained[-1] else 0.0
            if kl is not None and mask[t]:
                name = "old_logprobs" if old else "rollout_logprobs"
                d = float(given.ragged(name).row(row)[t] - given.ragged("ref_logprobs").row(row)[t])
                divergences.append(d if kl == "k1" else math.exp(-d) + d - 1)
                expected -= 0.1 * divergences[-1]
            assert float(found.row(row)[t]) == pytest.approx(expected, rel=1e-6, abs=1e-9), (row, t)
    if kl is not None:
        assert context.metrics.drain()["critic/kl"] == pytest.approx(sum(divergences) / len(divergences), rel=1e-9)


def test_advantages_and_returns_are_spread_over_the_response() -> None:
    given = token_rewards(batch(), ctx())
    found = gae(given, ctx(), gamma=0.9, lam=0.8)
    rows = (given.padded(name) for name in ("token_rewards", "values", "response_mask"))
    expected = advantages.gae(*rows, gamma=0.9, lam=0.8)
    places = given.ragged("response_ids").mask()
    for name, wanted in zip(("token_advantage", "return"), expected, strict=True):
        torch.testing.assert_close(found.ragged(name).values, wanted[places])


def test_two_replicas_whiten_as_one() -> None:
    given = batch()
    # Rewards that tell as much as the advantages: no floor (below).
    given = given.with_columns(token_advantage=given.ragged("values"), reward=5 * given.dense("reward"))
    given = token_rewards(given, ctx())
    whole = whiten(given, ctx()).ragged("advantage").values
    here: list[Tensor | None] = [None, None]
    all_here = Barrier(2)

    def replica(number: int) -> Tensor:
        def gather(tensor: Tensor) -> list[Tensor]:
            here[number] = tensor
            all_here.wait(timeout=20)
            return [part for part in here if part is not None]

        own = given.slice(0, 3) if number == 0 else given.slice(3, ROWS)
        return whiten(own, ctx(replica=number, gather=gather)).ragged("advantage").values

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(replica, range(2)))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-10, atol=1e-12)
    mask = given.ragged("response_mask").values
    assert float(whole[mask].mean()) == pytest.approx(0, abs=1e-12)
    assert float(whole[mask].var()) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("reward", [1.0, 0.0, -7.5])
def test_where_all_rewards_are_equal_nothing_is_learned_from_a_critics_error(reward: float) -> None:
    given = batch().with_columns(reward=torch.full((ROWS,), reward))
    errors = given.ragged("values").like(0.005 * given.ragged("values").values)
    given = token_rewards(given.with_columns(token_advantage=errors), ctx())
    assert not whiten(given, ctx()).ragged("advantage").values.any()


@pytest.mark.parametrize("tokens", [0, 12, 1])
@pytest.mark.parametrize("clip", [0.2, None])
def test_an_update_is_the_gradient_written_out(tokens: int, clip: float | None) -> None:
    given, backend, twin = batch(), critic(), critic()
    context = ctx(backend, tokens_per_microbatch=tokens)
    critic_update(given, context, clip=clip)
    trained = float(given.ragged("response_mask").values.sum())
    assert context.denominators == {"critic": trained}
    found = twin.values(given, grad=True).values_BT
    mask, old, returns = given.padded("response_mask"), given.padded("values"), given.padded("return")
    loss = (found - returns).square()
    if clip is not None:
        loss = torch.maximum(loss, (found.clamp(old - clip, old + clip) - returns).square())
    twin.accumulate((loss / 2)[mask].sum())
    assert backend.apply(trained) == pytest.approx(twin.apply(trained), rel=1e-12)
    metrics = context.metrics.drain()
    assert metrics["critic/vf_loss"] == pytest.approx(float((loss.detach() / 2)[mask].mean()), rel=1e-9)
    assert metrics["critic/returns/mean"] == pytest.approx(float(returns[mask].mean()), rel=1e-9)
    explained = 1 - (returns - found.detach())[mask].var() / returns[mask].var()
    assert metrics["critic/vf_explained_var"] == pytest.approx(float(explained), rel=1e-9), "however it is divided"


def test_a_critic_learns_its_returns() -> None:
    given, backend = batch(), critic()
    losses = []
    for _ in range(60):
        context = ctx(backend)
        critic_update(values(given, ctx(backend)), context)
        losses.append(context.metrics.drain()["critic/vf_loss"])
        backend.apply(context.denominators["critic"])
    assert losses[-1] < 0.05 * losses[0]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"aggregate": "token-sum"}, "a value loss is divided by a count"),
        ({"aggregate": "mean"}, "aggregate='mean'"),
        ({"clip": -1.0}, "clip=-1.0: the bound of a value's change"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        critic_update(batch(), ctx(critic()), **settings)
