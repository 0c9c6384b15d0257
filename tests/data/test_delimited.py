"""CSV and TSV files, and compressed files of all kinds of text."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from distflow.config.data_files import data_files
from distflow.data.files import Table, read
from distflow.data.responses import DataRow
from distflow.data.rows import check_columns
from distflow.errors import UserError
from distflow.workers.preference import labelled


def table(path: Path) -> Table:
    return read(path, lambda columns: check_columns(columns, {}))


def rows(path: Path) -> list[Any]:
    found = table(path)
    return [found[index] for index in range(len(found))]


def test_every_column_is_text(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text('\ufeff, prompt,answer,note\n0,1=,007,"a, ""b""\nc"\n\n1,2=,,\n2,3=,1.50,x\u2028y\x0cz\n')
    assert rows(path) == [
        {"prompt": "1=", "answer": "007", "note": 'a, "b"\nc'},
        {"prompt": "2=", "answer": "", "note": ""},
        {"prompt": "3=", "answer": "1.50", "note": "x\u2028y\x0cz"},
    ]
    assert [table(path).where(index).rpartition(":")[2] for index in range(3)] == ["2", "5", "6"]
    (tmp_path / "p.tsv").write_bytes(b'prompt\tanswer\r\n1=, 2\t"0\t7"\r\n')
    assert rows(tmp_path / "p.tsv") == [{"prompt": "1=, 2", "answer": "0\t7"}]


def test_long_fields(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("prompt,answer\n" + "1" * 300_000 + ",2\n")
    assert len(rows(tmp_path / "p.csv")[0]["prompt"]) == 300_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"prompt,answer\n1=,2\n3=,4,5\n", r"p\.csv:3: 3 fields, but the first line names 2 columns — put a text"),
        (b'prompt,answer\n"1\n=",2\n\n3=\n', r"p\.csv:5: 1 fields, but the first line names 2"),
        (
            b'prompt,answer\n1=,2\n3=,"4\n5=,6\n',
            r"p\.csv:3: a double quote in the row that begins here is never closed",
        ),
        (b'prompt,answer\n1=,"2"3\n', r"p\.csv:2: broken CSV: ',' expected after"),
        (b"prompt,answer\n1=,\xff\n", r"p\.csv:2: not UTF-8"),
        (b"prompt;answer\n1=;2\n", r"p\.csv:1: the columns are separated by semicolons, expected commas"),
        (b"prompt,prompt\n1=,2\n", r"p\.csv:1: there are two columns 'prompt': rename one"),
        (b"question,answer\n1=,2\n", r"p\.csv:1: there is no column 'prompt'.*data\.fields\.prompt=question"),
        (b"prompt,answer\n", r"p\.csv is empty; expected at least one row"),
        (b"", r"p\.csv is empty"),
    ],
)
def test_what_is_broken_is_told_with_its_line(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "p.csv").write_bytes(text)
    with pytest.raises(UserError, match=message):
        table(tmp_path / "p.csv")


def test_a_row_that_changes_during_the_run(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("prompt,answer\n1=,2\n")
    found = table(tmp_path / "p.csv")
    with (tmp_path / "p.csv").open("r+") as file:
        file.write("prompt,answer\n1=22")
    with pytest.raises(UserError, match=r"p\.csv:2: this row was whole when the run began"):
        found[0]


def test_labels_in_text() -> None:
    def label(given: str) -> float:
        row = DataRow({"response": "x", "label": given}, lambda: row)
        return labelled(row)[0].fields["label"]

    assert [label(text) for text in ("true", "False", "1", "0")] == [1.0, 0.0, 1.0, 0.0]
    with pytest.raises(UserError, match="the column 'label' is 'good'; expected true or false"):
        label("good")


PACK = {".gz": gzip.compress, ".zst": zstandard.compress}
LINES = b'{"prompt": "1="}\n\n{"prompt": "2="}\n'
TEXTS = {
    ".jsonl": LINES,
    ".ndjson": LINES,
    ".json": json.dumps([{"prompt": "1="}, {"prompt": "2="}]).encode(),
    ".csv": b"prompt\n1=\n2=\n",
    ".tsv": b"prompt\n1=\n2=\n",
}


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("kind", TEXTS)
def test_compressed_files(tmp_path: Path, kind: str, packed: str) -> None:
    path = tmp_path / f"p{kind}{packed}"
    path.write_bytes(PACK[packed](TEXTS[kind]))
    assert rows(path) == rows(path) == [{"prompt": "1="}, {"prompt": "2="}]


@pytest.mark.parametrize("packed", PACK)
def test_parts_one_behind_the_other(tmp_path: Path, packed: str) -> None:
    """As tools that compress in parallel write them."""
    path = tmp_path / f"p.jsonl{packed}"
    path.write_bytes(b"".join(PACK[packed](b'{"prompt": "%d="}\n' % n) for n in range(3)))
    assert [row["prompt"] for row in rows(path)] == ["0=", "1=", "2="]


@pytest.mark.parametrize("packed", PACK)
def test_compressed_files_that_are_broken(tmp_path: Path, packed: str) -> None:
    path = tmp_path / f"p.jsonl{packed}"
    whole = PACK[packed](os.urandom(3000).hex().encode() + LINES)
    for data in (whole[:-5], whole[:40], LINES):
        path.write_bytes(data)
        with pytest.raises(
            UserError, match=rf"p\.jsonl{packed} cannot be decompressed: .* — copy or compress it again"
        ):
            table(path)
    path.write_bytes(PACK[packed](LINES + b'{"prompt": '))
    with pytest.raises(UserError, match=rf"p\.jsonl{packed}:4: broken JSON"):
        table(path)


def test_no_room_to_unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        return Path("/dev/full").open("r+b", buffering=0)

    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(LINES * 1000))
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(UserError, match=r"p\.jsonl\.gz cannot be unpacked into a temporary file in .*No space left"):
        table(tmp_path / "p.jsonl.gz")


def test_folders_and_splits_of_compressed_files(tmp_path: Path) -> None:
    for name in ("train-0.jsonl.gz", "train-1.csv", "test.jsonl.zst", "notes.txt.gz", "x.parquet.gz", "p.csv.bz2"):
        (tmp_path / name).touch()
    assert [file.name for file in data_files(tmp_path, "train").files] == ["train-0.jsonl.gz", "train-1.csv"]
    assert [file.name for file in data_files(tmp_path, "test").files] == ["test.jsonl.zst"]
    with pytest.raises(UserError, match=r"x\.parquet\.gz is no file of prompts: expected .*\.csv.*\.gz, \.zst"):
        data_files(tmp_path / "x.parquet.gz")
