"""What a row becomes: its tools, whole answers and their beginnings, thoughts, calls, and tokens where texts meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from distflow.data.chat_template import left_out
from distflow.data.order import PromptOrder
from distflow.errors import UserError
from distflow.workers.preference import pair
from distflow.workers.supervised import demonstration
from distflow.workers.tokenizers import PretrainedTokenizer
from tests.data.chat_templates import LLAMA2, PHI, byte_tokenizer
from tests.data.conversations import Tokenizers, call, from_file, prompts, read, said, saved, shown, text, user

SCHEMA = {"name": "get_weather", "description": "Weather", "parameters": {"properties": {"city": {"type": "string"}}}}
TOOL = {"type": "function", "function": SCHEMA}


# Tools


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"prompt": "Rain?", "tools": [TOOL], "response": "x"}, {}),
        ({"prompt": "Rain?", "tools": json.dumps([TOOL]), "response": "x"}, {}),
        # xLAM's, Alpaca's and OpenAI's older way.
        (
            {"query": "Rain?", "tools": json.dumps([SCHEMA]), "answers": "x"},
            {"prompt": "query", "answer": "answers"},
        ),
        ({"instruction": "Rain?", "input": "", "output": "x", "tools": [{"type": "function", **SCHEMA}]}, {}),
        ({"prompt": "Rain?", "functions": [SCHEMA], "response": "x"}, {}),
        ({"messages": [user("Rain?"), said("x")], "functions": json.dumps([SCHEMA])}, {}),
        ({"messages": [user("Rain?")], "tools": [SCHEMA], "response": "x"}, {}),
    ],
)
@pytest.mark.parametrize("make", [None, demonstration])
def test_tools_reach_the_template(
    tokenizers: Tokenizers, row: dict[str, Any], fields: dict[str, str], make: Any
) -> None:
    def made(family: str, **given: Any) -> PromptOrder:
        return prompts([row], tokenizers(family), make, fields=fields, strict=True, **given)

    prompt = made("qwen", chat=True).prompt(0)
    written = text(tokenizers("qwen"), prompt.token_ids)
    assert f"# Tools\n{json.dumps(TOOL)}\n" in written
    assert written.endswith("user\nRain?<|im_end|>\n<|im_start|>assistant\n")
    assert [shown(tokenizers("qwen"), one) for one in prompt.responses] == ([] if make is None else ["[x<|im_end|>]"])
    with pytest.raises(UserError, match="prompt 0.*leaves out 'tools'"):
        made("llama2", chat=True).prompt(0)
    if "messages" not in row:
        with pytest.raises(UserError, match=r"prompt 0: the prompt is a text.*'tools' do not.*data.chat=true"):
            made("qwen").prompt(0)


def test_tools_that_a_text_cannot_have_are_told_once(tokenizers: Tokenizers, caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt": "Rain?", "tools": [TOOL]}
    made = prompts([row, row, {"prompt": "Rain?", "tools": ""}], tokenizers("qwen"))
    assert [text(tokenizers("qwen"), made.prompt(position).token_ids) for position in range(3)] == ["Rain?"] * 3
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "data.chat=true" in told[0]


# Whole answers, and beginnings


@pytest.mark.parametrize(
    ("said_last", "gold"),
    [
        ("<think>\nTwo and two.\n</think>\n\nThe answer is \\boxed{4}.", "4"),
        ("<think>Two and two.</think>It must be four.", 4),
        ("We get $\\boxed{\\frac{1}{2}}$", "0.5"),
        ("<answer>5</answer>", "4"),
        ("The sum 2+2 is 4.", 4.0),
        ("So:\n**4**", ["3", "4"]),
        ("2 + 2 = $1,234$", "48/2 = 24\n#### 1234"),
        ("The capital is paris", "Paris"),
        ("<think>Two and two.</think>I take 4, and no other", "4"),
        ("<think>Two and two.</think>\n\nIt is **five**.", "4"),
        # As long as responses are: 200,000 characters without a tag took minutes.
        ("Well, it is so. " * 12_500 + "\nIt is 4.", "4"),
    ],
)
def test_a_whole_answer_is_not_the_beginning_of_one(tokenizers: Tokenizers, said_last: str, gold: Any) -> None:
    row = {"messages": [user("2+2?"), said(said_last)], "answer": gold}
    made = prompts([row], tokenizers("qwen")).prompt(0)
    assert text(tokenizers("qwen"), made.token_ids) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert json.loads(made.task)["answer"] == gold


@pytest.mark.parametrize(
    "opening",
    [
        *("<think>\n", "<think>\n\n</think>\n\n", "I put the answer in \\boxed{", "The answer is", "4 things:"),
        *("<think>\nTwo.\n</think>\n\nThe answer is", "<think>Two</think>\n<answer>", "[THINK]Two[/THINK]So we have: "),
    ],
)
def test_a_beginning_stays_and_is_told_once(
    tokenizers: Tokenizers, opening: str, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"prompt": [user("2+2?"), said(opening)], "answer": "4"}
    made = prompts([row, row], tokenizers("qwen"))
    for position in (0, 1):
        assert text(tokenizers("qwen"), made.prompt(position).token_ids).endswith(f"assistant\n{opening}")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "prompt 0: the last assistant's turn is kept as the beginning of the response" in told[0]
    prompt = read({"prompt": row["prompt"], "response": "4"}, tokenizers("qwen"))
    assert text(tokenizers("qwen"), prompt.token_ids).endswith(f"assistant\n{opening}")
    assert shown(tokenizers("qwen"), prompt.responses[0]) == "[4<|im_end|>]"


@pytest.mark.parametrize(
    ("reply", "response", "told"),
    [
        ("It is 4", "It is 5", "kept as the beginning of the response, since it is none of the responses"),
        ("So \\boxed{4}", "It is 5", "left out, since it is a whole answer and none of the responses"),
        ("It is 4", "It is 4 ", ""),
    ],
)
@pytest.mark.parametrize("make", [demonstration, pair])
def test_two_responses_of_a_row_are_told(
    tokenizers: Tokenizers, reply: str, response: str, told: str, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    beside = {"response": response} if make is demonstration else {"chosen": response, "rejected": "no"}
    made = prompts([{"messages": [user("2+2?"), said(reply)], **beside}] * 2, tokenizers("qwen"), make)
    for position in (0, 1):
        assert shown(tokenizers("qwen"), made.prompt(position).responses[0]) == f"[{response}<|im_end|>]"
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == (1 if told else 0)
    assert all(told in one for one in found)


@pytest.mark.parametrize("key", ["prefix", "partial"])
def test_a_turn_that_says_so_is_a_beginning(tokenizers: Tokenizers, key: str, caplog: pytest.LogCaptureFixture) -> None:
    for beginning in ("It is 4.", "```python\n"):
        turns = [user("2+2?"), said(beginning, **{key: True})]
        for beside in ({}, {"answer": "4"}):
            made = prompts([{"messages": turns, **beside}], tokenizers("qwen"), strict=True).prompt(0)
            assert text(tokenizers("qwen"), made.token_ids).endswith(f"assistant\n{beginning}")
            assert json.loads(made.task) == beside, "a beginning is no gold answer"
        (response,) = read({"messages": turns, "response": " 4"}, tokenizers("qwen"), strict=True).responses
        assert shown(tokenizers("qwen"), response) == "[ 4<|im_end|>]"
        with pytest.raises(
            UserError, match=rf"beginning of an answer \({key}: true\), and no column 'chosen', .* goes on"
        ):
            read({"messages": turns}, tokenizers("qwen"))
    assert not caplog.records
    plain = prompts([{"messages": [user("2+2?"), said("4", **{key: False})]}], tokenizers("qwen")).prompt(0)
    assert json.loads(plain.task) == {"answer": "4"}


@pytest.mark.parametrize("opening", ["```python\n", "So:\n\n", "It is "])
def test_a_beginning_keeps_the_white_space_that_templates_trim(tmp_path: Path, opening: str) -> None:
    trims = byte_tokenizer(
        tmp_path,
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content | trim + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    )
    turns = [user("2+2?"), said(opening)]
    made = prompts([{"prompt": turns, "answer": "4"}], trims).prompt(0)
    assert text(trims, made.token_ids) == f"<|user|>\n2+2?<|im_end|><|assistant|>\n{opening}"
    prompt = read({"prompt": turns, "response": "4"}, trims)
    assert text(trims, prompt.token_ids) + shown(trims, prompt.responses[0]) == (
        f"<|user|>\n2+2?<|im_end|><|assistant|>\n{opening}[4<|im_end|>]"
    )


@pytest.mark.parametrize("opening", ["<think>\n", "<think>\nOkay", "Let me", "<think>\n\n</think>\n\nThe"])
def test_a_beginning_stands_behind_the_generation_prompt(tokenizers: Tokenizers, opening: str) -> None:
    row = {"prompt": [user("2+2?"), said(opening)], "answer": "4"}
    qwen, r1 = (tokenizers(family) for family in ("qwen3", "r1"))
    written = text(qwen, prompts([row], qwen).prompt(0).token_ids)
    assert written == f"<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n{opening}"
    written = text(r1, prompts([row], r1).prompt(0).token_ids)
    assert written == "<s><|user|>2+2?<|assistant|><think>\n" + opening.removeprefix("<think>\n")
    prompt = read({"prompt": row["prompt"], "response": " 4"}, qwen)
    assert shown(qwen, prompt.responses[0]) == "[ 4<|im_end|>]", "only what follows the beginning"


# Thoughts that the generation prompt opens


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        (said("<think>\nr\n</think>\n\nA"), "[r\n</think>\n\nA</s>]"),
        (said("<think>r</think>A"), "[r</think>A</s>]"),
        (said("r\n</think>\n\nA"), "[r\n</think>\n\nA</s>]"),
        (said("Hello", reasoning_content="hmm"), "[hmm\n</think>\n\nHello</s>]"),
        (said([{"type": "text", "text": "Hello"}], reasoning="hmm\n"), "[hmm\n</think>\n\nHello</s>]"),
    ],
)
def test_a_thought_that_was_opened_is_not_opened_twice(tokenizers: Tokenizers, turn: Any, expected: str) -> None:
    tokenizer = tokenizers("r1")
    for row in ({"messages": [user("q"), turn]}, {"prompt": [user("q")], "completion": [turn]}):
        prompt = read(row, tokenizer, strict=True)
        assert text(tokenizer, prompt.token_ids) == "<s><|user|>q<|assistant|><think>\n"
        assert shown(tokenizer, prompt.responses[0]) == expected


def test_an_answer_within_an_open_thought_is_told(tokenizers: Tokenizers, caplog: pytest.LogCaptureFixture) -> None:
    row = {"messages": [user("q"), said("plain")]}
    assert shown(tokenizers("r1"), read(row, tokenizers("r1")).responses[0]) == "[plain</s>]"
    assert "prompt 0: the generation prompt opens <think>, and the answer has no </think>" in caplog.text
    with pytest.raises(UserError, match=r"prompt 0.*opens <think>, and the answer has no </think>.*'plain'"):
        read({"prompt": "q", "response": "plain"}, tokenizers("r1"), chat=True, strict=True)


# Calls


@pytest.mark.parametrize("content", [None, "", "MISSING"])
@pytest.mark.parametrize(
    ("family", "written"),
    [
        ("r1", '<|assistant|><call>f\n{"a": 1}</call>'),
        ("qwen", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'),
        ("deepseek", '<|assistant|>f{"a": 1}'),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_turn_that_only_calls_is_written(
    tokenizers: Tokenizers, tmp_path: Path, content: Any, family: str, written: str, kind: str
) -> None:
    turn = said(content, tool_calls=[call("f", {"a": 1})])
    turns = [user("go"), {key: value for key, value in turn.items() if value != "MISSING"}]
    turns += [{"role": "tool", "content": "7"}, user("so?")]
    use = saved(tmp_path / f"rows.{kind}", {"messages": turns}, {"messages": [user("go")]})
    made = from_file(use, tokenizers(family)).prompt(0)
    assert written in text(tokenizers(family), made.token_ids)


def test_a_template_that_reads_no_null_gets_a_blank_content(tokenizers: Tokenizers) -> None:
    turns = [user("go"), said(None, tool_calls=[call("look_up", {})]), user("so?")]
    made = prompts([{"messages": turns}], tokenizers("phi")).prompt(0)
    assert text(tokenizers("phi"), made.token_ids).startswith("<|user|>go<|im_end|>\n<|assistant|><|im_end|>\n")
    with pytest.raises(UserError, match="leaves out 'tool_calls' of message 1"):
        prompts([{"messages": turns}], tokenizers("phi"), strict=True).prompt(0)


@pytest.mark.parametrize(
    ("family", "name", "arguments"),
    [
        ("phi", "end", {"im": "end"}),
        ("phi", "get_events", {"end": "2024"}),
        ("llama2", "s", {"/s": "s"}),
        ("qwen3", "think", {"im": "end"}),
    ],
)
def test_a_key_that_stands_in_the_end_token_is_not_written(
    tokenizers: Tokenizers, family: str, name: str, arguments: Any
) -> None:
    turns = [user("6+5="), said("", tool_calls=[call(name, arguments)]), user("so?"), said("11")]
    with pytest.raises(UserError, match="leaves out tool_calls of message 1, so that its end alone"):
        read({"messages": turns[:2]}, tokenizers(family))
    with pytest.raises(UserError, match="leaves out tool_calls of message 1, so that its end alone"):
        read({"messages": turns}, tokenizers(family))


def test_arguments_that_are_not_given_are_not_lost(tokenizers: Tokenizers) -> None:
    turn = said("", tool_calls=[{"type": "function", "function": {"name": "stop"}}])
    assert left_out("stop", [turn], ()) == []
    assert "stop" in shown(
        tokenizers("mistral"), read({"messages": [user("go"), turn]}, tokenizers("mistral"), strict=True).responses[0]
    )


# Nulls of tables


@pytest.mark.parametrize("column", ["messages", "prompt", "response"])
def test_nulls_in_json_text_stay(tokenizers: Tokenizers, tmp_path: Path, column: str) -> None:
    tokenizer = tokenizers("qwen")
    tool = {"name": "f", "parameters": {"properties": {"x": {"default": None}}}}
    for arguments, whole in (('{"x": null}', False), ({"x": None}, True)):
        turns: Any = [user("go"), said("", tool_calls=[call("f", arguments)])]
        if column == "response":
            row = {"prompt": [user("go")], "response": json.dumps(turns[1:]) if whole else turns[1:]}
        else:
            row = {column: json.dumps(turns) if whole else turns}
        use = saved(tmp_path / f"{column}.parquet", row | {"tools": json.dumps([tool])})
        prompt = from_file(use, tokenizer, demonstration).prompt(0)
        assert '{"default": null}' in text(tokenizer, prompt.token_ids)
        assert '"arguments": {"x": null}' in shown(tokenizer, prompt.responses[0])


def test_nulls_of_a_table_are_dropped_from_an_answer_that_is_a_chat(tokenizers: Tokenizers, tmp_path: Path) -> None:
    calls = [[said("", tool_calls=[call("f", {argument: "1"})])] for argument in ("x", "y")]
    use = saved(tmp_path / "rows.parquet", *({"prompt": [user("go")], "answer": answer} for answer in calls))
    made = from_file(use, tokenizers("qwen"), demonstration)
    for position, argument in enumerate(("x", "y")):
        assert f'"arguments": {{"{argument}": "1"}}' in shown(tokenizers("qwen"), made.prompt(position).responses[0])


# What is refused


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [user("x"), {"role": "model", "content": "y"}]}, "has the role 'model'; expected 'assistant'"),
        (
            {"messages": [user("x"), said("y"), user("z")]},
            "the conversation ends with the turn of 'user', not of 'assi",
        ),
        ({"messages": str([user("x"), said("y's")])}, r"messages as Python writes them.*json\.dumps\(messages\)"),
        ({"prompt": str([user("x")]), "response": "y"}, r"messages as Python writes them.*json\.dumps\(messages\)"),
        (
            {"conversations": str([{"from": "human", "value": "x"}])},
            r"'conversations' is text, but no JSON.*json\.dumps",
        ),
        ({"messages": [user("x"), said("y")], "tools": str([TOOL])}, r"'tools' is text, but no JSON.*json\.dumps"),
        ({"messages": [user("<image>"), said("y")], "images": ["a.png"]}, "'images' is .*images, .*are not supported"),
        (
            {"prompt": "x", "response": "y", "image": {"bytes": "iVBORw0", "path": None}},
            "'image' is .*are not supported",
        ),
        ({"prompt": "x", "response": "y", "audio": "clips/a.wav"}, "'audio' is .*are not supported"),
        ({"instruction": "<audio>", "output": "y", "audios": '["a.wav"]'}, "'audios' is .*are not supported"),
        (
            {"messages": [user([{"type": "image"}]), said("y")]},
            "message 0 has content that is no .*images,.* supported",
        ),
    ],
)
def test_what_a_row_cannot_be(tokenizers: Tokenizers, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"prompt 0.*{message}"):
        read(row, tokenizers("qwen"))


@pytest.mark.parametrize("empty", [None, [], "", "[]"])
def test_columns_without_images_do_not_matter(tokenizers: Tokenizers, empty: Any) -> None:
    row = {"messages": [user("x"), said("y")], "images": empty, "videos": empty, "tools": "", "image": "python:3.12"}
    assert read(row, tokenizers("qwen")).responses == read({"messages": row["messages"]}, tokenizers("qwen")).responses


# Tokens where texts meet


def legacy(folder: Path, template: str) -> PretrainedTokenizer:
    """A tokenizer that puts a space before texts and behind added tokens, as Llama 2's; `<|im_end|>` takes it."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    core.train_from_iterator(["Hi Yo Hm Ok 0 1 2 3 4 [INST] [/INST]\n"], trainer)
    core.add_special_tokens([AddedToken("<|im_end|>", rstrip=True)])
    core.add_tokens([AddedToken("<b>", normalized=False), AddedToken("<i>", normalized=True)])
    pretrained = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    pretrained.chat_template = template
    pretrained.save_pretrained(folder)
    return PretrainedTokenizer(str(folder))


