"""Recipes made of other tools' configurations: what maps, what needs nothing here, and what has no counterpart.

Sections of this file: *reading* (a TRL script, by its syntax tree alone; a verl override list or shell script),
*converting* by the dictionary in `other_tools.py`, and *writing* the recipe with every key accounted for.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import Any, Literal

import yaml

from distflow.config.other_tools import ESTIMATORS, TRL, VERL, WORDS, Meaning, Unneeded, meant
from distflow.config.yamlfile import yaml_text
from distflow.errors import UserError

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

# -- reading


@dataclass(frozen=True, slots=True)
class Expression:
    """A value that only running the script would tell."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Foreign:
    """A configuration of another tool."""

    tool: str
    given: Mapping[str, Any]
    """By key."""
    file: Path
    names: Mapping[str, ast.expr] = field(default_factory=dict)
    """Of a script, what its top-level names are given."""
    imported: Mapping[str, str] = field(default_factory=dict)
    """Of a script, `module:name` by the names that it imports."""


def read_foreign(file: Path) -> Foreign:
    """Read the configuration in a file, which is never executed. Raises UserError if there is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error} — give a TRL script, or verl's overrides") from error
    found = _script(file, text) if file.suffix == ".py" else Foreign("verl", dict(_overrides(text)), file)
    if not found.given:
        raise UserError(
            f"{file}: nothing to convert — expected a Python script (.py) that calls GRPOConfig(…) or GRPOTrainer(…), "
            "or a list or shell script with verl's overrides, such as data.train_batch_size=256"
        )
    return found


def _script(file: Path, text: str) -> Foreign:
    try:
        tree = ast.parse(text, filename=str(file))
    except SyntaxError as error:
        raise UserError(f"{file}:{error.lineno}: {error.msg} — expected a Python script") from error
    names: dict[str, ast.expr] = {}
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = value
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                imported |= {alias.asname or alias.name: f"{module}:{alias.name}" for alias in aliases}
    given: dict[str, Any] = {}
    for node in ast.walk(tree):
        called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and called in ("GRPOConfig", "GRPOTrainer"):
            for keyword in node.keywords:
                if keyword.arg is None:
                    given[f"**{ast.unparse(keyword.value)}"] = Expression(ast.unparse(keyword.value))
                elif keyword.arg != "args":
                    given[keyword.arg] = _value(keyword.value, names)
            given |= {f"{called} argument {n}": Expression(ast.unparse(one)) for n, one in enumerate(node.args)}
    return Foreign("TRL", given, file, names, imported)


def _value(node: ast.expr, names: Mapping[str, ast.expr], depth: int = 0) -> Any:
    """The literal that an expression is, or a name of the script stands for; else the expression."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        if isinstance(node, ast.Name) and node.id in names and depth < 8:
            found = _value(names[node.id], names, depth + 1)
            if not isinstance(found, Expression):
                return found
        return Expression(ast.unparse(node))


_OVERRIDE = re.compile(r"^[+~]{0,2}([A-Za-z_]\w*(?:[.@/][\w@/]+)+)=(.*)$", re.S)
_VARIABLE = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(.*)$", re.S)
_USE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")


def _overrides(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of overrides, with the variables that the script itself gives."""
    variables: dict[str, str] = {}

    def filled(value: str) -> str:
        def use(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            return variables.get(name, found[3] if found[3] is not None else f"${{oc.env:{name}}}")

        return _USE.sub(use, value)

    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = line.split()
        for word in words:
            if (override := _OVERRIDE.match(word)) is not None:
                yield override[1], _plain(filled(override[2]))
            elif (variable := _VARIABLE.match(word)) is not None:
                variables[variable[1]] = filled(variable[2])


def _plain(text: str) -> Any:
    """The value of an override, as Hydra would read it."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


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
    _fit(made, together)
    return Converted(_nested(made, together.flow, together.layout), tuple(accounts), tuple(together.assumed))


@dataclass(slots=True)
class _Together:
    """What follows from several keys."""

    flow: str = "grpo"
    layout: str = "colocated"
    made: dict[str, Any] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)
    """Keys whose value has no counterpart, with the reason."""
    settings: dict[str, str] = field(default_factory=dict)
    """Keys that are settings of the reward function, with their keys here."""
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
    if key in together.settings:
        return Account(key, value, "maps", f"{together.settings[key]}={_shown(value)}"), {}
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
        here = value if meaning.make is None else meaning.make(value)
    except Unneeded as error:
        return Account(key, value, "says", str(error)), {}
    except ValueError as error:
        return Account(key, value, "lacks", str(error)), {}
    if here is None:
        return Account(key, value, "says", f"null: {meaning.to} keeps its default"), {}
    return Account(key, value, "maps", f"{meaning.to}={_shown(here)}"), {_in_layout(meaning.to, together): here}


