from dataclasses import replace
from itertools import pairwise

import pytest

from distflow.comm.membership import Identity, Joined, Lost, MemberMessage, Membership
from distflow.errors import ProtocolError, RecipeMismatch


def make(
    name: str, peers: list[str], digest: str = "d", alive: bool = True, incarnation: int = 0, site: str = ""
) -> Membership:
    me = Identity(name, incarnation, 100, 1.0, digest, {"batch": digest}, 0, site)
    return Membership(me, peers, lambda pid, started: alive)


def deliver(out: list[MemberMessage], sender: Membership, to: Membership, now: float) -> tuple[list, list]:
    replies, events = [], []
    for item in out:
        if item.to == to.me.name:
            more, found = to.handle(item.kind, sender.me.name, sender.me.incarnation, item.body, now)
            replies += more
            events += found
    return replies, events


def introduce(a: Membership, b: Membership, now: float = 0.0) -> None:
    out, _ = a.tick(now, 0, {})
    replies, _ = deliver(out, a, b, now)
    deliver(replies, b, a, now)


def test_a_peer_is_afar_once_it_has_said_that_it_stands_elsewhere() -> None:
    stand = {"a/0": "x", "b/0": "y", "c/0": "x"}
    near, far, here = (make(name, ["trainer/0"], site=site) for name, site in stand.items())
    trainer = make("trainer/0", ["a/0", "b/0", "c/0"], site="x")
    assert not trainer.afar("b/0"), "nothing is known of it"
    for peer in (near, far, here):
        introduce(peer, trainer)
    assert [trainer.afar(name) for name in ("a/0", "b/0", "c/0", "nobody/0")] == [False, True, False, False]
    assert far.afar("trainer/0")


def test_hello_and_welcome_make_both_present() -> None:
    rollout, trainer = make("rollout/0", ["trainer/0"]), make("trainer/0", ["rollout/0"])
    out, _ = rollout.tick(0.0, 0, {})
    replies, events = deliver(out, rollout, trainer, 0.0)
    assert events == [Joined("rollout/0", 0)]
    _, events = deliver(replies, trainer, rollout, 0.0)
    assert events == [Joined("trainer/0", 0)]
    assert rollout.present("trainer/0")
    assert trainer.accepts("rollout/0", 0, 0.1)


def test_a_stranger_and_an_old_life_are_not_accepted() -> None:
    trainer = make("trainer/0", ["rollout/0"])
    assert not trainer.accepts("rollout/0", 0, 0.0)
    assert not trainer.accepts("rollout/9", 0, 0.0)
    introduce(make("rollout/0", ["trainer/0"], incarnation=2), trainer)
    assert not trainer.accepts("rollout/0", 1, 0.0)
    assert trainer.accepts("rollout/0", 2, 0.0)


def test_another_recipe_is_refused_on_both_sides_and_the_difference_named() -> None:
    rollout, trainer = make("rollout/0", ["trainer/0"], digest="x"), make("trainer/0", ["rollout/0"], digest="y")
    out, _ = rollout.tick(0.0, 0, {})
    replies, _ = deliver(out, rollout, trainer, 0.0)
    assert [reply.kind for reply in replies] == ["refused"]
    with pytest.raises(RecipeMismatch, match="different recipes: they differ in batch"):
        deliver(replies, trainer, rollout, 0.0)
    assert not trainer.present("rollout/0")


def test_the_odd_one_out_does_not_end_those_who_agree() -> None:
    trainer, odd = make("trainer/0", ["rollout/0", "rollout/1"]), make("rollout/1", ["trainer/0"], digest="x")
    introduce(make("rollout/0", ["trainer/0"]), trainer)
    greeting = [item for item in trainer.tick(1.0, 0, {})[0] if item.kind == "hello"]
    refusal, _ = deliver(greeting, trainer, odd, 1.0)
    assert [item.kind for item in refusal] == ["refused"]
    assert deliver(refusal, odd, trainer, 1.0) == ([], [])
    replies, _ = deliver(odd.tick(1.0, 0, {})[0], odd, trainer, 1.0)
    with pytest.raises(RecipeMismatch, match="they differ in batch"):
        deliver(replies, trainer, odd, 1.0)


def test_silence_is_no_death_while_the_process_lives() -> None:
    trainer = make("trainer/0", ["rollout/0"], alive=True)
    introduce(make("rollout/0", ["trainer/0"]), trainer)
    _, events = trainer.tick(3600.0, 0, {})
    assert events == []


def test_silence_and_no_process_is_a_death() -> None:
    trainer = make("trainer/0", ["rollout/0"], alive=False)
    introduce(make("rollout/0", ["trainer/0"]), trainer)
    _, events = trainer.tick(2.0, 0, {})
    assert events == []
    _, events = trainer.tick(10.0, 0, {})
    assert events == [Lost("rollout/0", 0, "its process is gone")]
    _, events = trainer.tick(20.0, 0, {})
    assert events == []


