"""A reader's connections to the publisher and to other readers, and the fetch of a version over them.

What is decided about them is in `fetch_core.py`: it is asked under one lock, and what it says is done without that.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from distflow.log import logger
from distflow.weights.manifest import CHUNK_BYTES, Manifest, coding_threads
from distflow.weights.swarm.fetch_actions import Action, Expect, HangUp, Landing, SendAsk, WantedVersion
from distflow.weights.swarm.fetch_core import FetchCore
from distflow.weights.swarm.link import SwarmLink
from distflow.weights.swarm.sockets import Refused
from distflow.weights.swarm_messages import Content, Opening, Says, SwarmPlace

CONNECTIONS = 4
"""At least, to the publisher, and to all other readers together: each has a thread that receives and hashes."""
TICK_S = 0.1
CLOSE_S = 5.0

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class FetchRules:
    """When a fetch ends without success."""

    no_progress_s: float
    closed: Callable[[], bool]
    superseded: Callable[[], bool]


class SwarmClient:
    """Fetches from the swarm around one publisher; `own`: where this reader stands, and serves what it has fetched.

    One thread fetches at a time. Connections stay open between fetches: so the publisher knows which readers there are.
    """

    def __init__(self, place: SwarmPlace, own: Opening) -> None:
        self.place = place
        self._opening = own
        self._condition = threading.Condition()
        self._numbers = itertools.count()
        self._core = FetchCore[SwarmLink](place.address, own.serves, max(CONNECTIONS, coding_threads()))

    def fetch(
        self,
        manifest: Manifest,
        memory: memoryview,
        arrived: Callable[[int], None],
        coming: Callable[[Mapping[str, int]], None],
        rules: FetchRules,
        there: Collection[int] = (),
    ) -> None:
        """Fill `memory` with the version; `arrived` is called for each chunk that is there and right, but for those
        that are `there` before, and `coming` for what to tell readers that wait for chunks that are on their way here.

        Raises Overtaken, ChecksumError, NoProgressError; nothing is written to `memory` any more then.
        """

        def into(chunk: int) -> memoryview:
            start = chunk * CHUNK_BYTES
            return memory[start : start + manifest.size_of(chunk)]

        core, wanted = self._core, WantedVersion(manifest, into, arrived, rules.no_progress_s)
        with self._condition:
            out = core.begin(wanted, there, time.monotonic())
        try:
            self._do(out)
            while not core.done:
                self._connect()
                with self._condition:
                    self._condition.wait_for(lambda: core.ended, TICK_S)
                    stalled = core.stalled(time.monotonic())
                # Whether there is a newer version may have to be asked for.
                superseded, closed = stalled and rules.superseded(), rules.closed()
                with self._condition:
                    out = core.tick(time.monotonic(), superseded=superseded, closed=closed)
                for counts in (action.counts for action in out if isinstance(action, Expect)):
                    coming(counts)
                if core.error is not None:
                    raise core.error
                self._do(out)
        finally:
            with self._condition:
                out = core.end()
            self._hang_up(out)

    def tell_made(self, manifest: Manifest) -> None:
        """Tell the publisher that readers can get all of a version here, though it has not given it to this one."""
        with self._condition:
            out = self._core.made(manifest)
        self._do(out)

    def close(self) -> None:
        """Hang up everywhere."""
        with self._condition:
            out = self._core.close()
        self._hang_up(out)

    def _hang_up(self, out: Iterable[Action[SwarmLink]]) -> None:
        """Hang up, and wait until nothing more comes."""
        links = [action.link for action in out if isinstance(action, HangUp)]
        for link in links:
            link.close()
        for link in links:
            link.thread.join(CLOSE_S)
            if link.thread.is_alive():
                log.warning("%s did not stop within %g s", link.thread.name, CLOSE_S)

    def _do(self, out: Iterable[Action[SwarmLink]]) -> None:
        for action in out:
            if isinstance(action, SendAsk):
                action.link.ask(action.ask)
            elif isinstance(action, HangUp):
                action.link.close()
            elif not isinstance(action, Expect):
                (log.warning if action.warns else log.info)("%s", action.text)

    def _connect(self) -> None:
        """Make the connections that are missing; to readers on threads: one that stands still does not even answer."""
        while True:
            with self._condition:
                address = self._core.connect(time.monotonic())
            if address is None:
                return
            if address == self.place.address:
                self._connect_to(address)
            else:
                threading.Thread(target=self._connect_to, args=(address,), name="swarm-meet", daemon=True).start()

    def _connect_to(self, address: str) -> None:
        try:
            link = SwarmLink(next(self._numbers), address, self.place, self._opening, self)
        except OSError as error:
            with self._condition:
                out = self._core.failed(address, time.monotonic(), refused=isinstance(error, Refused))
        else:
            with self._condition:
                out = self._core.opened(link, time.monotonic())
        self._do(out)

    # -- on the connections' threads

    def landing(self, link: SwarmLink, content: Content, chunk: int, size: int) -> Landing | None:
        """Where a chunk goes that begins to arrive."""
        with self._condition:
            return self._core.landing(link, content, chunk, size)

    def landed(self, link: SwarmLink, content: Content, chunk: int, *, right: bool) -> None:
        """A chunk has arrived."""
        with self._condition:
            out = self._core.landed(link, content, chunk, time.monotonic(), right=right)
            self._wake()
        self._do(out)

    def heard(self, link: SwarmLink, says: Says, content: Content, chunk: int, chunks: tuple[int, ...]) -> None:
        """Something about chunks."""
        with self._condition:
            out = self._core.heard(link, says, content, chunk, chunks)
            self._wake()
        self._do(out)

    def coming(self, content: Content, counts: Mapping[str, int]) -> None:
        """Another reader says who has received how much."""
        with self._condition:
            self._core.coming(content, counts, time.monotonic())

    def met(self, peers: tuple[str, ...]) -> None:
        """The publisher says which readers there are."""
        with self._condition:
            out = self._core.met(peers)
        self._do(out)

    def lost(self, link: SwarmLink) -> None:
        """A connection is over."""
        with self._condition:
            out = self._core.lost(link, time.monotonic())
        self._do(out)

    def _wake(self) -> None:
        """Wake the fetching thread if there is nothing more to wait for; with the lock."""
        if self._core.ended:
            self._condition.notify_all()
