"""Configurations of other tools as they are read: TRL's scripts, options and YAML, and verl's overrides.

Nothing of them is executed: a script is known by its syntax tree alone.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from distflow.config.script import Expression, value_of
from distflow.config.script_values import plain
from distflow.config.script_walk import read_script
from distflow.config.shell import Command, commands_of, unknown_in
from distflow.config.trl_keys import TRL
from distflow.errors import UserError


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
    unread: Mapping[str, str] = field(default_factory=dict)
    """Keys that are no arguments of the tool's, with what is to be said of them."""
    parses: bool = False
    """A script that takes the tool's configuration from a command line that is not known."""

    def expression(self, key: str) -> ast.expr | None:
        """Return the expression that a script gives for an argument, with a name that stands for one replaced by it."""
        value = self.derived.get(key, self.given.get(key))
        if value is None:
            return None
        node = ast.parse(str(value) if isinstance(value, Expression) else repr(value), mode="eval").body
        while isinstance(node, ast.Name) and isinstance(
            self.names.get(node.id), ast.List | ast.Tuple | ast.Dict | ast.BinOp
        ):
            node = self.names[node.id]
        return self._joined(node)

    def _joined(self, node: ast.expr) -> ast.expr:
        """Return the list that a sum is of which one part is a list; else the expression."""
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
            return node
        parts = [self._joined(self.made_by(one) or one) for one in (node.left, node.right)]
        if not any(isinstance(one, ast.List | ast.Tuple) for one in parts):
            return node
        whole = zip(parts, (node.left, node.right), strict=True)
        elements = [one.elts if isinstance(one, ast.List | ast.Tuple) else [ast.Starred(side)] for one, side in whole]
        return ast.List([one for part in elements for one in part], ast.Load())

    def made_by(self, node: ast.expr | None) -> ast.expr | None:
        """Return the expression that a name stands for, or the node itself."""
        depth = 0
        while isinstance(node, ast.Name) and node.id in self.names and depth < 8:
            node, depth = self.names[node.id], depth + 1
        return node

    def value(self, node: ast.expr) -> Any:
        """Return the literal that an expression is, or a name of the script stands for; else the expression."""
        return value_of(node, self.names)


