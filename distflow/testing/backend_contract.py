"""The contract of every backend. Subclass `BackendContract` as a pytest class and define how to make the backend."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.data.batch import Batch, Ragged
from distflow.runtime.checkpoint.format import put_together
from distflow.runtime.protocols import Backend, BackendSpec
from distflow.testing.tiny import ragged_batch, tiny_model


def taken(backend: Backend) -> dict[str, Tensor]:
    """A copy of the whole state of a backend without further replicas."""
    return {name: tensor.clone() for name, tensor in put_together(backend.state_shards()).items()}


class BackendContract:
    """The suite. A subclass defines `make_backend(spec)`, and `device` if it is not the CPU."""

    device = "cpu"
    dtype = "float64"
    """Dtype of the model. What is exact in float64 is compared within `rounding` otherwise."""
    rounding = 1e-12
    resumed_dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16")
    """Dtypes that the backend can train in."""
    whole_matrices = True
    """Whether a replica has them, so that optimizer muon steps them."""

    @pytest.fixture(autouse=True)
    def _repeats(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """On a GPU sums repeat to the last bit only as they do under `run.deterministic`."""
        on_gpu = self.device.startswith("cuda")
        if on_gpu:
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        yield
        if on_gpu:
            torch.use_deterministic_algorithms(False)

    def make_backend(self, spec: BackendSpec) -> Backend:
        """The backend under test."""
        raise AssertionError("a subclass of BackendContract defines make_backend")

    def backend(self, *, trainable: bool = True, training_steps: int = 10, **model: Any) -> Backend:
        """A backend with `tiny_model(**model)`."""
        model = {"dtype": self.dtype, **model}
        return self.make_backend(BackendSpec(tiny_model(**model), self.device, trainable, 0, training_steps, {}))

    def test_scores_have_the_shape_of_the_responses(self) -> None:
        """[B, T], zeros where there is no token, log-probs elsewhere; entropy only on request."""
        batch = ragged_batch()
        scores = self.backend().score(batch, temperature=1.0, grad=False, entropy=True)
        assert scores.entropy_BT is not None
        assert scores.mask_BT.cpu().equal(batch.ragged("response_ids").mask())
        assert scores.logprobs_BT.shape == scores.entropy_BT.shape == (12, 6)
        assert scores.logprobs_BT[~scores.mask_BT].abs().sum() == 0
        assert bool((scores.logprobs_BT[scores.mask_BT] < 0).all())
        assert not scores.logprobs_BT.requires_grad
        assert self.backend().score(batch, temperature=1.0, grad=False, entropy=False).entropy_BT is None

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_a_row_scores_the_same_alone(self, temperature: float) -> None:
        """Neither padding nor other rows change a score."""
        backend, batch = self.backend(), ragged_batch()
        together = backend.score(batch, temperature=temperature, grad=False, entropy=True)
        assert together.entropy_BT is not None
        for row in range(len(batch)):
            alone = backend.score(batch.slice(row, row + 1), temperature=temperature, grad=False, entropy=True)
            assert alone.entropy_BT is not None
            width = alone.logprobs_BT.shape[1]
            torch.testing.assert_close(
                alone.logprobs_BT[0], together.logprobs_BT[row, :width], rtol=0, atol=self.rounding
            )
            torch.testing.assert_close(
                alone.entropy_BT[0], together.entropy_BT[row, :width], rtol=0, atol=self.rounding
            )

    def test_the_likeliest_candidates(self) -> None:
        """[B, T, K] at each place, the likeliest first; at most the whole vocabulary, adding up to 1."""
        backend, batch = self.backend(), ragged_batch()
        plain = backend.score(batch, temperature=0.6, grad=False, entropy=True)
        scores = backend.score(batch, temperature=0.6, grad=False, entropy=True, candidates=99)
        ids_BTK, logprobs_BTK, mask_BT = scores.candidate_ids_BTK, scores.candidate_logprobs_BTK, scores.mask_BT
        assert ids_BTK is not None
        assert logprobs_BTK is not None
        torch.testing.assert_close(logprobs_BTK[mask_BT].exp().sum(-1), torch.ones_like(logprobs_BTK[mask_BT][:, 0]))
        assert bool((logprobs_BTK[mask_BT].diff(dim=-1) <= 0).all())
        at_tokens_BT = (ids_BTK == batch.padded("response_ids").to(ids_BTK.device)[..., None]) & mask_BT[..., None]
        found_BT = (logprobs_BTK * at_tokens_BT).sum(-1)
        torch.testing.assert_close(found_BT, plain.logprobs_BT, rtol=0, atol=self.rounding)
        torch.testing.assert_close(scores.entropy_BT, plain.entropy_BT, rtol=0, atol=self.rounding)
        few = backend.score(batch, temperature=0.6, grad=False, entropy=False, candidates=2)
        assert few.candidate_ids_BTK is not None
        assert few.candidate_ids_BTK.equal(ids_BTK[..., :2])

    def test_given_candidates_are_scored_with_a_gradient(self) -> None:
        """The tokens themselves as candidates train the model as their log-probs do; ids that it lacks have none."""
        batch, slopes = ragged_batch(), []
        tokens = batch.ragged("response_ids").values
        ids = batch.ragged("response_ids").like(torch.stack([tokens, torch.full_like(tokens, 99)], 1).int())
        for candidates in (0, ids):
            backend = self.backend()
            scores = backend.score(batch, temperature=1.0, grad=True, entropy=True, candidates=candidates)
            logprobs_BT = scores.logprobs_BT
            if scores.candidate_logprobs_BTK is not None:
                logprobs_BT = scores.candidate_logprobs_BTK[..., 0]
                assert bool((scores.candidate_logprobs_BTK[..., 1][scores.mask_BT] < -1e30).all())
            backend.accumulate(-logprobs_BT.sum())
            norm = backend.apply(35.0)
            slopes.append((norm, {name: tensor.clone() for name, tensor in backend.named_shards()}))
        (norm, weights), (same, others) = slopes
        assert same == pytest.approx(norm, rel=self.rounding)
        for name, tensor in weights.items():
            torch.testing.assert_close(others[name], tensor, rtol=0, atol=100 * self.rounding)

    def test_greedy_has_no_log_probs(self) -> None:
        """Temperature 0 is refused."""
        with pytest.raises(ValueError, match=r"temperature=0.*> 0"):
            self.backend().score(ragged_batch(), temperature=0.0, grad=False, entropy=False)

    def test_an_empty_prompt_is_refused(self) -> None:
        """There is nothing to predict its first token from."""
        batch = Batch(
            {
                "prompt_ids": Ragged.from_rows([[3], []], torch.int64),
                "response_ids": Ragged.from_rows([[4], [5]], torch.int64),
            }
        )
        with pytest.raises(ValueError, match="row 1 has an empty prompt"):
            self.backend().score(batch, temperature=1.0, grad=False, entropy=False)

    def test_micro_batches_do_not_change_the_step(self) -> None:
        """Whole, in halves or row by row: the same norm and the same weights."""
        results = [self.one_step(self.backend(), size) for size in (12, 6, 1)]
        for norm, weights in results[1:]:
            assert norm == pytest.approx(results[0][0], rel=self.rounding)
            for name, tensor in weights.items():
                torch.testing.assert_close(tensor, results[0][1][name], rtol=0, atol=100 * self.rounding)

    def one_step(self, backend: Backend, size: int) -> tuple[float, dict[str, Tensor]]:
        """One optimizer step in micro-batches of `size` rows; the norm and the weights after it."""
        batch = ragged_batch()
        for start in range(0, len(batch), size):
            scores = backend.score(batch.slice(start, start + size), temperature=1.0, grad=True, entropy=True)
            assert scores.entropy_BT is not None
            backend.accumulate(-(scores.logprobs_BT + 0.1 * scores.entropy_BT).sum())
        norm = backend.apply(35.0)
        return norm, {name: tensor.clone() for name, tensor in backend.named_shards()}

    def test_division_comes_before_clipping(self) -> None:
        """If division brings the norm below the limit, nothing is clipped; the returned norm is the divided one."""
        plain, _ = self.one_step(self.backend(), 12)
        loose = self.one_step(self.backend(optimizer={"max_grad_norm": plain * 1.1}), 12)
        tight = self.one_step(self.backend(optimizer={"max_grad_norm": plain / 1e4, "eps": plain}), 12)
        free = self.one_step(self.backend(optimizer={"eps": plain}), 12)
        assert loose[0] == tight[0] == plain
        name = next(iter(free[1]))
        torch.testing.assert_close(loose[1][name], self.one_step(self.backend(), 12)[1][name], rtol=0, atol=0)
        start = dict(self.backend().named_shards())[name]
        assert (tight[1][name] - start).norm() < 0.1 * (free[1][name] - start).norm()

    def test_nothing_accumulated(self) -> None:
        """Neither an empty step nor a division by zero is accepted."""
        backend = self.backend()
        with pytest.raises(ValueError, match=r"0 accumulated gradients.*accumulate a loss sum first"):
            backend.apply(1.0)
        scores = backend.score(ragged_batch(), temperature=1.0, grad=True, entropy=False)
        backend.accumulate(scores.logprobs_BT.sum())
        with pytest.raises(ValueError, match=r"apply\(denominator=0"):
            backend.apply(0.0)

    @pytest.mark.parametrize("bad", [float("nan"), float("-inf"), 0.0])
    @pytest.mark.parametrize("kind", ["whole", "bfloat16", "adapters", "values", "muon"])
    def test_a_norm_that_is_zero_or_not_finite_steps_nothing_and_leaves_nothing(self, kind: str, bad: float) -> None:
        """Weights, moments and the number of steps stay; what follows is as if it had never been.

        Of micro-batches with one that is not finite the others are sound, so that sums are there before and after it.
        """
        changes = self._skipping(kind)
        backend, undisturbed = self.backend(**changes), self.backend(**changes)
        step = self.value_step if kind == "values" else self.one_step
        for each in (backend, undisturbed):
            step(each, 6)
        before, batch = taken(backend), ragged_batch()
        sound = 0.0 if bad == 0 else 1.0
        for factor, part in ((sound, batch.slice(0, 6)), (bad, batch.slice(6, 12)), (sound, batch.slice(0, 6))):
            if kind == "values":
                loss = backend.values(part, grad=True).values_BT.square().sum()
            else:
                loss = backend.score(part, temperature=1.0, grad=True, entropy=False).logprobs_BT.sum()
            backend.accumulate(loss * factor)
        norm = backend.apply(12.0)
        assert norm == 0 if bad == 0 else not math.isfinite(norm)
        after = taken(backend)
        assert after.keys() == before.keys()
        assert all(tensor.equal(before[name]) for name, tensor in after.items())
        assert backend.learning_rate == undisturbed.learning_rate
        with pytest.raises(ValueError, match="0 accumulated gradients"):
            backend.apply(1.0)
        for size in (12, 6):
            (norm, weights), (expected, others) = step(backend, size), step(undisturbed, size)
            assert norm == expected
            assert all(tensor.equal(others[name]) for name, tensor in weights.items())
        state, others = taken(backend), taken(undisturbed)
        assert all(tensor.equal(others[name]) for name, tensor in state.items())

    def _skipping(self, kind: str) -> dict[str, Any]:
        """Return what a model is trained with; skips the test where the backend, or a package, does not do that."""
        schedule: dict[str, Any] = {"optimizer": {"schedule": "cosine", "warmup_steps": 2}}
        if kind == "bfloat16" and kind not in self.resumed_dtypes:
            pytest.skip(f"this backend does not train in {kind}")
        if kind == "muon" and not self.whole_matrices:
            pytest.skip("this backend has parts of matrices only")
        if kind == "adapters":
            pytest.importorskip("peft")
        changes: dict[str, dict[str, Any]] = {
            "bfloat16": {"dtype": "bfloat16"},
            "adapters": {"lora": {"rank": 2, "alpha": 32.0, "targets": "all-linear"}},
            "values": {"head": "value"},
            "muon": {"optimizer": {**schedule["optimizer"], "name": "muon"}},
        }
        return schedule | changes.get(kind, {})

    @pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
    def test_a_checkpoint_continues_bit_by_bit(self, dtype: str) -> None:
        """Weights, moments and learning rate after a restart equal those of an uninterrupted run."""
        if dtype not in self.resumed_dtypes:
            pytest.skip(f"this backend does not train in {dtype}")
        settings: dict[str, Any] = {"dtype": dtype, "optimizer": {"schedule": "cosine", "warmup_steps": 2}}
        first = self.backend(**settings)
        self.one_step(first, 12)
        saved = taken(first)
        second = self.backend(**settings)
        second.load_state(saved)
        assert second.learning_rate == first.learning_rate
        for _ in range(2):
            after_first, after_second = self.one_step(first, 12), self.one_step(second, 12)
            assert after_first[0] == after_second[0]
            for name, tensor in after_first[1].items():
                assert tensor.equal(after_second[1][name]), name

    def test_groups_have_settings_of_their_own(self) -> None:
        """A rate and a decay by the first pattern that a name matches; all other parameters move as without groups."""
        groups = [{"match": "norm", "lr": 0.0, "weight_decay": None}, {"match": r"^model\.l", "weight_decay": 9.0}]
        given = [{"lr": None, **group} for group in groups]
        schedule = {"schedule": "wsd", "min_lr": 1e-3}
        start = {name: tensor.clone() for name, tensor in self.backend().named_shards()}
        _, plain = self.one_step(self.backend(optimizer=schedule), 12)
        grouped = self.backend(optimizer={**schedule, "groups": given})
        _, found = self.one_step(grouped, 12)
        for name, tensor in found.items():
            if "norm" in name:
                assert tensor.equal(start[name]), f"{name} has a learning rate of 0"
            elif name.startswith("model.l"):
                decayed = plain[name] - 1e-2 * (9.0 - 0.01) * start[name]
                torch.testing.assert_close(tensor, decayed, rtol=0, atol=100 * self.rounding)
            else:
                torch.testing.assert_close(tensor, plain[name], rtol=0, atol=100 * self.rounding)
        resumed = self.backend(optimizer={**schedule, "groups": given})
        resumed.load_state(taken(grouped))
        after, expected = self.one_step(resumed, 12)[1], self.one_step(grouped, 12)[1]
        assert all(tensor.equal(expected[name]) for name, tensor in after.items())

    def test_a_checkpoint_of_another_model_is_refused(self) -> None:
        """Missing, unknown and misshapen tensors."""
        backend = self.backend()
        state = taken(backend)
        name = next(name for name, tensor in state.items() if tensor.ndim == 2)
        with pytest.raises(ValueError, match="checkpoint of another model: it lacks .*1 missing"):
            backend.load_state({key: tensor for key, tensor in state.items() if key != name})
        with pytest.raises(ValueError, match="unknown .*extra"):
            backend.load_state({**state, "extra": torch.zeros(1)})
        with pytest.raises(ValueError, match=r"checkpoint of another model: .* is torch.float\d+ \[1, 1\]"):
            backend.load_state({**state, name: torch.zeros(1, 1, dtype=state[name].dtype)})

    def test_tied_parameters_are_named_once(self) -> None:
        """And carry no gradient history."""
        shards = dict(self.backend().named_shards())
        assert "model.embed_tokens.weight" in shards
        assert "lm_head.weight" not in shards
        assert not any(tensor.requires_grad for tensor in shards.values())

    def test_a_frozen_model_only_scores(self) -> None:
        """No gradients, no state, no learning rate."""
        frozen = self.backend(trainable=False)
        scores = frozen.score(ragged_batch(), temperature=1.0, grad=False, entropy=False)
        same = self.backend().score(ragged_batch(), temperature=1.0, grad=False, entropy=False)
        assert scores.logprobs_BT.equal(same.logprobs_BT)
        assert frozen.learning_rate == 0
        assert list(frozen.state_shards()) == []
        with pytest.raises(ValueError, match="frozen model"):
            frozen.score(ragged_batch(), temperature=1.0, grad=True, entropy=False)
        with pytest.raises(ValueError, match="frozen model"):
            frozen.apply(1.0)

    def value_step(self, backend: Backend, size: int) -> tuple[float, dict[str, Tensor]]:
        """One step that draws all values towards 1, in micro-batches of `size` rows; the norm and the weights after."""
        batch = ragged_batch()
        for start in range(0, len(batch), size):
            found = backend.values(batch.slice(start, start + size), grad=True)
            backend.accumulate((found.values_BT - 1.0).square()[found.mask_BT].sum())
        norm = backend.apply(35.0)
        return norm, {name: tensor.clone() for name, tensor in backend.named_shards()}

    def test_values_begin_at_zero_on_the_body_of_the_policy(self) -> None:
        """[B, T], zeros; all weights but the head's are those of the same section with `head: tokens`."""
        critic, batch = self.backend(head="value"), ragged_batch()
        found = critic.values(batch, grad=False)
        assert found.mask_BT.cpu().equal(batch.ragged("response_ids").mask())
        assert found.values_BT.shape == (12, 6)
        assert found.values_BT.abs().sum() == 0
        assert not found.values_BT.requires_grad
        body, policy = dict(critic.named_shards()), dict(self.backend().named_shards())
        assert {name for name in body if name not in policy} == {"score.weight", "score.bias"}
        assert all(tensor.equal(policy[name]) for name, tensor in body.items() if name in policy)

    def test_a_row_is_worth_the_same_alone(self) -> None:
        """Neither padding nor other rows change a value, which is that of the state before its token."""
        critic, batch = self.backend(head="value"), ragged_batch()
        self.value_step(critic, 12)
        together = critic.values(batch, grad=False).values_BT
        assert together.abs().sum() > 0
        for row in range(len(batch)):
            alone = critic.values(batch.slice(row, row + 1), grad=False).values_BT
            torch.testing.assert_close(alone[0], together[row, : alone.shape[1]], rtol=0, atol=self.rounding)
        last = [int(length) - 1 for length in batch.ragged("response_ids").lengths]
        other = Batch(
            {
                "prompt_ids": batch.ragged("prompt_ids"),
                "response_ids": Ragged.from_rows(
                    [[*row[:-1].tolist(), 12] if len(row) else [] for row in batch.ragged("response_ids").rows()],
                    torch.int64,
                ),
            }
        )
        changed = critic.values(other, grad=False).values_BT
        for row, token in enumerate(last):
            if token >= 0:
                torch.testing.assert_close(changed[row, token], together[row, token], rtol=0, atol=self.rounding)

    def test_micro_batches_do_not_change_a_step_on_values(self) -> None:
        """Whole, in halves or row by row: the same norm and the same weights."""
        results = [self.value_step(self.backend(head="value"), size) for size in (12, 6, 1)]
        for norm, weights in results[1:]:
            assert norm == pytest.approx(results[0][0], rel=self.rounding)
            for name, tensor in weights.items():
                torch.testing.assert_close(tensor, results[0][1][name], rtol=0, atol=100 * self.rounding)

    def test_a_checkpoint_of_a_value_head_continues(self) -> None:
        """Head and body after a restart equal those of an uninterrupted run."""
        first, second = self.backend(head="value"), self.backend(head="value")
        self.value_step(first, 12)
        second.load_state(taken(first))
        for _ in range(2):
            one, other = self.value_step(first, 12), self.value_step(second, 12)
            assert one[0] == other[0]
            assert all(tensor.equal(other[1][name]) for name, tensor in one[1].items())

    def test_a_model_gives_what_its_head_does(self) -> None:
        """Log-probs or values: the other is refused, and a frozen model has no gradient."""
        with pytest.raises(ValueError, match=r"`head: value`.* needs one with `head: tokens`"):
            self.backend(head="value").score(ragged_batch(), temperature=1.0, grad=False, entropy=False)
        with pytest.raises(ValueError, match=r"`head: tokens`.* needs one with `head: value`"):
            self.backend().values(ragged_batch(), grad=False)
        with pytest.raises(ValueError, match="frozen model"):
            self.backend(head="value", trainable=False).values(ragged_batch(), grad=True)

    def test_offload_and_onload_change_nothing(self) -> None:
        """A step after round trips equals the step without them; tensors returned before can still be read."""
        moved, still = self.backend(), self.backend()
        for backend in (moved, still):
            self.one_step(backend, 12)
        for _ in range(2):
            given, before = dict(moved.named_shards()), taken(still)
            shards = list(moved.state_shards())
            moved.offload()
            # Whichever side each of them is on now.
            assert all(given[name].cpu().equal(before[f"model.{name}"].cpu()) for name in given)
            assert all(tensor.cpu().equal(before[name].cpu()) for name, tensor in put_together(shards).items())
            moved.onload()
            del given, shards
        again, plain = self.one_step(moved, 12), self.one_step(still, 12)
        assert again[0] == plain[0]
        assert all(tensor.equal(plain[1][name]) for name, tensor in again[1].items())
