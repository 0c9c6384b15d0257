"""Every formula of `distflow/algorithms` once more: token by token, in float64, with nothing but scalars.

Gradients are autograd's, of these scalars. `detach` stands where a formula has sg[]; log-ratios beyond 20 are held
there, as the package does against overflow. Shapes: B samples, T tokens; `mask` is True on the tokens trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LIMIT = 20.0
Rows = list[list[float]]


@dataclass
class Case:
    """Random terms of a micro-batch, with rewards and groups of its samples."""

    mask: Tensor
    new: Tensor
    old: Tensor
    rollout: Tensor
    ref: Tensor
    advantages: Tensor
    entropy: Tensor
    values: Tensor
    rewards: Tensor
    groups: Tensor

    @property
    def places(self) -> list[tuple[int, int]]:
        """Of the tokens trained on."""
        return [(int(b), int(t)) for b, t in self.mask.nonzero()]

    def trained(self, row: int) -> list[int]:
        """Places of the tokens of a row that are trained on."""
        return [t for t in range(self.mask.shape[1]) if self.mask[row, t]]

    def group(self, row: int) -> list[int]:
        """All rows of its group."""
        return [other for other in range(len(self.groups)) if self.groups[other] == self.groups[row]]

    @property
    def terms(self) -> dict[str, Tensor]:
        """The arguments of TokenTerms."""
        return {
            "mask": self.mask,
            "logprobs": self.new,
            "old_logprobs": self.old,
            "rollout_logprobs": self.rollout,
            "ref_logprobs": self.ref,
            "entropy": self.entropy,
            "advantages": self.advantages,
        }


def draw(seed: int, apart: float, dtype: torch.dtype = torch.float64) -> Case:
    """`apart`: how far log-probs differ. Some rows are empty, groups have one to four samples, some equal rewards."""
    picked = torch.Generator().manual_seed(seed)

    def some(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=picked))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=picked)

    sizes = [1, *(some(1, 4) for _ in range(some(1, 3)))]
    rows, tokens = sum(sizes), some(1, 7)
    mask = torch.rand(rows, tokens, generator=picked) < 0.7
    mask[some(0, rows - 1)] = False
    mask[some(0, rows - 1), some(0, tokens - 1)] = True
    groups = torch.tensor([17 * (9 - number) for number, size in enumerate(sizes) for _ in range(size)])
    rewards = normal(rows)
    rewards[groups == groups[-1]] = 0.1  # nothing to learn from the last group
    old = -normal(rows, tokens).abs() - apart
    new, rollout, ref = (old + apart * normal(rows, tokens) for _ in range(3))
    drawn = (new, old, rollout, ref, *(normal(rows, tokens) for _ in range(3)), rewards)
    cast = [each.to(dtype) for each in drawn]
    return Case(mask, *cast[:5], cast[5].abs(), *cast[6:], groups=groups)


def number(scalar: Tensor) -> float:
    return float(scalar.detach())


def constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def held(log_ratio: Tensor) -> Tensor:
    """A log-ratio within ±20; beyond, a constant."""
    return log_ratio if abs(number(log_ratio)) <= LIMIT else constant(math.copysign(LIMIT, number(log_ratio)))


# -- losses: of one token


def surrogate(ratio: Tensor, advantage: Tensor, clip: Sequence[float]) -> Tensor:
    low, high = 1 - clip[0], 1 + clip[1]
    bounded = ratio if low <= number(ratio) <= high else constant(low if number(ratio) < low else high)
    worse = max((-advantage * ratio, -advantage * bounded), key=number)
    if len(clip) == 3 and float(advantage) < 0:
        return min((worse, -advantage * clip[2]), key=number)
    return worse


def ppo(case: Case, b: int, t: int, *, clip: Sequence[float]) -> Tensor:
    return surrogate(held(case.new[b, t] - case.old[b, t]).exp(), case.advantages[b, t], clip)


def gspo(case: Case, b: int, t: int, *, clip: Sequence[float]) -> Tensor:
    trained = case.trained(b)
    mean = sum((case.new[b, u] - case.old[b, u]).detach() for u in trained) / max(len(trained), 1)
    own = case.new[b, t] - case.new[b, t].detach()  # 0, with a gradient
    return surrogate(held(mean + own).exp(), case.advantages[b, t], clip)


def cispo(case: Case, b: int, t: int, *, clip: Sequence[float]) -> Tensor:
    ratio = float(held((case.new[b, t] - case.old[b, t]).detach()).exp())
    return -min(max(ratio, 1 - clip[0]), 1 + clip[1]) * case.advantages[b, t] * case.new[b, t]


def aipo(case: Case, b: int, t: int, *, cap: float) -> Tensor:
    ratio = float(held((case.new[b, t] - case.rollout[b, t]).detach()).exp())
    return -min(ratio, cap) * case.advantages[b, t] * case.new[b, t]


def decoupled_ppo(case: Case, b: int, t: int, *, clip: Sequence[float], cap: float) -> Tensor:
    weight = float(held(case.old[b, t] - case.rollout[b, t]).exp())
    return min(weight, cap) * ppo(case, b, t, clip=clip)


LOSSES: Mapping[str, tuple[Callable[..., Tensor], Mapping[str, Any]]] = {
    "ppo": (ppo, {"clip": (0.2, 0.28)}),
    "dual clip": (ppo, {"clip": (0.2, 0.2, 3.0)}),
    "gspo": (gspo, {"clip": (0.1, 0.2)}),
    "cispo": (cispo, {"clip": (1.0, 0.28)}),
    "aipo": (aipo, {"cap": 2.0}),
    "decoupled_ppo": (decoupled_ppo, {"clip": (0.2, 0.3), "cap": 1.5}),
}
"""By a name for it: the formula, whose name is the function's, and settings."""


