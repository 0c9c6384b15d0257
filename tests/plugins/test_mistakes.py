"""What newcomers get wrong in a plug-in, and what they are told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from distflow.errors import DistflowError, UserError
from distflow.launch.cli import run
from distflow.testing.plugins.child import run_suite
from distflow.testing.plugins.process import find_subjects
from tests.plugins.test_shipped import Told

STEPS = """
import random
from itertools import pairwise
from threading import Lock
from time import sleep

import torch

from distflow import Batch, Ragged, StepContext, step
from distflow.data.responses import RowResponse
from distflow.types import SamplingParams

SEEN = []


@step(role="score", reads=["reward"], writes=["score"])
def in_place(batch, ctx):
    batch.dense("reward").mul_(2.0)
    return batch.with_columns(score=batch.dense("reward"))


@step(role="score", reads=["reward"], writes=["rewards/centred"])
def too_small_a_scope(batch, ctx):
    reward = batch.dense("reward")
    return batch.with_columns(**{"rewards/centred": reward - reward.mean()})


@step(role="score", reads=["reward"], writes=["rewards/noise"])
def chance(batch, ctx):
    return batch.with_columns(**{"rewards/noise": torch.rand(batch.rows)})


@step(role="score", reads=["uid", "sample", "reward"], writes=["rewards/noise"])
def seeded_chance(batch, ctx):
    from distflow.types import Uid

    pairs = zip(batch.dense("uid").tolist(), batch.dense("sample").tolist())
    drawn = [ctx.rng(Uid(*uid), sample).random() for uid, sample in pairs]
    return batch.with_columns(**{"rewards/noise": torch.tensor(drawn)})


@step(role="score", reads=["reward"], writes=["rewards/calls"])
def module_state(batch, ctx):
    SEEN.append(batch.rows)
    return batch.with_columns(**{"rewards/calls": torch.full((batch.rows,), float(len(SEEN)))})


@step(role="score", reads=["reward"], writes=["rewards/long"])
def undeclared_read(batch, ctx):
    return batch.with_columns(**{"rewards/long": batch.ragged("response_ids").lengths.float()})


@step(role="score", reads=["reward"], writes=["score"])
def undeclared_write(batch, ctx):
    return batch.with_columns(score=batch.dense("reward"), extra=batch.dense("reward"))


@step(role="train", reads=["reward", "group", "response_ids"], writes=["advantage"], scope="group")
def one_a_sample(batch, ctx):
    return batch.with_columns(advantage=batch.dense("reward"))


@step(role="train", reads=["reward", "group", "response_ids"], writes=["advantage"], scope="group")
def no_group_of_one(batch, ctx):
    reward, values = batch.dense("reward"), []
    for a, b in pairwise(batch.group_bounds()):
        values.append(reward[a:b] - (reward[a:b].sum() - reward[a:b]) / (b - a - 1))
    responses = batch.ragged("response_ids")
    return batch.with_columns(advantage=responses.like(torch.cat(values).repeat_interleave(responses.lengths)))


@step(role="score", reads=["reward"], writes=["score"])
def fewer_rows(batch, ctx):
    return batch.slice(0, batch.rows - 1).with_columns(score=batch.dense("reward")[1:])


@step(role="score", reads=["reward"], writes=["score"])
def state_of_tensors(batch, ctx):
    ctx.state["last"] = batch.dense("reward")
    return batch.with_columns(score=batch.dense("reward"))


@step(role="read", reads=[], writes=[], samples=2)
def three_of_two(row, *, max_response_tokens=16):
    return [RowResponse(row.response("answer"))] * 3


@step(role="train", reads=["prompt_ids", "response_ids", "response_mask", "advantage"], writes=[])
def no_denominator(batch, ctx):
    scores = ctx.backend.score(batch, temperature=1.0, grad=True, entropy=False)
    ctx.backend.accumulate((scores.logprobs_BT * batch.padded("advantage")).sum())
    return batch


