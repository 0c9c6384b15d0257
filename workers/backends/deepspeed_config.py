"""DeepSpeed's configuration: the recipe's settings under its keys, and the keys of `ds_config` that may be set.

No setting has two sources: `ds_config` may repeat what the recipe decides (or say `auto`), but not contradict it. Keys
that this backend was not tried with are refused, not passed on: DeepSpeed ignores unknown ones silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distflow.config.plugins import PluginUse, check_keys
from distflow.errors import KeyedError, UserError, did_you_mean
from distflow.workers.backends.backend_options import refuse_undivided

AUTO = "auto"
"""Other libraries write this for "derived from my other settings", so it is accepted here."""
STAGES = (0, 1, 2, 3)
_OF_TRAINING = ("gradient_clipping", "optimizer", "scheduler")
_SCHEDULER = ("scheduler.type", "scheduler.params.")
_PINNED = "zero_optimization.offload_optimizer.pin_memory"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_TUNING: dict[str, tuple[type[int], tuple[int, ...]]] = {
    "wall_clock_breakdown": (bool, STAGES),
    "memory_breakdown": (bool, STAGES),
    "dump_state": (bool, STAGES),
    "steps_per_print": (int, STAGES),
    "zero_optimization.reduce_bucket_size": (int, (1, 2, 3)),
    "zero_optimization.allgather_bucket_size": (int, (1, 2)),
    "zero_optimization.use_multi_rank_bucket_allreduce": (bool, (1, 2)),
    # Below stage 2 gradients are summed after the last backward: there is nothing to overlap.
    "zero_optimization.overlap_comm": (bool, (2, 3)),
    "zero_optimization.sub_group_size": (int, (3,)),
    "zero_optimization.stage3_prefetch_bucket_size": (int, (3,)),
    "zero_optimization.stage3_param_persistence_threshold": (int, (3,)),
    "zero_optimization.stage3_model_persistence_threshold": (int, (3,)),
    "zero_optimization.stage3_max_live_parameters": (int, (3,)),
    "zero_optimization.stage3_max_reuse_distance": (int, (3,)),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": (bool, (3,)),
    "zero_optimization.stage3_allgather_sequential": (bool, (3,)),
    _PINNED: (bool, (1, 2, 3)),
}
"""Keys without a counterpart in the recipe: their type, and the stages that use them."""
_SIZES = (
    "steps_per_print",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.sub_group_size",
)
"""Those of them that DeepSpeed divides by: at least 1. For the others 0 means never or none."""


@dataclass(frozen=True, slots=True)
class DeepSpeedOptions:
    """The pool's `backend_options` for this backend."""

    zero: int = 2
    """What is sharded over the replicas: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also weights."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in the host's memory, and step there. Needs zero ≥ 1."""
    packed: bool = True
    """Compute no padding, and shared prompts once, where the model's attention allows it."""
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of DeepSpeed's own, as in its JSON file."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> DeepSpeedOptions:
        """Read the section; raises UserError for unknown keys and impossible values."""
        check_keys("backend_options", "backend deepspeed", options, cls.__slots__)
        parsed = cls(**options)
        if type(parsed.zero) is not int or parsed.zero not in STAGES:
            raise UserError(f"backend_options.zero {parsed.zero!r}: expected a ZeRO stage, 0, 1, 2 or 3")
        for name, value in (("offload_optimizer", parsed.offload_optimizer), ("packed", parsed.packed)):
            if not isinstance(value, bool):
                raise UserError(f"backend_options.{name} {value!r}: expected true or false")
        if not isinstance(parsed.ds_config, Mapping):
            raise UserError(f"backend_options.ds_config {parsed.ds_config!r}: expected a mapping of DeepSpeed's keys")
        if parsed.offload_optimizer and parsed.zero == 0:
            raise UserError("backend_options.offload_optimizer needs zero ≥ 1: only sharded state is offloaded")
        return parsed

    def check(self, use: PluginUse) -> None:
        """Raises UserError as `engine_config` and `refuse_undivided` do."""
        refuse_undivided(use, "deepspeed")
        engine_config(self, use)


