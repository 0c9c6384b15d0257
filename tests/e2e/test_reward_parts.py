"""Parts of the reward that only some samples, or only some workers, have."""

from pathlib import Path

from tests.e2e.runs import Launch

MINE = """
from distflow import step

def parts(sample):
    return {"reward": 1.0, "fives": 1.0} if sample.prompt.startswith("5") else 0.0

@step(role="score", reads=["response_text"], writes=["length"])
def length(batch, ctx):
    return batch.with_columns(length=batch.ragged("response_text").lengths)

@step(role="train", reads=["reward", "response_ids"], writes=["advantage"])
def raw(batch, ctx):
    responses = batch.ragged("response_ids")
    return batch.with_columns(advantage=responses.like(batch.dense("reward").repeat_interleave(responses.lengths)))

@step(role="score", reads=["reward"], writes=["rewards/own"], fills={"rewards/own": 0.5})
def own(batch, ctx):
    return batch.with_columns(**{"rewards/own": batch.dense("reward") + 2.0})
"""
RECIPE = """
defaults: [quickstart, _self_]
run: {training_steps: 12}
batch: {prompts: 8, samples_per_prompt: 2}
flow:
  steps:
    reward: {with: {function: "./mine.py:parts"}}
    length: {call: "./mine.py:length"}
    advantage: {call: "./mine.py:raw"}
layout: {pools: {rollout: {each: {"1": {steps: ["+./mine.py:own"]}}}}}
"""


def test_parts_that_not_every_sample_has(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    run = launch(str(tmp_path / "mine.yaml"))
    assert run.wait() == 0, run.output
    samples = run.dumps()
    assert {line["worker"] for line in samples} == {"rollout/0", "rollout/1"}
    for line in samples:
        # What steps of the user's write is dumped, on whichever side they run.
        assert line["length"] == len(line["response"])
        assert line["advantage"] == [line["reward"]] * len(line["response_ids"])
        assert line["rewards"]["own"] == (2.0 + line["reward"] if line["worker"] == "rollout/1" else 0.5)
        if line["prompt"].startswith("5"):
            assert line["rewards"]["fives"] == 1.0
        else:
            assert line["rewards"].get("fives") is None
    assert any("fives" in line["rewards"] for line in samples)
