"""Micro-batches for which the memory does not suffice: what is computed again, and where the run ends instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from distflow.data.batch import Batch, Ragged, row_lengths
from distflow.errors import WorkerFailed
from distflow.runtime.protocols import Backend, BackendSpec
from distflow.runtime.steps import StepContext
from distflow.testing.backend_contract import taken, tiny_model
from distflow.testing.fakes import FakeBackend
from distflow.workers.backends.torch_backend import TorchBackend
from distflow.workers.critic import critic_update
from distflow.workers.preference import dpo
from distflow.workers.reference import ref_logprobs
from distflow.workers.supervised import sft
from distflow.workers.trainer import update
from distflow.workers.within_memory import is_out_of_memory

GROUPS, SAMPLES = 3, 4
PADDED = ("packed", False)
HALVED = "perf/halved_microbatches"
Step = Callable[..., Batch]


class _Bursting(torch.autograd.Function):
    """Passes a tensor on; its backward is out of memory as often as `times` says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, when: Callable[[Tensor], bool]) -> Tensor:
        ctx.when = when
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.when(grad):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return grad, None


@contextmanager
def little_memory(where: str, when: Callable[[Tensor], bool]) -> Iterator[None]:
    """Let the layers' forward or backward be out of memory for some of what they compute."""

    def hook(module: nn.Module, given: Any, found: Any) -> Any:
        if not type(module).__name__.endswith("MLP"):
            return None
        if where == "backward":
            return _Bursting.apply(found, when) if found.requires_grad else None
        if when(found):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return None

    handle = register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def longer_than(tokens: int) -> Callable[[Tensor], bool]:
    """Whether more tokens than that are computed at once."""
    return lambda states: states.numel() // states.shape[-1] > tokens


def numbered(*numbers: int) -> Callable[[Tensor], bool]:
    """Whether it is one of these calls, counted from 1."""
    calls = iter(range(1, 1000))
    return lambda states: next(calls) in numbers


def backend_of(**model: Any) -> TorchBackend:
    return TorchBackend(BackendSpec(tiny_model(**model), "cpu", True, 0, 10, {"packed": False}))


def context(backend: Backend, tokens: int = 0) -> StepContext:
    return StepContext("train", models={"policy": backend}, model="policy", tokens_per_microbatch=tokens)


