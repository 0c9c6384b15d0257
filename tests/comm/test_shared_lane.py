"""Payloads in shared memory, between endpoints of one process and of several, with either end killed."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import resource
import threading
import weakref
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distflow.comm import shared_lane, shared_sending
from distflow.comm.arena import ALIGN
from distflow.comm.endpoint import Endpoint
from distflow.comm.message import Message
from distflow.comm.outbox import Delivery, SentOnce
from distflow.comm.shared_lane import FREED, LEAST_BYTES, OFFER, SharedLane
from distflow.comm.shared_segment import OwnSegment, PeerSegment
from distflow.comm.shared_sending import Room
from distflow.comm.traffic import LaneTraffic
from distflow.errors import ProtocolError
from tests.comm.lane_processes import (
    READER,
    ROW_BYTES,
    ROWS,
    WRITER,
    await_there,
    process,
    roster,
    row,
    use_shared,
)
from tests.polling import eventually


@pytest.fixture(autouse=True, scope="module")
def _kept() -> None:
    """Looking for garbage among what thousands of other tests have left takes seconds each time: only once."""
    gc.collect()
    gc.freeze()


class Ends:
    """A writer and a reader in one process; `kept` holds the rows that have arrived."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: list[Message] = []
        self.writer = Endpoint(WRITER, 0, roster(folder), tick_s=0.02, shared_memory=True)
        self.reader = Endpoint(READER, 0, roster(folder), tick_s=0.02, shared_memory=True)

    def start(self) -> None:
        self.writer.start(lambda message: None)
        self.reader.start(self.keep)
        use_shared(self.writer, READER)

    def keep(self, message: Message) -> None:
        if message.kind == "rows":
            self.kept.append(message)

    def close(self) -> None:
        self.kept.clear()
        self.writer.close(0.1)
        self.reader.close(0.1)

    @property
    def held(self) -> int:
        return self.writer.segments[READER].held


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    both = Ends(tmp_path)
    try:
        both.start()
        yield both
    finally:
        both.close()
        assert not own_segments()


def own_segments() -> set[str]:
    """Segments that this process has open: once both ends are closed, nothing is left of them."""
    gc.collect()
    return {name for name in map(opened, Path("/proc/self/fd").iterdir()) if name.startswith("/memfd:distflow-")}


def opened(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:
        return ""


def test_rows_are_read_where_the_writer_put_them(ends: Ends) -> None:
    rows = [row(n) for n in range(ROWS)] + [b"", b"x"]
    delivery = ends.writer.send(READER, "rows", {"n": 1}, rows)
    eventually(lambda: ends.kept)
    message = ends.kept[0]
    assert (message.kind, message.sender, message.body, message.references) == ("rows", WRITER, {"n": 1}, b"")
    assert [bytes(part) for part in message.payload] == rows
    assert all(part.readonly for part in message.payload)
    assert ends.held >= ROWS * ROW_BYTES
    assert not delivery.left, "as long as it takes memory"
    del message
    ends.kept.clear()
    eventually(lambda: not ends.held, "the blocks are released")
    assert delivery.left
    traffic = ends.writer.traffic
    assert traffic.lanes["shm"] == LaneTraffic(1, ROWS * ROW_BYTES + 1)
    assert traffic.lanes["zmq"].bytes == traffic.bytes_sent - traffic.lanes["shm"].bytes
    assert ends.reader.traffic.bytes_received > ROWS * ROW_BYTES


def test_small_payloads_take_the_sockets(ends: Ends) -> None:
    ends.writer.send(READER, "rows", {}, [bytes(LEAST_BYTES - 1)])
    eventually(lambda: ends.kept)
    assert ends.writer.segments[READER].messages == 0


def test_a_block_is_held_by_any_slice_of_it(ends: Ends) -> None:
    ends.writer.send(READER, "rows", {}, [row(n) for n in range(4)])
    eventually(lambda: ends.kept)
    piece = ends.kept[0].payload[2][10:20]
    ends.kept.clear()
    gc.collect()
    ends.writer.send(READER, "rows", {}, [row(9)] * 4)
    eventually(lambda: ends.kept)
    assert bytes(piece) == row(2)[:10], "not written again"
    dropped = threading.Thread(target=piece.release)
    dropped.start()
    dropped.join()
    ends.kept.clear()
    eventually(lambda: not ends.held, "released on another thread")


def test_many_rounds_use_the_same_memory_again(ends: Ends) -> None:
    outgoing = ends.writer._shared._outgoing[READER]
    for n in range(60):
        ends.writer.send(READER, "rows", {}, [row(n)] * ROWS)
        eventually(lambda: ends.kept)
        assert ends.kept[0].payload[5] == row(n)
        ends.kept.clear()
    eventually(lambda: not ends.held)
    assert outgoing.use.messages == 60
    assert outgoing.segment.size <= shared_sending.MOST_STEP_BYTES


def test_what_finds_no_room_takes_the_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_sending, "LIMIT_BYTES", 4 << 20)
    ends = Ends(tmp_path)
    try:
        ends.start()
        sent = [ends.writer.send(READER, "rows", {"n": n}, [row(n)] * ROWS) for n in range(12)]
        eventually(lambda: len(ends.kept) == 12)
        assert [message.body["n"] for message in ends.kept] == list(range(12))
        assert all(message.payload[3] == row(n) for n, message in enumerate(ends.kept))
        assert not any(delivery.dropped for delivery in sent)
        assert ends.writer.segments[READER].full == 12 - ends.writer.segments[READER].messages > 0
        ends.kept.clear()
        eventually(lambda: not ends.held)
        ends.writer.send(READER, "rows", {}, [row(1)])
        eventually(lambda: ends.kept)
        assert ends.held, "there is room again"
    finally:
        ends.close()


