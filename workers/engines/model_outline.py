"""What an engine of another project must know of a recipe's model: a configuration file, and its parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from distflow.workers.models import load_config, outline


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A model without its weights."""

    config: Any
    """The transformers configuration."""
    text: str
    """`config.json` for the engine, which gets no weights and no tokenizer from there."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of each parameter, by its Hugging Face name; tied ones once."""
    tied: Mapping[str, str]
    """Further names of tied parameters, each with its name in `shapes`."""


def outline_model(model: Mapping[str, Any], dtype: str) -> ModelOutline:
    """From the recipe's `models.<name>` section; raises UserError as `distflow.workers.models` does."""
    built = outline(model)
    first: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    tied: dict[str, str] = {}
    for name, parameter in built.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
            shapes[name] = tuple(parameter.shape)
    config = load_config(model)
    settings = config.to_dict()
    # A sample ends at the stop tokens of its request, and nowhere else.
    settings |= {"eos_token_id": None, "architectures": [type(built).__name__], "dtype": dtype}
    return ModelOutline(config, json.dumps(settings), shapes, tied)


def as_torch(dtype: str) -> torch.dtype:
    """By its name."""
    found: torch.dtype = getattr(torch, dtype)
    return found
