"""What verl's keys of the reward, the optimizers, the filter and parallelism make of a recipe, and what they cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distflow.config.foreign import shown
from distflow.config.meanings import SLEEPS, tracker_names
from distflow.config.together import Default, Together, word

_ACTOR = "actor_rollout_ref.actor."
_REWARD = "flow.steps.reward.with.function"
_KEPT = "trainer.max_actor_ckpt_to_keep"
_UNBOUNDED = 1_000_000
"""Refills of a ledger: no more than there are prompts."""
_FILTER = "algorithm.filter_groups."
_BUFFERS = ("reward_model.reward_kwargs.", "reward.reward_kwargs.")
_LIKE_GRPO = ("grpo", "grpo_kl", "gspo", "cispo", "dr_grpo")
"""Flows whose advantage is that of grpo, which can take rewards of tokens."""
_PARALLEL = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor")
_DIVIDED = (
    "training has no tensor, pipeline, sequence or expert parallelism here: backend fsdp, or deepspeed with zero=3, "
    "gives each training worker a share of the model instead. See by `distflow plan` that it fits"
)


def carry(found: Together, given: Mapping[str, Any], file_stem: str, steps: int) -> None:
    """Write what is known, and tell what cannot be carried over.

    `file_stem`: the name of what is converted; `steps`: training steps, 0 if not known.
    """
    _reward(found, given, file_stem)
    _filter(found, given)
    _overlong(found, given)
    _returns(found, given)
    for part, model in ((_ACTOR, "policy"), ("critic.", "critic")):
        if model == "policy" or found.flow == "ppo":
            _rates(found, given, f"{part}optim.", f"models.{model}.optimizer", steps)
    _critic(found, given)
    _parallel(found, given)
    _kept(found, given)
    _sleep(found, given)
    _tracked(found, given)


_CACHE = "actor_rollout_ref.rollout.free_cache_engine"
_PROJECTS = {"wandb": "project", "swanlab": "project", "trackio": "project", "mlflow": "experiment"}
"""Options of trackers for what verl has as the name of the project."""


def _sleep(found: Together, given: Mapping[str, Any]) -> None:
    """Let the engine leave the GPU while its worker trains, as verl's does unless it is told."""
    if found.layout != "colocated":
        found.says[_CACHE] = "nothing is needed: with layout=split no engine shares a GPU with training"
    elif given.get(_CACHE) is False:
        found.says[_CACHE] = f"false: off here, too, unless it is written ({SLEEPS})"
    elif given.get(_CACHE) is None:
        found.by_default("layout.pools.worker.offload", True, Default(_CACHE, True))
    else:
        found.made["layout.pools.worker.offload"] = True
        found.settled[_CACHE] = "layout.pools.worker.offload=true"


def _tracked(found: Together, given: Mapping[str, Any]) -> None:
    """Give trackers the name of the project; that of the experiment is the run's, which they take."""
    key, project, names = "trainer.project_name", given.get("trainer.project_name"), given.get("trainer.logger")
    options = {name: _PROJECTS[name] for name in tracker_names(names) if name in _PROJECTS}
    if project is None or not options:
        found.says[key] = "nothing is needed: no tracker of trainer.logger has a project"
        return
    made = {name: {options[name]: str(project)} if name in options else True for name in tracker_names(names)}
    found.made["run.trackers"] = made
    found.settled["trainer.logger"] = f"run.trackers={shown(made)}"
    found.settled[key] = ", ".join(f"run.trackers.{name}.{option}={project}" for name, option in options.items())


def _reward(found: Together, given: Mapping[str, Any], stem: str) -> None:
    for key in ("reward_model.enable", "reward.reward_model.enable"):
        if given.get(key) is True:
            found.lacks[key] = (
                "a reward model is models.score.path with head: score, and flow.steps.reward with call: "
                "distflow.workers.reward_model:judge and model: score, in place of a function (docs/algorithms.md)"
            )
    if found.made.get(_REWARD) is not None:
        return
    found.made[_REWARD] = f"./{stem}_parts.py:compute_score"
    found.assumed.append(
        f"verl has scored by the column data_source, since no custom_reward_function is given: write {stem}_parts.py "
        "with compute_score(data_source, solution_str, ground_truth, extra_info=None), where verl is installed by "
        f"`from verl.utils.reward_score import default_compute_score as compute_score`; or set {_REWARD} to one of "
        "docs/data.md, as math"
    )


