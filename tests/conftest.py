"""What all tests start from."""

import signal
from pathlib import Path

import pytest

# A shell's background job inherits an ignored SIGINT, and so would all that the tests start; they interrupt processes
# as a terminal would.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of a file run one after the other (they may share a fixture), and so do those that want the same things."""
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        item.add_marker(pytest.mark.xdist_group(_group(item.path.relative_to(TESTS))))


def _group(path: Path) -> str:
    if "sglang" in path.name:
        return "sglang"  # They look for what SGLang leaves on this machine.
    if path.parts[0] == "hosts":
        return "hosts"  # The machine has one Slurm.
    return str(path)
