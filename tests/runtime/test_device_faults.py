"""Which errors are a GPU's, and not those of the code that met them."""

import pytest
import torch
from torch import distributed as dist

from distflow.errors import ReplicaLost, StepError, device_fault


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (
            torch.AcceleratorError(
                "CUDA error: uncorrectable ECC error encountered\nSearch for `cudaErrorECCUncorrectable' in …"
            ),
            "uncorrectable ECC error",
        ),
        (RuntimeError("CUDA error: unspecified launch failure"), "unspecified launch failure"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "an illegal memory access"),
        (
            dist.DistBackendError(
                "NCCL error in: x.cpp:1, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\n"
                "Last error:\nCuda failure 214 'uncorrectable ECC error encountered'"
            ),
            "uncorrectable ECC error",
        ),
        (dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited\nncclRemoteError: CUDA failure"), ""),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), ""),
        (torch.AcceleratorError("CUDA error: invalid device ordinal"), ""),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), ""),
        (RuntimeError("unspecified launch failure of a rocket"), ""),
        (ValueError("CUDA error: uncorrectable ECC error encountered"), ""),
    ],
)
def test_what_a_gpu_reports_is_told_from_other_errors(error: Exception, fault: str) -> None:
    assert device_fault(error) == fault


@pytest.mark.parametrize("kind", [StepError, ReplicaLost])
def test_it_is_found_below_what_was_made_of_it(kind: type[Exception]) -> None:
    error = kind("step 'update'")
    error.__cause__ = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
    assert device_fault(error) == "uncorrectable ECC error"


def test_errors_that_go_in_circles_end() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert device_fault(one) == ""
