"""The shipped reward functions, several of them with weights, asynchronous ones, and what a function must not do."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.algorithms.penalties import overlong
from distflow.data.batch import Batch, Ragged
from distflow.errors import RecipeError, StepError, UserError
from distflow.flow.recipe_check import check_imports, plan_recipe
from distflow.runtime.steps import StepContext
from distflow.types import Completion
from distflow.workers import reward_functions as shipped
from distflow.workers.reward import _judge_of, verify
from distflow.workers.reward_judging import components, judge, reward_function, spec_of

PLUGINS = """
import asyncio, os, sys

running = most = 0
first = os.getpid()

def length(sample, *, scale=1.0):
    return {"reward": scale * len(sample.response), "score": 0.5, "tokens": len(sample.response_ids)}

async def slow(sample):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.05)
    running -= 1
    if sample.response == "bad":
        raise RuntimeError("cannot stand this text")
    return most

def nan(sample):
    return float("nan")

def several(sample):
    return [1.0, 2.0]

def forks(sample):
    if os.getpid() == first:
        os.fork()
    return float(sample.response)

def floods(sample):
    for _ in range(2000):
        print("x" * 1000)
        print("y" * 1000, file=sys.__stdout__)
    return float(sample.response)

def leaves(sample):
    os._exit(7)

def two(prompt, response):
    return 1.0
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "rewards.py"
    path.write_text(PLUGINS)
    return str(path)


@pytest.fixture(autouse=True)
def _end_children() -> Iterator[None]:
    yield
    _judge_of.cache_clear()


def batch(*responses: str, tasks: list[dict[str, Any]] | None = None) -> Batch:
    rows = len(responses)
    texts = [json.dumps(task) for task in tasks or [{"answer": "407"}] * rows]
    return Batch(
        {
            "prompt_text": Ragged.from_texts(["407="] * rows),
            "response_text": Ragged.from_texts(responses),
            "response_ids": Ragged.from_rows([[*range(2, 2 + len(text)), 1] for text in responses], torch.int64),
            "task": Ragged.from_texts(texts),
            "finish_reason": torch.zeros(rows, dtype=torch.int64),
        }
    )


def context() -> StepContext:
    return StepContext("reward", worker="rollout/0", training_step=0)


def sample(response: str, answer: object = "407", tokens: int = 4) -> Completion:
    return Completion("p", response, {"answer": answer}, "stop", tuple(range(tokens)))


@pytest.mark.parametrize(
    ("response", "answer", "settings", "expected"),
    [
        ("so #### 1,234", "1234", {"pattern": r"#### (-?[0-9.,]+)", "ignore": ",$"}, 1.0),
        ("#### 5 no, #### 1234", "1234", {"pattern": r"#### (-?[0-9.,]+)"}, 1.0),
        ("#### 1234 no, #### 5", "1234", {"pattern": r"#### (-?[0-9.,]+)"}, 0.0),
        ("it is 1234", 1234, {"pattern": r"\d+"}, 1.0),
        ("it is 1-2", "1", {"pattern": r"(\d)-(\d)"}, 1.0),
        ("none", "1234", {"pattern": r"\d+"}, 0.0),
    ],
)
def test_regex(response: str, answer: object, settings: Mapping[str, str], expected: float) -> None:
    assert shipped.regex(sample(response, answer), **settings) == expected


def test_format() -> None:
    assert shipped.format(sample(" <think>a\nb</think>\n<answer>3</answer>\n")) == 1.0
    assert shipped.format(sample("x <think>a</think><answer>3</answer>")) == 0.0
    assert shipped.format(sample("33"), pattern=r"\d+") == 1.0
    with pytest.raises(UserError, match=r"pattern '\(' is no regular expression: missing \)"):
        shipped.format(sample("33"), pattern="(")


def test_length_penalty_is_that_of_dapo() -> None:
    """Equation 13 of arXiv 2503.14476, by cases."""
    longest, cache = 16384, 4096
    for tokens in (1, 12288, 12289, 14000, 16384, 20000):
        if tokens <= longest - cache:
            expected = 0.0
        else:
            expected = ((longest - cache) - tokens) / cache if tokens <= longest else -1.0
        # The token that ends a response does not count.
        given = shipped.length_penalty(sample("", tokens=tokens + 1), max_tokens=longest, buffer=cache)
        assert given == pytest.approx(expected, abs=1e-12)
        found = overlong(torch.tensor([tokens]), limit=longest, buffer=cache)
        assert given == pytest.approx(found.item(), abs=1e-12), "as in flow dapo"
    with pytest.raises(UserError, match="expected 0 < buffer <= max_tokens"):
        shipped.length_penalty(sample(""), max_tokens=8, buffer=0)


