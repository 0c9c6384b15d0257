"""Options of the engines and backends here, checked before anything starts; those of other plug-ins only they know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distflow.config.check import Where
from distflow.config.plugins import BACKENDS, ENGINES, OPTIONS, full_name
from distflow.config.schema import LayoutConfig
from distflow.errors import Problem, UserError
from distflow.flow.place import Placement
from distflow.flow.resolve import resolve
from distflow.flow.zero import with_zero


def option_problems(layout: LayoutConfig, placement: Placement, where: Where) -> list[Problem]:
    """What an engine or backend that is used would refuse, by the key of the pool, or of one of its workers."""
    problems = []
    for key, plugin, options in _used(layout, placement):
        if plugin in OPTIONS:
            try:
                resolve(OPTIONS[plugin]).parse(options)
            except UserError as error:
                problems.append(Problem(where(key), key, str(error)))
    return problems


def _used(layout: LayoutConfig, placement: Placement) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    generating = layout.pools[placement.generating]
    at = f"layout.pools.{placement.generating}"
    engine = full_name(generating.engine, ENGINES)
    yield f"{at}.engine_options", engine, generating.engine_options
    for index, own in generating.each.items():
        if own.engine is not None or own.engine_options is not None:
            other = engine if own.engine is None else full_name(own.engine, ENGINES)
            yield f"{at}.each.{index}.engine_options", other, own.engine_options or {}
    scoring = any(node.role in ("forward", "train") for node in placement.before)
    for name in dict.fromkeys([placement.training, *([placement.generating] if scoring else [])]):
        at, pool = f"layout.pools.{name}", layout.pools[name]
        backend = full_name(pool.backend, BACKENDS)
        yield f"{at}.backend_options", backend, with_zero(pool.backend_options, pool)
        for index, own in pool.each.items():
            if own.backend_options is not None:
                yield f"{at}.each.{index}.backend_options", backend, with_zero(own.backend_options, pool)
