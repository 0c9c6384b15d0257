"""Which open groups a second worker gets: those of silent holders, and those that take long while somebody is idle.

In words. An open group has *live* holders, who have been heard of lately, and silent ones. Without a live holder it is
*stranded*: any asker gets a copy. With one live holder, and leased much longer ago than groups usually take, it is
*slow*: a nearly idle asker gets a copy; and so it is when it still waits for its turn there. With two live holders it
gets no further copy. Silent holders keep their lease: they may come back, and the first complete result counts,
whosever it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from distflow.exchange.ledger import Entry
from distflow.exchange.peers import Peer, Peers, Share
from distflow.exchange.settings import LeaseSettings

_SMOOTHING = 0.05
_SLOW = 2.0
"""Times the usual duration after which a group counts as slow."""


class Copies:
    """What may be copied, as of the last look."""

    def __init__(self, settings: LeaseSettings) -> None:
        self.usual_s: float | None = None
        """Smoothed time from lease to arrival; None before the first result."""
        self._settings = settings
        self._stranded: list[Entry] = []
        self._slow: list[Entry] = []

    def arrived(self, entry: Entry, now: float) -> None:
        """A result has come."""
        seconds = now - entry.leased_at
        self.usual_s = seconds if self.usual_s is None else self.usual_s + _SMOOTHING * (seconds - self.usual_s)

    def look(self, entries: Iterable[Entry], peers: Peers, now: float) -> None:
        """Find what is stranded and what is slow, longest started first. The asks of silent workers are forgotten."""
        if not self._settings.hedging:
            return
        silent = {peer.name for peer in peers if peer.silent(now - self._settings.silence_s)}
        for name in silent:
            # It would sit on what it is given; when it comes back it asks again.
            peers.unpark(peers[name])
        slow_s = float("inf") if self.usual_s is None else max(self._settings.hedge_s, _SLOW * self.usual_s)
        # A report has had the time to say that it runs.
        unstarted_s = self._settings.hedge_s + self._settings.report_s
        self._stranded, self._slow = [], []
        for entry in sorted(entries, key=lambda entry: (entry.leased_at, entry.lease.position)):
            if entry.state != "open":
                continue
            live = len(entry.holders.keys() - silent)
            if live == 0:
                self._stranded.append(entry)
            elif live == 1 and now - entry.leased_at >= (slow_s if entry.started else unstarted_s):
                self._slow.append(entry)

    def stranded(self, peers: Peers) -> list[Share]:
        """Copies for anybody who asks."""
        return self._deal(self._stranded, [peer for peer in peers.parked if peer.parked])

    def slow(self, peers: Peers) -> list[Share]:
        """Copies for those who are nearly idle."""
        return self._deal(self._slow, [peer for peer in peers.parked if peer.idle])

    def _deal(self, entries: list[Entry], peers: list[Peer]) -> list[Share]:
        """One copy of each entry to a worker that does not hold it, in fair shares. The list keeps what is left."""
        if not entries or not peers:
            return []
        shares = [Share(peer, peer.room(self._settings.message_bytes)) for peer in peers]
        left: list[Entry] = []
        for entry in entries:
            if entry.state != "open":
                continue
            takers = [share for share in shares if not share.full and share.peer.name not in entry.holders]
            if takers:
                min(takers, key=lambda share: len(share.entries)).add(entry)
            else:
                left.append(entry)
        entries[:] = left
        return [share for share in shares if share.entries]
