"""Runs of what a script or a notebook has in hand: functions reach workers by their source."""

from __future__ import annotations

import json
import linecache
import math
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import distflow
from distflow.errors import PluginError, RecipeError, UserError
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.resolve import resolve
from distflow.launch.deploy.stop_run import stop_run
from distflow.launch.python_recipe import Functions, write_recipe
from tests.launch.conftest import FAKE, WAIT_S

ROWS = [{"prompt": "12=", "answer": "12"}, {"prompt": "7=", "answer": "7"}]


class Notebook:
    """Cells, each run in the same namespace, as IPython does it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", self.main)
        monkeypatch.setattr(linecache, "cache", {})
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


CELLS = """
import re
import threading
from functools import partial
PAT = re.compile(r"\\d+")
lock, (low, *high) = threading.Lock(), ("1", "2")
limits = {"most": float("inf")}
class Kw:
    def __init__(self, word): self.word = word
    def __call__(self, completions, **kwargs):
        return [float(self.word in PAT.findall(text)) for text in completions]
    def times(self, completions, **kwargs): return [5.0 for _ in completions]
def scaled(completions, factor=1.0, **kwargs):
    with lock: return [min(factor, limits["most"]) for _ in completions]
def make(word):
    def inner(completions, **kwargs): return Kw(word)(completions)
    return inner
kw = Kw("7")
kw = Kw("1")
kw.word = "2"
named = lambda completions, **kwargs: kw(completions)
twice = partial(scaled, factor=2.0)
several = [Kw("1"), scaled]
"""
CALLS = [
    ("kw", [1.0]),
    ("named", [1.0]),
    ("twice", [2.0]),
    ('Kw("1")', [0.0]),
    ("kw.times", [5.0]),
    ('make("2")', [1.0]),
    ("partial(scaled, factor=3.0)", [3.0]),
    ("lambda completions, **kwargs: [float(word in PAT.findall(high[0])) for word in completions]", [1.0]),
]


def places(reward: object, folder: Path) -> dict[str, str]:
    """What `distflow.launch` writes of its argument into a recipe, by name."""
    file = write_recipe(folder, model="tiny", data=ROWS, reward=reward, flow=None, settings={}, caller=sys._getframe(1))
    given = yaml.safe_load(file.read_text())["flow"]["steps"]["reward"]["with"]["function"]
    return {name: one["function"] for name, one in given.items()} if isinstance(given, dict) else {"": given}


@pytest.mark.parametrize(("written", "expected"), CALLS)
def test_what_a_cell_makes_is_made_anew_by_its_source(
    notebook: Notebook, tmp_path: Path, written: str, expected: list[float]
) -> None:
    notebook.main.places, notebook.main.folder = places, tmp_path
    notebook.run(CELLS)
    notebook.run(f"found = places(folder=folder,\n  reward={written})")
    assert resolve(notebook.found[""])(["2"]) == expected


@pytest.mark.parametrize(("written", "expected"), CALLS)
@pytest.mark.parametrize(
    "around",
    ["found = places(folder=folder, reward=[{}])", "def main():\n    global found\n    rewards = [{}]\n"
     "    found = places(\n        folder=folder, reward=rewards)\nmain()"],
)  # fmt: skip
def test_what_a_script_makes_is_made_anew_by_its_source(
    notebook: Notebook, tmp_path: Path, around: str, written: str, expected: list[float]
) -> None:
    text = CELLS + '\nif __name__ == "__main__":\n' + textwrap.indent(around.format(written), "    ") + "\n"
    (tmp_path / "script.py").write_text(text)
    notebook.main.places, notebook.main.folder = places, tmp_path
    notebook.main.__file__ = str(tmp_path / "script.py")
    exec(compile(text, notebook.main.__file__, "exec"), vars(notebook.main))
    (place,) = notebook.found.values()
    assert place.endswith(f"script.py:{written}") or "functions.py:" in place
    assert resolve(place)(["2"]) == expected


WEIGHED = """
import numpy as np
def first(completions, **kwargs): return [1.0 for _ in completions]
half = {"function": lambda completions, **kwargs: [2.0 for _ in completions], "weight": np.float32(0.5)}
"""


def test_rewards_by_name_have_weights_and_settings_as_in_a_recipe(notebook: Notebook, tmp_path: Path) -> None:
    notebook.main.write, notebook.main.sys = write_recipe, sys
    notebook.main.folder, notebook.main.rows = tmp_path, ROWS
    notebook.run(WEIGHED)
    notebook.run(
        "file = write(folder, model='tiny', data=rows, flow=None, settings={'batch': {'prompts': np.int64(4)}},\n"
        "  caller=sys._getframe(), reward={'a': {'function': first, 'scale': 2}, 'half': half, 'c': first,\n"
        "  'd': dict(weight=0, function=lambda completions, **kwargs: [3.0 for _ in completions]),\n"
        "  'math': {'weight': 2}})"
    )
    written = yaml.safe_load(notebook.file.read_text())
    given = written["flow"]["steps"]["reward"]["with"]["function"]
    rewards = {name: resolve(one.pop("function"))(["7"]) for name, one in given.items() if name != "math"}
    assert rewards == {"a": [1.0], "half": [2.0], "c": [1.0], "d": [3.0]}
    assert given == {"a": {"scale": 2}, "half": {"weight": 0.5}, "c": {}, "d": {"weight": 0}, "math": {"weight": 2}}
    assert written["batch"]["prompts"] == 4


TYPED = """
import distflow
from functools import partial
def mine(completions, **kwargs): return [1.0 for _ in completions]

