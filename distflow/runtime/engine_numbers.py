"""Log-probs as they come from an engine: what can be trained on, and what becomes of the rest.

They are weights of the loss (`rollout_corr`), so that one NaN would spoil the gradient of a whole batch, and nothing
would say where it came from. So each is looked at where it arrives. A sample with one that is no log-probability is
counted and named. It is made again by another engine if there is one (`RolloutLoop`), or left out. An engine that
gives too many of them ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from distflow.errors import WorkerFailed
from distflow.exchange.tally import Tally
from distflow.log import logger
from distflow.runtime.metrics import MetricStore
from distflow.types import SampleOutput, Uid, Version

BAD_LOGPROBS = "unusable log-probs"
"""Why a sample is left out."""
ROUNDING = 1e-4
"""Nats by which an engine's arithmetic may exceed a probability of 1."""
MOST = 0.05
"""Of the last samples of an engine, this share may be without usable log-probs."""
log = logger(__name__)


class EngineNumbers:
    """Judges what one engine gives. `engine`: which one, on which worker."""

    def __init__(self, engine: str, metrics: MetricStore) -> None:
        self._engine = engine
        self._metrics = metrics
        self._tally = Tally()

    def judge(self, output: SampleOutput, uid: Uid, version: Version | None) -> tuple[SampleOutput, str]:
        """The output, and "" if it is sound; else with zeros for its log-probs, and what is wrong with them.

        `version`: what the engine has loaded. Raises WorkerFailed if too many have been wrong.
        """
        wrong = complaint(output.token_ids, output.logprobs)
        self._tally.add(1, bool(wrong))
        recent = self._tally.recent()
        if not wrong:
            return sound(output), ""
        self._metrics.add("engine/bad_logprobs", 1)
        log.warning(
            "%s, version %s, gave %s, in sample %d of uid (epoch, prompt, position) %s",
            self._engine,
            _shown(version),
            wrong,
            output.sample,
            tuple(uid),
        )
        if recent.exceed(MOST):
            raise WorkerFailed(
                f"{self._engine}, version {_shown(version)}: {recent.failed} of its last {recent.judged} samples came "
                f"with log-probs that cannot be used, the last one with {wrong}. Look at the weights of this version "
                "(models.<name>.optimizer.lr, dtype) and at the engine's own precision and quantisation"
            )
        return replace(output, logprobs=(0.0,) * len(output.token_ids)), wrong


def complaint(token_ids: Sequence[int], logprobs: Sequence[float] | None) -> str:
    """Return what is wrong with the log-probs of some tokens; "" if there is one for each, finite, and none is above
    0."""
    if logprobs is None:
        return f"no log-probs for {len(token_ids)} tokens"
    if len(logprobs) != len(token_ids):
        return f"{len(logprobs)} log-probs for {len(token_ids)} tokens"
    for place, value in enumerate(logprobs) if not _all_fine(logprobs) else ():
        if not isinstance(value, int | float) or not isfinite(value) or value > ROUNDING:
            return f"{value} as the log-prob of token {place} of {len(token_ids)}"
    return ""


def sound(output: SampleOutput) -> SampleOutput:
    """An output that nothing is wrong with, with 0 for what rounding has made larger."""
    if max(output.logprobs, default=0.0) <= 0.0:
        return output
    return replace(output, logprobs=tuple(min(value, 0.0) for value in output.logprobs))


def _all_fine(logprobs: Sequence[float]) -> bool:
    """Tell whether all are fine at the first look, which takes no time even for long samples."""
    try:
        return isfinite(sum(logprobs)) and max(logprobs, default=0.0) <= 0.0
    except TypeError:
        return False


def _shown(version: Version | None) -> str:
    return "unknown" if version is None else f"{version.number} of term {version.term}"
