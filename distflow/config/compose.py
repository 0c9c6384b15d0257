"""Composition: a recipe file, the groups it chooses, and overrides become one mapping whose values know their origin.

Hydra decides what is composed (defaults list, config groups, grammar of overrides); laying the files over each other is
done here, because every value must remember the file and line that it came from. Interpolations (`${run.seed}`,
`${oc.env:HOME}`) are resolved last and once; afterwards a recipe is plain data.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distflow.config.defaults_list import DefaultsLists, misplaced
from distflow.config.layers import COMMAND_LINE, Layers, Origin
from distflow.config.paths import recipes_folder
from distflow.config.yamlfile import KeyPath, YamlFile, dotted, read_yaml, shown
from distflow.errors import Problem, RecipeError, did_you_mean, nearest

_SHIPPED, _OWN, _CHOSEN, _BY_COMMAND = 1, 1_000_000, 2_000_000, 3_000_000
"""Ranks of what is written in shipped files and in the user's, and in files that the command line chooses, all plus the
number of the file, and of the command line's own values."""

_QUOTED_KEY = re.compile(r"""[{,]\s*(["'])[^"']*\1\s*:""")
"""As in YAML, but Hydra's overrides have none."""


def compose(source: Path, overrides: Sequence[str], problems: list[Problem], *, resolved: bool = False) -> Layers:
    """Compose the recipe file `source` with overrides.

    `resolved`: it is a whole recipe, as kept in a run folder; a chosen group then replaces its section. Overrides that
    cannot be applied are added to `problems` and left out; raises RecipeError if nothing is left to compose.
    """
    composer = _Composer(source, problems, resolved=resolved)
    try:
        return composer.compose(overrides)
    except RecipeError as error:
        raise RecipeError([*problems, *error.problems]) from error


