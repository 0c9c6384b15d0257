"""A connection to each host by the plain OpenSSH client (or to this machine without it), and its errors."""

from __future__ import annotations

import json
import os
import secrets
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from distflow.launch.agent import host_facts, remote_helper
from distflow.launch.deploy.hostfile import Host

CONNECT_S = 10
START_S = 30.0
HANG_UP_S = 15.0
OPTIONS = (
    "-T",
    "-x",
    "-oBatchMode=yes",
    f"-oConnectTimeout={CONNECT_S}",
    "-oServerAliveInterval=5",
    "-oServerAliveCountMax=3",
)
_BOOT = (
    "import json,sys,types;"
    "m=lambda n:sys.modules.setdefault(n,types.ModuleType(n)).__dict__;"
    '[exec(compile(s,"<distflow "+n+">","exec"),m(n)) for n,s in json.loads(sys.stdin.buffer.readline())]'
)
"""Executed by a host's Python: it reads modules, the last of which, `__main__`, imports the others. In one line, since
some login shells do not allow line breaks in a quoted argument."""
_HINTS = (
    ("Host key verification failed", "connect once by hand to check and accept its key: ssh {login}"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "find out why its key has changed, then: ssh-keygen -R {name}"),
    ("Permission denied", "allow login without a password: ssh-copy-id {login}"),
    ("Could not resolve hostname", "correct the name, or give HostName in the ssh configuration"),
    ("Connection refused", "start sshd there, or give the right Port in the ssh configuration"),
    ("timed out", "is the host up, and does the firewall allow ssh?"),
    ("No route to host", "is the host up and on this network?"),
    ("not found", "give the Python there: python=/path/to/python on its line of the hosts file"),
    ("No such file", "give the Python there: python=/path/to/python on its line of the hosts file"),
)


class HostFault(Exception):
    """A request to a host failed; `hint`: what to try."""

    def __init__(self, message: str, hint: str) -> None:
        self.message = message
        self.hint = hint
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Transport:
    """How to reach hosts: arguments of the ssh command before the login."""

    config: Path | None = None
    options: tuple[str, ...] = ()

    def command(self, host: Host, remote: Sequence[str]) -> list[str]:
        """The whole command line; `remote` is quoted for the remote shell."""
        config = [] if self.config is None else ["-F", str(self.config)]
        return ["ssh", *OPTIONS, *config, *self.options, "--", host.login, shlex.join(remote)]

    def resolve(self, host: Host) -> str:
        """The name or address that ssh would connect to; the host's own name if ssh does not say."""
        config = [] if self.config is None else ["-F", str(self.config)]
        command = ["ssh", *config, *self.options, "-G", "--", host.login]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=CONNECT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            # Whoever connects by it tells why it does not run; this machine is reached without it.
            return host.name
        names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
        return names[0] if done.returncode == 0 and names else host.name


class Line(Protocol):
    """A connection to a host, for the preflight and the start."""

    def ask(self, verb: str, given: Mapping[str, Any], *, limit_s: float, payload: bytes = b"") -> dict[str, Any]:
        """Send one request to the remote helper; raises HostFault."""
        ...

    def close(self) -> None:
        """Close it: the host undoes whatever was not to be kept."""
        ...


class ProbeLine:
    """Talks to a remote helper through the standard input and output of a command; raises HostFault if the command
    cannot be started. `by_hand`: what to try if the connection is lost."""

    def __init__(self, host: Host, command: Sequence[str], token: str, by_hand: str) -> None:
        self._host = host
        self._by_hand = by_hand
        self._token = token.encode()
        self._buffer = b""
        self._noise: list[str] = []
        pipe = subprocess.PIPE
        # In a session of its own: Ctrl-C is meant for us, and we close the connection properly.
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            raise _not_started(command[0], host, error) from error
        modules = ((host_facts.__name__, host_facts), ("__main__", remote_helper))
        sources = [(name, Path(str(module.__file__)).read_text(encoding="utf-8")) for name, module in modules]
        self._send(json.dumps(sources).encode() + b"\n")

    def ask(self, verb: str, given: Mapping[str, Any], *, limit_s: float, payload: bytes = b"") -> dict[str, Any]:
        """Send one request, to be answered within `limit_s` seconds; raises HostFault."""
        header = json.dumps({"verb": verb, "with": given, "bytes": len(payload)})
        self._send(header.encode() + b"\n" + payload)
        answer = self._answer(verb, time.monotonic() + limit_s, limit_s)
        if "fault" in answer:
            raise HostFault(
                f"{verb}: {answer['fault']}", "free some space there, or correct the permissions of the folder"
            )
        return answer

    def close(self) -> None:
        """Close it, and wait until the remote helper has undone what is not to be kept."""
        assert self._process.stdin is not None, "a pipe"
        with suppress(BrokenPipeError):
            # The process may have ended before it has read everything.
            self._process.stdin.close()
        try:
            self._process.wait(HANG_UP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None, "a pipe"
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def _answer(self, verb: str, deadline: float, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None, "a pipe"
        descriptor = self._process.stdout.fileno()
        while True:
            *lines, self._buffer = self._buffer.split(b"\n")
            for number, line in enumerate(lines):
                if line.startswith(self._token):
                    self._buffer = b"\n".join([*lines[number + 1 :], self._buffer])
                    answer: dict[str, Any] = json.loads(line[len(self._token) :])
                    return answer
                self._noise.append(line.decode(errors="replace"))
            patience = deadline - time.monotonic()
            if patience <= 0 or not select.select([descriptor], [], [], patience)[0]:
                raise HostFault(
                    f"no answer to {verb!r} within {limit_s:g} s", "is the host overloaded, or out of memory?"
                )
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise self._gone()
            self._buffer += data

    def _gone(self) -> HostFault:
        try:
            self._process.wait(HANG_UP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stderr is not None, "a pipe"
        errors = self._process.stderr.read().decode(errors="replace") if not self._process.stderr.closed else ""
        said = [line.strip() for line in errors.splitlines() if line.strip()] or self._noise
        for sign, hint in _HINTS:
            told = [line for line in said if sign in line]
            if told:
                return HostFault(told[-1], hint.format(login=self._host.login, name=self._host.name))
        last = said[-1] if said else f"exit code {self._process.returncode}, without any output"
        return HostFault(f"the connection was lost: {last}", f"try by hand: {self._by_hand}")


def _not_started(program: str, host: Host, error: OSError) -> HostFault:
    """Say why a program of this machine, by which a host is reached, does not start."""
    if program == "ssh":
        hint = "install the OpenSSH client on this machine, or start without ssh: docs/many-hosts.md"
    else:
        hint = f"correct python= on the line of {host.name}; in a virtual environment it ends in bin/python"
    return HostFault(f"{program} cannot be started on this machine: {error.strerror}", hint)


def open_line(host: Host, transport: Transport, *, here: bool) -> ProbeLine:
    """Connect to a host; raises HostFault, also if it does not answer in time."""
    token = f"distflow:{secrets.token_hex(4)}:"
    python = host.python or sys.executable
    remote = [python, "-u", "-c", _BOOT, token]
    command, by_hand = (
        (remote, f"{python} -c 'import distflow'")
        if here
        else (transport.command(host, remote), f"ssh {host.login} true")
    )
    line = ProbeLine(host, command, token, by_hand)
    try:
        # A first request, so that connection errors show up here.
        line.ask("clock", {}, limit_s=START_S)
    except HostFault:
        line.close()
        raise
    return line
