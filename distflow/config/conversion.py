"""Recipes made of other tools' configurations: what maps, what needs nothing here, and what has no counterpart.

Sections of this file: *converting* by the dictionaries in `trl_keys.py` and `other_tools.py` what `foreign.py` has
read, and *writing* the recipe with every key accounted for. What several keys decide together is in
`trl_conversion.py` and `verl_conversion.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal

from distflow.config.foreign import Foreign
from distflow.config.foreign import shown as _shown
from distflow.config.meanings import Meaning, Unneeded
from distflow.config.other_tools import VERL, VERL_DEFAULTS, meant
from distflow.config.script import Expression
from distflow.config.together import Default, RowCount, Together, mixture, uncounted
from distflow.config.trl_conversion import of_trl
from distflow.config.trl_keys import TRL, TRL_DEFAULTS
from distflow.config.verl_conversion import of_verl
from distflow.config.yamlfile import yaml_text
from distflow.errors import nearest

Kind = Literal["maps", "says", "lacks"]
TITLES: Mapping[Kind, str] = {
    "maps": "maps",
    "says": "stands elsewhere, or needs nothing here",
    "lacks": "does not map: decide by hand",
}
_TABLES: Mapping[str, Mapping[str, Meaning]] = {"TRL": TRL, "verl": VERL}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"TRL": TRL_DEFAULTS, "verl": VERL_DEFAULTS}
_NEAR: Mapping[str, float] = {"TRL": 0.8, "verl": 0.93}
"""How similar a key has to be to one that is meant: verl's have long beginnings in common."""
_UNLISTED = "not in the dictionary"
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
    defaults: tuple[Account, ...]
    """What the other tool does unless it is told, and the recipe has to say."""
    notes: Mapping[str, str]
    """Comments, by key of the recipe."""


def convert(foreign: Foreign, count: RowCount = uncounted) -> Converted:
    """Make a recipe of another tool's configuration; every key of it is accounted for.

    `count`: counts the rows of a file of prompts, for a length in passes.
    """
    values = dict(foreign.given)
    known = {key: one for key, one in values.items() if not isinstance(one, Expression) and key not in foreign.unread}
    together = of_trl(foreign, known, count) if foreign.tool == "TRL" else of_verl(known, foreign.file.stem, count)
    accounts, made = [], dict(together.made)
    for key, value in values.items():
        account, keys = _account(foreign, key, value, together)
        accounts.append(account)
        made |= keys
    _add_defaults(foreign, made, together)
    _fit(made, together)
    recipe = _nested(made, together.flow, together.layout)
    defaults = tuple(
        Account(default.argument, default.value, "maps", f"{key}={_shown(made[key])}")
        for key, default in together.defaults.items()
        if default.argument not in values
    )
    return Converted(recipe, tuple(accounts), tuple(together.assumed), defaults, dict(_notes(foreign, together)))


def _add_defaults(foreign: Foreign, made: dict[str, Any], together: Together) -> None:
    """Add what the other tool does unless it is told, where that is not what happens here."""
    for key, value in _DEFAULTS[foreign.tool].items():
        why = f"the script computes {key}" if isinstance(foreign.given.get(key), Expression) else ""
        for here, found in _account(foreign, key, value, together)[1].items():
            if here not in made and _needed(here, made, together):
                made[here] = found
                together.defaults[here] = Default(key, value, why)


def _needed(key: str, made: Mapping[str, Any], together: Together) -> bool:
    if key.startswith("models.critic."):
        return together.flow == "ppo"
    return not key.startswith("val.") or any(key.startswith("val.data.") for key in made)


def _notes(foreign: Foreign, together: Together) -> Iterator[tuple[str, str]]:
    """Yield the comments of the recipe, each with its key."""
    yield "batch.ledgers", _LEDGERS
    yield from together.notes.items()
    for key, default in together.defaults.items():
        yield key, f"{foreign.tool}'s default{f': {default.why}' if default.why else ''}"


def _account(foreign: Foreign, key: str, value: Any, together: Together) -> tuple[Account, dict[str, Any]]:
    meaning = _TABLES[foreign.tool].get(key)
    if (told := _told(foreign, key, value, together, meaning)) is not None:
        return told, {}
    if meaning is None:
        word = re.split(r"[.@/]", key)[-1]
        near = nearest(key, _TABLES[foreign.tool], cutoff=_NEAR[foreign.tool])
        guess = f"{_UNLISTED}: did you mean {near}?" if near else _UNLISTED
        return Account(key, value, "lacks", meant(word) or guess), {}
    if not meaning.to and meaning.make is None:
        return Account(key, value, "lacks" if meaning.text.startswith("not built") else "says", meaning.text), {}
    if key in together.told if isinstance(value, Expression) else meaning.together:
        made = together.made.get(meaning.to)
        here = f"={_shown(made)}" if isinstance(made, int | float | str) else ""
        return Account(key, value, "maps", f"{meaning.to}{here}{f' ({meaning.text})' if meaning.text else ''}"), {}
    if isinstance(value, Expression):
        text = f"{meaning.to}: the script computes it" if meaning.to else meaning.text
        return Account(key, value, "lacks", text), {}
    try:
        to, found = _translated(meaning, value, together)
    except Unneeded as error:
        return Account(key, value, "says", str(error)), {}
    except ValueError as error:
        return Account(key, value, "lacks", str(error)), {}
    return Account(key, value, "maps", f"{to}={_shown(found)}"), {to: found}