@step(role="train", reads=["prompt_ids", "response_ids", "response_mask", "advantage"], writes=[])
def mean_of_a_micro_batch(batch, ctx):
    scores = ctx.backend.score(batch, temperature=1.0, grad=True, entropy=False)
    ctx.backend.accumulate((scores.logprobs_BT * batch.padded("advantage")).mean())
    ctx.denominators["policy"] = ctx.denominators.get("policy", 0.0) + 1.0
    return batch


@step(role="train", reads=["reward", "response_ids"], writes=["advantage"], scope="batch")
def of_this_worker_alone(batch, ctx):
    values, responses = batch.dense("reward") - batch.dense("reward").mean(), batch.ragged("response_ids")
    return batch.with_columns(advantage=responses.like(values.repeat_interleave(responses.lengths)))


@step(role="generate", reads=[], writes=["rewards/turns"])
async def returns_nothing(episode, generate, ctx, *, temperature=1.0, max_new_tokens=4):
    await generate(episode.prompt_ids, SamplingParams(max_new_tokens=max_new_tokens))


@step(role="generate", reads=[], writes=[], environment=["replay"])
async def not_replayable(episode, generate, ctx, *, temperature=1.0, max_new_tokens=3, max_tokens=30):
    params = SamplingParams(max_new_tokens=max_new_tokens)
    completion = await generate(episode.prompt_ids, params)
    more = [random.choice([3, 4, 5]) for _ in range(4)]
    await generate((*episode.prompt_ids, *completion.response_ids, *more), params)


@step(role="generate", reads=[], writes=["rewards/tool_s"], environment=[])
async def times_a_tool(episode, generate, ctx, *, temperature=1.0, max_new_tokens=3, max_tokens=30):
    await generate(episode.prompt_ids, SamplingParams(max_new_tokens=max_new_tokens))
    return {"rewards/tool_s": random.random()}


@step(role="generate", reads=[], writes=[])
async def two_turns_undeclared(episode, generate, ctx, *, temperature=1.0, max_new_tokens=8):
    params = SamplingParams(max_new_tokens=2)
    completion = await generate(episode.prompt_ids, params)
    await generate((*episode.prompt_ids, *completion.response_ids, 3), params)


@step(role="generate", reads=[], writes=[])
async def without_a_bound(episode, generate, ctx):
    await generate(episode.prompt_ids, SamplingParams(max_new_tokens=8))


@step(role="generate", reads=[], writes=[], environment=["replay"])
async def no_room_for_tools(episode, generate, ctx, *, temperature=1.0, max_new_tokens=8):
    await generate(episode.prompt_ids, SamplingParams(max_new_tokens=8))


@step(role="generate", reads=[], writes=[])
async def of_no_column(episode, generate, ctx, *, temperature=1.0, max_new_tokens=8):
    assert episode.task["answer"]
    episode.task["nope"]
    await generate(episode.prompt_ids, SamplingParams(max_new_tokens=8))


@step(role="score", reads=["task"], writes=["score"])
def reads_no_column(batch, ctx):
    import json

    return batch.with_columns(score=torch.tensor([float(json.loads(task)["level"]) for task in batch.texts("task")]))


@step(role="read", reads=[], writes=[])
def without_a_length(row):
    return [RowResponse("1")]


@step(role="generate", reads=[], writes=[])
async def unfinished(generate, ctx):
    pass


@step(role="score", reads=[], writes=["score"])
async def awaits(batch, ctx):
    pass


ALONE = Lock()


@step(role="generate", reads=[], writes=[], environment=[])
def slow(episode, generate, ctx, *, temperature=1.0, max_new_tokens=1, max_tokens=1, seconds=0.0):
    generate(episode.prompt_ids, SamplingParams(max_new_tokens=1))
    with ALONE:
        sleep(seconds)


