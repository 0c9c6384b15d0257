from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.algorithms.advantages import NORMALIZE
from distflow.algorithms.aggregation import MODES, Aggregation
from distflow.data.batch import Batch, Ragged
from distflow.errors import PluginError, UserError
from distflow.flow.imported_step import check_step
from distflow.flow.plan import StepPlan
from distflow.flow.resolve import shipped
from distflow.flow.step_declaration import read_declaration
from distflow.runtime.protocols import BackendSpec
from distflow.runtime.steps import StepContext
from distflow.testing.backend_contract import tiny_model
from distflow.workers.backends.torch_backend import TorchBackend
from distflow.workers.reference import ref_logprobs
from distflow.workers.trainer import advantage, at_tokens, baseline, batch_advantage, update

GROUPS, SAMPLES = 4, 3
ROWS = GROUPS * SAMPLES


def _backend(seed: int = 0, **model: Any) -> TorchBackend:
    return TorchBackend(BackendSpec(tiny_model(**model), "cpu", True, seed, 10, {}))


def _ctx(backend: TorchBackend, **changes: Any) -> StepContext:
    settings: dict[str, Any] = {"models": {"policy": backend}, "model": "policy", "temperature": 0.9} | changes
    return StepContext("update", **settings)


def _batch() -> Batch:
    drawn = torch.Generator().manual_seed(11)
    prompts = [torch.randint(2, 13, (1 + group,), generator=drawn) for group in range(GROUPS) for _ in range(SAMPLES)]
    lengths = [int(length) for length in torch.randint(1, 6, (ROWS,), generator=drawn)]
    responses = Ragged.from_rows([torch.randint(1, 13, (n,), generator=drawn) for n in lengths], torch.int64)
    values = responses.values.shape
    mask = torch.rand(values, generator=drawn) < 0.8
    mask[responses.offsets[5] : responses.offsets[6]] = False
    return Batch(
        {
            "group": torch.arange(GROUPS).repeat_interleave(SAMPLES),
            "prompt_ids": Ragged.from_rows(prompts, torch.int64),
            "response_ids": responses,
            "response_mask": responses.like(mask),
            "rollout_logprobs": responses.like(-3 * torch.rand(values, dtype=torch.float64, generator=drawn)),
            "ref_logprobs": responses.like(-3 * torch.rand(values, dtype=torch.float64, generator=drawn)),
            "finish_reason": torch.arange(ROWS) % 2,
            "reward": torch.rand(ROWS, generator=drawn),
            "score": torch.rand(ROWS, generator=drawn).round(),
        }
    )


def test_a_field_for_a_loss_has_a_value_at_each_token() -> None:
    batch = _batch().with_columns(difficulty=torch.arange(ROWS), labels=torch.ones(ROWS, 3, dtype=torch.int64))
    like_BT = torch.zeros(batch.padded("response_mask").shape, dtype=torch.float64)
    found = at_tokens(batch, "difficulty", like_BT)
    assert found is not None
    assert torch.equal(found, torch.arange(ROWS, dtype=torch.float64)[:, None].expand_as(like_BT))
    several = at_tokens(batch, "labels", like_BT)
    assert several is not None
    assert several.shape == (*like_BT.shape, 3)
    ragged = at_tokens(batch, "ref_logprobs", like_BT)
    assert ragged is not None
    assert torch.equal(ragged, batch.padded("ref_logprobs"))
    assert at_tokens(batch, "absent", like_BT) is None
    with pytest.raises(
        UserError, match=r"terms\['prompt_ids'\], which has \d values in a row of \d response tokens — exp"
    ):
        at_tokens(batch, "prompt_ids", like_BT)


def _row_logprobs(backend: TorchBackend, batch: Batch, row: int) -> Tensor:
    """[t]: log-probs of one row by a plain forward pass, with gradient."""
    prompt, response = batch.ragged("prompt_ids").row(row), batch.ragged("response_ids").row(row)
    plain = TorchBackend(BackendSpec(tiny_model(), "cpu", True, 0, 10, {"packed": False}))
    for own, (_, tensor) in zip(plain._parameters.values(), backend.named_shards(), strict=True):
        own.data = tensor
    logits = plain._model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    logprobs: Tensor = (logits / 0.9).log_softmax(-1).gather(1, response[:, None])[:, 0]
    return logprobs


