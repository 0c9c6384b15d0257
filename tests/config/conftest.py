"""Configurations of other tools, converted and planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distflow.config.conversion import Converted, convert, written
from distflow.config.foreign import read_foreign
from distflow.data.files import count_rows
from distflow.flow.recipe_check import plan_recipe


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], tuple[Converted, str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def make(name: str, text: str) -> tuple[Converted, str]:
        path = tmp_path / name
        path.write_text(text)
        foreign = read_foreign(path)
        found = convert(foreign, lambda name: count_rows(Path(name)))
        return found, written(foreign, found)

    return make


def planned(tmp_path: Path, text: str, *overrides: str) -> Any:
    (tmp_path / "mine.yaml").write_text(text)
    return plan_recipe(str(tmp_path / "mine.yaml"), overrides)[1]
