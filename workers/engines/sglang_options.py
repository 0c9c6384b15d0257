"""What a pool's `engine_options` may say for the SGLang engine, and what SGLang is told for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from distflow.config.options import check_keys
from distflow.errors import UserError

if TYPE_CHECKING:
    # The plan checks options, and must not wait for torch.
    from distflow.runtime.protocols import EngineSpec

DTYPES = ("float32", "bfloat16", "float16")
SLACK = 8
"""Positions that SGLang keeps free behind the longest sample it accepts."""


@dataclass(frozen=True, slots=True)
class SGLangOptions:
    """The pool's `engine_options` for this engine."""

    tensor_parallel: int = 1
    """GPUs that share the model, from the worker's own on; on a CPU, processes that share its cores."""
    update_by: Literal["memory", "group"] = "memory"
    """How weights reach SGLang's processes: memory (each maps them) or group (sent to all of them over Gloo)."""
    memory_fraction: float | None = None
    """Share of the device's memory for weights and cache; null: SGLang decides. GPU only."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of weights and computation; null: the model's."""
    quantization: Literal["fp8"] | None = None
    """fp8: weights are quantized as they are loaded. GPU only."""
    attention_backend: str | None = None
    """One of SGLang's; null: torch_native on a CPU, else SGLang decides."""
    max_running: int | None = None
    """Samples that SGLang decodes side by side; further ones wait inside. Null: as many as the worker has slots."""
    context_length: int | None = None
    """Longest prompt + response, in tokens; null: the longest that the recipe allows."""
    stream_interval: int = 1
    """Tokens of a sample that come together. Larger is cheaper; if the worker is lost, as many are lost with it."""
    start_s: float = 600.0
    """Seconds within which SGLang must have started."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of SGLang's own, by their names in its ServerArgs; none of those that are set here."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> SGLangOptions:
        """Read the section; raises UserError for unknown keys and impossible values."""
        check_keys("engine_options", "engine sglang", options, cls.__slots__)
        parsed = cls(**options)
        for wrong, text in parsed._problems():
            if wrong:
                raise UserError(f"engine_options.{text}")
        return parsed

    def _problems(self) -> list[tuple[bool, str]]:
        counts = {name: getattr(self, name) for name in ("tensor_parallel", "max_running", "context_length")}
        counts["stream_interval"] = self.stream_interval
        optional = ("max_running", "context_length")
        problems = [
            (not (_positive(value) or (value is None and name in optional)), f"{name} {value!r}: expected 1 or more")
            for name, value in counts.items()
        ]
        fraction, start_s = self.memory_fraction, self.start_s
        return [
            *problems,
            (
                fraction is not None and not (isinstance(fraction, float) and 0 < fraction < 1),
                f"memory_fraction {fraction!r}: expected a number between 0 and 1",
            ),
            (self.dtype not in (None, *DTYPES), f"dtype {self.dtype!r}: expected {', '.join(DTYPES)}"),
            (self.update_by not in ("memory", "group"), f"update_by {self.update_by!r}: expected memory or group"),
            (self.quantization not in (None, "fp8"), f"quantization {self.quantization!r}: expected fp8, or none"),
            (
                not isinstance(start_s, int | float) or start_s <= 0,
                f"start_s {start_s!r}: expected a number of seconds above 0",
            ),
            (not isinstance(self.args, Mapping), f"args {self.args!r}: expected a mapping of SGLang's arguments"),
        ]

    def dtype_for(self, model: Mapping[str, Any]) -> str:
        """Of weights and computation; raises UserError where SGLang has no such type."""
        wanted = self.dtype or model.get("dtype") or "float32"
        if wanted not in DTYPES:
            raise UserError(
                f"engine sglang: models.….dtype is {wanted}, which SGLang cannot compute in; use {', '.join(DTYPES)}, "
                "or set engine_options.dtype to one of them"
            )
        return str(wanted)

    def server_args(self, spec: EngineSpec, longest: int, vocabulary: int, seed: int) -> dict[str, Any]:
        """SGLang's arguments, but for the place of the model. `longest` sample in tokens.

        Raises UserError for what cannot be had on this device, and for `args` that contradict what is set here.
        """
        on_cpu = spec.device == "cpu"
        if on_cpu:
            self._refuse_on_cpu()
        if self.context_length is not None and self.context_length < longest:
            raise UserError(
                f"engine_options.context_length {self.context_length} is less than the longest sample of {longest} "
                "tokens (data.max_prompt_tokens + max_new_tokens); raise it or leave it out"
            )
        length = (self.context_length or longest) + SLACK
        ours: dict[str, Any] = {
            "device": "cpu" if on_cpu else "cuda",
            "dtype": self.dtype_for(spec.model),
            "tp_size": self.tensor_parallel,
            "max_running_requests": min(self.max_running or spec.slots, spec.slots),
            "context_length": length,
            "random_seed": seed,
            "stream_interval": self.stream_interval,
            "sampling_mask_max_tokens": vocabulary,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "incremental_streaming_output": True,
            "grammar_backend": "none",
            # With it, the token that is under way during a swap of weights would be counted to the new version.
            "disable_overlap_schedule": True,
            "enable_memory_saver": memory_saver(spec.device),
        }
        ours |= {} if self.quantization is None else {"quantization": self.quantization}
        ours |= {} if self.memory_fraction is None else {"mem_fraction_static": self.memory_fraction}
        ours |= {} if self.attention_backend is None else {"attention_backend": self.attention_backend}
        if on_cpu:
            ours |= {"attention_backend": self.attention_backend or "torch_native", "sampling_backend": "pytorch"}
            ours |= {"max_total_tokens": spec.slots * length}
        else:
            ours |= {"base_gpu_id": int(spec.device.partition(":")[2] or 0)}
        taken = sorted({*ours, "model_path", "custom_weight_loader"} & set(self.args))
        if taken:
            raise UserError(f"engine_options.args: {', '.join(taken)} is set by distflow; leave it out")
        return {"log_level": "error", **ours, **self.args}

    def _refuse_on_cpu(self) -> None:
        if self.quantization is not None:
            raise UserError(f"engine_options.quantization {self.quantization} needs a GPU; leave it out on a CPU")
        if self.memory_fraction is not None:
            raise UserError("engine_options.memory_fraction is a share of a GPU's memory; leave it out on a CPU")
        named = sorted({"quantization", "mem_fraction_static"} & set(self.args))
        if named:
            raise UserError(f"engine_options.args: {', '.join(named)} needs a GPU; leave it out on a CPU")


def memory_saver(device: str) -> bool:
    """Whether SGLang can give back the device's memory for a while."""
    return device != "cpu" and find_spec("torch_memory_saver") is not None


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
