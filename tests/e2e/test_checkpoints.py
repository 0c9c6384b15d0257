"""Checkpoints of real runs: a disk that is full for a while, damaged ones that are passed over, export of the model."""

import os
import resource
from pathlib import Path

import psutil
import torch

from tests.e2e.runs import PACED, SMALL, Launch, Run, check_trained_once, cli


def log_of(run: Run, worker: str) -> str:
    return (run.folder / "logs" / f"{worker.replace('/', '-')}.log").read_text()


def test_a_full_disk_costs_checkpoints_and_not_the_run(launch: Launch) -> None:
    """The disk refuses what is beyond a size that only a model's part has."""
    run = launch("quickstart", *PACED, "run.training_steps=250", "run.save_every=2", "run.trace=false")
    run.until(run.saved, "the first checkpoint")
    trainer = psutil.Process(run.pid_of("trainer/0"))
    trainer.rlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    run.until(lambda: log_of(run, "trainer/0").count("could not write the") >= 2, "two checkpoints without room")
    newest = run.saved()[-1]
    assert f"the newest one is step_{newest:06d}" in log_of(run, "trainer/0")
    trainer.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.until(lambda: run.saved()[-1] > newest, "a checkpoint with room again")
    assert cli("stop", run.name, "--runs-dir", str(run.folder.parent)).returncode == 0
    assert run.wait() == 130, run.output
    metrics = run.metrics()
    assert sum(line.get("checkpoint/failed/count", 0.0) for line in metrics) >= 2
    assert run.saved()[-1] == metrics[-1]["step"]
    assert not list(run.folder.glob("checkpoints/draft_*"))


def test_damaged_checkpoints_are_named_and_an_older_one_is_gone_on_from(launch: Launch) -> None:
    settings = ["run.training_steps=24", "run.save_every=4", "run.keep_checkpoints=9"]
    first = launch("quickstart", *SMALL, *settings, "run.stop_after=20")
    assert first.wait() == 0, first.output
    saved = first.saved()
    assert saved[-1] == 20
    flipped, truncated, lacking, whole = (
        first.folder / "checkpoints" / f"step_{step:06d}" for step in reversed(saved[-4:])
    )
    part = flipped / "model-policy-trainer-0.safetensors"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    os.truncate(truncated / "COMMIT", 40)
    (lacking / "worker-trainer-0.json").unlink()
    second = launch("quickstart", *SMALL, *settings, "--resume", name=first.name)
    assert second.wait() == 0, second.output
    for line in (
        f"ignored: {flipped.name}: its part model-policy-trainer-0.safetensors does not hold the bytes",
        f"ignored: {truncated.name}: its COMMIT cannot be read",
        f"ignored: {lacking.name}: its part worker-trainer-0.json is missing",
        f"resuming after training step {int(whole.name.removeprefix('step_'))}, from",
    ):
        assert line in second.output, second.output
    check_trained_once(second, 24)
    assert second.saved()[-1] == 24
    aside = {path.name for path in (second.folder / "checkpoints").glob("ignored_*")}
    assert aside == {folder.name.replace("step_", "ignored_") for folder in (flipped, truncated, lacking)}


def test_what_is_exported_is_what_was_trained(launch: Launch, tmp_path: Path) -> None:
    settings = ["run.training_steps=6", "run.hf_every=3", "layout.pools.trainer.count=2"]
    run = launch("quickstart", *SMALL, *settings, "models.policy.dtype=bfloat16")
    assert run.wait() == 0, run.output
    to = tmp_path / "hf" / "model"
    done = cli("export", run.name, "--to", str(to), "--runs-dir", str(run.folder.parent))
    assert done.returncode == 0, done.stderr
    assert f"exporting training step 6 from {run.folder}/checkpoints/step_000006" in done.stdout
    assert "texts differ by" in done.stdout
    written = sorted(run.folder.glob("hf/*"))
    assert [folder.name for folder in written] == ["step_000003", "step_000006"]
    for path in to.iterdir():
        assert path.read_bytes() == (written[-1] / path.name).read_bytes()
        assert (path.read_bytes() == (written[0] / path.name).read_bytes()) == (path.suffix != ".safetensors")
    again = cli("export", run.name, "--to", str(to), "--runs-dir", str(run.folder.parent))
    assert again.returncode == 2
    assert "exists and is not empty — nothing is overwritten" in again.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(to), AutoTokenizer.from_pretrained(to)
    assert model.dtype == torch.bfloat16
    assert tokenizer.decode(tokenizer.encode("407=")) == "407="
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
