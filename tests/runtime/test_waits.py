import subprocess
import sys
import threading

import pytest

from distflow.errors import NoProgressError, RunStopped
from distflow.runtime.waits import WaitBoard


def test_a_wait_ends_when_what_it_waits_for_is_there() -> None:
    board, box = WaitBoard(), []

    def arrive() -> None:
        with board.condition:
            box.append(7)
            board.condition.notify_all()

    threading.Timer(0.05, arrive).start()
    found = board.until(lambda: box[0] if box else None, name="a", peers=(), limit_s=20, progress=lambda: 0)
    assert found == 7
    assert board.current is None


def test_no_progress_ends_a_wait_with_its_name_and_peers() -> None:
    board = WaitBoard()
    with pytest.raises(
        NoProgressError, match=r"samples of training step 3 from rollout/0 .* no sign of progress for 0.1"
    ):
        board.until(
            lambda: None, name="samples of training step 3", peers=("rollout/0",), limit_s=0.1, progress=lambda: 1
        )


def test_progress_keeps_a_wait_alive_beyond_its_limit() -> None:
    board = WaitBoard()
    looks = iter(range(1000))
    count = [0]

    def ready() -> bool | None:
        count[0] += 1
        return True if count[0] > 8 else None

    assert board.until(ready, name="slow work", peers=(), limit_s=0.05, progress=lambda: next(looks))


def test_a_wait_can_be_seen_from_outside() -> None:
    board = WaitBoard()
    seen = []

    def ready() -> bool:
        assert board.current is not None
        seen.append(board.current.describe(board.current.since + 2))
        return True

    board.until(ready, name="leases", peers=("trainer/0",), limit_s=1, progress=lambda: 0)
    assert seen == ["leases from trainer/0 for 2.0 s"]


def test_a_stop_and_a_fault_end_every_wait() -> None:
    board = WaitBoard()
    threading.Timer(0.05, lambda: board.stop("asked to")).start()
    with pytest.raises(RunStopped, match="asked to"):
        board.until(lambda: None, name="x", peers=(), limit_s=20, progress=lambda: 0)
    board.until(lambda: True, name="x", peers=(), limit_s=20, progress=lambda: 0, even_when_stopping=True)
    board.fault(OSError("disk"))
    with pytest.raises(OSError, match="disk"):
        board.raise_if_over()


def test_without_progress_the_stacks_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NoProgressError):
        WaitBoard().until(lambda: None, name="x", peers=(), limit_s=0.05, progress=lambda: 0)
    assert (
        "no progress; stacks of this worker's threads:\nMainThread, your code and the script (most recent call last)"
        in caplog.text
    )
    assert "in test_without_progress_the_stacks_go_to_the_log" in caplog.text


CROWD = """
import gc, os, sys, threading, time
from distflow.runtime.process_record import current_frames

class Garbage:
    def __init__(self): self.itself = self
    def __del__(self): time.sleep(0.0005)

def start_others():
    while True:
        other = threading.Thread(target=lambda: None)
        other.start()
        other.join()

gc.set_threshold(7)
for _ in range(3):
    threading.Thread(target=start_others, daemon=True).start()
kept, end = [], time.monotonic() + 2
while time.monotonic() < end:
    Garbage()
    kept = [*kept[-500:], current_frames()]
os._exit(0)
"""


def test_stacks_may_be_looked_at_while_threads_come_and_go() -> None:
    """Python 3.11 by itself stands still then, now and then: for as long as one lets it."""
    subprocess.run([sys.executable, "-c", CROWD], timeout=60, check=True)


def test_peers_may_change_while_one_waits() -> None:
    board, peers = WaitBoard(), ["rollout/0"]
    seen: list[list[str]] = []

    def ready() -> bool | None:
        seen.append(board.waits()[0]["peers"])
        peers.append("rollout/1")
        return True if len(seen) == 2 else None

    board.until(ready, name="x", peers=lambda: tuple(peers), limit_s=20, progress=lambda: 0)
    assert seen == [["rollout/0"], ["rollout/0", "rollout/1"]]
    assert board.waits() == []
