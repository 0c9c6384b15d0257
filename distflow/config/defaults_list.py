"""Mistakes in `defaults` lists, each with the line of its entry: found before composing, or by what failed there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.config.schema import Recipe
from distflow.config.yamlfile import YamlFile
from distflow.errors import Problem, did_you_mean

_ENTRY = re.compile(r"^(?P<words>(?:(?:override|optional) )*)(?P<group>[^@\s]+)(?:@(?P<package>\S+))?$")
_SELF = "_self_"
_FORMS = "an entry is a recipe's name, `_self_`, or a choice: `- layout: async`"
_MODELS = "model"
"""The group whose files are sections of `models`."""


@dataclass(frozen=True, slots=True)
class DefaultsEntry:
    """One entry of a file's list: a recipe to include, or a choice of a group."""

    where: str
    group: str
    """From the root; empty for a recipe."""
    package: str | None
    option: str | None
    override: bool
    optional: bool

    @property
    def path(self) -> str:
        """What it names, from the root, without suffix."""
        return f"{self.group}/{self.option}" if self.group else str(self.option)

    @property
    def key(self) -> str:
        """As it is written in a file: `model@models.policy`."""
        return self.group if self.package is None else f"{self.group}@{self.package}"


class DefaultsLists:
    """The lists of a recipe and of all that it includes."""

    def __init__(self, source: Path, roots: Sequence[Path], read: Callable[[Path], YamlFile]) -> None:
        self._source = source
        self._roots = roots
        self._read = read

    def find(self, config_path: str) -> Path | None:
        """The file of a name such as `layout/async`."""
        names = (root / f"{config_path}.yaml" for root in self._roots)
        return next((path for path in names if path.is_file()), None)

    def groups(self) -> set[str]:
        """All groups that can be chosen from."""
        return {path.parent.name for root in self._roots for path in root.glob("*/*.yaml")}

    def missing(self, group: str, option: str, where: str) -> Problem:
        """A problem with a name of which there is no file."""
        known = {path.stem for root in self._roots for path in (root / group).glob("*.yaml")}
        known.discard(self._source.stem if not group else "")
        what = f"there is no {group} {option!r}" if group else f"there is no recipe {option!r}"
        return Problem(where, group or "defaults", what, did_you_mean(option, known))

    def check(self) -> list[Problem]:
        """Everything that the lists themselves tell."""
        return [problem for file, group in self._files() for problem in self._problems(file, group)]

    def failed(self, error: Exception) -> Problem:
        """What kept valid lists from being composed."""
        where = self._read(self._source).where(("defaults",))
        twice = re.match(r"Multiple values for (\S+)\. |(\S+) appears more than", str(error))
        if twice:
            key = twice[1] or twice[2]
            hint = f"to replace an included choice write `- override /{key}: NAME` at the end of `defaults`"
            return Problem(self._last(key) or where, "defaults", f"{key} is chosen twice", hint)
        unused = re.search(r"Could not override '([^']+)'", str(error))
        if unused:
            hint = f"write `- {unused[1]}: NAME`, without `override`"
            message = f"nothing chooses {unused[1]} that could be overridden"
            return Problem(self._last(unused[1]) or where, "defaults", message, hint)
        lines = str(error).strip().splitlines()
        return Problem(where, "defaults", lines[0] if lines else "cannot be composed", "see docs/recipes.md")

    def _last(self, key: str) -> str | None:
        """The place of the last entry with a key, in the first file that has one."""
        for file, group in self._files():
            places = [entry.where for entry in _sound(_entries(file, group)) if entry.key == key]
            if places:
                return places[-1]
        return None

    def _files(self) -> Iterator[tuple[YamlFile, str]]:
        """The recipe's file and all that it includes, each once, with the group that they are in."""
        pending, seen = [(self._source, "")], set[Path]()
        while pending:
            path, group = pending.pop(0)
            if path in seen:
                continue
            seen.add(path)
            file = self._read(path)
            yield file, group
            for entry in _sound(_entries(file, group)):
                found = None if entry.option is None else self.find(entry.path)
                if found is not None:
                    pending.append((found, entry.path.rpartition("/")[0]))

    def _problems(self, file: YamlFile, group: str) -> Iterator[Problem]:
        entries = list(_entries(file, group))
        for index, entry in enumerate(entries):
            if isinstance(entry, Problem):
                yield entry
                continue
            before, behind = (_sound(part) for part in (entries[:index], entries[index + 1 :]))
            # `_self_` may stand anywhere.
            if entry.override and any(not other.override and other.option != _SELF for other in behind):
                message = f"`override {entry.key}` stands before other choices"
                yield Problem(entry.where, "defaults", message, "move it to the end of `defaults`")
            if any((other.key, other.path, other.override) == (entry.key, entry.path, False) for other in before):
                yield Problem(entry.where, "defaults", f"{entry.option!r} is listed twice", "remove one of the two")
            yield from self._problems_of(entry, in_group=bool(group))

    def _problems_of(self, entry: DefaultsEntry, *, in_group: bool) -> Iterator[Problem]:
        if entry.option is None or entry.option == _SELF or "${" in entry.path:
            return
        if entry.group and not entry.optional and not any((root / entry.group).is_dir() for root in self._roots):
            message = f"there is no group {entry.group!r}"
            yield Problem(entry.where, entry.group, message, did_you_mean(entry.group, self.groups()))
        elif self.find(entry.path) is None and not entry.optional:
            group, _, name = entry.path.rpartition("/")
            yield self.missing(group, name, entry.where)
        elif not in_group and (why := misplaced(entry.group, entry.package, f": {entry.option}")):
            yield Problem(entry.where, entry.key, *why)


