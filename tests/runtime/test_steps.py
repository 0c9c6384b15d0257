"""How step functions are called, and how their failures are told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.errors import PluginError, StepError, UserError
from distflow.flow.plan import StepPlan
from distflow.flow.step import GENERATED
from distflow.runtime.attempt import AskedTokens, Attempt, Event, Raised, Returned
from distflow.runtime.generate_step import GenerateStep
from distflow.runtime.metrics import MetricStore
from distflow.runtime.steps import StepContext, StepRunner, split
from distflow.types import Completion, Episode, SamplingParams, Uid

SOURCE = """\
import torch

from distflow import Batch, Ragged, step
from distflow.errors import UserError, WorkerFailed
from distflow.types import SamplingParams


def helper():
    raise ValueError("not today")


@step(role="score", reads=["group"], writes=["reward"])
def doubled(batch, ctx, *, factor=2.0):
    return batch.with_columns(reward=batch.dense("group") * factor)


@step(role="score", reads=["group"], writes=["reward"])
def raising(batch, ctx):
    helper()


@step(role="score", reads=["group"], writes=["reward"])
def picky(batch, ctx):
    raise UserError("factor=0: expected more")


@step(role="score", reads=["group"], writes=["reward"])
def broken(batch, ctx):
    raise WorkerFailed("the device is gone")


@step(role="score", reads=["group"], writes=["reward"])
def leaving(batch, ctx):
    raise SystemExit(0)


@step(role="score", reads=["group"], writes=["reward"])
def lost(batch, ctx):
    return batch.with_columns(reward=torch.tensor([1.0, torch.nan, torch.inf]))


@step(role="score", reads=["group"], writes=["reward"])
def reordered(batch, ctx):
    return doubled(batch, ctx).select([2, 1, 0])


@step(role="score", reads=["group"], writes=["reward"])
def narrow(batch, ctx):
    return batch.with_columns(reward=torch.ones(3, dtype=torch.int16))


@step(role="score", reads=["group"], writes=["reward"])
def bare(batch, ctx):
    return Batch({"reward": torch.ones(3)})


@step(role="score", reads=["group"], writes=["reward"], may_write=["drop_reason"])
def excused(batch, ctx):
    return lost(batch, ctx).with_columns(drop_reason=Ragged.from_texts(["", "too long", "too long"]))


@step(role="score", reads=["group"], writes=["reward"])
def nothing(batch, ctx):
    return None


@step(role="score", reads=["group"], writes=["reward", "rewards/*"])
def unwritten(batch, ctx):
    return batch


@step(role="score", reads=["group"], writes=["reward"], may_write=["rewards/*"])
def generous(batch, ctx):
    group = batch.dense("group")
    return batch.with_columns(**{"reward": group, "rewards/part": group, "spread": group, "group": group})


@step(role="score", reads=["group"], writes=["reward"])
def shorter(batch, ctx):
    return batch.slice(0, 1).with_columns(reward=batch.dense("group")[:1])


@step(role="generate", reads=[], writes=[])
async def drawn(episode, generate, ctx, *, temperature=1.0):
    completion = await generate(episode.prompt_ids, SamplingParams(temperature))
    if completion.response == "bad":
        helper()
    return {"turns": 1}


class Elsewhere:
    def __await__(self):
        yield


@step(role="generate", reads=[], writes=[])
async def astray(episode, generate, ctx):
    await Elsewhere()


@step(role="generate", reads=[], writes=[])
async def older(generate, ctx):
    return await generate(1.0)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def runner(file: Path, name: str, role: str = "score", **settings: Any) -> tuple[StepRunner, MetricStore]:
    writes = {"unwritten": ("reward", "rewards/*")}.get(name, GENERATED if role == "generate" else ("reward",))
    plan = StepPlan(
        name="judge",
        call=f"{file}:{name}",
        role=role,
        scope="sample",
        model=None,
        settings=settings,
        reads=() if role == "generate" else ("group",),
        writes=writes,
        may_write={"generous": ("rewards/*",), "excused": ("drop_reason",)}.get(name, ()),
    )
    metrics = MetricStore()
    context = StepContext("judge", worker="rollout/1", training_step=6, metrics=metrics)
    return StepRunner("rollout/1", [plan], {"judge": context}), metrics


def batch(groups: int = 3) -> Batch:
    positions = list(range(groups))
    return Batch({"group": torch.tensor(positions), "uid": torch.tensor([[0, 10 + p, p] for p in positions])})


def test_a_step_gets_its_settings_and_its_time_is_taken(file: Path) -> None:
    steps, metrics = runner(file, "doubled", factor=3.0)
    assert steps.call("judge", batch()).dense("reward").tolist() == [0.0, 3.0, 6.0]
    assert "timing_s/judge" in metrics.drain()


