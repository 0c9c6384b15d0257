"""The fixture that launches runs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import Launch, Run


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """`launch(recipe, *overrides)` starts a run that is ended after the test. `cold`: see tests/warm_start."""
    runs: list[Run] = []

    def start(recipe: str, *arguments: str, name: str | None = None, cold: bool = False) -> Run:
        # The name is part of process titles and segment names, so it must differ between tests that run at once.
        unique = name or f"{tmp_path.name.replace('_', '-')}-{os.getpid()}-{len(runs)}"
        runs.append(Run(tmp_path / "runs", unique, [recipe, *arguments], cold=cold))
        return runs[-1]

    yield start
    for run in runs:
        run.end()
