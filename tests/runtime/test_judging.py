"""Score steps judge samples: the final response of each, whatever the number of its sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.errors import StepError
from distflow.flow.plan import StepPlan
from distflow.runtime.steps import StepContext, StepRunner

JUDGES = """
from distflow import Ragged, step


@step(role="score", reads=["response_text"], writes=["reward", "rewards/length"])
def judge(batch, ctx):
    ctx.state["seen"] = batch.texts("response_text")
    lengths = batch.ragged("response_text").lengths.float()
    return batch.with_columns(**{"reward": lengths, "rewards/length": lengths})


@step(role="score", reads=["response_text", "sequence"], writes=["reward"])
def each(batch, ctx):
    return batch.with_columns(reward=batch.ragged("response_text").lengths.float())


@step(role="score", reads=["response_text"], writes=["token_rewards"])
def per_token(batch, ctx):
    responses = batch.ragged("response_ids")
    return batch.with_columns(token_rewards=responses.like(responses.values.float()))


@step(role="train", reads=["response_text"], writes=["mine"])
def trains(batch, ctx):
    return batch.with_columns(mine=batch.ragged("response_text").lengths)
"""


def judges(folder: Path, name: str) -> tuple[StepRunner, StepContext]:
    (folder / "judges.py").write_text(JUDGES)
    reads = ("response_text", "sequence") if name == "each" else ("response_text",)
    role, writes = ("train", ("mine",)) if name == "trains" else ("score", ("reward",))
    writes = {"judge": ("reward", "rewards/length"), "per_token": ("token_rewards",)}.get(name, writes)
    more = ("drop_reason",) if role == "score" else ()
    plan = StepPlan(name, f"{folder}/judges.py:{name}", role, "sample", None, {}, reads, writes, more)
    context = StepContext(name)
    return StepRunner("rollout/0", [plan], {name: context}), context


def several() -> Batch:
    """A sample of two sequences and one of one."""
    return Batch(
        {
            "group": torch.tensor([7, 7, 7]),
            "sample": torch.tensor([0, 0, 1]),
            "sequence": torch.tensor([0, 1, 0]),
            "response_ids": Ragged.from_rows([[1, 2], [3], [4]], torch.int64),
            "response_text": Ragged.from_texts(["long", "ab", "c"]),
        }
    )


def test_a_score_step_judges_the_final_response_of_each_sample(tmp_path: Path) -> None:
    steps, context = judges(tmp_path, "judge")
    given = several()
    found = steps.call("judge", given)
    assert context.state["seen"] == ["ab", "c"]
    assert found.dense("reward").tolist() == found.dense("rewards/length").tolist() == [2.0, 2.0, 1.0]
    assert found.texts("response_text") == given.texts("response_text")


def test_a_score_step_that_reads_the_sequences_gets_them_all(tmp_path: Path) -> None:
    found = judges(tmp_path, "each")[0].call("each", several())
    assert found.dense("reward").tolist() == [4.0, 2.0, 1.0]
    assert judges(tmp_path, "trains")[0].call("trains", several()).dense("mine").tolist() == [4, 2, 1]


def test_a_value_per_token_of_some_sequences_is_refused(tmp_path: Path) -> None:
    steps, _ = judges(tmp_path, "per_token")
    with pytest.raises(
        StepError, match=r"judges.py:per_token.* 'token_rewards', and it gets the last .* add 'sequence'"
    ):
        steps.call("per_token", several())
    one = several().slice(2, 3)
    assert steps.call("per_token", one).ragged("token_rewards").values.tolist() == [4.0]