def _compared(batch: Batch) -> list[list[int]]:
    """Of each group the rows with a token trained on: only these are compared."""
    trained = [bool(row.any()) for row in batch.ragged("response_mask").rows()]
    groups = [[row for row in range(first, first + SAMPLES) if trained[row]] for first in range(0, ROWS, SAMPLES)]
    assert sum(map(len, groups)) < ROWS
    return groups


def _centred(batch: Batch) -> Tensor:
    """[B]: rewards less the mean of the group's rows that are compared; 0 for the others."""
    rewards, found = batch.dense("reward").double(), torch.zeros(ROWS, dtype=torch.float64)
    for rows in _compared(batch):
        found[rows] = rewards[rows] - rewards[rows].mean()
    return found


def _direct_gradient(batch: Batch, aggregate: str, kl_coef: float, tis: float | None) -> tuple[float, float]:
    """Loss and gradient norm, computed row by row as in the papers."""
    twin = TorchBackend(BackendSpec(tiny_model(), "cpu", True, 0, 10, {"packed": False}))
    advantages, rewards = _centred(batch), batch.dense("reward").double()
    for kept in _compared(batch):
        advantages[kept] /= rewards[kept].std() + 1e-6
    rows, tokens = [], 0
    for row in range(ROWS):
        prompt, response = batch.ragged("prompt_ids").row(row), batch.ragged("response_ids").row(row)
        logits = twin._model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        new = (logits / 0.9).log_softmax(-1).gather(1, response[:, None])[:, 0]
        loss = -advantages[row].float().double() * (new - new.detach()).exp()
        if tis is not None:
            loss = loss * (new.detach() - batch.ragged("rollout_logprobs").row(row)).exp().clamp(max=tis)
        d = new - batch.ragged("ref_logprobs").row(row)
        loss = loss + kl_coef * ((-d).exp() + d - 1)
        kept = batch.ragged("response_mask").row(row)
        tokens += int(kept.sum())
        rows.append(loss[kept])
    trained = [row for row in rows if len(row)]
    total = {
        "token-mean": lambda: torch.cat(rows).sum() / tokens,
        "token-sum": lambda: torch.cat(rows).sum(),
        "seq-mean-token-sum": lambda: torch.stack([row.sum() for row in trained]).mean(),
        "seq-mean-token-mean": lambda: torch.stack([row.mean() for row in trained]).mean(),
        "seq-mean-token-sum-norm/7": lambda: torch.stack([row.sum() / 7 for row in trained]).mean(),
    }[aggregate]()
    torch.autograd.backward(total)
    grads = [p.grad for p in twin._parameters.values() if p.grad is not None]
    return float(total.detach()), float(torch.nn.utils.get_total_norm(grads))


@pytest.mark.parametrize("tokens", [0, 30, 1])
@pytest.mark.parametrize(
    ("aggregate", "kl_coef", "tis"),
    [
        ("token-mean", 0.0, None),
        ("token-mean", 0.3, 1.5),
        ("token-sum", 0.0, 2.0),
        ("seq-mean-token-sum", 0.0, 2.0),
        ("seq-mean-token-mean", 0.1, 2.0),
        ("seq-mean-token-sum-norm/7", 0.0, None),
    ],
)
def test_a_grpo_update_is_the_gradient_written_out(
    aggregate: str, kl_coef: float, tis: float | None, tokens: int
) -> None:
    batch, backend = _batch(), _backend()
    ctx = _ctx(backend, tokens_per_microbatch=tokens)
    update(advantage(batch, ctx), ctx, aggregate=aggregate, kl_coef=kl_coef, tis=tis)
    norm = backend.apply({**ctx.denominators, **ctx.fixed_denominators}["policy"])
    loss, expected = _direct_gradient(batch, aggregate, kl_coef, tis)
    assert norm == pytest.approx(expected, rel=1e-9)
    assert ctx.metrics.drain()["actor/loss"] == pytest.approx(loss, rel=1e-9)


def test_two_calls_add_up() -> None:
    batch, parts, whole = _batch(), _backend(), _backend()
    ctx, once = _ctx(parts), _ctx(whole)
    for start in (0, SAMPLES):
        stop = SAMPLES if start == 0 else ROWS
        update(advantage(batch.slice(start, stop), ctx), ctx)
    update(advantage(batch, once), once)
    assert ctx.denominators == once.denominators == {"policy": float(batch.ragged("response_mask").values.sum())}
    assert parts.apply(ctx.denominators["policy"]) == pytest.approx(whole.apply(once.denominators["policy"]), rel=1e-12)
    first, second = ctx.metrics.drain(), once.metrics.drain()
    assert first.keys() == second.keys()
    for name in first.keys() - {"rollout_corr/ess"}:
        assert first[name] == pytest.approx(second[name], rel=1e-9, abs=1e-15), name


