"""Rounding of weights for other hosts: how far off values are, and what becomes of the odd ones."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distflow.weights.encodings.rounding import _PIECE, _TURN, from_fp8, restored, rounded, to_fp8
from distflow.weights.manifest import BLOCK, FP8, TensorEntry


def there_and_back(values: Tensor) -> Tensor:
    stored = to_fp8(values)
    assert stored.dtype == torch.uint8
    assert stored.shape == (values.numel() + -(-values.numel() // BLOCK),)
    return from_fp8(stored, values.shape).float()


@given(st.integers(0, 700), st.integers(0, 2**32 - 1), st.floats(-30, 30))
def test_values_are_off_by_a_sixteenth_at_most_or_little_of_their_blocks_largest(
    count: int, seed: int, power: float
) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    found = there_and_back(values)
    padded = torch.nn.functional.pad(values, (0, -count % BLOCK)).view(-1, BLOCK)
    least = padded.abs().amax(1, keepdim=True).expand_as(padded).reshape(-1)[:count] * 2.0**-17
    assert bool(((found - values).abs() <= torch.maximum(values.abs() / 16, least)).all())


def test_a_block_whose_values_are_numbers_of_e4m3_times_a_power_of_two_comes_through_exactly() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0)
    for power in (-60, -1, 0, 3, 60):
        values = torch.ldexp(numbers, torch.tensor(power))
        assert torch.equal(there_and_back(values), values)
        assert torch.equal(there_and_back(values.view(16, 16).bfloat16()), values.view(16, 16))


def test_blocks_do_not_touch_each_other() -> None:
    values = torch.cat((torch.full((BLOCK,), 1e-6), torch.full((BLOCK,), 1e6), torch.zeros(BLOCK), torch.tensor([3.0])))
    assert torch.allclose(there_and_back(values), values, rtol=1 / 16, atol=0.0)
    assert torch.equal(there_and_back(values)[-1 - BLOCK :], values[-1 - BLOCK :])


def test_what_is_not_finite_is_nan_and_leaves_its_block_alone() -> None:
    values = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, -0.0])
    found = there_and_back(values)
    assert found.isnan().tolist() == [False, True, True, True, False]
    assert found[0] == 1.0
    assert torch.signbit(found[4])


def plainly(values: Tensor) -> Tensor:
    """The bytes of a tensor, computed all at once and by the definition."""
    flat = values.reshape(-1).float()
    flat = torch.where(flat.isinf(), torch.nan, flat)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().nan_to_num(nan=0.0).amax(1).double() / 448
    exponent = torch.where(largest > 0, largest.log2().ceil(), 0.0).clamp(-127, 127)
    scaled = (blocks.double() * torch.pow(2.0, -exponent).unsqueeze(1)).float().to(torch.float8_e4m3fn)
    return torch.cat((scaled.view(torch.uint8).view(-1)[: flat.numel()], (exponent + 127).to(torch.uint8)))


@pytest.mark.parametrize("count", [BLOCK - 1, _PIECE, _PIECE + 1, _TURN, 2 * _TURN + 3 * _PIECE - 5])
def test_the_bytes_are_those_of_the_definition_however_a_tensor_is_divided(count: int) -> None:
    random = torch.Generator().manual_seed(count)
    bits = torch.randint(-(1 << 15), 1 << 15, (count,), generator=random, dtype=torch.int16)
    for values in (bits.view(torch.bfloat16), torch.randn(count, generator=random), torch.zeros(count)):
        stored = to_fp8(values)
        assert torch.equal(stored, plainly(values))
        scales = torch.pow(2.0, stored[count:].double() - 127).repeat_interleave(BLOCK)[:count]
        expected = (stored[:count].view(torch.float8_e4m3fn).double() * scales).to(torch.bfloat16)
        assert torch.equal(from_fp8(stored, (count,)).nan_to_num(nan=7e-3), expected.nan_to_num(nan=7e-3))


def test_a_large_tensor_takes_no_memory_besides_its_result() -> None:
    """Of a model's embeddings each copy would be gigabytes."""
    values = torch.ones(16 << 20, dtype=torch.bfloat16)
    before = most_memory(reset=True)
    stored = to_fp8(values)
    assert most_memory() - before < 2 * stored.numel()
    before = most_memory(reset=True)
    found = from_fp8(stored, values.shape)
    assert most_memory() - before < 2 * found.nbytes


def most_memory(*, reset: bool = False) -> int:
    """The most bytes that this process has had in memory; with `reset`, since now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 7), (2, 3, 64)])
def test_shapes(shape: tuple[int, ...]) -> None:
    assert there_and_back(torch.ones(shape)).tolist() == torch.ones(shape).tolist()


def test_a_value_that_hardly_changes_keeps_its_bytes_though_its_block_does() -> None:
    """Scales are powers of two: the largest value may grow a little without any other byte changing."""
    values = torch.linspace(0.01, 0.1, BLOCK)
    grown = values.clone()
    grown[-1] *= 1.05
    assert int((to_fp8(values) != to_fp8(grown)).sum()) <= 1


def test_matrices_are_rounded_to_fp8_and_the_rest_to_bf16() -> None:
    tensors = [
        ("matrix", torch.randn(3, 100)),
        ("norm", torch.randn(100)),
        ("half", torch.randn(4, dtype=torch.float16)),
        ("scalar", torch.tensor(2.5, dtype=torch.float64)),
    ]
    to_bf16 = dict(rounded(tensors, "bf16"))
    assert [tensor.dtype for tensor in to_bf16.values()] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float16,
        torch.bfloat16,
    ]
    stored = list(rounded(tensors, "fp8"))
    assert [tensor.dtype for _, tensor in stored] == [torch.uint8, torch.bfloat16, torch.float16, torch.bfloat16]
    kinds = {"matrix": FP8}
    entries = [TensorEntry(name, kinds.get(name, "torch.bfloat16"), tuple(one.shape), 0, 0) for name, one in tensors]
    found = restored(stored, entries)
    assert [name for name, _ in found] == [name for name, _ in found[:]] == [name for name, _ in tensors]
    assert len(found) == 4
    assert torch.allclose(found[0][1].float(), tensors[0][1], rtol=1 / 15, atol=1e-3)
    assert torch.equal(found[-1][1], tensors[-1][1].bfloat16())
    assert restored(tensors, [TensorEntry(name, "torch.float32", (1,), 0, 0) for name, _ in tensors]) is tensors
