"""Recipes made of other tools' configurations: what maps, what needs nothing here, and what has no counterpart.

Sections of this file: *converting* by the dictionary in `other_tools.py`, and *writing* the recipe with every key
accounted for.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any, Literal

import yaml

from distflow.config.division import Division, divide
from distflow.config.foreign import Expression, Foreign, value_of
from distflow.config.other_tools import DEFAULTS, ESTIMATORS, TRL, VERL, WORDS, Meaning, Unneeded, meant
from distflow.config.yamlfile import yaml_text

Kind = Literal["maps", "says", "lacks"]
TITLES: Mapping[Kind, str] = {
    "maps": "maps",
    "says": "stands elsewhere, or needs nothing here",
    "lacks": "does not map: decide by hand",
}
_TABLES: Mapping[str, Mapping[str, Meaning]] = {"TRL": TRL, "verl": VERL}
_STEPS = 100
"""What a recipe gets where the other tool does not say how long it trains."""
_OBJECTS = ("reward_funcs", "train_dataset", "eval_dataset", "peft_config")
"""Arguments of TRL of which the expression tells enough."""

_REFERENCE = {"call": "distflow.workers.reference:ref_logprobs", "model": "reference"}
_KL_REWARD = "algorithm.use_kl_in_reward"

# -- converting


@dataclass(frozen=True, slots=True)
class Account:
    """What became of one key."""

    key: str
    value: Any
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Converted:
    """A recipe, and what became of each key."""

    recipe: Mapping[str, Any]
    accounts: tuple[Account, ...]
    assumed: tuple[str, ...]
    """What the recipe says although the other configuration does not, with the reason."""
    defaults: tuple[Account, ...]
    """What the other tool does unless it is told, and the recipe has to say."""


def convert(foreign: Foreign) -> Converted:
    """Make a recipe of another tool's configuration; every key of it is accounted for."""
    values = dict(foreign.given)
    known = {key: value for key, value in values.items() if not isinstance(value, Expression)}
    together = (_of_trl if foreign.tool == "TRL" else _of_verl)(foreign, known)
    accounts, made = [], dict(together.made)
    for key, value in values.items():
        account, keys = _account(foreign, key, value, together)
        accounts.append(account)
        made |= keys
    defaults = tuple(_defaults(foreign, made, together))
    _fit(made, together)
    recipe = _nested(made, together.flow, together.layout)
    return Converted(recipe, tuple(accounts), tuple(together.assumed), defaults)


def _defaults(foreign: Foreign, made: dict[str, Any], together: _Together) -> Iterator[Account]:
    """Add what the other tool does unless it is told, where that is not what happens here."""
    for key, value in DEFAULTS[foreign.tool].items():
        account, keys = _account(foreign, key, value, together)
        new = {here: found for here, found in keys.items() if here not in made and _needed(here, made, together)}
        made |= new
        if key not in foreign.given and (new or _TABLES[foreign.tool][key].to in together.made):
            yield account


def _needed(key: str, made: Mapping[str, Any], together: _Together) -> bool:
    if key.startswith("models.critic."):
        return together.flow == "ppo"
    return not key.startswith("val.") or any(key.startswith("val.data.") for key in made)


@dataclass(slots=True)
class _Together:
    """What follows from several keys."""

    flow: str = "grpo"
    layout: str = "colocated"
    made: dict[str, Any] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)
    """Keys whose value has no counterpart, with the reason."""
    settled: dict[str, str] = field(default_factory=dict)
    """Keys of which what they are here depends on others, with that."""
    engine: str = "torch"
    backend: str = "torch"
    assumed: list[str] = field(default_factory=list)

    def number(self, given: Mapping[str, Any], key: str, default: Any) -> Any:
        """Take a number; anything else but null is told, and the default stands for it."""
        value = given.get(key)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return default if value is None else value
        self.lacks[key] = f"{_shown(value)} is no number: {_shown(default)} is assumed"
        return default


