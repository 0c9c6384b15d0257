"""Whatever a message of calls holds, the worker that asks and the one that answers go on."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from distflow.data.batch import Batch, Ragged, RowRange
from distflow.data.batch_wire import encode_batch
from distflow.exchange.call_messages import CallAnswer, CallMessage, CallRequest, kind_of, to_wire
from tests.messages.corpus import Example, examples
from tests.messages.receivers import WorkerReceiver, setting_of
from tests.messages.test_fuzz import packed, quiet, wrong

__all__ = ["quiet"]
COUNT = 1500
OPEN = 4
ROWS = Batch(
    {
        "uid": torch.zeros(2, 3, dtype=torch.int64),
        "sample": torch.arange(2),
        "group": torch.zeros(2, dtype=torch.int64),
        "prompt_ids": Ragged.from_rows([[1], [2]], torch.int64),
        "response_ids": Ragged.from_rows([[1, 2], [3]], torch.int64),
        **{name: Ragged.from_texts(["1", "{}"]) for name in ("prompt_text", "response_text", "task")},
        "finish_reason": torch.zeros(2, dtype=torch.int64),
    }
)
JUDGED = Batch({"reward": torch.ones(2), "score": torch.ones(2)})


def receiver(name: str, folder: Path) -> WorkerReceiver:
    """One that has met its peers."""
    found = WorkerReceiver(setting_of(name, folder, ["layout=services", "batch.prompts=16"]))
    for example in examples("worker"):
        if example.kind == "hello":
            for sender in ("rollout/0", "reward/0", "trainer/0"):
                found.take(packed(Example("worker", "hello", sender, 0, example.body, ())), ())
    return found


def travelling(message: CallMessage, sender: str, rows: Batch | None, **more: Any) -> Example:
    body: Mapping[str, Any] = to_wire(structs.replace(message, **more))
    described, buffer = (None, b"") if rows is None else encode_batch(rows)
    body = {**body, "batch": described} if rows is not None else body
    return Example("calls", kind_of(message), sender, 0, body, (bytes(buffer),) if rows is not None else ())


def request(number: int, sender: str = "rollout/0") -> Example:
    return travelling(CallRequest("reward", number, 0, None, ROWS.nbytes, 6), sender, ROWS)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_service_goes_on(tmp_path: Path, seed: int) -> None:
    service, rng = receiver("reward/0", tmp_path), random.Random(seed)
    answering = service.session._serving
    assert answering is not None
    for number in range(COUNT):
        header, payload = wrong(request(number), rng) if rng.random() < 0.9 else (packed(request(number)), ())
        service.take(header, payload)
        service.turn()
    assert service.refused > COUNT / 4
    kept = len(answering._queued)
    sound = request(10**6)
    service.take(packed(sound), sound.payload)
    assert len(answering._queued) == kept + 1
    for rows in answering._queued.values():
        assert rows.rows.rows == rows.rows.dense("finish_reason").shape[0]
    service.close()


@pytest.mark.parametrize("seed", [0, 1])
def test_a_worker_that_asks_goes_on(tmp_path: Path, seed: int) -> None:
    rollout, rng = receiver("rollout/0", tmp_path), random.Random(seed)
    calls = rollout.session._asking
    assert calls is not None
    with rollout.node.board.condition:
        for position in range(OPEN):
            calls.ask("reward", position, RowRange(ROWS, 0, 2), 0)
    answers = [travelling(CallAnswer(0, number, None, 0), "reward/0", JUDGED) for number in range(1, OPEN + 1)]
    for _ in range(COUNT):
        header, payload = wrong(rng.choice(answers[1:]), rng)
        rollout.take(header, payload)
        rollout.turn()
    rollout.take(packed(answers[0]), answers[0].payload)
    rollout.take(packed(answers[0]), answers[0].payload)
    taken = calls.take("reward")
    assert [position for position, _ in taken].count(0) == 1, "the first answer counts, once"
    assert all(set(answer.columns) == {"reward", "score"} and answer.rows == 2 for _, answer in taken)
    rollout.close()
