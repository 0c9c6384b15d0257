"""What reward functions of TRL's and verl's form are called with, and what they return. Imports no torch.

TRL calls a function once for a batch, by keyword, with one list for each thing that it may ask for; verl calls one
once for a sample. Both are told here in the terms of a `Completion`, so that one reward step judges by all of them.
Sources: `GRPOTrainer._calculate_rewards` of TRL 1.16, `NaiveRewardManager.run_single` of verl 0.9.1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any, NoReturn, SupportsFloat

from distflow.data.formats import DATA_SOURCE, PROMPT
from distflow.data.gold import ANSWER
from distflow.flow.reward_form import Signature
from distflow.metrics.sums import SUM_SUFFIX, WEIGHT_SUFFIX
from distflow.types import Completion

_NO_COLUMNS = (PROMPT, "completion", "completion_ids")
_OF_THE_RUN = frozenset(
    (
        *(
            "actor",
            "calls",
            "checkpoint",
            "critic",
            "data",
            "dealing",
            "disk",
            "distill",
            "engine",
            "group",
            "lockstep",
        ),
        *("memory", "perf", "preference", "prompt_length", "recovery", "reference", "response_length", "reward"),
        *("rewards", "rollout", "rollout_corr", "score", "sequences", "solver", "staleness", "stealing", "timing_s"),
        *("trackers", "trainer", "val", "weights"),
    )
)
"""What stands before the slash in the names of the run's own metrics (docs/metrics.md)."""
_MARKS = (WEIGHT_SUFFIX, SUM_SUFFIX)
"""Ends of names that say how the values of workers are merged."""
_KNOWN = "global_step, max_steps and epoch"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a function is told as `trainer_state`, of what transformers has there."""

    global_step: int = 0
    """Training steps done."""
    max_steps: int = 0
    epoch: float = 0.0
    """Whole passes over the data done."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"trainer_state has {_KNOWN} here, and no {name!r}")


NO_STATE = TrainerState()
"""Where nothing is trained."""


@dataclass(slots=True)
class Logged:
    """What a function tells of the samples that it judges, by `log_extra` and `log_metric`."""

    samples: int
    columns: dict[str, list[str]] = field(default_factory=dict)
    """Values as JSON text, one a sample."""
    metrics: list[tuple[str, float]] = field(default_factory=list)

    def extra(self, column: str, values: Iterable[object]) -> None:
        """Take a column with a value for each sample; raises ValueError for another number of them."""
        found = [as_json(value) for value in values]
        if len(found) != self.samples:
            raise ValueError(f"log_extra({column!r}, …) got {len(found)} values; expected {self.samples}, one a sample")
        self.columns[str(column)] = found

    def metric(self, name: str, value: SupportsFloat) -> None:
        """Take a number, which is averaged over all calls of a training step; raises ValueError for names as the run's
        own metrics have them."""
        group, slash, _ = str(name).partition("/")
        if not str(name).strip() or (slash and group in _OF_THE_RUN) or str(name).endswith(_MARKS):
            raise ValueError(
                f"log_metric({str(name)!r}, …): the run's own metrics have such names; expected one of your own, such "
                f"as 'mine/{str(name).replace('/', '_').strip() or 'share'}'"
            )
        self.metrics.append((str(name), float(value)))

    def of(self, row: int) -> dict[str, str]:
        """Return what there is of one sample."""
        return {name: values[row] for name, values in self.columns.items()}


def as_json(value: object) -> str:
    """Write any value as JSON; what JSON lacks is text."""
    return json.dumps(value, default=str)


def list_arguments(
    found: Signature, samples: Sequence[Completion], logged: Logged, state: TrainerState
) -> dict[str, object]:
    """Make the keyword arguments of a function of TRL's form, as far as it takes them.

    A column that some rows lack is None there. The prompt of a conversation is in its task (`Uses.prompts`).
    """
    chats = [sample.task.get(PROMPT) for sample in samples]
    columns = dict.fromkeys(name for sample in samples for name in sample.task if name not in _NO_COLUMNS)
    given: dict[str, object] = {name: [sample.task.get(name) for sample in samples] for name in columns}
    given |= {
        "prompts": [chat or sample.prompt for chat, sample in zip(chats, samples, strict=True)],
        "completions": [
            [{"role": "assistant", "content": sample.response}] if chat else sample.response
            for chat, sample in zip(chats, samples, strict=True)
        ],
        "completion_ids": [list(sample.response_ids) for sample in samples],
        "trainer_state": state,
        "log_extra": logged.extra,
        "log_metric": logged.metric,
    }
    return given if found.collects else {name: value for name, value in given.items() if name in found.keywords}


def rewards_of(given: object, samples: int) -> list[Any]:
    """Read what a function of TRL's form returned: a reward for each sample, None where it has none.

    Raises TypeError for what is no list, ValueError for one of another length.
    """
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, Mapping)):
        raise TypeError(
            f"it returned {type(given).__name__}; expected a list with {_rewards(samples)}, one for each completion"
        )
    found = list(given)
    if len(found) != samples:
        raise ValueError(f"it returned {_rewards(len(found))}; expected {samples}, one for each completion")
    return [None if isinstance(one, SupportsFloat) and isnan(float(one)) else one for one in found]


def _rewards(number: int) -> str:
    return f"{number} reward{'' if number == 1 else 's'}"


def score_arguments(found: Signature, sample: Completion) -> dict[str, object]:
    """Make the keyword arguments of a function of verl's form, as far as it takes them.

    The gold answer is `reward_model.ground_truth` of the row, or its `answer`. Raises ValueError if there is none.
    """
    task = sample.task
    nested = task.get("reward_model")
    places = [nested if isinstance(nested, Mapping) else {}, task]
    truth = next((place["ground_truth"] for place in places if "ground_truth" in place), task.get(ANSWER))
    if truth is None and ANSWER not in task:
        there = ", ".join(task) or "nothing"
        raise ValueError(
            f"the task has neither reward_model.ground_truth nor 'answer', only {there}: data.fields.answer=COLUMN "
            "says which column the ground truth is"
        )
    info = task.get("extra_info")
    given: dict[str, object] = {
        "data_source": task.get(DATA_SOURCE),
        "solution_str": sample.response,
        "ground_truth": truth,
        "extra_info": {**(info if isinstance(info, Mapping) else {}), "num_turns": None, "rollout_reward_scores": {}},
    }
    return given if found.collects else {name: value for name, value in given.items() if name in found.keywords}


def score_values(given: object) -> tuple[object, dict[str, str]]:
    """Read what a function of verl's form returned: what a reward function here would, and what is no number.

    A mapping has the reward in `score`; `acc`, if it is there, is the verifiable one, as in verl's validation.
    """
    if not isinstance(given, Mapping):
        return given, {}
    if "score" not in given:
        raise TypeError(f"it returned the keys {sorted(map(str, given))}; expected a number, or a key 'score'")
    rest = {str(name): value for name, value in given.items() if name != "score"}
    texts = {name: as_json(value) for name, value in rest.items() if not isinstance(value, SupportsFloat)}
    numbers = {name: value for name, value in rest.items() if name not in texts}
    judged = numbers.get("acc", given["score"])
    return {**numbers, "reward": given["score"], "score": judged}, texts
