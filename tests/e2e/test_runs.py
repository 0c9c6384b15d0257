"""The tests' own eye on a run: it sees at once that there is nothing left to wait for."""

from pathlib import Path

import pytest

from tests.e2e.runs import Run


def test_waiting_for_a_run_that_has_ended_fails_with_its_output(tmp_path: Path) -> None:
    run = Run(tmp_path, "none", ["quickstart", "run.sed=1"])
    with pytest.raises(
        AssertionError, match=r"(?s)step 1 did not happen; the run ended with 2:.*run\.sed — unknown key"
    ):
        run.until(lambda: run.steps_done() >= 1, "step 1")


def test_what_comes_with_the_end_of_a_run_is_seen(tmp_path: Path) -> None:
    run = Run(tmp_path, "none", ["quickstart", "run.sed=1"])
    run.until(lambda: run.process.poll() is not None and not run.processes(), "the end of the run")
    assert run.wait() == 2
