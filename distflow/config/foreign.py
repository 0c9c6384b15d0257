"""Configurations of other tools as they are read: TRL's scripts, options and YAML, and verl's overrides.

Nothing of them is executed: a script is known by its syntax tree alone.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from distflow.config.trl_keys import TRL
from distflow.errors import UserError


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
    """Of a script, `module:name` by the names that it imports; a module has no colon."""
    defined: frozenset[str] = frozenset()
    """Of a script, the names of its functions and classes."""
    derived: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of a script that options of `trl grpo` stand for."""

    def expression(self, key: str) -> ast.expr | None:
        """Return the expression that a script gives for an argument, with a name that stands for one replaced by it."""
        value = self.derived.get(key, self.given.get(key))
        if value is None:
            return None
        node = ast.parse(str(value) if isinstance(value, Expression) else repr(value), mode="eval").body
        while isinstance(node, ast.Name) and isinstance(self.names.get(node.id), ast.List | ast.Tuple | ast.Dict):
            node = self.names[node.id]
        return node

    def made_by(self, node: ast.expr | None) -> ast.expr | None:
        """Return the expression that a name stands for, or the node itself."""
        depth = 0
        while isinstance(node, ast.Name) and node.id in self.names and depth < 8:
            node, depth = self.names[node.id], depth + 1
        return node

    def value(self, node: ast.expr) -> Any:
        """Return the literal that an expression is, or a name of the script stands for; else the expression."""
        return _value(node, self.names)


_EXPECTED = (
    "expected a Python script (.py) that calls GRPOConfig(…) or GRPOTrainer(…), `trl grpo --OPTION VALUE …` in a shell "
    "script, its options as YAML, or a list or shell script with verl's overrides, such as data.train_batch_size=256"
)
_OTHER_TRAINERS = {"SFT": "sft", "DPO": "dpo", "KTO": "kto", "Reward": "reward_model", "RLOO": "rloo", "PPO": "ppo"}
"""Flows that stand for other trainers of TRL."""


def read_foreign(file: Path) -> Foreign:
    """Read the configuration in a file, which is never executed. Raises UserError if there is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error} — give a TRL script, or verl's overrides") from error
    if file.suffix == ".py":
        found = _script(file, text)
    else:
        found = _options(file, text) or Foreign("verl", dict(_overrides(text)), file)
    if not found.given:
        for name, flow in _OTHER_TRAINERS.items():
            if re.search(rf"\b{name}(Config|Trainer)\b|\btrl {name.lower()}\b", text):
                told = f"begin with flow={flow} (docs/algorithms.md, docs/supervised.md)"
                raise UserError(f"{file}: only GRPO of TRL is converted, and this is for {name}Trainer — {told}")
        raise UserError(f"{file}: nothing to convert — {_EXPECTED}")
    return found


_ORDER = {
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    "GRPOConfig": ("output_dir",),
}
"""Arguments by position."""


def _script(file: Path, text: str) -> Foreign:
    try:
        tree = ast.parse(text, filename=str(file))
    except SyntaxError as error:
        raise UserError(f"{file}:{error.lineno}: {error.msg} — expected a Python script") from error
    names: dict[str, ast.expr] = {}
    imported: dict[str, str] = {}
    defined: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = value
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                imported |= {alias.asname or alias.name: f"{module}:{alias.name}" for alias in aliases}
            case ast.Import(names=aliases):
                imported |= {alias.asname or alias.name: alias.name for alias in aliases}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
    given: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given |= _arguments(node, names)
    return Foreign("TRL", given, file, names, imported, frozenset(defined))


def _arguments(node: ast.Call, names: Mapping[str, ast.expr]) -> dict[str, Any]:
    """Return the arguments of a call of a trainer or its configuration, by name; of other calls none."""
    called = ast.unparse(node.func).rpartition(".")[2]
    if called not in _ORDER:
        return {}
    ordered = _ORDER[called]
    given = {
        ordered[number] if number < len(ordered) else f"{called} argument {number}": _value(one, names)
        for number, one in enumerate(node.args)
    }
    for keyword in node.keywords:
        if keyword.arg is None:
            given[f"**{ast.unparse(keyword.value)}"] = Expression(ast.unparse(keyword.value))
        else:
            given[keyword.arg] = _value(keyword.value, names)
    given.pop("args", None)
    return given


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


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each line of a shell script, with the variables that the script itself gives."""
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
        full = []
        for word in map(filled, words):
            full.append(word)
            if (variable := _VARIABLE.match(word)) is not None:
                variables[variable[1]] = variable[2]
        yield full


