"""Gold answers as tables have them, what gives them, and rows that have none."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from distflow.config.data_schema import SourceConfig
from distflow.data.gold import as_written, gives, gold_answers, needed_by
from distflow.data.loading import open_source
from distflow.data.order import PromptOrder, PromptSettings, SourceUse
from distflow.data.responses import Reading
from distflow.errors import UserError
from distflow.flow.recipe_check import plan_recipe
from distflow.runtime.owner_side import uses_of
from distflow.types import Completion
from distflow.workers.reward_functions import REWARDS
from distflow.workers.supervised import demonstration
from distflow.workers.tokenizers import CharTokenizer

TOKENIZER = CharTokenizer("chars:0123456789=.truefalsn")
NEEDS = {"answer": "exact_match"}


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (11.0, ["11", " 11\n", "11.0", "1.1e1"], ["1", "011", "110", "11,0", "eleven", "", "nan"]),
        (11, ["11", "11.0"], ["11.5", "12", "+11"]),
        (-0.0, ["0", "-0.0"], ["1"]),
        (0.1, ["0.1", "0.10", "1e-1"], ["0.1000001", ".2"]),
        (1e20, ["100000000000000000000", "1e20", "1E+20"], ["1", "10", "1e21"]),
        (2**53 + 1, ["9007199254740993"], ["9007199254740992", "9007199254740993.5"]),
        (float(2**60), [str(2**60)], [str(2**61)]),
        (True, ["true", "True", "TRUE"], ["1", "yes", "false"]),
        (False, ["false"], ["0", "", "None"]),
        ("11.0", ["11.0"], ["11"]),
        ("007", ["007", " 007 "], ["7"]),
        (" 7 ", ["7"], []),
        ("None", ["None"], ["none"]),
    ],
)
def test_what_gives_an_answer(answer: Any, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not gives(text, answer)] == []
    assert [text for text in wrong if gives(text, answer)] == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(11.0, "11"), (1e20, "1" + "0" * 20), (1e21, "1e+21"), (0.5, "0.5"), (1e-6, "0.000001"), (1e-7, "1e-07")],
        *[(1e16, "1" + "0" * 16), (2**70, str(2**70)), (True, "true"), (False, "false"), (-3.25, "-3.25"), ("x", "x")],
    ],
)
def test_values_as_a_person_would_write_them(value: Any, text: str) -> None:
    assert as_written(value) == text


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (["12", "twelve"], ("12", "twelve")),
        ([None, 12.0, ["x", ""]], (12.0, "x")),
        *[(nothing, ()) for nothing in (None, float("nan"), "", "  ", [], [None], float("inf"))],
    ],
)
def test_lists_and_nothing(answer: Any, expected: tuple[Any, ...]) -> None:
    assert gold_answers({"answer": answer}) == expected


def test_a_mapping_is_refused_with_its_keys() -> None:
    with pytest.raises(
        UserError, match=r"the answer is a mapping with value, unit; .*data\.fields\.answer=COLUMN\.KEY"
    ):
        gold_answers({"answer": {"value": 3, "unit": "cm"}})


def judged(name: str, response: str, answer: Any, **settings: Any) -> Any:
    return REWARDS[name](Completion("", response, {"answer": answer}, "stop", (1,)), **settings)


def test_rewards_ask_the_same_function() -> None:
    for answer, response in ((11.0, "11"), (["12", "twelve"], "twelve"), (True, "True"), (1e20, "1" + "0" * 20)):
        assert judged("exact_match", response, answer) == 1.0
        assert judged("regex", f"it is <{response}>", answer, pattern="<(.*)>") == 1.0
    assert judged("regex", "#### 1,234", 1234.0, pattern="#### (.*)", ignore=",$") == 1.0
    assert judged("digits_copied", "11", 11.0) == {"reward": 1.0, "score": 1.0}
    assert judged("digits_copied", "12", ["407", "12"])["score"] == 1.0
    for name, settings in (("exact_match", {}), ("digits_copied", {}), ("regex", {"pattern": ".*"})):
        with pytest.raises(ValueError, match=r"the task has no gold answer"):
            judged(name, "None", None, **settings)


def test_shipped_rewards_declare_what_they_need() -> None:
    declared = {name: needed_by(function) for name, function in REWARDS.items()}
    answer = dict.fromkeys(("exact_match", "regex", "digits_copied", "math"), ("answer",))
    assert declared == {**answer, "reasoning_gym": ("dataset", "entry"), "format": (), "length_penalty": ()}


@pytest.mark.parametrize(
    ("function", "needs"),
    [
        ("regex", {"answer": "regex"}),
        ("{style: {function: format}, mine: {function: math, weight: 0}}", {"answer": "math"}),
        ("{format: {}, length_penalty: {max_tokens: 9, buffer: 2}}", {}),
        ("reasoning_gym", {"dataset": "reasoning_gym", "entry": "reasoning_gym"}),
        ("./{mine}:reward", {}),
    ],
)
def test_what_a_recipe_needs(tmp_path: Path, function: str, needs: dict[str, str]) -> None:
    (tmp_path / "mine.py").write_text("def reward(sample):\n    return 1.0\n")
    given = {"regex": "{regex: {pattern: x}}"}.get(function, function.replace("./{mine}", str(tmp_path / "mine.py")))
    extra = [f"flow.steps.reward.with.function={given}"]
    if "{" in given:
        (tmp_path / "r.yaml").write_text(
            f"defaults: [quickstart, _self_]\nflow: {{steps: {{reward: {{with: {{function: {given}}}}}}}}}\n"
        )
        _, plan = plan_recipe(str(tmp_path / "r.yaml"), [])
    else:
        _, plan = plan_recipe("quickstart", extra)
    assert uses_of(plan).needs == needs


def order(rows: Any, needs: dict[str, str] = NEEDS, reading: Reading | None = None, **given: Any) -> PromptOrder:
    values = {"seed": 5, "shuffle": False, "chat": False, "max_prompt_tokens": 4, **given}
    use = rows if isinstance(rows, SourceUse) else SourceUse(rows)
    return PromptOrder([use], TOKENIZER, PromptSettings(**values), reading, needs)


def test_rows_without_a_gold_answer_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    answers = [1, None, [2, None], float("nan"), "", False]
    rows = [{"prompt": f"{number}=", "answer": answer} for number, answer in enumerate(answers)]
    made = order(rows)
    assert [made.uid(n).prompt for n in range(6)] == [0, 2, 5, 0, 2, 5]
    assert [made.uid(n).epoch for n in range(6)] == [0, 0, 0, 1, 1, 1]
    assert made.count() == 3
    assert "prompt 1 has no gold answer, which reward exact_match needs: it is left out, as all such" in caplog.text
    assert made.left_out() == ["3 of 6 prompts have no gold answer, which reward exact_match needs, and are left out"]
    assert order(rows, {}).count() == 6


def test_long_rows_and_those_without_an_answer_are_counted_apart() -> None:
    rows = [{"prompt": "1="}, {"prompt": "12345="}, {"prompt": "1=", "answer": 1}, {"prompt": "12345=", "answer": 1}]
    made = order(rows, overlong="drop")
    assert made.count() == 1
    assert made.left_out() == [
        "1 of 4 prompts are longer than data.max_prompt_tokens=4 and left out (data.overlong=drop); "
        "2 of 4 prompts have no gold answer, which reward exact_match needs, and are left out"
    ]


def test_where_no_row_has_what_is_needed() -> None:
    rows = [{"prompt": "1=", "solution": 1}] * 2
    with pytest.raises(UserError, match=r"2 of 2 prompts have no gold answer.*has solution — data\.fields\.answer="):
        order(rows).prompt(0)
    assert order(SourceUse(rows, fields={"answer": "solution"})).prompt(1).text == "1="
    with pytest.raises(UserError, match=r"2 of 2 prompts have no 'entry', which reward reasoning_gym needs"):
        order(rows, {"entry": "reasoning_gym"}).prompt(0)


def test_rows_that_clients_put_are_refused_instead() -> None:
    made = order([{"prompt": "1=", "answer": None}], unanswered="error")
    with pytest.raises(UserError, match=r"prompt 0 has no gold answer, which reward exact_match needs — give it one"):
        made.prompt(0)


def test_an_answer_that_is_a_mapping_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1=", "answer": 1}\n{"prompt": "2=", "answer": {"value": 2}}\n')
    use = open_source("", SourceConfig.model_validate({"source": str(path)}), str)
    with pytest.raises(UserError, match=r"p\.jsonl:2\): the answer is a mapping with value"):
        order(use).prompt(1)


def test_a_table_of_pandas_with_nulls(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"prompt": ["1=", "2=", "3="], "answer": [1, None, 3]})
    assert frame["answer"].dtype == float
    frame.to_parquet(tmp_path / "p.parquet")
    made = order(open_source("", SourceConfig.model_validate({"source": str(tmp_path / "p.parquet")}), str))
    tasks = [json.loads(made.prompt(n).task) for n in range(made.count())]
    assert [judged("exact_match", text, task["answer"]) for text, task in zip("13", tasks, strict=True)] == [1.0, 1.0]


def test_decimals_of_tables_are_numbers(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    values = [Decimal("11.00"), Decimal("0.50"), Decimal("12345678901234567890.00"), None]
    table = pa.table({"prompt": ["1="] * 4, "answer": pa.array(values, pa.decimal128(30, 2))})
    parquet.write_table(table, tmp_path / "p.parquet")
    made = order(open_source("", SourceConfig.model_validate({"source": str(tmp_path / "p.parquet")}), str))
    assert [json.loads(made.prompt(n).task)["answer"] for n in range(made.count())] == [11, 0.5, 12345678901234567890]


def test_the_ground_truth_of_verl_is_no_answer_where_it_is_null() -> None:
    rows = [
        {"prompt": "1=", "reward_model": {"style": "rule", "ground_truth": truth}, "answer": None}
        for truth in (None, 2.0, ["3"])
    ]
    made = order(rows)
    assert [json.loads(made.prompt(n).task)["answer"] for n in range(made.count())] == [2.0, ["3"]]


@pytest.mark.parametrize(
    ("value", "text"), [(11.0, "11"), (True, "true"), (12, "12"), (0.5, "0.5"), (1e20, "1" + "0" * 20), ("1.0", "1.0")]
)
def test_responses_that_are_no_text_are_trained_on_as_a_person_writes_them(value: Any, text: str) -> None:
    made = order([{"prompt": "1=", "response": value}], {}, Reading(demonstration, "read", 1, 99, ()))
    (response,) = made.prompt(0).responses
    assert response.text == text
    assert TOKENIZER.decode_batch([response.token_ids], skip_special=True) == [text]


def test_a_response_that_is_nothing_is_told() -> None:
    for value, told in ((None, "is null"), (float("nan"), "is 'nan'; expected text")):
        made = order([{"prompt": "1=", "response": value}], {}, Reading(demonstration, "read", 1, 99, ()))
        with pytest.raises(UserError, match=f"the column 'response' {told}"):
            made.prompt(0)
