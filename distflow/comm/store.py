"""The store in which members of a new process group exchange addresses: a state machine without sockets.

Gloo, NCCL and libraries built on them use a store of small values by key. This one belongs to the lowest member and is
reached by messages, so it opens no port and needs the run's key. A question is repeated until it is answered and
executed once however often it arrives. `wait` and `get` are answered once all keys exist.

Example: trainer/1 sends question 7, wait for ["0/0"], and gets no answer yet. trainer/0 sends question 3, set "0/0" to
64 bytes; the store answers 3 to trainer/0 and 7 to trainer/1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from distflow.comm.membership import MemberMessage
from distflow.data.decoding import MOST, Form, Whole, read
from distflow.errors import ProtocolError

ASKED, ANSWERED = "store.ask", "store.answer"
Verb = Literal["set", "get", "wait", "add", "check", "delete", "swap", "count"]
Key = Annotated[str, msgspec.Meta(max_length=1024)]
Value = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
MOST_KEYS = 1 << 18
REMEMBERED = 256
"""Answers kept for each member (older questions are not repeated), and most questions of a member waiting at once."""


class Question(Form, frozen=True):
    """Body of ASKED. `swap` replaces the value if it is `expected`; `add` adds `amount` to a number."""

    number: Whole
    verb: Verb
    keys: tuple[Key, ...] = ()
    value: Value = b""
    expected: Value = b""
    amount: Annotated[int, msgspec.Meta(gt=-MOST, lt=MOST)] = 0


class Answer(Form, frozen=True):
    """Body of ANSWERED. `found`: a value; `count`: a number, or 1 for yes and 0 for no."""

    number: Whole
    found: Value = b""
    count: int = 0


class StoreCore:
    """For one group of `members`."""

    def __init__(self, members: Sequence[str]) -> None:
        self._members = frozenset(members)
        self._values: dict[str, bytes] = {}
        self._answers: dict[str, OrderedDict[int, Answer]] = {member: OrderedDict() for member in members}
        self._parked: dict[tuple[str, int], Question] = {}

    def handle(self, sender: str, body: Mapping[str, Any]) -> list[MemberMessage]:
        """Take a question; raises ProtocolError for one that no member can have asked."""
        question = read(body, Question, ASKED)
        if sender not in self._members:
            raise ProtocolError(f"{sender} is not a member of the group of {', '.join(sorted(self._members))}")
        if len(self._values) + len(question.keys) > MOST_KEYS or (question.verb != "count" and not question.keys):
            raise ProtocolError(f"{sender} asks for {len(question.keys)} keys; the store has {len(self._values)}")
        done = self._answers[sender].get(question.number)
        if done is not None:
            return [_reply(sender, done)]
        waiting = sum(member == sender for member, _ in self._parked)
        if self._waits(question) and waiting >= REMEMBERED and (sender, question.number) not in self._parked:
            raise ProtocolError(f"{sender} waits for more than {REMEMBERED} answers at once")
        self._parked[sender, question.number] = question
        return self._serve()

    def _serve(self) -> list[MemberMessage]:
        """Answer what can be answered now."""
        out: list[MemberMessage] = []
        served = True
        while served:
            served = False
            for (sender, number), question in list(self._parked.items()):
                if self._waits(question):
                    continue
                del self._parked[sender, number]
                answer = self._answer(question)
                remembered = self._answers[sender]
                remembered[number] = answer
                if len(remembered) > REMEMBERED:
                    remembered.popitem(last=False)
                out.append(_reply(sender, answer))
                served = True
        return out

    def _answer(self, question: Question) -> Answer:
        number, verb, key = question.number, question.verb, question.keys[0] if question.keys else ""
        values = self._values
        if verb == "set":
            values[key] = question.value
        elif verb == "get":
            return Answer(number, values[key])
        elif verb == "add":
            sum_ = self._number(key) + question.amount
            values[key] = str(sum_).encode()
            return Answer(number, count=sum_)
        elif verb == "check":
            return Answer(number, count=int(self._has(question.keys)))
        elif verb == "delete":
            return Answer(number, count=int(values.pop(key, None) is not None))
        elif verb == "swap":
            if values.get(key, b"") == question.expected:
                values[key] = question.value
            return Answer(number, values.get(key, question.expected))
        elif verb == "count":
            return Answer(number, count=len(values))
        return Answer(number)

    def _number(self, key: str) -> int:
        """Numbers are stored as decimal digits, as in other stores."""
        text = self._values.get(key, b"0")
        return int(text) if len(text) < 20 and text.lstrip(b"-").isdigit() else 0

    def _waits(self, question: Question) -> bool:
        return question.verb in ("get", "wait") and not self._has(question.keys)

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


def _reply(to: str, answer: Answer) -> MemberMessage:
    return MemberMessage(to, ANSWERED, msgspec.structs.asdict(answer))
