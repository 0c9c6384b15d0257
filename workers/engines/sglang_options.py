"""`engine_options` of the SGLang engine, and the arguments SGLang gets for them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

from distflow.config.plugins import PluginUse, check_keys
from distflow.errors import UserError
from distflow.workers.engines.adapter_options import (
    AdapterOptions,
    check_choice,
    check_count,
    check_fraction,
    check_positive,
)

UPDATES = ("memory", "group")
DETERMINISTIC = ("fa3", "fa4", "flashinfer", "triton")
"""Attention backends with which SGLang's results do not depend on the batch."""
SLACK = 8
"""Positions that SGLang keeps free after the longest sample it accepts."""
REFUSED = {
    "repetition_penalty": "SGLang counts tokens that it has drawn itself: none of the prompt, and none that a sample "
    "had before it was moved",
    "min_new_tokens": "SGLang asks a tokenizer for end tokens then, and runs without one",
}
"""Settings of sampling that it does not take, with the reason."""
BIASED = "SGLang tells log-probs of logits with their bias"
UNSEEDED = "SGLang has no random numbers of a sample's own for min-p (run.deterministic)"


@dataclass(frozen=True, slots=True)
class SGLangOptions(AdapterOptions):
    """The pool's `engine_options` for this engine."""

    name: ClassVar[str] = "sglang"
    title: ClassVar[str] = "SGLang"

    tensor_parallel: int = 1
    """GPUs that share the model, starting at the worker's own; on a CPU, processes that share its cores."""
    update_by: Literal["memory", "group"] = "memory"
    """How weights reach SGLang's processes: memory (each maps them) or group (sent to all of them over Gloo)."""
    memory_fraction: float | None = None
    """Fraction of the device's memory for weights and cache; null: SGLang decides. GPU only."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of weights and computation; null: the model's."""
    quantization: Literal["fp8"] | None = None
    """fp8: weights are quantized as they are loaded. GPU only."""
    attention_backend: str | None = None
    """One of SGLang's; null: torch_native on a CPU, else SGLang decides."""
    max_running: int | None = None
    """Samples that SGLang decodes in parallel; further ones wait inside. Null: as many as the worker has slots."""
    context_length: int | None = None
    """Longest prompt + response, in tokens; null: the longest that the recipe allows."""
    stream_interval: int = 1
    """Tokens of a sample that are sent together. Larger is cheaper; a lost worker loses up to as many per sample."""
    start_s: float = 600.0
    """Seconds within which SGLang must have started."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of SGLang, by their names in its ServerArgs; none of those that are set here."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> SGLangOptions:
        """Read the section; raises UserError for unknown keys and impossible values."""
        check_keys("engine_options", "engine sglang", options, cls.__slots__)
        parsed = cls(**options)
        check_count("tensor_parallel", parsed.tensor_parallel)
        check_choice("update_by", parsed.update_by, UPDATES, "memory or group")
        check_fraction("memory_fraction", parsed.memory_fraction)
        check_count("max_running", parsed.max_running, optional=True)
        check_count("context_length", parsed.context_length, optional=True)
        check_count("stream_interval", parsed.stream_interval)
        check_positive("start_s", parsed.start_s, "a number of seconds above 0")
        parsed._check_values()
        return parsed

    @property
    def gpus(self) -> int:
        """How many GPUs the worker needs, if it runs on GPUs."""
        return self.tensor_parallel

    def repeats_samples(self, deterministic: bool) -> bool:
        """Whether equal requests give equal tokens: its random numbers are one stream, but for run.deterministic."""
        return deterministic

    def refuses_sampling(self, setting: str, *, weighed: bool, deterministic: bool) -> tuple[str, str] | None:
        """Say why it does not take a setting of sampling, and what to do; None: it does."""
        if setting in REFUSED:
            return REFUSED[setting], f"leave {setting} out, or engine torch or vllm"
        if setting == "logit_bias" and weighed:
            return BIASED, "leave logit_bias out, or engine torch"
        if setting == "min_p" and deterministic:
            return UNSEEDED, "leave min_p out, or engine torch"
        return None

    def check(self, use: PluginUse) -> None:
        """Raises UserError for what this model or device rules out, and for `args` that distflow sets itself."""
        self._check_dtype(use)
        self._check_device(use)
        if use.device == "cpu":
            self._refuse_on_cpu()
        if use.deterministic:
            check_choice(
                "attention_backend",
                self.attention_backend,
                (None, *DETERMINISTIC),
                f"{', '.join(DETERMINISTIC)}, with which results do not depend on the batch (run.deterministic)",
            )
        self._check_length("context_length", self.context_length, use)
        self._check_heads("tensor_parallel", use)
        self._check_args({*self._own_args(use, vocabulary=0, seed=0), "model_path", "custom_weight_loader"})

    def server_args(self, use: PluginUse, vocabulary: int, seed: int) -> dict[str, Any]:
        """SGLang's arguments, without the model's path, for a use that passed `check`."""
        most = {"max_total_tokens": self._most_tokens(use)} if use.shares_device else {}
        # With nothing to decode, its scheduler would otherwise busy-wait on a core that may be needed for training.
        given = {"log_level": "error", "sleep_on_idle": True, **most}
        return {**given, **self._own_args(use, vocabulary, seed), **self.args}

    def _own_args(self, use: PluginUse, vocabulary: int, seed: int) -> dict[str, Any]:
        """The arguments that `args` must not contain. For device auto, which is not known yet, some are missing."""
        on_cpu = use.device == "cpu"
        ours: dict[str, Any] = {
            "device": "cpu" if on_cpu else "cuda",
            "dtype": self.dtype_for(use.model),
            "tp_size": self.tensor_parallel,
            # One more than samples run: the check of each new version must not wait for a sample to end.
            "max_running_requests": min(self.max_running or use.slots, use.slots) + 1,
            "context_length": self._length(use),
            "random_seed": seed,
            "stream_interval": self.stream_interval,
            "sampling_mask_max_tokens": vocabulary,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "incremental_streaming_output": True,
            "grammar_backend": "none",
            # With overlap, the token in progress during a weight swap would be attributed to the new version.
            "disable_overlap_schedule": True,
            "enable_memory_saver": memory_saver(use.device),
        }
        ours |= {"enable_deterministic_inference": True} if use.deterministic else {}
        ours |= {} if self.quantization is None else {"quantization": self.quantization}
        ours |= {} if self.memory_fraction is None else {"mem_fraction_static": self.memory_fraction}
        ours |= {} if self.attention_backend is None else {"attention_backend": self.attention_backend}
        if on_cpu:
            ours |= {"attention_backend": self.attention_backend or "torch_native", "sampling_backend": "pytorch"}
            ours |= {"max_total_tokens": self._most_tokens(use)}
        elif use.device != "auto":
            ours |= {"base_gpu_id": int(use.device.partition(":")[2] or 0)}
        return ours

    def _length(self, use: PluginUse) -> int:
        return (self.context_length or use.longest) + SLACK

    def _most_tokens(self, use: PluginUse) -> int:
        """Tokens of all samples that run at once: a GPU's SGLang would otherwise fill all its memory with a cache."""
        return (use.slots + 1) * self._length(use)

    def _refuse_on_cpu(self) -> None:
        if self.memory_fraction is not None:
            raise UserError("engine_options.memory_fraction is a fraction of a GPU's memory; leave it out on a CPU")
        named = sorted({"quantization", "mem_fraction_static"} & set(self.args))
        if named:
            raise UserError(f"engine_options.args: {', '.join(named)} needs a GPU; leave it out on a CPU")


def memory_saver(device: str) -> bool:
    """Whether SGLang can give the device's memory back temporarily."""
    return device != "cpu" and find_spec("torch_memory_saver") is not None
