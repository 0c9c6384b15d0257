"""Words that users of other tools bring along: what stands for them in a recipe here, or that it is not built."""

from __future__ import annotations

from collections.abc import Mapping

_EVALUATION = "val.every (docs/validation.md)"
_ADAPTERS = "models.policy.lora, as {rank: 16, alpha: 32}"
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
    **{name: f"run.trackers={{{name}: true}}" for name in ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")},
    **dict.fromkeys(("logger", "report_to"), "run.trackers={tensorboard: true}"),
    **dict.fromkeys(("project_name", "experiment_name", "run_name"), "run.name, or --run NAME"),
    **dict.fromkeys(
        ("eval", "evaluation", "validation", "test_freq", "eval_freq", "eval_steps", "eval_interval"), _EVALUATION
    ),
    **dict.fromkeys(("val_before_train", "eval_on_start"), "val.at_start"),
    **dict.fromkeys(("val_files", "eval_dataset", "test_files"), "val.data.source"),
    **dict.fromkeys(("lora", "lora_rank", "lora_alpha", "peft", "peft_config"), _ADAPTERS),
    **dict.fromkeys(("qlora", "load_in_4bit", "bnb_4bit"), _FOUR_BITS),
    **dict.fromkeys(("lora_target_modules", "target_modules"), "models.policy.lora.targets"),
    "lora_dropout": "adapters have no dropout: log-probs of a batch would differ from call to call",
    **dict.fromkeys(("ppo_epochs", "num_iterations", "num_ppo_epochs", "update_epochs"), _EPOCHS),
    **dict.fromkeys(("mini_batch_size", "ppo_mini_batch_size", "num_mini_batches", "minibatches"), _UPDATES),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "total_epochs"), _STEPS),
    **dict.fromkeys(("max_steps", "total_steps", "num_steps", "total_training_steps", "num_training_steps"), _STEPS),
    **dict.fromkeys(("batch_size", "train_batch_size", "rollout_batch_size", "global_batch_size"), _PROMPTS),
    **dict.fromkeys(("n", "num_generations", "group_size", "num_return_sequences", "n_samples_per_prompt"), _SAMPLES),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"), _MICRO),
    **dict.fromkeys(("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "micro_train_batch_size"), _MICRO),
    **dict.fromkeys(("learning_rate", "actor_learning_rate"), _LR),
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
    **dict.fromkeys(("use_vllm", "vllm"), "layout.pools.rollout.engine=vllm"),
    "sglang": "layout.pools.rollout.engine=sglang",
    **dict.fromkeys(
        ("deepspeed", "zero_stage", "ds_config"), "layout.pools.trainer.backend=deepspeed and zero: 0 to 3"
    ),
    **dict.fromkeys(("fsdp", "fsdp_config"), "layout.pools.trainer.backend=fsdp"),
    **dict.fromkeys(
        ("tensor_parallel_size", "tensor_model_parallel_size", "tp"),
        "not built for training; SGLang and vLLM take it in layout.pools.NAME.engine_options",
    ),
    **dict.fromkeys(("critic", "critic_model", "value_model", "gae_lambda", "lam"), _CRITIC),
    **dict.fromkeys(("ref_model", "reference_model"), _KL),
    **dict.fromkeys(("use_kl_in_reward", "kl_in_reward"), _KL_IN_REWARD),
    **dict.fromkeys(("filter_groups", "dynamic_sampling"), _DAPO + "dynamic_sampling"),
    **dict.fromkeys(
        ("mask_truncated_completions", "overlong_filtering", "overlong_filter", "filter_truncated"),
        "batch.mask_truncated=loss",
    ),
    **dict.fromkeys(("overlong_buffer", "overlong_buffer_len", "overlong_penalty_factor"), _DAPO + "token_rewards"),
    **dict.fromkeys(
        ("algorithm", "algo", "adv_estimator", "advantage_estimator"), "flow.steps.advantage.with.function"
    ),
    **dict.fromkeys(("staleness", "staleness_threshold", "max_off_policy", "off_policy"), "layout.max_staleness"),
}
"""By the last part of a key, in lower case: a key here, or a sentence."""


def meant(word: str) -> str:
    """What a word of another tool is here; empty for a word that is not known."""
    text = WORDS.get(word.lower(), "")
    if not text:
        return ""
    is_key = " " not in text or text.startswith(("run.", "batch.", "flow", "models.", "layout.", "data."))
    return f"did you mean {text}?" if is_key else text