def test_old_logprobs_bring_clipping() -> None:
    backend = _backend()
    batch, ctx = _batch(), _ctx(backend)
    now = backend.score(batch, temperature=0.9, grad=False, entropy=False)
    shift = torch.linspace(-1, 1, int(now.mask_BT.sum()), dtype=torch.float64)
    old = batch.ragged("response_ids").like(now.logprobs_BT[now.mask_BT] - shift)
    update(advantage(batch.with_columns(old_logprobs=old), ctx), ctx, clip=(0.1, 0.3))
    metrics = ctx.metrics.drain()
    mask = batch.ragged("response_mask").values
    spread = advantage(batch, ctx).ragged("advantage").values.double()
    ratio = shift.exp()
    clipped = (-spread * ratio.clamp(0.9, 1.3) > -spread * ratio)[mask]
    assert 0 < clipped.sum() < len(clipped)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(float(clipped.double().mean()), rel=1e-12)
    assert metrics["actor/ppo_kl"] == pytest.approx(float(-shift[mask].mean()), rel=1e-9)


def test_metrics_are_those_of_the_batch() -> None:
    batch, backend = _batch(), _backend()
    ctx = _ctx(backend, tokens_per_microbatch=25)
    trained = advantage(batch, ctx)
    update(trained, ctx)
    found = ctx.metrics.drain()
    mask = batch.ragged("response_mask").values
    scores = _backend().score(batch, temperature=0.9, grad=False, entropy=True)
    assert scores.entropy_BT is not None
    mismatch = (batch.ragged("rollout_logprobs").values - scores.logprobs_BT[scores.mask_BT])[mask]
    compared = [row for rows in _compared(batch) for row in rows]
    lengths, rewards = batch.ragged("response_ids").lengths.double(), batch.dense("reward").double()[compared]
    expected: dict[str, Any] = {
        "actor/entropy": scores.entropy_BT[scores.mask_BT][mask].mean(),
        "actor/ppo_kl": 0.0,
        "actor/pg_clipfrac": 0.0,
        "rollout_corr/kl": mismatch.mean(),
        "rollout_corr/k3_kl": ((-mismatch).exp() - 1 + mismatch).mean(),
        "rollout_corr/ratio/mean": (-mismatch).exp().mean(),
        "rollout_corr/ratio/max": (-mismatch).exp().max(),
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/min": lengths.min(),
        "response_length/clip_ratio": 0.5,
        "prompt_length/mean": 2.5,
        "critic/rewards/mean": rewards.mean(),
        "critic/rewards/max": rewards.max(),
        "critic/rewards/min": rewards.min(),
        "critic/score/mean": batch.dense("score")[compared].mean(),
        "critic/advantages/max": trained.ragged("advantage").values.max(),
        "group/zero_std_frac": 0.0,
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), rel=1e-6, abs=1e-12), name
    assert found["actor/entropy.weight"] == float(mask.sum())
    assert 0 < found["rollout_corr/ess"] <= 1


def test_advantage_is_spread_over_the_response() -> None:
    batch = _batch()
    found = advantage(batch, _ctx(_backend()), normalize="none").ragged("advantage")
    expected = _centred(batch).float()
    assert found.offsets.equal(batch.ragged("response_ids").offsets)
    for row, values in enumerate(found.rows()):
        torch.testing.assert_close(values, expected[row].expand(len(values)))


def test_the_baseline_of_a_group_is_the_reward_of_its_untrained_sample() -> None:
    lengths = [2, 1, 3, 1, 2, 2]
    masks = [torch.ones(length, dtype=torch.bool) for length in lengths]
    masks[1][:], masks[5][:] = False, False
    batch = Batch(
        {
            "reward": torch.tensor([1.0, 2.0, 4.0, 0.5, 0.25, 0.0]),
            "group": torch.tensor([7, 7, 7, 9, 9, 9]),
            "response_ids": Ragged.from_rows([[1] * length for length in lengths], torch.int64),
            "response_mask": Ragged.from_rows([mask.tolist() for mask in masks], torch.bool),
        }
    )
    found = baseline(batch, StepContext("baseline"))
    assert found.dense("baseline").tolist() == [2.0, 2.0, 2.0, 0.0, 0.0, 0.0]
    spread = advantage(found, StepContext("advantage"), function="remax").ragged("advantage")
    assert [row[0].item() for row in spread.rows()] == [-1.0, 0.0, 2.0, 0.5, 0.25, 0.0]
    with pytest.raises(UserError, match="0 of the 2 samples of a group are not trained on; .*:sample_with_baseline"):
        baseline(batch.select([3, 4]), StepContext("baseline"))


