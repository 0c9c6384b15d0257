"""`engine_options` of the vLLM engine, and the arguments vLLM gets for them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from distflow.config.plugins import PluginUse, check_keys
from distflow.errors import UserError
from distflow.types import DEPARTING
from distflow.workers.engines.adapter_options import AdapterOptions, check_count, check_flag, check_fraction

CPU_BLOCK = 128
"""Tokens of a block of keys and values on a CPU."""
SPARE_BLOCKS = 64
"""Blocks beyond what all slots need at once: for prompts that are read again, and for vLLM itself."""
FILTERED = "vLLM tells log-probs before temperature, or after top-p and top-k: none over the whole vocabulary"
"""Its `logprobs_mode` has raw and processed ones."""
UNFILTERED = "top_p 1.0 and top_k 0, or engine torch or sglang"
SHIFTED = "vLLM tells log-probs of what it draws from, with all that shifts logits"
PLAIN_BYTES = 1 << 30
"""Cache size on a CPU for a model whose configuration does not say how large keys and values are."""


@dataclass(frozen=True, slots=True)
class VLLMOptions(AdapterOptions):
    """The pool's `engine_options` for this engine, with vLLM's own names for the settings it has."""

    name: ClassVar[str] = "vllm"
    title: ClassVar[str] = "vLLM"

    tensor_parallel_size: int = 1
    """GPUs that share the model, starting at the worker's own. On a CPU: 1."""
    gpu_memory_utilization: float | None = None
    """Fraction of the GPU's memory that vLLM takes in total; null: vLLM decides (0.9). GPU only."""
    kv_cache_memory_bytes: int | None = None
    """Memory for keys and values; null: what all slots need on a CPU, else by gpu_memory_utilization."""
    max_model_len: int | None = None
    """Longest prompt + response, in tokens; null: the longest that the recipe allows."""
    max_num_batched_tokens: int | None = None
    """Tokens read in one step, with prompts split if necessary; null: vLLM decides."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of weights and computation; null: the model's."""
    quantization: Literal["fp8"] | None = None
    """fp8: weights are quantized as they are loaded. GPU only."""
    enforce_eager: bool | None = None
    """Whether to run without compiled code and CUDA graphs; null: on a CPU only."""
    enable_prefix_caching: bool = True
    """Whether samples of one version share the keys and values of common prefixes."""
    seeded: bool = True
    """Whether each sample has random numbers of its own, by seed and position; false: one stream, faster for many."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM, by their names in its EngineArgs; none of those that are set here."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> VLLMOptions:
        """Read the section; raises UserError for unknown keys and impossible values."""
        check_keys("engine_options", "engine vllm", options, cls.__slots__, "; vLLM's other arguments go into args")
        parsed = cls(**options)
        check_count("tensor_parallel_size", parsed.tensor_parallel_size)
        check_fraction("gpu_memory_utilization", parsed.gpu_memory_utilization)
        check_count("kv_cache_memory_bytes", parsed.kv_cache_memory_bytes, optional=True)
        check_count("max_model_len", parsed.max_model_len, optional=True)
        check_count("max_num_batched_tokens", parsed.max_num_batched_tokens, optional=True)
        check_flag("enforce_eager", parsed.enforce_eager, optional=True)
        check_flag("enable_prefix_caching", parsed.enable_prefix_caching)
        check_flag("seeded", parsed.seeded)
        parsed._check_values()
        return parsed

    @property
    def gpus(self) -> int:
        """How many GPUs the worker needs, if it runs on GPUs."""
        return self.tensor_parallel_size

    def repeats_samples(self, deterministic: bool) -> bool:
        """Whether equal requests give equal tokens, up to rounding."""
        return self.seeded

    def refuses_sampling(self, setting: str, *, weighed: bool, deterministic: bool) -> tuple[str, str] | None:
        """Say why it does not take a setting of sampling, and what to do; None: it does."""
        if not weighed or setting not in DEPARTING:
            return None
        if setting in ("top_p", "top_k"):
            return FILTERED, UNFILTERED
        if setting == "min_p":
            return FILTERED.replace("top-p", "min-p, top-p"), "min_p 0, or engine torch or sglang"
        return SHIFTED, f"leave {setting} out, or engine torch"

    def check(self, use: PluginUse) -> None:
        """Raises UserError for what this model or device rules out, and for `args` that distflow sets itself."""
        self._check_dtype(use)
        self._check_device(use)
        if use.device == "cpu":
            self._refuse_on_cpu()
        if use.deterministic and not self.seeded:
            raise UserError("engine_options.seeded false: run.deterministic needs random numbers of each sample's own")
        self._check_length("max_model_len", self.max_model_len, use)
        self._check_heads("tensor_parallel_size", use)
        ours = self._own_args(use, seed=0)
        self._check_args({*ours, *self._given(), "model", "worker_extension_cls", "hf_overrides"})

    def engine_args(self, use: PluginUse, config: Any, seed: int) -> dict[str, Any]:
        """vLLM's arguments, without the model's path, for a use that passed `check`; `config` of transformers."""
        cache = {"kv_cache_memory_bytes": self._cache_bytes(use, config)} if use.device == "cpu" else {}
        return {**cache, **self._own_args(use, seed), **self.args}

    def _given(self) -> dict[str, Any]:
        """Options that vLLM decides if they are null."""
        return {
            "quantization": self.quantization,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes,
        }

    def _own_args(self, use: PluginUse, seed: int) -> dict[str, Any]:
        """The arguments that `args` must not contain. For device auto, which is not known yet, some are missing."""
        on_cpu = use.device == "cpu"
        ours: dict[str, Any] = {
            "dtype": self.dtype_for(use.model),
            "tensor_parallel_size": self.tensor_parallel_size,
            "max_model_len": self._length(use),
            # One more than samples run: the check of each new version must not wait for a sample to end.
            "max_num_seqs": use.slots + 1,
            "seed": seed,
            "enforce_eager": on_cpu if self.enforce_eager is None else self.enforce_eager,
            "enable_prefix_caching": self.enable_prefix_caching,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",
            # A step ends with its tokens drawn, so that weights change between two steps.
            "async_scheduling": False,
            "disable_log_stats": True,
            "distributed_executor_backend": "uni" if self.tensor_parallel_size == 1 else "mp",
            "enable_sleep_mode": not on_cpu,
        }
        ours |= {name: value for name, value in self._given().items() if value is not None}
        if use.device not in ("cpu", "auto"):
            first = int(use.device.partition(":")[2] or 0)
            ours |= {"device_ids": list(range(first, first + self.tensor_parallel_size))}
        return ours

    def _length(self, use: PluginUse) -> int:
        return self.max_model_len or use.longest

    def _cache_bytes(self, use: PluginUse, config: Any) -> int:
        """Size of the keys and values of all slots at once."""
        text = config.get_text_config()
        try:
            heads = text.num_key_value_heads or text.num_attention_heads
            width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            layers = text.num_hidden_layers
        except AttributeError:
            return PLAIN_BYTES
        blocks = (use.slots + 1) * (-(-self._length(use) // CPU_BLOCK) + 1) + SPARE_BLOCKS
        size = 4 if self.dtype_for(use.model) == "float32" else 2
        return int(blocks * CPU_BLOCK * layers * 2 * heads * width * size)

    def _refuse_on_cpu(self) -> None:
        if self.tensor_parallel_size > 1:
            raise UserError(
                f"engine_options.tensor_parallel_size {self.tensor_parallel_size} needs GPUs; on a CPU it is 1"
            )
        if self.gpu_memory_utilization is not None:
            raise UserError(
                "engine_options.gpu_memory_utilization is a fraction of a GPU's memory; on a CPU leave it out, or set "
                "kv_cache_memory_bytes"
            )