def _told(foreign: Foreign, key: str, value: Any, together: Together, meaning: Meaning | None) -> Account | None:
    """Return what is said of a key whatever its dictionary says."""
    if key in foreign.unread:
        return Account(key, value, "lacks" if isinstance(value, Expression) else "says", foreign.unread[key])
    texts: Mapping[Kind, Mapping[str, str]] = {"lacks": together.lacks, "says": together.says, "maps": together.settled}
    for kind, by_key in texts.items():
        if key in by_key:
            return Account(key, value, kind, by_key[key])
    if value is None and meaning is not None and meaning.together:
        return Account(key, value, "says", "null: as if it were not given")
    return None


def _translated(meaning: Meaning, value: Any, together: Together) -> tuple[str, Any]:
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
        return (to, here[0]) if len(here) == 1 else (to.replace("source", "mix"), mixture(here))
    return to, here


def _in_layout(key: str, together: Together) -> str:
    """The key of a pool in the layout that was chosen."""
    if together.layout == "colocated" or not key.startswith("layout.pools.worker."):
        return key
    key = key.replace(".worker.offload", ".worker.backend_options.cpu_offload")
    pool = "trainer" if ".backend" in key or key.endswith(".zero") else "rollout"
    return key.replace(".worker.", f".{pool}.")


def fitting_ledgers(prompts: int, minibatches: int = 1, trainers: int = 1) -> int:
    """Find a number of ledgers that divides the prompts of a mini-batch, with one for each training worker."""
    # Mini-batches have as many groups of every ledger.
    each = prompts // minibatches
    enough = range(max(gcd(8, each), trainers), each)
    return next((ledgers for ledgers in enough if not each % ledgers), each)


def _fit(made: dict[str, Any], together: Together) -> None:
    """Add what a recipe cannot do without, and ledgers that divide its prompts and are enough for its trainers."""
    if "run.training_steps" not in made:
        made["run.training_steps"] = _STEPS
        together.assumed.append(f"run.training_steps is {_STEPS}, since {together.length}")
    if "models.policy.path" not in made:
        made["models.policy.path"] = "MODEL"
        together.assumed.append("models.policy.path is not known: a folder, or the id of a model of the hub")
    if together.flow == "ppo":
        made.setdefault("models.critic.path", made["models.policy.path"])
    if not {"data.source", "data.mix"} & made.keys():
        made["data.source"] = "prompts.jsonl"
        together.assumed.append("data.source is not known: a file or folder of prompts, hub:ID, or a function")
    _fit_data(made, together)
    trainers = max(made.get(f"layout.pools.{pool}.count", 1) for pool in ("worker", "trainer"))
    made["batch.ledgers"] = fitting_ledgers(made["batch.prompts"], made.get("batch.minibatches", 1), trainers)
    if "batch.max_refills" in made:
        made["batch.max_refills"] = -(-made["batch.max_refills"] // made["batch.ledgers"])


def _fit_data(made: dict[str, Any], together: Together) -> None:
    """Give every source the columns, and say what the weights of a mixture are."""
    column = made.get("data.fields.prompt")
    for section in ("data", "val.data"):
        if column is not None and f"{section}.source" in made:
            made[f"{section}.fields.prompt"] = column
        if f"{section}.mix" in made:
            made.pop(f"{section}.fields.prompt", None)
            fields = {} if column is None else {"fields": {"prompt": column}}
            made[f"{section}.mix"] = {name: {**one, **fields} for name, one in made[f"{section}.mix"].items()}
            mix = made[f"{section}.mix"]
            if section == "data" and all(one["source"] in together.rows for one in mix.values()):
                made["data.mix"] = {name: {**one, "weight": together.rows[one["source"]]} for name, one in mix.items()}
                together.notes["data.mix"] = "weights are rows: all are drawn alike"
            elif section == "data":
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
    lines += [f"# To do: {text}" for text in (*found.assumed, *_undone(found))]
    body = _noted(yaml_text(found.recipe).rstrip(), found.notes)
    parts = {title: [one for one in found.accounts if one.kind == kind] for kind, title in TITLES.items()}
    parts[f"defaults of {foreign.tool} that differ from those here, and are written"] = [*found.defaults]
    for title, accounts in parts.items():
        lines_of = [f"#   {one.key}={_shown(one.value)} — {one.text}" for one in accounts]
        body += "\n\n" + "\n".join([f"# {title} ({len(accounts)}):", *lines_of]) if accounts else ""
    return "\n".join(lines) + f"\n{body}\n"


def _undone(found: Converted) -> Iterator[str]:
    """Yield what does not map and is to be decided; of keys that are not known together."""
    unknown = [one.key for one in found.accounts if one.kind == "lacks" and one.text == _UNLISTED]
    for one in found.accounts:
        told = one.text == _UNLISTED or any(one.text in line for line in found.assumed)
        if one.kind == "lacks" and not told:
            yield f"{one.key}={_shown(one.value)}: {one.text}"
    if unknown:
        yield f"see whether these change the training, which are not known here: {', '.join(unknown)}"


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
