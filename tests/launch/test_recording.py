"""Who writes `run.json` on a folder that several agents share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from distflow.launch.folder import claim
from distflow.launch.record import RunRecord, read_record
from distflow.launch.recording import OFFER_S, TRY_S, Recorder


def record(folder: Path) -> RunRecord:
    return RunRecord("run", str(folder), 40, (), {}, 30.0, 3, state="running")


def test_an_agent_that_hears_few_leaves_the_folder_to_the_others(tmp_path: Path) -> None:
    cut_off = Recorder(record(tmp_path), claim(tmp_path))
    cut_off.save(replace(record(tmp_path), waits_for="the others"))
    other = Recorder(record(tmp_path), None)
    other.try_for_lock(0.0)
    assert not other.writes
    other.save(replace(record(tmp_path), term=1))

    cut_off.try_for_lock(1.0, outnumbered=True)
    assert not cut_off.writes
    other.try_for_lock(TRY_S)
    assert other.writes
    assert read_record(tmp_path).waits_for == "the others"
    other.save(replace(record(tmp_path), term=1))
    found = read_record(tmp_path)
    assert (found.term, found.waits_for) == (1, ""), "written again, though nothing has changed since it had the lock"

    cut_off.try_for_lock(1.0 + OFFER_S, outnumbered=True)
    assert not cut_off.writes


def test_an_agent_whose_others_are_dead_takes_the_folder_again(tmp_path: Path) -> None:
    record(tmp_path).write()
    last = Recorder(record(tmp_path), claim(tmp_path))
    last.try_for_lock(0.0, outnumbered=True)
    last.try_for_lock(OFFER_S - 0.1, outnumbered=True)
    assert not last.writes
    last.try_for_lock(OFFER_S, outnumbered=True)
    assert last.writes
    last.try_for_lock(100.0, outnumbered=True)
    assert last.writes, "the folder is offered once"
    last.try_for_lock(101.0, outnumbered=False)
    last.try_for_lock(102.0, outnumbered=True)
    assert not last.writes, "once each time that most of the others cannot be heard"


def test_an_end_that_others_wrote_stays(tmp_path: Path) -> None:
    cut_off = Recorder(record(tmp_path), claim(tmp_path))
    cut_off.try_for_lock(0.0, outnumbered=True)
    replace(record(tmp_path), state="done").write()
    cut_off.try_for_lock(OFFER_S, outnumbered=True)
    assert cut_off.writes
    cut_off.save(record(tmp_path))
    assert read_record(tmp_path).state == "done"
