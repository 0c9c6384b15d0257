"""Who trains on what: the groups of a training step dealt to replicas by cost, and cut into rounds that match.

Every replica computes the same from the same lengths: those of the policy's home deal among themselves
(`deal_core.py`), and its owners to the replicas of further models (`rows_core.py`). A row of n tokens costs n + q·n²,
where q says how much attention adds (`distflow.parts.CostRule`). Groups stay whole, and with their owner as long
as it has no more than its share; the others go to whoever has least, largest first (LPT, Graham 1969). Where a model is
divided, a round lasts as long as its largest micro-batch, so in each round all replicas compute about as much as the
one that can do least in its budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from distflow.parts import CostRule, Lengths, RowPiece, sorted_pieces, take

Hand = dict[int, tuple[int, ...]]
"""The groups of one replica by position, in their order, with the micro-batch of each row."""


@dataclass(frozen=True, slots=True)
class DealRule:
    """What is dealt, and how."""

    prompts: int
    """Groups of a training step, of all replicas together."""
    ledgers: int
    cost: CostRule
    minibatches: int = 1
    """Those of a rank modulo this number are dealt by themselves."""
    streamed: bool = True
    """Deal as soon as there is enough for all replicas, and not only once everything is there."""
    divided: bool = True
    """Cut the hands into rounds, since a model is divided over the replicas."""
    pinned: bool = False
    """Nothing changes hands."""


class Offer(NamedTuple):
    """A group that may be dealt: the number of the replica that has it, or that is to have it, and its lengths."""

    owner: int
    lengths: Lengths


def deal_step(
    offers: Mapping[int, Offer], replicas: int, found: Mapping[int, int], rule: DealRule, *, even: bool = False
) -> list[Hand]:
    """The hands of the replicas: each mini-batch is dealt by itself, since they meet after it.

    `found`: the groups' `ranks`, needed for several mini-batches; `even`: see `in_rounds`.
    """
    hands, first = [Hand() for _ in range(replicas)], 0
    for part in range(rule.minibatches):
        some = {p: o for p, o in offers.items() if rule.minibatches == 1 or found[p] % rule.minibatches == part}
        dealt = deal(some, replicas, rule.cost, pinned=rule.pinned)
        cut = [Hand({p: () for p in positions}) for positions in dealt]
        if rule.divided:
            cut = in_rounds(dealt, some, rule.cost, first, even=even)
        for hand, more in zip(hands, cut, strict=True):
            hand.update(more)
            first = max([first, *(1 + number for numbers in more.values() for number in numbers)])
    return [dict(sorted(hand.items())) for hand in hands]


class DealOf(Protocol):
    """`deal_step`, or a function that gives the same."""

    def __call__(
        self, offers: Mapping[int, Offer], replicas: int, found: Mapping[int, int], rule: DealRule, *, even: bool
    ) -> list[Hand]:
        """Return the hands of the replicas."""


def deal(
    offers: Mapping[int, Offer],
    replicas: int,
    rule: CostRule,
    *,
    pinned: bool = False,
    loads: list[float] | None = None,
) -> list[list[int]]:
    """The positions that each replica trains on, in order. `pinned`: each keeps its own.

    `loads`: the cost of what each replica has already, to which what it gets is added. Without it, a replica that
    offers a group also gets one.
    """
    loads = [0.0] * replicas if loads is None else loads
    costs = {position: rule.cost(offer.lengths) for position, offer in offers.items()}
    share = (sum(loads) + sum(costs.values())) / replicas
    hands: list[list[int]] = [[] for _ in range(replicas)]
    for position in sorted(offers, key=lambda position: (-costs[position], position)):
        owner = offers[position].owner
        least = min(range(replicas), key=lambda r: (loads[r], r != owner, r))
        taker = owner if pinned or loads[owner] + costs[position] <= share else least
        hands[taker].append(position)
        loads[taker] += costs[position]
    return [sorted(hand) for hand in hands]


_Units = list[tuple[int, ...]]
"""A micro-batch: the numbers of rows that cannot be parted."""


def in_rounds(
    hands: Sequence[Sequence[int]], offers: Mapping[int, Offer], rule: CostRule, first: int = 0, *, even: bool = False
) -> list[Hand]:
    """Cut what each replica has into micro-batches, numbered from `first`; those of one number cost the same.

    With `even`, all replicas get equally many, as far as they have rows: so they begin their next hands together.
    """
    left = [sorted_pieces([offers[position].lengths for position in hand], rule) for hand in hands]
    parts: list[list[_Units]] = [[] for _ in hands]
    while any(left):
        most = min(sum(piece.cost for piece in take(list(pieces), rule)) for pieces in left if pieces)
        for pieces, cut in zip(left, parts, strict=True):
            cut += [_units(take(pieces, rule, most), rule)] if pieces else []
    rounds = max(map(len, parts)) if even else 0
    sizes = {position: len(offers[position].lengths) for hand in hands for position in hand}
    return [
        _hand(_stretched(cut, rounds), {position: sizes[position] for position in hand}, first)
        for cut, hand in zip(parts, hands, strict=True)
    ]


def _units(pieces: Sequence[RowPiece], rule: CostRule) -> _Units:
    if rule.whole_groups:
        return [piece.rows for piece in pieces]
    return [(row,) for piece in pieces for row in piece.rows]


def _stretched(parts: list[_Units], rounds: int) -> list[_Units]:
    """The same rows in at least so many micro-batches, if there are enough rows."""
    while len(parts) < rounds and (wide := [i for i, part in enumerate(parts) if len(part) > 1]):
        part = parts[wide[-1]]
        parts[wide[-1] : wide[-1] + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return parts


def _hand(parts: Sequence[_Units], sizes: Mapping[int, int], first: int) -> Hand:
    """`sizes`: the rows of each group."""
    found = {row: number for number, part in enumerate(parts, start=first) for unit in part for row in unit}
    begins = accumulate(sizes.values(), initial=0)
    return {
        position: tuple(found[row] for row in range(begin, begin + size))
        for begin, (position, size) in zip(begins, sizes.items(), strict=False)
    }


def ranks(positions: Iterable[int], ledgers: int) -> dict[int, int]:
    """The rank of each position among those of its ledger: its mini-batch is the rank modulo their number."""
    counts = [0] * ledgers
    found: dict[int, int] = {}
    for position in sorted(positions):
        found[position] = counts[position % ledgers]
        counts[position % ledgers] += 1
    return found


def in_messages(positions: Iterable[int], lengths: Mapping[int, Lengths], rule: CostRule) -> list[tuple[int, ...]]:
    """Split what one replica gets into messages of about a micro-batch."""
    pieces: list[list[int]] = []
    tokens = rule.budget
    for position in positions:
        if tokens >= rule.budget:
            pieces.append([])
            tokens = 0
        pieces[-1].append(position)
        tokens += rule.tokens(lengths[position])
    return [tuple(piece) for piece in pieces]
