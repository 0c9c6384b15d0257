"""Flows that read their samples from the data: no layout matters to them, nor does a trainer that is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, Launch, Run

FLOWS = {
    "sft": ("actor/loss",),
}
"""With the metrics that tell how well they do."""
STEPS = 3
TWO = ("layout=split", "layout.pools.trainer.count=2")


def results(run: Run, flow: str) -> list[float]:
    names = ("actor/grad_norm", "response_length/mean", "prompt_length/mean", *FLOWS[flow])
    return [line[name] for line in run.metrics() for name in names]


@pytest.mark.parametrize("flow", FLOWS)
def test_three_training_steps_are_the_same_with_one_trainer_and_with_two(launch: Launch, flow: str) -> None:
    found = []
    for layout in (("layout=colocated",), TWO):
        run = launch("quickstart", f"flow={flow}", *layout, *SMALL, f"run.training_steps={STEPS}")
        assert run.wait() == 0, run.output
        assert [line["step"] for line in run.metrics()] == [1, 2, 3]
        found.append(results(run, flow))
        assert run.leftovers() == []
        assert not [name for name in os.listdir(run.folder / "logs") if name.startswith("rollout")], "nothing generates"
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-6)


def test_a_killed_trainer_changes_nothing(launch: Launch) -> None:
    paced = ("run.training_steps=12", "run.save_every=2", "run.deterministic=true", *SMALL)
    whole = launch("quickstart", "flow=sft", *TWO, *paced)
    assert whole.wait() == 0, whole.output
    killed = launch("quickstart", "flow=sft", *TWO, *paced)
    killed.until(killed.saved, "a checkpoint")
    os.kill(killed.pid_of("trainer/1"), signal.SIGKILL)
    assert killed.wait() == 0, killed.output
    assert results(killed, "sft") == results(whole, "sft")
    for run in (whole, killed):
        positions = sorted(line["uid"][2] for line in run.dumps())
        assert positions == list(range(12 * 8)), "each row of the data is trained on once"


def test_a_file_of_demonstrations_is_trained_on(launch: Launch, tmp_path: Path) -> None:
    rows = [{"question": f"{n:03}=", "solution": f"{n:03}"} for n in range(40)]
    rows[7]["solution"] *= 4  # 13 tokens with the end token
    file = tmp_path / "demos.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = [f"data.source={file}", "data.fields={prompt: question, response: solution}"]
    room = "flow.steps.read.with.max_response_tokens=12"
    run = launch("quickstart", "flow=sft", "layout=colocated", *settings, room, *SMALL, "run.training_steps=5")
    assert run.wait() != 0
    assert "demos.jsonl:8) has 13 tokens with its end token, expected at most 12" in run.output
    run = launch("quickstart", "flow=sft", "layout=colocated", *settings, room, "data.overlong=drop", *SMALL,
                 "run.training_steps=5")  # fmt: skip
    assert run.wait() == 0, run.output
    lines = run.dumps()
    # 39 rows are left, and then the next pass begins.
    assert [line["uid"][0] for line in sorted(lines, key=lambda line: line["uid"][2])] == [0] * 39 + [1]
    assert {line["prompt"] for line in lines} == {row["question"] for row in rows} - {"007="}
    assert all(line["response"] + "=" == line["prompt"] for line in lines)
    assert all(line["response_ids"][-1] == 1 for line in lines), "models learn to stop"