def _values_apart(overrides: Sequence[str]) -> set[int]:
    """Find the keys whose values follow as words of their own: `batch.prompts 8`."""
    keys = [re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", text) is not None for text in overrides]
    alone = [
        not key and "=" not in text and not text.startswith("~") for key, text in zip(keys, overrides, strict=True)
    ]
    return {number for number, key in enumerate(keys[:-1]) if key and alone[number + 1]}


def listed_values(listed: str) -> list[str]:
    """The values that are listed: parted at commas, except those within brackets or quotes."""
    found, depth, quote = [""], 0, ""
    for letter in listed:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += letter
    return [value.strip() for value in found]


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Overrides by what they do."""

    groups: list[Override]
    values: list[Override]


class _Lists(FileConfigSource):  # type: ignore[misc]
    """Hydra's files, of which it gets what says how they are composed: the header, and the defaults list."""

    def __init__(self, provider: str, path: str, read: Callable[[Path], YamlFile]) -> None:
        super().__init__(provider, path)
        self._read = read

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        value = self._read(path).value
        return ConfigResult(
            config=OmegaConf.create({"defaults": value["defaults"]} if "defaults" in value else {}),
            path=f"file://{self.path}",
            provider=self.provider,
            header=self._get_header_dict(path.read_text(encoding="utf-8")[:512]),
        )


class _Composer:
    def __init__(self, source: Path, problems: list[Problem], *, resolved: bool) -> None:
        self.source = source
        self.resolved = resolved
        self.problems = problems
        self.roots = [source.parent, recipes_folder()]
        self.files: dict[Path, YamlFile] = {}
        self.lists = DefaultsLists(source, self.roots, self._file)
        self.replaced: set[KeyPath] = set()
        version.setbase("1.3")
        Plugins.instance()  # registers the sources that files can be read from
        search_path = ConfigSearchPathImpl()
        search_path.append(provider="schema", path="structured://")
        self.repository = ConfigRepository(config_search_path=search_path)
        roots = [_Lists("distflow", f"file://{root}", self._file) for root in dict.fromkeys(self.roots)]
        self.repository.sources[:0] = roots

    def compose(self, overrides: Sequence[str]) -> Layers:
        self._check_primary(self._file(self.source))
        if wrong := self.lists.check():
            raise RecipeError(wrong)
        chosen = self._sort(self._parse(overrides))
        layers = Layers()
        by_command = {f"{group.key_or_group}/{group.value()}" for group in chosen.groups}
        composed = self._defaults(chosen.groups)
        for number, default in enumerate(composed.defaults):
            self._lay_file(layers, default, number, by_command)
        for override in chosen.values:
            self._lay_override(layers, override)
        self._leave_out_settings(layers, composed.overrides.known_choices.get("flow"))
        for key, origin, there in layers.unremoved:
            message = "null removes it, and there is none of this name"
            self.problems.append(Problem(origin.where, dotted(key), message, did_you_mean(key[-1], there)))
        return layers

    def _file(self, path: Path) -> YamlFile:
        if path not in self.files:
            self.files[path] = read_yaml(path)
        return self.files[path]

    def _check_primary(self, file: YamlFile) -> None:
        if "defaults" not in file.value:
            return
        defaults = file.value["defaults"]
        where = file.where(("defaults",))
        if not isinstance(defaults, list):
            raise RecipeError([Problem(where, "defaults", "expected a list", "for example [quickstart, _self_]")])
        if file.path.stem in defaults:
            hint = "give this file another name"
            raise RecipeError([Problem(where, "defaults", f"{file.path.stem!r} names this very file", hint)])

    # --- overrides

    def _parse(self, overrides: Sequence[str]) -> list[Override]:
        parser = OverridesParser.create()
        parsed = []
        apart = _values_apart(overrides)
        for number, text in enumerate(overrides):
            if number - 1 in apart:
                continue  # the value of the key before it
            if number in apart:
                self._refuse(text, "a key and its value are one word", f"{text}={overrides[number + 1]}")
                continue
            try:
                override = parser.parse_override(text)
            except HydraException:
                hint = "expected KEY=VALUE; quote values with spaces, commas or brackets: 'KEY=\"a, b\"'"
                hint += "; keys within braces stand without quotes" if _QUOTED_KEY.search(text) else ""
                self._refuse(text, "cannot be read as an override", hint)
                continue
            if override.is_sweep_override():
                hint = "give one value; write a list as KEY=[a,b], text with a comma as 'KEY=\"a,b\"'"
                self._refuse(text, "several values for one key", hint)
            elif override.package is not None and not self._is_group(override):
                group = override.key_or_group
                self._refuse(text, f"there is no group {group!r}", did_you_mean(group, self.lists.groups()))
            elif self._is_group(override) and (why := misplaced(override.key_or_group, override.package, "=NAME")):
                self._refuse(text, *why)
            else:
                parsed.append(override)
        return parsed

    def _refuse(self, key: str, message: str, hint: str) -> None:
        self.problems.append(Problem(COMMAND_LINE, key, message, hint))

    def _is_group(self, override: Override) -> bool:
        return bool(self.repository.group_exists(override.key_or_group))

    def _sort(self, overrides: Sequence[Override]) -> _Sorted:
        groups = [o for o in overrides if self._is_group(o) and isinstance(o.value(), str | None)]
        values = [o for o in overrides if o not in groups]
        # Naming another function drops the settings of the previous one, so it is applied before settings.
        values.sort(
            key=lambda o: o.key_or_group.rpartition(".")[2] not in ("call", "source", "engine", "backend", "path")
        )
        settled = list[Override]()
        # A choice may bring others with it: `flow=ppo model@models.critic=mine`.
        for group in sorted(groups, key=lambda o: o.package is not None):
            if self._settle(group, self._defaults(list(settled)).overrides.known_choices):
                settled.append(group)
        return _Sorted(settled, values)

    def _settle(self, group: Override, present: Mapping[str, Any]) -> bool:
        """Add, change or (`~GROUP`, or null) take back a choice; False if there is none to take back."""
        key = group.key_or_group if group.package is None else f"{group.key_or_group}@{group.package}"
        if not group.is_delete() and group.value() is not None:
            group.type = OverrideType.CHANGE if key in present else OverrideType.ADD
            return True
        group.type = OverrideType.DEL
        if key not in present:
            self._refuse(key, "cannot be removed: nothing chooses it", did_you_mean(key, present))
        return key in present

    def _lay_override(self, layers: Layers, override: Override) -> None:
        key = tuple(override.key_or_group.split("."))
        origin = Origin(COMMAND_LINE, Path.cwd(), _BY_COMMAND)
        if not override.is_delete():
            layers.lay({key[-1]: _text_keys(override.value())}, lambda _: origin, key[:-1])
        elif not layers.delete(key, origin):
            hint = did_you_mean(key[-1], layers.keys(key[:-1]))
            self._refuse(dotted(key), "cannot be removed: there is no such key", hint)

    def _leave_out_settings(self, layers: Layers, flow: str | None) -> None:
        """Remove what is set of steps that the chosen flow lacks, as `quickstart flow=sft` has no `sample`.

        Shipped recipes may, so that any flow can be chosen for them; what users write is refused.
        """
        steps = ("flow", "steps")
        calls = [name for name in layers.keys(steps) if "call" in layers.keys((*steps, name))]
        for name in [name for name in layers.keys(steps) if name not in calls]:
            key = (*steps, name)
            newest = max(layers.given(key), key=lambda origin: origin.rank)
            keys = layers.keys(key)
            if newest.rank < _OWN:
                layers.delete(key)
            elif flow is not None and keys and nearest("call", keys) is None:
                layers.delete(key)
                near = nearest(name, calls, 0.8)
                hint = f"did you mean {near!r}? " if near is not None else ""
                hint += f"{dotted(key)}=null removes what is set of it; or give its `call`"
                self.problems.append(Problem(newest.where, dotted(key), f"flow {flow} has no step {name!r}", hint))

    # --- files

    def _defaults(self, groups: list[Override]) -> DefaultsList:
        try:
            with warnings.catch_warnings():
                # Without `_self_` the file itself goes on top: Hydra's warning about that is of no use here.
                warnings.simplefilter("ignore", UserWarning)
                return create_defaults_list(
                    repo=self.repository,
                    config_name=self.source.stem,
                    overrides_list=groups,
                    prepend_hydra=False,
                    skip_missing=False,
                )
        except MissingConfigException as error:
            raise RecipeError([self._missing(error, groups)]) from error
        except (ConfigCompositionException, OmegaConfBaseException, ValueError, AssertionError) as error:
            raise RecipeError([self.lists.failed(error)]) from error
        except RecursionError as error:
            raise RecipeError([Problem(shown(self.source), "defaults", "these files include each other")]) from error

    def _missing(self, error: MissingConfigException, groups: Sequence[Override]) -> Problem:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        by_command = any(o.value() == option and o.key_or_group == group for o in groups)
        return self.lists.missing(group, option, COMMAND_LINE if by_command else shown(self.source))

    def _lay_file(self, layers: Layers, default: ResultDefault, number: int, by_command: set[str]) -> None:
        assert default.config_path is not None, "Hydra returned a default without a file"
        path = self.lists.find(default.config_path)
        assert path is not None, f"Hydra found {default.config_path}, the search path does not"
        file = self._file(path)
        package = tuple(default.package.split(".")) if default.package else ()
        if self.resolved and package and package not in self.replaced:
            self.replaced.add(package)  # once: a group may be several files, one including another
            layers.delete(package)
        content = {key: value for key, value in file.value.items() if key != "defaults"}
        rank = _SHIPPED if path.is_relative_to(recipes_folder()) else _OWN
        rank = number + (_CHOSEN if default.config_path in by_command else rank)
        layers.lay(content, lambda key: Origin(file.where(key), path.parent, rank), package)


def _text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _text_keys(item) for key, item in value.items()}
    return [_text_keys(item) for item in value] if isinstance(value, list) else value


