"""What tools answer in generate steps, by `ctx.once`: recorded with the sample, and not asked for again elsewhere."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.errors import UserError
from distflow.exchange.partials import ANSWER_BYTES, Kept, cut
from distflow.flow.plan import StepPlan
from distflow.flow.step import ENVIRONMENT, GENERATED, SEQUENCES
from distflow.runtime.generate_step import SampleLimits
from distflow.runtime.steps import StepContext, StepRunner
from distflow.runtime.trajectories import REPLAY_DIFFERS, Trajectories
from distflow.testing.fakes import FakeEngine
from distflow.types import BegunSample, SampleOutput
from tests.runtime.kit import TOKENIZER, EndlessTokenizer
from tests.runtime.test_trajectories import engine, lease

SOURCE = """
import asyncio
import time
from pathlib import Path

from distflow import step
from distflow.types import SamplingParams

FOUR = SamplingParams(max_new_tokens=4)
KIND = dict(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])


def sell(log, price, *, words=()):
    with Path(log).open("a") as file:
        file.write(f"{price}\\n")
    return {"sold": price, "token": (9 + len(Path(log).read_text().split())) % 12, "words": ("as", "lists")}


async def sell_later(log, price):
    await asyncio.sleep(0.01)
    return sell(log, price)


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def buyer(episode, generate, ctx, *, max_new_tokens=4, max_tokens=60, log="", tool="sell", price=3):
    tool = sell if tool == "sell" else sell_later
    first = await generate(episode.prompt_ids, FOUR)
    told = await ctx.once("sell", tool, log, price)
    prefix = (*episode.prompt_ids, *first.response_ids, told["token"])
    second, other = await asyncio.gather(generate(prefix, FOUR), ctx.once("sell", sell_later, log, price + 1))
    await generate((*prefix, *second.response_ids, other["token"]), FOUR)
    return {"rewards/told": told["words"] == ["as", "lists"]}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
def plain_buyer(episode, generate, ctx, *, max_new_tokens=4, max_tokens=60, log="", price=3):
    first = generate(episode.prompt_ids, FOUR)
    told = ctx.once("sell", sell, log, price)
    other = ctx.once("sell", sell, log, price=price + 1, words=[object()])
    generate((*episode.prompt_ids, *first.response_ids, told["token"], other["token"]), FOUR)
    return {"rewards/told": told["words"] == ["as", "lists"]}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def careless(episode, generate, ctx, *, max_new_tokens=4, max_tokens=60, what="object"):
    async def asks():
        return await generate(episode.prompt_ids, FOUR)

    answers = {
        "object": lambda: {"at": [1, object()]},
        "key": lambda: {1: 2},
        "large": lambda: "x" * (17 << 10),
        "number": lambda: 1 << 70,
        "model": asks,
        "many": lambda: "x" * (15 << 10),
    }
    said = ""
    try:
        for _ in range(5 if what == "many" else 1):
            await ctx.once("tool", answers[what])
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    Path(__file__).with_name("said").write_text(said)
    await generate(episode.prompt_ids, FOUR)
    return {"rewards/told": 1}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
def careless_in_thread(episode, generate, ctx, *, max_new_tokens=4, max_tokens=60, what="coroutine"):
    class Later:
        def __await__(self):
            yield
    tools = {"coroutine": sell_later, "lambda": lambda log, price: sell_later(log, price), "other": lambda *_: Later()}
    try:
        ctx.once("sell", tools[what], "", 3)
    except TypeError as error:
        Path(__file__).with_name("said").write_text(str(error))
    generate(episode.prompt_ids, FOUR)
    return {"rewards/told": 1}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def lonely(episode, generate, ctx, *, max_new_tokens=4, max_tokens=60):
    await generate(episode.prompt_ids, FOUR)
    return {"rewards/told": ctx.shared.count}
