"""Words that users of other tools bring along: what stands for them in a recipe here, or that it is not built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distflow.config.meanings import ALWAYS as _ALWAYS
from distflow.config.meanings import CUT as _CUT
from distflow.config.meanings import DIVERGENCE as _DIVERGENCE
from distflow.config.meanings import DUAL_CUT as _DUAL_CUT
from distflow.config.meanings import FOLDER as _FOLDER
from distflow.config.meanings import LORA as _LORA
from distflow.config.meanings import NO_COLUMN as _NO_COLUMN
from distflow.config.meanings import NO_DROPOUT as _NO_DROPOUT
from distflow.config.meanings import NOT_BUILT as _NOT_BUILT
from distflow.config.meanings import NOTHING as _NOTHING
from distflow.config.meanings import OFF as _OFF
from distflow.config.meanings import RESUME as _RESUME
from distflow.config.meanings import SHARDED as _SHARDED
from distflow.config.meanings import SLEEPS as _SLEEPS
from distflow.config.meanings import SPEED as _SPEED
from distflow.config.meanings import TRACKERS as _TRACKERS
from distflow.config.meanings import TURNS as _TURNS
from distflow.config.meanings import TYPES as _TYPES
from distflow.config.meanings import Meaning, Unneeded, no_tracker, tracker_names
from distflow.config.meanings import as_filter as _filter
from distflow.config.meanings import idle as _idle
from distflow.config.meanings import one_of as _one_of
from distflow.config.meanings import option as _option
from distflow.config.meanings import positive as _positive
from distflow.config.meanings import trackers as _trackers
from distflow.config.meanings import true_as as _if
from distflow.config.trl_keys import trl_hint

_EVALUATION = "val.every (docs/validation.md)"
_ADAPTERS = "models.policy.lora.rank=16, with models.policy.lora.alpha=32"
_RANK, _ALPHA = "models.policy.lora.rank", "models.policy.lora.alpha"
_LOGGERS = ("logger", "report_to")
_UNTRACKED = "leave it out: nothing is sent to a tracker unless run.trackers names one; metrics are in the run's folder"
_ESTIMATOR_WORDS = ("algorithm", "algo", "adv_estimator", "advantage_estimator", "estimator")
ESTIMATORS = {
    **{name: name for name in ("grpo", "rloo", "remax", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")},
    **{"gae": "ppo", "group_norm": "grpo", "dr_grpo": "dr_grpo", "reinforce": "reinforce_plus_plus"},
    "reinforce_baseline": "reinforce_plus_plus_baseline",
}
"""Flows by the names of the advantage estimators of verl, and of OpenRLHF."""
_STOP = "flow.steps.sample.with.stop_token_ids, as [151643]; shipped steps take the model's end tokens, too"
_ENGINE = "layout.pools.rollout.engine={0}, or with layout=colocated layout.pools.worker.engine={0}"
_FOUR_BITS = "models.policy.quantize=nf4, with models.policy.lora, as {rank: 16, alpha: 32}"
_EPOCHS = "batch.epochs (passes over the samples of a training step)"
_UPDATES = "batch.minibatches (their number: a pass over the samples of a training step has as many optimizer steps)"
_JUDGE = (
    "a model with head: score under models, and a step that calls distflow.workers.reward_model:judge with it; "
    "a function is "
)
_STEPS = "run.training_steps"
_PROMPTS = "batch.prompts (prompts a training step; samples are that times batch.samples_per_prompt)"
_SAMPLES = "batch.samples_per_prompt"
_MICRO = "batch.tokens_per_microbatch (memory only: the result does not depend on it)"
_LR = "models.policy.optimizer.lr"
_KL = "flow=grpo_kl and flow.steps.update.with.kl_coef"
_KL_IN_REWARD = "a step distflow.workers.shaping:token_rewards with kl_coef, as in flow=reinforce_plus_plus"
_DAPO = "flow=dapo, whose step for it is distflow.workers.shaping:"
_CLIP = "flow.steps.update.with.clip, as [0.2, 0.2]"
_LENGTH = "flow.steps.sample.with.max_new_tokens"
_MODEL = "models.policy.path"
_DATA = "data.source, a file or folder of prompts, or a function"
_REWARD = "flow.steps.reward.with.function"
_COUNT = "layout.pools.NAME.count"
_SAVE = "run.save_every"
_DTYPE = "models.policy.dtype"
_CRITIC = "choose flow=ppo, which trains a critic as model `critic`; gamma and lam are settings of its step `gae`"

WORDS: Mapping[str, str] = {
    **{name: f"run.trackers.{name}=true" for name in _TRACKERS},
    **dict.fromkeys(_LOGGERS, "run.trackers.NAME=true, NAME being wandb, tensorboard, mlflow, swanlab or trackio"),
    **dict.fromkeys(("project_name", "experiment_name", "run_name"), "run.name, or --run NAME"),
    **dict.fromkeys(
        ("eval", "evaluation", "validation", "test_freq", "eval_freq", "eval_steps", "eval_interval"), _EVALUATION
    ),
    **dict.fromkeys(("val_before_train", "eval_on_start"), "val.at_start"),
    **dict.fromkeys(("val_files", "eval_dataset", "test_files"), "val.data.source"),
    **dict.fromkeys(("lora", "peft", "peft_config", "use_peft"), _ADAPTERS),
    **dict.fromkeys(("r", "lora_r", "lora_rank"), _RANK),
    "lora_alpha": _ALPHA,
    **dict.fromkeys(("qlora", "load_in_4bit", "bnb_4bit"), _FOUR_BITS),
    **dict.fromkeys(("lora_target_modules", "target_modules"), "models.policy.lora.targets"),
    "lora_dropout": _NO_DROPOUT,
    **dict.fromkeys(("ppo_epochs", "num_iterations", "num_ppo_epochs", "update_epochs"), _EPOCHS),
    **dict.fromkeys(("mini_batch_size", "ppo_mini_batch_size", "num_mini_batches", "minibatches"), _UPDATES),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "total_epochs"), _STEPS),
    **dict.fromkeys(("max_steps", "total_steps", "num_steps", "total_training_steps", "num_training_steps"), _STEPS),
    **dict.fromkeys(("batch_size", "train_batch_size", "rollout_batch_size", "global_batch_size"), _PROMPTS),
    **dict.fromkeys(("n", "num_generations", "group_size", "num_return_sequences", "n_samples_per_prompt"), _SAMPLES),
    **dict.fromkeys(("micro_batch_size", "micro_train_batch_size"), _MICRO),
    **dict.fromkeys(("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"), _MICRO),
    **dict.fromkeys(("lr", "learning_rate", "actor_learning_rate"), _LR),
    **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "kl_ctl", "use_kl_loss"), _KL),
    **dict.fromkeys(("clip_ratio", "cliprange", "clip_range", "epsilon", "eps_clip", "clip_eps"), _CLIP),
    **dict.fromkeys(("temperature", "sampling_temperature"), "flow.steps.sample.with.temperature"),
    "top_p": "flow.steps.sample.with.top_p",
    "top_k": "flow.steps.sample.with.top_k",
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_completion_length", "max_response_length"), _LENGTH),
    **dict.fromkeys(("response_length", "generate_max_len", "max_gen_len"), _LENGTH),
    **dict.fromkeys(("max_prompt_length", "max_prompt_len", "prompt_max_len"), "data.max_prompt_tokens"),
    "filter_overlong_prompts": "data.overlong=drop",
    **dict.fromkeys(("prompt_key", "input_key", "prompt_column"), "data.fields: {prompt: COLUMN}"),
    **dict.fromkeys(("label_key", "answer_key", "answer_column"), "data.fields: {answer: COLUMN}"),
    **dict.fromkeys(("chat_template_kwargs", "apply_chat_template_kwargs"), "data.chat_template_args"),
    **dict.fromkeys(("apply_chat_template", "return_raw_chat"), "data.chat"),
    **dict.fromkeys(("interleave_probs", "mixture_weights", "datasets"), "data.mix.NAME.weight"),
    "reward_weights": "flow.steps.reward.with.function.NAME.weight",
    **dict.fromkeys(("model", "model_name", "model_path", "model_name_or_path", "pretrain"), _MODEL),
    **dict.fromkeys(("dataset", "dataset_name", "train_files", "prompt_data", "train_file"), _DATA),
    **dict.fromkeys(
        ("reward_fn", "reward_function", "reward_funcs", "custom_reward_function", "remote_rm_url"), _REWARD
    ),
    **dict.fromkeys(("reward_model", "rm"), _JUDGE + _REWARD),
    **dict.fromkeys(("num_gpus", "n_gpus", "ngpus", "n_gpus_per_node", "num_workers", "world_size"), _COUNT),
    **dict.fromkeys(("nnodes", "num_nodes", "hosts"), "the command line: `distflow launch RECIPE --hosts FILE`"),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval", "checkpoint_every"), _SAVE),
    **dict.fromkeys(("output_dir", "default_local_dir", "save_path"), "the command line: --runs-dir DIR"),
    **dict.fromkeys(("resume_from_checkpoint", "resume_mode", "resume"), "the command line: --run NAME --resume"),
    **dict.fromkeys(("bf16", "fp16", "precision", "torch_dtype"), _DTYPE),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), "models.policy.optimizer.schedule"),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_steps"), "models.policy.optimizer.warmup_steps"),
    **dict.fromkeys(("entropy_coeff", "entropy_coef", "ent_coef"), "flow.steps.update.with.entropy_coef"),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_norm"), "models.policy.optimizer.max_grad_norm"),
    **dict.fromkeys(("use_vllm", "vllm"), _ENGINE.format("vllm")),
    "sglang": _ENGINE.format("sglang"),
    **{name: f"flow.steps.sample.with.{name}" for name in ("stop", "min_new_tokens", "include_stop_str_in_output")},
    **{name: f"flow.steps.sample.with.{name}" for name in ("logit_bias", "min_p", "repetition_penalty")},
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words"), "flow.steps.sample.with.stop"),
    **dict.fromkeys(("stop_token", "eos_token_id"), _STOP),
    **dict.fromkeys(("min_tokens", "min_length"), "flow.steps.sample.with.min_new_tokens"),
    **dict.fromkeys(
        (
            *(
                "tools",
                "tool",
                "tool_config_path",
                "max_tool_calling_iterations",
                "mcp",
                "agent",
                "agents",
                "agent_loop",
            ),
            *("default_agent_loop", "agent_func_path", "multi_turn", "max_turns", "max_assistant_turns"),
            *("max_user_turns", "environment_factory", "environment", "env", "rollout_func"),
        ),
        _TURNS,
    ),
    **dict.fromkeys(
        ("deepspeed", "zero_stage", "ds_config"), "layout.pools.trainer.backend=deepspeed and zero: 0 to 3"
    ),
    **dict.fromkeys(("fsdp", "fsdp_config"), "layout.pools.trainer.backend=fsdp"),
    **dict.fromkeys(
        ("tensor_parallel_size", "tensor_model_parallel_size", "tp"),
        "layout.pools.NAME.engine_options={tensor_parallel_size: 2} of vllm, {tensor_parallel: 2} of sglang",
    ),
    **dict.fromkeys(
        ("gpu_memory_utilization", "mem_fraction_static"),
        "layout.pools.NAME.engine_options={gpu_memory_utilization: 0.6} of vllm, {memory_fraction: 0.6} of sglang",
    ),
    **dict.fromkeys(
        ("param_offload", "optimizer_offload", "adam_offload", "offload_policy"),
        "layout.pools.trainer.backend_options={cpu_offload: true}; with layout=colocated layout.pools.worker.offload",
    ),
    "model_dtype": _DTYPE,
    **dict.fromkeys(("critic", "critic_model", "value_model", "gae_lambda", "lam"), _CRITIC),
    **dict.fromkeys(("ref_model", "reference_model"), _KL),
    **dict.fromkeys(("use_kl_in_reward", "kl_in_reward"), _KL_IN_REWARD),
    **dict.fromkeys(("filter_groups", "dynamic_sampling"), _DAPO + "dynamic_sampling"),
    **dict.fromkeys(
        ("mask_truncated_completions", "overlong_filtering", "overlong_filter", "filter_truncated"),
        "batch.mask_truncated=loss",
    ),
    **dict.fromkeys(("overlong_buffer", "overlong_buffer_len", "overlong_penalty_factor"), _DAPO + "token_rewards"),
    **dict.fromkeys(_ESTIMATOR_WORDS, "flow=NAME, as flow=grpo, flow=rloo or flow=ppo (docs/algorithms.md)"),
    **dict.fromkeys(("staleness", "staleness_threshold", "max_off_policy", "off_policy"), "layout.max_staleness"),
}
"""By the last part of a key, in lower case: a key here, or a sentence."""


def meant(word: str, value: object = ...) -> str:
    """Say what a word of another tool is here; empty for a word that is not known. `value`: what it is given, if that
    is known."""
    text = WORDS.get(word.lower(), "")
    if not text:
        return trl_hint(word, None if value is ... else value)
    if word.lower() in _LOGGERS:
        if no_tracker(value):
            return _UNTRACKED
        text = " and ".join(WORDS[name] for name in tracker_names(value)) or text
    if word.lower() in _ESTIMATOR_WORDS and str(value) in ESTIMATORS:
        text = f"flow={ESTIMATORS[str(value)]}"
    is_key = " " not in text or text.startswith(("run.", "batch.", "flow", "models.", "layout.", "data."))
    return f"did you mean {text}?" if is_key else text


def _masters(value: Any) -> Any:
    """Translate the type that parameters are held in, which for half precision is that of the computation, too."""
    if (found := _TYPES(value)) == "float32":
        raise Unneeded("weights of half precision have float32 masters; what is computed in is fsdp_config.dtype")
    return found


def _device(value: Any) -> Any:
    if value == "cuda":
        raise Unneeded("nothing is needed: a GPU where there is one")
    if value != "cpu":
        raise ValueError(f"{value} is not built; there are cuda, cpu")
    return value


_OFFLOADED = Meaning(
    "layout.pools.worker.offload",
    "with layout=split layout.pools.trainer.backend_options.cpu_offload",
    make=_if(_OFF, True),
)
_MEMORY = Meaning(text=_NOTHING + "micro-batches are cut by batch.tokens_per_microbatch, and the result is the same")
_SCHEDULE = _one_of(constant="constant", cosine="cosine", linear="linear", WSD="wsd")
_DUMPED = Meaning(text=_NOTHING + "samples are in the run's folder: `distflow rollouts`")
_PARALLEL_ENGINE = _idle("not built: an engine is divided by tensor_model_parallel_size alone", 1)
_RAY = Meaning(text=_NOTHING + "there is no Ray, and waits have deadlines of their own")
_OF_VLLM = ("max_num_batched_tokens", "enforce_eager", "enable_prefix_caching")
_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
VERL: Mapping[str, Meaning] = {
    "algorithm.adv_estimator": Meaning("flow", "gae: flow=ppo", together=True),
    "algorithm.norm_adv_by_std_in_grpo": Meaning(
        "flow.steps.advantage.with.normalize", make=_one_of(true="group_std", false="none")
    ),
    "algorithm.use_kl_in_reward": Meaning(text=f"false: {_OFF}; true: {_KL_IN_REWARD}"),
    "algorithm.kl_ctrl.kl_coef": Meaning(text=_KL_IN_REWARD),
    **dict.fromkeys(
        ("algorithm.kl_penalty", "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        Meaning(text="of algorithm.use_kl_in_reward: flow.steps.token_rewards.with.kl, with a fixed coefficient"),
    ),
    "algorithm.filter_groups.max_num_gen_batches": Meaning("batch.max_refills", together=True),
    "data.gen_batch_size": Meaning("batch.max_refills", "with filter_groups", together=True),
    "algorithm.gamma": Meaning("flow.steps.gae.with.gamma", "of flow=ppo", together=True),
    "algorithm.lam": Meaning("flow.steps.gae.with.lam", "of flow=ppo", together=True),
    **dict.fromkeys(
        ("algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold"),
        Meaning("flow.steps.update.with.tis", "sequence: correction.sequence_tis; null: null", together=True),
    ),
    "algorithm.filter_groups.enable": Meaning("flow", "true: flow=dapo", together=True),
    "algorithm.filter_groups.metric": Meaning(text="flow=dapo compares the scores of a group"),
    "data.train_files": Meaning("data.source", "several files: data.mix"),
    "data.val_files": Meaning("val.data.source", "several files: val.data.mix"),
    "data.train_batch_size": Meaning("batch.prompts"),
    "data.val_batch_size": Meaning(text=_NOTHING + "validation fills all slots"),
    "data.max_prompt_length": Meaning("data.max_prompt_tokens"),
    "data.max_response_length": Meaning("flow.steps.sample.with.max_new_tokens"),
    "data.filter_overlong_prompts": Meaning("data.overlong", make=_if("a longer prompt is an error here", "drop")),
    "data.truncation": Meaning(text="data.overlong, error (the default) or drop: prompts are never cut here"),
    "data.shuffle": Meaning("data.shuffle"),
    "data.seed": Meaning("run.seed", "for all that is random"),
    "data.prompt_key": Meaning("data.fields.prompt"),
    "data.reward_fn_key": _idle(_NO_COLUMN, "data_source", why=_NOTHING + "functions get the column data_source"),
    "data.custom_cls.path": _idle(
        "a data set of your own: data.source=./file.py:NAME, a function that returns prompts"
    ),
    "data.custom_cls.name": _idle(
        "a data set of your own: data.source=./file.py:NAME, a function that returns prompts"
    ),
    **dict.fromkeys(
        ("data.trust_remote_code", "actor_rollout_ref.model.trust_remote_code", "critic.model.trust_remote_code"),
        _idle("not built: models and tokenizers are those that transformers has", False),
    ),
    "data.return_raw_chat": Meaning(text=_ALWAYS + ": messages are written by the model's chat template"),
    "data.apply_chat_template_kwargs": Meaning("data.chat_template_args"),
    "data.filter_overlong_prompts_workers": _SPEED,
    "actor_rollout_ref.model.path": Meaning("models.policy.path"),
    "actor_rollout_ref.model.lora_rank": _LORA,
    "actor_rollout_ref.model.lora_alpha": _LORA,
    "actor_rollout_ref.model.target_modules": _LORA,
    "actor_rollout_ref.model.enable_gradient_checkpointing": Meaning("models.policy.gradient_checkpointing"),
    "actor_rollout_ref.model.use_remove_padding": Meaning(text=_ALWAYS + " where a backend can"),
    "actor_rollout_ref.model.use_shm": _SPEED,
    "actor_rollout_ref.model.use_liger": _SPEED,
    "actor_rollout_ref.model.use_fused_kernels": _SPEED,
    **dict.fromkeys(
        (
            f"{part}model.override_config.{name}"
            for part in ("actor_rollout_ref.", "critic.")
            for name in (
                *(
                    "attention_dropout",
                    "attn_pdrop",
                    "embd_pdrop",
                    "resid_pdrop",
                    "hidden_dropout",
                    "hidden_dropout_prob",
                ),
            )
        ),
        _idle("no dropout is applied here", 0, why=_ALWAYS + ": no dropout is applied"),
    ),
    "actor_rollout_ref.hybrid_engine": Meaning(
        text="layout=colocated; with vllm or tensor_model_parallel_size above 1 there is none: layout=split"
    ),
    _ACTOR + "optim.lr": Meaning("models.policy.optimizer.lr"),
    _ACTOR + "optim.weight_decay": Meaning("models.policy.optimizer.weight_decay"),
    _ACTOR + "optim.betas": Meaning("models.policy.optimizer.betas"),
    _ACTOR + "optim.clip_grad": Meaning("models.policy.optimizer.max_grad_norm"),
    _ACTOR + "grad_clip": Meaning("models.policy.optimizer.max_grad_norm"),
    _ACTOR + "optim.lr_warmup_steps": Meaning("models.policy.optimizer.warmup_steps", make=_positive),
    _ACTOR + "optim.lr_warmup_steps_ratio": Meaning(
        text="models.policy.optimizer.warmup_steps = ratio × run.training_steps"
    ),
    **{
        f"{part}optim.{name}": Meaning(f"models.{model}.optimizer.schedule", make=_SCHEDULE)
        for part, model in ((_ACTOR, "policy"), ("critic.", "critic"))
        for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")
    },
    **dict.fromkeys(
        (_ACTOR + "optim.total_training_steps", "critic.optim.total_training_steps"),
        Meaning(text=_NOTHING + "verl writes the training steps of the run over it"),
    ),
    "critic.optim.lr_warmup_steps": Meaning("models.critic.optimizer.warmup_steps", make=_positive),
    "critic.optim.lr_warmup_steps_ratio": Meaning(
        text="models.critic.optimizer.warmup_steps = ratio × run.training_steps"
    ),
    _ACTOR + "tis_imp_ratio_cap": Meaning("flow.steps.update.with.tis", "-1: null", together=True),
    **dict.fromkeys(
        (
            part + name
            for part in (_ACTOR, _REF)
            for name in ("entropy_from_logits_with_chunking", "entropy_checkpointing")
        ),
        _SPEED,
    ),
    _ACTOR + "ppo_mini_batch_size": Meaning(
        "batch.minibatches", "their number: data.train_batch_size / ppo_mini_batch_size", together=True
    ),
    _ACTOR + "ppo_epochs": Meaning("batch.epochs"),
    _ACTOR + "ppo_max_token_len_per_gpu": Meaning("batch.tokens_per_microbatch"),
    **dict.fromkeys(
        (
            *(
                f"critic.{name}"
                for name in (
                    *("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),
                    *("forward_micro_batch_size", "forward_micro_batch_size_per_gpu"),
                    *("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu"),
                )
            ),
            *(_ACTOR + name for name in ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz")),
            *(
                part + name
                for part in (_ROLLOUT, _REF)
                for name in (
                    *("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz"),
                    "log_prob_max_token_len_per_gpu",
                )
            ),
        ),
        _MEMORY,
    ),
    _ACTOR + "clip_ratio": _CUT,
    _ACTOR + "clip_ratio_low": _CUT,
    _ACTOR + "clip_ratio_high": _CUT,
    _ACTOR + "clip_ratio_c": _DUAL_CUT,
    _ACTOR + "loss_agg_mode": Meaning("flow.steps.update.with.aggregate", together=True),
    _ACTOR + "policy_loss.loss_mode": Meaning("flow", "gspo: flow=gspo; cispo: flow=cispo", together=True),
    _ACTOR + "entropy_coeff": Meaning("flow.steps.update.with.entropy_coef"),
    _ACTOR + "use_kl_loss": _DIVERGENCE,
    _ACTOR + "kl_loss_coef": _DIVERGENCE,
    _ACTOR + "kl_loss_type": Meaning("flow.steps.update.with.kl", "low_var_kl: k3; kl: k1; mse: k2", together=True),
    _ACTOR + "shuffle": Meaning(text=_NOTHING + "mini-batches are whole groups"),
    _ACTOR + "strategy": Meaning("layout.pools.worker.backend", together=True),
    _ACTOR + "ulysses_sequence_parallel_size": Meaning(text=_NOT_BUILT),
    _ACTOR + "use_torch_compile": _SPEED,
    _ACTOR + "checkpoint.save_contents": Meaning(text=_NOTHING + "all; run.hf_every writes a Hugging Face folder"),
    _ACTOR + "fsdp_config.dtype": Meaning("models.policy.dtype", make=_TYPES),
    _ACTOR + "fsdp_config.model_dtype": Meaning("models.policy.dtype", "optimizers have float32 copies", make=_masters),
    _ACTOR + "fsdp_config.param_offload": _OFFLOADED,
    _ACTOR + "fsdp_config.optimizer_offload": _OFFLOADED,
    _ACTOR + "fsdp_config.offload_policy": Meaning(
        "layout.pools.worker.backend_options.cpu_offload", make=_if(_OFF, True)
    ),
    _ACTOR + "fsdp_config.reshard_after_forward": Meaning("layout.pools.worker.backend_options.reshard_after_forward"),
    **dict.fromkeys(
        (
            *(_REF + name for name in ("strategy", "fsdp_config.param_offload", "fsdp_config.reshard_after_forward")),
            *(part + "fsdp_config.fsdp_size" for part in (_ACTOR, _REF, "critic.model.")),
            *("critic.fsdp.fsdp_size", "critic.strategy"),
        ),
        _SHARDED,
    ),
    _ROLLOUT + "name": Meaning(
        "layout.pools.worker.engine",
        "vllm where several train: layout=split",
        make=_one_of(vllm="vllm", sglang="sglang", hf="torch"),
    ),
    _ROLLOUT + "mode": Meaning(text=_ALWAYS + ": samples are asked for one by one"),
    _ROLLOUT + "n": Meaning("batch.samples_per_prompt"),
    _ROLLOUT + "temperature": Meaning("flow.steps.sample.with.temperature"),
    _ROLLOUT + "top_p": Meaning("flow.steps.sample.with.top_p"),
    _ROLLOUT + "top_k": Meaning("flow.steps.sample.with.top_k", make=_filter),
    _ROLLOUT + "repetition_penalty": Meaning("flow.steps.sample.with.repetition_penalty"),
    _ROLLOUT + "prompt_length": Meaning("data.max_prompt_tokens"),
    _ROLLOUT + "response_length": Meaning("flow.steps.sample.with.max_new_tokens"),
    _ROLLOUT + "max_num_seqs": Meaning("layout.pools.worker.slots"),
    **dict.fromkeys(
        (
            _ROLLOUT + name
            for name in (*("enable_chunked_prefill", "load_format", "layered_summon", "disable_log_stats"),)
        ),
        _SPEED,
    ),
    _ROLLOUT + "tensor_model_parallel_size": _option(
        vllm="tensor_parallel_size", sglang="tensor_parallel", together=True
    ),
    _ROLLOUT + "gpu_memory_utilization": _option(vllm="gpu_memory_utilization", sglang="memory_fraction"),
    _ROLLOUT + "max_model_len": _option(vllm="max_model_len", sglang="context_length"),
    _ROLLOUT + "dtype": _option(_TYPES, vllm="dtype", sglang="dtype"),
    _ROLLOUT + "quantization": _option(vllm="quantization", sglang="quantization"),
    **{_ROLLOUT + name: _option(vllm=name) for name in _OF_VLLM},
    _ROLLOUT + "free_cache_engine": Meaning("layout.pools.worker.offload", _SLEEPS, together=True),
    **dict.fromkeys(
        (_ROLLOUT + "nnodes", _ROLLOUT + "n_gpus_per_node"),
        Meaning("layout.pools.rollout.count", "of layout=split", together=True),
    ),
    _ROLLOUT + "calculate_log_probs": Meaning(text=_ALWAYS),
    _ROLLOUT + "val_kwargs.temperature": Meaning("val.sampling.temperature"),
    _ROLLOUT + "val_kwargs.top_p": Meaning("val.sampling.top_p"),
    _ROLLOUT + "val_kwargs.top_k": Meaning("val.sampling.top_k", make=_filter),
    _ROLLOUT + "val_kwargs.n": Meaning("val.samples_per_prompt"),
    _ROLLOUT + "val_kwargs.do_sample": Meaning(text="val.sampling.temperature=0 is greedy"),
    _ROLLOUT + "multi_turn.enable": _idle(_TURNS, False),
    **dict.fromkeys(
        (
            _ROLLOUT + f"multi_turn.{name}"
            for name in (
                *("max_assistant_turns", "max_user_turns", "tool_config_path", "interaction_config_path"),
                *("max_parallel_calls", "max_tool_response_length", "tool_response_truncate_side", "format"),
            )
        ),
        Meaning(text="nothing is needed: it is of multi_turn.enable"),
    ),
    **dict.fromkeys(
        (_ROLLOUT + "agent.default_agent_loop", _ROLLOUT + "agent.agent_loop_config_path"),
        _idle(_TURNS, "single_turn_agent"),
    ),
    _ROLLOUT + "agent.num_workers": _SPEED,
    **dict.fromkeys((_ROLLOUT + name for name in ("data_parallel_size", "expert_parallel_size")), _PARALLEL_ENGINE),
    **dict.fromkeys(
        ("custom_reward_function.path", "reward.custom_reward_function.path"),
        Meaning("flow.steps.reward.with.function", "./FILE.py:NAME", together=True),
    ),
    **dict.fromkeys(
        ("custom_reward_function.name", "reward.custom_reward_function.name"),
        Meaning("flow.steps.reward.with.function", together=True),
    ),
    **dict.fromkeys(
        ("reward_model.enable", "reward.reward_model.enable"), Meaning(text=f"false: {_OFF}; true: {_JUDGE}{_REWARD}")
    ),
    **dict.fromkeys(
        ("reward_model.reward_manager", "reward.reward_manager.name"),
        _idle(
            "naive and dapo are built, which call a function for each sample: a reward step of your own",
            *("naive", "dapo", "prime"),
            why="nothing is needed: it calls a function for each sample, as the reward step does",
        ),
    ),
    **{f"critic.optim.{name}": Meaning(f"models.critic.optimizer.{name}") for name in ("lr", "weight_decay", "betas")},
    **dict.fromkeys(
        ("critic.fsdp.dtype", "critic.model.fsdp_config.dtype"), Meaning("models.critic.dtype", make=_TYPES)
    ),
    "critic.model.enable_gradient_checkpointing": Meaning("models.critic.gradient_checkpointing"),
    "critic.model.use_remove_padding": Meaning(text=_ALWAYS + " where a backend can"),
    "critic.grad_clip": Meaning("models.critic.optimizer.max_grad_norm"),
    "critic.cliprange_value": Meaning("flow.steps.critic_update.with.clip", "of flow=ppo", together=True),
    **dict.fromkeys(("critic.ppo_epochs", "critic.ppo_mini_batch_size"), Meaning(text="those of the policy")),
    "critic.model.path": Meaning("models.critic.path"),
    "trainer.total_training_steps": Meaning("run.training_steps", make=_positive),
    "trainer.total_epochs": Meaning(
        "run.training_steps", "passes × (rows of the data // batch.prompts)", together=True
    ),
    "trainer.logger": Meaning("run.trackers", make=_trackers),
    "trainer.project_name": Meaning("run.trackers", "{NAME: {project: …}}, of mlflow {experiment: …}", together=True),
    "trainer.experiment_name": Meaning("run.name"),
    "trainer.n_gpus_per_node": Meaning(
        "layout.pools.worker.count", "GPUs of all nodes; of layout=split divided between two pools", together=True
    ),
    "trainer.nnodes": Meaning("layout.pools.worker.count", "and `distflow launch RECIPE --hosts FILE`", together=True),
    "trainer.save_freq": Meaning("run.save_every", make=_positive),
    "trainer.test_freq": Meaning("val.every", make=_positive),
    "trainer.val_before_train": Meaning("val.at_start"),
    "trainer.val_only": _idle("this recipe trains: to validate alone, `distflow evaluate`", False),
    "trainer.critic_warmup": Meaning("batch.critic_warmup"),
    "trainer.max_actor_ckpt_to_keep": Meaning("run.keep_checkpoints"),
    "trainer.default_local_dir": _FOLDER,
    "trainer.default_hdfs_dir": Meaning(text="run.copy_to"),
    "trainer.resume_mode": _RESUME,
    "trainer.resume_from_path": _RESUME,
    "trainer.max_critic_ckpt_to_keep": Meaning(text=_NOTHING + "a checkpoint has all models: run.keep_checkpoints"),
    "trainer.esi_redundant_time": _RAY,
    "trainer.device": Meaning("layout.pools.worker.device", make=_device),
    "trainer.rollout_data_dir": _DUMPED,
    "trainer.validation_data_dir": _DUMPED,
    **dict.fromkeys(
        ("reward_model.launch_reward_fn_async", "reward.launch_reward_fn_async"),
        Meaning(text=_ALWAYS + ": samples are judged while others are generated"),
    ),
    **dict.fromkeys(
        (
            f"{above}.reward_kwargs.{name}"
            for above in ("reward_model", "reward")
            for name in (
                *(f"overlong_buffer_cfg.{one}" for one in ("enable", "len", "penalty_factor", "log")),
                "max_resp_len",
            )
        ),
        Meaning("flow.steps.token_rewards.with.overlong_share", "len / max_resp_len", together=True),
    ),
    **dict.fromkeys(("trainer.ray_wait_register_center_timeout", "actor_rollout_ref.nccl_timeout"), _RAY),
    **dict.fromkeys(("ray_kwargs.ray_init.num_cpus", "reward.num_workers", "data.dataloader_num_workers"), _SPEED),
    **dict.fromkeys(
        (
            part + name
            for part in (_ACTOR + "megatron.", "critic.megatron.", "critic.fsdp.", "critic.model.fsdp_config.")
            for name in ("param_offload", "optimizer_offload", "grad_offload")
        ),
        _OFFLOADED,
    ),
    "trainer.balance_batch": Meaning(text=_ALWAYS),
    "trainer.log_val_generations": Meaning(text=_NOTHING + "samples are in the run's folder: `distflow rollouts`"),
}
"""Keys of verl's main_ppo, 0.9.1."""

VERL_DEFAULTS: Mapping[str, Any] = {
    "data.max_response_length": 512,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    _ACTOR + "optim.lr": 1e-6,
    _ACTOR + "optim.weight_decay": 0.01,
    _ACTOR + "fsdp_config.dtype": "bfloat16",
    _ROLLOUT + "dtype": "bfloat16",
    _ROLLOUT + "val_kwargs.temperature": 0,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.fsdp.dtype": "bfloat16",
    "critic.model.enable_gradient_checkpointing": True,
}
"""What verl takes where nothing is said, and that is another value here; `verl_conversion` adds what follows from
several keys."""