def test_what_a_step_does_not_declare_is_dropped_and_told_once(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is where another worker runs the step: only what it declares comes back."""
    monkeypatch.setattr(logging.getLogger("distflow"), "propagate", True)
    steps, _ = runner(file, "generous")
    for _ in range(2):
        assert set(steps.call("judge", batch()).columns) == {"group", "uid", "reward", "rewards/part"}
    told = [record.getMessage() for record in caplog.records]
    where = f"step 'judge' ({file}:generous) on rollout/1"
    assert [text for text in told if "does not declare" in text] == [
        f"{where} does not declare that it writes spread, so nobody gets it: add it to writes, or, of a score step, "
        "to may_write"
    ]


def test_what_a_step_raises_is_told_with_its_own_frames_first(file: Path) -> None:
    steps, _ = runner(file, "raising")
    with pytest.raises(StepError) as caught:
        steps.call("judge", batch(6))
    frames, message = split(caught.value)
    assert frames.startswith(f'  File "{file}", line 19, in raising\n')
    assert frames.endswith('in helper\n    raise ValueError("not today")\nValueError: not today')
    assert message == (
        f"step 'judge' ({file}:raising) raised ValueError on rollout/1, training step 7, with uids "
        "(epoch, prompt, position) (0, 10, 0), (0, 11, 1), (0, 12, 2), (0, 13, 3) and 2 more in hand"
    )
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_failure_without_uids_says_so_by_saying_nothing(file: Path) -> None:
    with pytest.raises(StepError, match=r"training step 7$"):
        runner(file, "raising")[0].call("judge", Batch({"group": torch.arange(2)}))


def test_settings_that_a_step_refuses_stay_the_users_error(file: Path) -> None:
    with pytest.raises(UserError, match=r"step 'judge' \(.*:picky\) on rollout/1: factor=0: expected more"):
        runner(file, "picky")[0].call("judge", batch())


def test_our_own_errors_pass_through(file: Path) -> None:
    with pytest.raises(Exception, match=r"^the device is gone$"):
        runner(file, "broken")[0].call("judge", batch())


@pytest.mark.parametrize(
    "name, message",
    [
        ("nothing", r"step 'judge' \(.*:nothing\) on rollout/1 returned NoneType; expected a Batch, for example"),
        ("unwritten", r"declares that it writes \['reward'\], but its batch has only \['group', 'uid'\]"),
        ("shorter", r"turned 3 rows into 1; a step keeps every row"),
        ("leaving", r"(?s)in leaving\n.*SystemExit: 0\nstep 'judge' .* raised SystemExit on rollout/1"),
        (
            "lost",
            r"on rollout/1 wrote 'reward' nan for 2 of 3 samples, uid \(epoch, prompt, position\) \(0, 11, 1\); "
            "expected finite numbers, or a drop_reason",
        ),
        (
            "reordered",
            r"on rollout/1 changed 'group', which it does not declare to write; a step keeps all rows in their",
        ),
        ("narrow", r"on rollout/1 wrote 'reward' as torch\.int16; expected one of torch\.bfloat16, "),
    ],
)
def test_what_comes_back_is_checked(file: Path, name: str, message: str) -> None:
    with pytest.raises(StepError, match=message):
        runner(file, name)[0].call("judge", batch())


def test_a_step_needs_to_return_no_more_than_what_it_writes(file: Path) -> None:
    assert set(runner(file, "bare")[0].call("judge", batch()).columns) == {"group", "uid", "reward"}


def test_samples_that_are_dropped_need_no_reward(file: Path) -> None:
    assert runner(file, "excused")[0].call("judge", batch()).texts("drop_reason")[1] == "too long"


EPISODE = Episode(Uid(0, 12, 7), 1, (4, 5), "23=", {})


def begun(step: GenerateStep) -> tuple[Attempt, list[Event]]:
    """An attempt that has come to its first request, and what it has done."""
    heard: list[Event] = []
    hear: Callable[[Attempt, Event], None] = lambda _, event: heard.append(event)  # noqa: E731
    attempt = step.attempt(EPISODE, hear)
    step.loop.post([attempt.begin])
    step.loop.settle()
    return attempt, heard


def answered(step: GenerateStep, attempt: Attempt, heard: list[Event], response: str) -> Event:
    """What it does when its first request is answered so."""
    answer = Completion(EPISODE.prompt, response, {}, "stop")
    step.loop.post([partial(attempt.answer, (0,), answer)])
    step.loop.settle()
    return heard[-1]


def test_a_generate_step_makes_one_sample_turn_by_turn(file: Path) -> None:
    steps, _ = runner(file, "drawn", role="generate", temperature=0.5)
    step = steps.generate_step("judge")
    attempt, heard = begun(step)
    (asked,) = heard
    assert asked == AskedTokens((0,), (4, 5), SamplingParams(0.5), train=True, aside=False)
    assert answered(step, attempt, heard, "good") == Returned({"turns": 1})


def test_what_a_generate_step_raises_is_told_with_its_prompt(file: Path) -> None:
    steps, _ = runner(file, "drawn", role="generate")
    step = steps.generate_step("judge")
    raised = answered(step, *begun(step), "bad")
    assert isinstance(raised, Raised)
    message = (
        r"(?s)in drawn\n.*ValueError: not today\nstep 'judge' .* raised ValueError on rollout/1, training step 7, "
        r"with uids \(epoch, prompt, position\) \(0, 12, 7\) in hand"
    )
    with pytest.raises(StepError, match=message):
        raise step.failed(raised.error, EPISODE)


def test_a_generate_step_may_await_what_it_likes(file: Path) -> None:
    _, heard = begun(runner(file, "astray", role="generate")[0].generate_step("judge"))
    assert heard == [Returned(None)]


def test_a_generate_step_of_the_old_form_is_refused_with_the_form_expected(file: Path) -> None:
    with pytest.raises(PluginError, match=r":older has the wrong signature .*; expected \(episode, generate, ctx\)"):
        runner(file, "older", role="generate")


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("helper", {}, "lacks @step"),
        ("doubled", {"factr": 1.0}, "wrong signature"),
        ("nowhere", {}, "has no 'nowhere'"),
    ],
)
def test_steps_that_do_not_fit_are_found_before_the_first_call(
    file: Path, name: str, settings: dict[str, float], message: str
) -> None:
    with pytest.raises(PluginError, match=message):
        runner(file, name, **settings)


def test_one_line_errors_have_no_frames() -> None:
    assert split(StepError("step 'x' returned int; expected a Batch")) == (
        "",
        "step 'x' returned int; expected a Batch",
    )


def test_ragged_columns_count_as_written(file: Path) -> None:
    steps, _ = runner(file, "doubled")
    assert steps.call("judge", batch().with_columns(text=Ragged.from_texts(["a", "b", "c"]))).rows == 3


def batch_of_tokens() -> Batch:
    """Two samples with three and one response tokens."""
    return Batch({"group": torch.tensor([0, 0]), "response_ids": Ragged.from_rows([[5, 6, 1], [1]], torch.int64)})


LIKE = batch_of_tokens().ragged("response_ids").like
WRONG = [
    (
        "advantage",
        torch.ones(2),
        r"must write one value per response token into 'advantage', 4 for this batch; it wrote .* of shape \[2\] — "
        r"advantage=responses\.like\(values\) with responses = batch\.ragged\('response_ids'\)",
    ),
    (
        "values",
        Ragged.from_rows([[1.0], [1.0]], torch.float32),
        "one value per response token into 'values', 4 for this batch; it wrote rows of 2 values in all",
    ),
    ("ref_logprobs", LIKE(torch.ones(4, 2)), "one value per response token into 'ref_logprobs'"),
    ("candidate_ids", LIKE(torch.ones(4)), r"number of values for each response token into 'candidate_ids', \[4, K\]"),
    ("teacher_candidate_logprobs", LIKE(torch.tensor([[0.0, torch.nan]] * 4)), "wrote nan into .* for 4 of 8 values"),
    ("old_logprobs", LIKE(torch.tensor([0.0, torch.nan, 0.0, 0.0])), "nan into 'old_logprobs' for 1 of 4 values"),
    ("reward", torch.ones(2, 1), r"one value per sample into 'reward', a tensor of shape \[2\]; it wrote .* \[2, 1\]"),
    ("rewards/style", LIKE(torch.ones(4)), "one value per sample into 'rewards/style', .* it wrote rows of 4 values"),
    ("drop_reason", torch.zeros(2), r"one text per sample into 'drop_reason'.* — drop_reason=Ragged\.from_texts"),
]


@pytest.mark.parametrize(("field", "column", "message"), WRONG, ids=[field for field, _, _ in WRONG])
def test_a_field_of_the_wrong_shape_is_told_where_it_is_written(
    tmp_path: Path, field: str, column: Any, message: str
) -> None:
    """Whatever reads it later would fail with an error about shapes, in somebody else's code."""
    writes = ("rewards/*",) if field.startswith("rewards/") else (field,)
    path = tmp_path / "writes.py"
    path.write_text(
        f"from distflow import step\n\n@step(role='train', reads=[], writes={list(writes)})\n"
        "def mine(batch, ctx, *, column=None):\n    return batch.with_columns(**column)\n"
    )
    plan = StepPlan("mine", f"{path}:mine", "train", "sample", None, {"column": {field: column}}, (), writes)
    steps = StepRunner("trainer/0", [plan], {"mine": StepContext("mine")})
    with pytest.raises(StepError, match=rf"step 'mine' \(.*:mine\) on trainer/0 .*{message}"):
        steps.call("mine", batch_of_tokens())


def test_fields_of_the_right_shape_and_fields_of_ones_own_pass(tmp_path: Path) -> None:
    path = tmp_path / "writes.py"
    path.write_text(
        "from distflow import step\n\n@step(role='train', reads=[], writes=['advantage', 'reward', 'mine'])\n"
        "def mine(batch, ctx, *, columns=None):\n    return batch.with_columns(**columns)\n"
    )
    columns = {"advantage": LIKE(torch.ones(4)), "reward": torch.ones(2), "mine": torch.ones(2, 7)}
    plan = StepPlan("mine", f"{path}:mine", "train", "sample", None, {"columns": columns}, (), tuple(columns))
    steps = StepRunner("trainer/0", [plan], {"mine": StepContext("mine")})
    assert steps.call("mine", batch_of_tokens()).columns.keys() >= columns.keys()
