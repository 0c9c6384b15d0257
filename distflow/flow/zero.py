"""The ZeRO stage of a pool: a key of its own, because everyone changes it, for one option of one backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distflow.config.check import Where
from distflow.config.plugins import BACKENDS
from distflow.config.schema import LayoutConfig, PoolConfig
from distflow.errors import Problem

_OPTION = "zero"


def zero_problems(layout: LayoutConfig, where: Where) -> list[Problem]:
    """A stage for a backend that has none, or two stages that differ."""
    problems = []
    for name, pool in layout.pools.items():
        key = f"layout.pools.{name}.zero"
        if pool.zero is None:
            continue
        if pool.backend not in ("deepspeed", BACKENDS["deepspeed"]):
            message = f"backend {pool.backend!r} has no ZeRO stages"
            problems.append(Problem(where(key), key, message, "add backend: deepspeed, or remove it"))
        spelled = {f"layout.pools.{name}": pool.backend_options}
        spelled |= {f"layout.pools.{name}.each.{i}": own.backend_options or {} for i, own in pool.each.items()}
        for at, options in spelled.items():
            if _OPTION in options and options[_OPTION] != pool.zero:
                message = f"{pool.zero}, and {at}.backend_options.zero is {options[_OPTION]!r}"
                problems.append(Problem(where(key), key, message, "keep one of them"))
    return problems


def stage_of(pool: PoolConfig) -> int | None:
    """The stage that a pool of backend deepspeed spells out."""
    options = with_zero(pool.backend_options, pool)
    deepspeed = pool.backend in ("deepspeed", BACKENDS["deepspeed"])
    return options[_OPTION] if deepspeed and _OPTION in options else None


def with_zero(options: Mapping[str, Any], pool: PoolConfig) -> Mapping[str, Any]:
    """The options as the backend gets them."""
    return options if pool.zero is None else {**options, _OPTION: pool.zero}