_EXPECTED = (
    "expected a Python script (.py) that calls GRPOConfig(…) or GRPOTrainer(…), a shell script that runs one or `trl "
    "grpo --OPTION VALUE …`, its options as YAML, or a list or shell script with verl's overrides, such as "
    "data.train_batch_size=256"
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
        commands = list(commands_of(text, file.parent))
        found = _options(file, text, commands) or _overrides(file, commands)
    if not found.given:
        for name, flow in _OTHER_TRAINERS.items():
            if re.search(rf"\b{name}(Config|Trainer)\b|\btrl {name.lower()}\b", text):
                told = f"begin with flow={flow} (docs/algorithms.md, docs/supervised.md)"
                raise UserError(f"{file}: only GRPO of TRL is converted, and this is for {name}Trainer — {told}")
        raise UserError(f"{file}: nothing to convert — {_EXPECTED}")
    return found


def _script(file: Path, text: str, options: Mapping[str, Any] | None = None) -> Foreign:
    """Read a script; `options`: those that it is given on its command line."""
    try:
        tree = ast.parse(text, filename=str(file))
    except SyntaxError as error:
        raise UserError(f"{file}:{error.lineno}: {error.msg} — expected a Python script") from error
    options = dict(options or {})
    found = read_script(tree, options)
    if found.several:
        lines = ", ".join(f"line {line}" for line in found.several)
        told = f"{len(found.several)} trainers or configurations are made ({lines})"
        raise UserError(f"{file}: {told} — leave one of them, in a copy of the script")
    own = {
        key: value
        for key, value in options.items()
        if key in found.own or not found.parses or not (found.parsed or _OTHER_CLASSES.match(key))
    }
    given = {key: value for key, value in options.items() if key not in own} | found.given
    if _is_parsed(given.get("peft_config")):
        given["peft_config"] = _as_script(file, options).derived.get("peft_config")
    given |= {f"--{key}": value for key, value in own.items()}
    return Foreign(
        *("TRL", given, file, found.names, found.imported, frozenset(found.defined)),
        unread=found.unread | dict.fromkeys((f"--{key}" for key in own), _OWN_OPTION),
        parses=found.parses and not options,
    )


_OTHER_CLASSES = re.compile(
    r"(lora_|use_peft|use_dora|use_rslora|load_in_|model_name|model_revision|dataset_|reward_|torch_dtype|dtype|attn_|trust_)"
)
"""Options that are not of GRPOConfig."""
_OWN_OPTION = "an option of the script's own, whose value stands where the script uses it"


def _is_parsed(value: Any) -> bool:
    """Tell what TRL makes of the options for an adapter."""
    return isinstance(value, Expression) and value.text.rpartition(".")[2].startswith("get_peft_config(")


_OVERRIDE = re.compile(r"^([+~]{0,2})([A-Za-z_]\w*(?:[.@/][\w@/]+)*)(?:=(.*))?$", re.S)
_SAME = re.compile(r"\$\{([\w.]+\.\w+)\}")
"""What has the value of another key."""
_ENVIRONMENT = re.compile(r"\$\{(\w+)\}")
_TRAINS = re.compile(r"(?:.*[./])?main_(?!eval|gen)\w+(?:\.py)?|verl(?:\.trainer\.(?!main_)\w+)?")
"""Words by which verl is started to train."""
_NO_RUN = ("echo", "printf", "cat", "grep", "tee", "ps", "pgrep", "pkill", "#", ":", "true", "false")
_CONFIGS = {"--config-path": "path", "-cp": "path", "--config-dir": "path", "-cd": "path"}
_CONFIGS |= {"--config-name": "name", "-cn": "name"}
_OWN_CONFIGS = ("ppo_trainer", "_self_", "/ppo_trainer")
"""Configurations of verl's own, whose defaults are known here."""


def _only(file: Path, found: list[tuple[int, Foreign]]) -> Foreign | None:
    """Return the one that trains. Raises UserError for several."""
    if len(found) > 1:
        lines = ", ".join(f"line {line}" for line, _ in found)
        raise UserError(f"{file}: {len(found)} commands train ({lines}) — leave one of them, in a copy of the script")
    return found[0][1] if found else None


def _overrides(file: Path, commands: list[Command]) -> Foreign:
    """Read verl's overrides: those of the command that trains, or a list."""
    runs = list[tuple[int, Foreign]]()
    for command in commands:
        at = next((n for n, word in enumerate(command.words) if _TRAINS.fullmatch(word)), None)
        if at is not None and command.words[0] not in _NO_RUN:
            words = list(zip(command.words, command.lines, strict=True))[at + 1 :]
            runs.append((command.line, _run_of_verl(file, words)))
    listed = [
        (word, line)
        for command in commands
        if _is_override(command.words[0]) or command.words[0].startswith("$")
        for word, line in zip(command.words, command.lines, strict=True)
        if _is_override(word) or word.startswith("$")
    ]
    run = _only(file, runs)
    if run is not None or not any(_is_override(word) for word, _ in listed):
        return run or Foreign("verl", {}, file)
    return _run_of_verl(file, listed)


def _is_override(word: str) -> bool:
    found = _OVERRIDE.match(word)
    return found is not None and found[3] is not None and "." in found[2]


def _run_of_verl(file: Path, words: list[tuple[str, int]]) -> Foreign:
    """Read what a command gives verl, and the YAML that it names."""
    given, unread = dict[str, Any](), dict[str, str]()
    configs, rest = dict[str, str](), list[tuple[str, int]]()
    option = ""
    for word, line in words:
        name, _, value = word.partition("=")
        if option:
            configs[option], option = word, ""
        elif name in _CONFIGS:
            option = "" if value else _CONFIGS[name]
            configs |= {_CONFIGS[name]: value} if value else {}
        else:
            rest.append((word, line))
    if configs:
        _read_config(file, configs, given, unread)
    for word, line in rest:
        override = _OVERRIDE.match(word)
        if override is not None and "~" in override[1]:
            given[f"~{override[2]}"] = Expression("…")
            unread[f"~{override[2]}"] = (
                f"line {line}: takes the key out of verl's configuration: see what stands for it"
            )
            given.pop(override[2], None)
        elif override is not None and override[3] is not None:
            _give(given, unread, override[2], override[3], f"line {line}", file)
        elif unknown := unknown_in(word):
            given[word] = Expression("…")
            unread[word] = f"{_ungiven(unknown, f'line {line}', file)}; overrides may be among it"
    return Foreign("verl", given, file, unread=unread)


def _give(given: dict[str, Any], unread: dict[str, str], key: str, value: str, where: str, file: Path) -> None:
    """Add an override, whose value is that of another key or is not known where it holds `${…}`."""
    unread.pop(key, None)
    given[key] = _plain(value)
    if (same := _SAME.fullmatch(value)) is not None and same[1] in given:
        given[key] = given[same[1]]
    elif unknown := unknown_in(value):
        given[key], unread[key] = Expression(value), _ungiven(unknown, where, file)


def _read_config(file: Path, configs: Mapping[str, str], given: dict[str, Any], unread: dict[str, str]) -> None:
    """Read the YAML that `--config-path` and `--config-name` name, or say that it is not read."""
    name, path = configs.get("name", "ppo_trainer"), configs.get("path", "")
    beside = _beside(file, f"{path or '.'}/{name.removesuffix('.yaml')}.yaml")
    if beside is None:
        key = f"--config-name={name}" if "name" in configs else f"--config-path={path}"
        given[key] = Expression("…")
        where = f"{path}/{name}.yaml" if path else f"{name}.yaml"
        unread[key] = f"verl's configuration {where} is neither here nor beside {file.name}: its keys are not read"
        if name in _OWN_CONFIGS and not path:
            given.pop(key), unread.pop(key)
        return
    own = _yaml_options(beside, beside.read_text(encoding="utf-8"))
    defaults = own.pop("defaults", None) or []
    for one in defaults:
        if one not in _OWN_CONFIGS:
            given[f"defaults: {shown(one)}"] = Expression("…")
            unread[f"defaults: {shown(one)}"] = f"a configuration that {beside.name} is made of, and that is not read"
    own.pop("hydra", None)
    for key, value in _flat(own):
        if isinstance(value, str):
            _give(given, unread, key, value, beside.name, file)
        else:
            given[key] = value


def _flat(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys and values of nested sections; those of functions' own settings, too."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _ungiven(unknown: list[str], where: str, file: Path) -> str:
    """Say what is to be done about variables and commands without a value."""
    named = [name for name in unknown if name.isidentifier()]
    cure = f", or convert with it: {' '.join(f'{name}=…' for name in named)} distflow convert {file.name}"
    what = f"{where}: {', '.join(unknown)} has no value that the script tells"
    return f"{what}: write what it is{cure if named else ''}"


_OF_PARSER = ("config", "env")
"""Options that are no arguments of the trainer."""
_LISTS = ("reward_funcs", "lora_target_modules", "report_to", "reward_weights")
_REDIRECTS = re.compile(r"\d?>")
"""What begins with it is no option: commands end before."""


def _options(file: Path, text: str, commands: list[Command]) -> Foreign | None:
    """Read `trl grpo` and its options, or a YAML file of them; None where there is neither."""
    if file.suffix in (".yaml", ".yml"):
        given = _yaml_options(file, text)
        return _as_script(file, given) if given.keys() & TRL.keys() else None
    found = list[tuple[int, Foreign]]()
    for command in commands:
        words = list(command.words)
        begins = next((n for n in range(len(words)) if _is_grpo(words[: n + 1])), None)
        if words[0] in _NO_RUN:
            continue
        if begins is not None:
            own, unread = _with_config(file, command, begins + 1)
            found.append((command.line, replace(_as_script(file, own), unread=unread)))
        elif (launched := _launched(file, command)) is not None:
            found.append((command.line, launched))
    return _only(file, found)


def _with_config(file: Path, command: Command, begins: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Read options, and the YAML that `--config` names; with what is to be said of those that are not known.

    Raises UserError for a file that is not there.
    """
    unread, words = dict[str, str](), list[str]()
    for before, word in zip(command.words[begins - 1 :], command.words[begins:], strict=False):
        if word.startswith("$") and unknown_in(word) and ("=" in before or not before.startswith("--")):
            unread[word] = f"{_ungiven(unknown_in(word), f'line {command.line}', file)}; options may be among it"
        else:
            words.append(_ENVIRONMENT.sub(r"${oc.env:\1}", word))
    given = _read_options(words)
    for key, value in given.items():
        if unknown := unknown_in(re.sub(r"\$\{oc\.env:\w+\}", "", str(value))):
            given[key] = Expression(str(value))
            unread[key] = _ungiven(unknown, f"line {command.line}", file)
    config = given.get("config")
    if isinstance(config, str):
        beside = _beside(file, config)
        if beside is None:
            raise UserError(f"{file}: --config {config}: there is no such file, here or beside it")
        given = _yaml_options(beside, beside.read_text(encoding="utf-8")) | given
    given |= {key: Expression("…") for key in unread if key not in given}
    return {key: value for key, value in given.items() if key not in _OF_PARSER or key in unread}, unread


def _beside(file: Path, name: str) -> Path | None:
    return next((one for one in (file.parent / name, Path(name)) if one.is_file()), None)


_STARTERS = ("accelerate", "torchrun", "python", "python3", "deepspeed", "uv", "distributed.run")
_PROCESSES = ("num_processes", "nproc_per_node", "num_gpus")
_BACKENDS = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp"}


def _launched(file: Path, command: Command) -> Foreign | None:
    """Read the script for TRL that a command runs, with its options and those of what launches it."""
    words = list(command.words)
    at = next((n for n, word in enumerate(words) if word.endswith(".py")), None)
    starts = [word for word in words[:at] if re.sub(r"[\d.]+$", "", word.rpartition("/")[2]) in _STARTERS]
    script = _beside(file, words[at]) if at is not None and starts else None
    if at is None or not starts:
        return None
    options, unread = _with_config(file, command, at + 1)
    if script is None:
        if options.keys() & TRL.keys():
            raise UserError(f"{file}: {words[at]}, which it runs, is neither here nor beside it")
        return None
    found = _script(script, script.read_text(encoding="utf-8"), options)
    if not found.given:
        return None
    given = {**found.given, **_launcher(file, words[:at])}
    if isinstance(config := given.get("config_file"), Expression):
        unread["config_file"] = (
            f"{config} is neither here nor beside {file.name}: its processes, and its DeepSpeed or FSDP, are not read"
        )
    return replace(found, given=given, unread={**found.unread, **unread})


def _launcher(file: Path, words: list[str]) -> dict[str, Any]:
    """Read how many processes there are, and what divides the model: from options, and accelerate's own file."""
    given = _read_options(words)
    config = given.get("config_file")
    beside = _beside(file, config) if isinstance(config, str) else None
    if beside is not None:
        own = _yaml_options(beside, beside.read_text(encoding="utf-8"))
        zero = own.get("deepspeed_config")
        given = {**own, **({"zero_stage": zero.get("zero_stage")} if isinstance(zero, dict) else {}), **given}
    found: dict[str, Any] = {"config_file": Expression(config)} if isinstance(config, str) and beside is None else {}
    each = next((given[key] for key in _PROCESSES if isinstance(given.get(key), int)), None)
    if each is not None:
        nodes = given.get("nnodes", 1) if "num_processes" not in given else 1
        found["num_processes"] = each * (nodes if isinstance(nodes, int) else 1)
    kind = str(given.get("distributed_type", "")).upper()
    kind = next((name for name in _BACKENDS if name in kind or given.get(f"use_{name.lower()}") is True), kind)
    found |= {"distributed_type": kind} if kind else {}
    if kind == "DEEPSPEED" and isinstance(given.get("zero_stage"), int):
        found["zero_stage"] = given["zero_stage"]
    return found


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
        if _REDIRECTS.match(word):
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
    init = {key: given[key] for key in ("dtype", "torch_dtype", "attn_implementation") if given.get(key) is not None}
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
        return plain(" ".join(str(value).split()))
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    # In a comment it has one line.
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text