def batch_of(groups: int = GROUPS, samples: int = SAMPLES) -> Batch:
    """Rows of 4 to 9 tokens."""
    drawn, rows = torch.Generator().manual_seed(7), groups * samples
    prompts = [torch.randint(2, 13, (2 + row // samples,), generator=drawn) for row in range(rows)]
    responses = Ragged.from_rows(
        [torch.randint(1, 13, (2 + row % 4,), generator=drawn) for row in range(rows)], torch.int64
    )
    noise = responses.like(-torch.rand(responses.values.shape, dtype=torch.float64, generator=drawn))
    positions = torch.arange(groups).repeat_interleave(samples)
    return Batch(
        {
            "uid": torch.stack([torch.zeros_like(positions), positions + 50, positions], 1),
            "group": positions,
            "sample": torch.arange(samples).repeat(groups),
            "prompt_ids": Ragged.from_rows(prompts, torch.int64),
            "response_ids": responses,
            "response_mask": responses.like(torch.ones_like(responses.values, dtype=torch.bool)),
            **dict.fromkeys(("rollout_logprobs", "ref_logprobs", "advantage", "values", "return"), noise),
        }
    )


STEPS: dict[str, tuple[Step, dict[str, Any], int]] = {
    "update": (update, {}, SAMPLES),
    "sft": (sft, {}, SAMPLES),
    "critic_update": (critic_update, {"head": "value"}, SAMPLES),
    "dpo": (dpo, {}, 2),
}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", STEPS)
def test_what_does_not_fit_is_computed_again_in_halves(name: str, where: str) -> None:
    """Gradients, divisors and metrics are those of a device with more memory; and the smaller size is kept."""
    step, model, samples = STEPS[name]
    batch = batch_of(samples=samples)
    rich, poor = backend_of(**model), backend_of(**model)
    expected, found = context(rich), context(poor)
    step(batch, expected)
    most = 2 * samples * int(row_lengths(batch).max()) - 1
    with little_memory(where, longer_than(most)):
        step(batch, found)
        assert found.metrics.counts()[HALVED] >= 1
        assert 0 < found.tokens_per_microbatch <= most
        assert found.denominators == expected.denominators
        assert poor.apply(7.0) == pytest.approx(rich.apply(7.0), rel=1e-12)
        before = found.metrics.counts()[HALVED]
        step(batch, found)
        assert found.metrics.counts()[HALVED] == before, "the smaller size is remembered"
    step(batch, expected)
    assert poor.apply(7.0) == pytest.approx(rich.apply(7.0), rel=1e-12)
    others = taken(rich)
    for tensor_name, tensor in taken(poor).items():
        torch.testing.assert_close(tensor, others[tensor_name], rtol=0, atol=1e-12)
    first, second = expected.metrics.drain(), found.metrics.drain()
    # The effective sample size is that of a micro-batch.
    compared = [key for key in first if not key.startswith(("timing_s/", "perf/", "rollout_corr/ess"))]
    assert {key: second[key] for key in compared} == pytest.approx({key: first[key] for key in compared}, rel=1e-9)


def test_a_frozen_forward_is_halved_too() -> None:
    batch, backend = batch_of(), backend_of()
    whole = ref_logprobs(batch, context(backend))
    ctx = context(backend)
    with little_memory("forward", longer_than(30)):
        found = ref_logprobs(batch, ctx)
    assert ctx.metrics.counts()[HALVED] >= 1
    torch.testing.assert_close(
        found.ragged("ref_logprobs").values, whole.ragged("ref_logprobs").values, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_of_half_precision_never_mix_with_those_of_a_failed_backward(recomputed: bool) -> None:
    """They move into the masters when the backward is done: so a later micro-batch can be repeated, to the last bit."""
    model: dict[str, Any] = {"dtype": "bfloat16", "gradient_checkpointing": recomputed}
    backend, undisturbed, batch = backend_of(**model), backend_of(**model), batch_of()
    for each in (backend, undisturbed):
        for start in (0, 6):
            part = batch.slice(start, start + 6)
            if each is backend and start:
                with little_memory("backward", numbered(1)), pytest.raises(torch.OutOfMemoryError):
                    each.accumulate(each.score(part, temperature=1.0, grad=True, entropy=False).logprobs_BT.sum())
                assert each.forget_failed()
            each.accumulate(each.score(part, temperature=1.0, grad=True, entropy=False).logprobs_BT.sum())
    assert backend.apply(9.0) == undisturbed.apply(9.0)
    others = taken(undisturbed)
    assert all(tensor.equal(others[name]) for name, tensor in taken(backend).items())


def test_sums_that_a_failed_backward_has_touched_end_the_run() -> None:
    """A wide model adds up in place: of the second micro-batch some layers have added theirs, and others have not."""
    ctx, batch = context(backend_of(), tokens=60), batch_of()
    with (
        little_memory("backward", numbered(2)),
        pytest.raises(
            WorkerFailed,
            match=r"training step 1: step 'train' on worker/0 is out of memory \(CUDA out of memory.*up to \d tokens.*"
            r"cannot be computed again.*tokens_per_microbatch lower \(it is 60;.*gradient_checkpointing: true",
        ),
    ):
        update(batch, ctx)


def test_a_row_that_does_not_fit_alone_ends_the_run_with_its_length() -> None:
    with (
        little_memory("forward", longer_than(7)),
        pytest.raises(WorkerFailed, match=r"in a micro-batch of 1 rows of up to 9 tokens.*single row cannot be halved"),
    ):
        update(batch_of(), context(backend_of()))


def test_pairs_stay_whole() -> None:
    with (
        little_memory("backward", longer_than(8)),
        pytest.raises(WorkerFailed, match=r"2 rows of up to \d tokens.*\(0, 5\d, \d\).*are compared, stay together"),
    ):
        dpo(batch_of(samples=2), context(backend_of()))


class _Divided(FakeBackend):
    lockstep = True

    def score(self, *args: Any, **settings: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class _Foreign(_Divided):
    lockstep = False


@pytest.mark.parametrize(("backend", "why"), [(_Divided(), "the model is divided"), (_Foreign(), "may be among those")])
def test_other_backends_end_the_run_with_the_cure(backend: Backend, why: str) -> None:
    with pytest.raises(WorkerFailed, match=rf"{why}.*Set batch.tokens_per_microbatch lower"):
        sft(batch_of(), context(backend))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_how_memory_says_that_it_does_not_suffice(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_loss_that_is_not_finite_is_told_though_its_gradient_is(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "loss.py").write_text(
        "from distflow.algorithms.losses import ppo\n\n\n"
        "def shifted(terms):\n    found = ppo(terms)\n    return found._replace(loss_BT=found.loss_BT + float('inf'))\n"
    )
    ctx, backend = context(backend := backend_of(), tokens=40), backend
    update(batch_of(), ctx, loss=f"{tmp_path}/loss.py:shifted", tis=None)
    assert backend.apply(20.0) > 0
    assert ctx.metrics.counts()["actor/nonfinite_losses"] >= 2
    assert "has a loss of inf in a micro-batch of uids (epoch, prompt, position) (0, 50, 0), (0, 51, 1)" in caplog.text
