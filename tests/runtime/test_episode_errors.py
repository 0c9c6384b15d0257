"""What becomes of samples on which a generate step fails: begun anew, left out, dropped, given the reward 0."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch
from distflow.data.samples import counts
from distflow.errors import StepError, UserError
from distflow.exchange.tally import Tally
from distflow.flow.plan import StepPlan
from distflow.flow.step import GENERATED, SEQUENCES
from distflow.runtime.generate_step import SampleLimits
from distflow.runtime.metrics import MetricStore
from distflow.runtime.sample_errors import EpisodeErrors, EpisodeFailed, ErrorPolicy
from distflow.runtime.steps import StepContext, StepRunner
from distflow.runtime.trajectories import Trajectories
from distflow.testing.engine_harness import run_until_done
from distflow.testing.fakes import FakeEngine
from distflow.types import (
    FINISH_REASONS,
    VALIDATION,
    Episode,
    FinishedSample,
    LeaseKind,
    SampleOutput,
    SampleRequest,
    Span,
    Uid,
    Version,
)
from tests.runtime.kit import TOKENIZER, EndlessTokenizer
from tests.runtime.test_trajectories import engine, lease

SOURCE = """
import asyncio
from collections import Counter

import torch

from distflow import step
from distflow.errors import UserError
from distflow.types import SamplingParams

ATTEMPTS = Counter()


class Odd(BaseException): ...


class Other:
    def __await__(self):
        yield "something"


