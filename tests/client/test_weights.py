"""Versions of a model as a client takes them, here or over the network: whole, newer each time, or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from distflow.client import WeightSubscription
from distflow.client import weights as weights_module
from distflow.errors import ChecksumError, UserError
from distflow.types import Version
from distflow.weights.client_requests import ASK_PUBLISHERS, ASK_WEIGHTS
from distflow.weights.manifest import Manifest
from distflow.weights.segments.segment_file import SEGMENTS
from distflow.weights.swarm import patience
from tests.polling import WAIT_S
from tests.weights.swarm_kit import Host

SIZE = 1_500_000
"""Values, of 6 chunks."""


def tensors(value: float, more: int = 0) -> list[tuple[str, torch.Tensor]]:
    """`more`: values that are the same in all versions."""
    same = [("c", torch.arange(float(more)))] if more else []
    return [("a", torch.full((7,), value)), ("b", torch.full((3, 2), -value)), *same]


class Publisher:
    """Replies to a subscription with what is next in line; an error is raised."""

    def __init__(self, *, far: bool = False) -> None:
        self.host = Host(size=SIZE, deltas=True)
        self.replies: list[Manifest | Exception | None] = []
        self.asked: list[Version | None] = []
        self.around = 0
        """How often it was asked who publishes."""
        self.says = {"models": ["policy"], "near": not far, "far": far}
        self.subscription = WeightSubscription("policy", "me", ["trainer/0"], self._answer, WAIT_S)
        self._far = far

    def publish(self, number: int) -> Manifest:
        if self._far:
            return self.host.publish(number, tensors(float(number), SIZE))
        return self.host.publisher.publish(Version(0, number), tensors(float(number)))

    def close(self) -> None:
        self.subscription.close()
        self.host.close()

    def _answer(self, names: object, kind: str, body: Callable[[int], Any], timeout: Any, ready: Any) -> Any:
        asked = body(1)
        if kind == ASK_PUBLISHERS:
            self.around += 1
            return ready({"trainer/0": self.says})
        assert asked.far == self._far
        self.asked.append(asked.after)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            time.sleep(timeout)
            raise reply
        return None if reply is None else ready({"trainer/0": {"manifest": reply.to_wire()}})


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    found = Publisher()
    yield found
    found.close()


@pytest.fixture
def distant() -> Iterator[Publisher]:
    found = Publisher(far=True)
    yield found
    found.close()


def test_each_version_is_a_copy_of_what_was_published(publisher: Publisher) -> None:
    publisher.replies = [publisher.publish(1), publisher.publish(2), None]
    versions = list(publisher.subscription)
    publisher.publish(3)
    publisher.publish(4)
    publisher.host.close()
    assert [one.version for one in versions] == [1, 2]
    assert publisher.asked == [None, Version(0, 1), Version(0, 2)]
    for one in versions:
        assert one.tensors["a"].tolist() == [float(one.version)] * 7
        assert one.tensors["b"].tolist() == [[-float(one.version)] * 2] * 3


def test_what_was_read_is_let_go_of_while_the_program_computes(publisher: Publisher) -> None:
    """Or a run that begins again meanwhile finds too little room for its weights."""
    publisher.replies = [publisher.publish(1)]
    assert publisher.subscription.take() is not None
    publisher.host.close()
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert [line for line in maps if publisher.host.tag in line] == []


def test_a_version_that_was_overwritten_is_passed_over(publisher: Publisher) -> None:
    late = publisher.publish(1)
    newer = [publisher.publish(number) for number in range(2, 6)]
    publisher.replies = [late, newer[-1]]
    found = publisher.subscription.take()
    assert found is not None
    assert found.version == 5
    assert publisher.asked == [None, None]
    publisher.replies = [late] * 10
    with pytest.raises(ChecksumError, match="10 versions in a row were overwritten"):
        publisher.subscription.take()


def test_other_bytes_than_were_published_are_refused(publisher: Publisher) -> None:
    manifest = publisher.publish(1)
    with Path(manifest.place).open("r+b") as segment:
        segment.seek(70)
        segment.write(b"\x5a")
    publisher.replies = [manifest]
    with pytest.raises(ChecksumError, match="chunk 0 of 1 has checksum"):
        publisher.subscription.take()


def test_a_publisher_that_has_ended_is_asked_again(publisher: Publisher) -> None:
    gone = publisher.publish(1)
    publisher.host.close()
    publisher.replies = [gone, None]
    assert publisher.subscription.take() is None


def test_from_another_host_versions_come_over_the_network_and_leave_nothing_there(distant: Publisher) -> None:
    before = set(os.listdir(SEGMENTS))
    first = distant.publish(1)
    distant.replies = [first]
    found = distant.subscription.take()
    sent = distant.host.server.traffic.sent_bytes
    assert found is not None
    assert sent >= first.size
    newest = [distant.publish(number) for number in (2, 3, 4, 5)][-1]
    distant.replies = [newest, None]
    later = distant.subscription.take()
    assert later is not None
    assert distant.host.server.traffic.sent_bytes - sent < 0.1 * first.size, "only what has changed"
    assert len(newest.deltas) == 4
    for number, one in ((1, found), (5, later)):
        assert one.version == number
        assert all(torch.equal(one.tensors[name], tensor) for name, tensor in tensors(float(number), SIZE))
    assert distant.subscription.take() is None
    assert {name for name in os.listdir(SEGMENTS) if "swarm" in name} <= before
    assert distant.around == 1, "it stays with the one that it has found"


@pytest.mark.parametrize("newer", [True, False], ids=["a newer one", "the end of the run"])
def test_where_nothing_comes_what_is_newer_is_taken(
    distant: Publisher, newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be reached where it says that it is."""
    monkeypatch.setattr(patience, "RETRY_S", 0.2)
    lost = structs.replace(distant.publish(1), place="swarm:tcp://127.0.0.1:9#00")
    distant.replies = [lost, TimeoutError("no"), distant.publish(2) if newer else None]
    distant.replies.append(distant.publish(3) if newer else None)
    found = distant.subscription.take()
    assert found is None if not newer else found is not None and found.version == 3
    assert distant.asked == [None, Version(0, 1), Version(0, 1), None]


