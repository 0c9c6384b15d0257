"""Matrix products in oneDNN's layout."""

import pytest
import torch
import torch.nn.functional as F

from distflow.workers.engines.kernels import Product, is_reordered

needs_kernels = pytest.mark.skipif(not is_reordered(torch.zeros(512, 256)), reason="torch has no such kernels here")


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[40, 256] rows, [512, 256] weights, [512] biases."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in ((40, 256), (512, 256), (512,)))


@needs_kernels
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_the_product(biased: bool) -> None:
    x, weight, bias = operands()
    product = Product(weight, bias if biased else None)
    expected = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    torch.testing.assert_close(product(x).double(), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(product(x[::2]).double(), expected[::2], atol=1e-4, rtol=0)


@needs_kernels
def test_a_row_is_the_same_in_any_company() -> None:
    """To the last bit, so that samples do not depend on the rest of the batch."""
    x, weight, bias = operands()
    product = Product(weight, bias)
    together = product(x)
    for start, stop in ((0, 1), (3, 5), (7, 24), (1, 40)):
        assert torch.equal(product(x[start:stop].contiguous()), together[start:stop])


@needs_kernels
def test_new_weights_are_used_once_the_old_are_forgotten() -> None:
    x, weight, _ = operands()
    product = Product(weight)
    product(x)
    weight.mul_(2.0)
    product.forget()
    torch.testing.assert_close(product(x), F.linear(x, weight), atol=1e-3, rtol=0)


def test_in_double_precision_and_for_small_matrices_it_is_the_plain_product() -> None:
    x, weight, bias = operands(torch.float64)
    assert torch.equal(Product(weight, bias)(x), F.linear(x, weight, bias))
    x, weight, bias = operands()
    assert torch.equal(Product(weight[:4], bias[:4])(x), F.linear(x, weight[:4], bias[:4]))
