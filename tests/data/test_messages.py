"""What becomes of a conversation: what reaches the chat template, what of it is trained on, and what is told."""

from __future__ import annotations

import json
import logging
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from distflow.config.data_schema import SourceConfig
from distflow.data.loading import open_source
from distflow.data.sources import PromptText
from distflow.errors import UserError
from distflow.workers.preference import pair
from distflow.workers.supervised import demonstration
from distflow.workers.tokenizers import PretrainedTokenizer
from tests.data.chat_templates import FAMILIES
from tests.data.conversations import Make, Tokenizers, call, from_file, prompts, read, said, saved, shown, text, user

# Contents


@pytest.mark.parametrize("family", ["qwen", "glm", "llama2"])
def test_text_parts_are_joined_for_templates_that_read_text(tokenizers: Tokenizers, family: str) -> None:
    tokenizer = tokenizers(family)
    parts = [{"type": "text", "text": "6+"}, {"type": "text", "text": "5="}]
    joined = [user("6+5="), said("11"), user("and?"), said("12")]
    in_parts = [user(parts), said([{"type": "text", "text": "11"}]), user([parts[0] | {"text": "and?"}]), said("12")]
    assert read({"messages": in_parts}, tokenizer) == read({"messages": joined}, tokenizer)
    chosen = {"prompt": [user(parts)], "chosen": [said([{"type": "text", "text": "11"}])], "rejected": [said("12")]}
    plain = {"prompt": [user("6+5=")], "chosen": [said("11")], "rejected": [said("12")]}
    assert read(chosen, tokenizer, pair).responses == read(plain, tokenizer, pair).responses


