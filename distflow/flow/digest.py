"""The digest of a plan: what its workers must agree on. Those whose digests differ must not exchange samples."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from distflow.flow.plan import Plan

_ABSOLUTE = re.compile(r"^/(?:[^/]*/)*([^/]+)$")


def interface_digest(plan: Plan) -> Plan:
    """The plan with its digest filled in."""
    return dataclasses.replace(plan, digest=_hash(digest_parts(plan)))


def digest_parts(plan: Plan) -> dict[str, str]:
    """A hash of each thing that peers must agree on.

    Not of the size of pools, which may change while the run goes on, of how anything travels between two workers, or a
    worker's own settings.
    """
    recipe = plan.recipe
    run = {"seed": recipe.run.seed, "training_steps": recipe.run.training_steps}
    flow = [dataclasses.asdict(step) for step in plan.steps]
    parts: dict[str, Any] = {
        "edges": [dataclasses.asdict(edge) for edge in plan.edges],
        "dtypes": {name: model.dtype for name, model in recipe.models.items()},
        "batch": dataclasses.asdict(plan.batch),
        "run": run,
        "homes": {pool.name: pool.homes for pool in plan.pools if pool.homes},
        "flow": [flow, {pool.name: pool.steps for pool in plan.pools}, plan.streamed],
        "models": {name: model.model_dump() for name, model in recipe.models.items()},
        "data": recipe.data.model_dump(),
        "val": None if plan.val is None else dataclasses.asdict(plan.val) | {"data": plan.val.data.model_dump()},
        **{f"code of {name}": text for name, text in plan.code.items()},
    }
    return {name: _hash(value) for name, value in parts.items()}


def _hash(value: object) -> str:
    text = json.dumps(portable(value), sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def portable(value: object) -> object:
    """The value with file names in place of absolute paths, which may differ between machines."""
    if isinstance(value, Mapping):
        return {str(key): portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    if isinstance(value, str) and (match := _ABSOLUTE.match(value)):
        return match[1]
    return value