def resolve_interpolations(layers: Layers, problems: list[Problem]) -> dict[str, Any]:
    """The values without interpolations; what cannot be resolved is added to `problems` and left out."""
    if "${" not in str(layers.values) and "???" not in str(layers.values):
        return layers.values
    config = OmegaConf.create(layers.values)
    return _Resolver(layers, problems).mapping(config, ())


class _Resolver:
    def __init__(self, layers: Layers, problems: list[Problem]) -> None:
        self.layers = layers
        self.problems = problems

    def mapping(self, node: DictConfig, at: KeyPath) -> dict[str, Any]:
        found = ((str(key), self._values(node, key, (*at, str(key)))) for key in node)
        return {key: value for key, values in found for value in values}

    def _values(self, node: DictConfig | ListConfig, key: Any, at: KeyPath) -> Iterator[Any]:
        """The value under `key`, or nothing if it cannot be resolved."""
        if OmegaConf.is_missing(node, key):
            self._problem(at, "required, but not given", f"give it on the command line: {dotted(at)}=…")
            return
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            self._problem(at, *_words(error))
            return
        if isinstance(value, DictConfig):
            yield self.mapping(value, at)
        elif isinstance(value, ListConfig):
            yield [v for index in range(len(value)) for v in self._values(value, index, (*at, str(index)))]
        else:
            yield value

    def _problem(self, at: KeyPath, message: str, hint: str) -> None:
        origin = self.layers.origin(at)
        assert origin is not None, f"{dotted(at)} has no origin"
        self.problems.append(Problem(origin.where, dotted(at), message, hint))


def _words(error: OmegaConfBaseException) -> tuple[str, str]:
    text = str(error).splitlines()[0]
    variable = re.search(r"Environment variable '(.+?)' not found", text)
    if variable:
        name = variable[1]
        return f"the environment variable {name} is not set", f"set it, or give a default: ${{oc.env:{name},VALUE}}"
    return f"the interpolation cannot be resolved: {text}", "name another key of the recipe, as in ${run.seed}"