def test_a_template_that_reads_parts_gets_parts(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("parts")
    row = {"messages": [user([{"type": "text", "text": "6+"}, {"type": "text", "text": "5="}]), said("11")]}
    prompt = read(row, tokenizer)
    assert text(tokenizer, prompt.token_ids) == "<|im_start|>user\n6+;5=;<|im_end|>\n<|im_start|>assistant\n"
    assert shown(tokenizer, prompt.responses[0]) == "[11;<|im_end|>]"


def test_messages_may_be_json_text(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("qwen")
    turns = [user("6+5="), said("11")]
    assert read({"messages": json.dumps(turns)}, tokenizer) == read({"messages": turns}, tokenizer)
    assert prompts([{"prompt": "[1, 2"}], tokenizer).prompt(0).text == "[1, 2", "other texts stay what they are"


def test_a_function_that_gives_messages_goes_through_the_same_door(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("qwen")
    turns = [user([{"type": "text", "text": "6+5="}]), said("", tool_calls=[call("add", '{"a": 6}')]), user("so?")]
    made = prompts([PromptText("x", {}, turns)], tokenizer).prompt(0)
    assert "user\n6+5=<|im_end|>" in text(tokenizer, made.token_ids)
    assert '"arguments": {"a": 6}' in text(tokenizer, made.token_ids)


# Nulls of tables, and arguments


def test_nulls_of_a_table_do_not_reach_the_prompt_or_the_loss(tokenizers: Tokenizers, tmp_path: Path) -> None:
    tokenizer = tokenizers("qwen")

    def row(name: str, argument: str, value: Any) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": name, "parameters": {"properties": {argument: {"type": "s"}}}}}
        return {"tools": [tool], "messages": [user("go"), said("", tool_calls=[call(name, {argument: value})])]}

    rows = row("tide", "port", "Brest"), row("moon", "nights", ["one", None])
    table = from_file(saved(tmp_path / "calls.parquet", *rows), tokenizer, demonstration)
    lines = from_file(saved(tmp_path / "calls.jsonl", *rows), tokenizer, demonstration)
    for position in (0, 1):
        assert table.prompt(position).token_ids == lines.prompt(position).token_ids
        assert table.prompt(position).responses == lines.prompt(position).responses
    assert '{"nights": ["one", null]}' in table.prompt(1).responses[0].text or '["one", null]' in shown(
        tokenizer, table.prompt(1).responses[0]
    ), "an item of a list is one that somebody wrote"


def test_a_function_may_give_a_data_set_of_hugging_face(tokenizers: Tokenizers) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        {"messages": [user("go"), said("", tool_calls=[call(name, {argument: "x"})])]}
        for name, argument in (("tide", "port"), ("moon", "night"))
    ]
    given = SourceConfig.model_validate({"source": "m:f"})
    use = open_source("", given, lambda name: lambda: datasets.Dataset.from_list(rows))
    made = from_file(use, tokenizers("qwen"), demonstration).prompt(0)
    assert '"arguments": {"port": "x"}' in shown(tokenizers("qwen"), made.responses[0])


def test_nulls_that_somebody_wrote_stay(tokenizers: Tokenizers, tmp_path: Path) -> None:
    tokenizer = tokenizers("qwen")
    row = {"messages": [user("go"), said("", tool_calls=[call("tide", {"port": None})])], "extra_info": {"a": None}}
    prompt = from_file(saved(tmp_path / "calls.jsonl", row), tokenizer, demonstration).prompt(0)
    assert '"arguments": {"port": null}' in shown(tokenizer, prompt.responses[0])
    table = from_file(saved(tmp_path / "calls.parquet", row, row | {"extra_info": {"a": 1.0}}), tokenizer).prompt(0)
    assert json.loads(table.task)["extra_info"] == {"a": None}, "the task's own columns keep theirs"


@pytest.mark.parametrize("family", ["qwen", "mistral"])
def test_arguments_as_json_text_are_what_they_say(tokenizers: Tokenizers, family: str) -> None:
    tokenizer = tokenizers(family)
    as_text = said("", tool_calls=[call("add", '{"a": 6, "b": {"c": [1, null]}}')])
    as_object = said("", tool_calls=[call("add", {"a": 6, "b": {"c": [1, None]}})])
    follow = [{"role": "tool", "content": "11"}, said("It is 11.")]
    for row in ({"messages": [user("6+5="), "CALL"]}, {"messages": [user("6+5="), "CALL", *follow]}):
        made, expected = (
            read({"messages": [one if turn == "CALL" else turn for turn in row["messages"]]}, tokenizer)
            for one in (as_text, as_object)
        )
        assert made == expected
        assert '"arguments": {"a": 6, "b": {"c": [1, null]}}' in shown(tokenizer, made.responses[0])
    whole = said("", tool_calls=json.dumps([call("add", '{"a": 6}')]))
    assert '{"a": 6}' in shown(tokenizer, read({"messages": [user("6"), whole]}, tokenizer).responses[0])


@pytest.mark.parametrize("arguments", ['{"a": 6, "b": "x"}', {"a": 6, "b": "x"}])
def test_a_template_that_needs_arguments_as_text_gets_text(tokenizers: Tokenizers, arguments: Any) -> None:
    row = {"messages": [user("6+5="), said("", tool_calls=[call("add", arguments)])]}
    (response,) = read(row, tokenizers("deepseek"), strict=True).responses
    assert shown(tokenizers("deepseek"), response) == '[add{"a": 6, "b": "x"}</s>]'


def test_arguments_that_are_no_object_stay_text(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("qwen")
    for arguments in ("ls -l", "[1, 2]", '"quoted"', "{broken"):
        row = {"messages": [user("go"), said("", tool_calls=[call("run", arguments)])]}
        assert f'"arguments": {json.dumps(arguments)}' in shown(tokenizer, read(row, tokenizer).responses[0])


@pytest.mark.parametrize("family", ["qwen", "mistral", "deepseek"])
@pytest.mark.parametrize("arguments", ["", " \n", None])
def test_arguments_that_are_nothing_are_an_empty_object(tokenizers: Tokenizers, family: str, arguments: Any) -> None:
    rows = [{"messages": [user("go"), said("", tool_calls=[call("now", given)])]} for given in (arguments, {})]
    assert read(rows[0], tokenizers(family)) == read(rows[1], tokenizers(family))
    assert "{}" in shown(tokenizers(family), read(rows[0], tokenizers(family)).responses[0])


def test_calls_in_the_older_form_of_openai(tokenizers: Tokenizers) -> None:
    function = {"name": "add", "arguments": '{"a": 6}'}
    back = {"role": "tool", "content": "11"}
    new = [user("6+5="), said(None, tool_calls=[{"type": "function", "function": function}]), back, said("11")]
    expected = read({"messages": new}, tokenizers("qwen"), strict=True)
    assert '{"name": "add", "arguments": {"a": 6}}' in shown(tokenizers("qwen"), expected.responses[0])
    for older in (function, json.dumps(function)):
        old = [new[0], said(None, function_call=older), back | {"role": "function"}, new[3]]
        assert read({"messages": old}, tokenizers("qwen"), strict=True) == expected
        both = [new[0], new[1] | {"function_call": function}, back | {"role": "function"}, new[3]]
        assert read({"messages": both}, tokenizers("qwen"), strict=True) == expected
    with pytest.raises(UserError, match=r"message 1 has function_call 'add'; expected \{name: …, arguments: …\}"):
        read({"messages": [user("go"), said("", function_call="add")]}, tokenizers("qwen"))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "reasoning", "text": "6+4=10"},
        {"type": "thinking", "text": "", "thinking": "6+4=10"},
        {"type": "image_url", "image_url": {"url": "x.png"}, "text": ""},
        {"image": "x.png", "text": " "},
        {"type": "text"},
    ],
)
def test_parts_that_are_no_text_are_refused(tokenizers: Tokenizers, part: dict[str, Any]) -> None:
    good = [{"type": "input_text", "text": "6+"}, {"text": "5", "image": None}, {"type": "text", "text": "="}]
    assert text(tokenizers("parts"), read({"messages": [user(good), said("11")]}, tokenizers("parts")).token_ids) == (
        "<|im_start|>user\n6+;5;=;<|im_end|>\n<|im_start|>assistant\n"
    )
    for turns in ([user([*good, part]), said("11")], [user("6+5="), said([part, {"type": "text", "text": "11"}])]):
        with pytest.raises(
            UserError, match=r"message [01] has content that is no text: .*; expected a text, or a list"
        ):
            read({"messages": turns}, tokenizers("parts"))


