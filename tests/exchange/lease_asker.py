"""Sends a worker's messages to an owner under test: exactly those that the test wants, with correct numbering."""

from __future__ import annotations

from collections.abc import Sequence

from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import Ask, Grant, Lease, Outgoing, Piece, Progress, Report, Result, Running
from distflow.exchange.owner import OwnerCore
from distflow.types import Version
from tests.search.lease_scenario import SMALL, prompt_at


class Asker:
    """A worker whose messages the test chooses one by one."""

    def __init__(self, owner: OwnerCore, name: str = "rollout/0", incarnation: int = 0) -> None:
        self.owner, self.name, self.incarnation = owner, name, incarnation
        self.reports = self.asks = 0

    def report(self, held: Sequence[int] = (), seen: int = 0, closed: int = -1) -> Report:
        """The next report of this worker to its owner."""
        self.reports += 1
        return Report(self.name, self.incarnation, self.owner.term, self.reports, tuple(held), seen, closed)

    def ask(
        self,
        groups: int,
        held: Sequence[int] = (),
        seen: int = 0,
        now: float = 0.0,
        *,
        park: bool = True,
        idle: bool = False,
    ) -> list[Outgoing]:
        """Send a new ask to the owner; returns its answer."""
        self.asks += 1
        return self.owner.handle(Ask(self.report(held, seen), self.asks, groups, park, idle), now)

    def ask_again(self, groups: int, held: Sequence[int] = (), seen: int = 0, now: float = 0.0) -> list[Outgoing]:
        """Repeat the last ask."""
        self.asks -= 1
        return self.ask(groups, held, seen, now)

    def progress(
        self, running: Sequence[Running] = (), seen: int = 0, now: float = 0.0, pieces: Sequence[Piece] = ()
    ) -> list[Outgoing]:
        """Report these groups as running, and as the only ones held."""
        held = [item.position for item in running]
        return self.owner.handle(Progress(self.report(held, seen), tuple(running), tuple(pieces)), now)

    def result(
        self, position: int, dropped: str = "", version: int = 0, wanted: int = 0, nbytes: int = 10, tokens: int = 0
    ) -> Result:
        """A result of this worker."""
        oldest, about = Version(self.owner.term, version), (self.name, self.incarnation, self.owner.term, position)
        return Result(*about, 1, nbytes, oldest, dropped, wanted, (), tokens)

    def finish(self, *positions: int, dropped: str = "", version: int = 0, wanted: int = 0) -> list[Outgoing]:
        """Deliver results, one after the other."""
        out = []
        for position in positions:
            out += self.owner.handle(self.result(position, dropped, version, wanted), 0.0)
        return out


def new_owner(settings: LeaseSettings = SMALL) -> OwnerCore:
    """A single owner of all ledgers."""
    return OwnerCore("trainer/0", settings, range(settings.ledgers), prompt_at)


def leases(out: Sequence[Outgoing]) -> dict[str, list[int]]:
    """Granted positions by worker."""
    return {
        item.to: [lease.position for lease in item.message.leases] for item in out if isinstance(item.message, Grant)
    }


def granted(out: Sequence[Outgoing]) -> list[Lease]:
    """All leases granted, in order."""
    return [lease for item in out if isinstance(item.message, Grant) for lease in item.message.leases]


def kinds(out: Sequence[Outgoing]) -> list[type]:
    """The kinds of the messages, in order."""
    return [type(item.message) for item in out]


def finish_step(owner: OwnerCore, asker: Asker) -> list[Outgoing]:
    """Generate, train and publish the open step; returns what `advance` returns."""
    positions = [lease.position for lease in granted(asker.ask(100))]
    asker.finish(*positions, version=owner.version)
    owner.take(owner.consumable(), 0.0)
    return owner.advance(owner.version + 1, 0.0)