def _account(foreign: Foreign, key: str, value: Any, together: _Together) -> tuple[Account, dict[str, Any]]:
    meaning = _TABLES[foreign.tool].get(key)
    if key in together.lacks:
        return Account(key, value, "lacks", together.lacks[key]), {}
    if key in together.settled:
        return Account(key, value, "maps", together.settled[key]), {}
    if meaning is None:
        word = re.split(r"[.@/]", key)[-1]
        return Account(key, value, "lacks", meant(word) or "not in the dictionary"), {}
    if not meaning.to:
        return Account(key, value, "lacks" if meaning.text.startswith("not built") else "says", meaning.text), {}
    if meaning.together and (key in _OBJECTS or not isinstance(value, Expression)):
        return Account(key, value, "maps", f"{meaning.to}{f' ({meaning.text})' if meaning.text else ''}"), {}
    if isinstance(value, Expression):
        return Account(key, value, "lacks", f"{meaning.to}: the script computes it"), {}
    try:
        to, here = _translated(meaning, value, together)
    except Unneeded as error:
        return Account(key, value, "says", str(error)), {}
    except ValueError as error:
        return Account(key, value, "lacks", str(error)), {}
    return Account(key, value, "maps", f"{to}={_shown(here)}"), {to: here}


def _translated(meaning: Meaning, value: Any, together: _Together) -> tuple[str, Any]:
    """Return the key and the value here. Raises what `Meaning.make` does."""
    here = value if meaning.make is None else meaning.make(value)
    to = _in_layout(meaning.to, together)
    if meaning.options:
        if together.engine not in meaning.options:
            raise Unneeded(f"an option of {meaning.text}; engine {together.engine} has none")
        to += f".{meaning.options[together.engine]}"
    if ".backend_options." in to and together.backend != "fsdp":
        raise Unneeded("an option of backend fsdp, which has nothing to divide here")
    if here is None:
        raise Unneeded(f"null: {to} keeps its default")
    if to.endswith("data.source") and isinstance(here, list):
        return (to, here[0]) if len(here) == 1 else (to.replace("source", "mix"), _mixture(here))
    return to, here


def _in_layout(key: str, together: _Together) -> str:
    """The key of a pool in the layout that was chosen."""
    if together.layout == "colocated" or not key.startswith("layout.pools.worker."):
        return key
    key = key.replace(".worker.offload", ".worker.backend_options.cpu_offload")
    pool = "trainer" if ".backend" in key else "rollout"
    return key.replace(".worker.", f".{pool}.")


def _mixture(files: Sequence[Any]) -> dict[str, Any]:
    """Sources by the names of their files, with those of folders above where several have the same."""
    paths = [str(file).rpartition(".")[0].split("/") for file in files]
    for length in range(1, max(map(len, paths)) + 1):
        names = [re.sub(r"\W+", "_", "_".join(path[-length:])).strip("_") for path in paths]
        if all(names) and len({*names}) == len(names):
            return {name: {"source": str(file)} for name, file in zip(names, files, strict=True)}
    return {f"source_{n}": {"source": str(file)} for n, file in enumerate(files)}


def _minibatches(found: _Together, prompts: int, wanted: float, why: str) -> int:
    """Cut a training step into the number of equal parts that is nearest to the one that is wanted."""
    divisors = [parts for parts in range(1, prompts + 1) if prompts % parts == 0]
    parts = min(divisors, key=lambda parts: abs(parts - wanted))
    if parts != wanted and why:
        one = f"batch.minibatches is {parts}, of {prompts // parts} prompts each"
        found.assumed.append(f"{one}: {why}, and here they are equal parts of a training step")
    found.made |= {"batch.minibatches": parts} if parts > 1 else {}
    return parts


def _divide(found: _Together, engine: str, width: int, hosts: tuple[int, int], apart: int = 0) -> Division:
    """Choose the layout and the counts of its pools, and the option by which an engine has several GPUs."""
    most = found.made["batch.prompts"] // found.made.get("batch.minibatches", 1)
    division = divide(engine, width, hosts, most=most, apart=apart)
    found.layout, found.engine = division.layout, engine
    found.made |= {f"layout.pools.{pool}.count": count for pool, count in division.counts.items()}
    if division.width > 1:
        name = {"vllm": "tensor_parallel_size", "sglang": "tensor_parallel"}[engine]
        found.made[f"layout.pools.rollout.engine_options.{name}"] = division.width
    found.assumed += division.told
    return division