def test_a_message_that_is_dropped_takes_no_room(ends: Ends) -> None:
    ends.writer._outbox.refuse()
    assert ends.writer.send(READER, "rows", {}, [row(1)] * ROWS).dropped
    assert not ends.held


def test_a_peer_that_is_gone_holds_nothing(ends: Ends) -> None:
    ends.writer.send(READER, "rows", {}, [row(n) for n in range(ROWS)])
    eventually(lambda: ends.kept)
    first = ends.kept[0]
    ends.writer.disconnect(READER)
    eventually(lambda: READER not in ends.writer.segments)
    use_shared(ends.writer, READER)
    ends.writer.send(READER, "rows", {}, [row(100 + n) for n in range(ROWS)])
    eventually(lambda: ends.kept[1:])
    assert first.payload[9] == row(9), "although it was only taken for gone, what it reads does not change"
    assert ends.kept[-1].payload[9] == row(109)


def test_a_reader_that_has_unmapped_a_segment_gets_another(ends: Ends) -> None:
    ends.reader._shared.forget(WRITER)
    ends.writer.send(READER, "rows", {}, [row(1)])
    eventually(lambda: ends.reader.traffic.dropped)
    eventually(lambda: READER not in ends.writer.segments)
    use_shared(ends.writer, READER)
    ends.writer.send(READER, "rows", {}, [row(2)])
    eventually(lambda: ends.kept)
    assert ends.kept[0].payload[0] == row(2)


def test_a_reader_killed_with_rows_leaves_their_memory(tmp_path: Path) -> None:
    writer = Endpoint(WRITER, 0, roster(tmp_path), tick_s=0.02, shared_memory=True)
    writer.start(lambda message: None)
    try:
        with process("holds", tmp_path) as reader:
            use_shared(writer, READER)
            delivery = writer.send(READER, "rows", {}, [row(n) for n in range(ROWS)])
            await_there(reader)
            assert not delivery.left
        writer.disconnect(READER)
        eventually(lambda: delivery.left)
        assert READER not in writer.segments
    finally:
        writer.close(0.1)


