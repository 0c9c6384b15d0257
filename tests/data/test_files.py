"""Files of prompts: rows, where they stand, and what is told of broken ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from distflow.config.data_schema import SourceConfig
from distflow.config.paths import absolute_paths
from distflow.data.loading import open_source
from distflow.data.order import PromptOrder, PromptSettings, SourceUse
from distflow.errors import UserError
from distflow.workers.tokenizers import CharTokenizer, PretrainedTokenizer

TOKENIZER = CharTokenizer("chars:0123456789=")
GSM8K = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "12"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}
"""A row as verl's examples/data_preprocess/gsm8k.py writes it."""


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def opened(path: Path | str, **source: Any) -> SourceUse:
    return open_source("", SourceConfig.model_validate({"source": str(path), **source}), lambda call: call)


def order(use: SourceUse, tokenizer: Any = TOKENIZER, **settings: Any) -> PromptOrder:
    values = {"seed": 5, "shuffle": False, "chat": False, "max_prompt_tokens": 16} | settings
    return PromptOrder([use], tokenizer, PromptSettings(**values))


@pytest.fixture
def chat(tmp_path: Path) -> Callable[[str], PretrainedTokenizer]:
    """A tokenizer of digits with a chat template."""

    def make(template: str) -> PretrainedTokenizer:
        tokenizer = CharTokenizer("chars:0123456789=+")
        tokenizer.pretrained.chat_template = template
        tokenizer.save(tmp_path / "tokenizer")
        return PretrainedTokenizer(str(tmp_path / "tokenizer"))

    return make


def arrow(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_lines_of_a_file(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "1=", "answer": "1", "level": 3}, "", {"prompt": "22=", "answer": 2})
    use = opened(path)
    assert len(use.rows) == 2
    first, second = (order(use).prompt(position) for position in (0, 1))
    assert (first.text, json.loads(first.task)) == ("1=", {"answer": "1", "level": 3})
    assert (second.text, json.loads(second.task)) == ("22=", {"answer": 2})
    assert use.label(1).endswith("p.jsonl:3)"), "empty lines count"


