"""Waits for SGLang's process end with the run. A few lines stand in for that process here."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from distflow.errors import RunStopped
from distflow.workers.engines import sglang_process
from distflow.workers.engines.sglang_process import EngineProcess, EngineStart
from tests.polling import WAIT_S

SILENT = "import time; time.sleep(60)"
READY = """
import json, socket, sys, time
sys.path[:] = json.loads(sys.argv[1])
from distflow.workers.engines.sglang_wire import frame
line = socket.socket(fileno=int(sys.argv[2]))
line.sendall(frame({"ready": "0"}))
time.sleep(60)
"""


LATE = """
import json, socket, sys
sys.path[:] = json.loads(sys.argv[1])
from distflow.workers.engines.sglang_wire import Frames, frame
line, frames, asked = socket.socket(fileno=int(sys.argv[2])), Frames(), []
line.sendall(frame({"ready": "0"}))
while data := line.recv(4096):
    for message in frames.feed(data):
        if message["do"] == "score":
            asked.append(message["ask"])
        elif message["do"] == "samples":
            line.sendall(frame({"tokens": [], "lost": asked[-1]}))
        elif message["do"] == "load":
            line.sendall(b"".join(frame({"done": ask, "logprobs": [[-1.0 * ask]]}) for ask in asked))
            asked.clear()
            line.sendall(frame({"done": message["ask"]}))
"""


class Run:
    """Stops at the second call; calls count only while `waiting` is set."""

    def __init__(self) -> None:
        self.waiting = True
        self.asked = 0

    def go_on(self) -> None:
        self.asked += self.waiting
        if self.asked > 1:
            raise RunStopped("ctrl-c")


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def test_a_start_ends_with_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And leaves neither a process nor a file."""
    monkeypatch.setattr(sglang_process, "_BOOT", SILENT)
    before = children()
    began = time.monotonic()
    with open("/dev/null") as memory, pytest.raises(RunStopped, match="ctrl-c"):
        EngineProcess(EngineStart("{}", {}, {}, memory.fileno(), "memory", 60.0, tmp_path, Run().go_on))
    assert time.monotonic() - began < 20.0
    assert children() == before
    assert list(tmp_path.iterdir()) == []


def test_a_question_ends_with_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sglang_process, "_BOOT", READY)
    run = Run()
    run.waiting = False
    with open("/dev/null") as memory:
        process = EngineProcess(EngineStart("{}", {}, {}, memory.fileno(), "memory", 60.0, tmp_path, run.go_on))
    run.waiting = True
    began = time.monotonic()
    with pytest.raises(RunStopped, match="ctrl-c"):
        process.ask({"do": "load"})
    assert time.monotonic() - began < 20.0
    process.close()


def test_an_answer_that_takes_long_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sglang_process, "_BOOT", LATE)
    run = Run()
    run.waiting = False
    with open("/dev/null") as memory:
        process = EngineProcess(EngineStart("{}", {}, {}, memory.fileno(), "memory", 60.0, tmp_path, run.go_on))
    unwanted, wanted = process.begin({"do": "score"}), process.begin({"do": "score"})
    assert process.answer(wanted, 0.01) is None
    process.send({"do": "samples"})
    assert process.receive(WAIT_S) == [{"tokens": [], "lost": wanted}]
    process.forget(unwanted)
    process.ask({"do": "load"})
    assert process.answer(wanted, 0.0) == {"done": wanted, "logprobs": [[-1.0 * wanted]]}
    assert not process._answers, "nobody looks for it"
    process.close()


def test_its_sockets_lie_with_those_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run removes them if the worker is killed before it can."""
    monkeypatch.setattr(sglang_process, "_BOOT", SILENT)
    seen: list[Path] = []

    def look() -> None:
        seen.extend(tmp_path.glob("*/config.json"))
        raise RunStopped("seen")

    with open("/dev/null") as memory, pytest.raises(RunStopped):
        EngineProcess(EngineStart("{}", {}, {}, memory.fileno(), "memory", 60.0, tmp_path, look))
    assert len(seen) == 1