def _filter(found: Together, given: Mapping[str, Any]) -> None:
    keys = (_FILTER + "max_num_gen_batches", "data.gen_batch_size")
    metric = given.get(_FILTER + "metric")
    on = given.get(_FILTER + "enable") and found.flow == "dapo"
    if on and metric is not None and metric != "score":
        punished = any(key.endswith("overlong_buffer_cfg.len") for key in given)
        own = any("custom_reward_function." in key for key in given)
        if own if metric == "acc" else (punished or metric != "seq_reward"):
            found.lacks[_FILTER + "metric"] = (
                f"flow=dapo compares the scores of a group, without {metric}: where these differ, return {metric} as "
                "the score, or write a filter step of your own (docs/custom-steps.md)"
            )
    if not given.get(_FILTER + "enable") or found.flow != "dapo":
        found.says |= dict.fromkeys(keys, "nothing is needed: no group is filtered")
        return
    # Verl keeps no group of equal rewards.
    found.made["flow.steps.filter.with.keep_every"] = 0
    prompts = found.made["batch.prompts"]
    most, size = found.number(given, _FILTER + "max_num_gen_batches", 0), given.get("data.gen_batch_size")
    size = size if isinstance(size, int) else prompts
    found.made["batch.max_refills"] = max(0, int(most) * size - prompts) if most > 0 else _UNBOUNDED
    told = "batch.max_refills: what the further batches have, of each ledger"
    found.settled |= dict.fromkeys(keys, told)


def _overlong(found: Together, given: Mapping[str, Any]) -> None:
    """Map the penalty of long responses, which `flow=dapo` has unless it is told, and verl has not."""
    step = "flow.steps.token_rewards"
    above = next((one for one in _BUFFERS if any(key.startswith(one + "overlong_buffer") for key in given)), "")
    at = f"{above}overlong_buffer_cfg."
    buffer, longest = found.number(given, at + "len", 0), found.count(given, "data.max_response_length", 512)
    longest = found.count(given, f"{above}max_resp_len", longest)
    keys = (*(at + name for name in ("enable", "len", "penalty_factor", "log")), f"{above}max_resp_len")
    on = bool(above) and given.get(at + "enable") is not False and buffer > 0
    if on and found.flow in (*_LIKE_GRPO, "dapo", "ppo"):
        factor = found.number(given, at + "penalty_factor", 1.0)
        settings = {"overlong_share": buffer / longest, "overlong_factor": factor, "max_new_tokens": longest}
        if found.flow in _LIKE_GRPO:
            found.made[f"{step}.call"] = "distflow.workers.shaping:token_rewards"
            found.made["flow.steps.advantage.with.token_rewards"] = True
        found.made |= {f"{step}.with.{name}": value for name, value in settings.items()}
        found.settled |= dict.fromkeys(
            keys, f"{step}.with.overlong_share={buffer / longest:g}, overlong_factor={factor}"
        )
    elif on:
        found.lacks[at + "enable"] = f"flow={found.flow} has no step token_rewards: add its overlong_share by hand"
        found.says |= dict.fromkeys(keys[1:], "of overlong_buffer_cfg.enable")
    elif found.flow == "dapo":
        found.made |= {step: None, "flow.steps.advantage.with.token_rewards": False}
    if not on:
        found.says |= dict.fromkeys(keys, "the penalty of long responses is off")


def _returns(found: Together, given: Mapping[str, Any]) -> None:
    """Map discounts, and the divergence in the reward."""
    for name in ("gamma", "lam"):
        value = found.number(given, f"algorithm.{name}", 1.0)
        if found.flow == "ppo":
            found.made |= {f"flow.steps.gae.with.{name}": value} if f"algorithm.{name}" in given else {}
        elif name == "gamma" and found.flow.startswith("reinforce") and value != 1:
            found.lacks["algorithm.gamma"] = f"flow={found.flow} does not discount: an advantage of your own"
        else:
            found.says[f"algorithm.{name}"] = f"nothing is needed: flow={found.flow} has none"
    if not given.get("algorithm.use_kl_in_reward"):
        return
    if "flow.steps.token_rewards.with.kl_coef" not in found.made:
        found.lacks["algorithm.use_kl_in_reward"] = (
            f"flow={found.flow} has no divergence in the reward: add a step token_rewards with kl_coef, as in "
            "flow=ppo, or take it into the loss (flow.steps.update.with.kl_coef)"
        )
        return
    kinds = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    kind = word(given, "algorithm.kl_penalty", "kl")
    if kind not in kinds:
        found.lacks["algorithm.kl_penalty"] = f"{kind} is not built; there are {', '.join(kinds)}"
    elif kinds[kind] != "k1":
        found.made["flow.steps.token_rewards.with.kl"] = kinds[kind]
    if given.get("algorithm.kl_ctrl.type") == "adaptive":
        found.lacks["algorithm.kl_ctrl.type"] = "adaptive is not built: the coefficient stays as it is"


