"""Flows that read their samples from the data: no layout matters to them, nor does a trainer that is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import Qwen2Config, Qwen2ForCausalLM

from distflow.workers.tokenizers import CharTokenizer
from tests.e2e.runs import SMALL, WAIT_S, Launch, Run, cli
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
DIVIDED = (*TWO, "layout.pools.trainer.backend=fsdp")
SERVED = ("layout=services", "layout.pools.trainer.count=2")
ROWS = 13
HELD_OUT = ("val.every=2", f"val.prompts={ROWS}", "val.data.source=distflow.data.arithmetic:copy_digits")


def results(run: Run, flow: str) -> list[float]:
    names = ("actor/grad_norm", "response_length/mean", "prompt_length/mean", *FLOWS[flow])
    lines = [line for line in run.metrics() if line["step"]]
    # Pairs are in no order for a policy that is its reference, but for rounding.
    return [line[name] for line in lines for name in names if (line["step"], name) != (1, "preference/accuracy")]


def measured(run: Run) -> dict[int, dict[str, float]]:
    """What was measured of rows that are held out, by training steps done before."""
    lines = ({name: value for name, value in line.items() if name.startswith("val/")} for line in run.metrics())
    return {number: line for number, line in enumerate(lines) if line}


@pytest.mark.parametrize(
    "flow, layouts", [("sft", [TWO]), ("dpo", [TWO, SERVED]), ("kto", [TWO, DIVIDED]), ("reward_model", [TWO])]
)
def test_three_training_steps_are_the_same_on_any_layout(
    launch: Launch, flow: str, layouts: list[tuple[str, ...]]
) -> None:
    found, values = [], []
    for layout in (("layout=colocated", "batch.tokens_per_microbatch=64"), *layouts):
        wide = "models.policy.dtype=float64"
        run = launch("quickstart", f"flow={flow}", *layout, *SMALL, *HELD_OUT, wide, f"run.training_steps={STEPS}")
        assert run.wait() == 0, run.output
        assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3]
        found.append(results(run, flow))
        held_out = measured(run)
        assert list(held_out) == [0, 2, 3]
        assert {line["val/prompts"] for line in held_out.values()} == {ROWS}
        assert len({line["val/loss"] for line in held_out.values()}) == 3, "each is of other weights"
        assert {name.replace("actor/", "") for name in FLOWS[flow]} <= {name[4:] for name in held_out[2]}
        held_out[0].pop("val/preference/accuracy", None)
        values.append([value for line in held_out.values() for _, value in sorted(line.items())])
        assert run.leftovers() == []
        assert not [name for name in os.listdir(run.folder / "logs") if name.startswith("rollout")], "nothing generates"
    for other, of_rows in zip(found[1:], values[1:], strict=True):
        assert other == pytest.approx(found[0], rel=1e-4, abs=1e-6)
        assert of_rows == pytest.approx(values[0], rel=1e-6, abs=1e-9)


def a_model(folder: Path, seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = Qwen2ForCausalLM(Qwen2Config(vocab_size=16, num_key_value_heads=2, **sizes)).double().eval()
    made.save_pretrained(folder)
    return made


def logprobs(model: Qwen2ForCausalLM, prompt: list[int], response: list[int]) -> Tensor:
    """Of the tokens of a response."""
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        shares = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return shares.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]


@pytest.mark.parametrize("flow", ["sft", "dpo"])
def test_held_out_rows_have_the_loss_that_transformers_gives(launch: Launch, tmp_path: Path, flow: str) -> None:
    models = {name: a_model(tmp_path / name, seed) for seed, name in enumerate(("policy", "reference"))}
    rows = [{"prompt": f"{n}=", "chosen": str(n), "rejected": str(7 * n)} for n in (5, 31, 402, 1700, 12, 9, 88)]
    file = tmp_path / "held_out.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    spelling = "'chars:0123456789='"
    given = [
        f"++models.{name}={{path: '{tmp_path / name}', init: null, tokenizer: {spelling}, dtype: float64}}"
        for name in (models if flow == "dpo" else ["policy"])
    ]
    fields = "val.data.fields={response: chosen}" if flow == "sft" else "val.every=null"
    where = [f"val.data.source={file}", fields, "batch.tokens_per_microbatch=24"]
    run = launch("quickstart", f"flow={flow}", *TWO, *SMALL, *given, *where, "run.training_steps=0")
    assert run.wait() == 0, run.output
    tokenizer = CharTokenizer("chars:0123456789=")
    end = tokenizer.eos_token_id
    assert end is not None
    of = {
        (name, kind, number): logprobs(model, tokenizer.encode(row["prompt"]), [*tokenizer.encode(row[kind]), end])
        for name, model in models.items()
        for number, row in enumerate(rows)
        for kind in ("chosen", "rejected")
    }
    found = measured(run)[0]
    if flow == "sft":
        every = torch.cat([of["policy", "chosen", number] for number in range(len(rows))])
        assert found["val/loss"] == pytest.approx(-float(every.mean()), rel=1e-9)
        return
    ratio = {(kind, n): of["policy", kind, n].sum() - of["reference", kind, n].sum() for _, kind, n in of}
    margins = 0.1 * torch.stack([ratio["chosen", n] - ratio["rejected", n] for n in range(len(rows))])
    assert found["val/loss"] == pytest.approx(-float(logsigmoid(margins).mean()), rel=1e-6)
    assert found["val/preference/margin"] == pytest.approx(float(margins.mean()), rel=1e-6)
    assert found["val/preference/accuracy"] == pytest.approx(float((margins > 0).double().mean()))


def test_the_checkpoint_with_the_lowest_loss_is_kept_and_the_last_is_evaluated_as_in_the_run(launch: Launch) -> None:
    best = ["run.save_every=1", "run.keep_checkpoints=1", "run.keep_best=val/loss", "run.keep_best_mode=min"]
    moving = ["models.policy.optimizer.lr=0.03", "models.policy.dtype=float64"]
    settings = [*HELD_OUT, "val.every=1", *best, *moving, "run.training_steps=6"]
    run = launch("quickstart", "flow=dpo", *TWO, *SMALL, *settings, "run.stop_after=3")
    assert run.wait() == 0, run.output
    assert list(measured(run)) == [0, 1, 2, 3]
    again = launch("quickstart", "run.stop_after=null", "--resume", name=run.name)
    assert again.wait() == 0, again.output
    found = {number: line["val/loss"] for number, line in measured(again).items()}
    assert list(found) == [0, 1, 2, 3, 4, 5, 6]
    known = json.loads((run.folder / "checkpoints" / "step_000006" / "COMMIT").read_text())["validated"]
    assert {int(number): score["value"] for number, score in known.items()} == pytest.approx(
        {number: found[number] for number in range(6)}
    )
    assert set(run.saved()) == {min(range(1, 6), key=found.__getitem__), 6}
    where = ["--runs-dir", str(run.folder.parent)]
    done = cli("evaluate", run.name, "--json", *where, timeout_s=WAIT_S)
    assert done.returncode == 0, done.stderr
    # The reference is what the policy was before it was trained.
    assert json.loads(done.stdout) == pytest.approx(measured(again)[6], rel=1e-6)


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


def validating(run: Run) -> bool:
    told = cli("status", run.name, "--json", "--runs-dir", str(run.folder.parent))
    rows = json.loads(told.stdout)["workers"] if told.returncode == 0 else []
    return any(row["state"] == "validating" for row in rows)


def test_neither_validation_nor_a_trainer_that_is_killed_in_it_changes_anything(launch: Launch) -> None:
    paced = ("run.training_steps=12", "run.save_every=2", "run.deterministic=true", *SMALL)
    whole = launch("quickstart", "flow=sft", *TWO, *paced)
    assert whole.wait() == 0, whole.output
    many = ("val.every=6", "val.prompts=1000", HELD_OUT[-1])
    killed = launch("quickstart", "flow=sft", *TWO, *paced, *many)
    killed.until(lambda: killed.saved() and validating(killed), "validation after training step 6")
    os.kill(killed.pid_of("trainer/1"), signal.SIGKILL)
    assert killed.wait() == 0, killed.output
    assert results(killed, "sft") == results(whole, "sft")
    assert [(step, line["val/prompts"]) for step, line in measured(killed).items()] == [
        (0, 1000),
        (6, 1000),
        (12, 1000),
    ]
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
