"""The program that `launch` runs on another host: examines it, tests links, unpacks the run folder, starts the agent.

It is sent over standard input together with host_facts.py, the only module of distflow that it imports; apart from
that it uses the standard library alone, so that it can report a missing distflow. Requests are lines of JSON,
`{"verb": …, "with": {…}, "bytes": N}`, followed by N bytes; each is answered by one line starting with a token that
distinguishes it from output of a login shell. If the connection to the head is cut before `keep`, everything that was
created or started here is undone.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from distflow.launch.agent.host_facts import describe

LINK_S = 3.0
POLL_S = 0.05
LEAVE_S = 10.0
READY = '{"agent"'
LOG_TAIL = 4000
CHECKPOINTS = "checkpoints"
SYNC_BYTES = 256 << 20
"""So much of a file is written through to the disk at once: a piece has a limit of time, and the last one waits for
what is left. A part of a checkpoint may have many GB."""


def find_files(folder: str, patterns: Sequence[str]) -> dict[str, Any]:
    """Matching files in a folder and its subfolders, by their path in it."""
    paths = [path for pattern in patterns for path in Path(folder).glob(pattern) if path.is_file()]
    return {"files": [str(path.relative_to(folder)) for path in paths]}


def read_piece(path: str, offset: int, size: int) -> bytes:
    """At most `size` bytes of a file from `offset` on; empty past its end."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def digest_piece(path: str, offset: int, size: int) -> str:
    """The digest of such a piece; that of an empty one if the file does not exist."""
    try:
        piece = read_piece(path, offset, size)
    except FileNotFoundError:
        piece = b""
    return hashlib.blake2b(piece).hexdigest()


def write_piece(path: str, draft: str, offset: int, last: bool, payload: bytes) -> dict[str, Any]:
    """Write a piece of a file to a draft of it; the last piece completes the file and renames it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with os.fdopen(handle, "wb") as file:
        if os.fstat(handle).st_size < offset:
            raise OSError(f"{draft}: it was removed or shortened meanwhile")
        file.seek(offset)
        file.write(payload)
        file.truncate()
        if last or (offset + len(payload)) // SYNC_BYTES > offset // SYNC_BYTES:
            file.flush()
            os.fsync(handle)
    if last:
        os.replace(draft, path)
    return {}


class Listener(threading.Thread):
    """Sends the nonce to every connection until it is closed."""

    def __init__(self, address: str, nonce: str) -> None:
        super().__init__(daemon=True)
        self._nonce = nonce.encode()
        self._socket = socket.create_server((address, 0), family=_family(address), backlog=1024)
        self.port = int(self._socket.getsockname()[1])

    def run(self) -> None:
        """Serve; ends when the socket is closed."""
        while True:
            try:
                line, _ = self._socket.accept()
            except OSError:
                return
            with line:
                line.settimeout(LINK_S)
                try:
                    line.sendall(self._nonce)
                except OSError:
                    continue

    def close(self) -> None:
        """Stop listening."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def connect(address: str, port: int, nonce: str) -> str | None:
    """Why a listener cannot be reached from here; None if it can. An empty nonce accepts any answer."""
    try:
        with socket.create_connection((address, port), timeout=LINK_S) as line:
            heard = line.makefile("rb").read(len(nonce))
    except TimeoutError:
        return f"no answer from {address}:{port} within {LINK_S:g} s"
    except OSError as error:
        return f"{address}:{port}: {error.strerror or error}"
    return None if heard == nonce.encode() else f"another program answers at {address}:{port}"