def engine_config(options: DeepSpeedOptions, use: PluginUse) -> dict[str, Any]:
    """DeepSpeed's configuration for the model of a use; a frozen one has no optimizer.

    Raises UserError for a `ds_config` that contradicts the recipe, and for a dtype that DeepSpeed cannot do exactly.
    """
    half = _is_half(options, use)
    config = _base(options, half=half, trainable=use.trained)
    decided = dict(_leaves(config)) | _in_recipe(options, use.model, half=half)
    for key, value in _leaves(options.ds_config):
        if value == AUTO or value == {}:
            _check_known(key, value, decided)
            continue
        if key.partition(".")[0] in _OF_TRAINING and not use.trained:
            continue
        _check(key, value, decided, options, use)
        if key in _TUNING:
            _put(config, key, value)
    return config


def _is_half(options: DeepSpeedOptions, use: PluginUse) -> bool:
    dtype, key = use.model["dtype"], f"models.{use.model_name}.dtype"
    if dtype == "float64":
        raise KeyedError(
            key,
            "float64 with backend deepspeed: its ZeRO keeps weights and moments in float32; use float32 or bfloat16, "
            "or backend: torch",
        )
    if dtype == "float16" and options.zero == 3:
        raise KeyedError(
            key,
            f"float16 with zero 3 of layout.pools.{use.pool}: DeepSpeed would divide its weights in float32; use "
            "bfloat16, or backend: torch",
        )
    if dtype == "bfloat16" and use.trained and options.zero == 0:
        raise KeyedError(
            key,
            f"bfloat16 with zero 0 of layout.pools.{use.pool}: without ZeRO, DeepSpeed accumulates gradients in "
            "bfloat16; use zero: 1, or backend: torch, which accumulates them in float32",
        )
    return bool(dtype == "bfloat16")


