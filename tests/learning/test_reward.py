from __future__ import annotations

import json
import logging
import math
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.errors import PluginError, StepError, UserError
from distflow.flow.step_declaration import read_declaration
from distflow.runtime.steps import StepContext
from distflow.types import FINISH_REASONS, Completion, FinishReason
from distflow.workers import reward_functions as tasks
from distflow.workers.reward import ON_ERROR, verify
from distflow.workers.reward_functions import REWARDS
from distflow.workers.reward_watch import RewardWatch


def _batch(*responses: str, answer: Any = "407", finish: FinishReason = "stop") -> Batch:
    rows = len(responses)
    return Batch(
        {
            "uid": torch.tensor([[0, 9, 70 + row // 2] for row in range(rows)]),
            "sample": torch.arange(rows) % 2,
            "prompt_text": Ragged.from_texts(["407="] * rows),
            "response_text": Ragged.from_texts(responses),
            "response_ids": Ragged.from_rows([[*range(2, 2 + len(text)), 1] for text in responses], torch.int64),
            "task": Ragged.from_texts([json.dumps({"answer": answer})] * rows),
            "finish_reason": torch.full((rows,), FINISH_REASONS.index(finish)),
        }
    )


def _ctx() -> StepContext:
    return StepContext("reward", worker="rollout/1", training_step=3)


def test_exact_match_is_the_default() -> None:
    batch = verify(_batch("407", "408", " 407\n", ""), _ctx())
    assert batch.dense("reward").tolist() == batch.dense("score").tolist() == [1, 0, 1, 0]
    assert batch.dense("reward").dtype == torch.float32
    assert "drop_reason" not in batch
    cut = verify(_batch("407", finish="length"), _ctx())
    assert cut.dense("reward").tolist() == [0]


@pytest.mark.parametrize(
    ("response", "finish", "reward", "score"),
    [
        ("407", "stop", 1.0, 1),
        ("407", "length", 0.75, 0),
        ("408", "stop", 0.75, 0),
        ("40", "stop", 0.5, 0),
        ("4075", "stop", 0.75, 0),
        ("", "stop", 0.0, 0),
        ("740", "stop", 0.25, 0),
    ],
)
def test_digits_copied(response: str, finish: FinishReason, reward: float, score: float) -> None:
    batch = verify(_batch(response, finish=finish), _ctx(), function="digits_copied")
    assert batch.dense("reward").tolist() == [reward]
    assert batch.dense("score").tolist() == [score]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("I think <answer> 7 </answer> no <answer>8</answer>.", "8"),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        ("2 + 2 makes 4.\nThe answer is **4**.", "4"),
        ("Answer: 12", "12"),
        ("first\n\n  13  \n", "13"),
        ("13", "13"),
        ("", ""),
        (r"\boxed{1", r"\boxed{1"),
    ],
)
def test_final_answers_are_found(response: str, answer: str) -> None:
    assert tasks.find_answer(response) == answer


def test_reasoning_gym_scores_by_its_own_rule() -> None:
    pytest.importorskip("reasoning_gym")
    from distflow.data.sources import reasoning_gym

    prompt = reasoning_gym(dataset="chain_sum", size=1, seed=1)[0]
    task = json.loads(json.dumps(prompt.task))
    right = Completion(prompt.text, f"The answer is {task['answer']}.", task, "stop")
    wrong = Completion(prompt.text, "The answer is 123456789.", task, "stop")
    assert tasks.reasoning_gym(right) == 1.0
    assert tasks.reasoning_gym(wrong) < 0.5


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_a_missing_package_is_not_a_bad_reward(
    timeout_s: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A child process would not see a patched sys.modules: this module is broken for both.
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "math_verify", raising=False)
    tasks._package.cache_clear()
    with pytest.raises(UserError, match="'math' needs the package math-verify.* pip install math-verify"):
        verify(_batch("1"), _ctx(), function="math", timeout_s=timeout_s)


PLUGINS = """
import os, sys, time

def parts(sample):
    print("a word on standard output")
    return {"reward": 0.5, "score": 1.0, "brevity": -len(sample.response)}

def seen(sample):
    assert sample.prompt == "407=" and sample.finish_reason == "stop" and sample.task["answer"] == "407"
    return len(sample.response_ids) + sample.response_ids[-1]

def picky(sample):
    return helper(sample.response)

def helper(text):
    if text == "bad":
        raise RuntimeError("cannot stand this text")
    if text == "slow":
        time.sleep(600)
    if text == "spin":
        while True:
            pass
    if text == "exit":
        sys.exit(5)
    if text == "die":
        os.kill(os.getpid(), 9)
    return 1.0

def nan(sample):
    return float("nan")


def huge(sample):
    return {"reward": 0.5, "style": -(10**39)}

def text(sample):
    return "good"

def several(sample):
    return [1.0, 0.0]

def nothing(sample):
    pass

def keyless(sample):
    return {"score": 1.0}

def whoami(sample):
    return os.getpid()

number = 3
"""


@pytest.fixture
def plugins(tmp_path: Path) -> str:
    path = tmp_path / "rewards.py"
    path.write_text(PLUGINS)
    return str(path)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_further_parts_become_columns(plugins: str, timeout_s: float | None) -> None:
    batch = verify(_batch("1", "12"), _ctx(), function=f"{plugins}:parts", timeout_s=timeout_s)
    assert batch.dense("reward").tolist() == [0.5, 0.5]
    assert batch.dense("score").tolist() == [1, 1]
    assert batch.dense("rewards/brevity").tolist() == [-1, -2]


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_a_function_sees_the_completion(plugins: str, timeout_s: float | None) -> None:
    batch = verify(_batch("1", "123"), _ctx(), function=f"{plugins}:seen", timeout_s=timeout_s)
    assert batch.dense("reward").tolist() == [3, 5]


@pytest.mark.parametrize("timeout_s", [None, 60.0])
@pytest.mark.parametrize("bad", ["bad", "exit"])
def test_errors_are_counted_and_dropped(plugins: str, bad: str, timeout_s: float | None) -> None:
    ctx = _ctx()
    batch = verify(_batch("good", bad), ctx, function=f"{plugins}:picky", timeout_s=timeout_s)
    assert batch.texts("drop_reason") == ["", "reward error"]
    metrics = ctx.metrics.drain()
    assert (metrics["reward/errors"], metrics["reward/timeouts"]) == (1, 0)


def test_zero_is_counted_too(plugins: str) -> None:
    ctx = _ctx()
    batch = verify(_batch("good", "bad"), ctx, function=f"{plugins}:picky", on_error="zero")
    assert batch.dense("reward").tolist() == [1, 0]
    assert "drop_reason" not in batch
    assert ctx.metrics.drain()["reward/errors"] == 1
    good, bad = batch.texts("extra/reward_error")
    assert (good, json.loads(bad)) == ("", "RuntimeError: cannot stand this text")


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_failures_may_be_left_out(plugins: str, timeout_s: float | None) -> None:
    ctx = _ctx()
    batch = verify(_batch("good", "bad"), ctx, function=f"{plugins}:picky", on_error="leave_out", timeout_s=timeout_s)
    assert batch.texts("left_out") == ["", "reward error"]
    assert batch.dense("reward").tolist() == [1, 0]
    assert "drop_reason" not in batch
    assert ctx.metrics.drain()["reward/errors"] == 1


def test_what_is_left_out_already_is_not_judged(plugins: str) -> None:
    ctx = _ctx()
    given = _batch("bad", "good", "bad", "good").with_columns(left_out=Ragged.from_texts(["away", "", "away", ""]))
    batch = verify(given, ctx, function=f"{plugins}:picky", on_error="stop")
    assert batch.dense("reward").tolist() == [0, 1, 0, 1]
    metrics = ctx.metrics.drain()
    assert (metrics["reward/samples"], metrics["reward/errors"]) == (2, 0)


@pytest.mark.parametrize(("on_error", "allowed", "too_many"), [("drop", 5, 6), ("zero", 5, 6), ("leave_out", 25, 26)])
def test_the_share_of_failures_that_ends_a_run(plugins: str, on_error: str, allowed: int, too_many: int) -> None:
    """By default; with leave_out the others of a group teach as before."""
    function = f"{plugins}:picky"
    verify(_batch(*["good"] * (100 - allowed), *["bad"] * allowed), _ctx(), function=function, on_error=on_error)
    many = _batch(*["good"] * (100 - too_many), *["bad"] * too_many)
    with pytest.raises(
        StepError, match=rf"{too_many} of 100 samples failed, more than max_error_rate=0\.\d+ allows"
    ) as caught:
        verify(many, _ctx(), function=function, on_error=on_error)
    told = str(caught.value)
    assert "flow.steps.reward.with.max_error_rate allows more" in told
    assert ("flow.steps.reward.with.on_error=leave_out" in told) == (on_error != "leave_out")


def test_failures_are_judged_by_the_last_thousand_samples(plugins: str) -> None:
    """One in a hundred of the whole run, and more than one in twenty of late; and the other way round."""
    ctx, function = _ctx(), f"{plugins}:picky"
    for _ in range(60):
        verify(_batch(*["good"] * 100), ctx, function=function)
    late = _batch(*["good"] * 90, *["bad"] * 10)
    for _ in range(5):
        verify(late, ctx, function=function)
    with pytest.raises(StepError, match="[56][0-9] of 1[01][0-9][0-9] samples failed, more than max_error_rate=0.05"):
        verify(late, ctx, function=function)
    healed = _ctx()
    verify(_batch(*["good"] * 90, *["bad"] * 10), healed, function=function, max_error_rate=0.1)
    for _ in range(11):
        verify(_batch(*["good"] * 100), healed, function=function)
    verify(_batch(*["good"] * 60, *["bad"] * 40), healed, function=function)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_stop_shows_the_users_frames_first(plugins: str, timeout_s: float | None) -> None:
    with pytest.raises(StepError) as caught:
        verify(_batch("good", "bad"), _ctx(), function=f"{plugins}:picky", on_error="stop", timeout_s=timeout_s)
    text = str(caught.value)
    assert text.startswith(f'  File "{plugins}", line ')
    assert text.index("in picky") < text.index("in helper") < text.index("cannot stand this text")
    assert text.index("cannot stand this text") < text.index("in step 'reward' on rollout/1, training step 4")
    assert text.endswith("uid (epoch, prompt, position) (0, 9, 70), sample 1")


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_a_function_that_fails_on_the_first_16_samples_ends_the_run(plugins: str, timeout_s: float | None) -> None:
    function, ctx = f"{plugins}:picky", _ctx()
    verify(_batch(*["bad"] * 15), ctx, function=function, timeout_s=timeout_s)
    with pytest.raises(StepError, match=r"(?s)^  File .*cannot stand.*all of the first \d+ samples failed") as caught:
        verify(_batch(*["bad"] * 200), ctx, function=function, timeout_s=timeout_s)
    judged = int(str(caught.value).split("all of the first ")[1].split()[0])
    assert judged < 215, "it ends in the middle of the batch"
    assert str(caught.value).endswith("; or flow.steps.reward.with.max_error_rate=1 alone goes on so")
    # A function that works once may be good enough, and so is any if every failure is allowed.
    verify(_batch("good", *["bad"] * 20), _ctx(), function=function, timeout_s=timeout_s, max_error_rate=0.5)
    verify(_batch(*["bad"] * 20), _ctx(), function=function, timeout_s=timeout_s, max_error_rate=1.0)


def test_failures_are_counted_and_logged_before_the_batch_is_over(
    plugins: str, caplog: pytest.LogCaptureFixture
) -> None:
    ctx = _ctx()
    with pytest.raises(StepError, match=r"all of the first \d+ samples failed") as caught:
        verify(_batch(*["slow"] * 40), ctx, function=f"{plugins}:picky", timeout_s=0.1)
    # Several are judged at once, and counted together.
    judged = int(str(caught.value).split("all of the first ")[1].split()[0])
    assert 16 <= judged < 40
    assert ctx.metrics.counts() == {"reward/samples": judged, "reward/errors": 0, "reward/timeouts": judged}
    assert "took longer than timeout_s=0.1" in caplog.text


def test_too_many_errors_stop_the_run(plugins: str) -> None:
    ctx = _ctx()
    few, many = _batch(*["good"] * 49, "bad"), _batch(*["good"] * 40, *["bad"] * 10)
    function = f"{plugins}:picky"
    verify(few, ctx, function=function)
    verify(few, ctx, function=function)
    verify(few, ctx, function=function)
    with pytest.raises(StepError, match=r"(?s)cannot stand.*13 of 200 samples failed, more than max_error_rate=0.05"):
        verify(many, ctx, function=function)
    assert verify(many, _ctx(), function=function, max_error_rate=0.0).dense("reward").sum() == 40


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan", "returned reward = nan; expected a finite number"),
        ("huge", r"returned style = -1e\+39; expected a finite number, of at most 3.4e\+38"),
        ("several", r"returned reward = \[1\.0, 0\.0\]; expected a number"),
        ("nothing", "returned reward = None; expected a number"),
        ("text", "returned reward = 'good'; expected a number"),
        ("keyless", r"returned keys \['score'\]; expected a number, or a key 'reward'"),
    ],
)
def test_what_is_no_reward_is_an_error(plugins: str, name: str, message: str) -> None:
    with pytest.raises(StepError, match=message):
        verify(_batch("1"), _ctx(), function=f"{plugins}:{name}", on_error="stop")


