"""The log of rows that clients put: what is appended stays, whole lines alone count, and two can be compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.data.fed import FedRows, RowLog, by_clients, logged_line
from distflow.errors import UserError


def lines(*numbers: int, client: str = "a", call: int = 1) -> list[bytes]:
    return [logged_line(client, call, b'{"prompt": "%d"}' % number) for number in numbers]


def test_what_is_appended_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    first = RowLog(tmp_path / "rows" / "0.jsonl")
    first.append(lines(0, 1))
    first.append(lines(2, client="b", call=7))
    first.close()
    again = RowLog(tmp_path / "rows" / "0.jsonl")
    assert [again[index]["prompt"] for index in range(len(again))] == ["0", "1", "2"]
    assert again.taken == {"a": (1, 2), "b": (7, 1)}
    assert not again.ended
    again.append([logged_line("a", 2, None)])
    assert (len(again), again.lines, again.ended) == (3, 4, True)


@pytest.mark.parametrize("torn", [b'{"client":"a","call":2,"row":{"prompt"', lines(9)[0].rstrip(b"\n")])
def test_a_line_that_was_cut_off_does_not_count(tmp_path: Path, torn: bytes) -> None:
    log = RowLog(tmp_path / "0.jsonl")
    log.append(lines(0))
    log.close()
    with log.path.open("ab") as file:
        file.write(torn)
    again = RowLog(log.path)
    assert len(again) == 1
    again.append(lines(1, call=2))
    again.close()
    assert log.path.read_bytes() == b"".join([*lines(0), *lines(1, call=2)])


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    path.write_bytes(lines(0)[0] + b"what is this\n")
    with pytest.raises(UserError, match="0.jsonl:2: this is no row that a client has put"):
        RowLog(path)


def test_nothing_is_appended_of_what_has_a_broken_line(tmp_path: Path) -> None:
    log = RowLog(tmp_path / "0.jsonl")
    with pytest.raises(UserError, match="line 2: this is no row"):
        log.append([*lines(0), b"{}\n"])
    assert (len(log), log.path.read_bytes()) == (0, b"")


def test_logs_with_the_same_lines_have_the_same_checksums(tmp_path: Path) -> None:
    one, other = RowLog(tmp_path / "0.jsonl"), RowLog(tmp_path / "1.jsonl")
    one.append(lines(0, 1, 2))
    for line in lines(0, 1, 3):
        other.append([line])
    assert [one.check(count) == other.check(count) for count in range(4)] == [True, True, True, False]
    assert one.some(1, 1) == lines(1)[0], "at least one"
    assert one.some(0, 10_000) == b"".join(lines(0, 1, 2))
    assert one.some(0, len(lines(0)[0]) * 2) == b"".join(lines(0, 1))
    other.clear()
    assert (other.lines, other.path.read_bytes(), other.taken) == (0, b"", {})


@pytest.mark.parametrize("numbers", [{"rows": 0}, {"rows": 8, "ahead": 0}, {"rows": 10_000_001}])
def test_numbers_that_make_no_sense_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"expected 1 to 10000000"):
        by_clients(**numbers)


def test_outside_of_a_run_there_is_no_row() -> None:
    rows = by_clients(rows=3)
    assert isinstance(rows, FedRows)
    assert len(rows) == 3
    with pytest.raises(UserError, match="prompts come from clients while the run goes on"):
        rows[0]
