"""What an endpoint has sent and received."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """Bytes and messages so far, for the status."""

    sent: int = 0
    received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    dropped: int = 0
    refused: int = 0
    """Connections refused because of their key, by us or by a peer."""