def mapped() -> set[str]:
    """The shared segments that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.partition("/memfd:")[2].split()[0] for line in lines if "/memfd:distflow-" in line}


def test_a_writer_killed_in_the_middle_harms_no_reader_and_leaves_no_memory(tmp_path: Path) -> None:
    kept: list[Message] = []
    gc.collect()
    before = mapped()
    reader = Endpoint(READER, 0, roster(tmp_path), tick_s=0.02, shared_memory=True)
    reader.start(kept.append)
    try:
        with process("writes", tmp_path) as writer:
            await_there(writer)
            eventually(lambda: [message for message in kept if message.kind == "rows"])
        reader.disconnect(WRITER)
        eventually(lambda: not reader._shared._incoming._segments)
        (rows,) = [message for message in kept if message.kind == "rows"]
        assert [bytes(part) for part in rows.payload] == [row(n) for n in range(ROWS)]
        assert reader.traffic.dropped == 0
        assert mapped() - before, "as long as its rows are read"
        kept.clear()
        del rows
        gc.collect()
        assert mapped() <= before
    finally:
        reader.close(0.1)


def test_a_forked_process_releases_nothing(ends: Ends) -> None:
    ends.writer.send(READER, "rows", {}, [row(n) for n in range(ROWS)])
    eventually(lambda: ends.kept)
    child = os.fork()
    if not child:
        ends.kept.clear()
        left = len(ends.reader._shared._incoming._released)
        os._exit(left or int(ends.writer._shared.put(READER, [row(1)]) is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ends.kept[0].payload[3] == row(3)
    assert ends.held


class Lanes:
    """Two lanes without sockets: what they tell each other is handed over at once."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, Any]] = []
        self.drops: set[str] = set()
        """Kinds of messages that get lost."""
        self.lanes: dict[str, SharedLane] = {}
        for me in (WRITER, READER):
            self.lanes[me] = SharedLane(True, self._teller(me), lambda: None, 1 << 20)
        assert self.lanes[WRITER].put(READER, [row(1)]) is None, "it is offered first"

    def _teller(self, me: str) -> Any:
        def tell(to: str, kind: str, body: Any) -> Delivery:
            self.told.append((me, kind, body))
            delivery = Delivery()
            if kind in self.drops:
                delivery.drop()
            else:
                self.lanes[to].receive(Message(kind, me, 0, body))
                delivery.hand_over()
            return delivery

        return tell

    def numbers(self, *frames: bytes) -> array[int]:
        payload = self.lanes[WRITER].put(READER, frames)
        assert payload is not None
        return array("q", payload.references)

    def read(self, references: bytes) -> list[memoryview]:
        message = self.lanes[READER].receive(Message("rows", WRITER, 0, {}, (), None, references))
        assert message is not None
        return list(message.payload)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    both = Lanes()
    yield both
    for lane in both.lanes.values():
        lane.close()
    assert not own_segments()


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, 77, "a payload in segment 77 of rollout/0, which is not mapped here"),
        (1, ALIGN, "a stale reference to generation 1 at offset 64, where generation 72340172838076673 lies"),
        (1, 1, "a block at offset 1 of a segment"),
        (1, -ALIGN, "a block at offset -64 of a segment"),
        (1, 1 << 40, "a block at offset 1099511627776 of a segment"),
        (2, 2, "a stale reference to generation 2 at offset 0, where generation 1 lies"),
        (3, 3, "references to a payload that end too early"),
        (3, 0, "references to a payload that end too early"),
        (3, -1, "references to a payload that end too early"),
        (4, -1, "a frame of -1 bytes"),
        (4, 2 << 20, "a frame of 2097152 bytes in 32768 bytes of a block"),
        (5, ROW_BYTES + 1, "a frame of 16385 bytes in 16384 bytes of a block"),
    ],
)
def test_wrong_references_are_refused(lanes: Lanes, at: int, value: int, why: str) -> None:
    numbers = lanes.numbers(row(1), row(2))
    assert len(numbers) == 6, "segment, offset, generation, frames, and two lengths"
    numbers[at] = value
    with pytest.raises(ProtocolError, match=why):
        lanes.read(numbers.tobytes())
    assert lanes.told[-1][1] == "lane.unknown"


@pytest.mark.parametrize("cut", [1, 8, 24])
def test_truncated_references_are_refused(lanes: Lanes, cut: int) -> None:
    whole = lanes.numbers(row(1), row(2)).tobytes()
    with pytest.raises(ProtocolError, match="end too early|expected a multiple of 8"):
        lanes.read(whole[:-cut])


def test_a_reference_is_good_once(lanes: Lanes) -> None:
    references = lanes.numbers(row(1)).tobytes()
    frames = lanes.read(references)
    with pytest.raises(ProtocolError, match="generation 1 at offset 0, which is read already"):
        lanes.read(references)
    assert frames[0] == row(1)


def test_a_released_block_is_not_read_again(lanes: Lanes) -> None:
    references = lanes.numbers(row(1)).tobytes()
    del lanes.read(references)[:]
    lanes.lanes[READER].flush()
    assert lanes.told[-1][1] == FREED
    with pytest.raises(ProtocolError, match="generation 1 at offset 0, where generation -1 lies"):
        lanes.read(references)


