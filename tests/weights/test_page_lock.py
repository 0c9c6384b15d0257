from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from distflow.types import Version
from distflow.weights.segments.page_lock import PageLock
from distflow.weights.segments.shm import ShmPublisher, ShmReader

GPU = torch.device("cuda:0")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def publisher() -> Iterator[ShmPublisher]:
    one = ShmPublisher(f"test-{os.getpid()}", "policy", 0)
    yield one
    one.close()


def test_versions_from_one_gpu_to_another_place_of_it(publisher: ShmPublisher) -> None:
    """Of the first version, which is written, and of later ones, which are copied into locked memory."""
    torch.zeros(1, device=GPU)
    reader = ShmReader(device="cuda:0")
    for number in range(6):
        given = [
            (name, torch.randn(shape, device=GPU)) for name, shape in (("a", (64, 48)), ("b", (7,)), ("c", (1 << 20,)))
        ]
        manifest = publisher.summed(publisher.publish(Version(0, number), given))
        found = [(name, torch.empty(view.shape, device=GPU).copy_(view)) for name, view in reader.fetch(manifest)]
        assert reader.intact(manifest)
        assert all(one.equal(other) for (_, one), (_, other) in zip(given, found, strict=True))
    assert all(segment.locked is not None and segment.locked.held for segment in reader._open.values())
    assert all(slot.result().locked.held for slot in publisher._slots)


def test_what_the_driver_refuses_costs_speed_only(caplog: pytest.LogCaptureFixture) -> None:
    memory = mmap.mmap(-1, 1 << 20)
    first = PageLock(memory, GPU, writable=True)
    second = PageLock(memory, GPU, writable=True)
    assert first.held
    assert not second.held
    assert "does not lock 1.0 MB" in caplog.text
    # The error is not left for whatever the GPU is asked next.
    assert torch.ones(3, device=GPU).sum().item() == 3
    del first, second
    assert PageLock(memory, GPU, writable=True).held


def test_a_process_without_a_gpu_takes_none(publisher: ShmPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine is in a process of its own."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    manifest = publisher.summed(publisher.publish(Version(0, 0), [("a", torch.ones(3))]))
    reader = ShmReader(device="cuda:0")
    reader.fetch(manifest)
    assert [segment.locked for segment in reader._open.values()] == [None]
