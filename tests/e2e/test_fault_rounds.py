"""Something happens to any process of a run at any moment: it completes all the same. More: `tests/e2e/faults.py`."""

from pathlib import Path

import pytest

from tests.e2e.faults import Fault, Round, kinds_here, suffer_round


def test_a_run_completes_though_agent_fork_server_and_a_trainer_are_killed(tmp_path: Path) -> None:
    """One after the other: each has been replaced, or has taken over, before the next one is hit."""
    faults = [Fault("SIGKILL", "agent/0", after_s=1.0)]
    faults += [Fault("SIGKILL", name, after_steps=3) for name in ("nursery/0", "agent/0", "trainer/1")]
    happened = suffer_round(Round(0, faults, steps=40), tmp_path)
    assert [line.split()[-1] for line in happened] == ["agent/0", "nursery/0", "agent/0", "trainer/1"]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_a_run_completes_whatever_happens_to_whom(tmp_path: Path, seed: int) -> None:
    suffer_round(Round.drawn(seed, kinds_here()), tmp_path)
