"""TRL's arguments, each with what it is here: of GRPOTrainer and GRPOConfig 1.16, and the options of `trl grpo`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from distflow.config.meanings import (
    ALWAYS,
    CUT,
    DIVERGENCE,
    DUAL_CUT,
    FOLDER,
    LORA,
    NO_DROPOUT,
    NOTHING,
    OFF,
    RESUME,
    SHARDED,
    SLEEPS,
    SPEED,
    TURNS,
    Meaning,
    Unneeded,
    as_filter,
    idle,
    one_of,
    option,
    trackers,
    true_as,
    unbuilt,
)

AGGREGATES: Mapping[str, str] = {
    **dict.fromkeys(("dapo", "bnpo", "cispo"), "token-mean"),
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm/${flow.steps.sample.with.max_new_tokens}",
    "luspo": "seq-mean-token-sum",
}
"""How token losses add up, by the names of TRL's losses."""
SCHEDULES = {name: name for name in ("constant", "linear", "cosine")} | {
    "constant_with_warmup": "constant",
    **dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), "cosine"),
    "warmup_stable_decay": "wsd",
}
_OPTIMIZER = "models.policy.optimizer"
_8_BITS = ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit")
_ADAMW = ("adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused")
_32_BITS = (*_ADAMW, "adamw_apex_fused", "adamw_anyprecision", "paged_adamw", "paged_adamw_32bit")


def _optimizer(value: Any) -> str:
    name = str(value).rpartition(".")[2].lower()
    if name in _32_BITS:
        raise Unneeded("nothing is needed: models.policy.optimizer.name is adamw, with moments in float32")
    if name in _8_BITS:
        return "adamw_8bit"
    raise ValueError(f"{value} is not built; {_OPTIMIZER}.name is adamw, adamw_8bit or muon")


def _norm(value: Any) -> Any:
    if value == 0:
        raise ValueError(f"0 never clips: {_OPTIMIZER}.max_grad_norm=null")
    return value


def _aggregate(value: Any) -> str:
    if value in AGGREGATES:
        return AGGREGATES[value]
    raise ValueError(f"{value} is not built; there are {', '.join(AGGREGATES)}, and losses of your own")


def _not_half(value: Any) -> Any:
    if value:
        raise ValueError("training in float16 is refused: models.policy.dtype=bfloat16")
    raise Unneeded("false: off here, too")


def _as_summed(value: Any) -> Any:
    if value == "sum_then_normalize":
        raise Unneeded(f"{ALWAYS}: rewards are summed by their weights, and the advantage is of the sum")
    raise ValueError(f"{value} is not built: an advantage of your own (docs/custom-steps.md)")


def _divided(value: Any) -> str:
    """Translate what accelerate divides a model by."""
    if value in ("DEEPSPEED", "FSDP"):
        return str(value).lower()
    raise Unneeded("nothing is needed: each process has the whole model, as with backend torch")


_SIZES = Meaning("batch.prompts", "per_device_train_batch_size × steps_per_generation / num_generations", together=True)
_UNITS = "generation batches, not optimizer steps"
_WARMUP = Meaning(f"{_OPTIMIZER}.warmup_steps", _UNITS, together=True)
_TOLD = Meaning(text=NOTHING + "every training step has a line of metrics")
_SAMPLES_TOLD = Meaning(text=NOTHING + "samples are in the run's folder: `distflow rollouts`")
_ENGINE = Meaning(text="layout.pools.NAME.engine_options (docs/engines.md)")
_SERVER = Meaning(text=NOTHING + "engines are workers")
_HUB = Meaning(text="after the run: distflow export")
_ROWS = Meaning(text=NOTHING + "rows are checked, and judged one by one")
_SHIPPED = {
    "accuracy_reward": "{function: math} with data.fields.answer=solution",
    "think_format_reward": "{function: format, pattern: '<think>(?!.*<think>).*?</think>.*'}",
    "get_soft_overlong_punishment": "{function: length_penalty, max_tokens: N, buffer: N}",
}
"""By name of a reward function of TRL, what does the same here."""


