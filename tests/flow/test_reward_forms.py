"""Reward functions of TRL's and verl's form in recipes: what `validate` knows of them without importing, and what they
make of the data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.data.order import PromptOrder, PromptSettings, SourceUse
from distflow.data.sources import PromptText
from distflow.errors import PluginError, RecipeError
from distflow.flow.recipe_check import check_imports, plan_recipe
from distflow.flow.resolve import resolve
from distflow.flow.reward_form import check_reward, find_signature, mistaken_form
from distflow.runtime.owner_side import prompt_order, uses_of
from tests.data.test_responses import Chat

FUNCTIONS = """
raise RuntimeError("validate must not import this")
import functools
from elsewhere import imported

def trl(completions, solution, level=1, *, scale=1.0, **kwargs): return []
def closed(completions, solution): return []
def compute_score(data_source, solution_str, ground_truth, extra_info, strict): return 1.0
def batched(data_sources, solution_strs, ground_truths, extra_infos): return []
def two(one, other): return 1.0

class Judge:
    def __call__(self, prompts, completions, gold, **kwargs): return []

judge = Judge()
bound = functools.partial(trl, solution=["1"])
made = imported()
"""


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., object]:
    (tmp_path / "r.py").write_text(FUNCTIONS)

    def plan(function: str, *overrides: str) -> object:
        given = function.replace("r.py", str(tmp_path / "r.py"))
        (tmp_path / "r.yaml").write_text(
            f"defaults: [quickstart, _self_]\nflow: {{steps: {{reward: {{with: {{function: {given}}}}}}}}}\n"
        )
        return plan_recipe(str(tmp_path / "r.yaml"), overrides)[1]

    return plan


@pytest.mark.parametrize(
    "function",
    [
        *("r.py:trl", "r.py:closed", "r.py:judge", "r.py:bound", "r.py:made", "r.py:imported"),
        "{a: {function: 'r.py:trl', weight: 2, any: 1}, b: {function: 'r.py:compute_score', strict: true}}",
    ],
)
def test_they_are_known_by_their_source(planned: Callable[..., object], function: str) -> None:
    planned(function)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("r.py:compute_score", "strict — r.py:8: required, but not given — write it beside `function`"),
        ("r.py:batched", "it takes solution_strs, as functions of verl's reward manager `batch` do"),
        (
            "{a: {function: 'r.py:closed', scael: 1.0}}",
            "function.a.scael — r.py:7: unknown setting — allowed:",
        ),
        ("{a: {function: 'r.py:trl', weigth: 0.5}}", "a.weigth — r.py:6: unknown setting — did you mean 'weight'?"),
        ("{a: {function: 'r.py:judge', funtion: math}}", "unknown setting — did you mean 'function'?"),
        ("r.py:two", "'two' has the wrong signature (one, other) — expected def two(sample)"),
        ("r.py:missing", "defines no 'missing' at its top level"),
    ],
)
def test_what_cannot_be_called_is_told_by_name(
    planned: Callable[..., object], tmp_path: Path, function: str, message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        planned(function)
    assert message in str(caught.value).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("function", "columns", "prompts"),
    [
        *(("r.py:trl", {"solution"}, True), ("r.py:judge", {"gold"}, True), ("r.py:bound", set(), True)),
        *(("r.py:made", set(), True), ("math", set(), False)),
        ("{a: {function: 'r.py:trl', solution: x}, b: {function: 'r.py:closed'}}", {"solution"}, True),
    ],
)
def test_what_they_need_of_the_data(
    planned: Callable[..., object], function: str, columns: set[str], prompts: bool
) -> None:
    uses = uses_of(planned(function))
    assert (set(uses.columns), uses.prompts) == (columns, prompts)


def order(rows: list[object], uses, *, chat: bool = False) -> PromptOrder:
    tokenizer = Chat("chars:0123456789abcdefghijklmnopqrstuvwxyz <>=:")
    return prompt_order([SourceUse(rows)], tokenizer, PromptSettings(0, False, chat, 99), uses)


def test_the_prompt_of_a_conversation_goes_into_the_task_as_messages(planned: Callable[..., object]) -> None:
    uses, turns = uses_of(planned("r.py:made")), [{"role": "user", "content": "1"}]
    given = order([{"prompt": turns, "x": 1}, {"prompt": "2", "x": 2}, PromptText("3", {}, turns)], uses, chat=True)
    tasks = [json.loads(given.prompt(position).task) for position in range(3)]
    assert tasks == [{"x": 1, "prompt": turns}, {"x": 2}, {"prompt": turns}], "a text stays a text with data.chat"
    without = order([{"prompt": turns, "x": 1}], uses_of(planned("math", "data.chat=false"))._replace(needs={}))
    assert json.loads(without.prompt(0).task) == {"x": 1}, "nobody asks for it"


def test_a_column_that_the_data_lacks_is_told_before_anything_is_generated(planned: Callable[..., object]) -> None:
    uses = uses_of(planned("r.py:trl"))
    with pytest.raises(ValueError, match=r"no column 'solution', with which reward .*r\.py:trl is called; there are x"):
        order([{"prompt": "1", "x": 1}], uses).prompt(0)
    assert order([{"prompt": "1", "solution": None}], uses).prompt(0).task == '{"solution": null}'


def test_a_data_set_of_the_module_is_a_source(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "dataset = [{'prompt': f'{n}=', 'answer': str(n)} for n in range(9)]\n"
        "def longest(completions, **kwargs): return [len(text) for text in completions]\n"
    )
    given = [f"data.source={path}:dataset", f"flow.steps.reward.with.function={path}:longest"]
    loaded, plan = plan_recipe("quickstart", given)
    assert check_imports(plan, loaded.origin) == []
    with pytest.raises(ValueError, match=r"data\.with — .*script\.py:1 makes the data set itself, which takes no"):
        plan_recipe("quickstart", [*given, "+data.with.size=3"])


@pytest.mark.parametrize(
    ("parameters", "renamed"),
    [
        ("data_source, solution, ground_truth, extra_info=None", {"solution": "solution_str"}),
        ("data_source, solution_str, gt, extra_info=None", {"gt": "ground_truth"}),
        ("data_source, solution_str, ground_truth, extra", {"extra": "extra_info"}),
        ("data_source, solution_str, target, extra_info=None", {"target": "ground_truth"}),
        (
            "source, solution_str, groundtruth, *, info",
            {"source": "data_source", "groundtruth": "ground_truth", "info": "extra_info"},
        ),
        ("prompt, completion, **kwargs", {"prompt": "prompts", "completion": "completions"}),
        ("completion, answer", {"completion": "completions"}),
    ],
)
def test_names_that_are_nearly_those_of_another_tool_are_told(
    tmp_path: Path, parameters: str, renamed: dict[str, str]
) -> None:
    (tmp_path / "mine.py").write_text(f"def a({parameters}):\n    return 1.0\n")
    call = f"{tmp_path}/mine.py:a"
    found = find_signature(call)
    assert found is not None
    complaint = mistaken_form(found, ())
    assert complaint is not None
    told = " and ".join(f"`{name}` to `{meant}`" for name, meant in renamed.items())
    assert complaint[2].startswith(f"rename {told}: these functions are called by keyword, with ")
    with pytest.raises(RecipeError, match=re.escape(f"rename {told}")):
        plan_recipe("quickstart", (f"flow.steps.reward.with.function={call}",))
    with pytest.raises(PluginError, match=re.escape(f"rename {told}")):
        check_reward(call, resolve(call), ())


@pytest.mark.parametrize(
    ("parameters", "own"),
    [
        ("sample, answer", ("answer",)),
        ("completion", ()),
        ("solution_str, ground_truth", ()),
        ("data_source, solution_str, ground_truth, extra", ("extra",)),
        ("completions, prompt, **kwargs", ()),
    ],
)
def test_what_can_be_called_is_not_taken_for_a_mistake(tmp_path: Path, parameters: str, own: tuple[str, ...]) -> None:
    (tmp_path / "mine.py").write_text(f"def a({parameters}):\n    return 1.0\n")
    found = find_signature(f"{tmp_path}/mine.py:a")
    assert found is not None
    assert mistaken_form(found, own) is None