def _in_layout(key: str, together: _Together) -> str:
    """The key of a pool in the layout that was chosen."""
    if together.layout == "colocated" or not key.startswith("layout.pools.worker."):
        return key
    pool = "trainer" if key.endswith(".backend") else "rollout"
    return key.replace(".worker.", f".{pool}.")


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
    updates = max(1, held // accumulation)
    made |= {"batch.minibatches": updates} if updates > 1 else {}
    if (steps := found.number(given, "max_steps", -1)) > 0:
        made["run.training_steps"] = max(1, steps // (updates * found.number(given, "num_iterations", 1)))
    made["flow.steps.sample.with.max_new_tokens"] = 512
    made["models.policy.optimizer.lr"] = 1e-6
    low = found.number(given, "epsilon", 0.2)
    high = found.number(given, "epsilon_high", low)
    # Of cispo it bounds the ratio itself, and here by how much this may exceed 1.
    low, high = (1.0, round(high - 1, 6)) if given.get("loss_type") == "cispo" and high > 1 else (low, high)
    _clip(found, low, high, named="epsilon" in given or "epsilon_high" in given)
    _divergence(found, found.number(given, "beta", 0.0), "k3")
    _loss_of_trl(found, given)
    betas = [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)]
    made |= {"models.policy.optimizer.betas": betas} if {"adam_beta1", "adam_beta2"} & given.keys() else {}
    _sampling_of_trl(found, given)
    _functions_of_trl(found, foreign, given)
    _data_of_trl(found, foreign)
    _adapter_of_trl(found, foreign)
    return found


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
                given = {one.arg: _value(one.value, foreign.names) for one in words if one.arg is not None}
                given |= {"config": _value(more[0], foreign.names)} if more else {}
                files = given.get("data_files")
                found.made[f"{section}.source"] = files if isinstance(files, str) else f"hub:{name}"
                settings = {"config": given.get("config", given.get("name")), "split": given.get("split")}
                for setting, value in settings.items() if not isinstance(files, str) else ():
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
    given = {str(one.arg): _value(one.value, foreign.names) for one in made.keywords}
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
    made |= {"batch.prompts": prompts, "models.policy.optimizer.lr": 1e-6}
    made["flow.steps.sample.with.max_new_tokens"] = 512
    updates = max(1, prompts // found.number(given, actor + "ppo_mini_batch_size", 256))
    made |= {"batch.minibatches": updates} if updates > 1 else {}
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
    low, high = (found.number(given, f"{actor}clip_ratio_{end}", both) for end in ("low", "high"))
    _clip(found, low, high, named=any(key.startswith(actor + "clip_ratio") for key in given))
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
    """The reward function, the adapter and the number of workers."""
    model = "actor_rollout_ref.model."
    if given.get(model + "lora_rank"):
        names = {"lora_rank": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
        lora = {here: given[model + there] for there, here in names.items() if given.get(model + there) is not None}
        found.made["models.policy.lora"] = lora
    gpus = {key: found.number(given, f"trainer.{key}", 1) for key in ("n_gpus_per_node", "nnodes")}
    if any(f"trainer.{key}" in given for key in gpus):
        found.made["layout.pools.worker.count"] = gpus["n_gpus_per_node"] * gpus["nnodes"]
    for above in ("custom_reward_function.", "reward.custom_reward_function."):
        path = given.get(above + "path")
        if path:
            place = path if path.startswith(("/", "$")) else f"./{path.removeprefix('./')}"
            call, at = f"{place}:{given.get(above + 'name', 'compute_score')}", "flow.steps.reward.with.function"
            own = {key: key.removeprefix(f"{above}reward_kwargs.") for key in given}
            settings = {name: given[key] for key, name in own.items() if name != key}
            found.made[at] = {"score": {"function": call, **settings}} if settings else call
            found.settings |= {key: f"{at}.score.{name}" for key, name in own.items() if name != key}


def _choose(found: _Together, flow: str, key: str) -> None:
    """Take another flow than grpo, if no other key has chosen one."""
    if found.flow not in ("grpo", flow):
        found.lacks[key] = f"flow={flow}, but flow={found.flow} is chosen: merge the two flows by hand"
    else:
        found.flow = flow


def _clip(found: _Together, low: Any, high: Any, *, named: bool) -> None:
    if named:
        found.made["flow.steps.update.with.clip"] = [low, high]


def _divergence(found: _Together, coefficient: float, kind: str) -> None:
    if not coefficient:
        return
    if found.flow == "grpo":
        found.flow = "grpo_kl"
    else:
        found.made["flow.steps.reference"] = {"call": "distflow.workers.reference:ref_logprobs", "model": "reference"}
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
    if "data.source" not in made:
        made["data.source"] = "prompts.jsonl"
        together.assumed.append("data.source is not known: a file or folder of prompts, hub:ID, or a function")
    prompts = made["batch.prompts"]
    trainers = max(made.get(f"layout.pools.{pool}.count", 1) for pool in ("worker", "trainer"))
    if made.get("layout.pools.worker.engine") == "vllm" and trainers > 1:
        other = "layout.pools.worker.engine=sglang, or layout=split with a pool for each"
        together.assumed.append(f"vllm shares no worker with several that train: {other}")
    enough = range(max(gcd(8, prompts), trainers), prompts)
    made["batch.ledgers"] = next((ledgers for ledgers in enough if not prompts % ledgers), prompts)
    source = made["data.source"]
    if isinstance(source, list):
        made["data.source"] = source[0]
        together.assumed.append("data.source is the first of several files: put them into one folder, or into data.mix")


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
    for kind, title in TITLES.items():
        accounts = [one for one in found.accounts if one.kind == kind]
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