@step(role="generate", reads=[], writes=[], environment=[])
async def blocks(episode, generate, ctx, *, temperature=1.0, max_new_tokens=1, max_tokens=1, seconds=0.0):
    sleep(seconds)
    await generate(episode.prompt_ids, SamplingParams(max_new_tokens=1))
"""
FUNCTIONS = """
from distflow.algorithms.losses import TokenLoss


def detached(terms):
    return TokenLoss(-terms.advantages * terms.logprobs.detach(), terms.mask)


def already_summed(terms):
    return TokenLoss((-terms.advantages * terms.logprobs).sum(), terms.mask)


def unclamped(terms):
    ratio = (5 * (terms.logprobs - terms.old_logprobs)).exp()
    return TokenLoss(-terms.advantages * ratio, ratio > 2)


def across_rows(terms):
    advantages = terms.advantages - terms.advantages.mean()
    return TokenLoss(-advantages * terms.logprobs, terms.mask)


def misspelt(terms):
    return TokenLoss(-terms.advantage * terms.logprobs, terms.mask)


def wrong_shape(rewards_B, group_B):
    return rewards_B[:-1]


def of_the_batch(rewards_B):
    return rewards_B - rewards_B.mean()

"""
# Imports no torch, so that its processes start quickly.
REWARDS = """
import os
import random

from distflow.data.sources import PromptText


def nan_reward(sample):
    return float("nan") if not sample.response.strip() else 1.0


def nones(completions, **kwargs):
    return [None for _ in completions]


def nans(completions, **kwargs):
    return [float("nan")] * len(completions)


def text_reward(sample):
    return "1.0"


def no_reward_key(sample):
    return {"score": 1.0}


def raises(sample):
    return float(sample.task["solution"] == int(sample.response))


def reads_numbers(sample):
    return float(sample.task["answer"] + 1 > 3)


def changes_the_task(sample):
    sample.task["seen"] = True
    return 1.0


def moody(sample):
    return random.random()


def no_gold(sample):
    return float(sample.response == "")


def one_for_all(completions, **kwargs):
    return [1.0]


def a_mean(completions, **kwargs):
    return sum(map(len, completions)) / len(completions)


def of_different_ones(completions, **kwargs):
    return [float(len(text)) for text in set(completions)]


def by_length(prompts, completions, **kwargs):
    return [float(len(text)) / (1.0 + max(map(len, completions))) for text in completions]


async def by_length_later(completions, answer, **kwargs):
    return by_length(None, completions)


def unstable():
    return [PromptText(f"{random.random()}", {}) for _ in range(3)]


def empty():
    return []


def not_plain():
    return [PromptText("1+1=", {"answer": object()})]


def untyped():
    return [3, 4]


def silent():
    return ["", "2="]


def hangs(sample):
    while True:
        pass


def leaves(sample):
    os._exit(3)


def forks(sample):
    os.fork()
    return 1.0


def floods(sample):
    print("x" * 10_000)
    return 1.0


def floods_too_much(sample):
    print("x" * 40_000_000)
    return 1.0


def ends_its_parent(sample):
    os.kill(os.getppid(), 15)
    return 1.0


def no_text():
    raise ValueError("\\ud800 is no text")


def hashed():
    return [PromptText(f"{hash('seed') % 1000}=", {})]


class NoNan:
    def __init__(self, run, *, colour="black"):
        self.file = (run.folder / "curve.csv").open("a")

    def log(self, step, values):
        self.file.write(str([int(value) for value in values.values()]))

    def samples(self, step, rows):
        pass

    def close(self):
        self.file.close()


def three(a, b, c):
    return 0.0