def misplaced(group: str, package: str | None, choice: str) -> tuple[str, str] | None:
    """Message and hint if a choice of a group, such as `: tiny`, goes nowhere in a recipe."""
    if group == _MODELS and (package is None or package == "models"):
        return "it is not said which model this is", f"name it: {_MODELS}@models.policy{choice}"
    section = "" if package is None else package.split(".")[0]
    if section and section not in Recipe.model_fields and not section.startswith("_"):
        return f"a recipe has no section {section!r}", did_you_mean(section, Recipe.model_fields)
    return None


def _entries(file: YamlFile, group: str) -> Iterator[DefaultsEntry | Problem]:
    """The entries of a file in a group, or what is wrong with them."""
    given = file.value.get("defaults")
    for index, value in enumerate(given if isinstance(given, list) else []):
        where = file.where(("defaults", str(index)))
        if isinstance(value, str):
            yield _entry(where, "", value, group)
        elif isinstance(value, dict) and len(value) == 1 and isinstance(next(iter(value.values())), str | None):
            ((key, option),) = value.items()
            yield _entry(where, str(key), option, group)
        else:
            yield Problem(where, "defaults", f"{_brief(value)} is no entry", _FORMS)


def _entry(where: str, key: str, option: str | None, group: str) -> DefaultsEntry | Problem:
    if not key:
        name, _, package = str(option).partition("@")
        absolute = name[1:] if name.startswith("/") else f"{group}/{name}" if group and name != _SELF else name
        folder, _, stem = absolute.rpartition("/")
        return DefaultsEntry(where, folder, package or None, stem, override=False, optional=False)
    found = _ENTRY.match(key)
    if found is None:
        return Problem(where, "defaults", f"{key!r} is no group", _FORMS)
    named = found["group"]
    absolute = named[1:] if named.startswith("/") else f"{group}/{named}" if group else named
    words = found["words"].split()
    return DefaultsEntry(
        where, absolute, found["package"], option, override="override" in words, optional="optional" in words
    )


def _sound(entries: Iterable[DefaultsEntry | Problem]) -> list[DefaultsEntry]:
    return [entry for entry in entries if isinstance(entry, DefaultsEntry)]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