def test_the_lines_of_rows_between_empty_ones(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\n  \n{"prompt": "1="}\n{"prompt": "2="}\n\n\n{"prompt": "3="}\n\n')
    use = opened(path)
    assert [use.label(index).rpartition(":")[2] for index in range(3)] == ["3)", "4)", "7)"]


def test_a_prompt_reads_its_own_line_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt": "1=", "answer": "1" * 100}
    made = order(opened(lines(tmp_path / "p.jsonl", *[row] * 2000)))
    # What is open already can still be read, but nobody can open the file again.
    (tmp_path / "p.jsonl").unlink()
    taken: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: taken.append(size) or pread(file, size, at))
    assert [made.prompt(position).text for position in (0, 1999)] == ["1=", "1="]
    assert taken == [len(json.dumps(row)) + 1] * 2, "the last line costs as much as the first one"


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_the_end_of_a_file_and_its_beginning(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(("\ufeff" + '{"prompt": "1="}\r\n{"prompt": "2=", "nan": NaN}' + ending).encode())
    assert [order(opened(path)).prompt(n).text for n in (0, 1)] == ["1=", "2="]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "1="}\n\n{"prompt": "2="\n', r"p\.jsonl:3: broken JSON: .* ',' delimiter at the end of the line"),
        ('{"prompt": "1=}\n', r"p\.jsonl:1: broken JSON: Unterminated string starting at column 12"),
        ('{"prompt": "1="}\n{"prompt" 2}\n', r"p\.jsonl:2: broken JSON: Expecting ':' delimiter at column 11$"),
        ('{"prompt": "1="}\n"2="\n', r"p\.jsonl:2: expected a JSON object with columns, got '\"2=\"'"),
        ("", r"p\.jsonl is empty; expected at least one row"),
        ("\n\n", r"p\.jsonl is empty"),
        (
            '{"prompt": "1="}\n{"question": "1=", "answer": 3}\n',
            r"p\.jsonl:2: there is no column 'prompt' \(or 'messages'\); there are answer, question — "
            r"data\.fields\.prompt=question",
        ),
        ('{"prompt": "\xff"}'.encode("latin-1"), r"p\.jsonl:1: not UTF-8: 'utf-8' codec can't decode"),
        ('["1="]'.encode("utf-16"), r"p\.jsonl:1: not UTF-8"),
        ('{"prompt": "1="}\n\x0c\n{"prompt": "2="}\n', r"p\.jsonl:2: broken JSON: Expecting value at column 1"),
        ('[ "' + "é" * 60 + '"]', r"p\.jsonl:1: expected a JSON object with columns, got '\[ \"éé"),
        ("{}\n", r"p\.jsonl:1: there is no column 'prompt'"),
        (
            '{"prompt": "1="}\n{"prompt": "2=", "note": {"a": ["\\ud83d"]}}\n',
            r"p\.jsonl:2: column 'note' has a lone surrogate \\ud83d, .* — leave it out, or write \\ufffd for it",
        ),
        (
            '{"prompt": "1=", "a": ' + "9" * 5000 + "}",
            r"p\.jsonl:1: a number of more than 4300 digits — write it as text",
        ),
        *(
            ('{"prompt": "1=", "a": ' + "[" * deep + "]" * deep + "}", r"p\.jsonl:1: .*nested more than 200 deep")
            for deep in (201, 2000, 100_000)
        ),
    ],
)
def test_broken_files_are_told_by_line_at_the_start(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        opened(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "1=", "a": "\\ud83d"}', r"p\.json, entry 1: column 'a' has a lone surrogate \\ud83d"),
        ('{"prompt": ' + "9" * 5000 + "}", r"p\.json: a number of more than 4300 digits"),
        *(
            ('{"prompt": "1=", "a": ' + "[" * deep + "]" * deep + "}", r"p\.json.*: .*nested more than 200 deep")
            for deep in (201, 100_000)
        ),
    ],
)
def test_what_json_says_but_nobody_can_send_is_told_at_the_start(tmp_path: Path, row: str, message: str) -> None:
    (tmp_path / "p.json").write_text(f"[{row}]")
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "p.json")


def test_escapes_deep_values_and_many_turns_are_taken(tmp_path: Path) -> None:
    deep = '{"prompt": "1=", "nan": NaN, "a": ' + "[" * 190 + '"\\ud83d\\ude00"' + "]" * 190 + "}"
    turns = {"prompt": "2=", "turns": [{"role": "user"}] * 300}
    made = order(opened(lines(tmp_path / "p.jsonl", deep, turns)))
    assert "\U0001f600" in made.prompt(0).task
    assert len(json.loads(made.prompt(1).task)["turns"]) == 300


def test_what_is_there_but_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    for name in ("p.jsonl", "loop.jsonl"):
        found = absolute_paths({"data": {"source": name}}, lambda key: tmp_path, tmp_path)
        with pytest.raises(UserError, match=rf"{name} is neither a file nor a folder"):
            opened(found["data"]["source"])


def test_a_line_that_changes_during_the_run(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "1="}, {"prompt": "2="})
    use = opened(path)
    path.write_text(path.read_text().replace('"2="}', "      "))
    assert order(use).prompt(0).text == "1="
    with pytest.raises(UserError, match=r"p\.jsonl:2: this line was whole when the run began"):
        order(use).prompt(1)


