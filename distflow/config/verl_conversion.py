"""What several of verl's keys decide together, and what verl takes where nothing is said (0.9.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distflow.config.foreign import shown
from distflow.config.other_tools import ESTIMATORS
from distflow.config.together import REFERENCE, TENSOR_PARALLEL, Default, RowCount, Together, counts_of, uncounted, word
from distflow.config.verl_training import carry

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_UPDATE = "flow.steps.update.with."
_KL_REWARD = "algorithm.use_kl_in_reward"


def of_verl(given: Mapping[str, Any], file_stem: str, count: RowCount = uncounted) -> Together:
    """Find what follows from several keys. `file_stem`: the name of what is converted; `count`: rows of a file."""
    found = Together()
    prompts = found.count(given, "data.train_batch_size", 1024)
    found.made["batch.prompts"] = prompts
    steps = _length(found, given, count)
    size = found.count(given, _ACTOR + "ppo_mini_batch_size", min(prompts, 256))
    found.minibatches(prompts, prompts / size, f"{prompts} prompts do not divide into mini-batches of {size}")
    estimator = word(given, "algorithm.adv_estimator", "gae")
    if estimator in ESTIMATORS:
        found.flow = ESTIMATORS[estimator]
    else:
        found.lacks["algorithm.adv_estimator"] = f"{estimator}: an advantage of your own (docs/custom-steps.md)"
    if given.get("algorithm.filter_groups.enable"):
        found.choose("dapo", "algorithm.filter_groups.enable")
    _loss(found, given)
    _adapter_and_reward(found, given)
    _workers(found, given)
    _corrections(found, given)
    carry(found, given, file_stem, steps)
    return found


def _length(found: Together, given: Mapping[str, Any], count: RowCount) -> int:
    """Return the training steps of the run, by its epochs where it has no number of them; 0: not known.

    As verl's data loader has it (drop_last), each epoch has whole batches alone.
    """
    key, epochs_key = "trainer.total_training_steps", "trainer.total_epochs"
    listed = given.get("data.train_files")
    files = [str(one) for one in (listed if isinstance(listed, list) else [listed] if listed else [])]
    found.rows = {file: rows for file in files if (rows := count(file))}
    if (steps := int(found.number(given, key, 0))) > 0:
        found.says[epochs_key] = f"nothing is needed: {key} is given"
        return steps
    epochs = int(found.number(given, epochs_key, 30))
    gets = "data.train_batch_size"
    if given.get("algorithm.filter_groups.enable") and given.get("data.gen_batch_size"):
        gets = "data.gen_batch_size"
    size = found.count(given, gets, 1024)
    usual = "" if epochs_key in given else ", verl's default"
    batches = found.whole_batches(files, size)
    if not batches:
        told = f"run.training_steps = {epochs} (total_epochs{usual}) × (rows of data.train_files // {size})"
        found.lacks |= {epochs_key: f"{told}: {found.length}"} if epochs_key in given else {}
        found.assumed += [] if epochs_key in given else [f"{told}: {found.length}"]
        return 0
    steps, rows = epochs * batches, sum(found.rows.values())
    most = ", at most: before filter_overlong_prompts" if given.get("data.filter_overlong_prompts") else ""
    found.made["run.training_steps"] = steps
    found.notes["run.training_steps"] = f"total_epochs {epochs}{usual} × ({rows} rows // {gets} {size}){most}"
    found.settled[epochs_key] = f"run.training_steps={steps}"
    return steps


def _loss(found: Together, given: Mapping[str, Any]) -> None:
    mode = word(given, _ACTOR + "policy_loss.loss_mode", "vanilla")
    if mode in ("gspo", "cispo"):
        found.choose(mode, _ACTOR + "policy_loss.loss_mode")
    elif mode != "vanilla":
        found.lacks[_ACTOR + "policy_loss.loss_mode"] = f"{mode}: a loss of your own (docs/custom-steps.md)"
    both = found.number(given, _ACTOR + "clip_ratio", 0.2)
    clip = [found.number(given, f"{_ACTOR}clip_ratio_{end}", both) for end in ("low", "high")]
    if found.flow not in ("gspo", "cispo"):
        # The loss of no other mode has a dual clip.
        found.made[_UPDATE + "clip"] = [*clip, found.number(given, _ACTOR + "clip_ratio_c", 3.0)]
        if _ACTOR + "clip_ratio_c" not in given:
            found.defaults[_UPDATE + "clip"] = Default(_ACTOR + "clip_ratio_c", 3.0, "clip_ratio_c")
    elif any(key.startswith(_ACTOR + "clip_ratio") for key in given):
        found.made[_UPDATE + "clip"] = clip
    coefficient = found.number(given, _ACTOR + "kl_loss_coef", 0.001) if given.get(_ACTOR + "use_kl_loss") else 0.0
    kinds = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
    kind = word(given, _ACTOR + "kl_loss_type", "low_var_kl")
    if kind not in kinds:
        found.lacks[_ACTOR + "kl_loss_type"] = f"{kind} is not built; there are {', '.join(kinds)}"
    found.divergence(coefficient, kinds.get(kind, "k3"))
    modes = {name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")}
    modes["seq-mean-token-sum-norm"] = "seq-mean-token-sum-norm/${flow.steps.sample.with.max_new_tokens}"
    aggregate = word(given, _ACTOR + "loss_agg_mode", "token-mean")
    if aggregate not in modes:
        found.lacks[_ACTOR + "loss_agg_mode"] = f"{aggregate} is not built; there are {', '.join(modes)}"
    elif found.flow not in ("gspo", "ppo") or _ACTOR + "loss_agg_mode" in given:
        # Of the flows that have another one by default, that is meant unless it is given.
        found.made[_UPDATE + "aggregate"] = modes[aggregate]


def _adapter_and_reward(found: Together, given: Mapping[str, Any]) -> None:
    model = "actor_rollout_ref.model."
    if given.get(model + "lora_rank"):
        names = {"lora_rank": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
        lora = {here: given[model + there] for there, here in names.items() if given.get(model + there) is not None}
        found.made["models.policy.lora"] = lora
    for above in ("custom_reward_function.", "reward.custom_reward_function."):
        path = given.get(above + "path")
        if isinstance(path, str):
            place = path if path.startswith(("/", "$")) else f"./{path.removeprefix('./')}"
            call, at = f"{place}:{given.get(above + 'name', 'compute_score')}", "flow.steps.reward.with.function"
            own = {key: key.removeprefix(f"{above}reward_kwargs.") for key in given}
            settings = {name: given[key] for key, name in own.items() if name != key}
            found.made[at] = {"score": {"function": call, **settings}} if settings else call
            told = {key: f"{at}.score.{name}={shown(given[key])}" for key, name in own.items() if name != key}
            found.settled |= told


def _workers(found: Together, given: Mapping[str, Any]) -> None:
    strategy, width_key = _ACTOR + "strategy", _ROLLOUT + "tensor_model_parallel_size"
    engine = {"vllm": "vllm", "sglang": "sglang"}.get(word(given, _ROLLOUT + "name", ""), "torch")
    width = found.count(given, width_key, 1) if engine != "torch" else 1
    hosts = found.count(given, "trainer.nnodes", 1), found.count(given, "trainer.n_gpus_per_node", 8)
    apart = found.number(given, _ROLLOUT + "nnodes", 0) * found.number(given, _ROLLOUT + "n_gpus_per_node", hosts[1])
    division = found.divide(engine, width, hosts, apart)
    if not {"trainer.nnodes", "trainer.n_gpus_per_node"} & given.keys():
        found.assumed.append("the 8 GPUs are verl's default: change the counts of the pools to those that there are")
    if given.get(strategy, "fsdp") not in ("fsdp", "fsdp2"):
        found.lacks[strategy] = f"{given[strategy]} has no counterpart here; there are fsdp, fsdp2"
    alone = division.counts.get("worker") == 1
    found.backend = "torch" if alone and (engine == "vllm" or strategy not in given) else "fsdp"
    pool = "worker" if found.layout == "colocated" else "trainer"
    found.made[f"layout.pools.{pool}.backend"] = found.backend
    keys = ("trainer.nnodes", "trainer.n_gpus_per_node", _ROLLOUT + "nnodes", _ROLLOUT + "n_gpus_per_node")
    found.settled |= {key: counts_of(division) for key in keys if key not in found.lacks}
    why = " (one worker: nothing to divide)" if found.backend == "torch" else ""
    found.settled[strategy] = f"layout.pools.{pool}.backend={found.backend}{why}"
    if engine == "torch":
        found.lacks |= {width_key: "engine torch has one GPU: vllm or sglang"} if given.get(width_key, 1) != 1 else {}
    elif width_key not in found.lacks:
        generating = "rollout" if pool == "trainer" else pool
        options = f"layout.pools.{generating}.engine_options"
        found.settled[width_key] = f"{options}.{TENSOR_PARALLEL[engine]}={division.width}"


def _corrections(found: Together, given: Mapping[str, Any]) -> None:
    """Map terms that flows here have unless they are told, and verl has not, and the other way about."""
    at, made = "algorithm.rollout_correction.", found.made
    kind, bound = given.get(at + "rollout_is"), found.number(given, at + "rollout_is_threshold", 2.0)
    made[_UPDATE + "tis"] = bound if kind == "token" else None
    if at + "rollout_is" not in given:
        found.defaults[_UPDATE + "tis"] = Default(at + "rollout_is", None)
    cap = found.number(given, _ACTOR + "tis_imp_ratio_cap", -1)
    if cap > 0 and kind is None:
        made[_UPDATE + "tis"] = cap
        found.defaults.pop(_UPDATE + "tis", None)
    if kind == "sequence":
        made[_UPDATE + "correction"] = {"sequence_tis": [0.0, bound]}
    elif kind not in (None, "token"):
        found.lacks[at + "rollout_is"] = f"{kind} is not built; there are token, sequence"
    coefficient = found.number(given, "algorithm.kl_ctrl.kl_coef", 0.001) if given.get(_KL_REWARD) else 0.0
    if found.flow == "reinforce_plus_plus" or (found.flow == "ppo" and coefficient):
        made["flow.steps.token_rewards.with.kl_coef"] = coefficient
        if found.flow == "ppo":
            made["flow.steps.reference"] = dict(REFERENCE)
        found.settled |= dict.fromkeys(
            (_KL_REWARD, "algorithm.kl_ctrl.kl_coef"), f"flow.steps.token_rewards.with.kl_coef={coefficient}"
        )
    if found.flow == "remax" and _ACTOR + "entropy_coeff" not in given:
        made[_UPDATE + "entropy_coef"] = 0.0