"""
MISTAKES = {
    "in_place": r"changes 'reward' of its batch in place; other steps .* compute new ones",
    "too_small_a_scope": r"its scope is 'sample', but .*'rewards/centred' is \S+ among them and \S+ alone .*'group'",
    "chance": r"two calls with the same batch differ: 'rewards/noise' is .* take ctx\.rng\(uid, sample\)",
    "module_state": r"two calls with the same batch differ: .* keep nothing in the module",
    "undeclared_read": r"(?s)fails with 12 samples.*mine\.py.*field 'response_ids' is not in this batch",
    "undeclared_write": r"it does not declare that it writes extra, so nobody gets it: add it to writes",
    "one_a_sample": r"must write one value per response token into 'advantage', \d+ for this batch; .*responses\.like",
    "no_group_of_one": r"(?s)fails with groups of one sample:.*wrote nan into 'advantage' for \d+ of \d+ values",
    "fewer_rows": r"turned 12 rows into 11; a step keeps every row",
    "state_of_tensors": r"ctx\.state cannot be saved in a checkpoint: .* keep plain values",
    "no_denominator": r"adds nothing to ctx\.denominators\['policy'\]",
    "mean_of_a_micro_batch": r"its gradient depends on how the batch is cut: norm .* sum the loss over tokens",
    "of_this_worker_alone": r"with two training workers, .* needs ctx\.all_reduce or ctx\.all_gather",
    "returns_nothing": r"returned None; expected a mapping with a number for each of \['rewards/turns'\]",
    "not_replayable": r"makes another sample of the same episode and the same tokens",
    "times_a_tool": r"makes another sample .*'rewards/tool_s' is",
    "two_turns_undeclared": r"asks for more after its first turn.* declares no environment",
    "without_a_bound": r"a generate step needs the settings temperature, max_new_tokens .*max_new_tokens: int = 16",
    "no_room_for_tools": r"its environment's tokens need room too.*declare max_tokens",
    "of_no_column": r"(?s)KeyError: 'nope'.*Its tasks were made up, \{\"answer\": \"2\"\}: --data FILE",
    "reads_no_column": r"(?s)KeyError: 'level'.*Its tasks were made up, \{\"answer\": \"2\"\}: --data FILE",
    "without_a_length": r"a read step needs the settings max_response_tokens .*max_response_tokens: int = 1024",
    "three_of_two": r"returned 3 values; expected a list of 1 to 2 RowResponse",
    "NoNan": r"(?s)judge\.py.*cannot convert float NaN to integer",
    "detached": r"the loss has no gradient: nothing in it depends on terms\.logprobs",
    "already_summed": r"returned \(a tensor of shape \[\], .*; do not sum or average, `aggregate` does",
    "unclamped": r"its (loss|gradient) is nan or infinite for log-probs that differ by up to 30; .* clamp",
    "across_rows": r"its gradient depends on how the batch is cut",
    "misspelt": r"(?s)mine\.py.*terms has no 'advantage' — did you mean 'advantages'\?",
    "wrong_shape": r"advantage function .* returned shape \[11\]; expected a tensor with one value per sample, \[12\]",
    "of_the_batch": r"its scope is 'group', but what a group gets depends on the others",
    "nan_reward": r"(?s)fails on 15 of \d+ responses, first on '' .*returned reward = nan; expected a finite number",
    "nones": r"gives none of 6 responses to 2 prompts a reward, but None or NaN: .* — return a number",
    "nans": r"gives none of 6 responses to 2 prompts a reward, but None or NaN: .* — return a number",
    "text_reward": r"returned reward = '1\.0'; expected a number",
    "no_reward_key": r"returned keys \['score'\]; expected a number, or a key 'reward'",
    "raises": r"(?s)judge\.py.*sample\.task\[.solution.\].*KeyError.*Its task was made up, \{'answer': .*--data",
    "one_for_all": r"all 6 responses to 2 prompts .* one call, as in a run:\s+ValueError: it returned 1 reward; exp",
    "a_mean": r"(?s)by one call.*it returned float; expected a list with 6 rewards, one for each completion",
    "of_different_ones": r"(?s)by one call.*it returned 3 rewards; expected 6, one for each completion",
    "changes_the_task": r"changes sample\.task for the response .*: all samples of a prompt share it",
    "moody": r"gives the response .* later: a sample that is made again after a loss",
    "unstable": r"gives another text for a second source .* first at index 0: .* let the index and a seed decide",
    "empty": r"the data source list is empty; expected at least one prompt",
    "not_plain": r"column 'answer' of prompt 0 cannot be sent to workers as JSON: .* — make it text, numbers",
    "untyped": r"prompt 0 is a int; expected a PromptText\(text, task\), a mapping of columns, or text",
    "silent": r"prompt 0 is empty",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(STEPS + FUNCTIONS)
    (tmp_path / "judge.py").write_text(REWARDS)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def placed(name: str) -> str:
    return f"./{'judge' if name in REWARDS else 'mine'}.py:{name}"


def told_of(name: str, *settings: str, kind: str | None = None, data: str | None = None) -> Told:
    (subject,) = find_subjects([placed(name)], kind, settings, data)
    report = Told()
    try:
        run_suite(subject, report)
    except DistflowError as error:
        report.add("wrong", str(error))
    return report


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_with_their_cure(folder: Path, name: str) -> None:
    report = told_of(name)
    level = "note" if name in ("of_this_worker_alone", "moody", "times_a_tool") else "wrong"
    assert any(re.search(MISTAKES[name], text) for text in report.of(level)), report.findings


def test_tasks_are_those_of_real_rows(folder: Path) -> None:
    """A key is there only if rows have it, with --data and in a recipe alike."""
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "nope": 1}\n')
    assert told_of("of_no_column", data="rows.jsonl").of("wrong") == []
    (found,) = told_of("of_no_column", data="prompts.jsonl").of("wrong")
    assert "KeyError: 'nope'" in found
    assert "made up" not in found


def test_all_that_cannot_be_called_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["test-plugin", *map(placed, ["unfinished", "moody", "awaits", "nowhere"])]) == 2
    told = capsys.readouterr().err
    assert "'unfinished' cannot generate" in told
    assert "'awaits' is an async function; a step is a plain function" in told
    assert "defines no 'nowhere'" in told


@pytest.mark.long
@pytest.mark.parametrize("name", ["slow", "blocks"])
def test_each_sample_of_a_generate_step_has_the_time_of_a_call(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All 20 take longer together."""
    assert run(["test-plugin", placed(name), "--with", "seconds=0.8", "--limit", "6"]) == 0
    assert re.search(r"making samples, \d+ of 20 done", capsys.readouterr().err)


