"""Whether a training step has anything to learn from, judged from the sums of all replicas of a home.

Three ways in which a run goes on and learns nothing: no update moves a model, since no norm of its gradients is finite
or no sample has a token to train on; corrections for the policy that sampled leave out nearly all tokens; and the
samples of each group all get the same reward, so that comparing them gives no advantage. Single steps of any kind are
usual; what lasts is told by the launching command (`launch/observe/alerts.py`), and ends the run in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

KEPT = "rollout_corr/kept"
"""Mean of min(weight, 1) over the tokens with an advantage: the share that corrections leave."""
EQUAL = "group/zero_std_frac"
"""Share of the groups whose rewards are all equal."""
EQUAL_STEPS = "group/equal_steps/max"
"""Training steps in a row in which that was all groups, in flows that compare the samples of a group."""
LEAST_KEPT = 0.01
"""Corrections that leave a smaller share have left out the training step."""
MOST_LEFT_OUT = 3
"""As many such training steps in a row end the run."""
EQUAL_TOLD = 20
"""As many training steps in a row with equal rewards are told."""
EQUAL_FROM_START = 50
"""As many training steps without two different rewards in any group since the run began, and a pass over the data, end
the run."""

Sums = Sequence[float]
"""Of one replica: sum and weight of `KEPT` and of `EQUAL`, and the least pass over the data among its groups."""


class LearningSignal:
    """The judge of one home. All its replicas are given the same sums, so that they conclude the same.

    `prefixes`: of the train steps here. `compares`: those of them whose advantages compare the samples of a group.
    `bad_steps`: as many training steps in a row may leave a model as it was. `from_start`: the run has begun here, so
    that no earlier training step had different rewards.
    """

    def __init__(self, prefixes: Sequence[str], compares: Sequence[str], bad_steps: int, *, from_start: bool) -> None:
        self.reason = ""
        """Why the run is to end; empty while it is not."""
        self._bad_steps = bad_steps
        self._unmoved: dict[str, int] = {}
        """Training steps in a row that have left a model as it was."""
        self._prefixes = tuple(prefixes)
        self._compares = tuple(compares)
        self._varied = set() if from_start else set(compares)
        self._left_out = dict.fromkeys(self._prefixes, 0)
        self._equal = dict.fromkeys(self._compares, 0)

    def sums(self, mean_so_far: Callable[[str], tuple[float, float]], epoch: int) -> list[list[float]]:
        """Return what this replica has measured in the training step, by prefix; `epoch`: least pass among its
        groups."""
        named = [_named(prefix) for prefix in self._prefixes]
        return [[*mean_so_far(kept), *mean_so_far(equal), float(epoch)] for kept, equal, _ in named]

    def judge(self, replicas: Sequence[Sequence[Sums]], step: int, unmoved: Mapping[str, str]) -> dict[str, float]:
        """Conclude from the sums of all replicas in training step `step`, from 1; returns metrics that tell of it.

        `unmoved`: by model that had updates, why none has moved it, empty if one has.
        """
        for model, why in unmoved.items():
            self._judge_updates(model, why, step)
        told: dict[str, float] = {}
        if not replicas:
            return told  # nothing was applied in this training step
        for prefix, parts in zip(self._prefixes, zip(*replicas, strict=True), strict=True):
            kept, tokens, equal, groups, _ = (sum(column) for column in zip(*parts, strict=True))
            if tokens:
                self._judge_kept(prefix, kept / tokens, step)
            if groups and prefix in self._compares:
                self._judge_rewards(prefix, round(groups - equal), step, min(part[4] for part in parts))
                if self._equal[prefix]:
                    told[_named(prefix)[2]] = float(self._equal[prefix])
        return told

    def _judge_updates(self, model: str, why: str, step: int) -> None:
        steps = self._unmoved[model] = self._unmoved.get(model, 0) + 1 if why else 0
        if steps >= self._bad_steps:
            self.reason = (
                f"model {model!r} has stayed as it was for {steps} training steps in a row, up to step {step} "
                f"(limits.bad_steps): {why}"
            )

    def _judge_kept(self, prefix: str, share: float, step: int) -> None:
        self._left_out[prefix] = self._left_out[prefix] + 1 if share < LEAST_KEPT else 0
        if self._left_out[prefix] == MOST_LEFT_OUT:
            what = left_out(_named(prefix)[0], share)
            self.reason = f"for {MOST_LEFT_OUT} training steps in a row, up to step {step}, {what}"

    def _judge_rewards(self, prefix: str, different: int, step: int, epoch: float) -> None:
        if different:
            self._varied.add(prefix)
        self._equal[prefix] = 0 if different else self._equal[prefix] + 1
        if prefix not in self._varied and step >= EQUAL_FROM_START and epoch >= 1:
            self.reason = (
                f"in none of the {step} training steps since the run began, more than a pass over the data, have two "
                "samples of a prompt got different rewards, so that there is nothing to learn from — look at the "
                "rewards (`distflow rollouts`): they may not fit the task, or the task not the model"
            )


def left_out(name: str, share: float) -> str:
    """Say that corrections leave out nearly all tokens; `name`: of the metric with the share that is left."""
    return (
        f"corrections for the policy that sampled leave {share:.2%} of the tokens that have an advantage ({name}): "
        "nothing is learned — widen the bounds in `correction` of the update, or look at why the log-probs of engine "
        "and trainer differ (rollout_corr/ratio/mean, staleness/mean)"
    )


def _named(prefix: str) -> tuple[str, str, str]:
    lead = f"{prefix}/" if prefix else ""
    return f"{lead}{KEPT}", f"{lead}{EQUAL}", f"{lead}{EQUAL_STEPS}"
