"""Plug-ins are imported inside the worker, and checked against their declaration."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from distflow.errors import PluginError
from distflow.flow.imported_step import check_step
from distflow.flow.recipe_check import check_imports, plan_recipe
from distflow.flow.resolve import check_call, find_named, resolve


def test_modules_and_files_are_resolved(tmp_path: Path) -> None:
    import json

    (tmp_path / "p.py").write_text("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\n")
    assert resolve("json:dumps") is json.dumps
    assert resolve(f"{tmp_path}/p.py:A")().x == 1
    assert resolve(f"{tmp_path}/p.py:A") is resolve(f"{tmp_path}/p.py:A")


@pytest.mark.parametrize(
    "call, message",
    [
        ("json:dumbs", "has no 'dumbs'; did you mean 'dumps'"),
        ("no_such_module_at_all:x", "module 'no_such_module_at_all' cannot be imported"),
        ("/nowhere/p.py:x", "there is no file /nowhere/p.py"),
        ("nothing", "expected module:name"),
    ],
)
def test_plugins_that_do_not_exist(call: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        resolve(call)


def test_a_training_script_is_not_proposed_for_its_parts(tmp_path: Path) -> None:
    """To import it would train."""
    for name in ("grpo.py", "rewards_2.py"):
        (tmp_path / name).write_text("def brief(completions): ...\n")
    with pytest.raises(PluginError, match=r"grpo_parts\.py — write it, with 'brief' and what it needs of grpo\.py"):
        find_named(f"{tmp_path}/grpo_parts.py:brief")
    with pytest.raises(PluginError, match=r"no file .*rewards_3\.py; did you mean .*rewards_2\.py\?"):
        find_named(f"{tmp_path}/rewards_3.py:brief")


@pytest.mark.parametrize(
    "call, cure",
    [
        ("trl.rewards:accuracy_reward", r"install trl .* take \{function: math\} with data\.fields\.answer=solution"),
        ("trl.rewards:think_format_reward", r"take \{function: format, pattern: '<think>"),
        ("trl.rewards:other_reward", r"relative to the recipe\)$"),
    ],
)
def test_rewards_of_trl_without_trl(call: str, cure: str) -> None:
    if find_spec("trl") is not None:
        pytest.skip("trl is installed")
    with pytest.raises(PluginError, match=cure):
        find_named(call)


def test_a_file_that_raises_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(PluginError, match="importing .*broken.py raised ZeroDivisionError"):
            resolve(f"{tmp_path}/broken.py:f")


def test_signatures() -> None:
    def fine(sample: object, *, scale: float = 1.0) -> float: ...

    check_call("x:fine", fine, ("sample",), ("scale",))
    with pytest.raises(PluginError, match=r"x:fine has the wrong signature .* expected \(prompt, response\)"):
        check_call("x:fine", fine, ("prompt", "response"), ())


def test_a_step_hidden_by_another_decorator_is_found_out(folder) -> None:
    plan = plan_recipe(folder.recipe)[1]
    for step in plan.steps:
        check_step(resolve(step.call), step)
    with pytest.raises(PluginError, match="lacks @step"):
        check_step(lambda batch, ctx: batch, plan.steps[0])
    with pytest.raises(PluginError, match="was imported with a declaration that differs from its source"):
        check_step(resolve(plan.steps[1].call), plan.steps[0])


def test_deep_validation_imports_everything(folder) -> None:
    loaded, plan = plan_recipe(folder.recipe)
    assert check_imports(plan, loaded.origin) == []
    folder.write("late.py", "from distflow import step\nimport no_such_module_at_all\n" + _step("late"))
    folder.write("swapped.py", "from distflow import step\n" + _step("swapped") + "swapped = 3\n")
    loaded, plan = plan_recipe(
        folder.recipe, ["flow.steps.late.call=./late.py:late", "flow.steps.swapped.call=./swapped.py:swapped"]
    )
    problems = check_imports(plan, loaded.origin)
    assert [problem.key for problem in problems] == ["flow.steps.late.call", "flow.steps.swapped.call"]
    assert "ModuleNotFoundError" in problems[0].message
    assert "is a int, not a function" in problems[1].message


def _step(name: str) -> str:
    return f"@step(role='score', reads=['response_ids'], writes=['{name}'])\ndef {name}(batch, ctx): ...\n"


def test_deep_validation_checks_functions_that_settings_name(folder) -> None:
    folder.write(
        "mine.py", "from functools import partial\ndef f(a, b): ...\ng = partial(f)\ndef h(sample): ...\nh = f\n"
    )
    loaded, plan = plan_recipe("quickstart", [f"flow.steps.reward.with.function={folder.path}/mine.py:h"])
    problems = check_imports(plan, loaded.origin)
    assert [problem.key for problem in problems] == ["flow.steps.reward.with.function"]
    assert "wrong signature (a, b)" in problems[0].message


TOP_LEVEL = """
import json
from statistics import *
train, (test, *rest) = [1], [2, 3]
typed: list[int] = [4]
bare: int
if (size := len(train)) > 2:
    guarded = size
else:
    def chosen(completions, **kwargs): return []
with open(__file__) as opened:
    read = opened.read()
for number in range(2):
    last = number
try:
    from nowhere import imported
except ImportError:
    imported = None
if __name__ == "__main__":
    late = Judge()
def inner():
    hidden = 1
"""


@pytest.mark.parametrize(
    "name",
    ["train", "test", "rest", "typed", "size", "guarded", "chosen", "opened", "read", "number", "last", "imported"],
)
def test_all_statements_of_the_top_level_define(tmp_path: Path, name: str) -> None:
    (tmp_path / "script.py").write_text(TOP_LEVEL)
    lines = [n for n, line in enumerate(TOP_LEVEL.splitlines(), 1) if name in line]
    assert find_named(f"{tmp_path}/script.py:{name}").where in [f"{tmp_path}/script.py:{n}" for n in lines]


def test_a_star_brings_what_its_module_has(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TOP_LEVEL)
    assert find_named(f"{tmp_path}/script.py:median").where == f"{tmp_path}/script.py:3"
    (tmp_path / "beside.py").write_text("def mine(sample): return 1.0\n")
    (tmp_path / "other.py").write_text("from beside import *\n")
    assert find_named(f"{tmp_path}/other.py:mine").where == f"{tmp_path}/other.py:1"
    with pytest.raises(PluginError, match="defines no 'yours'"):
        find_named(f"{tmp_path}/other.py:yours")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("late", r"defines 'late' behind `if __name__ == \"__main__\":` alone"),
        *(
            ("hidden", r"defines no 'hidden' .*allowed: chosen, guarded"),
            ("bare", r"defines no 'bare'.*read, rest, size"),
        ),
        ("trian", r"did you mean 'train'\?"),
    ],
)
def test_what_an_import_does_not_define_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "script.py").write_text(TOP_LEVEL)
    with pytest.raises(PluginError, match=message):
        find_named(f"{tmp_path}/script.py:{name}")