def tool(kind):
    raise {"away": ConnectionError("sandbox away\\nfor long"), "late": TimeoutError(), "cancelled":
           asyncio.CancelledError(), "exits": SystemExit(0), "odd": Odd("odd"), "settings": UserError("level=0"),
           "gpu": torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")}[kind]


@step(role="generate", reads=[], writes=["reward", "rewards/turns"], environment=["replay"])
async def act(episode, generate, ctx, *, kind="away", fails=1, max_new_tokens=4, max_tokens=40):
    \"\"\"Sample 1 fails on its first attempts.\"\"\"
    ATTEMPTS[episode.sample] += 1
    fails = episode.sample == 1 and ATTEMPTS[1] <= fails
    prefix, params = episode.prompt_ids, SamplingParams(max_new_tokens=max_new_tokens)
    given = {"reward": 1.0, "rewards/turns": 2}
    if fails and kind == "early":
        episode.task["seen"] = True
        raise OSError("no sandbox")
    if fails and kind == "silent":
        return given
    assert episode.sample != 1 or "seen" not in episode.task
    first = await generate(prefix, params)
    prefix = (*prefix, *first.response_ids, 10)
    if fails and kind == "foreign":
        await generate((*prefix, 999), params)
    if fails and kind == "awaits":
        await Other()
    if fails and kind in ("none", "number", "empty"):
        return {"none": None, "number": 1.0, "empty": {}}[kind]
    if fails and kind in ("nan", "missing", "text", "huge", "mixed"):
        wrong = {"nan": float("nan"), "text": "one", "huge": 10**400}
        return {"missing": {"reward": 1.0}, "mixed": {1: 1.0, "a": 2.0}}.get(kind) or given | {"reward": wrong[kind]}
    if fails:
        tool(kind)
    await generate(prefix, params)
    return given


@step(role="generate", reads=[], writes=[], environment=["replay"])
async def stubborn(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    try:
        await generate(episode.prompt_ids, SamplingParams(max_new_tokens=9))
    finally:
        raise ValueError("there is no end")


@step(role="score", reads=["response_text"], writes=["reward", "score"])
def judge(batch, ctx):
    ones = torch.ones(batch.rows)
    return batch.with_columns(reward=ones, score=ones)
"""
KINDS = {
    "away": "ConnectionError: sandbox away",
    "late": "TimeoutError:",
    "cancelled": "CancelledError:",
    "exits": "SystemExit: 0",
    "odd": "Odd: odd",
    "early": "OSError: no sandbox",
    "silent": "returned before it awaited tokens of the sample",
    "foreign": "asks for what the engine cannot do",
    "awaits": "RuntimeError: Task got bad yield",
    "nan": "returned {'reward': nan}",
    "missing": "returned ['reward']",
    "none": "returned None",
    "number": "returned a float",
    "empty": "returned {}",
    "text": "returned {'reward': 'one'}",
    "huge": "returned {'reward': 1000",
    "mixed": "returned ['1', 'a']",
}
UNTOUCHED = ("early", "silent")
"""Kinds that fail before there are tokens."""


def made(folder: Path, call: str = "act", **settings: Any) -> tuple[Trajectories, StepContext]:
    (folder / "acts.py").write_text(SOURCE)
    returned = ["reward", "rewards/turns"] if call == "act" else []
    writes = (*GENERATED, *SEQUENCES, *returned)
    plan = StepPlan(
        "sample", f"{folder}/acts.py:{call}", "generate", "sample", None, settings, (), writes, (), ("replay",)
    )
    context = StepContext("sample", tokenizer=EndlessTokenizer())
    step = StepRunner("rollout/0", [plan], {"sample": context}).generate_step("sample")
    limits: Mapping[LeaseKind, SampleLimits] = dict.fromkeys(("train", "val"), SampleLimits(3, 40, 40))
    return Trajectories(step, limits, TOKENIZER, torch.float32), context


def finish(samples: Trajectories, server: FakeEngine, requests: Sequence[SampleRequest]) -> list[FinishedSample]:
    finished: list[FinishedSample] = []
    outputs: list[SampleOutput] = []
    for _ in range(99):
        samples.submit(server, requests)
        requests, done = samples.take(outputs)
        finished += done
        samples.submit(server, requests)
        requests = ()
        if not server.progress():
            return [*finished, *samples.take([])[1]]
        outputs = server.poll()
    pytest.fail("not done after 99 polls")


def whole(folder: Path, position: int = 5, **settings: Any) -> tuple[Batch, dict[str, float]]:
    samples, context = made(folder, **settings)
    samples.judge([], Version(0, 3))
    finish(samples, engine(3), samples.begin([lease(position)]))
    return samples.batch([position]), context.metrics.counts()


def of_sample(batch: Batch, number: int) -> Batch:
    return batch.select((batch.dense("sample") == number).nonzero().flatten())


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_begun_anew_with_other_random_numbers(tmp_path: Path, kind: str) -> None:
    batch, counted = whole(tmp_path, kind=kind)
    assert counted["rollout/errors"] == 1
    assert batch.texts("left_out") == [""] * 3
    assert batch.dense("reward").tolist() == [1.0] * 3
    (tmp_path / "well").mkdir()
    expected, none = whole(tmp_path / "well", fails=0)
    assert "rollout/errors" not in none
    tokens, undisturbed = (found.ragged("response_ids").rows() for found in (batch, expected))
    same = [torch.equal(*pair) for pair in zip(tokens, undisturbed, strict=True)]
    assert same == [True, kind in UNTOUCHED, True], "what it asked for before is drawn otherwise, and nothing else"


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_last_attempt_it_is_left_out_with_the_reason(tmp_path: Path, kind: str) -> None:
    batch, counted = whole(tmp_path, kind=kind, fails=9)
    assert counted["rollout/errors"] == 3
    assert batch.dense("sample").tolist() == [0, 1, 2]
    out = of_sample(batch, 1)
    assert out.texts("left_out")[0].startswith(KINDS[kind])
    assert "\n" not in out.texts("left_out")[0]
    assert FINISH_REASONS[int(out.dense("finish_reason"))] == "error"
    assert not out.ragged("response_mask").values.any()
    assert counts(batch).tolist() == [True, False, True]
    tokens = out.ragged("response_ids").values.tolist()
    assert bool(tokens) == (kind not in UNTOUCHED), "what it has written stays"
    assert len(out.ragged("rollout_logprobs").values) == len(tokens)
    assert out.texts("response_text") == TOKENIZER.decode_batch([tokens], skip_special=True)
    assert {tuple(span[:2]) for span in out.ragged("policy_versions").row(0).tolist()} == {(0, 3)}
    assert out.dense("reward").tolist() == [0.0]
    assert out.dense("rewards/turns").isnan().all()
    assert of_sample(batch, 2).ragged("response_mask").values.any()


def test_attempts_that_are_begun_anew_are_the_same_wherever_they_are_made(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        found.append(whole(tmp_path / name, fails=2)[0].ragged("response_ids").values.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("attempts, errors", [(1, 1), (5, 5)])
def test_max_attempts_says_how_often(tmp_path: Path, attempts: int, errors: int) -> None:
    batch, counted = whole(tmp_path, kind="early", fails=9, max_attempts=attempts)
    assert counted["rollout/errors"] == errors
    assert batch.texts("left_out") == ["", "OSError: no sandbox", ""]


def test_drop_gives_the_group_a_reason(tmp_path: Path) -> None:
    batch, counted = whole(tmp_path, on_error="drop")
    assert counted["rollout/errors"] == 1
    assert batch.texts("drop_reason") == ["", "ConnectionError: sandbox away", ""]


@pytest.mark.parametrize("kind", ["away", "nan"])
def test_zero_is_the_reward_of_what_it_has_written_whoever_judges_it(tmp_path: Path, kind: str) -> None:
    batch, _ = whole(tmp_path, kind=kind, on_error="zero")
    assert batch.texts("left_out") == [""] * 3
    assert of_sample(batch, 1).ragged("response_mask").values.any()
    assert batch.dense("reward").tolist() == [1.0, 0.0, 1.0]
    first, why, last = batch.texts("extra/generate_error")
    assert (first, last) == ("", "")
    assert json.loads(why).startswith(KINDS[kind])
    writes = ("reward", "score")
    plan = StepPlan("judge", f"{tmp_path}/acts.py:judge", "score", "sample", None, {}, ("response_text",), writes)
    judged = StepRunner("rollout/0", [plan], {"judge": StepContext("judge")}).call("judge", batch)
    assert judged.dense("reward").tolist() == judged.dense("score").tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("on_error, errors", [("retry", 3), ("drop", 1), ("zero", 1)])
def test_validation_replaces_nothing(tmp_path: Path, on_error: str, errors: int) -> None:
    batch, counted = whole(tmp_path, VALIDATION + 5, fails=9, on_error=on_error)
    assert counted["rollout/errors"] == errors
    assert batch.texts("left_out") == ["", "ConnectionError: sandbox away", ""]
    assert "drop_reason" not in batch


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"on_error": "stop"}, StepError, r"(?s)in tool\n.*sandbox away.*\nstep 'sample' .* raised ConnectionError"),
        ({"kind": "settings"}, UserError, r"step 'sample' .*acts\.py:act\) on rollout/0: level=0"),
        ({"kind": "gpu"}, StepError, r"uncorrectable ECC error"),
    ],
)
def test_what_is_no_accident_ends_the_run(
    tmp_path: Path, settings: Mapping[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        whole(tmp_path, **settings)


def test_each_kind_of_failure_is_logged_once_with_the_users_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = SOURCE.splitlines().index("        tool(kind)") + 1
    with caplog.at_level(logging.WARNING):
        whole(tmp_path, fails=9)
    (told,) = [record.getMessage() for record in caplog.records if "ConnectionError" in record.getMessage()]
    assert told.lstrip().startswith("File ")
    assert "in tool\n" in told
    assert re.search(r"sample 1 of uid .*\(0, 1, 5\), at .*acts\.py:\d+, attempt 1 of 3", told)
    assert f'acts.py", line {line}, in act' in told


def test_a_call_that_fails_when_it_is_ended_changes_nothing(tmp_path: Path) -> None:
    samples, context = made(tmp_path, "stubborn")
    server = engine()
    server.submit(samples.begin([lease()]))
    server.poll()
    samples.forget([5])
    assert samples.partials([]) == []
    assert context.metrics.counts()["rollout/errors"] == 3


def test_other_workers_are_told_no_tokens_of_a_sample_that_was_begun_anew(tmp_path: Path) -> None:
    """They may have those of the first attempt, and would take the others for what follows them."""
    samples, _ = made(tmp_path)
    server = engine(3)
    server.submit(samples.begin([lease()]))
    requests, _ = samples.take(run_until_done(server))
    assert [(request.sample, request.call) for request in requests] == [(0, (1,)), (1, (1,)), (2, (1,))]
    assert [len(request.prompt_ids) for request in requests] == [2 + 5, 2, 2 + 5]
    server.submit(requests)
    server.poll()
    told = [(output.sample, output.call, len(output.token_ids)) for output in samples.partials(server.partials())]
    assert told == [(0, (0,), 4), (0, (1,), 1), (1, (0,), 0), (2, (0,), 4), (2, (1,), 1)]
    (anew,) = [output for output in samples.partials(server.partials()) if output.sample == 1]
    assert anew.spans == (Span(0, 3, 0, 1),), "a group counts as old as its oldest token"
    done = {sample.sample: sample.calls for sample in finish(samples, server, [])}
    assert {number: [len(call.token_ids) for call in calls] for number, calls in done.items()} == {
        0: [4, 4],
        1: [0],
        2: [4, 4],
    }
    assert {call.finish_reason for call in (*done[0], *done[2])} == {"length"}


def test_a_replay_that_fails_is_begun_anew_without_the_record(tmp_path: Path) -> None:
    # The module counts the attempts of both.
    samples, context = made(tmp_path, fails=2)
    undisturbed, _ = made(tmp_path, fails=0)
    server = engine(2)
    server.submit(undisturbed.begin([lease()]))
    undisturbed.take(run_until_done(server))
    begun = tuple(output.begun for output in undisturbed.partials([]) if output.sample == 1)
    requests = {request.sample: request for request in samples.begin([lease(begun=begun)])}
    assert context.metrics.counts()["rollout/errors"] == 1
    assert (requests[1].begun, requests[1].call) == (None, (1,))


EPISODE = Episode(Uid(0, 1, 5), 1, (4,), "2=", {})
AWAY = EpisodeFailed("in tool\nstep 'sample' raised OSError", "OSError: away", "OSError")


def errors(**settings: Any) -> tuple[EpisodeErrors, Tally]:
    tally = Tally()
    policies: dict[LeaseKind, ErrorPolicy] = {"train": ErrorPolicy.of(settings)}
    return EpisodeErrors("sample", policies, lambda: tally, MetricStore()), tally


@pytest.mark.parametrize(
    "settings, most", [({}, 25), ({"on_error": "zero"}, 5), ({"max_error_rate": 0.1}, 10), ({"on_error": "drop"}, 5)]
)
def test_too_many_failures_end_the_run_with_the_users_frames_first(settings: Mapping[str, Any], most: int) -> None:
    judging, tally = errors(**settings)
    for _ in range(100 - most):
        judging.succeeded()
    attempts = 3 if settings.get("on_error", "retry") == "retry" else 1
    for _ in range(most):
        assert [judging.judge(AWAY, EPISODE, attempt) for attempt in range(1, attempts)] == ["again"] * (attempts - 1)
        judging.judge(AWAY, EPISODE, attempts)
    assert tally.own == (100, most), "a sample counts once"
    message = rf"^in tool\nstep 'sample' raised OSError: step 'sample' failed on {most + 1} of 101 samples, more than "
    with pytest.raises(StepError, match=message):
        judging.judge(AWAY, EPISODE, attempts)


@pytest.mark.parametrize("rate", [None, 0.9])
def test_a_step_that_cannot_work_ends_the_run_at_once(rate: float | None) -> None:
    judging, _ = errors(on_error="leave_out", max_error_rate=rate)
    for _ in range(15):
        assert judging.judge(AWAY, EPISODE, 1) == "leave_out"
    with pytest.raises(StepError, match=r"failed on all of the first 16 samples, more than .*_rate=1 alone") as caught:
        judging.judge(AWAY, EPISODE, 1)
    assert "on_error" not in str(caught.value)
