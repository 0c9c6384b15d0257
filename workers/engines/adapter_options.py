"""Checks of `engine_options` that engines of other projects have in common. Plain Python: the plan makes them, too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distflow.config.options import PluginUse
from distflow.errors import KeyedError, UserError

if TYPE_CHECKING:
    # The plan checks options, and must not wait for torch.
    from distflow.runtime.protocols import EngineSpec

DTYPES = ("float32", "bfloat16", "float16")


def check_count(name: str, value: object, *, optional: bool = False) -> None:
    """Raises UserError unless it is a whole number from 1, or none where it is `optional`."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    _check(name, value, whole or (optional and value is None), "1 or more")


def check_flag(name: str, value: object, *, optional: bool = False) -> None:
    """Raises UserError unless it is true or false, or none where it is `optional`."""
    _check(name, value, type(value) is bool or (optional and value is None), "true or false")


def check_share(name: str, value: object) -> None:
    """Raises UserError unless it is none or between 0 and 1."""
    _check(name, value, value is None or (isinstance(value, float) and 0 < value < 1), "a number between 0 and 1")


def check_choice(name: str, value: object, choices: Sequence[str | None], expected: str) -> None:
    """Raises UserError unless it is one of the choices."""
    _check(name, value, value in choices, expected)


def check_args(args: object, title: str) -> None:
    """Raises UserError unless the further arguments, for the engine called `title`, are a mapping."""
    _check("args", args, isinstance(args, Mapping), f"a mapping of {title}'s arguments")


def check_positive(name: str, value: object, expected: str) -> None:
    """Raises UserError unless it is a number above 0."""
    _check(name, value, isinstance(value, int | float) and not isinstance(value, bool) and value > 0, expected)


def check_length(name: str, value: int | None, longest: int) -> None:
    """Raises UserError if samples of `longest` tokens do not fit."""
    if value is not None and value < longest:
        raise UserError(
            f"engine_options.{name} {value} is less than the longest sample of {longest} tokens "
            "(data.max_prompt_tokens + max_new_tokens); raise it or leave it out"
        )


def check_not_taken(args: Mapping[str, Any], taken: Collection[str]) -> None:
    """Raises UserError for arguments among the further ones that distflow sets itself."""
    both = sorted(set(taken) & set(args))
    if both:
        raise UserError(f"engine_options.args: {', '.join(both)} is set by distflow; leave it out")


def check_heads(name: str, parts: int, heads: int) -> None:
    """Raises UserError if the attention heads of the model, where they are known, cannot be divided into so many."""
    if heads % parts:
        raise UserError(
            f"engine_options.{name} {parts}: the model has {heads} attention heads, which cannot be divided by it"
        )


def check_dtype(title: str, wanted: str, use: PluginUse) -> None:
    """Raises UserError where the engine called `title` cannot compute in this type, which is then the model's."""
    if wanted not in DTYPES:
        raise KeyedError(
            f"models.{use.model_name}.dtype",
            f"{wanted}, which {title} cannot compute in; use {', '.join(DTYPES)}, or set engine_options.dtype of "
            f"layout.pools.{use.pool} to one of them",
        )


def check_offload(engine: str, use: PluginUse) -> None:
    """Raises UserError if memory is to be given back that is not a GPU's."""
    if use.offload and use.device == "cpu":
        raise KeyedError(
            f"layout.pools.{use.pool}.offload",
            f"engine {engine!r} gives memory back on GPUs only — engine: torch, a GPU, or remove offload",
        )


def use_of(spec: EngineSpec, longest: int, config: Any) -> PluginUse:
    """What the worker knows: the `longest` sample in tokens, `config` of transformers."""
    return PluginUse(
        model=spec.model,
        device=spec.device,
        pool=spec.pool,
        offload=spec.offload,
        shares_device=spec.shares_device,
        deterministic=spec.deterministic,
        slots=spec.slots,
        longest=longest,
        heads=getattr(config.get_text_config(), "num_attention_heads", 0),
    )


def _check(name: str, value: object, right: bool, expected: str) -> None:
    if not right:
        raise UserError(f"engine_options.{name} {value!r}: expected {expected}")
