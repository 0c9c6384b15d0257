"""Versions of a model in shared memory, as a client takes them: whole, newer each time, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.client import WeightSubscription
from distflow.errors import ChecksumError, UserError
from distflow.types import Version
from distflow.weights.manifest import Manifest
from tests.weights.swarm_kit import SummingPublisher

NAME = f"client-{os.getpid()}"


def tensors(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((7,), value)), ("b", torch.full((3, 2), -value))]


class Publisher:
    """Replies to a subscription with what is next in line; a callable is called first."""

    def __init__(self) -> None:
        self.shm = SummingPublisher(NAME, "policy", 0)
        self.replies: list[Manifest | None] = []
        self.asked: list[Version | None] = []
        self.before: Callable[[], object] = lambda: None
        self.subscription = WeightSubscription("policy", "me", ["trainer/0"], self._answer)

    def publish(self, number: int) -> Manifest:
        return self.shm.publish(Version(0, number), tensors(float(number)))

    def _answer(
        self, workers: object, kind: str, body: Callable[[int], Any], timeout: float | None, ready: Callable[..., Any]
    ) -> Manifest | None:
        self.asked.append(body(1).after)
        manifest = self.replies.pop(0)
        return None if manifest is None else ready([{"models": ["policy"], "manifest": manifest.to_wire()}])


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    found = Publisher()
    yield found
    found.shm.close()


def test_each_version_is_a_copy_of_what_was_published(publisher: Publisher) -> None:
    publisher.replies = [publisher.publish(1), publisher.publish(2), None]
    versions = list(publisher.subscription)
    publisher.publish(3)
    publisher.publish(4)
    publisher.shm.close()
    assert [one.version for one in versions] == [1, 2]
    assert publisher.asked == [None, Version(0, 1), Version(0, 2)]
    for one in versions:
        assert one.tensors["a"].tolist() == [float(one.version)] * 7
        assert one.tensors["b"].tolist() == [[-float(one.version)] * 2] * 3


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
    publisher.shm.close()
    publisher.replies = [gone, None]
    assert publisher.subscription.take() is None


@pytest.mark.parametrize(("models", "cure"), [(["critic"], "it publishes critic"), ([], "hand weights over in place")])
def test_a_model_that_nobody_publishes_is_refused(models: list[str], cure: str) -> None:
    def answer(
        workers: object, kind: str, body: object, timeout: object, ready: Callable[[Collection[Mapping[str, Any]]], Any]
    ) -> Any:
        assert ready([{"models": models}]) is None, "the other may publish it"
        return ready([{"models": models}] * 2)

    with pytest.raises(UserError, match=f"no training worker on this host publishes 'policy'; .*{cure}"):
        next(WeightSubscription("policy", "me", ["trainer/0", "trainer/1"], answer))