def _base(options: DeepSpeedOptions, *, half: bool, trainable: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": options.zero,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "allgather_partitions": True,
        "reduce_bucket_size": 50_000_000,
        # It would replace torch's linear function in the whole process.
        "memory_efficient_linear": False,
    }
    if options.offload_optimizer and trainable:
        zero["offload_optimizer"] = {"device": "cpu"}
    elif options.zero in (1, 2) and not (half and options.zero == 1):
        # The backend has already computed it from the same gradients.
        zero["compute_grad_norm"] = False
    if options.zero < 2:
        zero["overlap_comm"] = False
    return {
        # DeepSpeed requires figures; here batches are ragged, and the runtime decides what a step consumes.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "bf16": {"enabled": half},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        # Stage 3 supports only the mean.
        "gradient_allreduce_op": "mean" if options.zero == 3 else "sum",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


def _in_recipe(options: DeepSpeedOptions, model: Mapping[str, Any], *, half: bool) -> dict[str, Any]:
    """The recipe's settings by DeepSpeed's keys."""
    optimizer = model["optimizer"]
    limit = optimizer["max_grad_norm"]
    return {
        "gradient_clipping": 0.0 if limit is None else float(limit),
        "zero_optimization.stage": options.zero,
        "zero_optimization.offload_optimizer.device": "cpu" if options.offload_optimizer else "none",
        "bf16.enabled": half,
        "fp16.enabled": False,
        "optimizer.type": "AdamW",
        "optimizer.params.lr": float(optimizer["lr"]),
        "optimizer.params.betas": [float(beta) for beta in optimizer["betas"]],
        "optimizer.params.eps": float(optimizer["eps"]),
        "optimizer.params.weight_decay": float(optimizer["weight_decay"]),
        "optimizer.params.torch_adam": True,
    }


_RECIPE_KEYS = {
    "gradient_clipping": "models.{model}.optimizer.max_grad_norm",
    "zero_optimization.stage": "backend_options.zero",
    "zero_optimization.offload_optimizer.device": "backend_options.offload_optimizer",
    "bf16.enabled": "models.{model}.dtype",
    "fp16.enabled": "models.{model}.dtype",
    "optimizer.type": "models.{model}.optimizer.name",
    "optimizer.params.lr": "models.{model}.optimizer.lr",
    "optimizer.params.betas": "models.{model}.optimizer.betas",
    "optimizer.params.eps": "models.{model}.optimizer.eps",
    "optimizer.params.weight_decay": "models.{model}.optimizer.weight_decay",
}


def _check(key: str, value: Any, decided: Mapping[str, Any], options: DeepSpeedOptions, use: PluginUse) -> None:
    at = _at(key, value)
    if key in _BATCH:
        raise UserError(
            f"{at}: the recipe decides what a step consumes (batch.prompts times batch.samples_per_prompt samples, in "
            "micro-batches of batch.tokens_per_microbatch tokens); remove it, or write auto"
        )
    if key.startswith("scheduler."):
        optimizer = use.model["optimizer"]
        raise UserError(
            f"{at}: models.{use.model_name}.optimizer.schedule {optimizer['schedule']!r} with warmup_steps "
            f"{optimizer['warmup_steps']} decides the learning rate; remove scheduler from ds_config and set those"
        )
    if key in _TUNING:
        _check_tuning(at, key, value, options)
        return
    _check_known(key, value, decided)
    if _plain(value) != _plain(decided[key]):
        raise UserError(_contradiction(at, key, decided[key], use))


def _check_known(key: str, value: Any, decided: Mapping[str, Any]) -> None:
    """Raises UserError for a key that is not supported here, even if its value is `auto` or empty."""
    suggested = {*_TUNING, *_RECIPE_KEYS}
    known = {*suggested, *decided, *_BATCH}
    if value == {}:
        known = suggested = {section for name in {*known, *_SCHEDULER} for section in _sections(name)}
    elif key.startswith("scheduler.params."):
        key = _SCHEDULER[1]
    if key not in known and (value != AUTO or key not in _SCHEDULER):
        raise UserError(f"{_at(key, value)}: this backend does not pass it on; {did_you_mean(key, sorted(suggested))}")


def _sections(key: str) -> Iterator[str]:
    while key := key.rpartition(".")[0]:
        yield key


def _at(key: str, value: Any) -> str:
    return f"backend_options.ds_config.{key} {value!r}"


def _check_tuning(at: str, key: str, value: Any, options: DeepSpeedOptions) -> None:
    kind, stages = _TUNING[key]
    least = 1 if key in _SIZES else 0
    if type(value) is not kind or (kind is int and value < least):
        raise UserError(f"{at}: expected {'true or false' if kind is bool else f'a whole number ≥ {least}'}")
    if options.zero not in stages:
        stages_using = ", ".join(map(str, stages))
        raise UserError(
            f"{at}: used by ZeRO stages {stages_using} only, and backend_options.zero is {options.zero}; remove it"
        )
    if key == _PINNED and not options.offload_optimizer:
        raise UserError(f"{at}: used with backend_options.offload_optimizer only, which is false; remove it")


def _contradiction(at: str, key: str, ours: Any, use: PluginUse) -> str:
    if key not in _RECIPE_KEYS:
        return f"{at}: this backend needs {ours!r}; remove it from ds_config"
    theirs = use.model["dtype"] if key in ("bf16.enabled", "fp16.enabled") else ours
    recipe_key = _RECIPE_KEYS[key].format(model=use.model_name)
    return f"{at}: {recipe_key} is {theirs!r}; remove it from ds_config, write auto, or set {recipe_key}"


def _plain(value: Any) -> Any:
    """Normalized for comparison: 1 equals 1.0, a tuple a list, and AdamW adamw."""
    if isinstance(value, str):
        return value.lower()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _leaves(tree: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
    tree[last] = value
