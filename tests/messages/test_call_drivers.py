"""Whatever a message of calls holds, the worker that asks and the one that answers go on."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from distflow.comm.message import decode
from distflow.data.batch import Batch, Ragged, RowRange
from distflow.data.batch_wire import encode_batch
from distflow.exchange.call_messages import CallAnswer, CallMessage, CallRequest, kind_of, to_wire
from distflow.runtime import ports
from distflow.testing.fakes import FakeBackend
from distflow.types import Version
from tests.messages.corpus import Example, examples
from tests.messages.receivers import WorkerReceiver, setting_of
from tests.messages.test_fuzz import packed, quiet, wrong
from tests.polling import eventually

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
        "left_out": Ragged.from_texts(["", ""]),
        "finish_reason": torch.zeros(2, dtype=torch.int64),
    }
)
JUDGED = Batch({"reward": torch.ones(2), "score": torch.ones(2)})


def receiver(name: str, folder: Path, *overrides: str) -> WorkerReceiver:
    """One that has met its peers."""
    found = WorkerReceiver(setting_of(name, folder, ["layout=services", "batch.prompts=16", *overrides]))
    for example in examples("worker"):
        if example.kind == "hello":
            for sender in ("rollout/0", "reward/0", "reference/0", "trainer/0"):
                found.take(packed(Example("worker", "hello", sender, 0, example.body, ())), ())
    return found


def travelling(message: CallMessage, sender: str, rows: Batch | None, **more: Any) -> Example:
    body: Mapping[str, Any] = to_wire(structs.replace(message, **more))
    described, buffer = (None, b"") if rows is None else encode_batch(rows)
    body = {**body, "batch": described} if rows is not None else body
    return Example("calls", kind_of(message), sender, 0, body, (bytes(buffer),) if rows is not None else ())


def request(number: int, sender: str = "rollout/0") -> Example:
    return travelling(CallRequest("reward", number, 0, None, 6), sender, ROWS)


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
    answers = [travelling(CallAnswer(0, number, None, 0, 6, 1), "reward/0", JUDGED) for number in range(1, OPEN + 1)]
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


def test_a_request_with_more_than_is_read_is_joined_with_others(tmp_path: Path) -> None:
    service = receiver("reward/0", tmp_path)
    answering = service.session._serving
    assert answering is not None
    more = ROWS.with_columns(more=torch.zeros(2))
    for number, rows in enumerate((ROWS, more)):
        example = travelling(CallRequest("reward", number, 0, None, 6), "rollout/0", rows)
        service.take(packed(example), example.payload)
    _, joined = next(answering.requests(["reward"]))
    assert (joined.rows, "more" in joined) == (4, False)
    service.close()


@pytest.mark.parametrize(
    "wrong",
    [{"reward": torch.ones(2, 1)}, {"reward": torch.tensor([1.0, torch.nan])}, {"score": Ragged.from_texts(["", "x"])}],
    ids=["shape", "nan", "text"],
)
def test_an_answer_that_no_step_may_write_is_refused(tmp_path: Path, wrong: Mapping[str, Any]) -> None:
    rollout = receiver("rollout/0", tmp_path)
    calls = rollout.session._asking
    assert calls is not None
    with rollout.node.board.condition:
        calls.ask("reward", 0, RowRange(ROWS, 0, 2), 0)
    refused = rollout.refused
    for rows in (JUDGED.with_columns(**wrong), JUDGED):
        example = travelling(CallAnswer(0, 1, None, 0, 6, 1), "reward/0", rows)
        rollout.take(packed(example), example.payload)
    assert rollout.refused == refused + 1
    assert [answer["reward"].tolist() for _, answer in calls.take("reward")] == [[1.0, 1.0]]
    rollout.close()


def test_a_call_costs_the_bytes_of_what_is_read_and_written(tmp_path: Path) -> None:
    """Of samples of a thousand tokens: to the end of the wire, whatever else is around them."""
    tokens = torch.arange(1000)
    rows = ROWS.with_columns(
        prompt_ids=Ragged.from_rows([tokens[:100]] * 2, torch.int64),
        response_ids=Ragged.from_rows([tokens] * 2, torch.int64),
        rollout_logprobs=Ragged.from_rows([tokens] * 2, torch.float64),
    )
    trainer, service = (receiver(name, tmp_path, "flow=grpo_kl") for name in ("trainer/0", "reference/0"))
    calls, answering = trainer.session._asking, service.session._serving
    assert calls is not None
    assert answering is not None
    taken: list[tuple[int, Batch]] = []
    calls.deliver("reference", lambda position, answer: taken.append((position, answer)))
    trainer.said.clear()
    with trainer.node.board.condition:
        calls.ask("reference", 0, RowRange(rows, 0, 2), 0)
    asked = [frames for frames in trainer.said if len(frames) == 2]
    read = rows.only(["prompt_ids", "response_ids"]).nbytes
    assert [sum(map(len, frames)) for frames in asked] == [pytest.approx(read, rel=0.1)]
    service.said.clear()
    header, payload = (bytes(frame) for frame in asked[0])
    service.take(header, (payload,))
    step, batch = next(answering.requests(["reference"]))
    written = batch.ragged("response_ids").like(torch.zeros(2000, dtype=torch.float64))
    answering.answer(batch.with_columns(ref_logprobs=written, more=written))
    answered = [frames for frames in service.said if len(frames) == 2]
    bytes_written = Batch({"ref_logprobs": written}).nbytes
    assert [sum(map(len, frames)) for frames in answered] == [pytest.approx(bytes_written, rel=0.1)]
    header, payload = (bytes(frame) for frame in answered[0])
    trainer.take(header, (payload,))
    ((position, answer),) = taken
    assert (step, position, list(answer.columns)) == ("reference", 0, ["ref_logprobs"])
    for worker in (trainer, service):
        worker.close()


def test_weights_are_announced_to_those_that_read_them(tmp_path: Path) -> None:
    trainer = receiver("trainer/0", tmp_path)
    present = [name for name in trainer.node.membership.peers if trainer.node.membership.present(name)]
    assert sorted(present) == ["reward/0", "rollout/0"]
    session, backend = trainer.session, FakeBackend()
    held = ports.HeldModels({"policy": backend}, {}, None, session._turns, trainer._tokenizer)
    publisher = ports.publishes(session._base, held, {})
    publisher._canaries = {}
    try:
        trainer.said.clear()
        before = trainer.node.progress
        manifest = publisher.make("policy", Version(0, 1))
        tensors = len(list(backend.named_shards()))
        assert trainer.node.progress - before >= tensors > 0, "a large model is a long sign of progress"
        with trainer.node.board.condition:
            publisher.announce(manifest)
        eventually(lambda: trainer.said, "announced")
        kinds = [decode(bytes(frames[0]), [], b"").kind for frames in trainer.said]
        assert kinds == ["weights"], "one worker generates"
    finally:
        publisher.close()
    trainer.close()
