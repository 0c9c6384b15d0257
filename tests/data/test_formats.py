"""Rows in the layouts of other tools: ShareGPT, Alpaca, TRL and verl."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from distflow.data.rows import check_columns, prompt_of, with_answer
from distflow.data.sources import PromptText
from distflow.errors import UserError


def made(row: Mapping[str, Any], **fields: str) -> PromptText:
    check_columns(list(row), fields)
    found = prompt_of(row, fields)
    ends = bool(found.messages) and found.messages[-1]["role"] == "assistant"
    return with_answer(found, reads=False) if ends else found


def said(prompt: PromptText) -> list[tuple[str, Any]]:
    turns = [*prompt.messages, *([prompt.reply] if prompt.reply else [])]
    return [(turn["role"], turn.get("content")) for turn in turns]


def turns(*pairs: tuple[str, Any], **keys: Any) -> list[dict[str, Any]]:
    return [{"from": name, "value": value, **keys} for name, value in pairs]


def test_sharegpt() -> None:
    found = made({"conversations": turns(("human", "1+1"), ("gpt", "2")), "id": "x1"})
    assert said(found) == [("user", "1+1"), ("assistant", "2")]
    assert found.task == {"id": "x1", "answer": "2"}
    others = turns(("system", "Be brief"), ("user", "hi"), ("assistant", "yo"), ("Human", "a?"), ("chatgpt", "b"))
    roles = [role for role, _ in said(made({"conversations": others}))]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert said(made({"dialog": others}, conversations="dialog"))[0] == ("system", "Be brief")
    assert said(made({"conversations": json.dumps(others)}))[1] == ("user", "hi")


def test_sharegpt_with_tools() -> None:
    call = {"name": "add", "arguments": {"a": 1, "b": 1}}
    conversation = turns(
        ("human", "1+1"),
        ("gpt", "I add them."),
        ("function_call", json.dumps(call)),
        ("function_call", json.dumps([call, {"name": "stop"}])),
        ("observation", "2"),
        ("tool_response", "3"),
        ("gpt", "It is 2"),
    )
    schema = {"name": "add", "parameters": {"type": "object"}}
    found = made({"conversations": conversation, "tools": json.dumps([schema]), "system": "Use tools"})
    assert [turn["role"] for turn in found.messages] == ["system", "user", "assistant", "tool", "tool"]
    assert found.messages[0]["content"] == "Use tools"
    assert found.messages[2]["content"] == "I add them."
    functions = [given["function"] for given in found.messages[2]["tool_calls"]]
    assert functions == [call, call, {"name": "stop", "arguments": {}}]
    assert found.tools == [{"type": "function", "function": schema}]
    assert found.reply == {"role": "assistant", "content": "It is 2"}
    assert made({"conversations": conversation, "tools": ""}).tools == ()


def test_what_a_turn_says_beside_its_text_is_kept() -> None:
    pairs = turns(("human", "1"), weight=None) + turns(("gpt", "2"), weight=0)
    reply = made({"conversations": pairs}).reply
    assert reply == {"role": "assistant", "content": "2", "train": False}


def test_preferences_in_sharegpt() -> None:
    one, other = turns(("gpt", "2"), ("gpt", "3"))
    found = made({"conversations": turns(("human", "1+1")), "chosen": one, "rejected": other})
    assert said(found) == [("user", "1+1")]
    assert found.task == {
        "chosen": [{"role": "assistant", "content": "2"}],
        "rejected": [{"role": "assistant", "content": "3"}],
    }


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversations": []}, r"the column 'conversations' is '\[\]'; expected a list of turns"),
        ({"conversations": "{"}, r"the column 'conversations' is text, but no JSON"),
        ({"conversations": turns(("humn", "x"))}, r"turn 0 of 'conversations' is from 'humn': did you mean 'human'\?"),
        ({"conversations": turns(("human", "x"), ("function_call", "add()"))}, r"turn 1 .*its value is no JSON"),
        ({"conversations": turns(("function_call", '{"a": 1}'))}, r"turn 0 .*expected \{name: …, arguments: …\}"),
        (
            {"conversations": turns(("system", "a"), ("human", "x")), "system": "b"},
            r"the column 'system' and the first turn of 'messages' are two different system turns",
        ),
        ({"instruction": 3, "output": "x"}, r"the column 'instruction' is '3', a int; expected text"),
        ({"instruction": "x", "output": "y", "history": ["a"]}, r"'history' is .*expected pairs \[instruction, resp"),
        # Alone, it may stand beside a context, which would be lost.
        ({"instruction": "x", "context": "c", "response": "y"}, r"there is no column 'prompt'"),
    ],
)
def test_what_is_refused(row: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(row)


def test_alpaca() -> None:
    found = made({"instruction": "Add", "input": "1 and 1", "output": "2", "source": "x"})
    assert (found.text, found.messages, found.task) == ("Add\n1 and 1", (), {"response": "2", "source": "x"})
    assert made({"instruction": "Add", "input": "", "output": "2"}).text == "Add"
    assert made({"instruction": "Add", "input": None, "output": 2.0}).task == {"response": 2.0}
    row = {"instruction": "And 2?", "input": "", "output": "3", "system": "Add", "history": [["1?", "2"]]}
    assert said(made(row)) == [("system", "Add"), ("user", "1?"), ("assistant", "2"), ("user", "And 2?")]
    assert made({**row, "prompt": "mine"}).text.endswith("mine"), "what has a prompt is not in that layout"
    assert made({"instruction": "Add", "input": "1", "answer": 2}, prompt="instruction").task == {
        "input": "1",
        "answer": 2,
    }


def test_completions_of_trl() -> None:
    assert made({"prompt": "1=", "completion": " 1"}).task == {"response": " 1"}
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    answer = {"role": "assistant", "content": "d"}
    found = made({"prompt": asked, "completion": [answer], "label": True})
    assert found.task == {"response": [answer], "label": True}
    # Only the completion is trained on.
    assert [turn.get("train") for turn in found.messages] == [None, False, None]
    several = [answer, {"role": "tool", "content": "e"}, {"role": "assistant", "content": "f"}]
    found = made({"prompt": "a", "completion": several})
    assert said(found) == [("user", "a"), ("assistant", "d"), ("tool", "e")]
    assert [turn.get("train") for turn in found.messages] == [None, None, None]
    assert found.task == {"response": several[-1:]}
    assert made({"prompt": "1", "completion": "x", "response": "y"}).task == {"completion": "x", "response": "y"}


def test_a_system_turn_beside_a_prompt() -> None:
    found = made({"question": "1+1", "system": "Add", "chosen": "2", "rejected": "3"}, prompt="question")
    assert said(found) == [("system", "Add"), ("user", "1+1")]
    assert said(made({"messages": [{"role": "user", "content": "x"}], "system": " "})) == [("user", "x")]
    assert made({"prompt": "1+1", "system": {"os": "linux"}}).task == {"system": {"os": "linux"}}


def test_verl() -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 3, "answer": "no"},
    }
    found = made(row)
    assert said(found) == [("user", "1+1")]
    assert found.task == {key: value for key, value in row.items() if key != "prompt"} | {"answer": "2"}
    assert made({**row, "answer": "own"}).task["answer"] == "own"
    assert made({**row, "reward_model": json.dumps(row["reward_model"])}).task["answer"] == "2"


BLOCKS = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
ASKS = [{"role": "user", "content": "1+1"}]
ANSWERS = [{"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("given", "content"),
    [
        ("Be brief.", "Be brief."),
        (BLOCKS, BLOCKS),
        (
            [{**BLOCKS[0], "cache_control": {"type": "ephemeral"}}],
            [{**BLOCKS[0], "cache_control": {"type": "ephemeral"}}],
        ),
        (["Be brief."], [{"type": "text", "text": "Be brief."}]),
        ({"role": "system", "content": BLOCKS}, BLOCKS),
        ([{"role": "developer", "content": "Be brief."}], "Be brief."),
    ],
)
@pytest.mark.parametrize(
    "row",
    [
        {"messages": ASKS},
        {"messages": json.dumps(ASKS), "prompt": "not this"},
        {"prompt": ASKS},
        {"prompt": "1+1"},
        {"instruction": "1+1", "input": ""},
        {"conversations": turns(("human", "1+1"))},
        {"chosen": [*ASKS, *ANSWERS], "rejected": json.dumps([*ASKS, {"role": "assistant", "content": "3"}])},
        {"prompt": "1+1", "chosen": [*ASKS, *ANSWERS], "rejected": [*ASKS, *ANSWERS]},
        {"prompt": ASKS, "chosen": [*ASKS, *ANSWERS], "rejected": ANSWERS},
        {"response": [*ASKS, *ANSWERS], "label": True, "prompt": "1+1"},
        {"prompt": ASKS, "completion": ANSWERS},
    ],
)
def test_a_system_turn_of_any_form_reaches_any_layout(row: Mapping[str, Any], given: Any, content: Any) -> None:
    found = made({**row, "system": given})
    assert said(found) == [("system", content), ("user", "1+1")]
    assert "system" not in found.task
    if len(row.get("chosen", ())) == 2:
        assert [turn["role"] for turn in found.task["chosen"]] == ["system", "user", "assistant"]


def test_a_system_turn_that_is_there_already() -> None:
    turn = {"role": "system", "content": "Be brief."}
    for given in ("Be brief.", BLOCKS):
        assert said(
            made({"chosen": [turn, *ASKS, *ANSWERS], "rejected": [turn, *ASKS, *ANSWERS], "system": given})
        ) == [
            ("system", "Be brief."),
            ("user", "1+1"),
        ]
    with pytest.raises(UserError, match="'system' and the first turn of 'chosen' are two different system turns"):
        made({"chosen": [turn, *ASKS, *ANSWERS], "rejected": ANSWERS, "system": "Be long."})
    named = made({"q": "1+1", "messages": ASKS, "system": "Add"}, prompt="q")
    assert said(named) == [("system", "Add"), ("user", "1+1")], "the prompt that data.fields names"
    assert made({"prompt": "1+1", "system": [{"type": "text", "text": " "}]}).task == {}
