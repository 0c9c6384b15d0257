"""The host agent's end of the line to its nursery."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class NurseryLine:
    """Starts a nursery and talks to it in lines of JSON. `fileno` is ready when it has said something or has died."""

    def __init__(self, run_dir: Path, entry: str, preload: Sequence[str], host: int = 0) -> None:
        self._run_dir = run_dir
        self._entry = entry
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        command = [
            sys.executable,
            "-m",
            "distflow.launch.nursery",
            str(theirs.fileno()),
            str(run_dir),
            str(host),
            entry,
        ]
        process = subprocess.Popen([*command, *preload], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        theirs.close()
        self.pid = process.pid
        # The agent reaps all its children itself, also those that it adopts; Popen must not wait for this one.
        process.returncode = 0
        self._socket = ours
        self._buffer = b""
        self.open = True

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