def test_a_report_of_death_counts_once_and_not_for_a_newer_life() -> None:
    trainer = make("trainer/0", ["rollout/0"])
    introduce(make("rollout/0", ["trainer/0"], incarnation=1), trainer)
    stale = {"worker": "rollout/0", "incarnation": 0, "reason": "killed"}
    assert trainer.handle("lost", "agent/0", 0, stale, 1.0) == ([], [])
    report = {**stale, "incarnation": 1}
    assert trainer.handle("lost", "agent/0", 0, report, 1.0)[1] == [Lost("rollout/0", 1, "killed")]
    assert trainer.handle("lost", "agent/0", 0, report, 1.0)[1] == []


def test_a_new_life_replaces_the_old_one() -> None:
    trainer = make("trainer/0", ["rollout/0"])
    introduce(make("rollout/0", ["trainer/0"]), trainer)
    out, _ = make("rollout/0", ["trainer/0"], incarnation=1).tick(1.0, 0, {})
    _, events = trainer.handle("hello", "rollout/0", 1, out[0].body, 1.0)
    assert events == [Lost("rollout/0", 0, "a newer incarnation of it has started"), Joined("rollout/0", 1)]


def test_a_beat_from_an_unknown_life_is_answered_by_a_hello() -> None:
    trainer = make("trainer/0", ["rollout/0"])
    out, _ = trainer.handle("beat", "rollout/0", 0, {"progress": 1, "facts": {}}, 0.0)
    assert [item.kind for item in out] == ["hello"]


def test_it_is_news_when_a_peer_tells_other_facts() -> None:
    """What it has counted, say: heartbeats alone are no sign of progress."""
    rollout, trainer = make("rollout/0", ["trainer/0"]), make("trainer/0", ["rollout/0"])
    introduce(rollout, trainer)
    news = []
    for judged in (0, 0, 3, 3, 4):
        facts = {"state": "generating", "counts": {"reward/samples": judged}}
        trainer.handle("beat", "rollout/0", 0, {"progress": 7, "facts": facts}, 1.0)
        news.append(trainer.news)
    assert news == [1, 1, 2, 2, 3]


def test_leaving_in_order_is_told_apart() -> None:
    rollout, trainer = make("rollout/0", ["trainer/0"]), make("trainer/0", ["rollout/0"])
    introduce(rollout, trainer)
    _, events = deliver(rollout.leave(), rollout, trainer, 1.0)
    assert events == [Lost("rollout/0", 0, "it left the run", orderly=True)]
    assert trainer.handle("lost", "agent/0", 0, {"worker": "rollout/0", "incarnation": 0, "reason": "0"}, 2.0)[1] == []


def test_malformed_messages_name_the_field() -> None:
    trainer = make("trainer/0", ["rollout/0"])
    with pytest.raises(ProtocolError, match="malformed hello: Object missing required field `digest`"):
        trainer.handle("hello", "rollout/0", 0, {}, 0.0)


def test_a_peer_on_another_host_says_itself_where_it_listens() -> None:
    trainer = make("trainer/0", ["rollout/0", "rollout/1"])
    near, far = make("rollout/0", ["trainer/0"]), make("rollout/1", ["trainer/0"])
    far.me = replace(far.me, host=1)
    near.address, far.address = "tcp://10.0.0.1:1", "tcp://10.0.0.2:2"
    introduce(near, trainer)
    introduce(far, trainer)
    # On the same host a Unix socket is the better way.
    assert (trainer.elsewhere("rollout/0"), trainer.elsewhere("rollout/1")) == (None, "tcp://10.0.0.2:2")
    trainer.handle("left", "rollout/1", 0, {}, 1.0)
    assert trainer.elsewhere("rollout/1") is None


def greetings(membership: Membership, begin: float, seconds: float) -> list[float]:
    """When a worker greets its one peer, with four ticks a second."""
    times = [begin + 0.25 * n for n in range(int(4 * seconds))]
    return [now for now in times if any(item.kind == "hello" for item in membership.tick(now, 0, {})[0])]


def test_a_peer_that_is_not_there_is_greeted_ever_more_rarely() -> None:
    trainer = make("trainer/0", ["rollout/0"])
    times = greetings(trainer, 0.0, 60.0)
    assert times[:5] == [0.0, 0.25, 0.75, 1.75, 3.75]
    assert {later - earlier for earlier, later in pairwise(times[5:])} == {4.0}
    trainer.greet("rollout/0")
    assert greetings(trainer, 60.0, 1.0) == [60.0, 60.25, 60.75], "its address has become known"


def test_a_peer_that_left_in_order_is_not_greeted_and_may_come_back() -> None:
    trainer, rollout = make("trainer/0", ["rollout/0"]), make("rollout/0", ["trainer/0"])
    introduce(rollout, trainer)
    deliver(rollout.leave(), rollout, trainer, 1.0)
    assert greetings(trainer, 1.0, 1000.0) == []
    introduce(make("rollout/0", ["trainer/0"], incarnation=1), trainer, 1001.0)
    assert trainer.present("rollout/0")


def test_a_peer_that_died_is_greeted_until_it_comes_back() -> None:
    trainer, rollout = make("trainer/0", ["rollout/0"]), make("rollout/0", ["trainer/0"])
    introduce(rollout, trainer)
    trainer.handle("lost", "agent/0", 0, {"worker": "rollout/0", "incarnation": 0, "reason": "killed"}, 1.0)
    assert greetings(trainer, 1.0, 1.0) == [1.0, 1.25, 1.75]
