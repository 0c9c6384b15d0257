"""What becomes of a sample that something is wrong with.

An episode is one attempt of a generate step at one sample. It fails where the step raises, returns something else than
it declares, awaits something else than tokens, or asks for tokens that there cannot be. What becomes of the sample, the
step's settings `on_error`, `max_attempts` and `max_error_rate` say. That is an accident of one sample: the others go
on. What ends the run is a share of failures that is no accident any more, counted over all workers that run the step
(`distflow/exchange/tally.py`). How a step is driven does not matter here.

Log-probs come from an engine, and are weights of the loss (`rollout_corr`), so that one NaN would spoil the gradient of
a whole batch, and nothing would say where it came from. So each is looked at where it arrives. A sample with one that
is no log-probability is counted and named. It is made again by another engine if there is one (`RolloutLoop`), or left
out. An engine that gives too many of them ends the run.

Example: ConnectionError → "again" (attempt 1 of 3), "again" (2 of 3), "leave_out".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal

from distflow.errors import StepError, WorkerFailed
from distflow.exchange.tally import Tally
from distflow.flow.step import ERROR_SETTINGS, error_cure, error_limit
from distflow.log import logger
from distflow.runtime.metrics import MetricStore
from distflow.types import Episode, LeaseKind, SampleOutput, Uid, Version, lease_kind

ERRORS = "rollout/errors"
_REASON = 120
"""Most characters of the reason that a sample carries."""
Fate = Literal["again", "drop", "leave_out", "zero"]
BAD_LOGPROBS = "unusable log-probs"
"""Why a sample is left out."""
ROUNDING = 1e-4
"""Nats by which an engine's arithmetic may exceed a probability of 1."""
MOST_BAD = 0.05
"""Of the last samples of an engine, this share may be without usable log-probs."""
log = logger(__name__)


class EpisodeFailed(StepError):
    """One episode has failed: the message has the user's frames first.

    `reason` says why in a few words; `cause` what was raised, or done wrong; `kind` is the same for failures of one
    cause at one line.
    """

    def __init__(self, message: str, reason: str, cause: str, place: str = "") -> None:
        super().__init__(message)
        lines = reason.strip().splitlines()
        self.reason = lines[0][:_REASON] if lines else cause
        self.cause = cause
        self.kind = f"{cause} {place}"
        self.place = place
        """`file:line` of the user's, where that is known."""


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """The settings of a generate step that say what becomes of samples on which it fails."""

    on_error: str
    max_attempts: int
    max_error_rate: float
    timeout_s: float
    """How long an episode may take."""
    turn_timeout_s: float
    """How long it may take while it asks for no tokens."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ErrorPolicy:
        """Read them among all settings of a step; what is missing there has its default."""
        given = {name: settings.get(name, default) for name, default in ERROR_SETTINGS.items()}
        on_error, attempts, rate, *timeouts, _ = given.values()
        limit = error_limit(on_error) if rate is None else rate
        return cls(on_error, attempts if on_error == "retry" else 1, limit, *timeouts)

    @property
    def fate(self) -> Fate:
        """What becomes of a sample whose last attempt has failed."""
        found: dict[str, Fate] = {"drop": "drop", "zero": "zero"}
        return found.get(self.on_error, "leave_out")


class EpisodeErrors:
    """Judges the failures of one generate step at one worker. `policies`: by kind of lease; `step`: its name;
    `tally`: returns where its samples are counted."""

    def __init__(
        self, step: str, policies: Mapping[LeaseKind, ErrorPolicy], tally: Callable[[], Tally], metrics: MetricStore
    ) -> None:
        self._step = step
        self._policies = policies
        self._tally = tally
        self.metrics = metrics
        self._told: set[str] = set()

    def judge(self, failed: EpisodeFailed, episode: Episode, attempt: int) -> Fate:
        """Say what becomes of a sample, of which this attempt has failed; attempts are counted from 1.

        Raises StepError if that ends the run: with `on_error: stop`, if all of the first samples here have failed, or
        too many of the last ones anywhere. Validation replaces nothing, and gives a failed sample the score 0.
        """
        kind = lease_kind(episode.uid.position)
        policy = self._policies[kind]
        self.note(failed, episode, attempt)
        if attempt < policy.max_attempts:
            return "again"
        self._tally().add(1, 1)
        self._check(failed, policy)
        return "leave_out" if kind == "val" else policy.fate

    def late(self, episode: Episode, seconds: float, waiting: float) -> str:
        """Say why an episode has taken too long, after these seconds, `waiting` of them since it has had its tokens; ""
        if it has not."""
        policy = self._policies[lease_kind(episode.uid.position)]
        if waiting >= policy.turn_timeout_s:
            return f"has asked for no tokens for {policy.turn_timeout_s:g} s (turn_timeout_s)"
        return f"has taken {policy.timeout_s:g} s (timeout_s)" if seconds >= policy.timeout_s else ""

    def note(self, failed: EpisodeFailed, episode: Episode, attempt: int) -> None:
        """Count a failure, and log the first one of its kind; raises StepError with `on_error: stop`."""
        policy = self._policies[lease_kind(episode.uid.position)]
        if policy.on_error == "stop":
            raise StepError(str(failed)) from failed
        self.metrics.add(ERRORS, 1)
        if failed.kind in self._told:
            return
        self._told.add(failed.kind)
        log.warning(
            "%s\nsample %d of uid (epoch, prompt, position) %s%s, attempt %d of %d; failures of this kind are not "
            "shown again, and %s counts them",
            failed,
            episode.sample,
            tuple(episode.uid),
            f", at {failed.place}" if failed.place else "",
            attempt,
            policy.max_attempts,
            ERRORS,
        )

    def succeeded(self) -> None:
        """Count a sample that is made."""
        tally = self._tally()
        tally.add(1, 0)
        tally.note()

    def _check(self, failed: EpisodeFailed, policy: ErrorPolicy) -> None:
        tally = self._tally()
        many = tally.too_many(policy.max_error_rate)
        if many:
            cure = error_cure(self._step, policy.on_error, ERRORS, all_failed=tally.all_failed)
            raise StepError(
                f"{failed}: step {self._step!r} failed on {many}, more than max_error_rate={policy.max_error_rate:g} "
                f"allows; one failure is shown — {cure}"
            ) from failed


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
        self._tally.note()
        recent = self._tally.recent
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
        if recent.exceed(MOST_BAD):
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
