"""Fields that clients write: each sample gets them once, and what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.client import Client, Samples, StaleRows
from distflow.comm.keys import make_keys
from distflow.data.batch import Batch, Ragged
from distflow.data.batch_wire import encode_batch
from distflow.errors import UserError
from distflow.exchange.store_channel import PUT
from tests.client.shop import GROUPS, SAMPLES, Shop, write_record

ROWS = GROUPS * SAMPLES
KINDS = {"reward": "number", "comment": "text", "weights": "number_per_token"}
GOOD: dict[str, Any] = {"reward": [0.5] * ROWS, "comment": ["fine"] * ROWS, "weights": [[1.0, 2.0]] * ROWS}


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(folder: Path, closing: ExitStack, **options: Any) -> Shop:
    shop = Shop(folder, writes=KINDS, **options).open()
    closing.callback(shop.close)
    write_record(folder, [shop])
    return shop


@pytest.fixture
def shop(tmp_path: Path, closing: ExitStack) -> Shop:
    """With the samples of a step, which nobody has asked for yet."""
    found = opened(tmp_path, closing)
    found.begin()
    return found


def claimed(client: Client, rows: int = ROWS) -> Samples:
    got = client.get(["prompt_text"], consumer="labels", rows=rows, timeout=10)
    assert got is not None
    return got


def test_what_is_written_reaches_each_sample(tmp_path: Path, shop: Shop) -> None:
    with Client(tmp_path) as client:
        got = claimed(client)
        assert list(got.batch.columns) == ["prompt_text"], "what it asked for, of all that the step shows"
        rewards = [float(row) for row in range(ROWS)]
        got.put(
            reward=rewards, comment=[f"of {text}" for text in got.batch.texts("prompt_text")], weights=[[1, 2]] * ROWS
        )
    whole = Batch.concat([shop.written[position] for position in range(GROUPS)])
    assert whole.dense("reward").tolist() == rewards
    assert whole.texts("comment")[:3] == ["of 0=", "of 0=", "of 1="]
    assert whole.ragged("weights").values.tolist() == [1.0, 2.0] * ROWS
    assert whole.dense("reward").dtype == torch.float32
    assert shop.train() == list(range(GROUPS))


def test_tensors_and_ragged_columns_are_taken_as_they_are(tmp_path: Path, shop: Shop) -> None:
    with Client(tmp_path) as client:
        weights = Ragged.from_rows([[3, 4]] * ROWS, torch.int64)
        claimed(client).put(**{**GOOD, "reward": torch.ones(ROWS, dtype=torch.float64), "weights": weights})
    assert shop.written[0].ragged("weights").values.tolist() == [3.0, 4.0] * SAMPLES


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reward": [1.0]}, f"reward: 1 values for {ROWS} samples"),
        ({"reward": [None] * ROWS}, "reward: expected a number, a text or a row of numbers"),
        ({"reward": [float("nan")] * ROWS}, "'reward': expected finite numbers, got nan"),
        ({"reward": [float("inf")] * ROWS}, "'reward': expected finite numbers, got inf"),
        ({"reward": ["good"] * ROWS}, "'reward': expected one number for each sample, got texts"),
        ({"reward": torch.ones(ROWS, 2)}, r"'reward': expected one number for each sample, got a tensor of shape"),
        ({"reward": [[1.0, 1.0]] * ROWS}, "'reward': expected one number for each sample, got several"),
        ({"comment": [1.0] * ROWS}, "'comment': expected a text for each sample"),
        ({"comment": ["x" * 70_000] * ROWS}, "'comment': a text of 70000 bytes; expected at most 65536"),
        ({"weights": [1.0] * ROWS}, "'weights': expected a number for each response token"),
        ({"weights": [[1.0]] * ROWS}, "'weights': row 0 has 1 numbers for 2 response tokens"),
        ({"rewards": [1.0] * ROWS}, "'rewards' is not written here; did you mean 'reward'"),
        ({"response_ids": [1.0] * ROWS}, "'response_ids' is not written by clients"),
    ],
)
def test_what_does_not_fit_is_refused_and_may_be_corrected(
    tmp_path: Path, shop: Shop, wrong: dict[str, Any], message: str
) -> None:
    with Client(tmp_path) as client:
        got = claimed(client)
        with pytest.raises(UserError, match=message):
            got.put(**{**GOOD, **wrong})
        assert shop.written == {}
        got.put(**GOOD)
        assert len(shop.written) == GROUPS


def test_what_one_of_several_owners_refuses_none_has_written(tmp_path: Path, closing: ExitStack) -> None:
    shops = [Shop(tmp_path, index, 2, writes={"reward": "number"}).open() for index in range(2)]
    for shop in shops:
        closing.callback(shop.close)
    write_record(tmp_path, shops)
    for shop in shops:
        shop.begin()
    with Client(tmp_path) as client:
        got = claimed(client, rows=2 * ROWS)
        assert len(got) == 2 * ROWS
        for wrong in (0, 2 * ROWS - 1):
            with pytest.raises(UserError, match="'reward': expected finite numbers, got nan"):
                got.put(reward=[float("nan") if row == wrong else 1.0 for row in range(2 * ROWS)])
            assert [shop.written for shop in shops] == [{}, {}]
        got.put(reward=[2.0] * 2 * ROWS)
    written = [fields.dense("reward").tolist() for shop in shops for fields in shop.written.values()]
    assert written == [[2.0] * SAMPLES] * 2 * GROUPS


def test_all_fields_of_a_step_are_written_at_once(tmp_path: Path, shop: Shop) -> None:
    with Client(tmp_path) as client, claimed(client) as got:
        with pytest.raises(UserError, match="'comment' is missing: expected reward, comment, weights"):
            got.put(reward=GOOD["reward"])
        with pytest.raises(UserError, match="expected fields with a value for each row"):
            got.put()
        got.put(**GOOD)
        with pytest.raises(UserError, match="acknowledged or given back already"):
            got.put(**GOOD)


def test_samples_of_a_step_are_not_done_before_they_are_written(tmp_path: Path, shop: Shop) -> None:
    with Client(tmp_path) as client:
        with pytest.raises(UserError, match=r"are done once its fields are written: samples.put"), claimed(client):
            pass
        with pytest.raises(UserError, match="is a step of the flow, which waits for what clients write"):
            client.forget("labels")
        claimed(client).put(**GOOD)
        assert len(shop.written) == GROUPS


def test_a_repeated_message_writes_nothing_twice(tmp_path: Path, shop: Shop) -> None:
    with Client(tmp_path) as client:
        sent: list[tuple[Any, ...]] = []
        send = client._wire.send
        client._wire.send = lambda *message: (sent.append(message), send(*message))[1]  # type: ignore[method-assign]
        got = claimed(client, rows=SAMPLES)
        got.put(**{name: values[:SAMPLES] for name, values in GOOD.items()})
        (put,) = [message for message in sent if message[1] == PUT]
        for _ in range(3):
            send(*put)
        rest = claimed(client, rows=ROWS - SAMPLES)
        rest.put(**{name: values[SAMPLES:] for name, values in GOOD.items()})
        assert len(shop.written) == GROUPS
    assert shop.refused == []


def test_what_a_dead_client_had_claimed_is_written_by_the_next_one(tmp_path: Path, shop: Shop) -> None:
    with Client(tmp_path) as first, Client(tmp_path) as second:
        late = claimed(first)
        # As after 10 s without a word of it; then it comes back.
        with shop.lock:
            shop.store._send(shop.store.consumers.leave(first._name))
        claimed(second).put(**GOOD)
        with pytest.raises(StaleRows):
            late.put(**{**GOOD, "reward": [9.0] * ROWS})
    assert {value for fields in shop.written.values() for value in fields.dense("reward").tolist()} == {0.5}


def test_an_owner_that_restarts_offers_its_samples_again(tmp_path: Path, shop: Shop, closing: ExitStack) -> None:
    with Client(tmp_path) as client:
        got = claimed(client)
        shop.endpoint.close()
        again = opened(tmp_path, closing, incarnation=1)
        with pytest.raises(StaleRows):
            got.put(**GOOD)
        again.begin()
        claimed(client).put(**GOOD)
        assert len(again.written) == GROUPS


def test_malformed_fields_harm_nobody(tmp_path: Path, shop: Shop) -> None:
    with Client(tmp_path) as client:
        got = claimed(client)
        claim = got._parts[0].number
        described, buffer = encode_batch(Batch({"reward": torch.ones(ROWS)}))
        good = {"client": client._name, "step": "labels", "claim": claim, "batch": described}
        wrong: list[tuple[dict[str, Any], tuple[bytes, ...]]] = [
            (good, ()),
            (good, (bytes(buffer), b"more")),
            (good, (bytes(buffer)[:-1],)),
            ({**good, "batch": {"rows": ROWS}}, (bytes(buffer),)),
            ({**good, "batch": {**described, "rows": 1 << 50}}, (bytes(buffer),)),
        ]
        for number, (body, payload) in enumerate(wrong):
            client._wire.send("trainer/0", PUT, {**body, "number": 1000 + number}, payload)
        got.put(**GOOD)
        assert len(shop.written) == GROUPS


def test_off_the_host_too(tmp_path: Path, closing: ExitStack) -> None:
    keys = make_keys()
    shop = Shop(tmp_path, writes=KINDS, keys=keys).open()
    closing.callback(shop.close)
    write_record(tmp_path, [shop], keys)
    shop.begin()
    with Client(tmp_path) as client:
        claimed(client).put(**GOOD)
    assert len(shop.written) == GROUPS


def test_other_consumers_write_nothing_and_steps_show_what_the_recipe_says(tmp_path: Path, closing: ExitStack) -> None:
    shop = opened(tmp_path, closing)
    with Client(tmp_path) as client:
        with pytest.raises(TimeoutError):
            client.get(["uid"], consumer="other", timeout=0.1)
        shop.begin()
        got = client.get(["uid"], consumer="other", timeout=10)
        assert got is not None
        with pytest.raises(UserError, match="the flow has no step 'other' that clients write; it has labels"):
            got.put(reward=[1.0] * len(got))
        with pytest.raises(UserError, match=r"step 'labels' shows clients .* and not \['response_text'\]"):
            client.get(["response_text"], consumer="labels", timeout=10)
        for alike in ("label", "Labels", "labels2"):
            why = f"consumer .{alike}.: did you mean step .labels., whose fields clients"
            with pytest.raises(UserError, match=why):
                client.get(["prompt_text"], consumer=alike, timeout=10)
        with pytest.raises(TimeoutError):
            client.get(["prompt_text"], consumer="labels-of-interest", timeout=0.1)
