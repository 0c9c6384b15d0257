"""The pages tell the truth: links, commands, options, keys and settings exist; complete files validate."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import click
import pytest

from distflow.config.check import key_of, section_at
from distflow.config.schema import Recipe
from distflow.config.section import Section
from distflow.config.starts import start_files
from distflow.flow.chosen_function import chosen_function
from distflow.flow.recipe_check import check_imports, plan_recipe
from distflow.flow.step import of_runtime
from distflow.flow.step_declaration import read_declaration
from distflow.launch.cli import COMMANDS, group

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# file: (\S+)\n")
MAX_LINES = 300


def page_id(page: Path) -> str:
    return page.name


def prose(page: Path) -> str:
    """The page without its fenced code."""
    return FENCE.sub("", page.read_text())


def files_in(page: Path) -> dict[str, str]:
    """Complete files that a page shows: fenced code that begins with `# file: NAME`."""
    code = [match[2] for match in FENCE.finditer(page.read_text())]
    return {match[1]: text for text in code if (match := FILE.match(text))}


def commands_in(page: Path) -> list[str]:
    """Every `distflow …` of a page: lines of indented code, and code within a line."""
    text = prose(page)
    lines = re.findall(r"^    (distflow .*)$", text, re.M)
    spans = re.findall(r"`(distflow [^`]*)`", text)
    return [*lines, *(span.replace("\n", " ") for span in spans)]


def complete_commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Recipe and overrides of commands without placeholders, options left out."""
    for command in commands_in(page):
        words = shlex.split(command)
        placeholder = re.search(r"…|\[[A-Z-]|\b(NAME|RECIPE)\b", command)
        if words[1] in ("launch", "plan", "validate", "simulate") and placeholder is None and len(words) > 2:
            given = [(before, word) for before, word in pairwise(words[2:]) if "=" in word or word.startswith("~")]
            if words[1] == "simulate" or "--optimize" in words:
                given = [(before, word) for before, word in given if not before.startswith("--")]
            # Of a sweep, the first run.
            yield words[2], [word.partition(",")[0] if before == "--sweep" else word for before, word in given]


@pytest.fixture
def extracted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All complete files of all pages, and those of `distflow init`, in a folder that is the current one."""
    for name, text in start_files("arithmetic", "sums").items():
        (tmp_path / name).write_text(text)
    for page in PAGES:
        for name, text in files_in(page).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose(target), re.M)
            anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{page.name}: {link}: {target.name} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_and_options_are_known(page: Path) -> None:
    found = commands_in(page)
    assert found, f"{page.name} shows no command"
    for text in found:
        words = shlex.split(re.sub(r"[\[\]|]", " ", text))[1:]
        assert words[0] in COMMANDS, text
        command = group.get_command(click.Context(group), words[0])
        assert command is not None, text
        if isinstance(command, click.Group):
            command = command.commands[words[1]]
        known = {name for option in command.params for name in option.opts} | {"-h", "--help"}
        assert {word for word in words if re.match(r"--?[a-z]", word)} <= known, text


def test_the_readme_names_every_command() -> None:
    shown = {shlex.split(text.replace("[", " "))[1] for text in commands_in(ROOT / "README.md")}
    assert shown == set(COMMANDS)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        named = re.findall(r"(?:`|^    )make ([a-z0-9-]+)", page.read_text(), re.M)
        assert set(named) <= targets, page.name


def test_shown_recipes_can_be_planned_and_imported(extracted: Path) -> None:
    recipes = [name for page in PAGES for name, text in files_in(page).items() if "\ndefaults:" in text]
    assert len(recipes) >= 5
    for name in recipes:
        loaded, plan = plan_recipe(name)
        assert [str(problem) for problem in check_imports(plan, loaded.origin)] == [], name


def test_shown_commands_can_be_planned(extracted: Path) -> None:
    commands = [command for page in PAGES for command in complete_commands(page)]
    assert len(commands) >= 12
    for recipe, overrides in commands:
        plan_recipe(recipe, overrides, need_files=False)


def test_shown_scripts_are_what_is_rendered(extracted: Path) -> None:
    from distflow.flow.script import render_script
    from distflow.types import WorkerName

    shown = [m[2] for page in PAGES for m in FENCE.finditer(page.read_text()) if m[2].startswith("def script(w)")]
    rendered = [
        render_script(plan_recipe("quickstart", overrides)[1], WorkerName.parse(worker)).partition("\n\n\n")[2]
        for worker, overrides in (
            ("rollout/0", []),
            ("rollout/0", ["layout=services"]),
            ("reward/0", ["layout=services"]),
            ("trainer/0", []),
            ("worker/0", ["layout=colocated"]),
            ("trainer/0", ["flow=sft"]),
        )
    ]
    assert shown == rendered


def test_the_test_that_is_shown_passes(extracted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(extracted)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    spec = importlib.util.spec_from_file_location("shown_test", extracted / "test_own.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.test_equal_rewards_are_dropped()
    monkeypatch.delitem(sys.modules, "own")


def leaves(at: str, section: type[Section]) -> Iterator[tuple[str, str, str]]:
    """Key, default and text of every value of the schema; names of the user's are NAME."""
    for name, field in section.model_fields.items():
        key = f"{at}{key_of(section, name)}"
        below = section_at((*key.split("."),)) or section_at((*key.split("."), "NAME"))
        if below is not None and not key.endswith((".each", "val.data")):
            named = "" if section_at((*key.split("."),)) is not None else "NAME."
            yield from leaves(f"{key}.{named}", below)
            continue
        yield key, _default(field.is_required(), field.default), " ".join((field.description or "").split())


def _default(required: bool, value: object) -> str:
    if required:
        return "required"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


def test_the_reference_lists_every_key() -> None:
    text = "".join((ROOT / "docs" / page).read_text() for page in ("recipes.md", "models.md", "validation.md"))
    rows = set(re.findall(r"^\| `((?:run|batch|flow|layout|models|data|val|limits|weights|security)\..*)$", text, re.M))
    expected = {f"{key}` | {default} | {meaning} |" for key, default, meaning in leaves("", Recipe)}
    assert rows == expected


def test_the_reference_lists_the_settings_of_shipped_steps() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    rows = re.findall(r"^\| `(distflow\.workers\.\w+:\w+)` \| (.*) \|$", text, re.M)
    assert len(rows) == 15
    for call, settings in rows:
        declaration = read_declaration(call)
        # Those that every generate step has stand with these.
        every = of_runtime(()) if declaration.spec.role == "generate" else ()
        declared = set(declaration.parameters.settings) - set(every)
        for setting in declaration.spec.arguments:
            for name in declaration.spec.choices[setting]:
                given = {setting: name.rpartition(":")[2]}
                function = chosen_function(declaration.spec, declaration.parameters, given)
                assert function is not None
                declared |= set(function.own.settings)
        if "as `advantage`" not in settings and settings != "none":
            assert set(re.findall(r"`(\w+)`", settings)) == declared, call


def test_files_that_the_page_on_the_architecture_names_exist() -> None:
    named = re.findall(
        r"`((?:distflow|workers|launch|recipes|tests)/[\w/.]+)`", (ROOT / "docs/architecture.md").read_text()
    )
    assert len(named) > 50
    assert [path for path in named if not (ROOT / path).exists()] == []