@pytest.mark.parametrize("template", [LLAMA2, PHI])
@pytest.mark.parametrize("make", [legacy, byte_tokenizer])
def test_parts_are_encoded_as_the_whole_conversation(tmp_path: Path, template: str, make: Any) -> None:
    tokenizer = make(tmp_path, template)
    turns = [user("Hi 1"), said("Yo 2"), user("Hm é"), said("é Ok 4"), user("Hi <b>Hm <i>Ok<i>"), said("<b>Yo<i>Ok")]
    whole = tokenizer.pretrained.apply_chat_template(turns, tokenize=True, return_dict=False)
    for mode in ("all", "last"):
        prompt = read({"messages": turns}, tokenizer, turns=mode)
        ids = [*prompt.token_ids, *prompt.responses[0].token_ids]
        assert ids == whole[: len(ids)]
        assert not text(tokenizer, whole[len(ids) :]).strip().removesuffix("</s>"), "but what closes the conversation"


def test_a_text_is_encoded_by_what_stands_before_it(tmp_path: Path) -> None:
    tokenizer = legacy(tmp_path, LLAMA2)
    tokens = tokenizer.pretrained.convert_ids_to_tokens
    end, one, unknown = (tokenizer.encode(text)[-1] for text in ("</s>", "1", "é"))
    assert tokens(tokenizer.encode("Hm", behind=end))[0].startswith("▁")
    for before in (None, one, unknown):
        assert not tokens(tokenizer.encode("Hm", behind=before))[0].startswith("▁")
    inner = tokens(tokenizer.encode("Hm</s>Hm"))
    place = inner.index("</s>")
    assert not inner[0].startswith("▁")
    assert inner[place + 1].startswith("▁")
    assert not any(token.startswith("▁") for token in tokens(tokenizer.encode("éHm"))), "é is no added token"