def test_an_answer_that_is_not_there() -> None:
    bad = Completion("p", "1", {"solution": 1}, "stop")
    for name in ("exact_match", "digits_copied", "math"):
        with pytest.raises(ValueError, match=r"no 'answer', only solution: data\.fields\.answer=COLUMN says which"):
            shipped.REWARDS[name](bad)


@pytest.mark.parametrize(
    "answer",
    [
        *(r"3\sqrt{2}", r"12\pi", "6+9i", "2k+2", "10^{5}", r"1-\frac1e", r"(3,\frac\pi2)", "(1,2]", r"x\in[1,3]"),
        *(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\{1,2,3\}", "1,000", r"\text{(B)}", r"90^\circ", "-3", "72"),
        *("#### 72", "5 + 5 = 10\n#### 10", r"It is $\frac{1}{2}$.", r"so \boxed{7}"),
    ],
)
def test_math_takes_the_whole_answer(answer: str) -> None:
    pytest.importorskip("math_verify")
    alone = {"#### 72": "72", "5 + 5 = 10\n#### 10": "10", r"It is $\frac{1}{2}$.": r"\frac{1}{2}"}.get(answer, answer)
    boxed = alone if "boxed" in alone else f"\\boxed{{{alone}}}"
    assert shipped.math(sample(f"Then it is ${boxed}$.", answer)) == 1.0
    assert shipped.math(sample(r"\boxed{3}", answer)) == 0.0


def test_a_response_that_takes_math_too_long_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its group is trained on: other samples of it are as good as they were."""
    (tmp_path / "math_verify.py").write_text(
        "import time\ndef parse(text, **_):\n    time.sleep(60 if 'slow' in text else 0)\n    return text\n"
        "def verify(expected, given, **_): return True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "math_verify", raising=False)
    shipped._package.cache_clear()
    ctx = context()
    found = verify(batch("slow", "quick"), ctx, function="math", timeout_s=2.0)
    assert found.dense("reward").tolist() == [0.0, 1.0]
    assert "drop_reason" not in found
    assert ctx.metrics.drain()["reward/timeouts"] == 1
    shipped._package.cache_clear()
    monkeypatch.delitem(sys.modules, "math_verify", raising=False)


def test_math_judges_in_processes_even_where_no_time_is_given() -> None:
    pytest.importorskip("math_verify")
    responses = [r"so \boxed{\frac{814}{2}}", "407", "$408$", r"\boxed{408}", "no"]
    found = verify(batch(*responses), context(), function="math")
    assert found.dense("reward").tolist() == [1, 1, 0, 0, 0]
    assert shipped.math(sample(r"it is $\frac{1}{2}$", r"\frac{1}{2}")) == 1.0
    assert shipped.math(sample(r"\boxed{(1,2)}", "(1,2)")) == 1.0, "an answer that is none by itself"


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_several_functions_are_added_up(mine: str, timeout_s: float | None) -> None:
    function = {
        "exact_match": {"weight": 2.0},
        "short": {"function": f"{mine}:length", "weight": -0.1, "scale": 2.0},
        "format": {"pattern": r"\d+", "weight": 0},
    }
    found = verify(batch("407", "x"), context(), function=function, timeout_s=timeout_s)
    assert found.dense("rewards/exact_match").tolist() == [1, 0]
    assert found.dense("rewards/short").tolist() == [6, 2]
    assert found.dense("rewards/short/tokens").tolist() == [4, 2]
    assert found.dense("rewards/format").tolist() == [1, 0]
    assert found.dense("reward").tolist() == pytest.approx([2 - 0.6, -0.2])
    assert found.dense("score").tolist() == [1, 0], "that of the first"


def test_a_number_is_a_weight(mine: str) -> None:
    found = verify(batch("407"), context(), function={"digits_copied": 0.5, "exact_match": 1})
    assert found.dense("reward").tolist() == [1.5]


def test_asynchronous_functions_work_side_by_side(mine: str) -> None:
    began = time.monotonic()
    found = verify(batch(*["407"] * 60, "bad"), context(), function=f"{mine}:slow", max_error_rate=1.0)
    assert found.dense("reward").max() == 61, "all were begun before the first ended"
    assert time.monotonic() - began < 0.05 * 60
    assert found.texts("drop_reason") == [""] * 60 + ["reward error"]
    both = {"exact_match": {}, "slow": {"function": f"{mine}:slow", "weight": 0.0}}
    assert verify(batch("407", "1"), context(), function=both).dense("reward").tolist() == [1, 0]


def test_an_asynchronous_function_in_processes(mine: str) -> None:
    found = verify(batch("407"), context(), function=f"{mine}:slow", timeout_s=60.0)
    assert found.dense("reward").tolist() == [1]


def test_a_failing_component_is_named(mine: str) -> None:
    spec = spec_of({"exact_match": {}, "strange": {"function": f"{mine}:nan"}})
    verdict = judge(reward_function(spec), sample("407"))
    assert verdict.failure == "error"
    assert verdict.message.endswith("the reward function 'strange' returned reward = nan; expected a finite number")
    spec = spec_of({"mine": {"function": f"{mine}:several"}})
    assert "'mine' returned reward = [1.0, 2.0]; expected a number" in judge(reward_function(spec), sample("1")).message


def test_the_users_frames_come_first(mine: str) -> None:
    for function in (f"{mine}:slow", {"a": {"function": f"{mine}:slow"}}):
        message = judge(reward_function(spec_of(function)), sample("bad")).message
        assert message.startswith(f'  File "{mine}", line ')
        assert message.endswith("RuntimeError: cannot stand this text")


def test_a_function_that_forks_leaves_no_second_worker(mine: str) -> None:
    """In processes alone: a copy of this one would be of no use to anybody."""
    found = verify(batch(*map(str, range(6))), context(), function=f"{mine}:forks", timeout_s=60.0, processes=1)
    assert found.dense("reward").tolist() == list(range(6)), "each sample has its own verdict, once"


def test_a_function_that_floods_standard_output(mine: str) -> None:
    found = verify(batch(*map(str, range(5))), context(), function=f"{mine}:floods", timeout_s=60.0)
    assert found.dense("reward").tolist() == list(range(5))


def test_a_function_that_ends_its_process(mine: str) -> None:
    with pytest.raises(StepError, match="exited with code 7(.|\n)*all of the first 16 samples failed"):
        verify(batch(*["1"] * 16), context(), function=f"{mine}:leaves", timeout_s=60.0, processes=1)


def test_scores_by_data_source() -> None:
    ctx = context()
    tasks = [{"answer": "1", "data_source": "openai/gsm8k"}, {"answer": "2", "data_source": "b"}, {"answer": "1"}]
    verify(batch("1", "1", "1", tasks=tasks), ctx, function="exact_match")
    found = ctx.metrics.drain()
    assert (found["score/openai/gsm8k/mean"], found["score/b/mean"]) == (1.0, 0.0)
    assert not [name for name in found if name.startswith("score/") and name.count("/") == 1]


REWARD = "flow.steps.reward.with.function"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{exatc_match: {}}", f"{REWARD}.exatc_match — there is no 'exatc_match' — did you mean 'exact_match'?"),
        ("{a: {function: nonsuch}}", f"{REWARD}.a.function — there is no 'nonsuch' — allowed: digits_copied, "),
        ("{regex: {}}", f"{REWARD}.regex.pattern — required, but not given"),
        ("{format: {patern: x}}", f"{REWARD}.format.patern — unknown setting — did you mean 'pattern'?"),
        ("{format: {pattern: 3}}", f"{REWARD}.format.pattern — expected text, got 3"),
        ("regex", f"{REWARD} — regex needs the setting 'pattern' — write it with its settings: {{regex: {{pattern"),
        ("{math: {weight: much}}", f"{REWARD}.math.weight — expected a number, got 'much'"),
        ("{math: fast}", f"{REWARD}.math — expected a mapping, got 'fast' — for example {{function: math"),
        ("{}", f"{REWARD} — no function is named — for example {{correct: "),
        ("{mine: {function: 'MINE:nonsuch'}}", f"{REWARD}.mine.function — MINE:nonsuch: MINE defines no 'nonsuch'"),
        ("{mine: {function: 'MINE:two'}}", "'two' has the wrong signature — expected def two(sample, *, setting"),
    ],
)
def test_mistakes_are_told_before_the_start(given: str, message: str, mine: str) -> None:
    with pytest.raises(RecipeError) as error:
        plan_recipe("quickstart", [f"{REWARD}={given.replace('MINE', mine)}"])
    assert message.replace("MINE", mine) in str(error.value)


def test_components_are_imported_by_validate(mine: str) -> None:
    Path(mine).write_text(PLUGINS + "\nlength = 3\n")
    loaded, plan = plan_recipe("quickstart", [f"{REWARD}={{a: {{function: '{mine}:length', scale: 2.0}}}}"])
    problems = check_imports(plan, loaded.origin)
    assert [problem.key for problem in problems] == [f"{REWARD}.a.function"]


def test_what_no_plan_has_checked() -> None:
    with pytest.raises(UserError, match="reward component 'a': weight 'x'"):
        components(spec_of({"a": {"weight": "x"}}))
    with pytest.raises(UserError, match="expected at least one reward function by name"):
        components("{}")