def try_all(targets: Sequence[tuple[str, str, int]], nonce: str) -> dict[str, str | None]:
    """`connect` to all targets (name, address, port) at once; returns its result by name."""
    found: dict[str, str | None] = {}

    def try_one(name: str, address: str, port: int) -> None:
        found[name] = connect(address, port, nonce)

    threads = [threading.Thread(target=try_one, args=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LINK_S * 3)
    return {name: found.get(name, "no answer") for name, _, _ in targets}


class RemoteHelper:
    """Executes the head's requests, and undoes them if the head goes away."""

    def __init__(self, cut: Callable[[float], bool]) -> None:
        """`cut(seconds)` waits, and returns True early if the connection to the head is cut meanwhile."""
        self._cut = cut
        self._made: list[Path] = []
        self._agent: subprocess.Popen[bytes] | None = None
        self._listener: Listener | None = None
        self._kept = False

    def do(self, verb: str, given: dict[str, Any], payload: bytes) -> dict[str, Any]:
        """Execute one request."""
        acts: dict[str, Callable[[dict[str, Any], bytes], dict[str, Any]]] = {
            "environment": self._environment,
            "describe": self._describe,
            "clock": lambda given, payload: {"time": time.time()},
            "listen": self._listen,
            "connect": self._connect,
            "unpack": self._unpack,
            "start": self._start,
            "keep": self._keep,
            "find": lambda given, payload: find_files(**given),
            "read": lambda given, payload: {"data": base64.b64encode(read_piece(**given)).decode()},
            "digest": lambda given, payload: {"digest": digest_piece(**given)},
            "write": lambda given, payload: write_piece(**given, payload=payload),
        }
        return acts[verb](given, payload)

    @property
    def agent(self) -> subprocess.Popen[bytes] | None:
        """The agent, if it is to be kept; else None."""
        return self._agent if self._kept else None

    def undo(self) -> None:
        """Undo everything, unless the head asked to keep it."""
        self._stop_listening()
        if self._kept:
            return
        if self._agent is not None and self._agent.poll() is None:
            _end(self._agent)
        for folder in reversed(self._made):
            remove_but_parts(folder)

    def _environment(self, given: dict[str, Any], payload: bytes) -> dict[str, Any]:
        os.environ.update(given["set"])
        if os.path.isdir(given["cwd"]):
            # As on the head: recipes may name data files relative to it.
            os.chdir(given["cwd"])
        places = given["set"]["PYTHONPATH"].split(os.pathsep) if "PYTHONPATH" in given["set"] else []
        sys.path[:0] = [place for place in places if place not in sys.path]
        return {}

    def _describe(self, given: dict[str, Any], payload: bytes) -> dict[str, Any]:
        facts = describe(**given)
        folder = Path(given["run_dir"])
        # A folder that we created ourselves is not a conflict.
        ours = any(made in (folder, *folder.parents) for made in self._made)
        return {**facts, "taken": facts["taken"] and not ours}

    def _listen(self, given: dict[str, Any], payload: bytes) -> dict[str, Any]:
        self._stop_listening()
        try:
            self._listener = Listener(given["address"], given["nonce"])
        except OSError as error:
            return {"port": None, "error": error.strerror or str(error)}
        self._listener.start()
        return {"port": self._listener.port, "error": None}

    def _connect(self, given: dict[str, Any], payload: bytes) -> dict[str, Any]:
        return {"faults": try_all(given["targets"], given["nonce"])}

    def _unpack(self, given: dict[str, Any], payload: bytes) -> dict[str, Any]:
        folder = Path(given["folder"])
        self._make(folder, int(given["mode"]))
        with tarfile.open(fileobj=io.BytesIO(payload)) as archive:
            archive.extractall(folder, filter="data")
        return {}

    def _make(self, folder: Path, mode: int) -> None:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        if not missing and [path.name for path in folder.iterdir()] == [CHECKPOINTS]:
            # An earlier launch that was undone has left parts of a checkpoint here, and nothing else.
            missing = [folder]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if missing:
            folder.chmod(mode)
        # Removing the topmost created folder removes all below it.
        self._made += missing[-1:]

    def _start(self, given: dict[str, Any], payload: bytes) -> dict[str, Any]:
        """Start the agent in its own session, so that it outlives ours, and wait for its address."""
        path = Path(given["log"])
        with path.open("ab") as log:
            begin = log.tell()
            self._agent = subprocess.Popen(
                given["command"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + given["limit_s"]
        while True:
            ended = self._agent.poll() is not None
            said = path.read_bytes()[begin:].decode(errors="replace")
            lines = [line for line in said.splitlines(keepends=True) if line.startswith(READY) and line.endswith("\n")]
            if lines:
                return {"agent": json.loads(lines[0]), "log": ""}
            if ended or time.monotonic() > deadline:
                return {"agent": None, "log": said[-LOG_TAIL:]}
            if self._cut(POLL_S):
                raise BrokenPipeError

    def _keep(self, given: dict[str, Any], payload: bytes) -> dict[str, Any]:
        self._kept = True
        return {}

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def remove_but_parts(folder: Path) -> None:
    """Remove a folder, but keep what has come of checkpoints: the next launch goes on with it."""
    kept = {path for path in folder.rglob(f"{CHECKPOINTS}/step_*/*") if path.is_file()}
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in sorted(folder.rglob("*"), reverse=True):
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                # Fails where something is kept.
                path.rmdir()
            elif path not in kept:
                path.unlink()


def _end(agent: subprocess.Popen[bytes]) -> None:
    """Terminate an agent, which then cleans up; kill it only if it does not exit."""
    agent.terminate()
    try:
        agent.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        os.killpg(agent.pid, signal.SIGKILL)
        agent.wait(LEAVE_S)


def main(token: str) -> None:
    """Serve the head at the other end of standard input and output until it hangs up."""
    # The head sends one request at a time: if input is readable during one, the connection was cut.
    host = RemoteHelper(lambda seconds: bool(select.select([sys.stdin], [], [], seconds)[0]))
    # Everything must still be undone at exit: sshd sends SIGHUP when the connection is cut.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    try:
        while line := sys.stdin.buffer.readline():
            request = json.loads(line)
            payload = sys.stdin.buffer.read(request["bytes"])
            if len(payload) < request["bytes"]:
                return
            try:
                answer = host.do(request["verb"], request["with"], payload)
            except BrokenPipeError:
                return
            except OSError as error:
                answer = {"fault": f"{error.strerror or error}: {error.filename}" if error.filename else str(error)}
            print(token + json.dumps(answer), flush=True)
    except BrokenPipeError:
        return
    finally:
        host.undo()


if __name__ == "__main__":
    main(sys.argv[1])
