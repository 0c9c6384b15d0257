"""Processes of a benchmark: each runs one function with a pipe to the process that measures."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from distflow.comm.processes import name_process
from distflow.errors import DistflowError

START_S = 120.0
ANSWER_S = 120.0
END_S = 10.0
NETWORK = 0x40000000
"""CLONE_NEWNET of <sched.h>."""

Member = Callable[[str, Connection, Any], None]
"""`member(name, pipe, setting)` runs in a process of its own until the pipe is closed."""


class MemberFailed(DistflowError):
    """A process of a benchmark ended, or did not answer in time."""


class Team:
    """Members by name; use as a context. They are forked from a process that has imported `module` once."""

    def __init__(self, module: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([module])
        self._members: dict[str, tuple[BaseProcess, Connection]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for _, pipe in self._members.values():
            with suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process, _ in self._members.values():
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join(END_S)

    def start(self, name: str, member: Member, setting: object, network: str | None = None) -> None:
        """Start a member; `network`: the file of the network namespace that it is to be in."""
        pipe, other = self._context.Pipe()
        process = self._context.Process(target=_run, args=(name, member, other, setting, network), daemon=True)
        process.start()
        other.close()
        self._members[name] = process, pipe

    def tell(self, names: Sequence[str], order: object) -> None:
        """Send an order to some members."""
        for name in names:
            self._members[name][1].send(order)

    def answers(self, names: Sequence[str], limit_s: float = ANSWER_S) -> Mapping[str, Any]:
        """One answer of each; raises MemberFailed if one of them ends, or does not answer in time."""
        pipes = {self._members[name][1]: name for name in names}
        found: dict[str, Any] = {}
        while pipes:
            ready = wait(list(pipes), limit_s)
            if not ready:
                raise MemberFailed(f"{', '.join(sorted(pipes.values()))} did not answer within {limit_s:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection), "only pipes are waited for"
                name = pipes.pop(pipe)
                try:
                    found[name] = pipe.recv()
                except EOFError as error:
                    raise MemberFailed(f"{name} ended; its message is on standard error") from error
        return found


def _run(name: str, member: Member, pipe: Connection, setting: object, network: str | None) -> None:
    name_process(f"benchmark {name}")
    if network is not None:
        _enter(network)
    import torch

    torch.set_num_threads(1)
    with suppress(EOFError):
        member(name, pipe, setting)


def _enter(network: str) -> None:
    """Be in a network namespace from here on."""
    with open(network, "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {network}: {os.strerror(ctypes.get_errno())}")