def test_what_was_not_told_of_free_blocks_is_told_again(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_lane, "FREE_AGAIN_S", 0.0)
    writer, reader = lanes.lanes[WRITER], lanes.lanes[READER]
    del lanes.read(lanes.numbers(row(1), row(2)).tobytes())[:]
    lanes.drops.add(FREED)
    for _ in range(3):
        reader.flush()
    assert writer.uses()[READER].held > 0
    lanes.drops.clear()
    reader.flush()
    assert writer.uses()[READER].held == 0
    told = len(lanes.told)
    for _ in range(3):
        reader.flush()
    assert len(lanes.told) == told, "once is enough"


def test_releases_that_are_wrong_are_refused_and_the_others_count(lanes: Lanes) -> None:
    numbers = lanes.numbers(row(1))
    body = {"number": numbers[0], "blocks": array("q", [64, 9, 0, 1]).tobytes()}
    with pytest.raises(ProtocolError, match="stale reference to generation 9 at offset 64: nothing is held there"):
        lanes.lanes[WRITER].receive(Message(FREED, READER, 0, body))
    assert lanes.lanes[WRITER].uses()[READER].held == 0


@pytest.mark.parametrize(
    ("name", "size", "why"),
    [
        ("distflow-1111111111111111", 1 << 20, "is /memfd:.* expected the segment distflow-1111111111111111"),
        ("", 1 << 21, "has 1048576 bytes; 2097152 were announced"),
    ],
)
def test_what_is_no_segment_is_not_mapped(name: str, size: int, why: str) -> None:
    segment = OwnSegment(1 << 20)
    with pytest.raises(ProtocolError, match=why):
        PeerSegment(segment.pid, segment.handle, name or segment.name, size)
    assert len(PeerSegment(segment.pid, segment.handle, segment.name, 1 << 20).memory) == 1 << 20
    segment.close()
    with pytest.raises(ProtocolError, match=f"the segment {segment.name} cannot be mapped: .*: No such file"):
        PeerSegment(segment.pid, 10**6, segment.name, 1 << 20)


def test_what_there_is_no_address_space_for_is_not_mapped() -> None:
    """ProtocolError, as for any segment that cannot be used: its sender is told, and takes the sockets."""
    segment = OwnSegment(1 << 28)
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 26), before[1]))
        with pytest.raises(ProtocolError, match="cannot be mapped: .*: Cannot allocate memory"):
            PeerSegment(segment.pid, segment.handle, segment.name, 1 << 28)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        segment.close()


