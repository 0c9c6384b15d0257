"""Clients of owners that stand alone: what they get, what becomes of their claims, and whom they are refused by."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from distflow.client import Client, StaleRows
from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import NetworkListener, make_keys, write_keys
from distflow.errors import ProtocolError, UserError
from distflow.exchange.kept_samples import KeptSamples
from distflow.exchange.store_channel import ALIVE, FORGET, KINDS, Forgotten
from tests.client.shop import FIELDS, GROUPS, SAMPLES, STEPS, TOKENS_A_GROUP, Shop, write_record
from tests.polling import eventually

ROWS = GROUPS * SAMPLES


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def open_shop(tmp_path: Path, closing: ExitStack) -> Callable[..., Shop]:
    def opened(**options: object) -> Shop:
        shop = Shop(tmp_path, **options).open()  # type: ignore[arg-type]
        closing.callback(shop.close)
        write_record(tmp_path, [shop])
        return shop

    return opened


def first(client: Client, shop: Shop, **wanted: object) -> None:
    """Ask once in vain, so that the consumer is open, and begin."""
    with pytest.raises(TimeoutError, match="the run goes on"):
        client.get(list(FIELDS), consumer="all", timeout=0.1, **wanted)  # type: ignore[arg-type]
    shop.begin()


def positions(client: Client, **wanted: object) -> list[int]:
    got = client.get(list(FIELDS), consumer="all", timeout=10, **wanted)  # type: ignore[arg-type]
    assert got is not None
    with got:
        return list(dict.fromkeys(got.batch.dense("uid")[:, 2].tolist()))


def test_rows_come_in_whole_groups_with_the_fields_that_were_asked_for(
    tmp_path: Path, open_shop: Callable[..., Shop]
) -> None:
    shop = open_shop()
    with Client(tmp_path) as client:
        first(client, shop)
        got = client.get(list(FIELDS), consumer="all", rows=SAMPLES + 1, timeout=10)
        assert got is not None
        assert set(got.batch.columns) == set(FIELDS)
        assert got.batch.texts("response_text")[:2] == ["7", "8"]
        got.acknowledge()
        with pytest.raises(UserError, match="acknowledged or given back already"):
            got.acknowledge()
        shop.train()
        assert len(positions(client, tokens=3 * TOKENS_A_GROUP)) >= 3


def test_everything_is_read_once_and_the_end_is_told(tmp_path: Path, open_shop: Callable[..., Shop]) -> None:
    shop = open_shop()
    with Client(tmp_path) as client:
        first(client, shop)
        shop.train(20)
        seen: list[int] = []
        while (got := client.get(list(FIELDS), consumer="all", rows=3 * ROWS, timeout=10)) is not None:
            with got:
                seen += dict.fromkeys(got.batch.dense("uid")[:, 2].tolist())
        assert seen == list(range(20 * GROUPS))
        assert client.get(list(FIELDS), consumer="all") is None


def test_a_wait_for_weights_ends_with_the_run_and_with_nothing_less(
    tmp_path: Path, open_shop: Callable[..., Shop]
) -> None:
    """A copy of the record never tells that a run is over: its owners do, and one that is only gone does not."""
    shop = open_shop()
    with Client(tmp_path) as client, ThreadPoolExecutor(1) as pool:
        found = pool.submit(client.subscribe_weights().take)
        eventually(lambda: shop.store._heard, "a word of the client")
        with shop.lock:
            shop.store.close()
        with pytest.raises(TimeoutError):
            found.result(0.5)
        with shop.lock:
            shop.samples.send(shop.core.finish(0.0))
        shop.close()
        assert found.result(10) is None


def test_what_an_exception_leaves_is_given_back(tmp_path: Path, open_shop: Callable[..., Shop]) -> None:
    shop = open_shop()
    with Client(tmp_path) as client, Client(tmp_path) as other:
        first(client, shop)
        got = client.get(list(FIELDS), consumer="all", rows=ROWS, timeout=10)
        assert got is not None
        with pytest.raises(KeyError), got:
            raise KeyError
        assert positions(other, rows=ROWS) == list(range(GROUPS))


def test_what_a_client_that_leaves_had_claimed_goes_to_another(tmp_path: Path, open_shop: Callable[..., Shop]) -> None:
    shop = open_shop()
    with Client(tmp_path) as client, Client(tmp_path) as other:
        first(client, shop)
        got = client.get(list(FIELDS), consumer="all", rows=ROWS, timeout=10)
        client.close()
        assert positions(other, rows=ROWS) == list(range(GROUPS))
        assert got is not None


def test_a_lossless_consumer_holds_the_owner_up_until_it_reads(tmp_path: Path, open_shop: Callable[..., Shop]) -> None:
    shop = open_shop(limit_bytes=1)
    with Client(tmp_path) as client:
        first(client, shop, lossless=True)
        shop.train()
        assert shop.core.held_up() == "all"
        with pytest.raises(AssertionError, match="held up by 'all'"), shop.lock:
            assert shop.lock.wait_for(shop.core.set_complete, 0.3), f"held up by {shop.core.held_up()!r}"
        assert positions(client, rows=ROWS, lossless=True) == list(range(GROUPS))
        shop.train()


def test_claims_of_an_owner_that_restarts_are_stale(tmp_path: Path, open_shop: Callable[..., Shop]) -> None:
    shop = open_shop()
    with Client(tmp_path) as client:
        first(client, shop)
        got = client.get(list(FIELDS), consumer="all", rows=ROWS, timeout=10)
        assert got is not None
        shop.endpoint.close()
        again = open_shop(incarnation=1)
        with pytest.raises(StaleRows, match="a training worker has restarted"):
            got.acknowledge()
        first(client, again)
        assert positions(client, rows=ROWS) == list(range(GROUPS))


def test_an_owner_that_restarts_goes_on_with_what_its_checkpoint_holds(
    tmp_path: Path, open_shop: Callable[..., Shop]
) -> None:
    shop = open_shop()
    with Client(tmp_path) as client:
        first(client, shop, lossless=True)
        assert positions(client, rows=ROWS, lossless=True) == [0, 1, 2, 3]
        shop.train()
        held = client.get(list(FIELDS), consumer="all", rows=ROWS, lossless=True, timeout=10)
        assert held is not None
        shop.train()
        with shop.lock:
            saved = shop.store.kept(shop.core.snapshot()).encode()
        shop.endpoint.close()
        again = Shop(tmp_path, incarnation=1)
        again.store.restore(KeptSamples.decode(saved), lambda position: position != 6)
        write_record(tmp_path, [again.open()])
        with pytest.raises(StaleRows):
            held.acknowledge()
        assert positions(client, rows=3 * SAMPLES, lossless=True) == [4, 5, 7], "6 is another owner's; 8 comes again"
        again.close()


def listing(shop: Shop, noted: list[dict[str, Any]]) -> Callable[[Mapping[str, Any]], None]:
    """A disk that takes whatever it is given."""

    def write(listed: Mapping[str, Any]) -> None:
        noted.append(dict(listed))
        shop.store.listed(listed)

    return write


def test_a_slow_disk_holds_back_what_depends_on_it_and_nothing_else(
    tmp_path: Path, open_shop: Callable[..., Shop]
) -> None:
    shop, writes = open_shop(), list[Mapping[str, Any]]()
    shop.store.listing.write = writes.append
    with Client(tmp_path) as client, Client(tmp_path) as other, ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.get, ["uid"], consumer="all", rows=ROWS, lossless=True, timeout=30)
        eventually(lambda: writes, "a list to write")
        with pytest.raises(TimeoutError):
            other.get(["uid"], consumer="lossy", timeout=0.1)
        shop.begin()
        assert other.get(["uid"], consumer="lossy", timeout=10) is not None
        eventually(lambda: shop.store.consumers.counts()[0].claimed, "a claim")
        assert not waiting.done()
        with shop.lock:
            shop.store.listed(writes[-1])
        got = waiting.result()
        assert got is not None
        got.acknowledge()
        closing = pool.submit(client.forget, "all")
        eventually(lambda: len(writes) == 2, "another list to write")
        assert "all" not in [one.name for one in shop.store.consumers.counts()]
        time.sleep(0.1)
        assert not closing.done()
        with shop.lock:
            shop.store.listed(writes[-1])
        closing.result()
    assert [list(one) for one in writes] == [["all"], []]


def test_lossless_consumers_are_listed_for_the_owner_that_follows(
    tmp_path: Path, open_shop: Callable[..., Shop]
) -> None:
    shop, noted = open_shop(), []
    shop.store.listing.write = listing(shop, noted)
    with Client(tmp_path) as client:
        for name, lossless in (("all", True), ("some", False)):
            with pytest.raises(TimeoutError):
                client.get(["uid"], consumer=name, lossless=lossless, timeout=0.1)
        shop.endpoint.close()
        again = Shop(tmp_path, incarnation=1)
        again.store.open_again(noted[-1])
        again.begin()
        write_record(tmp_path, [again.open()])
        again.store.listed(noted[-1])
        again.store.listing.write = listing(again, noted)
        got = client.get(["uid"], consumer="all", rows=ROWS, lossless=True, timeout=10)
        assert got is not None
        assert sorted(set(got.batch.dense("uid")[:, 2].tolist())) == list(range(GROUPS)), "made before anybody asked"
        client.forget("all")
        again.close()
    assert noted == [{"all": ("uid",)}, {}]


def test_a_field_that_samples_lack_is_refused(tmp_path: Path, open_shop: Callable[..., Shop]) -> None:
    open_shop()
    with Client(tmp_path) as client:
        with pytest.raises(UserError, match="samples have no field 'rewards'"):
            client.get(["uid", "rewards"], consumer="all", timeout=10)
        with pytest.raises(UserError, match="expected a list of names"):
            client.get("uid", consumer="all")
        with pytest.raises(TimeoutError):
            client.get(["uid"], consumer="all", timeout=0.1)
        with pytest.raises(UserError, match="it cannot change"):
            client.get(["prompt_text"], consumer="all")
        client.forget("all")
        with pytest.raises(TimeoutError):
            client.get(["prompt_text"], consumer="all", timeout=0.1)


def test_malformed_requests_harm_nobody(tmp_path: Path, open_shop: Callable[..., Shop]) -> None:
    shop = open_shop()
    with Client(tmp_path) as client:
        first(client, shop)
        for kind in KINDS:
            client._wire.send("trainer/0", kind, {"client": 7})
        eventually(lambda: len(shop.refused) == len(KINDS))
        assert positions(client, rows=ROWS) == list(range(GROUPS))


@pytest.mark.parametrize("fields", [["x" * 201], [f"f{n}" for n in range(257)]])
def test_what_an_owner_cannot_read_is_refused(
    tmp_path: Path, open_shop: Callable[..., Shop], fields: list[str]
) -> None:
    shop = open_shop()
    with Client(tmp_path) as client:
        with pytest.raises(UserError, match=r"malformed client.ask: Expected .* of length <= 2"):
            client.get(fields, consumer="all", timeout=10)
        first(client, shop)
        assert positions(client, rows=ROWS) == list(range(GROUPS)), "and the client goes on"


def test_what_the_end_of_the_run_leaves_unconfirmed_is_said(
    tmp_path: Path, open_shop: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distflow.client.client.SILENT_S", 0.3)
    monkeypatch.setattr("distflow.client.attached_run.LOOK_EVERY_S", 0.1)
    shop = open_shop()
    with Client(tmp_path) as client:
        first(client, shop)
        got = client.get(list(FIELDS), consumer="all", rows=ROWS, timeout=10)
        assert got is not None
        shop.endpoint.close()
        structs.replace(write_record(tmp_path, [shop]), state="done").write()
        with pytest.raises(StaleRows, match="the run has ended before trainer/0 confirmed this"):
            got.acknowledge()
        got.give_back()
        with pytest.raises(UserError, match="the run has ended before trainer/0 closed it"):
            client.forget("all")


def test_a_consumer_is_not_closed_while_get_begins(
    tmp_path: Path, open_shop: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_shop()
    with Client(tmp_path) as client, ThreadPoolExecutor() as pool:
        begun, forgotten = threading.Event(), threading.Event()
        reading = client._reading

        def slow(*about: Any, **how: Any) -> Any:
            found = reading(*about, **how)
            begun.set()
            forgotten.wait(0.3)
            return found

        monkeypatch.setattr(client, "_reading", slow)
        waiting = pool.submit(client.get, list(FIELDS), consumer="all", timeout=1)
        assert begun.wait(10)
        with pytest.raises(UserError, match="another thread is in `get`"):
            client.forget("all")
        forgotten.set()
        with pytest.raises(TimeoutError):
            waiting.result()


def test_a_request_is_not_repeated_while_it_is_under_way(
    tmp_path: Path, open_shop: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distflow.client.client.REQUEST_AGAIN_S", 0.05)
    shop = open_shop()
    with Client(tmp_path) as client, ThreadPoolExecutor() as pool:
        first(client, shop)
        shop.endpoint.close()
        sent: list[str] = []
        send = client._wire.send
        monkeypatch.setattr(client._wire, "send", lambda *message: (sent.append(message[1]), send(*message))[1])
        body = partial(Forgotten, client._name, consumer="all")
        waiting = pool.submit(client._request, shop.name, FORGET, body, (bytes(1 << 20),))
        eventually(lambda: sent.count(ALIVE) >= 1, "a sign of life")
        assert sent.count(FORGET) == 1, "nobody has taken the first copy"
        client.close()
        with pytest.raises(UserError, match="this client is closed"):
            waiting.result()


def test_an_owner_that_is_gone_for_good_is_not_waited_for(
    tmp_path: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool goes on without it: whoever owns samples now says so."""
    monkeypatch.setattr("distflow.client.client.SILENT_S", 0.3)
    monkeypatch.setattr("distflow.client.attached_run.LOOK_EVERY_S", 0.1)
    stays, goes = (Shop(tmp_path, index, 2).open() for index in range(2))
    closing.callback(stays.close)
    write_record(tmp_path, [stays, goes])
    with Client(tmp_path) as client:
        first(client, stays)
        goes.begin()
        held = client.get(list(FIELDS), consumer="all", rows=2 * ROWS, timeout=10)
        assert held is not None
        assert len(held) == 2 * ROWS
        goes.endpoint.close()
        stays.names = [stays.name]
        with pytest.raises(StaleRows):
            held.acknowledge()
        stays.train(2)
        assert len(positions(client, rows=ROWS)) == GROUPS
        stays.train(STEPS - 2)
        while client.get(list(FIELDS), consumer="all", rows=ROWS, timeout=10) is not None:
            pass


