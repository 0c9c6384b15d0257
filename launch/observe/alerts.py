"""Warnings during a run: failing rewards, full disks, gradients that vanish or explode; and where time goes."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from distflow.cluster.processes import ProcessId, agent_name
from distflow.comm.tracker_processes import COUNTS, DROPPED_ROWS
from distflow.comm.tracker_processes import FAILURES as TRACKER_FAILURES
from distflow.launch.run.folder import run_word
from distflow.launch.run.record import RunRecord
from distflow.metrics.learning_signal import EQUAL, EQUAL_STEPS, EQUAL_TOLD, KEPT, LEAST_KEPT, left_out
from distflow.metrics.merge import MetricsReader
from distflow.metrics.rollout_count import GENERATE, PHASE, SCORE, STALENESS
from distflow.metrics.rollout_count import ROLLOUT_IDLE as ROLLOUT
from distflow.metrics.rollout_count import TRAINER_IDLE as TRAINER
from distflow.runtime.checkpoint.commit import COPIED, COPY_FAILED
from distflow.runtime.disk import DROPPED, REFUSED

FAILURES = {"reward/timeouts": "timed out", "reward/errors": "raised an error"}
"""Counters of the workers, and what the reward function did."""
TIMEOUTS, ERRORS = FAILURES
SKIPPED, BAD_LOGPROBS, HALVED, EPISODES, LEFT_OUT, FAILED_GROUPS = (
    "skipped_updates",
    "engine/bad_logprobs",
    "halved_microbatches",
    "rollout/errors",
    "rollout/left_out",
    "rollout/dropped",
)
TROUBLES = {
    SKIPPED: "updates were skipped, since their gradients were not finite",
    BAD_LOGPROBS: "samples came from an engine with log-probs that cannot be used",
    HALVED: "micro-batches were halved, since the memory of a GPU did not hold them",
    ERRORS: "samples made the reward function raise an error",
    TIMEOUTS: "samples made the reward function time out",
    EPISODES: "attempts at a sample failed in the generate step",
    LEFT_OUT: "samples were left out, and trained nothing",
    FAILED_GROUPS: "groups were dropped, since the generate step or the reward failed on a sample of theirs",
}
"""What a run goes on after and a user should know of: how the metric that counts it ends, or how a family of metrics
begins, and what `status` says of it."""
SAMPLES = "reward/samples"
HANGING = "reward/hanging"
GRAD_NORM, LEAST_SCORE = "actor/grad_norm", "critic/score/min"
NUMBERS = ("/grad_norm", "/loss")
"""How the metrics end that are numbers as long as training goes well."""
QUIET_S = 10.0
"""A disk counts as having room again when it has refused nothing for so long."""
STEPS = 10
"""Training steps for which the gradient must have been 0, or known, before there is a warning."""
EXPLODED = 1000.0
"""A gradient norm has exploded at this multiple of the median of earlier training steps."""
WINDOW = 20
"""Training steps that the verdict covers."""
OUTSIDE_S, OUTSIDE_AGAIN_S = 5.0, 60.0
"""A wait for programs outside of the run is told of when it has lasted for so long, and later ones when they have."""
MUCH = 0.2
"""Waiting for less than this share of the time is not reported."""
CLEAR = 0.1
"""Shares that differ by less than this are called equal."""
DOMINATES = 0.6
"""A phase of a colocated worker that takes more than this share of a step is its bottleneck."""
ENVIRONMENT = "perf/environment_share"
SERVICE_IDLE = "perf/idle_share/"
"""And the name of a pool that only answers calls."""
READ = (TRAINER, ROLLOUT, GENERATE, SCORE, PHASE, STALENESS, SERVICE_IDLE, ENVIRONMENT)


class Alerts:
    """Turns counters of the workers and metrics of training steps into lines to show, each of them once."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._refused: dict[str, float] = {}
        """Writes that the disk refused, by worker."""
        self._full_at: float | None = None
        """When the disk last refused a write; None: it has room."""
        self._norms: deque[float] = deque(maxlen=10 * STEPS)
        self._processes: Mapping[str, ProcessId] = {}
        self._outside: set[str] = set()
        """What was told of among what the run waits for outside of it."""
        self._patience: dict[str, float] = {}

    def of_workers(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """Warn of the first failure of a reward function, and of a generate step, by the workers' status rows."""
        for row in rows:
            for name, what in FAILURES.items():
                failed = _of_all_models(row, name)
                if failed and name not in self._said:
                    self._said.add(name)
                    judged = _of_all_models(row, SAMPLES)
                    yield (
                        f"warning: the reward function {what} on {row['name']}: {failed:.0f} of {judged:.0f} samples "
                        "so far — see its log; `distflow status` counts them"
                    )
            failed = _of_all_models(row, EPISODES)
            if failed and EPISODES not in self._said:
                self._said.add(EPISODES)
                yield (
                    f"warning: {failed:.0f} {TROUBLES[EPISODES]} on {row['name']} so far — see its log; `distflow "
                    "status` counts them, and `on_error` of the step says what becomes of them"
                )

    def of_late_rewards(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """From the status rows: the first call of a reward function that does not come back."""
        for row in rows:
            if _of_all_models(row, HANGING) and HANGING not in self._said:
                self._said.add(HANGING)
                yield (
                    f"warning: the reward function does not come back on {row['name']}, which waits for it — see its "
                    "log; `timeout_s` beside `function` ends such calls"
                )

    def of_trackers(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """From the status rows: the first failure of each tracker."""
        for name, (failed, _, worker) in _trackers(rows).items():
            if failed and name not in self._said:
                self._said.add(name)
                yield f"warning: tracker {name} failed, training goes on — see the log of {worker}"

    def of_copies(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """From the status rows: the first copy of a checkpoint to `run.copy_to` that failed."""
        for row in rows:
            if counted(row).get(COPY_FAILED) and COPY_FAILED not in self._said:
                self._said.add(COPY_FAILED)
                yield f"warning: a checkpoint could not be copied to run.copy_to — see the log of {row['name']}"

    def of_outside(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """From the status rows: for what programs outside of the run it waits, and what to do about it."""
        now = {on: text for on, text, seconds in _outside(rows) if seconds >= self._patience.get(on, OUTSIDE_S)}
        for on in now.keys() - self._outside:
            self._patience[on] = OUTSIDE_AGAIN_S
            yield f"the run waits for {now[on]}"
        self._outside = now.keys() | self._outside & {on for on, _, _ in _outside(rows)}

    def of_processes(self, record: RunRecord) -> Iterator[str]:
        """When a worker that does not train has been started again; of the others `renewed` tells."""
        # Between its end and its next start a worker has no process in the record.
        before, self._processes = self._processes, {**self._processes, **record.pids}
        for entry in record.workers:
            name = entry.name
            if not entry.trains and name in before and name in record.pids and before[name] != record.pids[name]:
                yield (
                    f"{name} ended and was started again: `distflow logs {run_word(record.path)} --worker "
                    f"{agent_name(entry.host)}` tells how it ended"
                )

    def of_disk(self, rows: Iterable[Mapping[str, Any]], where: str, now: float) -> Iterator[str]:
        """From the status rows: when a disk begins to refuse the workers' records, and when it has room again."""
        refused = {str(row["name"]): counted(row)[REFUSED] for row in rows if REFUSED in counted(row)}
        more = [name for name, count in refused.items() if count > self._refused.get(name, 0.0)]
        self._refused |= refused
        if more and self._full_at is None:
            yield (
                f"disk full at {where}: training goes on, without records and checkpoints that do not fit — make room "
                f"(reported by {more[0]}; dropped records are counted)"
            )
        if more:
            self._full_at = now
        elif self._full_at is not None and now - self._full_at > QUIET_S:
            self._full_at = None
            yield f"the disk has room again{dropped(rows)}"

    def of_step(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """From the merged metrics of a training step (1-based). To be called for every step, in order."""
        yield from self._of_signal(step, metrics)
        if GRAD_NORM not in metrics:
            return
        norm = metrics[GRAD_NORM]
        before, zero = list(self._norms), "gradients of 0"
        self._norms.append(norm)
        if norm == 0 and len(before) >= STEPS - 1 and not any(before[1 - STEPS :]) and zero not in self._said:
            self._said.add(zero)
            yield _unmoved(metrics)
        usual = median(before) if len(before) >= STEPS else math.inf
        exploded = not math.isfinite(norm) or (usual > 0 and norm > EXPLODED * usual)
        if exploded and "exploded" not in self._said:
            self._said.add("exploded")
            than = f", and {usual:.3g} was usual before" if math.isfinite(usual) else ""
            yield (
                f"warning: {GRAD_NORM} is {norm:.3g} in training step {step}{than} — a lower "
                "models.NAME.optimizer.lr, or longer warmup_steps, may help"
            )

    def _of_signal(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """Return what corrections leave out, and rewards that do not differ: of the policy's samples and further
        models'."""
        for name, value in metrics.items():
            if _is(name, KEPT) and value < LEAST_KEPT and name not in self._said:
                self._said.add(name)
                yield f"warning: training step {step}: {left_out(name, value)}"
            learnt = name == EQUAL_STEPS and metrics.get(LEAST_SCORE) == 1.0
            if _is(name, EQUAL_STEPS) and value >= EQUAL_TOLD and not learnt and name not in self._said:
                self._said.add(name)
                yield (
                    f"warning: for {value:.0f} training steps the samples of each prompt have all got the same reward "
                    f"({name.removesuffix('/max')}), so that there is nothing to learn from — look at the rewards: "
                    "`distflow rollouts`"
                )


def _is(name: str, metric: str) -> bool:
    """Tell whether a metric is this one, of the policy's samples or of a further model's (`solver/…`)."""
    return name == metric or name.endswith(f"/{metric}")


def outside_waits(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """For what programs outside of the run it waits now, and what to do about it."""
    return [f"the run waits for {text}" for text in {on: text for on, text, _ in _outside(rows)}.values()]


def _outside(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str, float]]:
    """What workers wait for outside of the run: by what it is told apart, in words, and for how many seconds."""
    for row in rows:
        seconds = max((wait["seconds"] for wait in row.get("waits", ())), default=0.0)
        for one in row.get("outside", ()):
            yield one["on"], one["text"], seconds


def counted_rewards(rows: Iterable[Mapping[str, Any]]) -> str:
    """For `status`: `rewards: 512 judged, 12 timed out`; empty while nothing failed."""
    known = list(rows)
    totals = {name: sum(_of_all_models(row, name) for row in known) for name in (SAMPLES, *FAILURES)}
    failed = [f"{totals[name]:.0f} {what}" for name, what in FAILURES.items() if totals[name]]
    return f"rewards: {', '.join([f'{totals[SAMPLES]:.0f} judged', *failed])}" if failed else ""


def troubles(steps: Iterable[Mapping[str, float]]) -> Iterator[str]:
    """Yield for `status` a line for each kind of TROUBLES, and one for numbers of training steps that are not finite.

    `steps`: the merged metrics of the training steps so far.
    """
    totals: dict[str, dict[str, float]] = {kind: {} for kind in TROUBLES}
    for name, value in ((name, value) for step in steps for name, value in step.items()):
        kind = next((kind for kind in TROUBLES if _is_of(name, kind)), None)
        if kind is not None and value > 0:
            totals[kind][name] = totals[kind].get(name, 0.0) + value
    for kind, counts in totals.items():
        if counts:
            each = ", ".join(f"{name} {count:.0f}" for name, count in sorted(counts.items()))
            yield f"{sum(counts.values()):.0f} {TROUBLES[kind]} ({each})"


def not_numbers(steps: Iterable[Mapping[str, float]]) -> Iterator[str]:
    """Yield for `status` a line for each loss and each norm of a gradient that was not finite, with its training
    steps."""
    found: dict[str, list[int]] = {}
    for step in steps:
        for name, value in step.items():
            if name.endswith(NUMBERS) and not math.isfinite(value):
                found.setdefault(name, []).append(int(step["step"]))
    for name, at in sorted(found.items()):
        more = f", and in {len(at) - 1} before" if len(at) > 1 else ""
        yield f"{name} was not a finite number in training step {at[-1]}{more}"


def _is_of(name: str, kind: str) -> bool:
    """Tell whether a metric, of any model, is of a kind of TROUBLES."""
    if kind.endswith("/"):
        return name.startswith(kind) or f"/{kind}" in name
    return name == kind or name.endswith(f"/{kind}")


def restarts(record: RunRecord, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Tell for `status` how often workers were started again since the launch, and from where training went on."""
    if record.renewed:
        often = _times(record.term - record.launch_term)
        yield f"training was restarted {often} since the launch; the last time: {record.renewed}"
    trainers = record.trainers
    for row in rows:
        if row.get("incarnation") and row["name"] not in trainers:
            yield f"{row['name']} was started again {_times(row['incarnation'])} since the launch"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def copy_troubles(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """For `status`: a line for each worker whose copies to `run.copy_to` have failed."""
    for row in rows:
        if failed := counted(row).get(COPY_FAILED):
            done = counted(row).get(COPIED, 0.0)
            yield f"copies to run.copy_to by {row['name']}: {done:.0f} made, {failed:.0f} tries failed"


def tracker_troubles(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """For `status`: a line for each tracker that has failed."""
    for name, (failed, lost, worker) in _trackers(rows).items():
        yield f"tracker {name} on {worker}: failed {failed:.0f} times, rows lost: {lost:.0f}"


def _trackers(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, float, str]]:
    """Failures, lost rows and the worker of each tracker that has any."""
    found = {}
    for row in rows:
        known = counted(row)
        names = {name.split("/")[1] for name in known if name.startswith(COUNTS)}
        for name in sorted(names):
            failed, lost = (known.get(f"{COUNTS}{name}/{what}", 0.0) for what in (TRACKER_FAILURES, DROPPED_ROWS))
            found[name] = failed, lost, str(row["name"])
    return found


def _of_all_models(row: Mapping[str, Any], name: str) -> float:
    """A counter of the policy's samples, with that of further models' (`solver/…`)."""
    return sum(value for found, value in counted(row).items() if found == name or found.endswith(f"/{name}"))


def counted(row: Mapping[str, Any]) -> Mapping[str, float]:
    """A worker's counters, by name; empty for one that did not answer."""
    found: Mapping[str, float] = row.get("counts", {})
    return found


def dropped(rows: Iterable[Mapping[str, Any]]) -> str:
    """What full disks have made workers drop, as the end of a sentence; empty: nothing."""
    total: Counter[str] = Counter()
    for row in rows:
        for name, count in counted(row).items():
            if name.startswith(DROPPED):
                total[name.removeprefix(DROPPED)] += int(count)
    return "".join(f"{', ' if place else '; dropped: '}{n} {name}" for place, (name, n) in enumerate(total.items()))


def _unmoved(metrics: Mapping[str, float]) -> str:
    told = f"{GRAD_NORM} has been 0 for {STEPS} training steps"
    if metrics.get(LEAST_SCORE) == 1.0 and metrics.get(EQUAL) == 1.0:
        return f"{told}: nothing more to learn, every sample gets the same reward and the score 1"
    return f"warning: {told}: nothing is learned{_why(metrics)}"


def _why(metrics: Mapping[str, float]) -> str:
    if metrics.get(EQUAL) == 1.0:
        return f" — the samples of each prompt all get the same reward ({EQUAL} is 1), so their advantages are 0"
    if EQUAL in metrics:
        return " — look at the rewards: `distflow rollouts`"
    return " — a lower models.NAME.optimizer.lr may help, if the model once learned: it may have blown up"


def where_time_went(reader: MetricsReader, last: int, steps: int) -> str:
    """The verdict on the `steps` training steps up to `last` (1-based)."""
    return verdict(reader.window(last, steps, READ))


def verdict(metrics: Mapping[str, float]) -> str:
    """Where the time went, as in `rollout-bound: trainers waited 63%, rollouts 4%`; empty while too little is known.

    `metrics`: the merged metrics of one or several training steps.
    """
    if PHASE in metrics:
        return _colocated(metrics)
    if TRAINER not in metrics or ROLLOUT not in metrics:
        return ""
    trainer, rollout = metrics[TRAINER], metrics[ROLLOUT]
    waited = f"trainers waited {trainer:.0%}, rollouts {rollout:.0%}"
    services = {name.removeprefix(SERVICE_IDLE): metrics[name] for name in metrics if name.startswith(SERVICE_IDLE)}
    busiest = min(services, key=lambda name: services[name], default="")
    if trainer >= MUCH and busiest and services[busiest] < MUCH:
        return f"{busiest}-bound: {waited}, {busiest} {services[busiest]:.0%} (give it more workers)"
    if min(trainer, rollout) >= MUCH and metrics.get(STALENESS) == 0:
        return f"they take turns: {waited} (try layout.max_staleness=1)"
    if trainer >= MUCH and _environments_dominate(metrics):
        return f"environments: {waited}; engines had nothing to decode {metrics[ENVIRONMENT]:.0%} of the time"
    if trainer >= MUCH and trainer - rollout >= CLEAR:
        if _scoring_dominates(metrics):
            return f"reward-bound: {waited}; rewards took {metrics[SCORE]:.0%}, generation {metrics[GENERATE]:.0%}"
        return f"rollout-bound: {waited}"
    if rollout >= MUCH and rollout - trainer >= CLEAR:
        return f"training-bound: {waited}"
    return f"balanced: {waited}"


def _colocated(metrics: Mapping[str, float]) -> str:
    generation = metrics[PHASE]
    # Waiting in either phase is caused by other workers, so it is shown separately.
    idle = metrics.get(ROLLOUT, 0.0) * generation + metrics.get(TRAINER, 0.0) * (1 - generation)
    shares = f"generation took {generation:.0%} of a training step, training {1 - generation:.0%}"
    shares += f", {idle:.0%} of it waiting for others" if idle >= MUCH else ""
    if generation >= DOMINATES and _environments_dominate(metrics):
        return f"environments: {shares}; engines had nothing to decode {metrics[ENVIRONMENT]:.0%} of that time"
    if generation >= DOMINATES:
        return f"{'reward' if _scoring_dominates(metrics) else 'generation'}-bound: {shares}"
    return f"{'training-bound' if 1 - generation >= DOMINATES else 'balanced'}: {shares}"


def _environments_dominate(metrics: Mapping[str, float]) -> bool:
    return metrics.get(ENVIRONMENT, 0.0) >= max(MUCH, metrics.get(GENERATE, 0.0))


def _scoring_dominates(metrics: Mapping[str, float]) -> bool:
    return SCORE in metrics and metrics[SCORE] > metrics.get(GENERATE, 0.0)
