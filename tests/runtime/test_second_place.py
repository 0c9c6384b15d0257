"""Copies of checkpoints at a second place: whole or without COMMIT, kept as here, tried again, never waited for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from distflow.runtime.checkpoint.commit import COMMIT, COPIED, COPY_FAILED, LAST, Keeping, examine
from distflow.runtime.checkpoint.parts import CheckpointWriter
from distflow.types import Version
from distflow.workers import second_place
from distflow.workers.second_place import CopyThread, SecondPlace, Told
from tests.polling import eventually

TWO = {"trainer-0": 0, "trainer-1": 1}


class Flaky(LocalFileSystem):
    """A local folder behind a network: writing fails, or hangs, as often as it is told to."""

    protocol = "flaky"
    failures: ClassVar[list[str]] = []
    """Ends of names that cannot be written now, each once."""
    gate = threading.Event()
    written: ClassVar[list[str]] = []

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            Flaky.gate.wait(60)
            for end in [end for end in Flaky.failures if path.endswith(end)]:
                Flaky.failures.remove(end)
                raise ConnectionError(f"{path}: no route to host")
            Flaky.written.append(path.rpartition("/")[2])
        return super().open(path, mode, **options)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture(autouse=True)
def _network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(second_place, "RETRY_S", (0.05,))
    Flaky.failures.clear()
    Flaky.written.clear()
    Flaky.gate.set()
    yield
    Flaky.gate.set()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.json").write_text("{}")
    return tmp_path / "runs" / "mine"


def write(
    run_dir: Path, step: int, *, term: int = 0, score: float | None = None, workers: tuple[int, ...] = (0,)
) -> Path:
    """A checkpoint of some training workers, which keeps all older ones."""
    version, parts = Version(term, step), {}
    for number in workers:
        writer = CheckpointWriter(run_dir, f"trainer-{number}", "digest", Keeping(99, "score"))
        parts |= writer.write_parts(version, {}, {"home": "trainer", "steps": {}, "term": term})
    return writer.commit(version, parts, score)


def place(
    run_dir: Path, to: Path, keeping: Keeping = LAST, hosts: dict[str, int] | None = None, host: int = 0
) -> SecondPlace:
    return SecondPlace(f"flaky://{to}", run_dir, keeping, hosts or {"trainer-0": 0}, host)


def whole(to: Path) -> list[int]:
    """The training steps of the whole checkpoints there."""
    folders = sorted((to / "mine" / "checkpoints").glob("step_*"))
    return [int(folder.name[5:]) for folder in folders if examine(folder)[1] == ""]


complaints: list[str] = []
"""What the copies of the present test have told at the end."""


def copies(make: Callable[[], SecondPlace], held: set[Path], *, alone: bool = True) -> tuple[CopyThread, Counter[str]]:
    counts: Counter[str] = Counter()
    complaints.clear()

    def add(name: str, value: float) -> None:
        counts[name] += int(value)

    told = Told(lambda amount: None, add, held.add, held.discard, complaints.append)
    return CopyThread(make, "there", told, alone=alone), counts


def test_a_copy_is_whole_and_kept_as_here(run_dir: Path, tmp_path: Path) -> None:
    to, noted = tmp_path / "to", []
    there = place(run_dir, to, Keeping(2, "score"))
    for step, score in ((10, 0.9), (20, 0.1), (30, 0.2), (40, 0.3)):
        there.copy(write(run_dir, step, score=score), noted.append)
    assert whole(to) == [10, 30, 40]
    assert sum(noted) > 0
    assert (to / "mine" / "run.json").read_text() == "{}"
    assert not (to / "mine" / "checkpoints" / "step_000020").exists()


def test_what_breaks_off_has_no_commit_until_it_is_copied_again(run_dir: Path, tmp_path: Path) -> None:
    to, folder = tmp_path / "to", write(run_dir, 10)
    Flaky.failures.append("worker-trainer-0.json")
    with pytest.raises(ConnectionError):
        place(run_dir, to).copy(folder, lambda amount: None)
    assert whole(to) == []
    place(run_dir, to).copy(folder, lambda amount: None)
    assert whole(to) == [10]
    # Once it is there, nothing is written again.
    Flaky.written.clear()
    place(run_dir, to).copy(folder, lambda amount: None)
    assert Flaky.written == []


def test_a_checkpoint_of_an_earlier_term_is_void_while_it_is_replaced(run_dir: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    place(run_dir, to).copy(write(run_dir, 10), lambda amount: None)
    folder = write(run_dir, 10, term=1)
    Flaky.failures.append("worker-trainer-0.json")
    with pytest.raises(ConnectionError):
        place(run_dir, to).copy(folder, lambda amount: None)
    assert not (to / "mine" / "checkpoints" / "step_000010" / COMMIT).exists()
    place(run_dir, to).copy(folder, lambda amount: None)
    assert whole(to) == [10]


def test_a_part_of_another_size_there_is_no_copy(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, folder = tmp_path / "to", write(run_dir, 10)
    monkeypatch.setattr(SecondPlace, "_put", lambda self, path, to, note: self._fs.pipe_file(to, b"half"))
    with pytest.raises(OSError, match="has 4 bytes there, COMMIT says"):
        place(run_dir, to).copy(folder, lambda amount: None)
    assert not (to / "mine" / "checkpoints" / "step_000010" / COMMIT).exists()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_host_copies_its_own_parts_and_the_last_one_commits(
    run_dir: Path, tmp_path: Path, order: tuple[int, int]
) -> None:
    to, folder = tmp_path / "to", write(run_dir, 10, workers=(0, 1))
    first, last = (place(run_dir, to, hosts=TWO, host=host) for host in order)
    first.copy(folder, lambda amount: None)
    assert f"worker-trainer-{order[1]}.json" not in Flaky.written
    assert whole(to) == []
    assert last.begun(folder)
    last.copy(folder, lambda amount: None)
    assert whole(to) == [10]
    assert sorted(path.name for path in (to / "mine" / "checkpoints" / "step_000010").iterdir()) == [
        COMMIT,
        "worker-trainer-0.json",
        "worker-trainer-1.json",
    ]


def test_prompts_of_clients_lie_with_each_checkpoint(run_dir: Path, tmp_path: Path) -> None:
    """So that one that is whole has its own, whatever becomes of the next copy."""
    to, log = tmp_path / "to", run_dir / "prompts" / "trainer-0.jsonl"
    log.parent.mkdir()
    log.write_text("1\n")
    place(run_dir, to, Keeping(9)).copy(write(run_dir, 10), lambda amount: None)
    log.write_text("1\n2\n")
    Flaky.failures.append(log.name)
    newer = write(run_dir, 20)
    with pytest.raises(ConnectionError):
        place(run_dir, to, Keeping(9)).copy(newer, lambda amount: None)
    assert whole(to) == [10], "none without its prompts"
    place(run_dir, to, Keeping(9)).copy(newer, lambda amount: None)
    there = {step: to / "mine" / "checkpoints" / f"step_{step:06d}" / "prompts" / log.name for step in (10, 20)}
    assert {step: file.read_text() for step, file in there.items()} == {10: "1\n", 20: "1\n2\n"}


def test_each_host_copies_the_prompts_that_its_own_workers_have(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "prompts").mkdir()
    for number in (0, 1):
        (run_dir / "prompts" / f"trainer-{number}.jsonl").write_text("1\n")
    place(run_dir, tmp_path / "to", hosts=TWO, host=1).copy(write(run_dir, 10, workers=(0, 1)), lambda amount: None)
    copied = tmp_path / "to" / "mine" / "checkpoints" / "step_000010" / "prompts"
    assert [file.name for file in copied.iterdir()] == ["trainer-1.jsonl"]


def test_marks_of_an_earlier_term_complete_nothing(run_dir: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    place(run_dir, to, hosts=TWO, host=1).copy(write(run_dir, 10, workers=(0, 1)), lambda amount: None)
    folder = write(run_dir, 10, term=1, workers=(0, 1))
    place(run_dir, to, hosts=TWO, host=0).copy(folder, lambda amount: None)
    assert whole(to) == []
    place(run_dir, to, hosts=TWO, host=1).copy(folder, lambda amount: None)
    assert whole(to) == [10]


def test_the_configuration_of_a_model_comes_last(run_dir: Path, tmp_path: Path) -> None:
    folder = run_dir / "hf" / "step_000010"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text(name)
    place(run_dir, tmp_path / "to").copy(folder, lambda amount: None)
    assert Flaky.written == ["model.safetensors", "tokenizer.json", "config.json"]
    assert (tmp_path / "to" / "mine" / "hf" / "step_000010" / "tokenizer.json").read_text() == "tokenizer.json"


def test_nobody_waits_and_a_newer_checkpoint_replaces_one_that_does(run_dir: Path, tmp_path: Path) -> None:
    to, held = tmp_path / "to", set[Path]()
    there, counts = copies(lambda: place(run_dir, to, Keeping(9)), held)
    Flaky.gate.clear()
    folders = [write(run_dir, step) for step in (10, 20, 30)]
    there.offer(folders[0])
    eventually(lambda: there._now is not None, "the first one")
    for folder in folders[1:]:
        there.offer(folder)
    # Nothing that is copied, or is to be, is removed meanwhile.
    assert held == {folders[0], folders[2]}
    Flaky.gate.set()
    there.close(20.0, lambda: 0)
    assert whole(to) == [10, 30]
    assert held == set()
    assert counts == {COPIED: 2}


def test_a_copy_that_fails_is_tried_again_and_told_once(
    run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    there, counts = copies(lambda: place(run_dir, tmp_path / "to"), set())
    Flaky.failures.extend(["worker-trainer-0.json"] * 3)
    there.offer(write(run_dir, 10))
    eventually(lambda: counts[COPIED], "the copy")
    there.close(20.0, lambda: 0)
    assert whole(tmp_path / "to") == [10]
    assert counts == {COPIED: 1, COPY_FAILED: 3}
    assert caplog.text.count("could not copy") == 1
    assert "works again" in caplog.text


def test_the_end_of_a_run_tries_a_few_times_and_says_what_is_missing(
    run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = set[Path]()
    there, counts = copies(lambda: SecondPlace("flaky:///proc/none", run_dir, Keeping(2), {"trainer-0": 0}, 0), held)
    there.offer(write(run_dir, 10))
    there.close(20.0, lambda: 0)
    assert counts[COPY_FAILED] >= 3
    assert "not copied to there when the run ended: step_000010" in caplog.text
    assert complaints[0].startswith("run.copy_to: not copied to there when the run ended: step_000010 — ")
    assert len(complaints) == 1
    assert held == set()


def test_the_end_of_a_run_does_not_wait_for_a_place_that_hangs(
    run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there, _ = copies(lambda: place(run_dir, tmp_path / "to"), set())
    Flaky.gate.clear()
    there.offer(write(run_dir, 10))
    began = time.monotonic()
    there.close(0.3, lambda: 0)
    assert time.monotonic() - began < 10.0
    assert "not copied to there when the run ended: step_000010" in caplog.text
    assert complaints == ["run.copy_to: not copied to there when the run ended: step_000010"]


def test_one_that_another_host_has_removed_is_dropped(run_dir: Path, tmp_path: Path) -> None:
    held = set[Path]()
    there, counts = copies(lambda: place(run_dir, tmp_path / "to", hosts=TWO), held, alone=False)
    folder = write(run_dir, 10, workers=(0, 1))
    (folder / COMMIT).unlink()
    there.offer(folder)
    there.close(20.0, lambda: 0)
    assert held == set()
    assert counts == {}
