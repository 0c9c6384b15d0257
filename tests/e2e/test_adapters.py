"""Runs whose policy is trained by low-rank adapters, or by another optimizer than AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.e2e.runs import SMALL, Launch, Run, cli

pytest.importorskip("peft")
LORA = ["flow=grpo_kl", "models.policy.lora.rank=4", "models.policy.optimizer.lr=1.0e-2"]
MUON = ["models.policy.optimizer={name: muon, schedule: wsd, decay_steps: 4, min_lr: 1.0e-4}"]
UNTIMED = ("actor/", "critic/", "reward/mean", "rollout_corr/", "response_length/")


def trained(run: Run) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    return {(*line["uid"], line["sample"]): (line["step"], *line["response_ids"]) for line in run.dumps()}


def figures(run: Run) -> list[dict[str, float]]:
    return [{name: value for name, value in line.items() if name.startswith(UNTIMED)} for line in run.metrics()]


@pytest.mark.parametrize("settings", [LORA, MUON], ids=["lora", "muon and wsd"])
def test_a_resumed_run_repeats_an_undisturbed_one_to_the_last_bit(
    launch: Launch, tmp_path: Path, settings: list[str]
) -> None:
    settings = [*SMALL, "layout=colocated", "run.deterministic=true", "run.training_steps=8", *settings]
    whole = launch("quickstart", *settings)
    assert whole.wait() == 0, whole.output
    first = launch("quickstart", *settings, "run.stop_after=5")
    assert first.wait() == 0, first.output
    second = launch("quickstart", *settings, "--resume", name=first.name)
    assert second.wait() == 0, second.output
    assert trained(second) == trained(whole)
    assert figures(second) == figures(whole)
    assert len(figures(whole)) == 8
    assert figures(whole)[-1]["actor/grad_norm"] > 0
    if settings[-len(LORA) :] == LORA:
        check_adapters(second, tmp_path)


def check_adapters(run: Run, folder: Path) -> None:
    """The checkpoint has no more than adapters, and is exported as a whole model."""
    (path,) = run.folder.glob("checkpoints/step_000008/model-*.safetensors")
    with safe_open(path, "pt") as saved:
        names = [name for name in list(saved.keys()) if name != "optimizer.steps"]
    assert names
    assert all(".lora_" in name for name in names)
    # Engines merge what trainers compute apart.
    assert all(abs(line["rollout_corr/kl"]) < 1e-5 for line in figures(run))
    # The reference is the policy without them: no divergence at first, and then some.
    divergence = [line["actor/kl_loss"] for line in figures(run)]
    assert divergence[0] == 0.0 < divergence[-1]
    exported = cli("export", run.name, "--to", str(folder / "hf"), "--runs-dir", str(run.folder.parent))
    assert exported.returncode == 0, exported.stdout + exported.stderr
    assert "differ by at most" in exported.stdout
    alone = cli("export", run.name, "--adapters", "--to", str(folder / "a"), "--runs-dir", str(run.folder.parent))
    assert alone.returncode == 2
    assert "they belong to a base that was made from run.seed" in alone.stdout + alone.stderr
