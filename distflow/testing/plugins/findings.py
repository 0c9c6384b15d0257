"""What a contract suite finds out about a plug-in, told while it goes on."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

IMPORTING = "importing it"
"""What is begun first. It may take long, and has a limit of its own."""
Level = Literal["ok", "note", "wrong"]
"""ok: as it should be; note: a run would go on, and may suffer from it; wrong: a run would end, or go wrong."""


class PluginFinding(NamedTuple):
    """One result."""

    level: Level
    text: str


class SuiteReport(Protocol):
    """Where findings go. What is begun is told if the plug-in ends the process or never returns."""

    def begin(self, what: str) -> None:
        """The plug-in is called next, for this purpose: `judging the response '12'`."""

    def add(self, level: Level, text: str) -> None:
        """A finding."""


def cut(text: object, most: int = 80) -> str:
    """A value for messages, not longer than `most` characters."""
    shown = repr(text)
    return shown if len(shown) <= most else f"{shown[:most]}… ({len(shown)} characters)"