@pytest.mark.parametrize("calls", [3, "ls", [3], ["{}"]])
def test_bad_calls(tokenizers: Tokenizers, calls: Any) -> None:
    with pytest.raises(UserError, match=r"prompt 0.*message 1 has tool_calls .*; expected a list of calls"):
        read({"messages": [user("go"), said("", tool_calls=calls)]}, tokenizers("qwen"))


# What is trained on


OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "5", "weight": 0},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "4", "weight": 1},
    ]
}
"""A line of OpenAI's fine-tuning format."""


@pytest.mark.parametrize(("no", "yes"), [(0, 1), (False, True), (0.0, 1.0)])
@pytest.mark.parametrize(
    "key",
    ["weight", "train", "trainable", "loss", "loss_scale", "loss_mask", "step_loss_mask", "trainOnTurn", "is_trained"],
)
def test_a_turn_that_is_context_is_not_trained_on(tokenizers: Tokenizers, key: str, no: Any, yes: Any) -> None:
    tokenizer = tokenizers("qwen")
    turns = [
        {**turn, key: {0: no, 1: yes}[turn["weight"]]} if "weight" in turn else turn for turn in OPENAI["messages"]
    ]
    turns = [{name: value for name, value in turn.items() if name in ("role", "content", key)} for turn in turns]
    (response,) = read({"messages": turns}, tokenizer).responses
    begins = "<|im_start|>"
    assert shown(tokenizer, response) == f"5<|im_end|>\n{begins}user\nno<|im_end|>\n{begins}assistant\n[4<|im_end|>]"


@pytest.mark.parametrize("key", ["ignore", "mask_loss", "ignoreLoss", "exclude_from_loss"])
def test_a_turn_that_is_ignored_is_not_trained_on(tokenizers: Tokenizers, key: str) -> None:
    turns = [user("2+2="), said("5", **{key: True}), user("no"), said("4", **{key: False}, grade=1, train_speed=3)]
    (response,) = read({"messages": turns}, tokenizers("qwen"), strict=True).responses
    begins = "<|im_start|>"
    assert shown(tokenizers("qwen"), response) == (
        f"5<|im_end|>\n{begins}user\nno<|im_end|>\n{begins}assistant\n[4<|im_end|>]"
    )


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"mask": 1}, r"message 1 has mask: 1, which may say .*expected weight: 0 or 1"),
        ({"is_masked": True}, r"message 1 has is_masked: True, which may say"),
        ({"tokensToTrain": False}, r"message 1 has tokensToTrain: False, which may say"),
        ({"loss_mask": [0, 1]}, r"message 1 has loss_mask: \[0, 1\]; expected 0 or 1"),
        ({"ignore": True, "loss_mask": 1}, r"message 1 says .*which contradict each other"),
        ({"weight": 0.5}, r"message 1 has weight: 0\.5; expected 0 or 1"),
        ({"loss_scale": 2}, r"message 1 has loss_scale: 2; expected 0 or 1"),
        ({"train": "no"}, r"message 1 has train: 'no'; expected 0 or 1"),
        ({"weight": 1, "train": False}, r"message 1 says .*which contradict each other"),
        ({"train_detail": []}, r"message 1 has train_detail; expected weight: 0 or 1"),
        ({"weight": 0}, r"nothing of it is trained on: its turns have weight: 0"),
    ],
)
@pytest.mark.parametrize("turns", ["all", "last"])
def test_what_cannot_be_said_of_training(
    tokenizers: Tokenizers, turn: dict[str, Any], message: str, turns: str
) -> None:
    with pytest.raises(UserError, match=f"prompt 0.*{message}"):
        read({"messages": [user("2+2="), said("5", **turn)]}, tokenizers("qwen"), turns=turns)