def value(new: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    plain = (new - returns) ** 2
    if clip is None or abs(number(new - old)) <= clip:
        return plain / 2
    bounded = (old + math.copysign(clip, number(new - old)) - returns) ** 2
    return max((plain, bounded), key=number) / 2


# -- divergences of one token


def k1(new: Tensor, ref: Tensor) -> Tensor:
    return new - ref


def k2(new: Tensor, ref: Tensor) -> Tensor:
    return (new - ref) ** 2 / 2


def k3(new: Tensor, ref: Tensor) -> Tensor:
    d = held(new - ref)
    return (-d).exp() + d - 1


# -- corrections: the weight of one token


def weight(case: Case, b: int, t: int, name: str, lo: float, hi: float) -> float:
    token = math.exp(number(held(case.old[b, t] - case.rollout[b, t])))
    logs = [number(case.old[b, u] - case.rollout[b, u]) for u in case.trained(b)]
    total = math.exp(min(max(sum(logs), -LIMIT), LIMIT))
    mean = sum(logs) / max(len(logs), 1)
    inside = math.log(lo) <= mean <= math.log(hi) if lo > 0 else mean <= math.log(hi)
    return {
        "tis": min(token, hi),
        "icepop": token if lo <= token <= hi else 0.0,
        "mis": token if lo <= token <= hi else 0.0,
        "sequence_tis": min(max(total, lo), hi),
        "sequence_mis": total if lo <= total <= hi else 0.0,
        "geometric_mask": float(inside),
    }[name]


# -- aggregation


def aggregate(case: Case, losses: Mapping[tuple[int, int], Tensor], mode: str, norm: float = 1.0) -> Tensor:
    """The loss of the whole batch, divided: zero without a token trained on."""
    rows = [row for row in range(len(case.mask)) if case.trained(row)]
    zero = constant(0.0)
    sums = {row: sum((losses[row, t] for t in case.trained(row)), zero) for row in rows}
    total = sum(sums.values(), zero)
    if mode == "token-sum":
        return total
    if mode == "token-mean":
        return total / max(len(losses), 1)
    if mode == "seq-mean-token-mean":
        total = sum((sums[row] / len(case.trained(row)) for row in rows), zero)
    return total / norm / max(len(rows), 1)


# -- advantages


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def grpo(case: Case, normalize: str) -> list[float]:
    rewards, found = case.rewards.tolist(), []
    for row, reward in enumerate(rewards):
        group = [rewards[other] for other in case.group(row)]
        if len(group) == 1:
            found.append(reward)
            continue
        spread = {"group_std": group, "batch_std": rewards}.get(normalize)
        found.append((reward - mean(group)) / (1.0 if spread is None else deviation(spread) + 1e-6))
    return found


def rloo(case: Case) -> list[float]:
    rewards = case.rewards.tolist()
    others = [[rewards[other] for other in case.group(row) if other != row] for row in range(len(rewards))]
    return [reward - (mean(rest) if rest else 0.0) for reward, rest in zip(rewards, others, strict=True)]


def opo(case: Case, lengths: Sequence[int]) -> list[float]:
    rewards, found = case.rewards.tolist(), []
    for row, reward in enumerate(rewards):
        group = case.group(row)
        total = sum(lengths[other] for other in group)
        found.append(reward - sum(lengths[other] * rewards[other] for other in group) / max(total, 1))
    return found


def whitened(case: Case, rows: Rows) -> Rows:
    flat = [rows[b][t] for b, t in case.places]
    found = [[0.0] * len(row) for row in rows]
    if len(flat) < 2:
        return found
    scale = math.sqrt(deviation(flat) ** 2 + 1e-8)
    for b, t in case.places:
        found[b][t] = (rows[b][t] - mean(flat)) / scale
    return found


def to_go(case: Case, rewards: Rows, gamma: float) -> Rows:
    """The discounted rewards from each token on."""
    found = [[0.0] * len(row) for row in rewards]
    for b, t in case.places:
        ahead = [u for u in case.trained(b) if u >= t]
        found[b][t] = sum(gamma**steps * rewards[b][u] for steps, u in enumerate(ahead))
    return found


def reinforce_plus_plus(case: Case, token_rewards: Rows, gamma: float) -> Rows:
    return whitened(case, to_go(case, token_rewards, gamma))


def reinforce_plus_plus_baseline(case: Case) -> Rows:
    rewards = case.rewards.tolist()
    centred = [reward - mean([rewards[other] for other in case.group(row)]) for row, reward in enumerate(rewards)]
    return whitened(case, [[one] * case.mask.shape[1] for one in centred])


def gae(case: Case, token_rewards: Rows, gamma: float, lam: float) -> Rows:
    values, found = case.values.tolist(), [[0.0] * len(row) for row in token_rewards]
    for b, t in case.places:
        ahead = [u for u in case.trained(b) if u >= t]
        for steps, u in enumerate(ahead):
            after = values[b][ahead[steps + 1]] if steps + 1 < len(ahead) else 0.0
            found[b][t] += (gamma * lam) ** steps * (token_rewards[b][u] + gamma * after - values[b][u])
    return found