"""


def trajectories(folder: Path, name: str, samples: int = 1, **settings: Any) -> Trajectories:
    (folder / "buying.py").write_text(SOURCE)
    writes = (*GENERATED, *SEQUENCES, "rewards/told")
    plan = StepPlan(
        "sample", f"{folder}/buying.py:{name}", "generate", "sample", None, settings, (), writes, (), ENVIRONMENT
    )
    context = StepContext("sample", tokenizer=EndlessTokenizer())
    step = StepRunner("rollout/0", [plan], {"sample": context}).generate_step("sample")
    return Trajectories(step, {"train": SampleLimits(samples, 60, 60)}, TOKENIZER, torch.float32)


def finish(samples: Trajectories, made: FakeEngine, begun: tuple[BegunSample, ...] = (), most: int = 100) -> None:
    """Decode until the group is whole, or so many tokens of a sample have been decoded."""
    samples.submit(made, samples.begin([lease(5, begun)]))
    deadline = time.monotonic() + 20
    while samples.left and most:
        assert time.monotonic() < deadline
        if not samples.asks:
            assert samples.wait(10.0)
        most -= samples.asks
        samples.submit(made, samples.take(made.poll())[0])


def left(samples: Trajectories, made: FakeEngine, tools: int) -> tuple[BegunSample, ...]:
    """What its owner keeps of the sample, by way of the pieces that it is told, once so many tools have answered."""
    kept, deadline = Kept(), time.monotonic() + 20
    while sum(bool(output.answer) for output in samples.partials([])) < tools:
        assert time.monotonic() < deadline
        assert samples.take([]) == ([], [])
    for output in samples.partials(made.partials()):
        assert kept.add(cut(output, 0, 1000), ("rollout/0", 0), 1 << 16) == "kept"
    return kept.begun()


@pytest.mark.parametrize("name, settings", [("buyer", {}), ("buyer", {"tool": "later"}), ("plain_buyer", {})])
@pytest.mark.parametrize("polls", [2, 5, 7])
def test_a_replayed_sample_asks_no_tool_again(tmp_path: Path, name: str, settings: dict[str, Any], polls: int) -> None:
    log = tmp_path / "log"
    first, made = trajectories(tmp_path, name, log=str(log), **settings), engine()
    finish(first, made, most=polls)
    begun = left(first, made, 0 if polls == 2 else 2)
    assert log.exists() == (polls > 2)
    second = trajectories(tmp_path, name, log=str(log), **settings)
    finish(second, engine(), begun)
    assert log.read_text().split() == ["3", "4"]
    batch = second.batch([5])
    tokens, mask = batch.ragged("response_ids").values, batch.ragged("response_mask").values
    assert tokens[~mask].tolist() == [10, 11]
    assert batch.dense("rewards/told").tolist() == [1.0]
    undisturbed = trajectories(tmp_path, name, log=str(tmp_path / "another"), **settings)
    finish(undisturbed, engine())
    assert undisturbed.batch([5]).ragged("response_ids").values.tolist() == tokens.tolist()


def test_what_is_asked_for_otherwise_is_asked_anew(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first, made = trajectories(tmp_path, "buyer", log=str(log)), engine()
    finish(first, made, most=6)
    second = trajectories(tmp_path, "buyer", log=str(log), price=7)
    finish(second, engine(), left(first, made, 2))
    assert log.read_text().split() == ["3", "4", "7", "8"]
    assert second.step.metrics.counts()[REPLAY_DIFFERS] == 1


def test_an_answer_is_told_at_once_and_passed_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first, made = trajectories(tmp_path, "buyer", log=str(log)), engine()
    finish(first, made, most=5)
    assert first.untold
    begun = left(first, made, 2)
    assert not first.untold
    second, other = trajectories(tmp_path, "buyer", log=str(log)), engine()
    finish(second, other, begun, most=1)
    again = left(second, other, 2)
    assert [record for record in again if record.answer] == [record for record in begun if record.answer]


@pytest.mark.parametrize(
    "what, said",
    [
        ("object", r"TypeError: ctx.once('tool'): the answer['at'][1] is a object; expected None"),
        ("key", "TypeError: ctx.once('tool'): key 1 of the answer is a int; expected"),
        ("large", "ValueError: ctx.once('tool'): the answer has 17411 bytes, after 0 of the sample's earlier"),
        ("number", "TypeError: ctx.once('tool'): the answer is a number of more than 64 bits; expected"),
        ("model", "RuntimeError: generate(…) was asked within the tool 'tool' of ctx.once"),
        ("many", "ValueError: ctx.once('tool'): the answer has 15363 bytes, after 61452 of the sample's earlier"),
    ],
)
def test_what_cannot_be_recorded_is_refused_in_the_step(tmp_path: Path, what: str, said: str) -> None:
    samples = trajectories(tmp_path, "careless", what=what)
    finish(samples, engine())
    assert (tmp_path / "said").read_text().startswith(said)
    assert samples.batch([5]).dense("rewards/told").tolist() == [1.0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("what", ["coroutine", "lambda", "other"])
def test_a_plain_step_is_told_that_a_tool_is_to_be_awaited(tmp_path: Path, what: str) -> None:
    samples = trajectories(tmp_path, "careless_in_thread", what=what)
    finish(samples, engine())
    said = (tmp_path / "said").read_text()
    assert said.startswith("ctx.once('sell'): <function ")
    assert "is to be awaited, and the step is a plain def — let the step be an async def, and await ctx.once" in said


def test_what_nothing_was_set_up_for_names_setup(tmp_path: Path) -> None:
    """A mistake of the declaration, which ends the run at the first sample."""
    with pytest.raises(UserError, match=r"(?s)ctx\.shared: step 'sample' has no `setup` .*setup=clients.*async def cl"):
        finish(trajectories(tmp_path, "lonely"), engine())
    context = StepContext("mine")
    with pytest.raises(UserError, match="step 'mine' has no `setup`"):
        context.shared  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'sharde'"):
        context.sharde  # noqa: B018
    context.shared = None
    assert context.shared is None, "what a setup has yielded"


def test_an_owner_keeps_answers_beside_what_is_reserved_for_tokens() -> None:
    kept, source = Kept(), ("rollout/0", 0)
    half = bytes(ANSWER_BYTES // 2)
    told = [SampleOutput(5, 1, (), (), (), "stop", call=(number,), digest=9, answer=half) for number in range(3)]
    assert [kept.add(cut(output, 0, 100), source, 256) for output in told] == ["kept", "kept", "refused"]
    assert kept.add(cut(told[0], 0, 100), source, 256) == "refused", "it is there"
    assert kept.begun() == tuple(output.begun for output in told[:2])


def test_it_belongs_to_episodes() -> None:
    with pytest.raises(UserError, match=r"ctx.once\('sell'\): step 'reward' makes no episode"):
        StepContext("reward").once("sell", print, 3)
