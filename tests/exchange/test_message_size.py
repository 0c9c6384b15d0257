"""Leases and tokens travel in messages that every receiver accepts, however much they are in all."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from distflow.comm.message import MAX_HEADER_BYTES, encode
from distflow.errors import ProtocolError
from distflow.exchange.lease_client import HolderCore
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.lease_wire import to_wire
from distflow.exchange.messages import Again, Grant, HandBack, Lease, LeasePrompt, Outgoing, Piece, Running
from distflow.exchange.owner import OwnerCore
from distflow.types import SampleOutput, Span, Uid
from tests.exchange.lease_asker import Asker, granted
from tests.search.lease_scenario import SMALL

SAMPLES = 4
TOKENS = 2_000
GROUP = SAMPLES * TOKENS * 12
LIMIT = 4 * GROUP
SETTINGS = replace(
    SMALL,
    ledgers=2,
    groups_per_ledger=32,
    samples_per_prompt=SAMPLES,
    memory_bytes=1 << 30,
    group_bytes=lambda prompt_tokens: 2 * GROUP,
    max_prompt_tokens=10_000,
    partial_rollouts=True,
    message_bytes=LIMIT,
)
IDS = array("i", range(TOKENS)).tobytes()
LOGPROBS = array("d", [-0.5] * TOKENS).tobytes()


def new_owner(settings: LeaseSettings = SETTINGS, prompt_tokens: int = 3) -> OwnerCore:
    def prompt_at(position: int) -> LeasePrompt:
        return LeasePrompt(Uid(0, position, position), tuple(range(prompt_tokens)), f"prompt {position}", "{}")

    return OwnerCore("trainer/0", settings, range(settings.ledgers), prompt_at)


def size(item: Outgoing) -> int:
    body, payload = to_wire(item.message)
    return len(encode("kind", item.to, 0, body)) + sum(map(len, payload))


def produce(owner: OwnerCore, worker: Asker, leases: Sequence[Lease]) -> None:
    held = [lease.position for lease in leases]
    for position in held:
        pieces = [Piece(position, s, 0, IDS, LOGPROBS, (Span(0, 0, 0, TOKENS),), "") for s in range(SAMPLES)]
        report = [Running(p, TOKENS, 0) for p in held]
        out = worker.progress(report, seen=99, now=1.0, pieces=pieces)
        assert not [item for item in out if isinstance(item.message, Again)]


def leased_in_turn(owner: OwnerCore, worker: Asker, groups: int) -> list[Lease]:
    """Ask, and confirm each grant with the next ask, as a worker does; every message has its bound."""
    leases: list[Lease] = []
    for seen in range(2 * groups):
        out = worker.ask(groups - len(leases), [lease.position for lease in leases], seen, now=3.0)
        assert all(size(item) <= LIMIT + GROUP + 10_000 for item in out)
        leases += granted(out)
        if len(leases) == groups:
            return leases
    raise AssertionError(f"only {len(leases)} of {groups} leases came")


def test_what_a_worker_had_begun_comes_back_in_grants_of_bounded_size() -> None:
    """A worker with 64 groups dies and comes back: all its tokens are granted to it again, a few groups at a time."""
    owner = new_owner()
    first = Asker(owner)
    leases = granted(first.ask(64))
    assert len(leases) == 64
    produce(owner, first, leases)
    owner.worker_lost("rollout/0", 0, 2.0)
    again = leased_in_turn(owner, Asker(owner, incarnation=1), 64)
    assert [lease.position for lease in again] == [lease.position for lease in leases], "in k order"
    assert all(sum(len(sample.token_ids) for sample in lease.begun) == SAMPLES * TOKENS for lease in again)
    assert {lease.attempt for lease in again} == {2}, "nothing was leased and taken back"


def test_tokens_lie_beside_the_header_not_in_it() -> None:
    owner = new_owner()
    worker = Asker(owner)
    produce(owner, worker, granted(worker.ask(2)))
    owner.worker_lost("rollout/0", 0, 2.0)
    (grant,) = Asker(owner, incarnation=1).ask(2)
    body, payload = to_wire(grant.message)
    assert [len(frame) for frame in payload] == [2 * (GROUP + 3 * 4)]
    assert len(encode("grant", "trainer/0", 0, body)) < 1000


def test_long_prompts_are_granted_in_messages_of_bounded_size() -> None:
    settings = replace(SETTINGS, groups_per_ledger=500)
    owner = new_owner(settings, prompt_tokens=8_000)
    leases = leased_in_turn(owner, Asker(owner), 1000)
    assert [lease.position for lease in leases] == list(range(1000))
    assert leases[999].prompt_ids == tuple(range(8_000))


def test_grants_that_may_still_be_on_their_way_count_as_well() -> None:
    """A worker that asks on and on without saying what has arrived gets no more than one message's worth."""
    owner = new_owner(replace(SETTINGS, groups_per_ledger=500), prompt_tokens=8_000)
    worker = Asker(owner)
    sent = [item for _ in range(50) for item in worker.ask(1000) if isinstance(item.message, Grant)]
    assert sum(map(size, sent)) <= LIMIT + 8_000 * 4 + 1000
    again = [item for item in owner.tick(10.0) if isinstance(item.message, Grant)]
    assert sum(map(size, again)) <= LIMIT + 8_000 * 4 + 1000
    more = worker.ask(1000, [lease.position for lease in granted(sent)], seen=len(sent), now=11.0)
    assert granted(more), "once it has said so, it gets the next ones"


