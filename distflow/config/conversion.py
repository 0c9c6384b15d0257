"""Recipes made of other tools' configurations: what maps, what needs nothing here, and what has no counterpart.

Sections of this file: *converting* by the dictionaries in `trl_keys.py` and `other_tools.py` what `foreign.py` has
read, and *writing* the recipe with every key accounted for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any, Literal

from distflow.config.foreign import Expression, Foreign
from distflow.config.foreign import shown as _shown
from distflow.config.meanings import Meaning, Unneeded
from distflow.config.other_tools import ESTIMATORS, VERL, meant
from distflow.config.together import Together as _Together
from distflow.config.together import choose as _choose
from distflow.config.together import clip as _clip
from distflow.config.together import divergence as _divergence
from distflow.config.trl_conversion import of_trl
from distflow.config.trl_keys import TRL
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
_LEDGERS = "order books of the data (default 8): they divide the prompts, and there is one for each training worker"

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
    notes: Mapping[str, str] = field(default_factory=dict)
    """Comments, by key of the recipe."""


def convert(foreign: Foreign) -> Converted:
    """Make a recipe of another tool's configuration; every key of it is accounted for."""
    values = dict(foreign.given)
    known = {key: value for key, value in values.items() if not isinstance(value, Expression)}
    together = (of_trl if foreign.tool == "TRL" else _of_verl)(foreign, known)
    accounts, made = [], dict(together.made)
    for key, value in values.items():
        account, keys = _account(foreign, key, value, together)
        accounts.append(account)
        made |= keys
    _fit(made, together)
    recipe = _nested(made, together.flow, together.layout)
    notes = {**together.notes, "batch.ledgers": _LEDGERS}
    return Converted(recipe, tuple(accounts), tuple(together.assumed), notes)


def _account(foreign: Foreign, key: str, value: Any, together: _Together) -> tuple[Account, dict[str, Any]]:
    meaning = _TABLES[foreign.tool].get(key)
    if (told := _told(key, value, together)) is not None:
        return told, {}
    if meaning is None:
        word = re.split(r"[.@/]", key)[-1]
        return Account(key, value, "lacks", meant(word) or "not in the dictionary"), {}
    if not meaning.to and meaning.make is None:
        return Account(key, value, "lacks" if meaning.text.startswith("not built") else "says", meaning.text), {}
    if meaning.together and (key in together.told or not isinstance(value, Expression)):
        made = together.made.get(meaning.to)
        here = f"={_shown(made)}" if isinstance(made, int | float | str) else ""
        return Account(key, value, "maps", f"{meaning.to}{here}{f' ({meaning.text})' if meaning.text else ''}"), {}
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


def _told(key: str, value: Any, together: _Together) -> Account | None:
    """Return what follows for a key from several of them."""
    if key in together.lacks:
        return Account(key, value, "lacks", together.lacks[key])
    if key in together.says:
        return Account(key, value, "says", together.says[key])
    if key in together.settings:
        return Account(key, value, "maps", f"{together.settings[key]}={_shown(value)}")
    return None


def _in_layout(key: str, together: _Together) -> str:
    """The key of a pool in the layout that was chosen."""
    if together.layout == "colocated" or not key.startswith("layout.pools.worker."):
        return key
    pool = "trainer" if key.endswith(".backend") else "rollout"
    return key.replace(".worker.", f".{pool}.")


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
    if prompts % (parts := made.get("batch.minibatches", 1)):
        made["batch.minibatches"] = gcd(prompts, parts)
        told = f"{parts} optimizer steps would cut {prompts} prompts into parts of groups"
        together.assumed.append(
            f"batch.minibatches is {gcd(prompts, parts)}: {told}; batch.prompts={parts} or a multiple"
        )
    most = prompts // made.get("batch.minibatches", 1)
    enough = range(max(gcd(8, most), trainers), most)
    made["batch.ledgers"] = next((ledgers for ledgers in enough if not most % ledgers), most)
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
    body = _noted(yaml_text(found.recipe).rstrip(), found.notes)
    for kind, title in TITLES.items():
        accounts = [one for one in found.accounts if one.kind == kind]
        lines_of = [f"#   {one.key}={_shown(one.value)} — {one.text}" for one in accounts]
        body += "\n\n" + "\n".join([f"# {title} ({len(accounts)}):", *lines_of]) if accounts else ""
    return "\n".join(lines) + f"\n{body}\n"


_KEY = re.compile(r"^( *)([\w.@-]+):")


def _noted(body: str, notes: Mapping[str, str]) -> str:
    """YAML text with a comment behind the lines of these keys."""
    lines, above = [], list[tuple[int, str]]()
    for line in body.splitlines():
        if (found := _KEY.match(line)) is not None:
            depth = len(found[1])
            above = [*(one for one in above if one[0] < depth), (depth, found[2])]
            note = notes.get(".".join(name for _, name in above))
            line += f"  # {note}" if note else ""
        lines.append(line)
    return "\n".join(lines)


def _counted(counts: Mapping[Kind, int]) -> str:
    return f"{counts['maps']} map, {counts['says']} stand elsewhere or need nothing, {counts['lacks']} do not map"