def test_weights_take_away_only(tokenizers: Tokenizers) -> None:
    turns = [user("a", weight=1), said("b", weight=1), user("c"), said("d")]
    (response,) = read({"messages": turns}, tokenizers("qwen"), turns="last").responses
    assert shown(tokenizers("qwen"), response) == "[d<|im_end|>]"


@pytest.mark.parametrize(
    "empty", [said(""), said(None), said([{"type": "text", "text": " "}]), said("\n", tool_calls=[])]
)
def test_an_empty_turn_is_not_trained_on(tokenizers: Tokenizers, empty: dict[str, Any]) -> None:
    turns = [user("2+2="), empty, user("well?"), said("4")]
    with pytest.raises(UserError, match="message 1, an assistant's turn, is empty"):
        read({"messages": turns}, tokenizers("qwen"))
    turns[1] = {**empty, "weight": 0}
    assert shown(tokenizers("qwen"), read({"messages": turns}, tokenizers("qwen")).responses[0]).endswith(
        "[4<|im_end|>]"
    )


# Beginnings and ends


def test_the_end_of_a_turn_is_the_marker_of_the_next(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("glm")
    turns = [user("2+2="), said("4"), user("2+3="), said("5")]
    assert shown(tokenizer, read({"messages": turns}, tokenizer).responses[0]) == (
        "[4<|user|>]\n2+3=<|assistant|>\n[5<|user|>]"
    )
    rows = {"prompt": [user("2+3=")], "chosen": [said("5")], "rejected": [said("6")]}
    ends = [shown(tokenizer, one) for one in read(rows, tokenizer, pair).responses]
    assert ends == ["[5<|user|>]", "[6<|user|>]"]
    assert shown(tokenizer, read({"messages": turns}, tokenizer, turns="last").responses[0]) == "[5<|user|>]"


def test_the_marker_of_a_tool_ends_a_turn_before_it(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("glm")
    turns = [user("2+2="), said("add(2, 2)"), {"role": "tool", "content": "4"}, said("4")]
    assert shown(tokenizer, read({"messages": turns}, tokenizer).responses[0]) == (
        "[add(2, 2)<|observation|>]\n4<|assistant|>\n[4<|user|>]"
    )


def test_the_last_answer_ends_as_the_others_do(tokenizers: Tokenizers) -> None:
    turns = [user("2+2="), said("4"), user("2+3="), said("5")]
    expected = "[4<|im_end|>]\n<|user|>2+3=<|im_end|>\n<|assistant|>[5<|im_end|>]"
    assert shown(tokenizers("phi"), read({"messages": turns}, tokenizers("phi")).responses[0]) == expected
    turns[3] |= {"reasoning_content": "well"}
    marked = tokenizers("glm")
    assert shown(marked, read({"messages": turns}, marked).responses[0]).endswith("[<think>well</think>5<|user|>]")


def test_an_end_at_which_no_response_ends_is_told(tokenizers: Tokenizers, caplog: pytest.LogCaptureFixture) -> None:
    from distflow.data import responses

    responses._told_ends.clear()
    read({"messages": [user("2+2="), said("4")]}, tokenizers("glm"))
    told = [record.getMessage() for record in caplog.records if "eos_token_id" in record.getMessage()]
    assert len(told) == 1
    assert "ends responses with '<|user|>', at which the sampling of responses does not end" in told[0]


def test_without_any_marker_each_answer_ends_with_the_end_token(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("plain")
    turns = [user("2+2="), said("4"), user("2+3="), said("5", weight=1)]
    assert shown(tokenizer, read({"messages": turns}, tokenizer).responses[0]) == "[4</s>]\nQ: 2+3=\nA: [5</s>]"


@pytest.mark.parametrize("family", [None, *FAMILIES])
@pytest.mark.parametrize("make", [None, demonstration, pair])
def test_a_sequence_begins_once(tokenizers: Tokenizers, family: str | None, make: Make | None) -> None:
    tokenizer = tokenizers(family or "none", bos=True)
    row: dict[str, Any] = {"prompt": [user("6+5=")] if family else "6+5=", "response": "11"}
    row |= {"chosen": "11", "rejected": "12"}
    prompt = prompts([row], tokenizer, make).prompt(0)
    begin = tokenizer.encode("<s>")[0]
    assert prompt.token_ids[0] == begin
    assert prompt.token_ids.count(begin) == 1
    assert all(begin not in response.token_ids for response in prompt.responses)
    if family is None:
        assert list(prompt.token_ids) == tokenizer.pretrained.encode("6+5="), "as the tokenizer encodes a text"


def test_what_goes_on_has_no_beginning(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("none", bos=True)
    assert text(tokenizer, tokenizer.encode("+5=")) == "+5="
    assert text(tokenizer, tokenizer.encode("6+5=", begins=True)) == "<s>6+5="
    assert text(tokenizer, tokenizer.encode("<s>6+5=", begins=True)) == "<s>6+5="
    assert tokenizer.encode("", begins=True) == []


def metaspace(folder: Path, kind: str) -> PretrainedTokenizer:
    """A tokenizer that puts a space before texts: by its normalizer, as that of Llama 2, or before it splits them."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    if kind == "normalizer":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    elif kind == "bytes":
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=kind)
        core.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=kind)
    core.train_from_iterator(["0 1 2 3 4 5 6 7 8 9 = + 11 22 the sum is"], trainer)
    pretrained = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    pretrained.save_pretrained(folder)
    return PretrainedTokenizer(str(folder))


@pytest.mark.parametrize("kind", ["always", "first", "normalizer", "bytes"])
def test_no_space_is_put_where_texts_meet(tmp_path: Path, kind: str) -> None:
    tokenizer = metaspace(tmp_path, kind)
    whole = tokenizer.encode("6+5=the sum is 11", begins=True)
    assert whole == tokenizer.pretrained.encode("6+5=the sum is 11", add_special_tokens=False)
    prompt = prompts([{"prompt": "6+5=", "response": "the sum is 11"}], tokenizer, demonstration).prompt(0)
    *response, end = prompt.responses[0].token_ids
    space = tokenizer.pretrained.convert_tokens_to_ids("Ġ" if kind == "bytes" else "▁")
    assert end == tokenizer.eos_token_id
    assert response[0] != space
    assert tokenizer.decode_batch([[*prompt.token_ids, *response]], skip_special=True)[0].strip() == "6+5=the sum is 11"
    assert tokenizer.encode("=")[0] != space, "an environment's texts too"


# The beginning of an answer


@pytest.mark.parametrize("family", ["qwen", "glm", "llama2"])
def test_the_beginning_of_an_answer_stays(tokenizers: Tokenizers, family: str) -> None:
    tokenizer = tokenizers(family)
    turns = [user("6+5="), said("Let me see:")]
    for row in (
        {"prompt": turns, "answer": "11"},
        {"messages": turns, "reward_model": {"ground_truth": "11"}},
    ):
        made = prompts([row], tokenizer).prompt(0)
        assert text(tokenizer, made.token_ids).endswith("Let me see:")
        assert json.loads(made.task)["answer"] == "11"
    (response,) = (prompt := read({"messages": turns, "response": " 11"}, tokenizer)).responses
    assert text(tokenizer, prompt.token_ids).endswith("Let me see:")
    assert shown(tokenizer, response).startswith("[ 11"), "what begins the answer is not trained on"
    assert response.text == " 11"


@pytest.mark.parametrize("answer", ["11", 11, "11 "])
def test_an_answer_that_says_the_same_is_no_beginning(tokenizers: Tokenizers, answer: Any) -> None:
    made = prompts([{"prompt": [user("6+5="), said("11")], "answer": answer}], tokenizers("qwen")).prompt(0)
    assert text(tokenizers("qwen"), made.token_ids).endswith("<|im_start|>assistant\n")


def test_in_supervised_training_the_last_turn_is_the_response_beside_a_gold_answer(tokenizers: Tokenizers) -> None:
    row = {"messages": [user("6+5="), said("It is 11.")], "answer": "11"}
    assert shown(tokenizers("qwen"), read(row, tokenizers("qwen")).responses[0]) == "[It is 11.<|im_end|>]"


# What a template leaves out


TOOLS = [{"type": "function", "function": {"name": "add", "description": "sums", "parameters": {}}}]


@pytest.mark.parametrize(
    ("family", "row", "key"),
    [
        ("phi", {"messages": [user("6+5="), said("11", reasoning_content="6+4=10, +1")]}, "reasoning_content"),
        ("qwen", {"messages": [user("6+5="), said("11", thinking="6+4=10, +1")]}, "thinking"),
        ("glm", {"messages": [user("6+5="), said("I add.", tool_calls=[call("add", {"a": 6})])]}, "tool_calls"),
        ("llama2", {"messages": [user("6+5="), said("11")], "tools": TOOLS}, "tools"),
        ("qwen", {"messages": [user("6+5=", name="Ada"), said("11")]}, "name"),
        (
            "qwen",
            {"messages": [user("6+5="), said("11", reasoning_details=[{"type": "a", "text": "6+4=10"}])]},
            "reasoning_details",
        ),
        ("glm", {"messages": [user("6+5="), said("11", thinking=[{"thinking": "6+4=10"}])]}, "thinking"),
        ("llama2", {"messages": [user("6+5="), said("11", refusal="I would rather not")]}, "refusal"),
        ("qwen", {"messages": [user("6+5=", documents={"a": ["The sum."]}), said("11")]}, "documents"),
        (
            "mistral",
            {"messages": [{"role": "user", "content": "6+5="}, said("I add", tool_calls=[call("add", {})])]},
            "content",
        ),
    ],
)
def test_what_a_template_leaves_out_is_told(
    tokenizers: Tokenizers, family: str, row: dict[str, Any], key: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = prompts([row, row], tokenizers(family), demonstration)
    with caplog.at_level(logging.WARNING):
        assert made.prompt(0).responses
        assert made.prompt(1).responses
    told = [record.getMessage() for record in caplog.records if f"leaves out {key!r}" in record.getMessage()]
    assert len(told) == 1, "once a key"
    assert "prompt 0" in told[0]
    with pytest.raises(UserError, match=rf"prompt 0.*leaves out '{key}'"):
        read(row, tokenizers(family), strict=True)
    if key == "tools":
        with pytest.raises(UserError, match=r"prompt 0.*leaves out 'tools'"):
            prompts([row | {"messages": [user("6+5=")]}], tokenizers(family), strict=True).prompt(0)


def test_keys_that_need_not_be_written(tokenizers: Tokenizers) -> None:
    record = {"id": "chatcmpl-1", "finish_reason": "stop", "score": 0.7, "images": [], "audio": None, "text": "11"}
    row = {"messages": [user("6+5=", timestamp="2026-01-01"), said("11", **record)]}
    plain = {"messages": [user("6+5="), said("11")]}
    assert read(row, tokenizers("qwen"), strict=True) == read(plain, tokenizers("qwen"))


@pytest.mark.parametrize("family", ["glm", "llama2"])
def test_a_call_that_is_not_written_does_not_teach_to_stop(tokenizers: Tokenizers, family: str) -> None:
    row = {"messages": [user("6+5="), said("", tool_calls=[call("add", {"a": 6})])]}
    with pytest.raises(
        UserError, match="leaves out tool_calls of message 1, so that its end alone would be trained on"
    ):
        read(row, tokenizers(family))


def test_what_is_written_in_another_way_is_not_lost(tokenizers: Tokenizers) -> None:
    content = 'a "quoted"\n\\frac{1}{2} <b>é😀</b> & \t more '
    arguments = {"s": content, "n": 1.0, "big": 1e20, "t": True, "none": None, "l": ["x\ny", {"k": "ü"}]}
    turns = [
        user(content),
        said("", tool_calls=[call("f", arguments)]),
        {"role": "tool", "content": content},
        said("ok"),
    ]
    for family in ("qwen", "mistral"):
        assert read({"messages": turns}, tokenizers(family), strict=True).responses


def test_reasoning_of_earlier_turns_is_left_out_by_design(
    tokenizers: Tokenizers, caplog: pytest.LogCaptureFixture
) -> None:
    turns = [user("1"), said("2", reasoning_content="well"), user("3"), said("4", reasoning_content="hm")]
    with caplog.at_level(logging.INFO):
        made = prompts([{"messages": turns}], tokenizers("qwen"), demonstration, turns="last", strict=True).prompt(0)
    assert shown(tokenizers("qwen"), made.responses[0]) == "[<think>\nhm\n</think>\n4<|im_end|>]"
    assert [r.levelname for r in caplog.records if "reasoning of turns before" in r.getMessage()] == ["INFO"]


# Any conversation

_texts = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="⟦⟧"), min_size=1, max_size=12
)


@st.composite
def conversations(draw: st.DrawFn) -> dict[str, Any]:
    """A row whose every piece of text is one of a kind: it ends with a number of its own."""
    number = count()

    def one() -> str:
        return f"{draw(_texts)}⟦{next(number)}⟧"

    def content() -> Any:
        texts = [one() for _ in range(draw(st.integers(1, 2)))]
        return draw(st.sampled_from([" ".join(texts), [{"type": "text", "text": each} for each in texts]]))

    turns: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        turns.append(user(content()))
        if draw(st.booleans()):
            arguments = {one(): one(), "n": draw(st.sampled_from([1, 2.5, True, None]))}
            given = draw(st.sampled_from([arguments, json.dumps(arguments, ensure_ascii=False)]))
            turns += [said(content(), tool_calls=[call(one(), given)]), {"role": "tool", "content": content()}]
        reasoning = {"reasoning_content": one()} if draw(st.booleans()) else {}
        turns.append(said(content(), **reasoning, weight=draw(st.sampled_from([0, 1]))))
    turns[-1]["weight"] = 1
    tools = [{"type": "function", "function": {"name": one(), "parameters": {}}}] if draw(st.booleans()) else None
    return {"messages": turns, "tools": tools}


def leaves(value: Any) -> list[str]:
    if isinstance(value, str):
        try:
            return leaves(found) if isinstance(found := json.loads(value), dict) else [value]
        except ValueError:
            return [value]
    if isinstance(value, dict):
        return [leaf for item in value.items() for inner in item for leaf in leaves(inner)]
    return [leaf for inner in value for leaf in leaves(inner)] if isinstance(value, list) else []


def bare(given: str) -> str:
    """A text without white space and escapes."""
    return "".join(given.replace('\\"', '"').replace("\\\\", "\\").split())


@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(row=conversations())
def test_nothing_is_lost_without_a_word(
    tokenizers: Tokenizers, family: str, row: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizers(family, bos=True)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        try:
            prompt = read(row, tokenizer)
        except UserError as error:
            if "in another way when others follow" not in str(error):
                raise
            return
    told = " ".join(record.getMessage() for record in caplog.records)
    (response,) = prompt.responses
    written = bare(text(tokenizer, [*prompt.token_ids, *response.token_ids]))
    for turn in [*row["messages"], {"tools": row["tools"] or []}]:
        for key in ("content", "reasoning_content", "tool_calls", "tools"):
            texts = (
                [part["text"] for part in turn[key]]
                if key == "content" and not isinstance(turn.get(key), (str, type(None)))
                else leaves(turn.get(key))
            )
            lost = [one for one in texts if "⟦" in one and bare(one) not in written]
            assert not lost or f"leaves out {key!r}" in told or "reasoning of turns before" in told, (key, lost)
    mask = response.mask or (True,) * len(response.token_ids)
    trained = text(tokenizer, [token for token, kept in zip(response.token_ids, mask, strict=True) if kept])
    for turn in row["messages"]:
        parts = turn["content"] if isinstance(turn["content"], list) else [{"text": turn["content"]}]
        here = all(part["text"][part["text"].rindex("⟦") :] in trained for part in parts)
        counts = turn["role"] == "assistant" and turn.get("weight", 1) == 1
        assert here == counts or (counts and "leaves out 'content'" in told), turn
    begin = tokenizer.encode("<s>")[0]
    whole = [*prompt.token_ids, *response.token_ids]
    assert whole[0] == begin
    assert family == "llama2" or whole.count(begin) == 1
