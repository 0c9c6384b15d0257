"""Reward functions in the form of TRL: by keyword, lists with an item for each of several samples."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.errors import PluginError, StepError
from distflow.flow.reward_form import find_signature
from distflow.runtime.dumps import dumped
from distflow.runtime.steps import StepContext
from distflow.types import Completion
from distflow.workers.reward import verify
from distflow.workers.reward_calls import TrainerState
from distflow.workers.reward_judging import judge_together, reward_function, spec_of

FUNCTIONS = '''
import asyncio
from functools import partial

CALLS = []

def by_length(completions, **kwargs):
    """As in TRL's quickstart."""
    return [float(len(set(completion))) for completion in completions]

def exact(completions, answer, **kwargs):
    return [1.0 if text == gold else 0.0 for text, gold in zip(completions, answer)]

def everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
    CALLS.append(columns)
    log_extra("seen", [{"prompt": prompt} for prompt in prompts])
    log_metric("mean_tokens", sum(map(len, completion_ids)) / len(completion_ids))
    step, steps, epoch = trainer_state.global_step, trainer_state.max_steps, trainer_state.epoch
    return [step + steps / 100 + epoch / 1000] * len(completions)

def contents(prompts, completions, **kwargs):
    return [len(prompt) + float(reply[0]["content"]) for prompt, reply in zip(prompts, completions)]

def if_math(completions, kind, **kwargs):
    return [float(text) if one == "math" else None for text, one in zip(completions, kind)]

def if_code(completions, kind, **kwargs):
    return [10.0 if one == "code" else float("nan") for one in kind]

async def later(completions, **kwargs):
    await asyncio.sleep(0.2)
    return [float(text) for text in completions]

async def later_still(completions, **kwargs):
    await asyncio.sleep(0.2)
    return [100.0] * len(completions)

def scaled(completions, scale, offset=0.0, **kwargs):
    return [scale * float(text) + offset for text in completions]

doubled = partial(scaled, scale=2.0)

class Above:
    def __init__(self, bound):
        self.bound = bound

    def __call__(self, completions, **kwargs):
        return [float(float(text) > self.bound) for text in completions]

class AboveLater(Above):
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        return super().__call__(completions, **kwargs)

above = Above(1.5)
above_later = AboveLater(1.5)
third = lambda prompts, completions, **kwargs: [3.0 for _ in completions]
by_keywords = lambda **kwargs: [float(text) for text in kwargs["completions"]]

def few(completions, **kwargs):
    return [1.0] * (len(completions) - 1)

def one_number(completions, **kwargs):
    return 1.0

def half_wrong(completions, **kwargs):
    return [1.0 if text == "1" else "one" for text in completions]

def raises(completions, **kwargs):
    raise OSError("no verifier")

def logs_few(completions, log_extra, **kwargs):
    log_extra("x", [1])
    return [1.0 for _ in completions]

def as_the_run(completions, log_metric, **kwargs):
    log_metric("critic/score/mean", 77)
    return [1.0 for _ in completions]

def as_a_weight(completions, log_metric, **kwargs):
    log_metric("share.weight", 77)
    return [1.0 for _ in completions]

def by_names_of_its_own(completions, log_metric, **kwargs):
    for name in ("mine/score", "actors/share", "critic"):
        log_metric(name, 77)
    return [1.0 for _ in completions]

def misspelt(completions, trainer_state, **kwargs):
    return [trainer_state.learning_rate for _ in completions]

def own(sample):
    return float(sample.response)

def no_loop(sample):
    return asyncio.get_running_loop()

async def two_loops(completions, **kwargs):
    return asyncio.run(later(completions))

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return {"score": float(solution_str == ground_truth) + bonus, "source": data_source, "pred": solution_str}
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS)
    return path


