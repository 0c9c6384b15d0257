"""Lets SGLang run on a CPU for which its kernels are not built, by stand-ins for two packages that it imports.

`sgl_kernel` has, in plain torch, the one operator that dense models call on a CPU; `torchvision` is imported for vision
models, and never called for text models. Calling anything else raises NotImplementedError. Installed packages take
precedence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

STAND_INS = ("sgl_kernel", "torchvision", "torchvision.transforms", "torchvision.transforms.functional")


def install() -> None:
    """Register the stand-ins in this process, for those of the packages that are not installed."""
    from transformers.utils import is_torchvision_available

    # transformers caches the answer; asked later, it would take the stand-in for the real package.
    is_torchvision_available()
    sys.meta_path.append(StandIns())


class StandIns(MetaPathFinder, Loader):
    """Import hook that finds and creates the stand-ins."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for the stand-ins; None for all other names."""
        return spec_from_loader(fullname, self, is_package=True) if fullname in STAND_INS else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill in a new stand-in module."""
        module.__dict__["__getattr__"] = _absent(module.__name__)
        if module.__name__ == "sgl_kernel":
            module.__dict__["assign_req_to_token_pool_cpu"] = assign_req_to_token_pool


def assign_req_to_token_pool(
    rows_B: Any, req_to_token: Any, starts_B: Any, ends_B: Any, cache_places_T: Any, pool_length: int
) -> None:
    """Record the cache positions of new tokens.

    Row `rows_B[b]` of `req_to_token` gets, from `starts_B[b]` up to `ends_B[b]`, the next of `cache_places_T`.
    """
    taken = 0
    for row, start, end in zip(rows_B.tolist(), starts_B.tolist(), ends_B.tolist(), strict=True):
        req_to_token[row, start:end] = cache_places_T[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def _absent(module: str) -> Callable[[str], Any]:
    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"{module}.{name} is not installed on this machine; SGLang needs it here")

        call.__name__ = name
        return call

    return attribute
