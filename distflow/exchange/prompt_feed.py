"""Prompts that clients put while the run goes on: one owner takes them, all owners have them on their disks.

The first owner takes rows (`FEED`) and appends them to its log. Every other owner has a log of its own, which is the
same or lacks its end: it says how far it is (`HAVE`), and gets what follows (`LINES`). A client hears that its rows are
taken once all owners have them, so that none is lost with any of them. Whoever is the first owner of a later term takes
rows once all others have said how far they are, and has got from them what it lacked.

A client numbers its calls and may repeat them: the log has, with each row, the call that brought it. Rows are taken
while less than `ahead` of them wait behind the last one that an owner has asked for; a call waits for room, or takes
what there is. `PromptFeed` is used by one thread, apart from `has`, `waits` and `reach`, since disks are slow.

Example, ahead 2: feed(a, call 1, 3 rows) → taken 2, behind the two rows there is room once row 0 is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import structs

from distflow.comm.message import Buffer
from distflow.comm.message import Message as Envelope
from distflow.data.decoding import Form, FromMinusOne, Whole, decoder, read
from distflow.data.fed import RowLog, check_line, logged_line
from distflow.data.files import Row, checked_row
from distflow.errors import ProtocolError, UserError
from distflow.exchange.store_channel import Reply, Text, refusal
from distflow.log import logger

FEED, END = "client.feed", "client.end_prompts"
HAVE, LINES = "prompts.have", "prompts.lines"
CLIENT_KINDS, OWNER_KINDS = (FEED, END), (HAVE, LINES)
MOST_ROWS, MOST_BYTES = 4096, 16 << 20
"""Of one call."""
MOST_CALLS = 64
"""That wait at once, each of another client."""
WAITING_BYTES = 4 * MOST_BYTES
"""Of the rows of all calls that wait; a further call is taken when there is room for the largest one."""
PIECE_BYTES = 1 << 20
SAY_EVERY_S = 0.5
"""How often an owner says how far it is: messages may be lost."""
Post = Callable[[str, str, Mapping[str, Any], Sequence[Buffer]], object]
log = logger(__name__)


class Fed(Form, frozen=True):
    """Body of FEED; the payload has a row in JSON a line. Without one, it asks again about rows that were sent."""

    client: Text
    number: Whole
    waits: bool
    """For room, if there is none."""


class Ended(Form, frozen=True):
    """Body of END."""

    client: Text
    number: Whole


class Have(Form, frozen=True):
    """Body of HAVE: how far an owner is, and the last position that it has asked for."""

    lines: Whole
    check: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    reached: FromMinusOne


class LogLines(Form, frozen=True):
    """Body of LINES: where the lines in the payload begin. `anew`: what the receiver has is not the same."""

    first: Whole
    anew: bool


class FeedLinks(NamedTuple):
    """What a feed calls."""

    check: Callable[[Sequence[Row]], None]
    """Whether rows make prompts: UserError if not."""
    reply: Reply
    post: Post
    came: Callable[[], None]
    """Rows have been appended here."""
    passes_over: Callable[[int], None]
    """So many rows are all; called before `came`."""


class FeedSettings(NamedTuple):
    """What an owner knows of the rows."""

    rows: int
    """How many there will be."""
    ahead: int
    """How many may wait to be asked for."""
    used: int
    """Prompt positions that the checkpoint has trained on: each has taken a row, unless the rows were ended before."""


@dataclass(slots=True)
class _Call:
    """A call of a client that has not been answered."""

    message: Envelope
    number: int
    rows: list[bytes]
    waits: bool
    fits: bool = False
    """Whether the rows were checked."""

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.rows))


class PromptFeed:
    """At the owner `name` of `owners`; the first of them takes rows."""

    def __init__(
        self, name: str, owners: Sequence[str], settings: FeedSettings, rows: RowLog, links: FeedLinks
    ) -> None:
        self.log = rows
        self._name, self._first = name, owners[0]
        self._settings = settings
        self._links = links
        self._others: dict[str, Have | None] = {owner: None for owner in owners if owner != name}
        """How far the others are, as far as they have said."""
        self._calls: dict[str, _Call] = {}
        """By client."""
        self._replies: list[tuple[int, Envelope, Mapping[str, Any]]] = []
        """Sent once all owners have so many lines."""
        self._left: dict[str, int] = {}
        """The newest call of a client that did not wait and found no room."""
        self._reached = -1
        self._said_at = 0.0
        self._said = -1
        self._refused = False
        self._whole = False
        self._handlers = {FEED: self._on_feed, END: self._on_end, HAVE: self._on_have, LINES: self._on_lines}
        self._look_whether_whole()

    # -- by any thread
    def has(self, position: int) -> bool:
        """Whether the row of a position is there."""
        return position < len(self.log) or self._whole

    def reach(self, position: int) -> bool:
        """This owner asks for the prompt of a position; whether it is the first time for so late a one."""
        further = position > self._reached
        self._reached = max(self._reached, position)
        return further

    @property
    def waits(self) -> str:
        """Which row this owner waits for; "": none."""
        if self._reached < 0 or self.has(self._reached):
            return ""
        return f"clients to put prompts (Client.put_prompts), row {len(self.log) + 1} of {self._settings.rows}"

    @property
    def counts(self) -> dict[str, Any]:
        """How far the rows are, for `status`; `begun`: positions that were asked for, whether or not they are there."""
        begun = self._reached + 1
        return {"rows": len(self.log), "of": self._settings.rows, "ended": self.log.ended, "begun": begun}

    # -- by its own thread
    def on_message(self, message: Envelope, now: float) -> None:
        """A message of a client or of another owner; raises ProtocolError if it is malformed."""
        if message.kind in CLIENT_KINDS and self._name != self._first:
            return  # The client learns who is, and repeats it.
        self._handlers[message.kind](message)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Take what there is room for, and say how far this owner is. Raises UserError if rows are lost."""
        self._serve()
        due = now - self._said_at >= SAY_EVERY_S
        if due or (self._reached > self._said and now - self._said_at >= SAY_EVERY_S / 10):
            self._said_at, self._said = now, self._reached
            if self._name != self._first:
                self._say(self._first)
        # With all rows, or their end, it is whole, and passes over it follow.
        if self._synced and not self._whole and len(self.log) < self._settings.used:
            raise UserError(
                f"{self.log.path} has {len(self.log)} rows that clients have put, and not their end, but the "
                f"checkpoint has trained on {self._settings.used} prompt positions, each with a row: copy the file "
                "back, or begin a new run"
            )

    def close(self, *, over: bool) -> None:
        """Leave. If the run is over, answer who waits: nothing more is taken."""
        for call in self._calls.values() if over else ():
            self._links.reply(call.message, {"number": call.number, "over": True}, ())
        self._calls.clear()
        self.log.close()

    @property
    def _synced(self) -> bool:
        """Whether this is the first owner, and knows that no other has more lines."""
        lines = self.log.lines
        return self._name == self._first and all(
            have is not None and have.lines <= lines for have in self._others.values()
        )

    def refuse(self, message: Envelope, error: ProtocolError) -> None:
        """Answer a call that cannot be read."""
        if message.kind in CLIENT_KINDS:
            self._links.reply(message, refusal(message, str(error)), ())

    def _on_feed(self, message: Envelope) -> None:
        fed = read(message.body, Fed, message.kind)
        rows = _rows(message.payload) if message.payload else []
        message = structs.replace(message, payload=())
        if self._is_known(fed.client, fed.number, message, waits=fed.waits) or not self._has_room(fed.client):
            return
        if not rows and fed.number > max(self.log.taken.get(fed.client, (-1, 0))[0], self._left.get(fed.client, -1)):
            self._links.reply(message, {"number": fed.number, "unknown": True}, ())
        else:
            self._calls[fed.client] = _Call(message, fed.number, rows, fed.waits)

    def _on_end(self, message: Envelope) -> None:
        ended = read(message.body, Ended, message.kind)
        if not self._is_known(ended.client, ended.number, message, waits=True) and self._has_room(ended.client):
            self._calls[ended.client] = _Call(message, ended.number, [], waits=True)

    def _is_known(self, client: str, number: int, message: Envelope, *, waits: bool) -> bool:
        """Whether a call waits already, or a later one of the same client does."""
        known = self._calls.get(client)
        if known is not None and known.number == number:
            known.message, known.waits = message, waits
        return known is not None and known.number >= number

    def _has_room(self, client: str) -> bool:
        """Whether a call may wait; one that may not is repeated."""
        others = [call for name, call in self._calls.items() if name != client]
        return len(others) < MOST_CALLS and sum(call.nbytes for call in others) + MOST_BYTES <= WAITING_BYTES

    def _serve(self) -> None:
        """Take the rows of calls as far as there is room, and answer those whose rows all owners have."""
        for client in list(self._calls) if self._synced else ():
            call = self._calls[client]
            try:
                taken = self._take(client, call)
            except UserError as error:
                self._links.reply(call.message, {"number": call.number, "error": str(error)}, ())
                del self._calls[client]
                continue
            if taken is not None:
                del self._calls[client]
                self._replies.append((self.log.lines, call.message, {"number": call.number, "taken": taken}))
        least = min((0 if have is None else have.lines for have in self._others.values()), default=self.log.lines)
        for _, message, body in [reply for reply in self._replies if reply[0] <= least]:
            self._links.reply(message, body, ())
        self._replies = [reply for reply in self._replies if reply[0] > least]

    def _take(self, client: str, call: _Call) -> int | None:
        """How many rows of a call are taken; None: it waits."""
        number, taken = self.log.taken.get(client, (-1, 0))
        if call.number <= max(number, self._left.get(client, -1)):
            return taken if call.number == number else 0
        self._check_open(call)
        if not call.rows:
            return None if self._append([logged_line(client, call.number, None)]) is None else 0
        if not call.fits:
            self._links.check([checked_row(row, f"row {index}") for index, row in enumerate(call.rows)])
            call.fits = True
        reached = max([self._reached, *(have.reached for have in self._others.values() if have is not None)])
        room = max(0, reached + 1 + self._settings.ahead - len(self.log))
        lines = [logged_line(client, call.number, row) for row in call.rows[:room]]
        if lines:
            return self._append(lines)
        if call.waits:
            return None
        self._left[client] = call.number
        return 0

    def _check_open(self, call: _Call) -> None:
        there, rows = len(self.log), self._settings.rows
        if self.log.ended:
            raise UserError(f"the prompts of this run were ended after {there} rows (Client.end_prompts)")
        if not call.rows and not there:
            raise UserError("no prompts were put, so there is nothing to end: put some, or `distflow stop` the run")
        if len(call.rows) > rows - there:
            raise UserError(
                f"{len(call.rows)} rows are put, and {rows - there} of data.with.rows={rows} have yet to come: "
                "then the data is whole, and passes over it follow"
            )

    def _append(self, lines: Sequence[bytes]) -> int | None:
        """How many rows were appended; None if the disk refuses, which is tried again."""
        try:
            self.log.append(lines)
        except OSError as error:
            if not self._refused:
                log.error("could not write %s, clients wait with their prompts: %s", self.log.path, error)
            self._refused = True
            return None
        self._refused = False
        self._look_whether_whole()
        self._links.came()
        for other, have in self._others.items() if self._name == self._first else ():
            if have is not None:
                self._send_lines(other, have)
        return len(lines)

    def _look_whether_whole(self) -> None:
        if self.log.ended or len(self.log) >= self._settings.rows:
            self._links.passes_over(len(self.log))
            self._whole = True

    # -- with other owners
    def _say(self, to: str) -> None:
        lines = self.log.lines
        self._links.post(to, HAVE, msgspec.to_builtins(Have(lines, self.log.check(lines), self._reached)), ())

    def _on_have(self, message: Envelope) -> None:
        have = read(message.body, Have, message.kind)
        if message.sender not in self._others:
            return
        self._others[message.sender] = have
        if have.lines > self.log.lines:
            self._say(message.sender)
        else:
            self._send_lines(message.sender, have)

    def _send_lines(self, to: str, have: Have) -> None:
        """Send an owner the next lines that it lacks; if it has others, from the first one on."""
        anew = have.check != self.log.check(have.lines)
        first = 0 if anew else have.lines
        if first < self.log.lines:
            piece = self.log.some(first, PIECE_BYTES)
            self._links.post(to, LINES, msgspec.to_builtins(LogLines(first, anew)), (piece,))

    def _on_lines(self, message: Envelope) -> None:
        lines = read(message.body, LogLines, message.kind)
        if message.sender not in self._others or len(message.payload) != 1:
            raise ProtocolError(f"lines of the prompts' log from {message.sender}")
        # Before anything is done: what is no line of a log is refused, and costs nobody the lines that are here.
        given = _lines(message.payload[0])
        if lines.anew:
            log.warning("%s is not what %s has, and is written anew", self.log.path, message.sender)
            self.log.clear()
        if lines.first <= self.log.lines:
            missing = given[self.log.lines - lines.first :]
            if missing and self._append(missing) is None:
                return
        self._say(message.sender)


def _rows(payload: Sequence[Buffer]) -> list[bytes]:
    if len(payload) != 1 or memoryview(payload[0]).nbytes > MOST_BYTES:
        raise ProtocolError(f"rows in {len(payload)} payload frames; expected one of at most {MOST_BYTES} bytes")
    rows = bytes(payload[0]).split(b"\n")
    if not 1 <= len(rows) <= MOST_ROWS:
        raise ProtocolError(f"{len(rows)} rows in a call; expected 1 to {MOST_ROWS}")
    return rows


@decoder
def _lines(payload: Buffer) -> list[bytes]:
    """The whole lines of a log in a message; raises ProtocolError if one of them is none, or is no row."""
    given = [line + b"\n" for line in bytes(payload).split(b"\n")[:-1]]
    for line in given:
        check_line(line)
    return given
