"""What the `engine_options` of engines around another project's have in common. Imports no torch: the plan checks them.

The `check_*` functions raise UserError naming the option, its value and what was expected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from distflow.config.plugins import PluginUse
from distflow.errors import KeyedError, UserError

DTYPES = ("float32", "bfloat16", "float16")
MOST_GPUS = 16
"""Widths of tensor parallelism beyond this are not proposed."""


def check_count(name: str, value: object, *, optional: bool = False) -> None:
    """It must be a whole number from 1; `optional`: or null."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    _check(name, value, whole or (optional and value is None), "1 or more")


def check_flag(name: str, value: object, *, optional: bool = False) -> None:
    """It must be true or false; `optional`: or null."""
    _check(name, value, type(value) is bool or (optional and value is None), "true or false")


def check_fraction(name: str, value: object) -> None:
    """It must be null or between 0 and 1."""
    _check(name, value, value is None or (isinstance(value, float) and 0 < value < 1), "a number between 0 and 1")


def check_choice(name: str, value: object, choices: Sequence[str | None], expected: str) -> None:
    """It must be one of the choices."""
    _check(name, value, value in choices, expected)


def check_positive(name: str, value: object, expected: str) -> None:
    """It must be a number above 0."""
    _check(name, value, isinstance(value, int | float) and not isinstance(value, bool) and value > 0, expected)


def _check(name: str, value: object, right: bool, expected: str) -> None:
    if not right:
        raise UserError(f"engine_options.{name} {value!r}: expected {expected}")


class AdapterOptions(ABC):
    """Base of the options of one adapter, which are the fields of a dataclass."""

    __slots__ = ()

    name: ClassVar[str]
    """The engine's name in a recipe, and of the module of the project."""
    title: ClassVar[str]
    """The project's name."""
    dtype: str | None
    quantization: str | None
    args: Mapping[str, Any]

    @property
    @abstractmethod
    def gpus(self) -> int:
        """How many GPUs the worker needs, if it runs on GPUs."""

    @abstractmethod
    def check(self, use: PluginUse) -> None:
        """Raises UserError for what this model or device rules out, and for `args` that distflow sets itself."""

    def dtype_for(self, model: Mapping[str, Any]) -> str:
        """The type of weights and computation for a `models.<name>` section."""
        return str(self.dtype or model.get("dtype") or "float32")

    def _check_values(self) -> None:
        check_choice("dtype", self.dtype, (None, *DTYPES), ", ".join(DTYPES))
        check_choice("quantization", self.quantization, (None, "fp8"), "fp8, or none")
        _check("args", self.args, isinstance(self.args, Mapping), f"a mapping of {self.title}'s arguments")

    def _check_dtype(self, use: PluginUse) -> None:
        wanted = self.dtype_for(use.model)
        if wanted not in DTYPES:
            raise KeyedError(
                f"models.{use.model_name}.dtype",
                f"{wanted}, which {self.title} cannot compute in; use {', '.join(DTYPES)}, or set engine_options.dtype "
                f"of layout.pools.{use.pool} to one of them",
            )

    def _check_device(self, use: PluginUse) -> None:
        """On a CPU there is no quantization, no memory to give back, and results do not repeat to the last bit."""
        if use.device != "cpu":
            return
        if use.offload:
            raise KeyedError(
                f"layout.pools.{use.pool}.offload",
                f"engine {self.name!r} gives memory back on GPUs only — engine: torch, a GPU, or remove offload",
            )
        if self.quantization is not None:
            raise UserError(f"engine_options.quantization {self.quantization} needs a GPU; leave it out on a CPU")
        if use.deterministic:
            raise KeyedError(
                "run.deterministic",
                f"{self.title} repeats to the last bit on GPUs only, and layout.pools.{use.pool}.device is cpu: use "
                "engine torch, or a GPU",
            )

    def _check_length(self, name: str, value: int | None, use: PluginUse) -> None:
        if value is not None and value < use.longest:
            raise UserError(
                f"engine_options.{name} {value} is less than the longest sample of {use.longest} tokens "
                "(data.max_prompt_tokens + max_new_tokens); raise it or leave it out"
            )

    def _check_heads(self, name: str, use: PluginUse) -> None:
        if use.heads % self.gpus:
            fit = ", ".join(str(width) for width in range(1, min(use.heads, MOST_GPUS) + 1) if use.heads % width == 0)
            raise UserError(
                f"engine_options.{name} {self.gpus}: the model has {use.heads} attention heads, which cannot be "
                f"divided by it; of use are {fit}"
            )

    def _check_args(self, taken: Collection[str]) -> None:
        both = sorted(set(taken) & set(self.args))
        if both:
            raise UserError(f"engine_options.args: {', '.join(both)} is set by distflow; leave it out")

    @abstractmethod
    def refuses_sampling(self, setting: str, *, weighed: bool, deterministic: bool) -> tuple[str, str] | None:
        """Say why it does not take a setting of sampling, and what to do; None: it does."""
