"""One valid example or more of every kind of message, as JSON files: they outlive a change of codec.

A file `corpus/<endpoint>/<kind>.json` is a list of examples: `sender`, `incarnation`, `body`, and `payload`, a list of
frames. Bytes are written {"base64": text}.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "corpus"


@dataclass(frozen=True, slots=True)
class Example:
    """A message as its sender encodes it."""

    endpoint: str
    kind: str
    sender: str
    incarnation: int
    body: Any
    payload: tuple[bytes, ...]


def examples(endpoint: str) -> Iterator[Example]:
    """All there are for the messages that this kind of endpoint takes."""
    for path in sorted((FOLDER / endpoint).glob("*.json")):
        for one in json.loads(path.read_text()):
            payload = tuple(plain(frame) for frame in one["payload"])
            yield Example(endpoint, path.stem, one["sender"], one["incarnation"], plain(one["body"]), payload)


def plain(value: Any) -> Any:
    """JSON with marked bytes as the values that travel."""
    if isinstance(value, dict):
        if value.keys() == {"base64"}:
            return base64.b64decode(value["base64"])
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def marked(value: Any) -> Any:
    """The inverse."""
    if isinstance(value, bytes | bytearray):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {key: marked(item) for key, item in value.items()}
    return [marked(item) for item in value] if isinstance(value, list | tuple) else value