def test_who_waits_hears_that_a_consumer_was_closed(tmp_path: Path, open_shop: Callable[..., Shop]) -> None:
    shop = open_shop()
    with Client(tmp_path) as waits, Client(tmp_path) as closes, ThreadPoolExecutor() as pool:
        waiting = pool.submit(waits.get, list(FIELDS), consumer="all", timeout=10)
        eventually(lambda: shop.store.consumers._consumers, "the consumer")
        with pytest.raises(UserError, match="another thread is in `get`"):
            waits.forget("all")
        closes.forget("all")
        with pytest.raises(UserError, match="consumer 'all': another client has closed it"):
            waiting.result()


def test_a_long_look_at_the_run_does_not_silence_a_client(
    tmp_path: Path, open_shop: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distflow.client.client.SILENT_S", 0.0)
    looks, on = threading.Event(), threading.Event()
    open_shop()
    with Client(tmp_path) as client, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(client._run, "ended", lambda: looks.set() or not on.wait(10))
        waiting = pool.submit(client.get, list(FIELDS), consumer="all", timeout=1)
        assert looks.wait(10)
        assert client._changed.acquire(timeout=2)
        client._changed.release()
        on.set()
        with pytest.raises(TimeoutError):
            waiting.result()


def test_the_run_must_go_on(tmp_path: Path, open_shop: Callable[..., Shop]) -> None:
    shop = open_shop()
    with pytest.raises(UserError, match="no such file"):
        Client(tmp_path / "nowhere")
    structs.replace(write_record(tmp_path, [shop]), state="done").write()
    with pytest.raises(UserError, match="this run is over"):
        Client(tmp_path)


def test_off_the_host_the_key_of_the_run_is_needed(tmp_path: Path, closing: ExitStack) -> None:
    keys, copy = make_keys(), tmp_path / "copy"
    copy.mkdir()
    shop = Shop(tmp_path, keys=keys).open()
    closing.callback(shop.close)
    write_record(copy, [shop], keys)
    with Client(copy) as client:
        first(client, shop)
        assert positions(client, rows=ROWS) == list(range(GROUPS))
    write_keys(copy / "keys" / "run.key", make_keys())
    with pytest.raises(ProtocolError, match="refused the connection"):
        Client(copy, timeout_s=5)


def test_off_the_host_a_client_finds_workers_that_were_restarted(
    tmp_path: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of run.json stays as it was: where they listen now, an agent tells."""
    monkeypatch.setattr("distflow.client.client.SILENT_S", 0.3)
    monkeypatch.setattr("distflow.client.attached_run.LOOK_EVERY_S", 0.1)
    keys, copy, listening = make_keys(), tmp_path / "copy", dict[str, str]()
    copy.mkdir()
    ipc = {"agent/0": f"ipc://{tmp_path}/agent-0"}
    agent = Endpoint("agent/0", 0, ipc, listener=NetworkListener("127.0.0.1", keys))
    agent.start(lambda message: agent.reply(message, {"state": "running", "roster": listening, "workers": []}))
    closing.callback(agent.close)

    def open_shop(incarnation: int) -> Shop:
        shop = Shop(tmp_path, keys=keys, incarnation=incarnation).open()
        closing.callback(shop.close)
        listening[shop.name] = str(shop.endpoint.network_address)
        return shop

    shop = open_shop(0)
    record = write_record(copy, [shop], keys)
    # As it is copied before all addresses are in it.
    structs.replace(record, roster={shop.name: "", "agent/0": str(agent.network_address)}).write()
    with Client(copy) as client:
        first(client, shop)
        got = client.get(list(FIELDS), consumer="all", rows=ROWS, timeout=10)
        assert got is not None
        shop.endpoint.close()
        again = open_shop(1)
        with pytest.raises(StaleRows, match="a training worker has restarted"):
            got.acknowledge()
        first(client, again)
        assert positions(client, rows=ROWS) == list(range(GROUPS))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rows": 4.0}, "rows: expected a whole number, 0 for any number, got 4.0"),
        ({"rows": 1 << 64}, "rows: expected a whole number, 0 for any number, got 18446744073709551616"),
        ({"tokens": -4}, "tokens: expected a whole number, 0 for any number, got -4"),
        ({"consumer": ""}, "consumer: expected a name of 1 to 64 characters, got ''"),
        ({"consumer": "x" * 65}, "consumer: expected a name of 1 to 64 characters"),
        ({"fields": "reward"}, "fields: expected a list of names such as"),
        ({"fields": [1]}, "fields: expected a list of names such as"),
        ({"timeout": "1"}, "timeout: expected a number of seconds, got '1'"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_at_once(
    tmp_path: Path, open_shop: Callable[..., Shop], given: dict[str, Any], said: str
) -> None:
    open_shop()
    with Client(tmp_path) as client, pytest.raises(UserError, match=re.escape(said)):
        client.get(**{"fields": list(FIELDS), "consumer": "all", **given})


def test_what_is_no_name_and_a_closed_client_are_refused(tmp_path: Path, open_shop: Callable[..., Shop]) -> None:
    open_shop()
    client = Client(tmp_path)
    with pytest.raises(UserError, match="consumer: expected a name of 1 to 64 characters, got '5'"):
        client.forget(5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"site: expected one of the run's sites \(none: .*\), got 'oslo'"):
        client.subscribe_weights(site="oslo")
    client.close()
    client.close()
    with pytest.raises(UserError, match="this client is closed"):
        client.get(list(FIELDS), consumer="all")


def test_what_is_no_run_is_refused() -> None:
    with pytest.raises(UserError, match="run: expected a run's folder, .*, got None"):
        Client(None)  # type: ignore[arg-type]