def _rates(found: Together, given: Mapping[str, Any], at: str, optimizer: str, steps: int) -> None:
    """Map what is a share of the run or of the rate, which verl counts in training steps, too."""
    ratio = given.get(at + "lr_warmup_steps_ratio")
    warmup = found.number(given, at + "lr_warmup_steps", -1)
    key = at + ("lr_warmup_steps" if warmup >= 0 else "lr_warmup_steps_ratio")
    if warmup < 0 and isinstance(ratio, int | float) and ratio:
        warmup = int(ratio * steps) if steps > 0 else -1
        if steps <= 0:
            found.lacks[key] = f"write {optimizer}.warmup_steps, {ratio} × run.training_steps"
    if warmup > 0:
        found.made[f"{optimizer}.warmup_steps"] = int(warmup)
        found.settled[key] = f"{optimizer}.warmup_steps={int(warmup)}"
    least = found.number(given, at + "min_lr_ratio", 0)
    if least:
        rate = found.number(given, at + "lr", 1e-6 if at.startswith(_ACTOR) else 1e-5)
        found.made[f"{optimizer}.min_lr"] = least * rate
        found.settled[at + "min_lr_ratio"] = f"{optimizer}.min_lr={least * rate:g}"


def _critic(found: Together, given: Mapping[str, Any]) -> None:
    if found.flow != "ppo":
        told = f"nothing is needed: flow={found.flow} has no critic"
        found.says |= {key: told for key in given if key.startswith("critic.")}
        return
    clip = found.number(given, "critic.cliprange_value", 0.5)
    if "critic.cliprange_value" in given:
        found.made["flow.steps.critic_update.with.clip"] = clip
        found.settled["critic.cliprange_value"] = f"flow.steps.critic_update.with.clip={clip}"
    for name, usual, here in (("ppo_epochs", 1, "batch.epochs"), ("ppo_mini_batch_size", 256, "batch.minibatches")):
        own, actors = given.get(f"critic.{name}"), given.get(_ACTOR + name, usual)
        if own is not None and own != actors:
            found.lacks[f"critic.{name}"] = (
                f"{here} is that of the policy, too, which has {actors}: the critic has no other"
            )
        elif own is not None:
            found.says[f"critic.{name}"] = f"as of the policy: {here}"
    aggregate = given.get("critic.loss_agg_mode")
    if aggregate in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        found.made["flow.steps.critic_update.with.aggregate"] = aggregate
        found.settled["critic.loss_agg_mode"] = f"flow.steps.critic_update.with.aggregate={aggregate}"


def _parallel(found: Together, given: Mapping[str, Any]) -> None:
    world = found.count(given, "trainer.nnodes", 1) * found.count(given, "trainer.n_gpus_per_node", 8)
    for key, value in given.items():
        *_, above, last = ("", *key.split("."))
        wide = isinstance(value, int) and value > 1
        if key == _ACTOR + "strategy" and key in found.lacks:
            found.lacks[key] = f"{value} has no counterpart: the recipe has backend {found.backend}. {_DIVIDED}"
        elif last == "ulysses_sequence_parallel_size" or (
            above == "megatron" and last.removesuffix("_parallel_size") in _PARALLEL
        ):
            told, text = (found.lacks, _DIVIDED) if wide else (found.says, f"nothing is needed: {value} is none")
            told[key] = text
        elif last == "fsdp_size" and wide and value < world:
            found.lacks[key] = (
                f"replicas of {value} GPUs each (HSDP) are not built: backend fsdp divides a model among all of the "
                "pool. The result is the same, with more traffic between hosts"
            )
    cut = word(given, "data.truncation", "error")
    if cut != "error" and not given.get("data.filter_overlong_prompts"):
        found.lacks["data.truncation"] = (
            f"{cut}: prompts are never cut here. One of more than data.max_prompt_tokens ends the run, or is left out "
            "with data.overlong=drop: choose"
        )


def _kept(found: Together, given: Mapping[str, Any]) -> None:
    if given.get(_KEPT) is not None or not (_KEPT in given or found.number(given, "trainer.save_freq", -1) > 0):
        return
    found.by_default("run.keep_checkpoints", None, Default(_KEPT, None, "all are kept"))
    if _KEPT in given:
        found.settled[_KEPT] = "run.keep_checkpoints=null"