def _overrides(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of verl's overrides."""
    for words in _commands(text):
        for override in map(_OVERRIDE.match, words):
            if override is not None:
                yield override[1], _plain(override[2])


_OF_PARSER = ("config", "env")
"""Options that are no arguments of the trainer."""
_LISTS = ("reward_funcs", "lora_target_modules", "report_to", "reward_weights")
_ENDS = re.compile(r"^(\||\|\||&&?|;|\d?>.*|\$@)$")


def _options(file: Path, text: str) -> Foreign | None:
    """Read `trl grpo` and its options, or a YAML file of them; None where there is neither."""
    if file.suffix in (".yaml", ".yml"):
        given = _yaml_options(file, text)
        return _as_script(file, given) if given.keys() & TRL.keys() else None
    for words in _commands(text):
        begins = next((n for n in range(len(words)) if _is_grpo(words[: n + 1])), None)
        if begins is not None:
            given = _read_options(words[begins + 1 :])
            config = given.get("config")
            if isinstance(config, str):
                beside = next((one for one in (file.parent / config, Path(config)) if one.is_file()), None)
                if beside is None:
                    raise UserError(f"{file}: --config {config}: there is no such file, here or beside it")
                given = _yaml_options(beside, beside.read_text(encoding="utf-8")) | given
            return _as_script(file, {key: value for key, value in given.items() if key not in _OF_PARSER})
    return None


def _is_grpo(words: list[str]) -> bool:
    """Tell the end of `trl grpo`, or of `python …/trl/scripts/grpo.py`."""
    return [word.rpartition("/")[2] for word in words[-2:]] == ["trl", "grpo"] or (
        words[-1].endswith(("trl/scripts/grpo.py", "trl.scripts.grpo"))
    )


def _yaml_options(file: Path, text: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{file}: {error} — expected YAML with TRL's options, or verl's overrides") from error
    own = value.items() if isinstance(value, dict) else ()
    return {str(key): _plain(one) if isinstance(one, str) else one for key, one in own if key not in _OF_PARSER}


def _read_options(words: list[str]) -> dict[str, Any]:
    """Read `--key value …`, `--key=value`, `--flag` and `--no_flag`, up to the end of the command."""
    given: dict[str, list[Any]] = {}
    key = ""
    for word in words:
        if _ENDS.match(word):
            break
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            given[key] = [_plain(value)] if equals else []
        elif key:
            given[key].append(_plain(word))
    found: dict[str, Any] = {}
    for key, values in given.items():
        if not values:
            found |= {key[3:]: False} if key.startswith("no_") and key[3:] in TRL else {key: True}
        else:
            found[key] = values if key in _LISTS or len(values) > 1 else values[0]
    return found


def _as_script(file: Path, given: dict[str, Any]) -> Foreign:
    """Make of options what `trl grpo` makes of them: the arguments of a trainer."""
    derived: dict[str, Any] = {"model": given["model_name_or_path"]} if "model_name_or_path" in given else {}
    init = {key: given[key] for key in ("dtype", "attn_implementation") if given.get(key) is not None}
    derived |= {"model_init_kwargs": init} if init else {}
    imported, functions = {}, list[str]()
    if given.get("reward_model_name_or_path"):
        functions.append(repr(given["reward_model_name_or_path"]))
    listed = given.get("reward_funcs") or []
    for name in [listed] if isinstance(listed, str) else listed:
        module, dot, word = str(name).rpartition(".")
        imported[word] = f"{module if dot else 'trl.rewards'}:{word}"
        punishes = word == "get_soft_overlong_punishment"
        functions.append(f"{word}(max_completion_len=1280, soft_punish_cache=256)" if punishes and not dot else word)
    derived |= {"reward_funcs": Expression(f"[{', '.join(functions)}]")} if functions else {}
    if given.get("dataset_name"):
        parts = [repr(given["dataset_name"])] + [repr(given[key]) for key in ("dataset_config",) if given.get(key)]
        for key, split, usual in (
            ("train_dataset", "dataset_train_split", "train"),
            ("eval_dataset", "dataset_test_split", "test"),
        ):
            if key == "train_dataset" or given.get("eval_strategy", "no") not in ("no", False):
                derived[key] = Expression(f"load_dataset({', '.join(parts)}, split={given.get(split, usual)!r})")
    if given.get("use_peft"):
        usual_lora = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": None}
        own = {**usual_lora, **{key: value for key, value in given.items() if "lora" in key or key == "use_dora"}}
        names = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
        words = [f"{names.get(key, key.removeprefix('lora_'))}={value!r}" for key, value in own.items()]
        derived["peft_config"] = Expression(f"LoraConfig({', '.join(words)})")
    return Foreign("TRL", given, file, imported=imported, derived=derived)


def _plain(text: str) -> Any:
    """The value of an override, as Hydra would read it."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def shown(value: Any) -> str:
    """Write a value in one line, as YAML."""
    if isinstance(value, Expression):
        return " ".join(str(value).split())
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    # In a comment it has one line.
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text
