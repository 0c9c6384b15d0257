"""Summaries of validation: k samples of each prompt, with a score and a final answer each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

_NORMAL_95 = 1.959964
"""Half of the middle 95% of a normal distribution, in standard deviations."""


@dataclass(frozen=True, slots=True)
class Graded:
    """The k samples of one prompt."""

    scores: Sequence[float]
    answers: Sequence[str]
    source: str = ""
    """The part of the data that the prompt is from; "" if it has none."""


def best(graded: Graded) -> float:
    """The best score; with scores of 0 and 1 whether any sample is right (pass@k, arXiv 2107.03374)."""
    return max(graded.scores)


def majority(graded: Graded) -> float:
    """The score of the answer that most samples give (maj@k, arXiv 2203.11171): the mean score of those that give it,
    and of several answers that are as frequent."""
    by_answer: dict[str, list[float]] = {}
    for answer, score in zip(graded.answers, graded.scores, strict=True):
        by_answer.setdefault(answer, []).append(score)
    most = max(map(len, by_answer.values()))
    return fmean(fmean(scores) for scores in by_answer.values() if len(scores) == most)


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95% confidence interval of the mean, by the normal approximation; NaN for one value."""
    return _NORMAL_95 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def summary(prompts: Sequence[Graded]) -> dict[str, float]:
    """`avg@k`, `pass@k` and `maj@k` over at least one prompt, each with `…/ci95`, half the width of its 95% interval
    over prompts; the latter two only for k > 1. If prompts name sources, also `<source>/…` for each of them."""
    named: dict[str, list[Graded]] = {}
    for graded in prompts:
        if graded.source:
            named.setdefault(graded.source, []).append(graded)
    found = _of(prompts)
    for source, graded_of in sorted(named.items()):
        found |= {f"{source}/{name}": value for name, value in _of(graded_of).items()}
    return found


def _of(prompts: Sequence[Graded]) -> dict[str, float]:
    k = len(prompts[0].scores)
    values: Mapping[str, list[float]] = {f"avg@{k}": [fmean(graded.scores) for graded in prompts]}
    if k > 1:
        values = {**values, f"pass@{k}": list(map(best, prompts)), f"maj@{k}": list(map(majority, prompts))}
    found = {}
    for name, each in values.items():
        found[name] = fmean(each)
        found[f"{name}/ci95"] = interval(each)
    return found
