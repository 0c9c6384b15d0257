"""One worker's part in the group that moves a model's weights in parts: it makes the group, sends, and receives.

All that may wait is done on a thread of its own. A trainer only copies its part of a version, on its main thread, which
is all that a version costs it before the next training step; the thread sends these copies. The group is made anew
after each failure, each with a store of its own name.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from distflow.comm.membership import Lost
from distflow.data.decoding import read
from distflow.errors import ChecksumError, ProtocolError, UserError
from distflow.log import logger
from distflow.types import Version
from distflow.weights.manifest import Manifest, TensorEntry, verify
from distflow.weights.segments.shm import tensor_views
from distflow.weights.shards.conductor import FORM_S, ShardConductor, ShardMessage, tensor_layouts
from distflow.weights.shards.copies import HeldShard, PartCopies
from distflow.weights.shards.messages import GROUP, REPORT, HeldRange, ShardGo, ShardGroup, ShardReport
from distflow.weights.shards.plan import Box, ShardPiece, plan_pieces
from distflow.weights.shards.transfer import HeldPart, ShardTransfer
from distflow.weights.transport import NamedTensors

STILL_S = 10.0
"""A member with which no message has passed for so long is lost."""
REPORT_EVERY_S = 1.0
CLOSE_S = 3.0

log = logger(__name__)


class PartsLanding(Protocol):
    """Where a reader puts what has come. Called under the worker's lock."""

    @property
    def free(self) -> bool:
        """Whether it could take a version now."""
        ...

    def begin(self, manifest: Manifest) -> None:
        """A version is coming."""
        ...

    def end(self, manifest: Manifest, tensors: NamedTensors | None) -> None:
        """It has come, or not."""
        ...


@dataclass(frozen=True, slots=True)
class LinkSurroundings:
    """What a link needs of its worker."""

    me: str
    address: str
    """Of this host for the other members."""
    lock: threading.Condition
    post: Callable[[str, str, Mapping[str, Any]], None]
    """Sends a message: to whom, of which kind, with what."""
    store: Callable[[Sequence[str]], Store]
    """What members (the first of them keeps it) find each other by."""
    readers: Callable[[], Sequence[str]]
    """Those present."""
    count: Callable[[int], None]
    """Counts bytes that were sent."""
    fault: Callable[[BaseException], None]