def test_what_is_right_is_not_told(folder: Path) -> None:
    for name in ("seeded_chance", "reads_numbers"):
        report = told_of(name)
        assert report.of("wrong", "note") == [], name
        assert len(report.of("ok")) >= 2


def test_rewards_that_compare_responses_are_judged_together(folder: Path) -> None:
    """What a response gets may depend on the others of the call."""
    for name, data, prompts in (
        ("by_length", None, 2),
        ("by_length_later", None, 2),
        ("by_length", "prompts.jsonl", 1),
    ):
        report = told_of(name, data=data)
        assert report.of("wrong") == [], name
        assert any(f"{3 * prompts} responses to {prompts} prompt" in text for text in report.of("ok"))


def test_a_replay_that_is_not_one(folder: Path) -> None:
    text = (
        (folder / "mine.py")
        .read_text()
        .replace(
            "    more = [random.choice([3, 4, 5]) for _ in range(4)]",
            "    more = [3 + ctx.policy_version] * (1 + SEEN.count(episode.sample))\n    SEEN.append(episode.sample)",
        )
    )
    (folder / "mine.py").write_text(text)
    assert any("another sample" in found for found in told_of("not_replayable").of("wrong"))


def test_gold_answers_of_real_tasks(folder: Path) -> None:
    told = told_of("no_gold", data="prompts.jsonl").of("note")
    assert told == ["gold answers get a score of up to 0, no more than nonsense on average"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["three"], r"what 'three' is cannot be told from its parameters — say it with --as: step, generate, reward"),
        (["moody", "--as", "rewrad"], r"--as rewrad: did you mean 'reward'\?"),
        (["moody", "--with", "scale"], r"--with scale: expected NAME=VALUE"),
        (["moody", "--data", "nowhere.jsonl"], r"--data nowhere\.jsonl: there is no such file"),
        (["mody"], r"judge\.py defines no 'mody' at its top level; did you mean 'moody'\?"),
    ],
)
def test_what_cannot_be_tested(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(["test-plugin", f"./judge.py:{arguments[0]}", *arguments[1:]]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_recipe_without_plug_ins_of_its_own(folder: Path) -> None:
    with pytest.raises(UserError, match="quickstart: the recipe names no plug-ins of your own"):
        find_subjects(["quickstart"], None, (), None)
    with pytest.raises(UserError, match="custom_step: a recipe says itself what its plug-ins are"):
        find_subjects(["custom_step"], None, ("scale=2",), None)


def test_what_would_take_a_process_with_it_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the command ends, with all that was started."""
    names = ["hangs", "leaves", "forks", "floods", "floods_too_much", "ends_its_parent", "no_text", "hashed"]
    assert run(["test-plugin", *map(placed, names), "--limit", "4", "--json"]) == 1
    out, err = capsys.readouterr()
    assert re.search(r"^  …      judging the response .* \(\d+ s\)$", err, re.MULTILINE), "while it runs"
    found = {one["plugin"].rpartition(":")[2]: one for one in json.loads(out)}
    last = {name: found[name]["findings"][-1]["text"] for name in names}
    assert re.search(r"does not come back within 4 s, judging the response .* with timeout_s beside", last["hangs"])
    assert re.search(r"ends its process \(exit code 3\), judging the response", last["leaves"])
    assert re.search(r"has printed more than 32 MiB, judging the response", last["floods_too_much"])
    assert "\\ud800 is no text" in " ".join(one["text"] for one in found["no_text"]["findings"])
    assert re.search(r"ends its parent process \(signal 15\)", last["ends_its_parent"])
    assert re.search(r"prints \d{6,} bytes meanwhile", " ".join(one["text"] for one in found["floods"]["findings"]))
    assert re.search(r"two processes do not agree: '\d+=' and '\d+=' — it must not depend on hash", last["hashed"])
    assert {name: found[name]["passed"] for name in names} == {
        "hangs": False, "leaves": False, "forks": True, "floods": True, "floods_too_much": False,
        "ends_its_parent": False, "no_text": False, "hashed": False,
    }  # fmt: skip


FORGETFUL = """
import asyncio


async def sum_of(text):
    await asyncio.sleep(0)
    return text


async def forgets(sample):
    found = sum_of(sample.response)
    await asyncio.sleep(0)
    return float("None" in str(found))


def judge(sample):
    sum_of(sample.response)
    return 0.0
"""


def test_a_coroutine_that_is_never_awaited_is_told_with_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "forgetful.py").write_text(FORGETFUL)
    names = {"forgets": "found = sum_of", "judge": "    sum_of(sample"}
    assert run(["test-plugin", *(f"./forgetful.py:{name}" for name in names), "--json"]) == 1
    found = {one["plugin"].rpartition(":")[2]: one["findings"] for one in json.loads(capsys.readouterr().out)}
    for name, made in names.items():
        line = FORGETFUL[: FORGETFUL.index(made)].count("\n") + 1
        (wrong,) = [one["text"] for one in found[name] if one["level"] == "wrong"]
        assert wrong.startswith(f"coroutine 'sum_of' was never awaited ({folder}/forgetful.py:{line}): "), wrong