def test_the_end_of_the_time_ends_a_fetch_to_which_nothing_comes(
    distant: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "RETRY_S", 0.2)
    distant.replies = [structs.replace(distant.publish(1), place="swarm:tcp://127.0.0.1:9#00")]
    distant.replies += [TimeoutError("no")] * 100
    with pytest.raises(TimeoutError, match="policy: waited"):
        distant.subscription.take(timeout=0.5)


def chosen(*replies: dict[str, Any] | None) -> Any:
    """Whom a client would ask, by what each training worker has said; None: nothing."""
    names = [f"trainer/{number}" for number in range(len(replies))]

    def answer(workers: object, kind: str, body: Callable[[int], Any], timeout: object, ready: Any) -> Any:
        if kind == ASK_WEIGHTS:
            found.append((workers, body(1).far))
            return None
        said = {name: reply for name, reply in zip(names, replies, strict=True) if reply is not None}
        choice = ready(said)
        assert choice is None or choice.far is False or len(said) == len(names), "others may be near"
        monotonic = time.monotonic() + weights_module.HEAR_S + 0.1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weights_module.time, "monotonic", lambda: monotonic)
            return choice or ready(said)

    found: list[Any] = []
    subscription = WeightSubscription("policy", "me", names, answer, WAIT_S)
    assert subscription.take() is None
    subscription.close()
    return found[0] if found else None


NEAR = {"models": ["policy"], "near": True, "far": True}
FAR = {"models": ["policy"], "near": False, "far": True}
OTHER = {"models": [], "near": True, "far": True}


def test_one_whose_memory_is_seen_comes_before_one_that_serves_others() -> None:
    assert chosen(FAR, OTHER, NEAR) == (["trainer/2"], False)
    assert chosen(OTHER, FAR) == (["trainer/1"], True)
    assert chosen(FAR, None) == (["trainer/0"], True), "the other one has died"
    assert chosen(OTHER, None) is None, "the other one may publish it"


@pytest.mark.parametrize(("models", "cure"), [(["critic"], "it publishes critic"), ([], "hand it over in place")])
def test_a_model_that_nobody_publishes_is_refused(models: list[str], cure: str) -> None:
    with pytest.raises(UserError, match=f"no training worker of this run publishes 'policy'; .*{cure}"):
        chosen({**FAR, "models": models}, {**FAR, "models": models})


def test_a_run_that_serves_no_other_hosts_says_so() -> None:
    with pytest.raises(UserError, match="does not see the shared memory .* launch the run with --hosts"):
        chosen({**FAR, "far": False})