def test_json_lists(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('  [{"prompt": "1="},\n {"prompt": "2="}]')
    assert order(opened(path)).prompt(1).text == "2="
    path.write_text('[{"prompt": "1="},\n {"prompt": "2=]')
    with pytest.raises(UserError, match=r"p\.json:2: broken JSON"):
        opened(path)
    path.write_text('[{"prompt": "1="}, 7]')
    with pytest.raises(UserError, match=r"p\.json, entry 2: expected an object with columns, got '7'"):
        opened(path)


def test_columns_by_other_names(tmp_path: Path) -> None:
    row = {"question": "1=", "meta": {"solution": "1", "hard": True}, "answer": "no", "n": 3}
    path = lines(tmp_path / "p.jsonl", row)
    use = opened(path, fields={"prompt": "question", "answer": "meta.solution", "size": "n"})
    prompt = order(use).prompt(0)
    assert prompt.text == "1="
    assert json.loads(prompt.task) == {"meta": row["meta"], "answer": "1", "size": 3, "n": 3}
    named = json.loads(order(opened(path, fields={"prompt": "question", "answer": "n"})).prompt(0).task)
    assert named == {"meta": row["meta"], "answer": 3, "n": 3}, "by both names"
    with pytest.raises(UserError, match=r"p\.jsonl:1: there is no column 'anser' \(data\.fields\.answer\); there are"):
        opened(path, fields={"prompt": "question", "answer": "anser"})
    with pytest.raises(UserError, match=r"q\.jsonl:1: there is no column 'prompt'.*, or remove data\.fields\.q=prompt"):
        opened(lines(tmp_path / "q.jsonl", {"prompt": "1=", "answer": "1"}), fields={"q": "prompt"})
    with pytest.raises(UserError, match=r"prompt 0 \(.*p\.jsonl:1\): there is no column 'meta\.x'.*there are solution"):
        order(opened(path, fields={"prompt": "question", "x": "meta.x"})).prompt(0)


def test_verls_layout_in_parquet(tmp_path: Path, chat: Callable[[str], PretrainedTokenizer]) -> None:
    path = arrow(tmp_path / "train.parquet", [{**GSM8K, "day": date(2024, 1, 2)}])
    tokenizer = chat("{% for m in messages %}+{{ m.content }}{% endfor %}=")
    prompt = order(opened(path), tokenizer).prompt(0)
    assert tokenizer.decode_batch([prompt.token_ids], skip_special=False) == ["+12="]
    assert prompt.text == "12"
    task = json.loads(prompt.task)
    assert task == {key: value for key, value in GSM8K.items() if key != "prompt"} | {
        "answer": "72",
        "day": "2024-01-02",
    }


def typed(path: Path, **columns: Any) -> Path:
    """A Parquet file with one row; each column has a value and a type."""
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pa.table({name: pa.array([value], kind) for name, (value, kind) in columns.items()}), path)
    return path