def _of_trl(foreign: Foreign, given: Mapping[str, Any]) -> _Together:
    found = _Together(layout="split" if given.get("vllm_mode") == "server" else "colocated")
    made = found.made
    accumulation = found.number(given, "gradient_accumulation_steps", 1)
    held = found.number(given, "steps_per_generation", accumulation)
    samples = found.number(given, "num_generations", 8)
    each = found.number(given, "per_device_train_batch_size", 8)
    batch = found.number(given, "generation_batch_size", each * held)
    made["batch.samples_per_prompt"] = samples
    made["batch.prompts"] = max(1, batch // samples)
    found.assumed.append("batch.prompts is that of one process: multiply it by the number of processes of the TRL run")
    several = f"{_shown(held)} steps_per_generation, of which {_shown(accumulation)} are an optimizer step"
    updates = _minibatches(found, made["batch.prompts"], held / accumulation, several)
    if (steps := found.number(given, "max_steps", -1)) > 0:
        made["run.training_steps"] = max(1, steps // (updates * found.number(given, "num_iterations", 1)))
    low = found.number(given, "epsilon", 0.2)
    high = found.number(given, "epsilon_high", low)
    # Of cispo it bounds the ratio itself, and here by how much this may exceed 1.
    low, high = (1.0, round(high - 1, 6)) if given.get("loss_type") == "cispo" and high > 1 else (low, high)
    if "epsilon" in given or "epsilon_high" in given:
        made["flow.steps.update.with.clip"] = [low, high]
    _divergence(found, found.number(given, "beta", 0.0), "k3")
    _loss_of_trl(found, given)
    betas = [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)]
    made |= {"models.policy.optimizer.betas": betas} if {"adam_beta1", "adam_beta2"} & given.keys() else {}
    _workers_of_trl(found, given)
    _sampling_of_trl(found, given)
    _functions_of_trl(found, foreign, given)
    _data_of_trl(found, foreign)
    _adapter_of_trl(found, foreign)
    return found


def _workers_of_trl(found: _Together, given: Mapping[str, Any]) -> None:
    """The layout: how many processes train stands outside of the script."""
    if not given.get("use_vllm"):
        return
    width = found.number(given, "vllm_tensor_parallel_size", 1)
    server = given.get("vllm_mode") == "server"
    found.engine = "vllm"
    if server:
        _divide(found, "vllm", width, (1, 1), apart=width)
    elif width > 1:
        found.assumed.append(f"{2 * width} GPUs are assumed: the script does not say how many processes it has")
        _divide(found, "vllm", width, (1, 2 * width))
        found.made["layout.pools.trainer.backend"] = "fsdp"
    if found.layout == "split":
        option = f"layout.pools.rollout.engine_options.tensor_parallel_size={width}"
        found.settled["vllm_tensor_parallel_size"] = option


def _loss_of_trl(found: _Together, given: Mapping[str, Any]) -> None:
    longest = "${flow.steps.sample.with.max_new_tokens}"
    losses = {
        **dict.fromkeys(("dapo", "bnpo", "cispo"), "token-mean"),
        "grpo": "seq-mean-token-mean",
        "dr_grpo": f"seq-mean-token-sum-norm/{longest}",
    }
    loss = given.get("loss_type", "dapo")
    if loss not in losses:
        found.lacks["loss_type"] = f"{loss} is not built; there are {', '.join(losses)}, and losses of your own"
    else:
        found.made["flow.steps.update.with.aggregate"] = losses[loss]
    if loss == "cispo":
        _choose(found, "cispo", "loss_type")
    if given.get("importance_sampling_level") == "sequence":
        _choose(found, "gspo", "importance_sampling_level")


def _sampling_of_trl(found: _Together, given: Mapping[str, Any]) -> None:
    """Map what TRL hands to `generate`, by the names of transformers or vLLM."""
    wanted = given.get("generation_kwargs", {})
    unknown = [] if isinstance(wanted, dict | None) else ["what it has"]
    for name, value in wanted.items() if isinstance(wanted, dict) else ():
        if name == "stop_strings":
            # transformers leaves them in the text, and vLLM's `stop` does not.
            found.made["flow.steps.sample.with.include_stop_str_in_output"] = True
        key = WORDS.get(str(name).lower(), "")
        if key.startswith("flow.steps.sample.with.") and " " not in key:
            found.made[key] = value
        else:
            unknown.append(str(name))
    if unknown:
        found.lacks["generation_kwargs"] = f"{', '.join(unknown)}: no setting of sampling here"


def _functions_of_trl(found: _Together, foreign: Foreign, given: Mapping[str, Any]) -> None:
    expression = _expression(foreign, "reward_funcs")
    if expression is None:
        return
    functions = expression.elts if isinstance(expression, ast.List | ast.Tuple) else [expression]
    weights = given.get("reward_weights") or [1.0] * len(functions)
    parts: dict[str, Any] = {}
    for function, weight in zip(functions, weights, strict=False):
        if not isinstance(function, ast.Name):
            shown = ast.unparse(function)
            found.lacks["reward_funcs"] = f"{shown}: a function has a name here: my_reward = {shown}, in a file"
            continue
        call = foreign.imported.get(function.id) or f"./{_beside(found, foreign)}:{function.id}"
        parts[function.id] = {"function": call, "weight": weight}
    if parts:
        found.made["flow.steps.reward.with.function"] = parts


def _beside(found: _Together, foreign: Foreign) -> str:
    """The file for the reward functions and the data set of a script: to import the script itself would train."""
    name = f"{foreign.file.stem}_parts.py"
    told = (
        f"write {name}: the reward functions and the data set of {foreign.file.name} as they are, without its trainer"
    )
    if told not in found.assumed:
        found.assumed.append(told)
    return name


def _data_of_trl(found: _Together, foreign: Foreign) -> None:
    for key, section in (("train_dataset", "data"), ("eval_dataset", "val.data")):
        expression = _expression(foreign, key)
        if expression is None:
            continue
        inner = foreign.names.get(expression.id, expression) if isinstance(expression, ast.Name) else expression
        match inner:
            case ast.Call(
                func=ast.Name(id="load_dataset"), args=[ast.Constant(value=str(name)), *more], keywords=words
            ):
                given = {one.arg: value_of(one.value, foreign.names) for one in words if one.arg is not None}
                given |= {"config": value_of(more[0], foreign.names)} if more else {}
                files = given.get("data_files")
                if isinstance(files, list) and len(files) > 1:
                    found.made[f"{section}.mix"] = _mixture(files)
                    continue
                one = files[0] if isinstance(files, list) and files else files
                found.made[f"{section}.source"] = one if isinstance(one, str) else f"hub:{name}"
                settings = {"config": given.get("config", given.get("name")), "split": given.get("split")}
                for setting, value in settings.items() if not isinstance(one, str) else ():
                    found.made |= {f"{section}.with.{setting}": value} if isinstance(value, str) else {}
            case _ if isinstance(expression, ast.Name):
                found.made[f"{section}.source"] = f"./{_beside(found, foreign)}:{expression.id}"
            case _:
                found.lacks[key] = f"{section}.source: {ast.unparse(expression)[:60]}: give it a name in a file"


def _adapter_of_trl(found: _Together, foreign: Foreign) -> None:
    expression = _expression(foreign, "peft_config")
    made = foreign.names.get(expression.id) if isinstance(expression, ast.Name) else expression
    if not isinstance(made, ast.Call):
        return
    names = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
    given = {str(one.arg): value_of(one.value, foreign.names) for one in made.keywords}
    found.made["models.policy.lora"] = {names[key]: value for key, value in given.items() if key in names}
    rest = {key: value for key, value in given.items() if key not in (*names, "task_type", "bias")}
    if rest:
        found.assumed.append(f"of {ast.unparse(made)[:40]} there is no {', '.join(rest)} here")


def _expression(foreign: Foreign, key: str) -> ast.expr | None:
    """The expression that a script gives for a key, names that stand for a list replaced by it."""
    value = foreign.given.get(key)
    if value is None:
        return None
    node = ast.parse(str(value) if isinstance(value, Expression) else repr(value), mode="eval").body
    while isinstance(node, ast.Name) and isinstance(foreign.names.get(node.id), ast.List | ast.Tuple):
        node = foreign.names[node.id]
    return node


def _of_verl(foreign: Foreign, given: Mapping[str, Any]) -> _Together:
    actor, found = "actor_rollout_ref.actor.", _Together()
    made = found.made
    prompts = found.number(given, "data.train_batch_size", 1024)
    made["batch.prompts"] = prompts
    size = found.number(given, actor + "ppo_mini_batch_size", min(prompts, 256))
    _minibatches(found, prompts, prompts / size, f"{prompts} prompts do not divide into mini-batches of {size}")
    estimator = given.get("algorithm.adv_estimator", "gae")
    if estimator in ESTIMATORS:
        found.flow = ESTIMATORS[estimator]
    else:
        found.lacks["algorithm.adv_estimator"] = f"{estimator}: an advantage of your own (docs/custom-steps.md)"
    if given.get("algorithm.filter_groups.enable"):
        _choose(found, "dapo", "algorithm.filter_groups.enable")
    mode = given.get(actor + "policy_loss.loss_mode", "vanilla")
    if mode in ("gspo", "cispo"):
        _choose(found, mode, actor + "policy_loss.loss_mode")
    elif mode != "vanilla":
        found.lacks[actor + "policy_loss.loss_mode"] = f"{mode}: a loss of your own (docs/custom-steps.md)"
    both = found.number(given, actor + "clip_ratio", 0.2)
    clip = [found.number(given, f"{actor}clip_ratio_{end}", both) for end in ("low", "high")]
    # The loss of no other mode has a dual clip.
    clip += [found.number(given, actor + "clip_ratio_c", 3.0)] if found.flow not in ("gspo", "cispo") else []
    if found.flow not in ("gspo", "cispo") or any(key.startswith(actor + "clip_ratio") for key in given):
        made["flow.steps.update.with.clip"] = clip
    coefficient = found.number(given, actor + "kl_loss_coef", 0.001) if given.get(actor + "use_kl_loss") else 0.0
    kinds = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
    kind = given.get(actor + "kl_loss_type", "low_var_kl")
    if kind not in kinds:
        found.lacks[actor + "kl_loss_type"] = f"{kind} is not built; there are {', '.join(kinds)}"
    _divergence(found, coefficient, kinds.get(kind, "k3"))
    modes = {name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")}
    modes["seq-mean-token-sum-norm"] = "seq-mean-token-sum-norm/${flow.steps.sample.with.max_new_tokens}"
    aggregate = given.get(actor + "loss_agg_mode", "token-mean")
    if aggregate in modes:
        # Of the flows that have another one by default, that is meant unless it is given.
        if found.flow not in ("gspo", "ppo") or actor + "loss_agg_mode" in given:
            made["flow.steps.update.with.aggregate"] = modes[aggregate]
    else:
        found.lacks[actor + "loss_agg_mode"] = f"{aggregate} is not built; there are {', '.join(modes)}"
    _parts_of_verl(found, given)
    return found


def _parts_of_verl(found: _Together, given: Mapping[str, Any]) -> None:
    """The adapter, workers, the reward function, and terms of loss and reward."""
    model = "actor_rollout_ref.model."
    if given.get(model + "lora_rank"):
        names = {"lora_rank": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
        lora = {here: given[model + there] for there, here in names.items() if given.get(model + there) is not None}
        found.made["models.policy.lora"] = lora
    _workers_of_verl(found, given)
    _corrections_of_verl(found, given)
    for above in ("custom_reward_function.", "reward.custom_reward_function."):
        path = given.get(above + "path")
        if path:
            place = path if path.startswith(("/", "$")) else f"./{path.removeprefix('./')}"
            call, at = f"{place}:{given.get(above + 'name', 'compute_score')}", "flow.steps.reward.with.function"
            own = {key: key.removeprefix(f"{above}reward_kwargs.") for key in given}
            settings = {name: given[key] for key, name in own.items() if name != key}
            found.made[at] = {"score": {"function": call, **settings}} if settings else call
            shown = {key: f"{at}.score.{name}={_shown(given[key])}" for key, name in own.items() if name != key}
            found.settled |= shown


def _workers_of_verl(found: _Together, given: Mapping[str, Any]) -> None:
    rollout, strategy = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor.strategy"
    engine = {"vllm": "vllm", "sglang": "sglang"}.get(given.get(rollout + "name", ""), "torch")
    width = found.number(given, rollout + "tensor_model_parallel_size", 1) if engine != "torch" else 1
    hosts = found.number(given, "trainer.nnodes", 1), found.number(given, "trainer.n_gpus_per_node", 8)
    apart = found.number(given, rollout + "nnodes", 0) * found.number(given, rollout + "n_gpus_per_node", hosts[1])
    division = _divide(found, engine, width, hosts, apart)
    if not {"trainer.nnodes", "trainer.n_gpus_per_node"} & given.keys():
        found.assumed.append("the 8 GPUs are verl's default: change the counts of the pools to those that there are")
    if given.get(strategy, "fsdp") not in ("fsdp", "fsdp2"):
        found.lacks[strategy] = f"{given[strategy]} has no counterpart here; there are fsdp, fsdp2"
    alone = division.counts.get("worker") == 1
    found.backend = "torch" if alone and (engine == "vllm" or strategy not in given) else "fsdp"
    pool = "worker" if found.layout == "colocated" else "trainer"
    found.made[f"layout.pools.{pool}.backend"] = found.backend
    counts = ", ".join(f"layout.pools.{name}.count={count}" for name, count in division.counts.items())
    keys = ("trainer.nnodes", "trainer.n_gpus_per_node", rollout + "nnodes", rollout + "n_gpus_per_node")
    found.settled |= {key: counts for key in keys if key not in found.lacks}
    why = " (one worker: nothing to divide)" if found.backend == "torch" else ""
    found.settled[strategy] = f"layout.pools.{pool}.backend={found.backend}{why}"
    key = rollout + "tensor_model_parallel_size"
    if engine == "torch":
        found.lacks |= {key: "engine torch has one GPU: vllm or sglang"} if given.get(key, 1) != 1 else {}
    elif key not in found.lacks:
        name = _TABLES["verl"][key].options[engine]
        found.settled[key] = (
            f"layout.pools.{'rollout' if pool == 'trainer' else pool}.engine_options.{name}={division.width}"
        )


def _corrections_of_verl(found: _Together, given: Mapping[str, Any]) -> None:
    """Terms that flows here have unless they are told, and verl has not, and the other way about."""
    at, made = "algorithm.rollout_correction.", found.made
    kind, bound = given.get(at + "rollout_is"), found.number(given, at + "rollout_is_threshold", 2.0)
    made["flow.steps.update.with.tis"] = bound if kind == "token" else None
    if kind == "sequence":
        made["flow.steps.update.with.correction"] = {"sequence_tis": [0.0, bound]}
    elif kind not in (None, "token"):
        found.lacks[at + "rollout_is"] = f"{kind} is not built; there are token, sequence"
    coefficient = found.number(given, "algorithm.kl_ctrl.kl_coef", 0.001) if given.get(_KL_REWARD) else 0.0
    if found.flow == "reinforce_plus_plus" or (found.flow == "ppo" and coefficient):
        made["flow.steps.token_rewards.with.kl_coef"] = coefficient
        if found.flow == "ppo":
            made["flow.steps.reference"] = dict(_REFERENCE)
        found.settled |= dict.fromkeys(
            (_KL_REWARD, "algorithm.kl_ctrl.kl_coef"), f"flow.steps.token_rewards.with.kl_coef={coefficient}"
        )
    if found.flow == "remax" and "actor_rollout_ref.actor.entropy_coeff" not in given:
        made["flow.steps.update.with.entropy_coef"] = 0.0


def _choose(found: _Together, flow: str, key: str) -> None:
    """Take another flow than grpo, if no other key has chosen one."""
    if found.flow not in ("grpo", flow):
        found.lacks[key] = f"flow={flow}, but flow={found.flow} is chosen: merge the two flows by hand"
    else:
        found.flow = flow


def _divergence(found: _Together, coefficient: float, kind: str) -> None:
    if not coefficient:
        return
    if found.flow == "grpo":
        found.flow = "grpo_kl"
    else:
        found.made["flow.steps.reference"] = dict(_REFERENCE)
    found.made |= {"flow.steps.update.with.kl_coef": coefficient, "flow.steps.update.with.kl": kind}


def _fit(made: dict[str, Any], together: _Together) -> None:
    """Add what a recipe cannot do without, and ledgers that divide its prompts and are enough for its trainers."""
    if "run.training_steps" not in made:
        made["run.training_steps"] = _STEPS
        together.assumed.append(f"run.training_steps is {_STEPS}, since how long to train is not said as a number")
    if "models.policy.path" not in made:
        made["models.policy.path"] = "MODEL"
        together.assumed.append("models.policy.path is not known: a folder, or the id of a model of the hub")
    if together.flow == "ppo":
        made.setdefault("models.critic.path", made["models.policy.path"])
    if not {"data.source", "data.mix"} & made.keys():
        made["data.source"] = "prompts.jsonl"
        together.assumed.append("data.source is not known: a file or folder of prompts, hub:ID, or a function")
    _fit_data(made, together)
    # Mini-batches have as many groups of every ledger.
    prompts = made["batch.prompts"] // made.get("batch.minibatches", 1)
    trainers = max(made.get(f"layout.pools.{pool}.count", 1) for pool in ("worker", "trainer"))
    enough = range(max(gcd(8, prompts), trainers), prompts)
    made["batch.ledgers"] = next((ledgers for ledgers in enough if not prompts % ledgers), prompts)


def _fit_data(made: dict[str, Any], together: _Together) -> None:
    """Give every source the columns, and say what the weights of a mixture are."""
    column = made.get("data.fields.prompt")
    for section in ("data", "val.data"):
        if column is not None and f"{section}.source" in made:
            made[f"{section}.fields.prompt"] = column
        if f"{section}.mix" in made:
            made.pop(f"{section}.fields.prompt", None)
            fields = {} if column is None else {"fields": {"prompt": column}}
            made[f"{section}.mix"] = {name: {**one, **fields} for name, one in made[f"{section}.mix"].items()}
            if section == "data":
                names = ", ".join(made["data.mix"])
                told = (
                    f"weight of each of {names} in data.mix: its rows, to draw all alike; now the files weigh the same"
                )
                together.assumed.append(told)


# -- writing


def _nested(made: Mapping[str, Any], flow: str, layout: str) -> dict[str, Any]:
    recipe: dict[str, Any] = {"defaults": [{"flow": flow}, {"layout": layout}, "_self_"]}
    for section in ("run", "batch", "models", "data", "val", "flow", "layout"):
        for key, value in made.items():
            *above, last = key.split(".")
            if above and above[0] == section:
                place = recipe
                for part in above:
                    place = place.setdefault(part, {})
                place[last] = value
    return recipe


def written(foreign: Foreign, found: Converted) -> str:
    """The recipe as YAML, with an account of every key in comments."""
    counts = {kind: sum(one.kind == kind for one in found.accounts) for kind in TITLES}
    lines = [f"# From {foreign.file.name} ({foreign.tool}), {len(found.accounts)} keys: " + _counted(counts)]
    lines += [f"# To do: {text}" for text in found.assumed]
    body = yaml_text(found.recipe).rstrip()
    parts = {title: [one for one in found.accounts if one.kind == kind] for kind, title in TITLES.items()}
    parts[f"defaults of {foreign.tool} that differ from those here, and are written"] = [*found.defaults]
    for title, accounts in parts.items():
        lines_of = [f"#   {one.key}={_shown(one.value)} — {one.text}" for one in accounts]
        body += "\n\n" + "\n".join([f"# {title} ({len(accounts)}):", *lines_of]) if accounts else ""
    return "\n".join(lines) + f"\n{body}\n"


def _counted(counts: Mapping[Kind, int]) -> str:
    return f"{counts['maps']} map, {counts['says']} stand elsewhere or need nothing, {counts['lacks']} do not map"


def _shown(value: Any) -> str:
    if isinstance(value, Expression):
        return " ".join(str(value).split())
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    # In a comment it has one line.
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text
