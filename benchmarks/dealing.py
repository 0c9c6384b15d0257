"""How evenly the groups of a training step are dealt: time of the slowest replica, and of rounds, beside equal shares.

    python -m benchmarks dealing

4 owners deal to the 4 replicas of a critic, and among themselves; 8 samples a prompt, lognormal lengths (median 2,000,
σ 1, at most 16,384 and a prompt of 500 tokens), alike within a group. A row of n tokens takes n + q·n² with the q of a
model of 7 billion parameters, and a micro-batch holds 18,432. Nothing is run: the figures are those of the deals.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from statistics import mean

from distflow.exchange.dealing import DealRule, Hand, Offer, deal_step, ranks
from distflow.exchange.rows_core import RowsSender
from distflow.parts import CostRule, Lengths, unshared, whole_lengths

OWNERS, LEDGERS, SAMPLES = 4, 8, 8
COST = CostRule(18432, 28 * 3584 / 6.5e9)
CRITICS = [f"critic/{i}" for i in range(OWNERS)]


def lengths_of(prompts: int, seed: int) -> dict[int, Lengths]:
    """Tokens of each sample, by prompt position."""
    rng = random.Random(seed)
    found: dict[int, Lengths] = {}
    for position in range(prompts):
        base = rng.lognormvariate(7.6, 1.0)
        found[position] = unshared(500 + min(16384, int(base * rng.lognormvariate(0.0, 0.3))) for _ in range(SAMPLES))
    return found


def among_owners(step: Mapping[int, Lengths], rule: DealRule) -> list[Hand]:
    """What the replicas of the policy's home train on."""
    offers = {position: Offer(position % LEDGERS % OWNERS, lengths) for position, lengths in step.items()}
    return deal_step(offers, OWNERS, ranks(step, LEDGERS), rule)


def to_critics(step: Mapping[int, Lengths], rule: DealRule, *, streamed: bool) -> list[Hand]:
    """What those of the critic's home do; `streamed`: its rows come group by group."""
    got: dict[str, dict[int, Lengths]] = {name: {} for name in CRITICS}
    for owner in range(OWNERS):
        sender = RowsSender("critic_rows", 0, CRITICS, 0)
        mine = {position: lengths for position, lengths in step.items() if position % LEDGERS % OWNERS == owner}
        for some in ({position: lengths} for position, lengths in mine.items()) if streamed else (mine,):
            for name, dealt in sender.deal(some, rule, {} if streamed else step).items():
                got[name] |= {position: step[position] for position in dealt}
    offers = {p: Offer(replica, n) for replica, some in enumerate(got.values()) for p, n in some.items()}
    pinned = DealRule(rule.prompts, LEDGERS, COST, rule.minibatches, pinned=True)
    return deal_step(offers, OWNERS, ranks(step, LEDGERS), pinned)


def beside_ideal(step: Mapping[int, Lengths], hands: Sequence[Hand], minibatches: int) -> tuple[float, float]:
    """Seconds of a training step by those of an equal share: where replicas meet after each mini-batch, and where
    each round lasts as long as its largest micro-batch.
    """
    rank, ideal = ranks(step, LEDGERS), sum(map(COST.cost, step.values())) / OWNERS
    slowest = 0.0
    for part in range(minibatches):
        slowest += max(sum(COST.cost(step[p]) for p in hand if rank[p] % minibatches == part) for hand in hands)
    rounds: dict[int, list[float]] = {}
    for replica, hand in enumerate(hands):
        for position, numbers in hand.items():
            for tokens, number in zip(whole_lengths(step[position]), numbers, strict=True):
                rounds.setdefault(number, [0.0] * OWNERS)[replica] += COST.cost([(tokens, 0)])
    return slowest / ideal, sum(map(max, rounds.values())) / ideal


def main() -> None:
    """Print a line for each size of a training step."""
    print("groups, mini-batches: slowest replica | rounds, for policy; critic; critic whose rows stream")
    for prompts, minibatches in ((1024, 4), (1024, 1), (256, 4), (128, 8)):
        rule = DealRule(prompts, LEDGERS, COST, minibatches, streamed=False)
        columns: list[list[tuple[float, float]]] = [[], [], []]
        for seed in (1, 2, 3):
            step = lengths_of(prompts, seed)
            deals = [among_owners(step, rule), to_critics(step, rule, streamed=False)]
            deals += [to_critics(step, rule, streamed=True)] if minibatches == 1 else []
            for column, hands in zip(columns, deals, strict=False):
                column.append(beside_ideal(step, hands, minibatches))
        shown = (" | ".join(f"{mean(one):.2f}" for one in zip(*column, strict=True)) for column in columns if column)
        print(f"{prompts:5d}, {minibatches}:  " + ";  ".join(shown))
