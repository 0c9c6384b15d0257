"""Endpoints in processes of their own, which are killed in the middle of something.

Run as `python -m tests.comm.lane_processes ROLE FOLDER`; it writes a line when it is where the test wants it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distflow.comm.endpoint import Endpoint
from distflow.comm.message import Message
from tests.polling import WAIT_S, eventually

WRITER, READER = "rollout/0", "trainer/0"
ROWS = 64
ROW_BYTES = 16 << 10


def roster(folder: Path) -> dict[str, str]:
    return {name: f"ipc://{folder}/{name.replace('/', '-')}" for name in (WRITER, READER)}


def row(n: int) -> bytes:
    return bytes([n % 251]) * ROW_BYTES


def main(role: str, folder: Path) -> None:
    name = READER if role == "holds" else WRITER
    endpoint = Endpoint(name, 0, roster(folder), shared_memory=True)
    kept: list[Message] = []
    arrived = threading.Event()

    def keep(message: Message) -> None:
        kept.append(message)
        if message.kind == "rows":
            arrived.set()

    endpoint.start(keep)
    if role == "holds":
        assert arrived.wait(WAIT_S)
    else:
        write(endpoint)
    print("there", flush=True)
    # Until it is killed; never for long if the test is.
    threading.Event().wait(WAIT_S)


def write(endpoint: Endpoint) -> None:
    """Rows that arrive; then a block is taken and half written when this process is killed."""
    use_shared(endpoint, READER)
    delivery = endpoint.send(READER, "rows", {}, [row(n) for n in range(ROWS)])
    eventually(lambda: delivery.sent, "the rows leave")
    outgoing = endpoint._shared._outgoing[READER]
    assert outgoing.put([memoryview(row(7))]) is not None


def use_shared(endpoint: Endpoint, to: str) -> None:
    """Send until the peer has mapped the segment; "first" is the kind of what it gets before."""
    endpoint.send(to, "first", {}, [bytes(ROW_BYTES)])
    eventually(lambda: to in endpoint.segments and endpoint.segments[to].mapped, f"{to} maps the segment")


@contextmanager
def process(role: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.comm.lane_processes", role, str(folder)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def await_there(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "there\n"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