def test_maps_of_a_table_are_objects_at_every_depth(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    ports = pa.map_(pa.string(), pa.struct([("depth", pa.float32()), ("ships", pa.map_(pa.string(), pa.int64()))]))
    harbour = [("Brest", {"depth": 0.7, "ships": [("Abeille", 1), ("none", None)]})]
    turn = pa.list_(pa.map_(pa.string(), pa.string()))
    path = typed(
        tmp_path / "maps.parquet",
        messages=([[("role", "user"), ("content", "1=")]], turn),
        ports=(harbour, ports),
        several=([harbour, None], pa.list_(ports)),
        none=([], ports),
    )
    prompt = order(opened(path), CharTokenizer("chars:0123456789=+"), chat=False).given(opened(path), 0)
    expected = {"Brest": {"depth": 0.7, "ships": {"Abeille": 1, "none": None}}}
    assert prompt.messages == [{"role": "user", "content": "1="}]
    assert prompt.task == {"ports": expected, "several": [expected, None], "none": {}}
    path = typed(
        tmp_path / "twice.parquet", prompt=("1=", pa.string()), m=([("a", 1), ("a", 2)], pa.map_("string", "int8"))
    )
    with pytest.raises(UserError, match=r"twice\.parquet, row 1\): a map of the table has the key 'a' twice"):
        order(opened(path)).prompt(0)


@pytest.mark.parametrize(
    ("width", "value"), [("float32", 0.3), ("float16", 2.7), ("float32", 1e-7), ("float64", 1 / 3)]
)
def test_numbers_have_the_digits_of_their_width(tmp_path: Path, width: str, value: float) -> None:
    pa = pytest.importorskip("pyarrow")
    kind = pa.float16() if width == "float16" else getattr(pa, width)()
    path = typed(
        tmp_path / "p.parquet",
        prompt=("1=", pa.string()),
        answer=(value, kind),
        inner=({"all": [value, None, 16.0]}, pa.struct([("all", pa.list_(kind))])),
        few=(value, pa.dictionary(pa.int8(), kind) if width == "float32" else kind),
        nothing=(None, kind),
    )
    task = json.loads(order(opened(path)).prompt(0).task)
    assert task == {"answer": value, "inner": {"all": [value, None, 16]}, "few": value, "nothing": None}
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict(
        {"prompt": ["1="], "answer": [[value]]},
        features=datasets.Features({"prompt": datasets.Value("string"), "answer": [datasets.Value(width)]}),
    )
    use = open_source("", SourceConfig.model_validate({"source": "m:f"}), lambda name: lambda: rows)
    assert json.loads(order(use).prompt(0).task) == {"answer": [value]}


def test_a_broken_parquet_file(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "p.parquet").write_text("no")
    with pytest.raises(UserError, match=r"p\.parquet cannot be read as a Parquet file: "):
        opened(tmp_path / "p.parquet")
    arrow(tmp_path / "b.parquet", [{"prompt": b"1="}])
    with pytest.raises(UserError, match=r"b\.parquet, row 1\): the prompt is .*b'1='.*; expected text"):
        order(opened(tmp_path / "b.parquet")).prompt(0)
    arrow(tmp_path / "p.parquet", [{"text": "1="}])
    with pytest.raises(UserError, match=r"p\.parquet: there is no column 'prompt'.*data\.fields\.prompt=text"):
        opened(tmp_path / "p.parquet")


def test_pyarrow_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "p.parquet").touch()
    with pytest.raises(UserError, match=r"needs the package pyarrow, .* pip install 'distflow-rl\[parquet\]'"):
        opened(tmp_path / "p.parquet")


def test_folders(tmp_path: Path) -> None:
    lines(tmp_path / "b.jsonl", {"prompt": "3="})
    lines(tmp_path / "a.jsonl", {"prompt": "1="}, {"prompt": "2="})
    (tmp_path / "README.md").touch()
    use = opened(tmp_path)
    assert [order(use).prompt(n).text for n in range(3)] == ["1=", "2=", "3="]
    assert use.label(2).endswith("b.jsonl:1)")


def test_folders_with_splits(tmp_path: Path) -> None:
    lines(tmp_path / "train-00000-of-00001.jsonl", {"prompt": "1="})
    lines(tmp_path / "test-00000-of-00001.jsonl", {"prompt": "2="})
    with pytest.raises(UserError, match=r"has the splits test, train: add data\.with\.split=train"):
        opened(tmp_path)
    assert order(opened(tmp_path, **{"with": {"split": "test"}})).prompt(0).text == "2="
    with pytest.raises(UserError, match=r"has test, train, and no 'dev'"):
        opened(tmp_path, **{"with": {"split": "dev"}})
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"none has no file of prompts: expected \.jsonl"):
        opened(tmp_path / "none")


def test_data_sets_saved_by_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"prompt": f"{n}=", "answer": str(n)} for n in range(10)])
    data.select([3, 5]).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([7])}).save_to_disk(tmp_path / "both")
    assert [order(opened(tmp_path / "one")).prompt(n).text for n in (0, 1)] == ["3=", "5="]
    with pytest.raises(UserError, match=r"has the splits test, train: add data\.with\.split=train"):
        opened(tmp_path / "both")
    assert order(opened(tmp_path / "both", **{"with": {"split": "test"}})).prompt(0).text == "7="