def test_batch_std_has_a_step_of_its_own() -> None:
    batch, ctx = _batch(), _ctx(_backend())
    with pytest.raises(UserError, match="normalize=batch_std needs all groups.*trainer:batch_advantage"):
        advantage(batch, ctx, normalize="batch_std")
    plain = advantage(batch, ctx, normalize="none").ragged("advantage").values
    scaled = batch_advantage(batch, ctx, normalize="batch_std").ragged("advantage").values
    compared = [row for rows in _compared(batch) for row in rows]
    torch.testing.assert_close(scaled, plain / (batch.dense("reward")[compared].double().std() + 1e-6).float())


@pytest.mark.parametrize("function", ["grpo", "reinforce_plus_plus_baseline", "rloo"])
def test_two_replicas_find_the_advantages_of_one(function: str) -> None:
    batch = _batch()
    settings = {"normalize": "batch_std"} if function == "grpo" else {}
    whole = batch_advantage(batch, _ctx(_backend()), function=function, **settings).ragged("advantage").values
    here: list[Tensor | None] = [None, None]
    all_here = Barrier(2)

    def replica(number: int) -> Tensor:
        def gather(tensor: Tensor) -> list[Tensor]:
            here[number] = tensor
            all_here.wait(timeout=20)
            parts = [part for part in here if part is not None]
            all_here.wait(timeout=20)
            return parts

        half = batch.slice(number * ROWS // 2, (number + 1) * ROWS // 2)
        ctx = StepContext("advantage", replica=number, gather=gather)
        return batch_advantage(half, ctx, function=function, **settings).ragged("advantage").values

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(replica, range(2)))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-6, atol=1e-7)


PLUGINS = """
import torch
from distflow.algorithms.losses import TokenLoss

def halved(rewards_B, group_B):
    return rewards_B / 2

def wrong_shape(rewards_B):
    return rewards_B[:1]

def as_list(rewards_B):
    return rewards_B.tolist()

def summed(terms):
    return (-terms.advantages * terms.logprobs).sum()

def per_token(terms):
    return -terms.advantages * terms.logprobs

def per_sample(terms):
    return (-terms.advantages * terms.logprobs).sum(1), 0.0

def named(terms):
    return TokenLoss(terms.logprobs.mean(), terms.mask)

def measured(terms):
    return TokenLoss(terms.logprobs, terms.mask, {"my/mean": 0.5})

def mean_kl(logprobs_BT, ref_logprobs_BT):
    return (logprobs_BT - ref_logprobs_BT).mean()

def own(terms, *, scale):
    ref = scale * terms.ref_logprobs
    return TokenLoss(terms.logprobs, torch.zeros_like(terms.mask), {"my/ref": ref})

def reinforce(terms):
    return TokenLoss(-terms.advantages * terms.logprobs, torch.zeros_like(terms.mask))

def by_difficulty(terms):
    return TokenLoss(terms["difficulty"] * -terms.advantages * terms.logprobs, torch.zeros_like(terms.mask))

number = 3
"""


