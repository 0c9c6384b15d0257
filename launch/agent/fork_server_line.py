"""The host agent's end of the line to its nursery."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distflow.comm.addresses import socket_dir
from distflow.launch.run.record import FILE_NAME

WAITING = 8
"""Agents that may have connected, one after the other, before the nursery has imported its libraries."""


class NurseryLine:
    """Talks to the nursery of a host, in lines of JSON, and starts it if there is none.

    `fileno` is ready when the nursery has said something or has died.
    """

    def __init__(
        self, run_dir: Path, entry: str, preload: Sequence[str], host: int = 0, record: str = FILE_NAME
    ) -> None:
        self._buffer = b""
        self.open = True
        self.pid: int | None = None
        """Of a nursery that we have started; of another one it is in its first message."""
        path = socket_dir(run_dir, host) / f"nursery-{host}"
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen(WAITING)
                self.pid = _start(listener, [str(run_dir), str(host), entry, record, *preload])
            self._socket.connect(str(path))
        self._socket.setblocking(False)
        self._send({"serve": True})

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def start(
        self, name: str, incarnation: int, document: Path, log: Path, threads: int, python: str = sys.executable
    ) -> None:
        """Ask for a worker, executed by `python`."""
        request = {"start": name, "incarnation": incarnation, "document": str(document), "log": str(log)}
        self._send({**request, "threads": threads, "python": python})

    def dismiss(self) -> None:
        """Nothing more will be asked, and the agent sees to the end of the run."""
        if self.open:
            self._send({"end": True})
            self._socket.close()
        self.open = False

    def read(self) -> list[Mapping[str, Any]]:
        """The messages that have arrived; `open` is False once it has hung up."""
        while self.open:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self._socket.close()
                self.open = False
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def _send(self, message: Mapping[str, Any]) -> None:
        if not self.open:
            return
        try:
            # A few hundred bytes a worker into a buffer of 200 kB: this does not block in practice, and if it
            # would, the nursery is broken, which its end of the line reports.
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self._socket.close()
            self.open = False


def _start(listener: socket.socket, arguments: Sequence[str]) -> int:
    """Start a nursery that serves whoever connects to this socket; returns its process number."""
    command = [sys.executable, "-m", "distflow.launch.agent.fork_server", str(listener.fileno()), *arguments]
    process = subprocess.Popen(command, pass_fds=(listener.fileno(),), stdin=subprocess.DEVNULL)
    # The agent reaps all its children itself, also those that it adopts; Popen must not wait for this one.
    process.returncode = 0
    return process.pid