def batch(responses: Sequence[str], tasks: Sequence[dict[str, Any]] = (), epoch: int = 0) -> Batch:
    rows = len(responses)
    return Batch(
        {
            "uid": torch.tensor([[epoch, 9, 70 + row // 2] for row in range(rows)]),
            "group": torch.tensor([70 + row // 2 for row in range(rows)]),
            "sample": torch.arange(rows) % 2,
            "prompt_text": Ragged.from_texts(["say it"] * rows),
            "response_text": Ragged.from_texts(responses),
            "response_ids": Ragged.from_rows([[*range(2, 2 + len(text)), 1] for text in responses], torch.int64),
            "task": Ragged.from_texts([json.dumps(task) for task in tasks or [{"answer": "1"}] * rows]),
            "finish_reason": torch.zeros(rows, dtype=torch.int64),
        }
    )


def context(**changes: Any) -> StepContext:
    return StepContext("reward", worker="rollout/0", **changes)


def rewards(file: Path, name: str, responses: Sequence[str] = ("1", "2"), **settings: Any) -> list[float]:
    found = verify(batch(responses), context(), function=f"{file}:{name}", **settings).dense("reward").tolist()
    return [round(reward, 4) for reward in found]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("exact", [1, 0]), ("later", [1, 2]), ("doubled", [2, 4]), ("above", [0, 1]), ("above_later", [0, 1])),
        *(("third", [3, 3]), ("by_keywords", [1, 2]), ("by_length", [1, 1]), ("own", [1, 2])),
    ],
)
def test_functions_partials_lambdas_and_callable_objects(file: Path, name: str, expected: list[float]) -> None:
    assert rewards(file, name) == expected


def test_a_function_gets_all_that_trl_gives_it(file: Path) -> None:
    tasks = [{"answer": "1", "level": 3}, {"answer": "2"}, {"answer": "3", "level": None}, {"answer": "4", "level": 5}]
    ctx = context(training_step=7, training_steps=50)
    judged = verify(batch(["1", "22", "3", "4"], tasks, epoch=2), ctx, function=f"{file}:everything")
    assert judged.dense("reward").tolist() == pytest.approx([7 + 0.5 + 0.002] * 4), "step, steps and epoch"
    calls = reward_function(f"{file}:everything").parts[0].call.__globals__["CALLS"]  # type: ignore[attr-defined]
    assert calls == [{"answer": ["1", "2", "3", "4"], "level": [3, None, None, 5]}], "one call, every column"
    measured = ctx.metrics.drain()
    assert measured["mean_tokens"] == pytest.approx((2 + 3 + 2 + 2) / 4)
    assert [json.loads(text) for text in judged.texts("extra/seen")] == [{"prompt": "say it"}] * 4
    assert "extra/seen" in dumped(judged, ()).columns, "with the parts of the reward"


def test_messages_are_given_where_the_data_has_messages(file: Path) -> None:
    chat = {"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}
    assert verify(batch(["5", "6"], [chat] * 2), context(), function=f"{file}:contents").dense("reward").tolist() == [
        7,
        8,
    ]


def test_none_is_left_out_of_the_sum_and_all_none_of_training(file: Path) -> None:
    tasks = [{"kind": kind} for kind in ("math", "code", "prose", "math")]
    function = {
        "math": {"function": f"{file}:if_math", "weight": 0.5},
        "code": {"function": f"{file}:if_code", "weight": 2.0},
    }
    ctx = context()
    judged = verify(batch(["4", "5", "6", "7"], tasks), ctx, function=function)
    assert judged.dense("reward").tolist() == [2.0, 20.0, 0.0, 3.5]
    assert judged.dense("score").tolist() == [4.0, 10.0, 0.0, 7.0], "of the first that judges the sample"
    assert judged.texts("left_out") == ["", "", "reward missing (math and code returned None or NaN)", ""]
    parts = judged.dense("rewards/math").tolist()
    assert (parts[0], parts[3]) == (4.0, 7.0)
    assert judged.dense("rewards/math").isnan().tolist() == [False, True, True, False]
    assert ctx.metrics.drain()["reward/unjudged"] == 1.0
    assert "drop_reason" not in judged, "it is no failure"


def test_several_forms_together_and_asynchronous_ones_side_by_side(file: Path) -> None:
    names = ("later", "later_still", "exact", "own")
    function = {name: {"function": f"{file}:{name}"} for name in names} | {
        "score": {"function": f"{file}:compute_score"}
    }
    began = time.monotonic()
    judged = verify(batch(["1", "2"]), context(), function=function)
    assert time.monotonic() - began < 0.39, "two sleeps of 0.2 s at once"
    assert judged.dense("reward").tolist() == [1 + 100 + 1 + 1 + 1, 2 + 100 + 0 + 2 + 0]
    assert judged.texts("extra/pred") == ['"1"', '"2"']


def test_settings_are_keyword_arguments(file: Path) -> None:
    function = {"scaled": {"function": f"{file}:scaled", "scale": 3.0, "weight": 2.0}}
    assert verify(batch(["1", "2"]), context(), function=function).dense("reward").tolist() == [6.0, 12.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("few", "it returned 3 rewards; expected 4, one for each completion"),
        ("one_number", "it returned float; expected a list with 4 rewards"),
        ("raises", "OSError: no verifier"),
        ("logs_few", r"log_extra\('x', …\) got 1 values; expected 4"),
        ("as_the_run", r"log_metric\('critic/score/mean', …\): the run's own .* such as 'mine/critic_score_mean'"),
        ("as_a_weight", r"log_metric\('share.weight', …\): the run's own metrics have such names"),
        ("misspelt", "trainer_state has global_step, max_steps and epoch here, and no 'learning_rate'"),
    ],
)
def test_what_fails_fails_for_all_samples_of_the_call(file: Path, name: str, message: str) -> None:
    with pytest.raises(StepError, match=message):
        verify(batch(["1"] * 4), context(), function=f"{file}:{name}", on_error="stop")
    judged = verify(batch(["1"] * 4), context(), function=f"{file}:{name}")
    assert judged.texts("drop_reason") == ["reward error"] * 4


def test_metrics_by_names_of_its_own(file: Path) -> None:
    verify(batch(["1", "2"]), ctx := context(), function=f"{file}:by_names_of_its_own", on_error="stop")
    found = ctx.metrics.drain()
    assert {name: found[name] for name in ("mine/score", "actors/share", "critic")} == {
        "mine/score": 77.0,
        "actors/share": 77.0,
        "critic": 77.0,
    }


def test_what_is_no_number_fails_for_its_sample_alone(file: Path) -> None:
    judged = verify(batch(["1", "2", "1"]), context(), function=f"{file}:half_wrong")
    assert judged.texts("drop_reason") == ["", "reward error", ""]
    assert judged.dense("reward").tolist() == [1.0, 0.0, 1.0]


def test_with_a_time_limit_a_child_process_judges_the_list(file: Path) -> None:
    judged = verify(
        batch(["1", "22"]), ctx := context(training_step=4), function=f"{file}:everything", timeout_s=60.0, processes=2
    )
    assert judged.dense("reward").tolist() == [4.0, 4.0]
    assert ctx.metrics.drain()["mean_tokens"] == 2.5
    assert json.loads(judged.texts("extra/seen")[1]) == {"prompt": "say it"}
    failed = verify(batch(["1", "2"]), context(), function=f"{file}:few", timeout_s=60.0)
    assert failed.texts("drop_reason") == ["reward error"] * 2


def test_more_samples_than_are_checked_at_once_are_one_list(file: Path) -> None:
    found = judge_together(
        reward_function(f"{file}:exact"),
        [Completion("p", str(n % 2), {"answer": "1"}, "stop", ()) for n in range(200)],
        state=TrainerState(),
    )
    assert sum(verdict.values["reward"] for verdict in found) == 100
    judged = verify(batch(["1"] * 200), ctx := context(), function=f"{file}:everything")
    assert judged.rows == 200
    assert ctx.metrics.drain()["mean_tokens.weight"] == 1.0, "one call"


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("no_loop", r"no running event loop — asyncio\.run\(…\) around it gives a plain function an event loop"),
        ("two_loops", "from a running event loop — await it instead"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_errors_of_the_event_loop_name_the_cure(file: Path, name: str, cure: str) -> None:
    with pytest.raises(StepError, match=cure):
        verify(batch(["1"]), context(), function=f"{file}:{name}", on_error="stop")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(
            ("by_length", "lists"),
            ("doubled", "lists"),
            ("above_later", "lists"),
            ("above", "lists"),
            ("third", "lists"),
        ),
        *(("by_keywords", "lists"), ("own", "sample"), ("compute_score", "score"), ("CALLS", None)),
    ],
)
def test_the_source_tells_the_form(file: Path, name: str, form: str | None) -> None:
    found = find_signature(f"{file}:{name}")
    assert (None if found is None else found.form) == form


def test_what_cannot_be_called_by_keyword_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("def only(completions, /, **kwargs):\n    return []\nlist_of = [1]\n")
    with pytest.raises(PluginError, match="it takes completions by position alone"):
        reward_function(f"{path}:only")
    with pytest.raises(PluginError, match="list_of' is a list; expected a function"):
        reward_function(spec_of(f"{path}:list_of"))
