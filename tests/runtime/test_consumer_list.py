"""The list of lossless consumers on a disk that is slow, or refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from distflow.runtime.disk import ConsumerList
from tests.polling import eventually


def test_the_newest_list_is_written_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, said, goes_on = tmp_path / "consumers" / "trainer-0.json", list[list[str]](), threading.Event()
    faults: list[Exception] = []

    def written(names: Iterable[str]) -> None:
        said.append(list(names))
        goes_on.wait(10)

    consumers = ConsumerList(file, written, faults.append)
    consumers.start()
    consumers.write({"all": ["uid"]})
    eventually(lambda: said, "the first list")
    assert json.loads(file.read_text()) == {"all": ["uid"]}
    for names in (["all", "more"], ["more"], []):
        consumers.write({name: ["uid"] for name in names})
    goes_on.set()
    consumers.close()
    assert faults == []
    assert (said, json.loads(file.read_text())) == ([["all"], []], {})


def test_a_disk_that_refuses_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "consumers").write_text("in the way")
    said, faults = list[list[str]](), list[Exception]()
    file = tmp_path / "consumers" / "trainer-0.json"
    consumers = ConsumerList(file, lambda names: said.append(list(names)), faults.append)
    consumers.start()
    consumers.write({"all": ["uid"]})
    eventually(lambda: said == [["all"]], "the word")
    consumers.close()
    assert faults == []
    assert "consumers may miss samples after a restart" in caplog.text