def test_copies_of_silent_workers_groups_are_granted_in_messages_of_bounded_size() -> None:
    owner = new_owner(replace(SETTINGS, hedging=True, silence_s=5.0))
    silent, other = Asker(owner), Asker(owner, "rollout/1")
    produce(owner, silent, granted(silent.ask(64)))
    owner.tick(100.0)
    copies = leased_in_turn(owner, other, 64)
    assert all(lease.copy for lease in copies)


def test_a_grant_that_has_grown_is_sent_again_with_as_many_leases_as_fit() -> None:
    """Copies whose first holders go on producing while the grant of the copies is lost on its way."""
    owner = new_owner(replace(SETTINGS, hedging=True, silence_s=5.0))
    first, other = Asker(owner), Asker(owner, "rollout/1")
    leases = granted(first.ask(64))
    first.progress([Running(lease.position, 0, 0) for lease in leases], seen=1, now=1.0)
    owner.tick(100.0)
    (grant,) = other.ask(64, now=100.0)
    assert len(grant.message.leases) == 64
    produce(owner, first, leases)
    again = [item for item in owner.tick(200.0) if item.to == "rollout/1" and isinstance(item.message, Grant)]
    assert sum(map(size, again)) <= LIMIT + GROUP + 10_000
    assert 0 < sum(len(item.message.leases) for item in again) <= 5


def outputs(position: int) -> list[SampleOutput]:
    tokens, logprobs = tuple(range(TOKENS)), (-0.5,) * TOKENS
    spans = (Span(0, 0, 0, TOKENS),)
    return [SampleOutput(position, sample, tokens, logprobs, spans, "abort") for sample in range(SAMPLES)]


def test_a_worker_that_leaves_hands_its_tokens_back_in_messages_of_bounded_size() -> None:
    owner = new_owner()
    holder = HolderCore("rollout/0", 0, ["trainer/0"], SETTINGS)
    pending = holder.want(SAMPLES * 15, 0.0)
    pending = holder.handle(owner.handle(pending[0].message, 0.0)[0].message, 0.0)
    leases = holder.take_granted()
    assert len(leases) == 16
    for lease in leases:
        holder.produced(outputs(lease.position))
    backs: list[Outgoing] = []
    pending = holder.hand_back(1.0)
    for _ in range(100):
        answers = [answer for item in pending for answer in owner.handle(item.message, 1.0)]
        backs += [item for item in pending if isinstance(item.message, HandBack)]
        pending = [item for answer in answers for item in holder.handle(answer.message, 1.0)]
    assert not holder.held(), "one follows upon another, without a tick in between"
    assert len(backs) > 1
    assert max(map(size, backs)) <= LIMIT + 10_000
    assert sorted(p for item in backs for p in item.message.positions) == [lease.position for lease in leases]
    kept = [
        sum(len(s.token_ids) for s in lease.begun) for lease in leased_in_turn(owner, Asker(owner, "rollout/1"), 16)
    ]
    assert kept == [SAMPLES * TOKENS] * 16


def test_a_header_that_no_receiver_accepts_is_refused_by_its_sender() -> None:
    with pytest.raises(ProtocolError, match=r"a 'note' message with a header of \d+ bytes cannot be sent"):
        encode("note", "rollout/0", 0, {"text": "x" * MAX_HEADER_BYTES})