@pytest.fixture
def plugins(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(PLUGINS)
    return str(path)


def test_plugin_functions(plugins: str) -> None:
    batch, mine, shipped = _batch(), _backend(), _backend()
    ctx, twin = _ctx(mine), _ctx(shipped)
    halved = advantage(batch, ctx, function=f"{plugins}:halved")
    assert float(halved.ragged("advantage").row(0)[0]) == float(batch.dense("reward")[0]) / 2
    update(halved, ctx, loss=f"{plugins}:reinforce")
    update(halved, twin, loss="ppo")
    # At π = π_old the clipped loss has the gradient of plain policy gradient.
    assert mine.apply(1.0) == pytest.approx(shipped.apply(1.0), rel=1e-9)


def test_bad_plugins(plugins: str) -> None:
    batch, ctx = _batch().select([0, 1, 2]), _ctx(_backend())
    assert bool(batch.ragged("response_mask").padded().any(1).all())
    with pytest.raises(UserError, match=r"returned shape \[1\]; expected a tensor with one value per sample, \[3\]"):
        advantage(batch, ctx, function=f"{plugins}:wrong_shape")
    with pytest.raises(UserError, match=r"returned a list; expected a tensor with one value per sample, \[3\]"):
        advantage(batch, ctx, function=f"{plugins}:as_list")
    with pytest.raises(PluginError, match="has no 'halve'"):
        advantage(batch, ctx, function=f"{plugins}:halve")
    with pytest.raises(PluginError, match="number' is a int; expected a function"):
        advantage(batch, ctx, function=f"{plugins}:number")


@pytest.mark.parametrize(
    ("function", "given"),
    [
        ("summed", r"a tensor of shape \[\]"),
        ("per_token", r"a tensor of shape \[12, \d+\]"),
        ("per_sample", r"\(a tensor of shape \[12\], a float\)"),
        ("named", r"\(a tensor of shape \[\], a tensor of shape \[12, \d+\]\)"),
        ("measured", r"\(.*\), and metric 'my/mean': a float"),
    ],
)
def test_a_loss_that_returns_something_else_is_told_what_is_expected(plugins: str, function: str, given: str) -> None:
    ctx = _ctx(_backend())
    expected = r"expected TokenLoss\(loss_BT, clipped_BT\): .* both of shape \[12, \d+\].*`aggregate` does"
    with pytest.raises(UserError, match=rf"loss function '.*:{function}' returned {given}; {expected}"):
        update(advantage(_batch(), ctx), ctx, loss=f"{plugins}:{function}")


def test_a_divergence_that_is_averaged_is_told_what_is_expected(plugins: str) -> None:
    ctx = _ctx(_backend())
    batch = advantage(ref_logprobs(_batch(), ctx), ctx)
    with pytest.raises(
        UserError, match=r"kl function '.*:mean_kl' returned a tensor of shape \[\]; expected one value"
    ):
        update(batch, ctx, kl_coef=0.1, kl=f"{plugins}:mean_kl")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "pppo"}, "loss='pppo': expected aipo, cispo, decoupled_ppo, gspo, ppo, reverse_kl, or module:name"),
        ({"kl": "k4"}, "kl='k4': expected k1, k2, k3"),
        ({"aggregate": "mean"}, "aggregate='mean'"),
        ({"clip": [0.2]}, "clip="),
        ({"tis": -1.0}, "tis=-1.0"),
        ({"tis": "high"}, "tis='high': expected a cap > 0, auto, or null"),
        ({"correction": {"icepopp": [0, 1]}}, "did you mean 'icepop'"),
        ({"correction": {"icepop": [1]}}, r"icepop is \[1\], expected the bounds"),
        ({"correction": {"icepop": [2, 1]}}, "0 <= lo < hi"),
        ({"correction": {"icepop": [0, 1], "mis": [0, 1]}}, "icepop and mis both weight each token"),
        ({"correction": {"mis": [0, 1]}, "tis": 2.0}, "mis and tis both weight each token"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    ctx = _ctx(_backend())
    with pytest.raises(UserError, match=message):
        update(advantage(_batch(), ctx), ctx, **settings)


def test_without_its_model_a_step_says_what_is_there() -> None:
    ctx = _ctx(_backend(), model="critic")
    with pytest.raises(LookupError, match=r"model 'critic'; here are \['policy'\]"):
        update(advantage(_batch(), ctx), ctx)


def test_a_loss_brings_terms_settings_and_metrics_of_its_own(plugins: str) -> None:
    batch = _batch()
    ctx = _ctx(_backend(), reads=("ref_logprobs",))
    update(advantage(batch, ctx), ctx, loss=f"{plugins}:own", scale=3.0)
    found = ctx.metrics.drain()
    mask = batch.ragged("response_mask").values
    assert found["my/ref"] == pytest.approx(float(3 * batch.ragged("ref_logprobs").values[mask].mean()), rel=1e-9)


def test_a_loss_reads_a_field_with_one_value_a_row(plugins: str) -> None:
    """As if the advantages of these rows were so much larger, in micro-batches too."""
    weights = torch.linspace(0.5, 2, ROWS, dtype=torch.float64)
    batch = advantage(_batch(), _ctx(_backend()))
    rows = batch.ragged("advantage")
    larger = rows.like(rows.values * weights.repeat_interleave(rows.lengths))
    norms = []
    for loss, given in (("by_difficulty", batch.with_columns(difficulty=weights)), ("reinforce", batch)):
        backend = _backend()
        ctx = _ctx(backend, reads=("difficulty",) if "difficulty" in given else (), tokens_per_microbatch=30)
        update(given if "difficulty" in given else given.with_columns(advantage=larger), ctx, loss=f"{plugins}:{loss}")
        norms.append(backend.apply(1.0))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("loss", ["aipo", "decoupled_ppo"])
def test_what_corrects_by_itself_is_not_corrected_twice(loss: str) -> None:
    batch, plain, auto = _batch(), _backend(), _backend()
    for backend, settings in ((plain, {"tis": None}), (auto, {})):
        update(advantage(batch, _ctx(backend)), _ctx(backend), loss=loss, **settings)
    assert plain.apply(1.0) == auto.apply(1.0)
    for settings in ({"tis": 2.0}, {"correction": {"sequence_tis": [0.5, 2.0]}}):
        with pytest.raises(UserError, match="the loss itself corrects for the policy that sampled"):
            update(advantage(batch, _ctx(auto)), _ctx(auto), loss=loss, **settings)


def test_corrections_multiply_and_leave_the_entropy_bonus_alone() -> None:
    batch, ctx = _batch(), _ctx(_backend())
    nothing = {"icepop": [100.0, 200.0]}
    update(advantage(batch, ctx), ctx, correction=nothing, aggregate="token-sum", entropy_coef=0.5)
    found = ctx.metrics.drain()
    tokens = float(batch.ragged("response_mask").values.sum())
    assert found["actor/pg_loss"] == 0
    assert found["actor/loss"] == pytest.approx(-0.5 * found["actor/entropy"] * tokens, rel=1e-9)
    bounds = {"correction": {"geometric_mask": [0.5, 2.0]}, "tis": 1.5}
    update(advantage(batch, ctx), ctx, **bounds)
    assert ctx.metrics.drain()["actor/pg_loss"] != 0


def test_rows_without_trained_tokens_are_no_step() -> None:
    batch = _batch().slice(5, 6)
    ctx = _ctx(_backend())
    update(advantage(batch, ctx), ctx)
    assert ctx.denominators == {}


@pytest.mark.parametrize("tokens", [0, 20])
def test_reference_log_probs_come_back_in_order(tokens: int) -> None:
    batch, backend = _batch(), _backend()
    ctx = _ctx(backend, tokens_per_microbatch=tokens)
    found = ref_logprobs(batch, ctx).ragged("ref_logprobs")
    assert found.offsets.equal(batch.ragged("response_ids").offsets)
    assert not found.values.requires_grad
    for row in range(ROWS):
        torch.testing.assert_close(found.row(row), _row_logprobs(backend, batch, row).detach(), rtol=0, atol=1e-12)


def test_reference_of_nothing() -> None:
    empty = _batch().slice(0, 0)
    assert len(ref_logprobs(empty, _ctx(_backend())).ragged("ref_logprobs")) == 0


def test_a_reference_equal_to_the_policy_costs_nothing() -> None:
    backend = _backend()
    ctx = _ctx(backend)
    batch = ref_logprobs(advantage(_batch(), ctx), ctx)
    update(batch, ctx, kl_coef=0.5)
    assert ctx.metrics.drain()["actor/kl_loss"] == pytest.approx(0.0, abs=1e-12)


def test_every_declared_choice_is_there() -> None:
    found = read_declaration("distflow.workers.trainer:update").spec.choices
    assert [name.removesuffix("/N") for name in found["aggregate"]] == list(MODES)
    for name in found["aggregate"]:
        Aggregation.parse(name.replace("/N", "/1024"))
    for step, setting in ((update, "loss"), (update, "kl"), (advantage, "function"), (batch_advantage, "function")):
        for name, function in shipped(step, setting).items():
            assert function.__name__ == name
    for name, normalize in (("advantage", {*NORMALIZE} - {"batch_std"}), ("batch_advantage", {*NORMALIZE})):
        assert set(read_declaration(f"distflow.workers.trainer:{name}").spec.choices["normalize"]) == normalize


def test_the_declarations_fit_the_functions() -> None:
    kept = ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "advantage")
    settings: dict[str, Any] = {"loss": "ppo", "clip": [0.2, 0.2], "kl_coef": 0.1, "kl": "k3", "tis": None}
    call = "distflow.workers.trainer:update"
    plan = StepPlan("update", call, "train", "sample", "policy", settings, (*kept, "ref_logprobs"), ())
    check_step(update, plan)
