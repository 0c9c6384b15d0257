"""The messages between owners and holders of leases.

Holder to owner: Ask, Progress, Result, HandBack, Bye. Owner to holder: Grant, Refuse, Ack, Cancel, Again, Closed,
Finished.
The payload of a Result (the group's batch) is sent beside the message; the cores never see it.

Messages may be lost, duplicated or reordered: reports, asks and grants are numbered, and important ones are repeated
until their effect is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from msgspec import structs

from distflow.data.decoding import MOST, Form, FromMinusOne, PeerName, Row, Whole
from distflow.types import FIRST_CALL, BegunSample, LeaseKind, Scores, Span, Uid, Version


class LeasePrompt(msgspec.Struct, frozen=True):
    """A prompt as the owner reads it from the data order.

    Example:

        LeasePrompt(Uid(0, 7, 12), (4, 2, 10), "42=", "42")
    """

    uid: Uid
    prompt_ids: tuple[int, ...]
    prompt_text: str
    task: str


PromptAt = Callable[[int], LeasePrompt | None]
"""The prompt of a position, or None if it has not been read yet: then `prompts_arrived` is called once it has."""


class Lease(msgspec.Struct, frozen=True):
    """The right and the duty to generate the group of one prompt position.

    Example:

        Lease(Uid(0, 7, 12), ledger=0, k=6, attempt=1, seed=5, prompt_ids=(4, 2, 10), prompt_text="42=",
              task="42", min_version=1, term=0)
    """

    uid: Uid
    ledger: int
    k: int
    """Place within the ledger."""
    attempt: int
    """1 for the first lease of this position, increased each time it is leased again."""
    seed: int
    prompt_ids: tuple[int, ...]
    prompt_text: str
    task: str
    min_version: int
    """No engine with a lower policy version may start a sample of the group."""
    term: int
    kind: LeaseKind = "train"
    begun: tuple[BegunSample, ...] = ()
    """Samples that other workers began, to be continued."""
    copy: bool = False
    """Another worker has this lease too: the first complete result counts."""

    @property
    def position(self) -> int:
        """Global prompt position."""
        return self.uid.position

    @property
    def least(self) -> Version:
        """The oldest version that may start a sample."""
        return Version(self.term, self.min_version)


class Report(Row, frozen=True):
    """A holder's state with respect to one owner; part of every Ask, Progress and HandBack.

    Example:

        Report("rollout/0", incarnation=0, term=0, number=31, held=(12, 14), grant_seen=3, closed_seen=1)
    """

    worker: PeerName
    incarnation: Whole
    term: Whole
    """The owner's term that `grant_seen` and `held` belong to."""
    number: Whole
    """Increases with every report of this incarnation; an owner ignores reports older than one it has read."""
    held: tuple[Whole, ...]
    """All positions of this owner at the holder: queued, running, or finished and not yet acknowledged."""
    grant_seen: Whole
    """Highest number among the grants received from this owner; 0: none."""
    closed_seen: FromMinusOne
    """Last training step this owner is known to have closed; −1: none."""


class Running(Row, frozen=True):
    """One group at a holder: tokens produced so far (all samples), version at its first start (−1: queued).

    Example:

        Running(position=12, tokens=160, version=1)
    """

    position: Whole
    tokens: Whole
    version: FromMinusOne


class Piece(msgspec.Struct, frozen=True):
    """Tokens of one request of a sample, from token `start` on.

    Example:

        Piece(12, sample=0, start=2, token_ids=bytes((9, 0, 0, 0)), logprobs=bytes(8),
              spans=(Span(0, 1, 2, 3),), finish_reason="")
    """

    position: int
    sample: int
    start: int
    token_ids: bytes
    """4 bytes a token."""
    logprobs: bytes
    """8 bytes a token."""
    spans: tuple[Span, ...]
    """Spans of these tokens, without gaps; offsets are counted from the request's first token."""
    finish_reason: str
    """Empty unless the request ends with this piece."""
    filtered_logprobs: bytes = b""
    """8 bytes a token, or none: see `SampleOutput`."""
    call: tuple[int, ...] = FIRST_CALL
    """Which request of the sample."""
    digest: int = 0
    """Of what was asked for."""
    answer: bytes = b""
    """Of a tool, whole; then there are no tokens."""

    @property
    def end(self) -> int:
        """Offset after its last token."""
        return self.start + len(self.token_ids) // 4

    @property
    def nbytes(self) -> int:
        """Approximate size in a message."""
        values = len(self.token_ids) + len(self.logprobs) + len(self.filtered_logprobs) + len(self.answer)
        return values + 32 * (1 + len(self.spans))


class Ask(Form, frozen=True):
    """A request for `groups` leases. A repeated `ask` number means a lost answer; `groups` 0 withdraws the ask.

    Example:

        Ask(Report("rollout/0", 0, 0, 31, (12, 14), 3, 1), ask=4, groups=2, park=True, idle=False)
    """

    report: Report
    ask: Whole
    groups: Whole
    park: bool
    """Keep the ask until there is something to lease instead of refusing it."""
    idle: bool
    """The worker is nearly idle and would take a copy of a slow group of another worker."""


class Progress(msgspec.Struct, frozen=True):
    """A progress report: every unfinished group, and what their samples produced since the last report.

    Example:

        Progress(Report("rollout/0", 0, 0, 32, (12,), 3, 1), running=(Running(12, 160, 1),))
    """

    report: Report
    running: tuple[Running, ...]
    pieces: tuple[Piece, ...] = ()


