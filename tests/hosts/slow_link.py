"""A slow link between the bridges of two sites: frames pass from one to the other at a rate, and after a delay.

Each end is a TAP device on the bridge of its site; a process of its own carries frames between them, as a long cable
would. (The kernel's own delaying queue, netem, is not there on every machine.)
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import time
from collections import deque
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import NamedTuple

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
MOST_FRAME = 65536
QUEUE_S = 0.5
"""Frames that would wait longer than this for their turn are dropped, as a router does."""


class SiteLink(NamedTuple):
    """What a link between two sites can do."""

    bits_per_second: float
    delay_s: float
    """One way."""


def open_tap(name: str) -> int:
    """A TAP device in the current network namespace; raises OSError where there are none."""
    handle = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH22s", name.encode(), IFF_TAP | IFF_NO_PI, b""))
    return handle


def carry(ends: tuple[int, int], link: SiteLink) -> BaseProcess:
    """Start the process that carries frames between two TAP devices until it is terminated."""
    process = get_context("fork").Process(target=_carry, args=(ends, link), name="slow-link", daemon=True)
    process.start()
    return process


class _Direction:
    """Frames from one end to the other: each leaves when the one before has, and arrives `delay_s` later."""

    def __init__(self, to: int, link: SiteLink) -> None:
        self.carried = 0
        self._to = to
        self._link = link
        self._free_at = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()

    def take(self, frame: bytes, now: float) -> None:
        begins = max(now, self._free_at)
        if begins - now > QUEUE_S:
            return
        self._free_at = begins + 8 * len(frame) / self._link.bits_per_second
        self._under_way.append((self._free_at + self._link.delay_s, frame))

    def give(self, now: float) -> float | None:
        """Deliver what has arrived; returns when the next does."""
        while self._under_way and self._under_way[0][0] <= now:
            try:
                os.write(self._to, self._under_way[0][1])
            except BlockingIOError:
                return now + 0.001
            self._under_way.popleft()
        return self._under_way[0][0] if self._under_way else None


def _carry(ends: tuple[int, int], link: SiteLink) -> None:
    directions = {ends[0]: _Direction(ends[1], link), ends[1]: _Direction(ends[0], link)}
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end, selectors.EVENT_READ)
        while True:
            due = [at for one in directions.values() if (at := one.give(time.monotonic())) is not None]
            wait_s = max(0.0, min(due) - time.monotonic()) if due else None
            for key, _ in selector.select(wait_s):
                _take_all(key.fd, directions[key.fd])


def _take_all(end: int, direction: _Direction) -> None:
    for _ in range(64):
        try:
            frame = os.read(end, MOST_FRAME)
        except BlockingIOError:
            return
        direction.take(frame, time.monotonic())
