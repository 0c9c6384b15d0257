"""Flows that read their samples from the data: no layout matters to them, nor does a trainer that is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, Launch, Run, cli
from tests.learning.test_reward_model import alone, backend_of

FLOWS = {
    "sft": ("actor/loss",),
    "dpo": ("actor/loss", "preference/accuracy", "preference/margin", "preference/chosen"),
    "kto": ("actor/loss", "preference/accuracy", "preference/kl_point"),
    "reward_model": ("actor/loss", "preference/accuracy", "preference/margin", "preference/chosen"),
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


SLOW = """
import time

class Rows:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if not 8 <= index < 68:
            return {"prompt": "7=", "response": "7"}
        time.sleep(0.15)
        return {"prompt": "7" * 1000, "response": "7"}

def rows():
    return Rows()
"""


def test_prompts_that_are_passed_over_show_progress(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    run = launch("quickstart", "flow=sft", "layout=colocated", *SMALL, "batch.prompts=8", "run.training_steps=2",
                 f"data.source={tmp_path}/slow.py:rows", "data.shuffle=false", "data.overlong=drop",
                 "limits.no_progress_s=4")  # fmt: skip
    assert run.wait() == 0, run.output
    assert [line["step"] for line in run.metrics()] == [1, 2]


def test_a_trained_reward_model_is_exported_and_judges(launch: Launch, tmp_path: Path) -> None:
    made = launch("quickstart", "flow=reward_model", "layout=colocated", *SMALL, "run.training_steps=4")
    assert made.wait() == 0, made.output
    folder = tmp_path / "judge"
    exported = cli("export", made.name, "--runs-dir", str(made.folder.parent), "--to", str(folder))
    assert exported.returncode == 0, exported.stdout + exported.stderr
    step = "flow.steps.reward={call: 'distflow.workers.reward_model:judge', model: judge}"
    model = f"+models.judge={{path: '{folder}', head: score}}"
    run = launch("quickstart", "layout=colocated", model, step, *SMALL, "run.training_steps=1")
    assert run.wait() == 0, run.output
    dumps = run.dumps()
    rows = [backend_of(folder).encode(line["prompt"], line["response"]) for line in dumps]
    assert [line["reward"] for line in dumps] == pytest.approx(alone(folder, rows).tolist(), rel=1e-4, abs=1e-6)
    assert len({line["reward"] for line in dumps}) > 1
    # What was trained goes on from there: its folder has the last layer already.
    again = launch("quickstart", "flow=reward_model", "layout=colocated", f"models.policy.path={folder}", *SMALL,
                   "run.training_steps=1", "models.policy.optimizer.lr=0")  # fmt: skip
    assert again.wait() == 0, again.output
    assert again.metrics()[0]["preference/chosen"] != 0


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