def test_parts_stay_columns_when_samples_fail(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text("def f(s):\n    assert s.response != 'bad'\n    return {'reward': 1.0, 'style': 2.0}\n")
    ctx = _ctx()
    verify(_batch("good"), ctx, function=f"{path}:f")
    batch = verify(_batch("bad"), ctx, function=f"{path}:f", on_error="zero")
    assert math.isnan(batch.dense("rewards/style").item())


def test_a_function_that_does_not_come_back_is_told_with_its_frames(
    plugins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can end it: it runs in this process. It goes on as soon as the file is there, after it was told."""
    monkeypatch.setattr("distflow.workers.reward._WATCH", RewardWatch(late_s=0.2, poll_s=0.05))
    waiting = Path(plugins).with_name("waiting.py")
    waiting.write_text(
        "import pathlib, time\nseen = pathlib.Path(__file__).with_name('seen')\n\n\ndef waits(sample):\n"
        "    while not seen.exists(): time.sleep(0.01)\n    return 1.0\n"
    )
    told, texts = threading.Event(), []

    def note(text: str, *values: object) -> None:
        texts.append(text % values)
        waiting.with_name("seen").touch()
        told.set()

    monkeypatch.setattr(logging.getLogger("distflow.workers.reward"), "warning", note)
    ctx = _ctx()
    assert verify(_batch("1"), ctx, function=f"{waiting}:waits").dense("reward").tolist() == [1.0]
    assert told.is_set()
    (text,) = texts
    assert "has not come back for" in text
    assert f'File "{waiting}", line 6, in waits' in text.splitlines()[1], text
    assert ctx.metrics.counts()["reward/hanging"] == 1


def test_nothing_is_kept_for_the_next_call_where_a_checkpoint_would_hold_it(plugins: str) -> None:
    """So any number of workers may judge: what one of them knows, another one need not know."""
    ctx = _ctx()
    verify(_batch("good", "bad"), ctx, function=f"{plugins}:picky", on_error="zero")
    verify(_batch("good"), ctx, function=f"{plugins}:parts")
    assert ctx.state == {}


@pytest.mark.parametrize("text", ["slow", "spin"])
def test_a_slow_function_is_killed_and_started_anew(plugins: str, text: str) -> None:
    ctx = _ctx()
    responses = ["good", text, "good"]
    batch = verify(_batch(*responses), ctx, function=f"{plugins}:picky", timeout_s=0.5)
    assert batch.texts("drop_reason") == ["", "reward timeout", ""]
    assert batch.dense("reward").tolist() == [1, 0, 1]
    metrics = ctx.metrics.drain()
    assert (metrics["reward/errors"], metrics["reward/timeouts"]) == (0, 1)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_functions_that_cannot_be_loaded(plugins: str, tmp_path: Path, timeout_s: float | None) -> None:
    with pytest.raises(PluginError, match="has no 'part'"):
        verify(_batch("1"), _ctx(), function=f"{plugins}:part", timeout_s=timeout_s)
    with pytest.raises(PluginError, match="is a int; expected a function"):
        verify(_batch("1"), _ctx(), function=f"{plugins}:number", timeout_s=timeout_s)


def test_a_plugin_that_ends_its_process_at_import(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import os\nos._exit(3)\n")
    with pytest.raises(PluginError, match=r"broken.py:f' could not be loaded \(see above\)"):
        verify(_batch("1"), _ctx(), function=f"{path}:f", timeout_s=60.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"function": "exact"},
            "function='exact': expected digits_copied, exact_match, format, .*reasoning_gym, regex, or module",
        ),
        ({"on_error": "ignore"}, "on_error='ignore': expected one of drop, leave_out, zero, stop"),
        ({"timeout_s": 0.0}, "timeout_s=0.0: expected seconds > 0, or null"),
        ({"timeout_s": 1.0, "processes": 0}, "processes=0: expected at least 1"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        verify(_batch("1"), _ctx(), **settings)


def test_the_declared_choices_are_what_the_tables_hold() -> None:
    found = read_declaration("distflow.workers.reward:verify").spec.choices
    assert {name.rpartition(":")[2] for name in found["function"]} == set(REWARDS)
    assert found["on_error"] == ON_ERROR