def told(reward):
    try: distflow.launch(model="tiny", data=[{"prompt": "1=", "gold": "1"}], reward=reward)
    except ValueError as error:
        print(error.__cause__, str(error).replace("\\n", " "))

told(mine)
told(lambda sample: 1.0)
told({"a": {"function": partial(mine, scale=2), "weight": 0.5}})
"""


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="its prompt keeps the source")
def test_what_is_typed_at_the_prompt_is_refused_with_where_to_write_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=TYPED, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True
    )
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [["None", "reward:", name] for name in ("mine", "function", "mine")]
    assert all("Python keeps no source of what is typed at its prompt" in line for line in lines), done.stderr


def test_what_is_no_value_of_a_recipe_is_refused_by_its_key(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch": {"prompts": 8}, "run": {"trackers": [{"a": object()}]}}
    with pytest.raises(UserError, match=r"launch: run\.trackers\.0\.a is object; a recipe has text, numbers"):
        write_recipe(tmp_path, model="tiny", data=ROWS, reward=None, flow=None, settings=settings)
    with pytest.raises(UserError, match=r"launch: flow\.steps\.reward\.with\.function\.a\.weight is function"):
        write_recipe(
            tmp_path,
            model="tiny",
            data=ROWS,
            reward={"a": {"function": "math", "weight": places}},
            flow=None,
            settings={},
        )


def test_objects_of_one_class_are_told_apart(notebook: Notebook, tmp_path: Path) -> None:
    notebook.main.places, notebook.main.folder = places, tmp_path
    notebook.run(CELLS)
    notebook.run('found = places(folder=folder, reward=[Kw("1"), Kw("2"), scaled])')
    assert list(notebook.found) == ["Kw", "Kw_2", "scaled"]
    assert [resolve(notebook.found[name])(["2"]) for name in notebook.found] == [[0.0], [1.0], [1.0]]
    notebook.main.folder = tmp_path / "second"
    notebook.main.folder.mkdir()
    notebook.run("found = places(folder=folder, reward=several)")
    assert [resolve(place)(["1"]) for place in notebook.found.values()] == [[1.0], [1.0]]
    notebook.main.folder = tmp_path / "third"
    notebook.main.folder.mkdir()
    notebook.run('found = places(folder=folder, reward={"one": Kw("3"), "two": kw})')
    assert [resolve(notebook.found[name])(["2"]) for name in ("one", "two")] == [[0.0], [1.0]]


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("3", "3 is int — give a function"),
        ("[Kw(word) for word in '12']", "then `reward=mine`"),
        ("mine", "it uses unwritten, object, which cannot be sent"),
    ],
)
def test_what_has_no_source_is_refused_by_name(notebook: Notebook, tmp_path: Path, written: str, why: str) -> None:
    notebook.main.places, notebook.main.folder, notebook.main.unwritten = places, tmp_path, object()
    notebook.run(CELLS + "def mine(sample): return unwritten\n")
    with pytest.raises(UserError, match=why):
        notebook.run(f"places(folder=folder, reward={written})")


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


@pytest.mark.parametrize(
    ("batch", "ledgers"),
    [({"prompts": 1}, 1), ({"prompts": 12, "minibatches": 2}, 2), ({}, 8), ({"prompts": 6, "ledgers": 3}, 3)],
)
def test_ledgers_that_are_not_given_divide_the_prompts(tmp_path: Path, batch: dict[str, int], ledgers: int) -> None:
    settings = {"batch": batch}
    file = write_recipe(tmp_path, model="tiny", data=ROWS, reward="math", flow=None, settings=settings)
    assert plan_recipe(str(file))[1].recipe.batch.ledgers == ledgers


@pytest.mark.parametrize(
    ("settings", "in_notebook", "name"),
    [({}, False, "test_python_recipe"), ({}, True, "Small-1.5B"), ({"run": {"name": "mine"}}, False, "mine")],
)
def test_a_run_is_named_after_the_script_or_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any], in_notebook: bool, name: str
) -> None:
    if in_notebook:
        Notebook(monkeypatch).run("x = 1\n")
    frame = None if in_notebook else sys._getframe()
    model = "owner/Small 1.5B"
    file = write_recipe(tmp_path, model=model, data=ROWS, reward="math", flow=None, settings=settings, caller=frame)
    assert yaml.safe_load(file.read_text())["run"]["name"] == name


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
    ("given", "key", "expected"),
    [
        ({"data": "missing.jsonl"}, "data.source", "{here}/missing.jsonl"),
        ({"data": "sets/missing"}, "data.source", "{here}/sets/missing"),
        ({"data": "./parts.py:dataset"}, "data.source", "{here}/parts.py:dataset"),
        ({"data": "parts.py:dataset"}, "data.source", "{here}/parts.py:dataset"),
        ({"data": "../rows"}, "data.source", "{above}/rows"),
        ({"data": "hub:some/set"}, "data.source", "hub:some/set"),
        ({"data": "some.module:rows"}, "data.source", "some.module:rows"),
        ({"model": "./models/mine"}, "models.policy.path", "{here}/models/mine"),
        ({"model": "made/mine"}, "models.policy.path", "{here}/made/mine"),
        ({"model": "some/model"}, "models.policy.path", "some/model"),
        ({"reward": "./parts.py:mine"}, "flow.steps.reward.with.function", "{here}/parts.py:mine"),
        ({"reward": "parts.py:mine"}, "flow.steps.reward.with.function", "{here}/parts.py:mine"),
        ({"val": {"data": {"source": "held.jsonl"}}}, "val.data.source", "{here}/held.jsonl"),
        ({"run": {"copy_to": "second"}}, "run.copy_to", "{here}/second"),
        ({"run": {"copy_to": "${oc.env:HOME}/runs"}}, "run.copy_to", "${oc.env:HOME}/runs"),
    ],
)
def test_relative_files_are_of_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, Any], key: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    (tmp_path / "hidden").mkdir()
    named: dict[str, Any] = {"model": "tiny", "data": "rows.jsonl", "reward": None}
    named |= {name: given[name] for name in named if name in given}
    settings = {name: value for name, value in given.items() if name not in named}
    file = write_recipe(tmp_path / "hidden", **named, flow=None, settings=settings)
    found = yaml.safe_load(file.read_text())
    for name in key.split("."):
        found = found[name]
    assert found == expected.replace("{here}", str(tmp_path)).replace("{above}", str(tmp_path.parent))


def test_a_file_that_is_missing_is_told_as_it_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for given, told in (
        ({"data": "sets/missing.jsonl"}, "launch: data.source — there is no file or folder sets/missing.jsonl"),
        ({"data": "./parts.py:rows"}, "parts.py:rows: there is no file"),
    ):
        with pytest.raises(UserError, match=told) as raised:
            distflow.launch(model="tiny", runs_dir=tmp_path / "runs", **given)
        assert ".launched" not in str(raised.value)


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


def test_keywords_of_other_tools_are_told_all_at_once(tmp_path: Path) -> None:
    given = {
        "model": "tiny",
        "reward_funcs": len,
        "train_dataset": ROWS,
        "eval_dataset": ROWS,
        "args": object(),
        "num_generations": 4,
        "learning_rate": 1e-5,
        "processing_class": None,
        "output_dir": "here",
        "model_name_or_path": "tiny",
        "report_to": "wandb",
        "frobnicate": 1,
    }
    told = {
        "reward_funcs": "reward=…",
        "train_dataset": "data=…",
        "eval_dataset": 'val={"data": {"source": …}}',
        "args": "distflow convert FILE",
        "num_generations": "did you mean batch.samples_per_prompt?",
        "learning_rate": "did you mean models.policy.optimizer.lr?",
        "processing_class": "the tokenizer in the model's folder",
        "output_dir": "runs_dir=…",
        "model_name_or_path": "model=…",
        "report_to": "did you mean run.trackers.wandb=true?",
        "frobnicate": "allowed: batch, data, ",
    }
    with pytest.raises(RecipeError) as raised:
        distflow.launch(**given, runs_dir=str(tmp_path / "runs"))
    found = {problem.key: problem.hint for problem in raised.value.problems}
    assert list(found) == list(told)
    assert {key: told[key] for key in told if told[key] in found[key]} == told
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError, match=r"model is object; .* give a folder or a hub's id; model.save_pretrained"):
        distflow.launch(model=object(), data=ROWS)


def test_a_script_that_is_imported_for_its_functions_starts_no_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import distflow\n\ndef mine(sample):\n    return 1.0\n\ndistflow.launch('quickstart')\n"
    )
    with pytest.raises(PluginError, match=r"put what starts the run behind `if __name__ == \"__main__\":`"):
        resolve(f"{tmp_path}/mine.py:mine")


def test_a_module_that_is_imported_for_its_functions_starts_no_run(tmp_path: Path) -> None:
    """A module run by `python -m` goes to workers by its name in its package, which imports it once more."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "train.py").write_text(
        "import pathlib, distflow\nfrom distflow.flow.resolve import resolve\n"
        "from distflow.launch.python_recipe import Functions\n\ndef mine(sample):\n    return 1.0\n\n"
        "if __name__ == '__main__':\n    place = Functions(pathlib.Path('functions.py')).place_of(mine)\n"
        "    print(place, flush=True)\n    resolve(place)\ndistflow.launch('no-such-recipe')\n"
    )
    run = [sys.executable, "-m", "pack.train"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "pack.train:mine\n"
    assert "distflow.launch was called while pack.train was imported" in done.stderr


CHANGES = """
import logging
class Vec:
    def __init__(self): self.known = []
    def fit(self, words): self.known += words
    def __call__(self, completions, **kwargs): return [float(text in self.known) for text in completions]
def setup(one): one.known.append("2")
def show(one): print(one)
vec, still, late = Vec(), Vec(), Vec()
def by_vec(completions, **kwargs): return vec(completions)
"""


@pytest.mark.parametrize(
    ("statements", "reward", "told"),
    [
        ("vec.fit(['2'])", "vec", "`vec.fit(['2'])`"),
        ("for word in '12':\n    vec.fit([word])", "by_vec", "`vec.fit([word])`"),
        ("setup(vec)", "vec", "`setup(vec)`"),
        ("setattr(vec, 'known', ['2'])", "[by_vec]", "`setattr(vec, 'known', ['2'])`"),
        ("print(vec); len(vec.known); logging.warning('%s', vec)", "vec", ""),
        ("found = vec(['2'])\nvec.known = ['2']", "vec", ""),
        ("still.fit(['2'])\nshow(by_vec)\nvec = Vec()", "by_vec", ""),
    ],
)
@pytest.mark.parametrize("script", [False, True])
def test_calls_that_workers_do_not_make_are_told(
    notebook: Notebook, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    statements: str, reward: str, told: str, script: bool
) -> None:  # fmt: skip
    notebook.main.places, notebook.main.folder = places, tmp_path
    launching = f"found = places(folder=folder, reward={reward})\nvec.fit(['later'])"
    if not script:
        notebook.run(CHANGES)
        notebook.run(statements)
        notebook.run(launching)
    else:
        main = textwrap.indent(f"{statements}\n{launching}", "    ")
        text = f"{CHANGES}\nfill = Vec()\nfill.fit(['2'])\nif __name__ == '__main__':\n{main}\n"
        (tmp_path / "script.py").write_text(text)
        notebook.main.__file__ = str(tmp_path / "script.py")
        exec(compile(text, notebook.main.__file__, "exec"), vars(notebook.main))
        told = "" if "by_vec" in reward else told  # by its file; nothing is said of what functions there read
    said = capfd.readouterr().err
    notes = [line for line in said.splitlines() if line.startswith("note: ")]
    assert len(notes) == bool(told), said
    assert not told or (told in notes[0] and notes[0].startswith("note: vec is made anew in each worker, without "))


FAKES = ["layout.pools.worker.backend=distflow.testing.fakes:FakeBackend",
         "layout.pools.worker.engine=distflow.testing.fakes:FakeEngine"]  # fmt: skip


@pytest.fixture
def cells(notebook: Notebook, tmp_path: Path) -> Iterator[Notebook]:
    """A notebook with `launch(**more)`, by which fake workers train two steps; what still runs is stopped."""
    notebook.main.start = {"model": "tiny", "data": ROWS, "runs_dir": tmp_path, "worker_entry": FAKE}
    notebook.main.overrides = [*FAKES, "layout.pools.worker.backend_options={fake: {steps: 2}}"]
    notebook.run(f"import distflow\n{CELLS}")
    yield notebook
    for path in tmp_path.glob("*/run.json"):
        stop_run(path.parent, timeout_s=0.0)


LAUNCH = """
run = distflow.launch(**{**start, **more}, overrides=overrides, run="mine",
    reward=[kw, Kw("1"), lambda completions, **kwargs: [4.0]])
"""


def test_a_call_is_resumed_by_the_same_call(cells: Notebook, tmp_path: Path) -> None:
    cells.main.more = {}
    cells.run(LAUNCH)
    cells.main.run.wait(timeout=WAIT_S)
    (file,) = tmp_path.glob(".launched/*/functions.py")
    recipe = yaml.safe_load((file.parent / "recipe.yaml").read_text())
    found = recipe["flow"]["steps"]["reward"]["with"]["function"]
    assert [resolve(one["function"])(["2"]) for one in found.values()] == [[1.0], [0.0], [4.0]]

    other_rows = [*ROWS, {"prompt": "3=", "answer": "3"}]
    for more, told in (
        ({"data": other_rows}, "the rows are others"),
        ({"batch": {"prompts": 16}, "flow": "dr_grpo"}, r"batch.prompts was 8, is 16; .*recipe_as_written=True"),
    ):
        cells.main.more = {**more, "resume": True}
        with pytest.raises(UserError, match=f"mine was launched by another call: .*{told}"):
            cells.run(LAUNCH)
    cells.main.more = {"resume": True}
    with pytest.raises(UserError, match="mine was launched by another call: functions are others"):
        cells.run(LAUNCH.replace("4.0", "5.0"))

    cells.main.overrides = [*cells.main.overrides, "limits.drain_s=7"]
    cells.run(LAUNCH)
    cells.main.run.wait(timeout=WAIT_S)
    assert cells.main.run.path == tmp_path / "mine"
    assert yaml.safe_load((tmp_path / "mine" / "recipe.yaml").read_text())["limits"]["drain_s"] == 7
    assert [*tmp_path.glob(".launched/*")] == [file.parent], "what was refused or went on leaves nothing"


def test_a_refused_call_leaves_nothing(tmp_path: Path) -> None:
    for more, told in (({"overrides": ["run.no_such_key=1"]}, "no_such_key"), ({"reward": 3}, "give a function")):
        with pytest.raises(UserError, match=told):
            distflow.launch(model="tiny", data=ROWS, runs_dir=tmp_path / "new" / "runs", **more)
    assert not [*tmp_path.iterdir()]
