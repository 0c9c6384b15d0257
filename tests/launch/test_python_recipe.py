"""Runs of what a script or a notebook has in hand: functions reach workers by their source."""

from __future__ import annotations

import functools
import json
import linecache
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import distflow
from distflow.errors import PluginError, UserError
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.resolve import resolve
from distflow.launch.python_recipe import Functions, write_recipe

ROWS = [{"prompt": "12=", "answer": "12"}, {"prompt": "7=", "answer": "7"}]


class Notebook:
    """Cells, each run in the same namespace, as IPython does it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", self.main)
        self._cells = 0

    def run(self, source: str) -> None:
        self._cells += 1
        name = f"<ipython-input-{self._cells}>"
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        exec(compile(source, name, "exec"), vars(self.main))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.main, name)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    return Notebook(monkeypatch)


def test_a_function_of_a_cell_brings_along_what_it_names(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("import math as m\nfrom functools import reduce\nWEIGHTS = {'digits': [1.0, 2.0]}\n")
    notebook.run(
        "class Scale:\n    by = 10.0\n    def up(self):\n        return self.by\n"
        "\ndef half(x):\n    return x / 2 if x > 1 else whole(x)\n"
    )
    notebook.run("def whole(x):\n    return half(x) if x > 1 else float(m.floor(x))\n")
    notebook.run(
        "def mine(sample, *, scale=Scale.by):\n"
        "    return scale * half(reduce(max, WEIGHTS['digits'])) + len(sample.response)\n"
    )
    functions = Functions(tmp_path / "functions.py")
    place = functions.place_of(notebook.mine)
    functions.write()
    assert place == f"{tmp_path}/functions.py:mine"
    there = resolve(place)

    class Sample:
        response = "abc"

    assert there(Sample) == notebook.mine(Sample) == 13.0
    assert there.__globals__ is not notebook.mine.__globals__


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("import threading\nlock = threading.Lock()\ndef mine(sample):\n    return lock\n", "uses lock, lock, which"),
        ("class A:\n    def mine(self, sample):\n        return 1.0\nmine = A().mine\n", "is no function at the top"),
        ("mine = lambda sample: 1.0\n", "is no function at the top"),
        ("mine = 3\n", "has no name by which workers could import it"),
    ],
)
def test_what_has_no_source_is_refused_by_name(notebook: Notebook, tmp_path: Path, cell: str, why: str) -> None:
    notebook.run(cell)
    with pytest.raises(UserError, match=why):
        Functions(tmp_path / "functions.py").place_of(notebook.mine)
    with pytest.raises(UserError, match="has no name by which"):
        Functions(tmp_path / "functions.py").place_of(functools.partial(math.floor, 1))


def test_functions_of_files_and_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    functions = Functions(tmp_path / "functions.py")
    assert functions.place_of(json.dumps) == "json:dumps"
    assert functions.place_of("math") == "math"
    (tmp_path / "beside.py").write_text("def mine(sample):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert functions.place_of(__import__("beside").mine) == f"{tmp_path}/beside.py:mine"
    assert functions.place_of("./beside.py:mine") == f"{tmp_path}/beside.py:mine"
    functions.write()
    assert not (tmp_path / "functions.py").exists(), "all have files"


def test_the_recipe_is_one_that_can_be_planned(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("def mine(sample):\n    return 1.0\n")
    settings = {"batch": {"prompts": 8, "samples_per_prompt": 2, "ledgers": 4}, "data": {"max_prompt_tokens": 8}}
    reward = [notebook.mine, "digits_copied"]
    file = write_recipe(tmp_path, model="tiny", data=ROWS, reward=reward, flow="dr_grpo", settings=settings)
    loaded, plan = plan_recipe(str(file), ["flow.steps.sample.with.max_new_tokens=4"])
    assert plan.batch.samples == 16
    assert [json.loads(line) for line in Path(str(loaded.recipe.data.source)).read_text().splitlines()] == ROWS
    (reward_step,) = (step for step in plan.steps if step.name == "reward")
    assert reward_step.settings["function"] == {
        "mine": {"function": f"{tmp_path}/functions.py:mine"},
        "digits_copied": {"function": "digits_copied"},
    }


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"model": "tiny"}, "expected a recipe, or both of model and data"),
        ({"recipe": "quickstart", "model": "tiny", "data": ROWS}, "expected a recipe, or both of model and data"),
        ({"recipe": "quickstart", "reward": "math"}, "reward and flow go with model and data"),
        ({"model": "tiny", "data": ["12="]}, "data: row 0 is str; expected a mapping"),
        ({"model": "tiny", "data": [{"prompt": "1=", "answer": math.nan}]}, "data: row 0 cannot be written as JSON"),
        ({"model": "tiny", "data": ROWS, "flow": "gprpo"}, "gprpo"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        distflow.launch(**given, runs_dir=str(tmp_path / "runs"))


def test_a_script_that_is_imported_for_its_functions_starts_no_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import distflow\n\ndef mine(sample):\n    return 1.0\n\ndistflow.launch('quickstart')\n"
    )
    with pytest.raises(PluginError, match=r"put what starts the run behind `if __name__ == \"__main__\":`"):
        resolve(f"{tmp_path}/mine.py:mine")
