"""torch's view of the store in `distflow.comm.store`: process groups are made through it, over the endpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import msgspec
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from distflow.comm.membership import Outgoing
from distflow.comm.message import Message
from distflow.comm.store import ANSWERED, ASKED, Answer, Question, StoreCore
from distflow.data.decoding import read
from distflow.runtime.node import Node

ASK_AGAIN_S = 0.5
CLOSED = "the worker has left: nothing more can be looked up in the store of its process group"


class GroupStore(Store):
    """One member's; the first of `members` keeps the values. Threads of the library's call it, too.

    What is not answered within `limit_s` seconds (or the time that the library gives) raises torch's DistStoreError; so
    does everything once the endpoint is closed. Only `check`, which NCCL's monitor thread polls to the end of its
    process group, then says no: what is raised there, nobody catches, and the process would be aborted.
    """

    def __init__(self, node: Node, members: Sequence[str], limit_s: float) -> None:
        super().__init__()
        self._node = node
        self._keeper = members[0]
        self._limit_s = limit_s
        self._numbers = count(1)
        self._answers: dict[int, Answer | None] = {}
        """By number of what is asked now."""
        self._core = StoreCore(members)
        if node.endpoint.name == self._keeper:
            node.on(ASKED, lambda message: self._send(self._core.handle(message.sender, message.body)))
        node.on(ANSWERED, self._on_answer)

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._ask(Question(next(self._numbers), "set", (key,), _bytes(value)))

    def get(self, key: str) -> bytes:
        """A value, once it is there."""
        return self._ask(Question(next(self._numbers), "get", (key,))).found

    def add(self, key: str, value: int) -> int:
        """Add to a number, 0 at first; returns the sum."""
        return self._ask(Question(next(self._numbers), "add", (key,), amount=value)).count

    def check(self, keys: list[str]) -> bool:
        """Whether all are known to be there."""
        return bool(self._ask(Question(next(self._numbers), "check", tuple(keys))).count)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all are there."""
        limit_s = self._limit_s if timeout is None else timeout.total_seconds()
        self._ask(Question(next(self._numbers), "wait", tuple(keys)), limit_s)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Replace a value if it is the expected one (b"": if there is none); returns what is there then."""
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        return self._ask(Question(next(self._numbers), "swap", (key,), desired, expected)).found

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        return bool(self._ask(Question(next(self._numbers), "delete", (key,))).count)

    def num_keys(self) -> int:
        """How many there are."""
        return self._ask(Question(next(self._numbers), "count")).count

    def set_timeout(self, timeout: timedelta) -> None:
        """Of every further call."""
        self._limit_s = timeout.total_seconds()

    def clone(self) -> GroupStore:
        """It may be used by several threads at once as it is."""
        return self

    def _ask(self, question: Question, limit_s: float | None = None) -> Answer:
        limit_s = self._limit_s if limit_s is None else limit_s
        board, number = self._node.board, question.number
        deadline, ask_at = time.monotonic() + limit_s, 0.0
        with board.condition:
            self._answers[number] = None
            try:
                while (answer := self._answers[number]) is None:
                    now = time.monotonic()
                    failure = self._failure(question, limit_s, late=now >= deadline)
                    if failure is not None and question.verb == "check":
                        return Answer(number)
                    if failure is not None:
                        raise failure
                    if now >= ask_at:
                        ask_at = now + ASK_AGAIN_S
                        self._send([Outgoing(self._keeper, ASKED, msgspec.structs.asdict(question))])
                    board.condition.wait(max(0.001, min(ask_at, deadline) - now))
            finally:
                del self._answers[number]
        return answer

    def _failure(self, question: Question, limit_s: float, *, late: bool) -> BaseException | None:
        """Why there will be no answer, if so."""
        if self._node.board.failure is not None:
            return self._node.board.failure
        if self._node.endpoint.closing:
            return DistStoreError(CLOSED)
        if not late:
            return None
        return DistStoreError(
            f"{self._keeper} did not answer {question.verb} {', '.join(question.keys)} within {limit_s:g} s: not all "
            "members of the process group are there"
        )

    def _on_answer(self, message: Message) -> None:
        answer = read(message.body, Answer, ANSWERED)
        if message.sender == self._keeper and answer.number in self._answers:
            self._answers[answer.number] = answer

    def _send(self, out: Sequence[Outgoing]) -> None:
        for item in out:
            self._node.send(item.to, item.kind, item.body)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