def test_what_could_be_cut_short_is_not_mapped() -> None:
    handle = os.memfd_create("distflow-1111111111111111", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(handle, 1 << 20)
        with pytest.raises(ProtocolError, match="could be cut short while it is read"):
            PeerSegment(os.getpid(), handle, "distflow-1111111111111111", 1 << 20)
    finally:
        os.close(handle)


def test_what_was_offered_to_nobody_is_gone_with_its_endpoint(tmp_path: Path) -> None:
    for started in (False, True):
        endpoint = Endpoint(WRITER, 0, roster(tmp_path), shared_memory=True)
        if started:
            endpoint.start(lambda message: None)
        endpoint.send(READER, "rows", {}, [row(1)] * ROWS)
        assert len(own_segments()) == 1
        endpoint.close(0.1)
        assert not own_segments()


def test_without_memory_for_a_segment_payloads_take_the_sockets(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", refuse)
        ends.writer.send(READER, "rows", {}, [row(1)])
        eventually(lambda: ends.kept)
        assert (ends.kept[0].payload[0], ends.writer.segments[READER].full) == (row(1), 1)
    ends.writer.send(READER, "rows", {}, [row(2)])
    eventually(lambda: len(ends.kept) == 2)
    assert ends.kept[1].payload[0] == row(2)
    assert ends.held, "as soon as there is memory"


def test_all_segments_of_a_worker_take_only_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_lane, "WORKER_BYTES", 5 * shared_sending.STEP_BYTES // 2)
    names = ["rollout/1", "rollout/2", "rollout/3"]
    addresses = {name: f"ipc://{tmp_path}/{name.replace('/', '-')}" for name in (WRITER, *names)}
    ends = {name: Endpoint(name, 0, addresses, tick_s=0.02, shared_memory=True) for name in addresses}
    writer, kept = ends[WRITER], list[Message]()
    try:
        for end in ends.values():
            end.start(lambda message: kept.append(message) if message.kind == "rows" else None)
        for count, name in enumerate(names, 1):
            use_shared(writer, name)
            writer.send(name, "rows", {}, [row(1)])
            eventually(lambda count=count: len(kept) == count)
        assert [writer.segments[name].full for name in names] == [0, 0, 1], "the third took the sockets"
        writer.disconnect("rollout/1")
        eventually(lambda: "rollout/1" not in writer.segments)
        writer.send("rollout/3", "rows", {}, [row(1)])
        eventually(lambda: len(kept) == 4)
        assert writer.segments["rollout/3"].messages == 1, "there is room again"
    finally:
        kept.clear()
        for end in ends.values():
            end.close(0.1)


def test_offers_are_checked_and_a_peer_that_declines_is_left_alone(lanes: Lanes) -> None:
    where = {"number": 1, "size": 64, "pid": 1, "handle": 1}
    for name in ("../etc/passwd", "distflow-a/b", "other"):
        with pytest.raises(ProtocolError, match=r"malformed lane.offer.*\$\.name"):
            lanes.lanes[READER].receive(Message(OFFER, WRITER, 0, {**where, "name": name}))
    number = lanes.numbers(row(1))[0]
    lanes.lanes[WRITER].receive(Message("lane.declined", READER, 0, {"number": number}))
    before = len(lanes.told)
    assert lanes.lanes[WRITER].put(READER, [row(1)]) is None
    assert len(lanes.told) == before, "nothing is offered again"


def test_no_peer_takes_what_others_need() -> None:
    """32 peers: the first ones take much, and each of the others still gets its share."""
    room = Room(512, lambda: 32)
    greedy = [sum(room.take(segment, 8) * 8 for _ in range(16)) for segment in (1, 2, 3)]
    assert greedy[0] == 128
    assert 128 <= greedy[1] + greedy[2] <= 256 + 2 * 8 - 128 + 8
    late = [sum(room.take(segment, 4) * 4 for _ in range(2)) for segment in range(4, 33)]
    assert late == [8] * 29, "512 / 2 / 32 each"
    assert sum(greedy) + sum(late) <= 512
    assert not room.take(1, 8)
    room.give_back(2, greedy[1])
    assert room.take(1, 8), "and what is given back may be taken by whoever needs it"


def test_a_room_for_one_peer_is_all_its_own() -> None:
    room = Room(512)
    assert room.take(1, 500)
    assert not room.take(1, 20)
    assert room.take(1, 12)


def test_a_segment_that_finds_no_room_to_double_takes_what_it_needs() -> None:
    segment = shared_sending.OutgoingSegment(Room(2 << 20))
    try:
        assert segment.put([memoryview(bytes(1 << 20))]) is not None
        assert segment.segment.size == 5 * shared_sending.STEP_BYTES
        assert segment.put([memoryview(bytes(1 << 19))]) is not None
        assert segment.segment.size == 8 * shared_sending.STEP_BYTES
        assert segment.put([memoryview(bytes(2 << 20))]) is None, "the sockets"
    finally:
        segment.close()


def test_a_segment_is_let_go_of_although_its_messages_are_remembered() -> None:
    room, once = shared_sending.Room(1 << 30), SentOnce()
    segments = [shared_sending.OutgoingSegment(room) for _ in range(2)]
    memory = [weakref.ref(segment.segment) for segment in segments]
    for number, segment in enumerate(segments):
        payload = segment.put([memoryview(bytes(LEAST_BYTES))])
        assert payload is not None
        delivery = Delivery(payload)
        delivery.hand_over()
        once.note(READER, number, delivery)
    released, lost = segments
    released.free(array("q", payload_blocks(released)).tolist())
    lost.close()
    del segments, released, lost, segment, payload, delivery
    gc.collect()
    assert [found() for found in memory] == [None, None]
    assert not once.under_way(READER, 0)
    assert not once.under_way(READER, 1)


def payload_blocks(segment: shared_sending.OutgoingSegment) -> list[int]:
    """Offset and generation of what is held."""
    blocks = [block for payload in segment._payloads.values() for block in payload._blocks.values()]
    return [number for block in blocks for number in (block.offset, block.generation)]
