"""The contracts of engines and backends, for the plug-in that the environment names; `class_suites` runs them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from distflow.flow.resolve import resolve
from distflow.runtime.protocols import Backend, BackendSpec, Engine, EngineSpec
from distflow.testing.backend_contract import BackendContract
from distflow.testing.engine_contract import EngineContract
from distflow.testing.engine_harness import reference_model, submit
from distflow.types import SHIFTING

VARIABLE = "DISTFLOW_TESTED_PLUGIN"
VOCABULARY = 23
INIT = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
    # Wide weights make the distributions uneven: near-uniform ones would hide mistakes.
    "initializer_range": 0.3,
}


def _tested() -> tuple[str, dict[str, Any]]:
    call, options = json.loads(os.environ.get(VARIABLE, '["", {}]'))
    return call, options


@cache
def _reference(number: int) -> torch.nn.Module:
    return reference_model({"init": INIT, "dtype": "float32"}, number)


class SuiteOfEngines(EngineContract):
    """In float32, where the tokens of a sample may depend on rounding."""

    vocabulary = VOCABULARY
    exact = False
    tolerance = 1e-3
    tells_filtered = True

    def make_engine(self, *, slots: int = 16, max_tokens: int = 64) -> Engine:
        """The plug-in."""
        call, options = _tested()
        model = {"path": None, "init": INIT, "tokenizer": None, "dtype": "float32"}
        spec = EngineSpec(model, "cpu", slots, max_tokens, 0, options, filtered_logprobs=True)
        engine: Engine = resolve(call)(spec)
        return engine

    def refused(self, params: Mapping[str, Any]) -> str:
        """Say why an engine refuses what shifts logits, or min-p, which it may do by name."""
        named = [name for name in params if name in (*SHIFTING, "min_p")]
        if not named:
            return ""
        engine = self.ready()
        try:
            submit(engine, [self.request(0, **params)])
        except ValueError as error:
            return str(error) if any(name in str(error) for name in named) else ""
        finally:
            engine.close()
        return ""

    def reference(self, number: int) -> torch.nn.Module:
        """Weights by number."""
        return _reference(number)


class SuiteOfBackends(BackendContract):
    """In float64, where micro-batches change nothing."""

    def make_backend(self, spec: BackendSpec) -> Backend:
        """The plug-in."""
        call, options = _tested()
        about = (spec.model, spec.device, spec.trainable, spec.seed, spec.training_steps)
        backend: Backend = resolve(call)(BackendSpec(*about, options))
        return backend
