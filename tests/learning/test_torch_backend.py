from __future__ import annotations

from typing import Any

import pytest
import torch

from distflow import parts
from distflow.data.batch import Batch, Ragged
from distflow.errors import UserError
from distflow.flow.schedule import learning_rate
from distflow.runtime.checkpoint.format import put_together
from distflow.runtime.protocols import Backend, BackendSpec
from distflow.testing.backend_contract import BackendContract, ragged_batch, tiny_model
from distflow.workers.backends import scoring
from distflow.workers.backends.scoring import pack
from distflow.workers.backends.torch_backend import TorchBackend


class TestTorchBackend(BackendContract):
    def make_backend(self, spec: BackendSpec) -> Backend:
        return TorchBackend(spec)


class TestTorchBackendPadded(BackendContract):
    def make_backend(self, spec: BackendSpec) -> Backend:
        return TorchBackend(
            BackendSpec(spec.model, spec.device, spec.trainable, spec.seed, spec.training_steps, {"packed": False})
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestTorchBackendOnGpu(BackendContract):
    device = "cuda:0"

    def make_backend(self, spec: BackendSpec) -> Backend:
        return TorchBackend(spec)


def _backend(*, packed: bool = True, trainable: bool = True, training_steps: int = 10, **model: Any) -> TorchBackend:
    return TorchBackend(BackendSpec(tiny_model(**model), "cpu", trainable, 0, training_steps, {"packed": packed}))


def _gradients(backend: TorchBackend, batch: Batch) -> dict[str, torch.Tensor]:
    scores = backend.score(batch, temperature=0.8, grad=True, entropy=True)
    assert scores.entropy_BT is not None
    backend.accumulate((scores.logprobs_BT * 0.3 + scores.entropy_BT).square().sum())
    return {name: p.grad.clone() for name, p in backend._parameters.items() if p.grad is not None}


LLAMA = {"model_type": "llama", "num_key_value_heads": 4}
QWEN3 = {"model_type": "qwen3", "head_dim": 8, "num_hidden_layers": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
GEMMA2 = {"model_type": "gemma2", "head_dim": 4, "final_logit_softcapping": 3.0, "sliding_window": 64}


def _model(init: dict[str, Any]) -> dict[str, Any]:
    model = tiny_model(init=init)
    if init["model_type"] == "gpt2":
        model["init"] = init
    return model


@pytest.mark.parametrize("init", [LLAMA, QWEN3, GPT2, GEMMA2], ids=lambda init: str(init["model_type"]))
def test_scores_are_those_of_the_whole_forward_of_transformers(init: dict[str, Any]) -> None:
    backend = TorchBackend(BackendSpec(_model(init), "cpu", True, 0, 10, {}))
    batch = ragged_batch()
    scores = backend.score(batch, temperature=0.7, grad=False, entropy=True)
    assert scores.entropy_BT is not None
    plain = TorchBackend(BackendSpec(_model(init), "cpu", False, 0, 10, {"packed": False}))._model
    for row in range(len(batch)):
        prompt, response = batch.ragged("prompt_ids").row(row), batch.ragged("response_ids").row(row)
        with torch.no_grad():
            logits = plain(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        expected = (logits.double() / 0.7).log_softmax(-1)
        count = len(response)
        tolerance = 1e-12 if init["model_type"] not in ("gpt2", "gemma2") else 1e-5
        torch.testing.assert_close(
            scores.logprobs_BT[row, :count].double(),
            expected.gather(1, response[:, None])[:, 0],
            rtol=0,
            atol=tolerance,
        )
        entropy = -(expected.exp() * expected).sum(-1)
        torch.testing.assert_close(scores.entropy_BT[row, :count].double(), entropy, rtol=0, atol=tolerance)


def test_packed_and_padded_gradients_agree() -> None:
    packed, padded = (_gradients(_backend(packed=kind), ragged_batch()) for kind in (True, False))
    for name, grad in padded.items():
        torch.testing.assert_close(packed[name], grad, rtol=1e-10, atol=1e-12)


def test_packing_shares_the_prompt_of_a_group() -> None:
    layout = pack(ragged_batch().ragged("prompt_ids"), ragged_batch().ragged("response_ids"))
    prompts, inputs = 1 + 3 + 2 + 5, sum(max(0, n - 1) for n in [1, 4, 2, 6, 0, 3, 5, 5, 5, 1, 1, 2])
    assert layout.ids_N.numel() == prompts + inputs


def test_responses_of_one_token_need_the_prompt_only() -> None:
    batch = Batch(
        {
            "prompt_ids": Ragged.from_rows([[3, 4], [3, 4]], torch.int64),
            "response_ids": Ragged.from_rows([[5], [6]], torch.int64),
        }
    )
    packed, padded = (
        _backend(packed=kind).score(batch, temperature=1.0, grad=False, entropy=False) for kind in (True, False)
    )
    torch.testing.assert_close(packed.logprobs_BT, padded.logprobs_BT, rtol=0, atol=1e-13)


@pytest.mark.parametrize("packed", [True, False])
def test_logits_in_pieces_give_the_same_gradient(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    whole = _gradients(_backend(packed=packed), ragged_batch())
    monkeypatch.setattr(scoring, "LOGITS_CHUNK", 4 * 13)
    pieces = _gradients(_backend(packed=packed), ragged_batch())
    for name, grad in whole.items():
        torch.testing.assert_close(pieces[name], grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("init", [{"num_hidden_layers": 2}, QWEN3], ids=["qwen2", "qwen3"])
def test_gradient_checkpointing_changes_no_gradient(init: dict[str, Any], packed: bool) -> None:
    padded = _gradients(_backend(init=init, packed=False), ragged_batch())
    recomputed = _gradients(_backend(init=init, packed=packed, gradient_checkpointing=True), ragged_batch())
    for name, grad in padded.items():
        torch.testing.assert_close(recomputed[name], grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("recomputed", [True, False])
def test_packed_and_padded_micro_batches_may_alternate_before_one_backward(
    monkeypatch: pytest.MonkeyPatch, recomputed: bool
) -> None:
    """A layer that is computed again in the backward pass finds the layout of its own micro-batch."""
    monkeypatch.setattr(parts, "MOST_VISIBLE", 100)
    laid_out: list[int] = []
    monkeypatch.setattr(scoring, "pack", lambda *rows: laid_out.append(len(rows[0])) or pack(*rows))
    init = {"num_hidden_layers": 2}
    backend = _backend(init=init, gradient_checkpointing=recomputed)
    batch, bounds = ragged_batch(), [(0, 3), (3, 7), (7, 9), (9, 12)]

    def loss(backend: TorchBackend, part: Batch) -> torch.Tensor:
        scores = backend.score(part, temperature=0.8, grad=True, entropy=True)
        assert scores.entropy_BT is not None
        return (scores.logprobs_BT * 0.3 + scores.entropy_BT).square().sum()

    assert backend.packs
    losses = [loss(backend, batch.slice(*rows)) for rows in bounds]
    backend.accumulate(torch.stack(losses).sum())
    assert laid_out == [3, 2, 3], "the second is padded"
    padded = _gradients(_backend(init=init, packed=False), batch)
    for name, grad in padded.items():
        found = backend._parameters[name].grad
        assert found is not None
        torch.testing.assert_close(found, grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("trainable", [True, False])
def test_no_model_is_packed_where_its_masks_would_be_too_large(
    monkeypatch: pytest.MonkeyPatch, trainable: bool
) -> None:
    backend, padded = (_backend(packed=packed, trainable=trainable) for packed in (True, False))
    monkeypatch.setattr(parts, "MOST_VISIBLE", 100)
    monkeypatch.setattr(scoring, "pack", lambda *rows: pytest.fail("packed"))
    found, expected = (
        one.score(ragged_batch(), temperature=1.0, grad=False, entropy=False) for one in (backend, padded)
    )
    torch.testing.assert_close(found.logprobs_BT, expected.logprobs_BT, rtol=0, atol=1e-12)


def test_packed_and_recomputed_the_backward_pass_keeps_little() -> None:
    """Of a layer its input, and of a prompt one copy, with 8 samples of 40 + 10 tokens."""
    batch = Batch(
        {
            "prompt_ids": Ragged.from_rows([[3, 4, 5, 6] * 10] * 8, torch.int64),
            "response_ids": Ragged.from_rows([[5, 6] * 5] * 8, torch.int64),
        }
    )

    def kept(**model: Any) -> int:
        storages: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        backend = _backend(init={"num_hidden_layers": 6}, **model)
        weights = {p.untyped_storage().data_ptr() for p in backend._parameters.values()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            backend.score(batch, temperature=1.0, grad=True, entropy=False)
        return sum(storage.nbytes() for place, storage in storages.items() if place not in weights)

    recomputed = kept(gradient_checkpointing=True)
    assert recomputed <= kept() / 3
    assert recomputed <= kept(gradient_checkpointing=True, packed=False) / 2


def test_dropout_is_off() -> None:
    init = GPT2 | {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    backend = TorchBackend(BackendSpec(_model(init), "cpu", True, 0, 10, {}))
    first, second = (backend.score(ragged_batch(), temperature=1.0, grad=True, entropy=False) for _ in range(2))
    assert first.logprobs_BT.equal(second.logprobs_BT)


def test_a_step_is_that_of_torch_adamw() -> None:
    backend, twin = _backend(optimizer={"max_grad_norm": 0.5}), _backend()
    parameters = list(twin._parameters.values())
    adamw = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for _ in range(3):
        for one in (backend, twin):
            scores = one.score(ragged_batch(), temperature=1.0, grad=True, entropy=False)
            one.accumulate(-scores.logprobs_BT.sum())
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= 35.0
        expected = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        adamw.step()
        adamw.zero_grad()
        assert backend.apply(35.0) == pytest.approx(float(expected), rel=1e-12)
    for name, tensor in backend.named_shards():
        torch.testing.assert_close(tensor, twin._parameters[name].detach(), rtol=0, atol=1e-12)


def test_half_precision_keeps_small_steps() -> None:
    backend = _backend(dtype="bfloat16", optimizer={"lr": 1e-6, "weight_decay": 0.0})
    before = {name: tensor.clone() for name, tensor in backend.named_shards()}
    masters = {
        n: t.clone() for n, t in put_together(backend.state_shards()).items() if n.startswith("optimizer.master.")
    }
    assert set(masters) == {f"optimizer.master.{name}" for name in before}
    for _ in range(3):
        scores = backend.score(ragged_batch(), temperature=1.0, grad=True, entropy=False)
        backend.accumulate(-scores.logprobs_BT.sum())
        backend.apply(35.0)
    after = put_together(backend.state_shards())
    moved = [float((after[name] - tensor).abs().max()) for name, tensor in masters.items()]
    assert max(moved) == pytest.approx(3e-6, rel=0.2)


@pytest.mark.parametrize(
    ("schedule", "done", "expected"),
    [
        ("constant", 0, 0.25),
        ("constant", 3, 1.0),
        ("constant", 99, 1.0),
        ("linear", 1, 0.5),
        ("linear", 4, 1.0),
        ("linear", 12, 0.5),
        ("linear", 20, 0.0),
        ("cosine", 4, 1.0),
        ("cosine", 12, 0.5),
        ("cosine", 25, 0.0),
        ("wsd", 1, 0.5),
        ("wsd", 18, 1.0),
        ("wsd", 19, 0.5),
        ("wsd", 20, 0.0),
    ],
)
def test_schedules(schedule: Any, done: int, expected: float) -> None:
    rate = learning_rate(1.0, schedule, done, warmup_steps=4, training_steps=20)
    assert rate == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "done", "expected"),
    [
        ("constant", 12, 1.0),
        ("linear", 12, 0.6),
        ("cosine", 12, 0.6),
        ("linear", 20, 0.2),
        ("cosine", 30, 0.2),
        ("wsd", 14, 1.0),
        ("wsd", 17, 0.6),
        ("wsd", 20, 0.2),
        ("wsd", 2, 0.75),
    ],
)
def test_schedules_end_at_the_least_rate(schedule: Any, done: int, expected: float) -> None:
    rate = learning_rate(1.0, schedule, done, warmup_steps=4, training_steps=20, min_lr=0.2, decay_steps=6)
    assert rate == pytest.approx(expected, abs=1e-12)


def test_the_learning_rate_is_that_of_the_next_step() -> None:
    backend = _backend(training_steps=4, optimizer={"schedule": "linear"})
    rates = []
    for _ in range(3):
        rates.append(backend.learning_rate)
        scores = backend.score(ragged_batch(), temperature=1.0, grad=True, entropy=False)
        backend.accumulate(scores.logprobs_BT.sum())
        backend.apply(1.0)
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.5e-2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pakced": True}, "pakced True: backend torch has no such option — did you mean 'packed'"),
        ({"packed": 1}, "packed 1: expected true or false"),
    ],
)
def test_backend_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TorchBackend(BackendSpec(tiny_model(), "cpu", True, 0, 10, options))
