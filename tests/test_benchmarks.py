"""Benchmarks of cores alone still run: what they stand in for may have changed."""

from __future__ import annotations

import sys

import pytest

from benchmarks import agents, house


def test_the_agents_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["agents", "--workers", "16", "--rounds", "1"])
    agents.main()
    assert capsys.readouterr().out.startswith("16 workers on 2 hosts: quiet ")


def test_the_size_of_the_house() -> None:
    """Limits of what a reader has to find his way through; figures in benchmarks/RESULTS.md."""
    known = house.modules()
    rooms = [name for name in known if name.startswith(("distflow.launch", "distflow.runtime"))]
    assert len(rooms) <= 110
    assert max(len(path.read_text().splitlines()) for path in known.values()) <= 400