def test_what_hugging_face_loads(tmp_path: Path) -> None:
    """There is no hub here: a folder, which its function takes as well."""
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    lines(tmp_path / "set" / "train.jsonl", {"prompt": "1=", "answer": "1"})
    assert order(opened(f"hub:{tmp_path}/set")).prompt(0).text == "1="
    with pytest.raises(UserError, match=r"the data set hub:/.*/absent cannot be loaded: "):
        opened(f"hub:{tmp_path}/absent")


def test_conversations(tmp_path: Path, chat: Callable[[str], PretrainedTokenizer]) -> None:
    turns = [{"role": "system", "content": "1"}, {"role": "user", "content": [{"type": "text", "text": "2"}]}]
    answered = [*turns, {"role": "assistant", "content": "3"}]
    path = lines(tmp_path / "p.jsonl", {"messages": answered}, {"prompt": turns, "tools": '[{"name": "4"}]'})
    tokenizer = chat(
        "{% for m in messages %}{{ m.role | length }}"
        "{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
        "{% for t in tools or [] %}+{{ t.function.name }}{% endfor %}{% if thinking %}={% endif %}"
    )
    prompts = order(opened(path), tokenizer, chat_template_args={"thinking": True})
    first, second = prompts.prompt(0), prompts.prompt(1)
    written = tokenizer.decode_batch([first.token_ids, second.token_ids], skip_special=False)
    assert written == ["6142=", "6142+4="]
    assert first.text == "system: 1\n\nuser: 2"
    assert json.loads(first.task) == {"answer": "3"}, "an assistant's turn at the end is the answer"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": []}, r"p\.jsonl:1\): the prompt is '\[\]', a list; expected text, or a list of chat messages"),
        ({"prompt": ["x"]}, r"message 0 is 'x'; expected \{role: user, content: …\}"),
        ({"prompt": [{"role": "user", "content": 3}]}, r"message 0 has content that is no text: '3'"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, r"message 0 has content that is no text"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, r"one assistant's turn alone"),
        ({"prompt": "1=", "tools": "{"}, r"the column 'tools' is text, but no JSON"),
        ({"prompt": [{"role": "user", "content": "1"}]}, r"chat messages, .* but tokenizer .* has none — a model"),
    ],
)
def test_bad_conversations(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        order(opened(lines(tmp_path / "p.jsonl", row))).prompt(0)


def test_a_template_that_fails_names_the_prompt(tmp_path: Path, chat: Callable[[str], PretrainedTokenizer]) -> None:
    row = {"prompt": [{"role": "tool", "content": "1"}]}
    use = opened(lines(tmp_path / "p.jsonl", {"prompt": [{"role": "user", "content": "1"}]}, row))
    tokenizer = chat(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}1{% endfor %}"
    )
    prompts = order(use, tokenizer)
    assert prompts.prompt(0).token_ids
    message = (
        r"prompt 1 \(.*p\.jsonl:2\) .*the chat template of '.*' fails: TemplateError: no tools here — .* roles tool"
    )
    with pytest.raises(UserError, match=message):
        prompts.prompt(1)


def test_template_arguments_without_a_template(tmp_path: Path) -> None:
    use = opened(lines(tmp_path / "p.jsonl", {"prompt": "1="}))
    with pytest.raises(UserError, match=r"is a text, which no chat template writes, but data\.chat_template_args"):
        order(use, chat_template_args={"enable_thinking": False}).prompt(0)


def test_what_functions_may_return() -> None:
    def use(made: Any, **source: Any) -> SourceUse:
        section = SourceConfig.model_validate({"source": "m:f", **source})
        return open_source("", section, lambda call: lambda: made)

    rows = use(({"q": f"{n}="} for n in range(3)), fields={"prompt": "q"})
    assert [order(rows).prompt(n).text for n in range(3)] == ["0=", "1=", "2="]
    assert order(use(["1=", "2="])).prompt(1).text == "2="
    from distflow.data.sources import PromptText

    with pytest.raises(UserError, match=r"data\.fields names columns, but the data source gives PromptText"):
        order(use([PromptText("1=", {})], fields={"prompt": "q"})).prompt(0)