class ShardLink:
    """Of one model. Methods but `keep` and `close` are called under the worker's lock."""

    def __init__(self, model: str, own: LinkSurroundings, conductor: ShardConductor | None) -> None:
        self._model = model
        self._own = own
        self._conductor = conductor
        self._landing: PartsLanding | None = None
        self._keeper = ""
        """Whom this worker reports to."""
        self._known = (-1, -1)
        """Term and epoch of the newest group that this worker was told to make."""
        self._group: ShardGroup | None = None
        """The one that it is in."""
        self._transfer: ShardTransfer | None = None
        self._store: Store | None = None
        self._plans: dict[tuple[str, ...], list[ShardPiece]] = {}
        self._held: tuple[HeldRange, ...] = ()
        self._copies = PartCopies()
        self._memory = mmap.mmap(-1, 1)
        """Where a reader's versions come to, one after the other, laid out like this."""
        self._entries: tuple[TensorEntry, ...] = ()
        self._done = -1
        self._moved = 0
        self._report_at = 0.0
        self._closed = False
        self._jobs: queue.SimpleQueue[ShardGroup | ShardGo | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weights-shards", daemon=True)
        self._thread.start()

    def lands_at(self, landing: PartsLanding) -> None:
        """Set where a reader puts what has come."""
        self._landing = landing

    def reports_to(self, keeper: str, term: int) -> None:
        """Set who decides about the group in this term, which trainers know from the start."""
        self._keeper, self._known = keeper, (term, -1)

    @property
    def joined(self) -> bool:
        """Whether this worker is in a group."""
        return self._group is not None

    def status(self) -> dict[str, Any]:
        """For `status`."""
        group = self._group
        return {
            "model": self._model,
            "epoch": -1 if group is None else group.epoch,
            "members": 0 if group is None else len(group.members),
            "version": self._done,
            "versions": self._moved,
        }

    def keep(self, version: Version, shards: Iterable[HeldShard]) -> None:
        """Copy this trainer's part of a version, if there is a group to send it to. On the main thread."""
        own = list(shards)
        with self._own.lock:
            copy = self._copies.next() if self.joined else None
        if copy is not None:
            copy.fill(own)
        with self._own.lock:
            self._held = tuple(
                HeldRange(one.name, str(one.data.dtype), tuple(one.shape), one.start, one.data.numel()) for one in own
            )
            if copy is not None:
                copy.version = version
            self.report()

    def announce(self, manifest: Manifest) -> None:
        """A version was published here: the worker that decides about the group sends it."""
        if self._conductor is not None:
            self._conducting(lambda conductor, now: conductor.announce(manifest, now))

    def on_message(self, sender: str, kind: str, body: Mapping[str, Any]) -> None:
        """Take a message of REPORT, GROUP or GO; raises ProtocolError."""
        if kind == REPORT:
            report = read(body, ShardReport, kind)
            self._conducting(lambda conductor, now: conductor.report(sender, report, now))
        elif kind == GROUP:
            self._join_soon(sender, read(body, ShardGroup, kind))
        else:
            go = read(body, ShardGo, kind)
            Manifest.from_wire(go.manifest.to_wire())
            if sender != self._keeper or go.manifest.model != self._model:
                raise ProtocolError(f"{sender} sends {go.manifest.title}; {self._keeper} decides about {self._model!r}")
            self._begin(go)

    def lost(self, lost: Lost) -> None:
        """A worker has left or died."""
        name = lost.name
        if self._group is not None and name in self._group.members:
            # Of the group nothing more can be had; what is under way ends by itself.
            self._leave()
        self._conducting(lambda conductor, now: conductor.lost(name, now))

    def tick(self, now: float) -> None:
        """Report, and look what is to be done."""
        if now >= self._report_at:
            self.report()
        self._conducting(lambda conductor, now: conductor.tick(sorted(self._own.readers()), now))

    def report(self) -> None:
        """Tell who decides what this worker is in and has done."""
        self._report_at = time.monotonic() + REPORT_EVERY_S
        if not self._keeper or self._closed:
            return
        report = ShardReport(
            self._model,
            self._known[0],
            -1 if self._group is None else self._group.epoch,
            self._landing is not None and self.joined and self._landing.free,
            self._done,
            tuple(version.number for version in self._copies.versions),
            () if self.joined else self._held,
        )
        if self._conductor is not None:
            self._conducting(lambda conductor, now: conductor.report(self._own.me, report, now))
        else:
            self._own.post(self._keeper, REPORT, msgspec.to_builtins(report, builtin_types=(bytes,)))

    def close(self) -> None:
        """Leave the group, and end the thread."""
        with self._own.lock:
            self._closed = True
            transfer, self._group = self._transfer, None
        if transfer is not None:
            transfer.end()
        self._jobs.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("the thread that moves weights in parts did not stop within %g s", CLOSE_S)

    # -- under the worker's lock

    def _conducting(self, act: Callable[[ShardConductor, float], list[ShardMessage]]) -> None:
        if self._conductor is None or self._closed:
            return
        try:
            out = act(self._conductor, time.monotonic())
        except UserError as error:
            self._own.fault(error)
            return
        for message in out:
            if message.to == self._own.me:
                self.on_message(message.to, message.kind, message.body)
            else:
                self._own.post(*message)

    def _join_soon(self, sender: str, group: ShardGroup) -> None:
        if group.members[0] != sender or self._own.me not in group.members or len(group.held) >= len(group.members):
            raise ProtocolError(f"{sender} tells {self._own.me} to join a group of {', '.join(group.members)}")
        if (group.term, group.epoch) <= self._known:
            return
        if group.term != self._known[0]:
            self._done = -1
        self._known, self._keeper = (group.term, group.epoch), sender
        # Before others ask the one that keeps it.
        self._store = self._own.store(group.members)
        self._leave()
        self._jobs.put(group)
        self.report()

    def _leave(self) -> None:
        self._group = None
        self._copies.forget()

    def _begin(self, go: ShardGo) -> None:
        group = self._group
        if group is None or go.epoch != group.epoch:
            return
        if self._landing is not None and self._own.me in go.targets:
            self._landing.begin(go.manifest)
        self._jobs.put(go)

    # -- on the thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if isinstance(job, ShardGroup):
                    self._join(job)
                else:
                    self._move(job)
            except Exception as error:
                # What failed is only this link: every version comes by the others too.
                log.warning("weights of %r do not come in parts for now: %s", self._model, error)
                with self._own.lock:
                    self._leave()
            with self._own.lock:
                self.report()

    def _join(self, group: ShardGroup) -> None:
        with self._own.lock:
            if self._closed or (group.term, group.epoch) != self._known:
                return
        self._transfer, self._plans = None, {}
        members = group.members
        assert self._store is not None, "told to make this group"
        store = PrefixStore(f"{group.term}/{group.epoch}", self._store)
        transfer = ShardTransfer(store, members.index(self._own.me), len(members), self._own.address, FORM_S)
        with self._own.lock:
            if (group.term, group.epoch) == self._known and not self._closed:
                self._transfer, self._group = transfer, group

    def _move(self, go: ShardGo) -> None:
        manifest, lands = go.manifest, self._landing is not None and self._own.me in go.targets
        with self._own.lock:
            group, transfer = self._group, self._transfer
            copy = None if lands else self._copies.send(manifest.version)
        tensors = None
        try:
            if group is None or transfer is None or group.epoch != go.epoch:
                return
            if not lands and copy is None:
                raise RuntimeError(f"{manifest.title}: this trainer has no copy of its part any more")
            tensors = self._exchange(go, group, transfer, None if copy is None else copy.parts)
        finally:
            with self._own.lock:
                if copy is not None:
                    copy.sending = False
                self._done = max(self._done, manifest.version.number)
                self._moved += tensors is not None
                if lands and self._landing is not None:
                    self._landing.end(manifest, tensors)

    def _exchange(
        self,
        go: ShardGo,
        group: ShardGroup,
        transfer: ShardTransfer,
        copies: Mapping[str, Sequence[HeldPart]] | None,
    ) -> NamedTensors | None:
        """What came, or what was sent; None if it was not all."""
        manifest, plan = go.manifest, self._plan(go, group)
        if copies is not None:
            done = transfer.send(plan, copies, STILL_S)
            self._own.count(done.nbytes)
            tensors: NamedTensors = []
        else:
            tensors = tensor_views(self._memory_of(manifest), manifest.entries, 0)
            done = transfer.receive(plan, {name: _whole(tensor) for name, tensor in tensors}, STILL_S)
        if done.lost:
            lost = "; ".join(f"{group.members[rank]}: {why}" for rank, why in done.lost.items())
            # Of a death the membership tells; the version comes by the other links.
            log.info("%s, in parts: %s", manifest.title, lost)
            with self._own.lock:
                self._leave()
            return None
        if copies is None:
            try:
                verify(memoryview(self._memory), manifest.checksums, manifest.title)
            except ChecksumError as error:
                log.warning("in parts: %s", error)
                return None
        return tensors

    def _memory_of(self, manifest: Manifest) -> mmap.mmap:
        """Where to put a version: over the one before, which the engine has by now, if it is laid out in the same way.

        Zeros where tensors are aligned, as in the publisher's segment, whose sums are compared.
        """
        if self._entries != manifest.entries or len(self._memory) != manifest.size:
            self._memory, self._entries = mmap.mmap(-1, manifest.size), manifest.entries
        return self._memory

    def _plan(self, go: ShardGo, group: ShardGroup) -> list[ShardPiece]:
        if go.targets not in self._plans:
            ranks = [group.members.index(name) for name in go.targets]
            self._plans[go.targets] = plan_pieces(tensor_layouts(go.manifest.entries, group.held, ranks))
        return self._plans[go.targets]


def _whole(tensor: Tensor) -> list[HeldPart]:
    return [HeldPart(Box.whole(tensor.shape), tensor)]
