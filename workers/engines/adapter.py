"""What engines around another project's share: a model without its weights, and their random seeds."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from setproctitle import getproctitle

from distflow.runtime.protocols import EngineSpec
from distflow.workers.engines.samples import Sample
from distflow.workers.models import load_config, outline
from distflow.workers.parameters import stored_form


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A model without its weights."""

    config: Any
    """The transformers configuration."""
    text: str
    """`config.json` for the engine, which gets no weights and no tokenizer from there."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of each tensor as it is stored, by its name in the checkpoint; tied ones once."""
    tied: Mapping[str, str]
    """Further names of tied parameters, each with its name in `shapes`."""


def outline_model(model: Mapping[str, Any], dtype: str) -> ModelOutline:
    """From the recipe's `models.<name>` section; raises UserError as `distflow.workers.models` does."""
    built = outline(model)
    stored = stored_form(built)
    shapes = {part.name: part.shape for parts in stored.tensors.values() for part in parts}
    tied = {alias: stored.tensors[name][0].name for alias, name in stored.tied.items()}
    config = load_config(model)
    settings = config.to_dict()
    # A sample ends at the stop tokens of its request, and nowhere else.
    settings |= {"eos_token_id": None, "architectures": [type(built).__name__], "dtype": dtype}
    return ModelOutline(config, json.dumps(settings), shapes, tied)


def as_torch(dtype: str) -> torch.dtype:
    """By its name."""
    found: torch.dtype = getattr(torch, dtype)
    return found


def engine_seed(spec: EngineSpec) -> int:
    """Of 32 bits. Another one for each worker of a pool, told by its title, and for each life of a worker."""
    return zlib.crc32(f"{spec.seed} {getproctitle()} {spec.life}".encode())


def sample_seed(sample: Sample) -> int:
    """Of 63 bits, which is what a torch generator takes: of this sample, from where it starts here."""
    request, begun = sample.group.request, len(sample.before.token_ids)
    drawn = f"{request.seed} sample {request.position} {sample.before.sample} {begun}"
    return xxhash.xxh3_64_intdigest(drawn.encode()) >> 1
