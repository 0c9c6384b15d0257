"""The examples in the docstrings of what crosses the wire: each is what it says, and arrives as it was sent."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from distflow import types
from distflow.cluster import host_report, processes
from distflow.exchange import call_messages, lease_wire, messages, rows_messages
from distflow.launch.run import record

MODULES = (types, messages, call_messages, rows_messages, processes, record, host_report)
NAMES = {name: value for module in MODULES for name, value in vars(module).items()}
EXAMPLE = re.compile(r"^Example:\n\n((?:    .*\n?)+)", re.M)


def documented() -> dict[str, type]:
    """Every class of theirs with an example."""
    return {
        name: kind
        for module in MODULES
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and "Example:" in (kind.__doc__ or "")
    }


def example(kind: type) -> Any:
    text = EXAMPLE.search(inspect.getdoc(kind) or "")
    assert text is not None, kind
    return eval(text[1].strip(), dict(NAMES))


@pytest.mark.parametrize("name", sorted(documented()))
def test_an_example_is_one(name: str) -> None:
    assert isinstance(example(documented()[name]), documented()[name])


@pytest.mark.parametrize("kind", lease_wire.KINDS)
def test_every_lease_message_has_an_example_that_crosses_the_wire(kind: str) -> None:
    shown = example(next(one for name, one in documented().items() if name.lower() == kind))
    packed = lease_wire.to_wire(shown)
    assert lease_wire.from_wire(kind, packed.body, [memoryview(part) for part in packed.payload]) == shown


@pytest.mark.parametrize("kind", call_messages.KINDS)
def test_every_message_of_calls_has_an_example_that_crosses_the_wire(kind: str) -> None:
    found = [example(one) for one in documented().values() if one.__module__ == call_messages.__name__]
    (shown,) = [one for one in found if call_messages.kind_of(one) == kind]
    assert call_messages.from_wire(kind, call_messages.to_wire(shown)) == shown


def test_the_report_of_a_host_crosses_the_wire() -> None:
    shown = example(host_report.HostReport)
    assert host_report.from_wire(host_report.to_wire(shown)) == shown
