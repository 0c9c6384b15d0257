"""What all tests start from."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests import budget, warm_start

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

# A shell's background job inherits an ignored SIGINT, and so would all that the tests start; they interrupt processes
# as a terminal would.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Nor do threads that have nothing to do take a core from the others' processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


if "PYTEST_XDIST_WORKER" in os.environ:
    # Until all tests are collected: looking for garbage among what is only being imported takes seconds.
    gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Budgets of seconds are for the short tests; and there is one server for pytest and all its workers."""
    # An example takes longer where another test has the processor: what is slow is told by budgets.
    hypothesis.settings.register_profile("shared processor", deadline=None)
    hypothesis.settings.load_profile("shared processor")
    budget.unlimited = "not long" not in config.getoption("markexpr")
    warm_start.door()


def pytest_collection_finish() -> None:
    """Tests run side by side, one a core: torch's threads would only stand in each other's way (4 times the CPU).

    And what has been imported stays: looking through it for garbage took 0.4 s each time.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes one after the other begins first, or it would be waited for in the end; so do whole pages."""
    first = ("sglang", "hosts", "tests/test_docs.py", "tests/test_layers.py")
    items.sort(key=lambda item: first.index(scope) if (scope := _scope(item.nodeid)) in first else len(first))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Tests of a file run one after the other (they may share a fixture), and so do those that want the same things."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    return ByFile(config, log)


def _scope(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    if "sglang" in file:
        return "sglang"  # They look for what SGLang leaves on this machine.
    if file.startswith("tests/hosts/"):
        return "hosts"  # The machine has one Slurm.
    return file