class HandBack(msgspec.Struct, frozen=True):
    """The holder is leaving and gives up these leases. Sent until acknowledged; its report no longer lists them.

    Several may follow one after another.

    Example:

        HandBack(Report("rollout/0", 0, 0, 33, (), 3, 1), positions=(12,), pieces=())
    """

    report: Report
    positions: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """What their samples produced since the last progress report."""


class Result(Form, frozen=True):
    """A finished group (payload beside it), or the reason why it is dropped. Sent until acknowledged.

    Example:

        Result("rollout/0", 0, term=0, position=12, attempt=1, nbytes=9120, oldest=Version(0, 1), dropped="",
              wanted=2, scores=(), tokens=280)
    """

    worker: PeerName
    incarnation: Whole
    term: Whole
    position: Whole
    attempt: Whole
    nbytes: Whole
    """Bytes of the payload."""
    oldest: Version | None
    """Oldest policy version of any token; None only for a dropped group that produced none."""
    dropped: str
    """Why the group is not to be trained on; empty: it is."""
    wanted: Whole
    """Groups the holder would take now: its parked ask is raised to this number."""
    scores: Scores
    """Of a dropped group: what its samples scored, if all of them were judged."""
    tokens: Whole
    """Tokens of all its responses, also of a dropped group."""

    def __post_init__(self) -> None:
        """Raises ValueError, which a reader of the message passes on as ProtocolError."""
        if self.oldest is None and not self.dropped:
            raise ValueError("expected [term, number] for oldest, unless dropped: got null")
        if self.oldest is not None and not 0 <= min(self.oldest) <= max(self.oldest) < MOST:
            raise ValueError(f"expected two integers >= 0 for oldest, got {self.oldest}")


class Bye(Form, frozen=True):
    """The holder leaves, or knows that the run is over. Its leases are free.

    Example:

        Bye("rollout/0", incarnation=0)
    """

    worker: PeerName
    incarnation: Whole


class Grant(msgspec.Struct, frozen=True):
    """Leases, in answer to an ask. Numbered from 1 per owner's term and worker's incarnation.

    Example:

        Grant("trainer/0", term=0, incarnation=0, number=4, ask=4, leases=(), step=7)
    """

    owner: str
    term: int
    incarnation: int
    number: int
    ask: int
    leases: tuple[Lease, ...]
    step: int = 0
    """The latest training step for which one of them is: how far ahead of its training this owner leases."""


class Refuse(Form, frozen=True):
    """There is nothing to lease now. `parked`: the ask is kept and will be answered.

    Example:

        Refuse("trainer/0", term=0, incarnation=0, ask=4, parked=True)
    """

    owner: PeerName
    term: Whole
    incarnation: Whole
    ask: Whole
    parked: bool


class Ack(Form, frozen=True):
    """The owner has these results; the holder may forget them.

    Example:

        Ack("trainer/0", term=0, incarnation=0, positions=(12,))
    """

    owner: PeerName
    term: Whole
    incarnation: Whole
    positions: tuple[Whole, ...]


class Cancel(Form, frozen=True):
    """The owner no longer wants these groups: another copy arrived first, or they are of another term.

    Example:

        Cancel("trainer/0", term=0, incarnation=0, positions=(14,))
    """

    owner: PeerName
    term: Whole
    incarnation: Whole
    positions: tuple[Whole, ...]


class Again(Form, frozen=True):
    """There is a gap in what the owner has of these groups: send their pieces again from the first token.

    Example:

        Again("trainer/0", term=0, incarnation=0, positions=(12,))
    """

    owner: PeerName
    term: Whole
    incarnation: Whole
    positions: tuple[Whole, ...]


class Closed(Form, frozen=True):
    """All the owner's ledgers have their complete set for this training step, and for all before it.

    Example:

        Closed("trainer/0", term=0, step=1)
    """

    owner: PeerName
    term: Whole
    step: FromMinusOne


class Finished(Form, frozen=True):
    """The owner needs nothing more in this run. Sent until the holder answers Bye.

    Example:

        Finished("trainer/0", term=0)
    """

    owner: PeerName
    term: Whole


HolderMessage = Ask | Progress | Result | HandBack | Bye
OwnerMessage = Grant | Refuse | Ack | Cancel | Again | Closed | Finished
Message = HolderMessage | OwnerMessage


class Outgoing(msgspec.Struct, frozen=True):
    """A message to be sent to the worker named `to`."""

    to: str
    message: Message


def merge_acks(outgoing: Iterable[Outgoing]) -> list[Outgoing]:
    """The same messages, with all acks to one worker merged into the first, which is cheaper to send."""
    merged: list[Outgoing] = []
    places: dict[tuple[str, str, int, int], int] = {}
    for item in outgoing:
        ack = item.message
        if not isinstance(ack, Ack):
            merged.append(item)
            continue
        key = (item.to, ack.owner, ack.term, ack.incarnation)
        if key not in places:
            places[key] = len(merged)
            merged.append(item)
            continue
        first = merged[places[key]].message
        assert isinstance(first, Ack), "an ack was put at this place"
        merged[places[key]] = Outgoing(item.to, structs.replace(first, positions=first.positions + ack.positions))
    return merged
