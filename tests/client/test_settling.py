"""How a client tells its owners what has become of very many claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from distflow.client.reading import Part
from distflow.client.settling import Settling, StaleRows
from distflow.data.batch import Batch
from distflow.data.decoding import read
from distflow.exchange.consumers import Consumers
from distflow.exchange.store_channel import Settled
from tests.exchange.test_consumers import group, wanted

MANY = 5000


@pytest.mark.parametrize("used", [True, False])
def test_any_number_of_claims_is_settled_although_replies_are_lost(*, used: bool) -> None:
    store = Consumers(1 << 30, 10.0)
    for number in range(MANY):
        store.ask("a", number, wanted(lossless=True, rows=1), 0.0)
        store.arrived({number: group()})

    def request(
        owner: str, kind: str, body: Callable[..., msgspec.Struct], payload: Sequence[Any] = ()
    ) -> dict[str, Any]:
        settled = read(msgspec.to_builtins(body(number=1)), Settled, kind)
        for _ in range(2):
            stale, _ = store.settle("a", settled.consumer, settled.used, settled.returned, 0.0)
        return {"stale": stale}

    parts = [Part("trainer/0", number, Batch({"x": torch.zeros(1)}), 1) for number in range(MANY)]
    back: list[tuple[str, str]] = []
    settling = Settling("a", request, lambda *about: back.append(about))
    settling.settle("reader", parts, used=used)
    (counted,) = store.counts()
    assert (counted.claimed, counted.unread) == (0, 0 if used else MANY)
    assert back == ([] if used else [("reader", "trainer/0")])
    if used:
        with pytest.raises(StaleRows, match="not this client's any more"):
            settling.settle("reader", [parts[0]], used=True)
