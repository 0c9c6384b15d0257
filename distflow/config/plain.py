"""Interpolations (`${run.seed}`, `${oc.env:HOME}`) are resolved once, here; afterwards a recipe is plain data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distflow.config.layers import Layers
from distflow.config.yamlfile import KeyPath, dotted
from distflow.errors import Problem


def resolve_interpolations(layers: Layers, problems: list[Problem]) -> dict[str, Any]:
    """The values without interpolations; what cannot be resolved is added to `problems` and left out."""
    if "${" not in str(layers.values) and "???" not in str(layers.values):
        return layers.values
    config = OmegaConf.create(layers.values)
    return _Resolver(layers, problems).mapping(config, ())


class _Resolver:
    def __init__(self, layers: Layers, problems: list[Problem]) -> None:
        self.layers = layers
        self.problems = problems

    def mapping(self, node: DictConfig, at: KeyPath) -> dict[str, Any]:
        found = ((str(key), self._values(node, key, (*at, str(key)))) for key in node)
        return {key: value for key, values in found for value in values}

    def _values(self, node: DictConfig | ListConfig, key: Any, at: KeyPath) -> Iterator[Any]:
        """The value under `key`; nothing if it cannot be had."""
        if OmegaConf.is_missing(node, key):
            self._problem(at, "required, and given nowhere", f"give it on the command line: {dotted(at)}=…")
            return
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            self._problem(at, *_words(error))
            return
        if isinstance(value, DictConfig):
            yield self.mapping(value, at)
        elif isinstance(value, ListConfig):
            yield [v for index in range(len(value)) for v in self._values(value, index, (*at, str(index)))]
        else:
            yield value

    def _problem(self, at: KeyPath, message: str, cure: str) -> None:
        origin = self.layers.origin(at)
        assert origin is not None, f"{dotted(at)} came from nowhere"
        self.problems.append(Problem(origin.where, dotted(at), message, cure))


def _words(error: OmegaConfBaseException) -> tuple[str, str]:
    text = str(error).splitlines()[0]
    variable = re.search(r"Environment variable '(.+?)' not found", text)
    if variable:
        name = variable[1]
        return f"the environment variable {name} is not set", f"set it, or give a default: ${{oc.env:{name},VALUE}}"
    return f"the interpolation cannot be resolved: {text}", "name another key of the recipe, as in ${run.seed}"
