"""Responses that the data gives: which columns they are in, in tokens, and what is wrong with a row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from distflow.config.data_schema import SourceConfig
from distflow.data.loading import open_source
from distflow.data.order import PromptOrder, PromptSettings
from distflow.data.responses import DataRow, Reading, RowResponse
from distflow.errors import PluginError, UserError
from distflow.workers.preference import pair
from distflow.workers.supervised import demonstration
from distflow.workers.tokenizers import CharTokenizer, PretrainedTokenizer

TOKENIZER = CharTokenizer("chars:0123456789=")
Make = Callable[[DataRow], Sequence[RowResponse]]


def order(
    folder: Path, rows: Sequence[Mapping[str, Any]], make: Make = demonstration, longest: int = 9, **given: Any
) -> PromptOrder:
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = open_source("", SourceConfig.model_validate({"source": str(file)}), lambda name: None)
    values = {"seed": 5, "shuffle": False, "chat": False, "max_prompt_tokens": 8} | given
    return PromptOrder([source], TOKENIZER, PromptSettings(**values), Reading(make, "read", 2, longest, ()))


@pytest.mark.parametrize(
    "column",
    [
        {"response": "12"},
        {"answer": "12"},
        {"response": "12", "answer": "99"},
        {"response": None, "answer": 12},
    ],
)
def test_where_a_demonstration_stands(column: dict[str, Any], tmp_path: Path) -> None:
    prompt = order(tmp_path, [{"prompt": "1=", **column}]).prompt(0)
    (response,) = prompt.responses
    assert (response.text, response.token_ids, response.trains) == ("12", (3, 4, 1), True)


class Chat(CharTokenizer):
    """With a template that writes one turn behind the other, an = before each answer."""

    def chat_text(self, turns: Any, tools: Any = (), arguments: Any = None, *, asks: bool = True) -> str:
        return "".join(turn["content"] + "=" * (turn["role"] == "user") for turn in turns)


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(contents)]


def chats(folder: Path, *rows: Mapping[str, Any], make: Make = demonstration, **fields: str) -> PromptOrder:
    """With a tokenizer that has a template."""
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = open_source("", SourceConfig.model_validate({"source": str(file), "fields": fields}), lambda name: None)
    settings = PromptSettings(5, shuffle=False, chat=False, max_prompt_tokens=8)
    return PromptOrder([source], Chat("chars:0123456789="), settings, Reading(make, "read", 2, 9, ()))


def test_of_a_conversation_the_last_turn_is_the_response(tmp_path: Path) -> None:
    prompt = chats(tmp_path, {"messages": turns("1", "12")}).prompt(0)
    assert (prompt.token_ids, prompt.responses[0].token_ids) == ((3, 12), (3, 4, 1))


@pytest.mark.parametrize(
    "row, make",
    [
        ({"prompt": "7", "chosen": turns("1", "1"), "rejected": turns("1", "2")}, pair),
        ({"chosen": turns("1", "1"), "rejected": turns("1", "2")}, pair),
        ({"prompt": "1", "chosen": turns("1", "1")[1:], "rejected": turns("1", "2")[1:]}, pair),
        ({"prompt": turns("1"), "chosen": turns("1", "1"), "rejected": turns("1", "2")}, pair),
        ({"prompt": turns("1"), "chosen": turns("1", "1")[1:], "rejected": "2"}, pair),
        ({"prompt": "7", "messages": turns("1", "1")}, demonstration),
        ({"prompt": "1", "response": turns("1", "1")}, demonstration),
        ({"prompt": "1", "response": turns("1", "1")[1:]}, demonstration),
        ({"prompt": turns("1"), "response": "1", "messages": turns("3")}, demonstration),
    ],
)
def test_conversations_say_what_the_prompt_is(row: dict[str, Any], make: Make, tmp_path: Path) -> None:
    prompt = chats(tmp_path, row, make=make).prompt(0)
    assert prompt.token_ids == (3, 12), "one user's turn, by the template"
    assert [response.text for response in prompt.responses] == (["1", "2"] if make is pair else ["1"])


def test_a_prompt_that_is_named_is_not_looked_for(tmp_path: Path) -> None:
    row = {"prompt": "1=", "messages": turns("3", "4"), "answer": "5"}
    assert chats(tmp_path, row, prompt="prompt").prompt(0).token_ids == (3, 12)
    assert chats(tmp_path, row, prompt="messages").prompt(0).token_ids == (5, 12)


@pytest.mark.parametrize(
    "row, message",
    [
        (
            {"chosen": turns("1", "1"), "rejected": turns("2", "2")},
            r"rows.jsonl:1\): the columns 'chosen' and 'rejected' differ before their last turns; expected the same",
        ),
        (
            {"prompt": turns("3"), "chosen": turns("1", "1"), "rejected": turns("1", "2")},
            r"rows.jsonl:1\): the turns before the response are not those of the prompt",
        ),
        (
            {"prompt": "1", "chosen": turns("1"), "rejected": turns("2")},
            "the column 'chosen' is .*; expected text, or chat messages that end with an assistant's turn",
        ),
        (
            {"chosen": "1", "rejected": "2"},
            r"there is no column 'prompt' \(or 'messages'\); there are chosen, rejected",
        ),
    ],
)
def test_conversations_that_do_not_agree(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        chats(tmp_path, row, make=pair).prompt(0)


TURNS = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}"
END = "<end>\n{% endfor %}{% if add_generation_prompt %}a{% endif %}"
CHATML = f"{TURNS}{{% for call in m.tool_calls or [] %}}+{{{{ call.function.name }}}}{{% endfor %}}{END}"
"""Ends turns with another token than the tokenizer's end token, and a new line."""
FORGETFUL = (
    "{% for m in messages %}{{ m.role[0] }}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}" + END
)
"""Leaves out what the assistant said before."""
THINKING = f"{TURNS}{END}".replace("%}a{%", "%}a9{%")
"""Asks for an answer with more than it writes before one."""
Written = Callable[..., tuple[str, list[tuple[str, bool]]]]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Reads a row with a chat template; gives the prompt, and runs of the response that are trained on or not."""

    def read(template: str, row: Mapping[str, Any], *, chat: bool = False, turns: str = "all") -> Any:
        characters = CharTokenizer("chars:0123456789=+uat\n")
        characters.pretrained.add_special_tokens({"additional_special_tokens": ["<end>"]})
        characters.pretrained.chat_template = template
        characters.save(tmp_path / "tokenizer")
        tokenizer = PretrainedTokenizer(str(tmp_path / "tokenizer"))
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        config = SourceConfig.model_validate({"source": str(tmp_path / "rows.jsonl")})
        reading = Reading(pair if "rejected" in row else demonstration, "read", 2, 99, (), turns == "all")
        settings = PromptSettings(5, shuffle=False, chat=chat, max_prompt_tokens=99)
        prompt = PromptOrder([open_source("", config, str)], tokenizer, settings, reading).prompt(0)
        response = prompt.responses[0]
        mask = response.mask or (response.trains,) * len(response.token_ids)
        runs = groupby(zip(response.token_ids, mask, strict=True), lambda pair: pair[1])
        found = [([token for token, _ in run], trained) for trained, run in runs]
        first, *texts = tokenizer.decode_batch([prompt.token_ids, *(ids for ids, _ in found)], skip_special=False)
        return first, [(text, trained) for text, (_, trained) in zip(texts, found, strict=True)]

    return read


def test_all_turns_of_the_assistant_are_trained_on(written: Written) -> None:
    row = {"messages": turns("1", "2", "3", "4")}
    assert written(CHATML, row) == ("u1<end>\na", [("2<end>", True), ("\nu3<end>\na", False), ("4<end>", True)])
    assert written(CHATML, row, turns="last") == ("u1<end>\na2<end>\nu3<end>\na", [("4<end>", True)])
    answered = {"messages": turns("1", "2", "3"), "response": "4"}
    assert written(CHATML, answered) == written(CHATML, row)
    greeted = {"messages": [{"role": "assistant", "content": "0"}, *turns("1", "2")]}
    assert written(CHATML, greeted) == ("a0<end>\nu1<end>\na", [("2<end>", True)])


def test_calls_of_tools_are_trained_on(written: Written) -> None:
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "7", "arguments": {}}}]}
    rows = [{"role": "user", "content": "1"}, {**call, "content": ""}, {"role": "tool", "content": "5"}]
    found = written(CHATML, {"messages": [*rows, {"role": "assistant", "content": "4"}]})
    assert found == ("u1<end>\na", [("+7<end>", True), ("\nt5<end>\na", False), ("4<end>", True)])
    assert written(CHATML, {"messages": rows[:2]}) == ("u1<end>\na", [("+7<end>", True)])
    pairs = {"chosen": rows[:2], "rejected": turns("1", "2")}
    assert written(CHATML, pairs, turns="last") == ("u1<end>\na", [("+7<end>", True)])


def test_a_text_in_a_chat_ends_as_its_turns_do(written: Written) -> None:
    row = {"prompt": "1", "response": "2"}
    assert written(CHATML, row, chat=True) == ("u1<end>\na", [("2<end>", True)])
    assert written(CHATML, row) == ("1", [("2<eos>", True)])
    assert written(CHATML.replace("<end>\n", ""), row, chat=True) == ("u1a", [("2<eos>", True)])


def test_a_template_that_rewrites_earlier_turns(written: Written) -> None:
    row = {"messages": turns("1", "2", "3", "4")}
    with pytest.raises(UserError, match=r"writes message 3, or what is before it, in another.*read\.with\.turns=last"):
        written(FORGETFUL, row)
    assert written(FORGETFUL, row, turns="last") == ("u1<end>\na<end>\nu3<end>\na", [("4<end>", True)])
    assert written(FORGETFUL, {"messages": turns("1", "2")}) == ("u1<end>\na", [("2<end>", True)])


def test_a_generation_prompt_that_no_answer_begins_with(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    assert written(THINKING, {"messages": turns("1", "2")}) == ("u1<end>\na9", [("2<end>", True)])
    assert "writes answers in another way than its generation prompt, which ends with" in caplog.text


@pytest.mark.parametrize(
    "column, message",
    [
        ({}, r"rows.jsonl:2\): there is no column 'response' or 'answer'; there are other — data.fields.response=COL"),
        ({"response": None}, r"rows.jsonl:2\): the column 'response' is null; expected a response — leave the row out"),
        ({"response": "  "}, r"rows.jsonl:2\): the column 'response' is empty"),
        ({"response": {"a": 1}}, "expected text, or chat messages that end with an assistant's turn"),
        ({"response": "abc"}, r"rows.jsonl:2\): character 'a' of 'abc' is not in the vocabulary"),
        ({"response": "123456789"}, r"rows.jsonl:2\) has 10 tokens with its end token, expected at most 9"),
    ],
)
def test_what_is_wrong_with_a_row(column: dict[str, Any], message: str, tmp_path: Path) -> None:
    made = order(tmp_path, [{"prompt": "1=", "response": "1"}, {"prompt": "2=", "other": 1, **column}])
    assert made.prompt(0).responses[0].token_ids == (3, 1)
    with pytest.raises(UserError, match=message):
        made.prompt(1)


def test_rows_with_long_responses_are_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}=", "response": "1" * (1 + 5 * n)} for n in range(4)]
    made = order(tmp_path, rows, overlong="drop")
    assert [made.prompt(position).text for position in range(5)] == ["0=", "1=", "0=", "1=", "0="]
    assert (
        "2 of 4 prompts are longer than data.max_prompt_tokens=8, or their responses than max_response_"
        in (made.left_out()[0])
    )


def test_the_next_row_is_that_of_the_next_position(tmp_path: Path) -> None:
    def both(row: DataRow) -> list[RowResponse]:
        return [RowResponse(one.response("response"), {}, one is row) for one in (row, row.following())]

    rows = [{"prompt": f"{n}=", "response": "1" * (1 + 5 * n)} for n in (0, 3, 1)]
    made = order(tmp_path, rows, both, overlong="drop")
    found = [[one.text for one in made.prompt(position).responses] for position in range(3)]
    assert found == [["1", "111111"], ["111111", "1"], ["1", "111111"]], "what is left out is nobody's next row"
    assert [one.trains for one in made.prompt(0).responses] == [True, False]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda row: [], "returned 0 values; expected a list of 1 to 2"),
        (lambda row: ["1"], "returned 1 values; expected"),
        (lambda row: "11", "step 'read' returned 2 values"),
        (lambda row: None, "returned a NoneType"),
        (lambda row: [RowResponse("1")] * 3, "returned 3 values"),
        (lambda row: [RowResponse("1", {"label": 1.0})], "with the fields label; expected .* to write: none"),
    ],
)
def test_what_a_step_may_return(make: Make, message: str, tmp_path: Path) -> None:
    with pytest.raises((PluginError, UserError), match=message):
        order(tmp_path, [{"prompt": "1=", "response": "1"}], make).prompt(0)


def test_a_model_must_be_able_to_stop(tmp_path: Path) -> None:
    made = order(tmp_path, [{"prompt": "1=", "response": "1"}])
    made._tokenizer = CharTokenizer("chars:0123456789=")
    made._tokenizer.eos_token_id = None  # type: ignore[misc]
    with pytest.raises(UserError, match="the tokenizer has no end token, by which a model could learn to stop"):
        made.prompt(0)
