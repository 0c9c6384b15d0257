"""The store of a process group: by its core, then with torch's own group over real sockets."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distflow.comm.store import REMEMBERED, Answer, StoreCore
from distflow.errors import ProtocolError, ReplicaLost
from distflow.runtime.replicas import GroupStore
from tests.runtime.kit import make_node

MEMBERS = ("trainer/0", "trainer/1")


def asked(core: StoreCore, who: str, number: int, verb: str, *keys: str, **more: Any) -> dict[tuple[str, int], Answer]:
    out = core.handle(who, {"number": number, "verb": verb, "keys": list(keys), **more})
    return {(item.to, item.body["number"]): Answer(**item.body) for item in out}


def test_who_waits_is_answered_when_all_keys_are_there() -> None:
    core = StoreCore(MEMBERS)
    assert asked(core, "trainer/1", 1, "wait", "a", "b") == {}
    assert asked(core, "trainer/0", 1, "set", "a", value=b"x").keys() == {("trainer/0", 1)}
    assert asked(core, "trainer/0", 2, "set", "b", value=b"y").keys() == {("trainer/0", 2), ("trainer/1", 1)}
    assert asked(core, "trainer/1", 2, "get", "a")["trainer/1", 2].found == b"x"


def test_a_question_that_comes_twice_is_done_once() -> None:
    core = StoreCore(MEMBERS)
    assert asked(core, "trainer/1", 1, "add", "n", amount=2)["trainer/1", 1].count == 2
    assert asked(core, "trainer/1", 1, "add", "n", amount=2)["trainer/1", 1].count == 2
    assert asked(core, "trainer/0", 1, "add", "n", amount=-5)["trainer/0", 1].count == -3
    assert asked(core, "trainer/0", 2, "get", "n")["trainer/0", 2].found == b"-3"


@pytest.mark.parametrize("seed", range(50))
def test_lost_and_doubled_questions_count_once(seed: int) -> None:
    rng, core = random.Random(seed), StoreCore(MEMBERS)
    open_ = {(who, number): {"number": number, "verb": "add", "keys": ["n"], "amount": 1}
             for who in MEMBERS for number in range(10)}  # fmt: skip
    sums = set()
    while open_:
        (who, _), body = rng.choice(list(open_.items()))
        for item in core.handle(who, body) * rng.choice((0, 1, 2)):
            sums.add(item.body["count"])
            open_.pop((item.to, item.body["number"]), None)
    assert sums == set(range(1, 21))


def test_values_are_replaced_and_deleted_as_torch_has_it() -> None:
    core = StoreCore(MEMBERS)
    assert asked(core, "trainer/0", 1, "swap", "k", value=b"new", expected=b"")["trainer/0", 1].found == b"new"
    assert asked(core, "trainer/0", 2, "swap", "k", value=b"z", expected=b"old")["trainer/0", 2].found == b"new"
    assert asked(core, "trainer/0", 3, "check", "k", "none")["trainer/0", 3].count == 0
    assert asked(core, "trainer/0", 4, "count")["trainer/0", 4].count == 1
    assert asked(core, "trainer/0", 5, "delete", "k")["trainer/0", 5].count == 1


def test_strangers_and_large_values_are_refused() -> None:
    core = StoreCore(MEMBERS)
    with pytest.raises(ProtocolError, match="rollout/0 is not a member of the group"):
        asked(core, "rollout/0", 1, "set", "k", value=b"x")
    with pytest.raises(ProtocolError, match="malformed store.ask"):
        asked(core, "trainer/0", 1, "set", "k", value=bytes(2 << 20))


def test_a_fault_is_not_thrown_at_threads_that_only_look(tmp_path: Path) -> None:
    node = make_node("trainer/1", ["trainer/0"], tmp_path)
    store = GroupStore(node, MEMBERS, 20.0)
    node.board.fault(ReplicaLost("trainer/0 is lost"))
    with pytest.raises(ReplicaLost, match="trainer/0 is lost"):
        store.get("k")
    assert not store.check(["k"])


def test_many_that_wait_do_not_keep_the_value_away_that_they_wait_for() -> None:
    core = StoreCore(MEMBERS)
    for number in range(REMEMBERED):
        assert asked(core, "trainer/1", number, "wait", "k") == {}
    with pytest.raises(ProtocolError, match="trainer/1 waits for more than 256 answers at once"):
        asked(core, "trainer/1", REMEMBERED, "wait", "k")
    assert asked(core, "trainer/1", 0, "wait", "k") == {}, "asked again"
    assert asked(core, "trainer/0", 0, "wait", "k") == {}
    assert len(asked(core, "trainer/0", 1, "set", "k", value=b"v")) == REMEMBERED + 2


def test_a_process_group_is_made_over_the_endpoints(tmp_path: Path) -> None:
    nodes = [make_node(name, [other for other in MEMBERS if other != name], tmp_path) for name in MEMBERS]
    stores = [GroupStore(node, MEMBERS, 20.0) for node in nodes]
    for node in nodes:
        node.start()
    try:
        for node in nodes:
            with node.board.condition:
                met = lambda node=node: all(map(node.membership.present, node.membership.peers))  # noqa: E731
                assert node.board.condition.wait_for(met, 20.0)
        with ThreadPoolExecutor(2) as pool:
            groups = list(pool.map(lambda rank: _group(stores[rank], rank), range(2)))
        assert [group.size() for group in groups] == [2, 2]
        waiting = threading.Thread(target=stores[1].wait, args=(["late"],))
        waiting.start()
        stores[0].set("late", "now")
        waiting.join(20.0)
        assert (waiting.is_alive(), stores[1].get("late"), stores[1].add("n", 3)) == (False, b"now", 3)
        with pytest.raises(dist.DistStoreError, match="did not answer wait never within 0.2 s"):
            stores[1].wait(["never"], timedelta(seconds=0.2))
        assert [stores[1].check(["late"]), stores[1].check(["never"])] == [True, False]
        assert [stores[1].delete_key("late"), stores[1].delete_key("late")] == [True, False]
    finally:
        for node in nodes:
            node.close(orderly=True)
    with pytest.raises(dist.DistStoreError, match="the worker has left"):
        stores[0].get("late")
    assert not stores[0].check(["late"]), "a monitor thread of NCCL asks on, and must not be thrown at"


def _group(store: GroupStore, rank: int) -> Any:
    return dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, 2, timedelta(seconds=20))
