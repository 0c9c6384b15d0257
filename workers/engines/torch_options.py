"""`engine_options` of the engine `torch`. Imports no torch: the plan checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from distflow.config.plugins import PluginUse, check_keys
from distflow.errors import KeyedError, UserError
from distflow.workers.engines.adapter_options import check_choice, check_count


@dataclass(frozen=True, slots=True)
class TorchEngineOptions:
    """The pool's `engine_options` for this engine."""

    prefill_tokens: int = 2048
    """Prompt tokens, padding included, read in one poll; a longer prompt is read alone."""
    decoder: Literal["auto", "module"] = "auto"
    """auto: a lean forward pass for models built like Llama; module: always the transformers module."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> TorchEngineOptions:
        """Read the section; raises UserError for unknown keys and impossible values."""
        check_keys("engine_options", "engine torch", options, cls.__slots__)
        parsed = cls(**options)
        check_count("prefill_tokens", parsed.prefill_tokens)
        check_choice("decoder", parsed.decoder, ("auto", "module"), "auto or module")
        return parsed

    def check(self, use: PluginUse) -> None:
        """Raises UserError for what `run.deterministic` rules out."""
        if not use.deterministic:
            return
        if use.device.startswith("cuda"):
            raise KeyedError(
                "run.deterministic",
                f"engine 'torch' repeats to the last bit on CPUs only, and layout.pools.{use.pool}.device is "
                f"{use.device}: set it to cpu, or use engine sglang or vllm",
            )
        if self.decoder == "module":
            raise UserError("engine_options.decoder 'module' is not batch-invariant: run.deterministic needs auto")

    @property
    def gpus(self) -> int:
        """How many GPUs the worker needs, if it runs on GPUs."""
        return 1
