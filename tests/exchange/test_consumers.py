"""Named consumers of an owner's samples: who gets which group, what is kept, and what happens when clients die."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from distflow.errors import ProtocolError
from distflow.exchange.consumer_types import ConsumerCounts, Handed, Offered, SamplesWanted
from distflow.exchange.consumers import (
    ABANDONED_SILENCES,
    ANSWER_BYTES,
    ANSWER_GROUPS,
    REMEMBERED,
    REMEMBERED_SILENCES,
    Consumers,
)

LIMIT = 1000
SILENCE_S = 10.0


def group(nbytes: int = 100, rows: int = 8, tokens: int = 80, fields: Iterable[str] = ("text",)) -> Offered:
    return Offered(rows, tokens, nbytes, frozenset(fields))


def wanted(
    consumer: str = "reader",
    fields: tuple[str, ...] = ("text",),
    *,
    rows: int = 0,
    tokens: int = 0,
    lossless: bool = False,
    holds: bool = False,
) -> SamplesWanted:
    return SamplesWanted(consumer, fields, lossless, rows, tokens, holds)


def positions(answers: Iterable[Handed]) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(answer.client, answer.number, answer.positions) for answer in answers]


@pytest.fixture
def store() -> Consumers:
    return Consumers(LIMIT, SILENCE_S)


def test_an_ask_is_answered_when_something_arrives(store: Consumers) -> None:
    assert store.ask("a", 1, wanted(), 0.0) == []
    answers = store.arrived({7: group()})
    assert positions(answers) == [("a", 1, (7,))]
    assert answers[0].tokens == 80
    assert store.settle("a", "reader", [1], [], 0.0) == ([], [])
    assert not store.kept


def test_what_arrives_before_a_consumer_is_opened_is_not_for_it(store: Consumers) -> None:
    store.arrived({1: group()})
    assert not store.kept
    store.ask("a", 1, wanted(), 0.0)
    assert positions(store.arrived({2: group()})) == [("a", 1, (2,))]


def test_an_answer_reaches_what_is_wanted_with_whole_groups(store: Consumers) -> None:
    store.ask("a", 1, wanted(), 0.0)
    store.arrived({0: group()})
    store.arrived({n: group() for n in range(1, 8)})
    assert positions(store.ask("a", 2, wanted(rows=20), 0.0)) == [("a", 2, (1, 2, 3))]
    assert positions(store.ask("a", 3, wanted(tokens=160), 0.0)) == [("a", 3, (4, 5))]
    assert positions(store.ask("a", 4, wanted(), 0.0)) == [("a", 4, (6, 7))]


def test_an_answer_is_bounded_in_bytes() -> None:
    store = Consumers(1 << 40, SILENCE_S)
    store.ask("a", 1, wanted("other"), 0.0)
    store.ask("a", 2, wanted(), 0.0)
    store.arrived({0: group()})
    store.arrived({n: group(ANSWER_BYTES // 2) for n in range(1, 5)} | {5: group(2 * ANSWER_BYTES)})
    assert positions(store.ask("a", 3, wanted(), 0.0)) == [("a", 3, (1, 2))]
    assert positions(store.ask("a", 4, wanted(), 0.0)) == [("a", 4, (3, 4))]
    assert positions(store.ask("a", 5, wanted(), 0.0)) == [("a", 5, (5,))], "one that is larger goes alone"


def test_consumers_are_independent_and_clients_of_one_share(store: Consumers) -> None:
    store.ask("a", 1, wanted(rows=8), 0.0)
    store.ask("b", 1, wanted(rows=8), 0.0)
    store.ask("c", 1, wanted("other", rows=8), 0.0)
    answers = store.arrived({0: group(), 1: group()})
    assert sorted(positions(answers)) == [("a", 1, (0,)), ("b", 1, (1,)), ("c", 1, (0,))]
    assert positions(store.ask("c", 2, wanted("other", rows=8), 0.0)) == [("c", 2, (1,))]


def test_a_repeated_ask_gets_the_same_claim_and_nothing_once_it_is_settled(store: Consumers) -> None:
    store.ask("a", 1, wanted(), 0.0)
    (first,) = store.arrived({0: group()})
    assert store.ask("a", 1, wanted(), 0.0) == [first]
    store.settle("a", "reader", [1], [], 0.0)
    assert store.ask("a", 1, wanted(), 0.0) == []
    assert store.arrived({1: group()}) == [], "nobody waits: the ask was answered"


def test_an_acknowledgement_may_be_repeated(store: Consumers) -> None:
    store.ask("a", 1, wanted(), 0.0)
    store.arrived({0: group()})
    assert store.settle("a", "reader", [1], [], 0.0) == ([], [])
    assert store.settle("a", "reader", [1], [], 0.0) == ([], [])
    assert store.settle("a", "reader", [2], [], 0.0) == ([2], []), "one that was never handed out is stale"


def test_only_so_many_acknowledgements_are_remembered(store: Consumers) -> None:
    for number in range(1, REMEMBERED + 3):
        store.ask("a", number, wanted(), 0.0)
        store.arrived({number: group()})
        store.settle("a", "reader", [number], [], 0.0)
    assert store.settle("a", "reader", [1, REMEMBERED + 2], [], 0.0)[0] == [1]


@pytest.mark.parametrize("how", ["silent", "leaves", "gives back"])
def test_what_a_client_does_not_use_goes_to_another_first(store: Consumers, how: str) -> None:
    store.ask("a", 1, wanted(rows=16), 0.0)
    store.ask("b", 1, wanted("other"), 0.0)
    store.arrived({0: group(), 1: group(), 2: group()})
    store.ask("b", 2, wanted(rows=8), SILENCE_S)
    store.settle("b", "reader", [2], [], SILENCE_S)
    assert store.ask("b", 3, wanted(rows=24), SILENCE_S) == []
    if how == "silent":
        assert store.tick(SILENCE_S) == []
        answers = store.tick(SILENCE_S + 0.1)
    elif how == "leaves":
        answers = store.leave("a")
    else:
        answers = store.settle("a", "reader", [], [1], SILENCE_S)[1]
    assert positions(answers) == [("b", 3, (0, 1))]
    assert store.settle("a", "reader", [1], [], SILENCE_S)[0] == [1], "the first client hears that it is too late"


def test_a_client_that_gives_signs_of_life_keeps_its_claims(store: Consumers) -> None:
    store.ask("a", 1, wanted(), 0.0)
    store.arrived({0: group()})
    for second in range(1, 30):
        store.alive("a", float(second))
        assert store.tick(second + 0.5) == []
    assert store.settle("a", "reader", [1], [], 30.0) == ([], [])


def test_a_silent_client_keeps_what_nobody_else_wants(store: Consumers) -> None:
    store.ask("a", 1, wanted(), 0.0)
    store.arrived({0: group()})
    assert store.tick(3600.0) == []
    assert store.settle("a", "reader", [1], [], 3600.0) == ([], [])
    store.ask("a", 2, wanted(), 3600.0)
    store.arrived({1: group(), 2: group()})
    assert store.tick(7200.0) == []
    assert positions(store.ask("b", 1, wanted(), 7200.0)) == [("b", 1, (1, 2))]
    assert store.settle("a", "reader", [2], [], 7200.0)[0] == [2]
    assert store.counts()[0].clients == 2
    assert store.tick(7200.0 + (REMEMBERED_SILENCES + 1) * SILENCE_S) == []
    assert (store.knows("a"), store.knows("b")) == (False, True), "it holds something"


def test_a_living_client_that_the_owner_waits_for_is_a_sign_of_life(store: Consumers) -> None:
    store.ask("a", 1, wanted(lossless=True), 0.0)
    store.arrived({0: group()})
    store.alive("a", 1.0)
    assert store.signs == 0, "nothing waits for it"
    store.arrived({1: group(LIMIT)})
    store.alive("a", 2.0)
    assert store.signs == 1
    store.alive("b", 2.0)
    assert store.signs == 1, "nobody knows this one"


def test_the_oldest_unclaimed_groups_are_let_go_at_the_bound(store: Consumers) -> None:
    store.ask("a", 1, wanted(), 0.0)
    store.arrived({0: group(600)})
    store.arrived({1: group(300), 2: group(300), 3: group(300)})
    assert set(store.kept) == {0, 3}, "what is claimed stays"
    (answer,) = store.ask("a", 2, wanted(), 0.0)
    assert (answer.positions, answer.missed) == ((3,), 2)


def test_a_lossless_consumer_holds_up_until_it_has_read(store: Consumers) -> None:
    store.ask("a", 1, wanted(lossless=True), 0.0)
    store.arrived({0: group(400)})
    store.arrived({1: group(400)})
    assert store.held_up_by == ""
    store.arrived({2: group(400), 3: group(400)})
    assert store.held_up_by == "reader"
    assert set(store.kept) == {0, 1, 2, 3}, "what was under way is kept too"
    store.settle("a", "reader", [1], [], 0.0)
    store.ask("a", 2, wanted(rows=16, lossless=True), 0.0)
    assert store.held_up_by == "reader"
    store.settle("a", "reader", [2], [], 0.0)
    assert store.held_up_by == ""


def test_counts_tell_how_far_each_consumer_is(store: Consumers) -> None:
    store.ask("a", 1, wanted(rows=8), 0.0)
    store.ask("b", 1, wanted("other", ("text", "ref"), lossless=True), 0.0)
    store.arrived({n: group(400) for n in range(4)})
    assert store.counts() == [
        ConsumerCounts("reader", lossless=False, unread=1, claimed=1, missed=2, clients=1, kept_bytes=800),
        ConsumerCounts("other", lossless=True, unread=4, claimed=0, missed=0, clients=1, kept_bytes=1600),
    ]
    store.leave("a")
    reader = store.counts()[0]
    assert (reader.unread, reader.claimed, reader.clients) == (2, 0, 0)


def test_a_group_is_ready_when_all_fields_are_there(store: Consumers) -> None:
    store.ask("a", 1, wanted(fields=("text", "ref")), 0.0)
    assert store.arrived({0: group(), 1: group()}) == []
    assert store.gained(0, ["value"]) == []
    assert positions(store.gained(1, ["ref"])) == [("a", 1, (1,))]
    store.left([0, 1])
    assert set(store.kept) == {1}, "0 will not get the field any more"
    (answer,) = store.ask("a", 1, wanted(fields=("text", "ref")), 0.0)
    assert answer.missed == 1


def test_a_consumer_cannot_be_opened_for_something_else(store: Consumers) -> None:
    store.ask("a", 1, wanted(), 0.0)
    with pytest.raises(ProtocolError, match=r"consumer 'reader' reads \['text'\], not lossless"):
        store.ask("b", 1, wanted(fields=("ref",)), 0.0)
    with pytest.raises(ProtocolError, match="another name for the consumer"):
        store.ask("b", 1, wanted(lossless=True), 0.0)


def test_a_forgotten_consumer_keeps_nothing_and_its_readers_hear_of_it(store: Consumers) -> None:
    store.ask("a", 1, wanted(lossless=True), 0.0)
    store.ask("b", 1, wanted("other"), 0.0)
    store.arrived({n: group(400) for n in range(4)})
    store.ask("c", 1, wanted(rows=1, lossless=True), 0.0)
    store.settle("b", "other", [1], [], 0.0)
    assert store.held_up_by == "reader"
    assert [(answer.client, answer.end) for answer in store.forget("reader")] == [("c", "closed")]
    assert (store.held_up_by, store.kept) == ("", {})
    assert store.ask("d", 1, wanted(), 0.0) == [], "it may be opened in another way"


def test_a_consumer_that_the_owner_waits_for_gets_every_group_and_stays(store: Consumers) -> None:
    store.open("labels", ("text", "task"))
    store.arrived({0: group(fields=("text", "task"))})
    assert store.unread() == ["labels"]
    (answer,) = store.ask("a", 1, wanted("labels", ("text",)), 0.0)
    assert answer.positions == store.claimed("a", "labels", 1) == (0,)
    assert store.claimed("b", "labels", 1) == store.claimed("a", "other", 1) == ()
    with pytest.raises(ProtocolError, match=r"step 'labels' shows clients \['task', 'text'\], and not \['ref'\]"):
        store.ask("b", 1, wanted("labels", ("ref", "text")), 0.0)
    with pytest.raises(ProtocolError, match="waits for what clients write"):
        store.forget("labels")
    assert store.settle("a", "labels", [1], [], 0.0) == ([], [])
    assert store.claimed("a", "labels", 1) == ()


@pytest.mark.parametrize("lossless", [True, False])
def test_a_client_that_waits_for_more_than_is_kept_hears_so(store: Consumers, *, lossless: bool) -> None:
    def ask(number: int, *, holds: bool) -> list[Handed]:
        return store.ask("a", number, wanted(rows=1000, lossless=lossless, holds=holds), 0.0)

    ask(1, holds=False)
    assert positions(store.arrived({n: group() for n in range(9)})) == [("a", 1, tuple(range(9)))]
    ask(2, holds=True)
    assert positions(store.arrived({9: group()})) == [("a", 2, (9,))]
    told = ask(3, holds=True) or store.arrived({10: group()})
    assert [(answer.number, answer.positions, answer.end) for answer in told] == [(3, (), "full")]
    assert store.settle("a", "reader", [1, 2], [], 0.0) == ([], [])
    assert ask(4, holds=True) == [], "there is room again"
    assert store.held_up_by == ""
    assert positions(store.arrived({11: group()})) == [("a", 4, (11,))]


def test_what_a_step_waits_for_is_bounded_by_its_owner_alone(store: Consumers) -> None:
    store.open("labels", ["text"])
    store.ask("a", 1, wanted("labels"), 0.0)
    store.arrived({n: group() for n in range(10)})
    assert store.held_up_by == ""
    assert store.ask("a", 2, wanted("labels", holds=True), 0.0) == []
    assert positions(store.arrived({10: group()})) == [("a", 2, (10,))]
    assert store.settle("a", "labels", [1, 2], [], 0.0)[0] == []
    signs = store.signs
    store.arrived({11: group()})
    store.alive("a", 1.0)
    assert store.signs == signs + 1, "the run waits for what is written, for as long as its client is there"


def test_a_consumer_that_nobody_reads_is_closed_unless_it_is_lossless(store: Consumers) -> None:
    store.open("labels", ["text"])
    store.ask("a", 1, wanted("left"), 0.0)
    store.ask("b", 1, wanted("silent"), 0.0)
    store.ask("c", 1, wanted("kept", lossless=True), 0.0)
    store.ask("d", 1, wanted("read"), 0.0)
    assert len(store.arrived({0: group()})) == 4
    assert store.settle("a", "left", [1], [], 0.0)[0] == []
    for client in ("a", "c"):
        store.leave(client)
    limit = REMEMBERED_SILENCES * SILENCE_S
    for now in (limit, limit + SILENCE_S):
        store.alive("d", now)
        store.tick(now)
    assert len(store.counts()) == 5
    store.ask("e", 1, wanted("left"), limit + SILENCE_S)
    for now in (limit + SILENCE_S + 1, 2 * limit + 2 * SILENCE_S):
        store.alive("d", now)
        store.alive("e", now)
        store.tick(now)
    assert [one.name for one in store.counts()] == ["labels", "left", "silent", "kept", "read"], "it has a claim"
    store.ask("e", 2, wanted("left"), (ABANDONED_SILENCES + 40) * SILENCE_S)
    store.tick((ABANDONED_SILENCES + 40) * SILENCE_S)
    assert [one.name for one in store.counts()] == ["labels", "left", "kept", "read"]
    assert store.settle("b", "silent", [1], [], 1e6)[0] == [1], "its claims went with it"


def test_a_lossless_consumer_goes_on_with_what_it_had_to_acknowledge(store: Consumers) -> None:
    store.ask("a", 1, wanted(rows=8, lossless=True), 0.0)
    store.ask("b", 1, wanted("other"), 0.0)
    store.open("labels", ("text",))
    store.arrived({n: group(400) for n in range(3)})
    assert store.lossless() == {"reader": ("text",)}
    assert store.unacknowledged("reader") == [0, 1, 2]
    again = Consumers(LIMIT, SILENCE_S)
    again.restore("reader", ("text",), {n: group(400) for n in (0, 2)})
    assert (again.unread(), again.held_up_by) == (["reader"], "")
    assert again.arrived({1: group(400)}) == []
    assert again.held_up_by == "reader"
    assert positions(again.ask("b", 1, wanted(lossless=True), 0.0)) == [("b", 1, (0, 2, 1))]


def test_the_end_is_told_when_nothing_is_left(store: Consumers) -> None:
    store.ask("a", 1, wanted(rows=8), 0.0)
    store.ask("b", 1, wanted(rows=8), 0.0)
    store.arrived({0: group(), 1: group()})
    assert store.finish() == []
    assert store.unread() == ["reader"]
    assert store.ask("a", 2, wanted(), 0.0) == [], "b may still give its group back"
    assert [answer.end for answer in store.ask("a", 2, wanted(holds=True), 0.0)] == ["drained"]
    store.ask("a", 3, wanted(), 0.0)
    assert positions(store.leave("b")) == [("a", 3, (1,))]
    assert [answer.end for answer in store.ask("a", 4, wanted(), 0.0)] == ["over"], "the rest is its own"
    store.settle("a", "reader", [1, 3], [], 0.0)
    assert store.unread() == []


def test_whoever_waits_hears_of_the_end_of_an_owner(store: Consumers) -> None:
    store.ask("a", 1, wanted(), 0.0)
    store.arrived({0: group()})
    store.ask("b", 1, wanted(), 0.0)
    assert [(answer.client, answer.end) for answer in store.close()] == [("b", "over")]


def test_an_ask_that_is_repeated_after_its_claim_was_taken_back_gets_no_other_groups(store: Consumers) -> None:
    """Its first answer may be on its way still: the client would acknowledge what it has never seen."""
    store.ask("a", 1, wanted(lossless=True), 0.0)
    (first,) = store.arrived({7: group()})
    store.tick(SILENCE_S + 1)
    store.ask("b", 1, wanted(lossless=True), SILENCE_S + 1)
    store.arrived({8: group()})
    (void,) = store.ask("a", 1, wanted(lossless=True), SILENCE_S + 2, again=True)
    assert (void.number, void.positions, void.end) == (first.number, (), "void")
    assert store.settle("a", "reader", [1], [], SILENCE_S + 2)[0] == [1]
    assert positions(store.ask("a", 2, wanted(lossless=True), SILENCE_S + 2)) == [("a", 2, (8,))]


def test_an_acknowledgement_is_known_after_a_silence(store: Consumers) -> None:
    store.ask("a", 1, wanted(), 0.0)
    store.arrived({1: group()})
    assert store.settle("a", "reader", [1], [], 0.0) == ([], [])
    store.tick(SILENCE_S + 1)
    assert store.settle("a", "reader", [1], [], SILENCE_S + 2) == ([], [])


def test_a_group_keeps_the_message_that_it_came_in(store: Consumers) -> None:
    """And what is written about it later."""

    def kept() -> int:
        return store.counts()[0].kept_bytes

    store.ask("a", 1, wanted(rows=8, lossless=True), 0.0)
    of_one_message = group(100)._replace(message=(1, 700))
    answers = store.arrived({0: of_one_message, 1: of_one_message, 2: group(200)})
    assert positions(answers) == [("a", 1, (0,))]
    assert kept() == 700 + 200
    store.gained(0, ["ref"], 50)
    store.gained(9, ["ref"], 50)
    assert kept() == 950
    store.settle("a", "reader", [1], [], 0.0)
    assert kept() == 900, "the other group of the message is there"
    store.ask("a", 2, wanted(rows=8, lossless=True), 0.0)
    store.settle("a", "reader", [2], [], 0.0)
    assert kept() == 200


def test_a_consumer_that_may_lose_groups_is_bounded_by_their_messages(store: Consumers) -> None:
    store.ask("a", 1, wanted(rows=8), 0.0)
    store.arrived({n: group(10)._replace(message=(n, 400)) for n in range(3)})
    assert (store.counts()[0].kept_bytes, store.counts()[0].missed) == (800, 1)


def test_an_answer_is_small(store: Consumers) -> None:
    """It is made where peers wait."""
    store.ask("a", 1, wanted("all", lossless=True), 0.0)
    store.arrived({0: group(1)})
    store.arrived({n: group(1) for n in range(1, 200)})
    (answer,) = store.ask("a", 2, wanted("all", lossless=True), 0.0)
    assert len(answer.positions) == ANSWER_GROUPS
