"""Decides how many generating workers a running run has: reads its training steps, and says when to change the number.

What other numbers would bring is predicted by `GenerationLoad.change`; what a change has brought is measured. A state
machine without clock and sockets:

- *Watching.* One more worker promises at least `gain` in `patience` steps in a row: more are taken on, as many as
  promise that each, but at most as many again. Or fewer would cost at most `loss` in as many steps: they leave, at most
  half of them.
- *Settling.* The next `settle` steps are not looked at: samples begun before the change are trained on.
- *On trial.* Then `judged` steps are compared with those before, and up to `LONGER` times as many while the outcome is
  not clear. An addition that clearly did not bring half of its promise is taken back, and so is a removal that clearly
  cost more than `gain`; from then on, the number changes by one at a time. Clearly: by more than the standard error of
  the comparison.

What is learned bounds what comes later. From 2 to 4 stayed: never 2 again. 5 was taken back, or could be done without:
never 5 again. Every change that was on trial so narrows the range: the number of changes is bounded, and noise cannot
make it go to and fro. A bound is forgotten only where it is in the way, and the work has become another since: one more
promises twice what it did, or the workers are busy together for less than three quarters of what they were.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Self

from distflow.errors import UserError
from distflow.flow.plan import Plan
from distflow.metrics.rollout_count import GenerationLoad

TOKENS_S = "perf/tokens_per_s"
LONGER = 4
"""A trial with an unclear outcome is that many times as long, at most."""


@dataclass(frozen=True, slots=True)
class AutoscaleRule:
    """When to change the number of workers."""

    least: int = 1
    most: int = 64
    gain: float = 0.05
    """Share of the step time that one more has to promise."""
    loss: float = 0.02
    """Share of the step time that fewer may cost."""
    patience: int = 3
    settle: int = 3
    judged: int = 5
    """All three in training steps."""


@dataclass(frozen=True, slots=True)
class StepSeen:
    """A training step that was done with the present workers."""

    load: GenerationLoad
    tokens_s: float
    """Trained on per second."""

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> Self | None:
        """From the merged metrics of one step; None: too little was measured in it."""
        load = GenerationLoad.of(metrics)
        return None if load is None or TOKENS_S not in metrics else cls(load, metrics[TOKENS_S])


@dataclass(frozen=True, slots=True)
class ScaleDecision:
    """How many workers there are to be."""

    count: int
    why: str


def check_pool(plan: Plan, pool: str) -> None:
    """Raise UserError unless this is the one pool whose size the metrics of a run say something about."""
    makers = [one.name for one in plan.generating_pools]
    if makers != [pool]:
        raise UserError(
            f"scale {pool}=auto: only for a pool that alone generates with {plan.primary} for training (here: "
            f"{', '.join(makers)}) — give {pool} a number"
        )


@dataclass(frozen=True, slots=True)
class _Bound:
    """A number of workers that is known to be the least or the most worth having, and the state of things then."""

    count: int
    measure: float
    """Of the most: what one more promised. Of the least: how many workers were busy, on average."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """A change that is not judged yet."""

    before: int
    speeds: Sequence[float]
    """Tokens per second of the steps before it."""
    promised: float
    """The predicted relative change of the step time."""
    one_more: float
    busy: float


class Autoscaler:
    """The number of workers of one run."""

    def __init__(self, rule: AutoscaleRule, count: int) -> None:
        self.rule = rule
        self.count = count
        """As last decided, or found."""
        self._least: _Bound | None = None
        self._most: _Bound | None = None
        self._trial: _Trial | None = None
        self._settling = 0
        self._seen: deque[StepSeen] = deque(maxlen=max(rule.patience, LONGER * rule.judged))
        self._singly = False
        """Change by one worker at a time."""
        self.kept = ""
        """What the step that was seen last has shown of a change that stays; empty: nothing."""

    def begin(self) -> ScaleDecision | None:
        """The decision before the first step: the number may be out of bounds."""
        wanted = min(self.rule.most, max(self.rule.least, self.count))
        if wanted == self.count:
            return None
        bound = f"--min {wanted}" if wanted > self.count else f"--max {wanted}"
        self._change(wanted)
        return ScaleDecision(wanted, bound)

    def found(self, count: int) -> None:
        """Somebody else has changed the number: what is known about others is kept."""
        self._trial = None
        self._change(count)

    def refused(self, count: int) -> None:
        """The run cannot do what was decided last, and has `count` workers: it will not be asked for more again."""
        promised = 0.0 if self._trial is None else self._trial.one_more
        self._trial = None
        if self.count > count:
            self._most = _Bound(count, promised)
        else:
            self._least = _Bound(count, 0.0)
        self._change(count)

    def see(self, step: StepSeen) -> ScaleDecision | None:
        """A further training step, all of it with `count` workers. Returns a change to make now, if any."""
        self.kept = ""
        if self._settling:
            self._settling -= 1
            return None
        self._seen.append(step)
        if self._trial is not None:
            return None if len(self._seen) < self.rule.judged else self._judge(self._trial)
        if len(self._seen) < self.rule.patience:
            return None
        last = list(self._seen)[-self.rule.patience :]
        self._forget(last)
        return self._more(last) or self._fewer(last)

    @property
    def settled(self) -> bool:
        """Whether there is no change that is still to be judged."""
        return self._trial is None and not self._settling

    def _more(self, last: Sequence[StepSeen]) -> ScaleDecision | None:
        top = min(self.rule.most, 2 * self.count, self.count + 1 if self._singly else self.rule.most)
        top = top if self._most is None else min(top, self._most.count)
        wanted = min(self._worth(step.load, top) for step in last)
        if wanted <= self.count:
            return None
        change = fmean(step.load.change(self.count, wanted) for step in last)
        why = f"training waits {fmean(step.load.training_waits for step in last):.0%} of the time for samples"
        return self._try(wanted, change, last, f"{why}, and steps should become {-change:.0%} shorter")

    def _worth(self, load: GenerationLoad, top: int) -> int:
        """The largest number up to `top` of which the last worker promises enough."""
        wanted = self.count
        while wanted < top and (
            load.change(self.count, wanted) - load.change(self.count, wanted + 1) >= self.rule.gain
        ):
            wanted += 1
        return wanted

    def _fewer(self, last: Sequence[StepSeen]) -> ScaleDecision | None:
        bottom = max(self.rule.least, self.count - 1 if self._singly else (self.count + 1) // 2)
        bottom = bottom if self._least is None else max(bottom, self._least.count)
        wanted = self.count
        while wanted > bottom and all(step.load.change(self.count, wanted - 1) <= self.rule.loss for step in last):
            wanted -= 1
        if wanted == self.count:
            return None
        change = fmean(step.load.change(self.count, wanted) for step in last)
        why = f"workers wait {fmean(step.load.idle for step in last):.0%} of the time and use "
        why += f"{fmean(step.load.slots for step in last):.0%} of their slots while they decode"
        longer = f"become {change:.0%} longer" if f"{change:.0%}" != "0%" else "take as long as now"
        return self._try(wanted, change, last, f"{why}; with {wanted}, steps should {longer}")

    def _try(self, wanted: int, change: float, last: Sequence[StepSeen], why: str) -> ScaleDecision:
        speeds = [step.tokens_s for step in self._seen]
        self._trial = _Trial(self.count, speeds, change, self._one_more(last), self._busy(last))
        self._change(wanted)
        return ScaleDecision(wanted, why)

    def _judge(self, trial: _Trial) -> ScaleDecision | None:
        speeds = [step.tokens_s for step in self._seen]
        change, doubt = median(trial.speeds) / median(speeds) - 1.0, _doubt(trial.speeds, speeds)
        grew, now = self.count > trial.before, self.count
        allowed = trial.promised / 2 if grew else self.rule.gain
        clear = abs(change - allowed) >= doubt
        if not clear and len(speeds) < LONGER * self.rule.judged:
            return None
        kept = change <= allowed or not clear
        self._trial = None
        # A bound is compared with what is seen with the number of workers that there is from now on.
        if grew == kept:
            self._least = _Bound(trial.before + 1 if grew else now + 1, self._busy(self._seen) if kept else trial.busy)
        else:
            most = (now if grew else trial.before) - 1
            self._most = _Bound(most, self._one_more(self._seen) if kept else trial.one_more)
        told = f"{_became(change, doubt)}; {self._expected(trial, grew=grew, kept=kept, clear=clear)}"
        if kept:
            self.kept = told
            return None
        self._singly = True
        self._change(trial.before)
        return ScaleDecision(trial.before, f"taken back: with {now}, {told}")

    def _expected(self, trial: _Trial, *, grew: bool, kept: bool, clear: bool) -> str:
        """What the outcome of a trial is measured by, in words."""
        if grew:
            predicted = f"{-trial.promised:.0%} shorter was predicted"
            if not kept:
                return f"{predicted}, and half of that is asked for"
            return f"{predicted}, and " + (
                "half of that is enough" if clear else "this is not clearly less than half of it"
            )
        accepted = f"up to {self.rule.gain:.0%} longer is accepted"
        return accepted if clear else f"{accepted}, and this is not clearly more"

    def _forget(self, last: Sequence[StepSeen]) -> None:
        """Bounds that are in the way, and were found when the work was another."""
        most, least = self._most, self._least
        if most is not None and self.count >= most.count:
            promises = [-step.load.change(self.count, self.count + 1) for step in last]
            if min(promises) >= 2 * max(self.rule.gain, -most.measure):
                self._most = None
        busy = max(self._busy([step]) for step in last)
        if least is not None and self.count <= least.count and busy < 0.75 * least.measure:
            self._least = None

    def _one_more(self, steps: Collection[StepSeen]) -> float:
        """What one more worker promises."""
        return fmean(step.load.change(self.count, self.count + 1) for step in steps)

    def _busy(self, steps: Collection[StepSeen]) -> float:
        """How many workers are busy, on average."""
        return self.count * fmean(1.0 - step.load.idle for step in steps)

    def _change(self, count: int) -> None:
        self.count, self._settling = count, self.rule.settle
        self._seen.clear()


def _became(change: float, doubt: float) -> str:
    """What a change has made of the steps, in words."""
    size = f"{abs(change):.0%}"
    became = "took as long as before" if size == "0%" else f"became {size} {'shorter' if change < 0 else 'longer'}"
    return f"steps {became}" + (f", give or take {doubt:.0%}" if doubt >= 0.005 else "")


def _doubt(*windows: Sequence[float]) -> float:
    """By how much the ratio of two medians may be wrong: the standard error, from mean absolute deviations."""
    spreads = [1.25 * fmean(abs(one / median(window) - 1.0) for one in window) for window in windows]
    return 1.25 * math.sqrt(sum(spread**2 / len(window) for spread, window in zip(spreads, windows, strict=True)))
