"""A mixture of experts, from a random start to a checkpoint; and an engine that computes something else."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from tests.e2e.runs import WAIT_S, Launch, cli

TRAINER = "layout.pools.trainer"
EXPERTS = [
    *("models.policy.init.model_type=qwen3_moe", "models.policy.init.num_experts=4"),
    *("models.policy.init.num_experts_per_tok=2", "models.policy.init.moe_intermediate_size=64"),
]
WRONG = """
from distflow.workers.engines.torch_engine import TorchEngine


class Wrong(TorchEngine):
    def end_update(self):
        super().end_update()
        self.model.model.norm.weight.data.mul_(-1.0)
"""


def test_a_mixture_of_experts_trains_and_generates(launch: Launch, tmp_path: Path) -> None:
    """Divided over two trainers, which put fused experts together and publish them one by one, with their canary."""
    few = ["run.training_steps=3", "run.save_every=3", "layout.pools.rollout.count=1"]
    run = launch("quickstart", *EXPERTS, *few, f"{TRAINER}.count=2", f"{TRAINER}.backend=fsdp")
    assert run.wait() == 0, run.output
    lines = run.metrics()
    assert len(lines) == 3
    assert all(0 <= line["weights/canary_diff"] < 1e-5 for line in lines)
    assert all(line["actor/grad_norm"] > 0 and line["rollout_corr/kl"] < 1e-3 for line in lines)
    assert run.leftovers() == []
    to = ["--to", str(tmp_path / "hf"), "--runs-dir", str(run.folder.parent)]
    done = cli("export", run.name, *to, timeout_s=WAIT_S)
    assert done.returncode == 0, done.stderr
    names = load_file(tmp_path / "hf" / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names)


def test_an_engine_that_computes_something_else_ends_the_run(launch: Launch, tmp_path: Path) -> None:
    """Every byte arrives, and yet: the canary of the first version says so, before anything is generated."""
    (tmp_path / "wrong.py").write_text(WRONG)
    run = launch("quickstart", f"layout.pools.rollout.engine={tmp_path}/wrong.py:Wrong", "layout.pools.rollout.count=1")
    assert run.wait() == 3, run.output
    assert "fixed tokens differ from the trainer's by" in run.output
    assert "the engine does not compute the trained model" in run.output
    assert run.metrics() == []
    assert run.leftovers() == []