def shipped_reward(call: str) -> str | None:
    """Say what does here what a reward function of TRL, `trl.rewards:NAME`, does; None: nothing, or another one."""
    module, _, name = call.partition(":")
    return _SHIPPED.get(name) if module.partition(".")[0] == "trl" else None


_BEST = Meaning(text="run.keep_best, a metric such as critic/score or val/avg@1, and run.keep_best_mode, max or min")
_RESTORED = Meaning(text=ALWAYS + ": a checkpoint has all that the run goes on with")
_TRACKIO = Meaning(text="run.trackers.trackio, options of that tracker (docs/trackers.md)")
_CORRECTION = Meaning("flow.steps.update.with.correction", "of samples by vLLM: tis, mis, sequence_mis", together=True)
_INIT = Meaning("models.policy.dtype", "and attn_implementation, and quantize=nf4 for 4 bits", together=True)
_HELD_OUT = Meaning("val.every", _UNITS, together=True)
_ADAPTIVE = unbuilt("an entropy coefficient that adapts", False)
_DATASET = Meaning("data.source", "hub:ID; its configuration and split are data.with", together=True)

TRL: Mapping[str, Meaning] = {
    "model": Meaning("models.policy.path"),
    "model_init_kwargs": _INIT,
    "quantization_config": _INIT,
    "reward_funcs": Meaning("flow.steps.reward.with.function", "by name, each with its weight", together=True),
    "reward_weights": Meaning("flow.steps.reward.with.function.NAME.weight", together=True),
    "multi_objective_aggregation": Meaning(text="sum_then_normalize: always so here", make=_as_summed),
    "reward_processing_classes": Meaning(text=ALWAYS + ": a reward model reads by its own tokenizer"),
    "train_dataset": Meaning("data.source", together=True),
    "eval_dataset": Meaning("val.data.source", together=True),
    "peft_config": LORA,
    "processing_class": Meaning(text="the tokenizer in the model's folder, or models.policy.tokenizer"),
    "output_dir": FOLDER,
    "run_name": Meaning("run.name"),
    "resume_from_checkpoint": RESUME,
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size"), _SIZES),
    "steps_per_generation": Meaning("batch.minibatches", "optimizer steps of a generation batch", together=True),
    "num_generations": Meaning("batch.samples_per_prompt"),
    "num_generations_eval": Meaning("val.samples_per_prompt", together=True),
    "num_iterations": Meaning("batch.epochs"),
    "max_steps": Meaning("run.training_steps", _UNITS, together=True),
    "num_train_epochs": Meaning("run.training_steps", "passes × (rows of the data // batch.prompts)", together=True),
    "max_completion_length": Meaning("flow.steps.sample.with.max_new_tokens"),
    "max_prompt_length": Meaning("data.max_prompt_tokens"),
    "temperature": Meaning("flow.steps.sample.with.temperature"),
    "top_p": Meaning("flow.steps.sample.with.top_p"),
    "top_k": Meaning("flow.steps.sample.with.top_k", make=as_filter),
    **{name: Meaning(f"flow.steps.sample.with.{name}") for name in ("min_p", "repetition_penalty")},
    "generation_kwargs": Meaning("flow.steps.sample.with.stop", "and others, each by its name here", together=True),
    "chat_template_kwargs": Meaning("data.chat_template_args"),
    "shuffle_dataset": Meaning("data.shuffle"),
    "learning_rate": Meaning(f"{_OPTIMIZER}.lr"),
    "lr_scheduler_type": Meaning(f"{_OPTIMIZER}.schedule", make=one_of(**SCHEDULES)),
    "lr_scheduler_kwargs": Meaning(f"{_OPTIMIZER}.min_lr", "and decay_steps, of num_decay_steps", together=True),
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), _WARMUP),
    "weight_decay": Meaning(f"{_OPTIMIZER}.weight_decay"),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), Meaning(f"{_OPTIMIZER}.betas", together=True)),
    "adam_epsilon": Meaning(f"{_OPTIMIZER}.eps"),
    "max_grad_norm": Meaning(f"{_OPTIMIZER}.max_grad_norm", make=_norm),
    "optim": Meaning(f"{_OPTIMIZER}.name", "adamw, or adamw_8bit", make=_optimizer),
    **dict.fromkeys(
        ("optim_args", "optim_target_modules", "optimizers"),
        unbuilt("optimizers have the settings of models.policy.optimizer", (None, None), [None, None]),
    ),
    "beta": DIVERGENCE,
    "use_bias_correction_kl": Meaning(
        "flow.steps.update.with.kl", "true: k2, which has the gradient of the divergence; false: k3", together=True
    ),
    **dict.fromkeys(("epsilon", "epsilon_high"), CUT),
    "delta": DUAL_CUT,
    "loss_type": Meaning("flow.steps.update.with.aggregate", "cispo: flow=cispo", make=_aggregate, together=True),
    "scale_rewards": Meaning(
        "flow.steps.advantage.with.normalize",
        make=one_of(group="group_std", true="group_std", batch="batch_std", none="none", false="none"),
    ),
    "importance_sampling_level": Meaning("flow", "sequence: flow=gspo", together=True),
    "mask_truncated_completions": Meaning("batch.mask_truncated", make=true_as(OFF, "loss")),
    "entropy_coef": Meaning("flow.steps.update.with.entropy_coef"),
    "use_adaptive_entropy": _ADAPTIVE,
    "top_entropy_quantile": unbuilt("a loss of the tokens of highest entropy alone: a loss of your own", 1.0),
    "off_policy_mask_threshold": unbuilt("layout.max_staleness, or correction: {geometric_mask: …}, bound old samples"),
    "sync_ref_model": unbuilt("a reference that follows the policy: it is the model as the run begins", False),
    **dict.fromkeys(
        (
            *("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target", "ref_model_mixup_alpha"),
            *(
                "ref_model_sync_steps",
                "sapo_temperature_neg",
                "sapo_temperature_pos",
                "vespo_k_pos",
                "vespo_lambda_pos",
            ),
            *("vespo_k_neg", "vespo_lambda_neg"),
        ),
        Meaning(text="of use_adaptive_entropy, sync_ref_model, or a loss_type that is not built"),
    ),
    "use_vllm": Meaning(
        "layout.pools.worker.engine", "vllm", make=true_as("the engine is torch unless it is named", "vllm")
    ),
    "vllm_tensor_parallel_size": option(vllm="tensor_parallel_size", together=True),
    "vllm_gpu_memory_utilization": option(vllm="gpu_memory_utilization"),
    "vllm_max_model_length": option(vllm="max_model_len"),
    "vllm_enable_sleep_mode": Meaning(text=SLEEPS),
    "vllm_mode": Meaning("layout", "colocate: layout=colocated; server: layout=split", together=True),
    **dict.fromkeys(
        (
            *("use_transformers_continuous_batching", "use_transformers_paged", "cache_implementation"),
            *("transformers_continuous_batching_config", "ds3_gather_for_generation", "vllm_model_impl"),
        ),
        _ENGINE,
    ),
    **dict.fromkeys(
        (
            *("vllm_server_host", "vllm_server_port", "vllm_server_base_url", "vllm_server_timeout"),
            "vllm_group_port",
        ),
        _SERVER,
    ),
    "vllm_structured_outputs_regex": unbuilt("constrained decoding: logit_bias, stop, or a generate step of your own"),
    **dict.fromkeys(
        (
            *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_cap"),
            *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
        ),
        _CORRECTION,
    ),
    "bf16": Meaning("models.policy.dtype", make=true_as("float32 unless it is written", "bfloat16")),
    "fp16": Meaning(text="training in float16 is refused: models.policy.dtype=bfloat16", make=_not_half),
    "gradient_checkpointing": Meaning("models.policy.gradient_checkpointing"),
    "disable_dropout": Meaning(text=ALWAYS + ": log-probs of a batch do not differ from call to call"),
    "cast_lm_head_to_fp32": unbuilt("models.policy.dtype is that of the whole model", False),
    "router_aux_loss_coef": unbuilt("a loss that balances experts", 0, 0.0),
    "trust_remote_code": unbuilt("models are those that transformers has", False),
    **dict.fromkeys(("label_smoothing_factor", "neftune_noise_alpha"), unbuilt("of supervised training", 0, 0.0)),
    "seed": Meaning("run.seed"),
    "data_seed": Meaning(text="run.seed, for all that is random"),
    "full_determinism": Meaning("run.deterministic"),
    "save_steps": Meaning("run.save_every", _UNITS, together=True),
    "save_total_limit": Meaning("run.keep_checkpoints"),
    "save_strategy": Meaning(text="run.save_every=N, or leave it out: the last step is saved in any case"),
    **dict.fromkeys(("metric_for_best_model", "load_best_model_at_end", "greater_is_better"), _BEST),
    **dict.fromkeys(
        (
            *("save_only_model", "save_on_each_node", "enable_jit_checkpoint", "ignore_data_skip"),
            "restore_callback_states_from_checkpoint",
        ),
        _RESTORED,
    ),
    "report_to": Meaning("run.trackers", make=trackers),
    **dict.fromkeys(("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), _TRACKIO),
    **dict.fromkeys(
        (
            *("logging_steps", "logging_strategy", "logging_first_step", "logging_nan_inf_filter", "logging_dir"),
            *("log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "debug", "skip_memory_metrics"),
            "include_num_input_tokens_seen",
        ),
        _TOLD,
    ),
    **dict.fromkeys(
        (
            *("log_completions", "num_completions_to_print", "log_unique_prompts", "log_multimodal"),
            "log_completions_hub_repo",
        ),
        _SAMPLES_TOLD,
    ),
    "eval_steps": _HELD_OUT,
    "eval_strategy": Meaning(text="steps: val.every=N, with val.data of eval_dataset; no: no section val"),
    "eval_on_start": Meaning("val.at_start", together=True),
    "eval_delay": unbuilt("val.every counts from the first training step", 0),
    **dict.fromkeys(
        (
            *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "use_cpu", "tf32"),
            *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order", "use_cache"),
            *("use_liger_kernel", "liger_kernel_config", "torch_compile", "torch_compile_backend", "no_cuda"),
            *("torch_compile_mode", "torch_empty_cache_steps", "gradient_checkpointing_kwargs", "bf16_full_eval"),
            *("fp16_full_eval", "per_device_eval_batch_size", "eval_accumulation_steps", "pad_to_multiple_of"),
            *("auto_find_batch_size", "batch_eval_metrics", "eval_do_concat_batches", "eval_use_gather_object"),
        ),
        SPEED,
    ),
    **dict.fromkeys(
        (
            *("remove_unused_columns", "dataloader_drop_last", "train_sampling_strategy", "length_column_name"),
            *("label_names", "include_for_metrics", "prediction_loss_only", "do_train", "do_eval", "do_predict"),
        ),
        _ROWS,
    ),
    **dict.fromkeys(
        (
            *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
            *("ddp_backend", "ddp_timeout", "accelerator_config", "parallelism_config", "local_rank"),
            "average_tokens_across_devices",
        ),
        SHARDED,
    ),
    "deepspeed": Meaning(text="layout.pools.NAME.backend=deepspeed and zero: 0 to 3"),
    **dict.fromkeys(("fsdp", "fsdp_config"), Meaning(text="layout.pools.NAME.backend=fsdp")),
    **dict.fromkeys(
        (
            *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
            "hub_revision",
        ),
        _HUB,
    ),
    **dict.fromkeys(("tools", "environment_factory", "rollout_func", "max_tool_calling_iterations"), idle(TURNS, [])),
    "callbacks": idle("run.trackers, run.stop_when, or a client of the run (docs/python.md)", []),
    # Options of `trl grpo` besides these.
    "model_name_or_path": Meaning("models.policy.path", together=True),
    **{name: Meaning(f"models.policy.{name}", together=True) for name in ("dtype", "attn_implementation")},
    "torch_dtype": Meaning("models.policy.dtype", together=True),
    **dict.fromkeys(("load_in_4bit", "bnb_4bit_quant_type"), Meaning("models.policy.quantize", "nf4", together=True)),
    "load_in_8bit": unbuilt("models.policy.quantize=nf4, with models.policy.lora", False),
    **dict.fromkeys(
        ("use_bnb_nested_quant", "bnb_4bit_quant_storage"),
        Meaning(text=NOTHING + "models.policy.quantize chooses it"),
    ),
    "model_revision": unbuilt("a revision of the hub: get its folder, and give that as models.policy.path", "main"),
    "reward_model_name_or_path": Meaning(
        "flow.steps.reward.with.function", "alone: a step (docs/algorithms.md)", together=True
    ),
    **dict.fromkeys(("dataset_name", "dataset_config", "dataset_train_split"), _DATASET),
    "dataset_test_split": Meaning("val.data.source", "hub:ID, and val.data.with.split", together=True),
    "dataset_streaming": SPEED,
    **dict.fromkeys(("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "lora_task_type"), LORA),
    "lora_dropout": idle(NO_DROPOUT, 0),
    **dict.fromkeys(
        ("lora_target_parameters", "lora_modules_to_save", "use_rslora", "use_dora"),
        unbuilt("models.policy.lora has rank, alpha and targets", False),
    ),
    "ignore_bias_buffers": SHARDED,
    "num_processes": Meaning("layout.pools.NAME.count", "and so many times the prompts", together=True),
    "distributed_type": Meaning("layout.pools.worker.backend", make=_divided),
    "zero_stage": Meaning("layout.pools.worker.zero"),
}
"""By name. What other arguments decide together is in `trl_conversion`."""


TRL_DEFAULTS: Mapping[str, Any] = {
    "num_generations": 8,
    "max_completion_length": 512,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "gradient_checkpointing": True,
    "seed": 42,
}
"""What TRL takes where nothing is said, and that is another value here; `trl_conversion` adds what follows from
several arguments."""


def trl_hint(word: str, value: object = None) -> str:
    """Say which key of a recipe an argument of TRL is, with its value if that has a counterpart; else an empty text."""
    meaning = TRL.get(word.lower())
    if meaning is None:
        return ""
    try:
        here = meaning.make(value) if meaning.make is not None and value is not None else None
    except Unneeded as error:
        return str(error)
    except ValueError as error:
        return f"{meaning.to}: {error}" if meaning.to else str(error)
    if not meaning.to:
        return meaning.text
    if meaning.options and value is not None:
        return f"did you mean layout.pools.NAME.engine_options={{{meaning.options['vllm']}: {value}}}?"
    given = f"={here}" if here is not None and not isinstance(here, dict) else ""
    told = f" ({meaning.text})" if meaning.text and not given else ""
    return f"did you mean {meaning.to}{given}{told}?"


def training_steps(value: float, each: int, total: int, *, up: bool = False) -> int | None:
    """Translate a number of TRL's optimizer steps, `each` of which are a training step, or a ratio of `total`.

    None for a ratio of a total that is not known (0 or less).
    """
    if 0 < value < 1:
        if total <= 0:
            return None
        value = math.ceil(value * total)
    return max(1, math.ceil(value / each) if up else round(value / each))
