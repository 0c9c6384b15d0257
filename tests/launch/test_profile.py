"""`distflow profile`: a latency model that loads, of engines and backends as they are."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest

from distflow.bench.profiling import measure
from distflow.errors import UserError
from distflow.flow.recipe_check import plan_recipe
from distflow.launch.cli import run
from distflow.sim import latency

SMALL = ["layout=split", "layout.pools.rollout.slots=4", "batch.tokens_per_microbatch=64", "batch.prompts=8"]
BACKEND = "layout.pools.trainer.backend"
EMULATED = "distflow.testing.emulated"
DEVICE = """
device: none
model: none
sources: ["made up"]
decode: {floor_s: 0.04, sample_s: 0.02, prefill_s: 0.004}
train: {token_s: 0.002, latency_s: 0.02, apply_s: 0.1}
weights: {bytes: 1, publish_s: 0.06, swap_s: 0.08}
"""


def test_the_quickstart_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    assert run(["profile", "quickstart", *SMALL, "-o", str(path)]) == 0
    found = latency.load(str(path))
    assert found.decode.seconds(4, 10) > 0
    assert found.train.seconds([16] * 4) > 0
    assert found.weights.bytes > 10_000
    assert found.sources[0].startswith("measured: distflow profile quickstart layout=split")
    assert "off by" in capsys.readouterr().out


def test_what_a_device_takes_is_measured(tmp_path: Path) -> None:
    """On a busy machine a wait may end late, and the next one early: one of three attempts is undisturbed.

    Fits are tested in tests/sim/test_fitting.py.
    """
    (tmp_path / "device.yaml").write_text(DEVICE)
    options = f"{{device: '{tmp_path}/device.yaml', time_scale: 0.5}}"
    chosen = [
        f"layout.pools.rollout.engine={EMULATED}:EmulatedEngine",
        f"layout.pools.rollout.engine_options={options}",
    ]
    chosen += [f"{BACKEND}={EMULATED}:EmulatedBackend"]
    chosen += [f"{BACKEND}_options={options}"]
    plan = plan_recipe("quickstart", [*SMALL, *chosen])[1]
    shares: dict[str, float] = {}
    for _ in range(3):
        found = measure(plan, print)
        assert {step.samples for step in found.decode} == {1, 2, 4}
        shares = {
            "decode": median(step.seconds / (max(0.04, 0.02 * step.samples) / 2) for step in found.decode),
            "train": median(batch.seconds / ((0.02 + 0.002 * sum(batch.lengths)) / 2) for batch in found.train),
            "publish": found.weights.publish_s / (0.06 / 2),
            "swap": found.weights.swap_s / (0.08 / 2),
            "apply": found.apply_s / (0.1 / 2),
        }
        if all(0.9 <= share <= 2.0 for share in shares.values()):
            return
    pytest.fail(f"measured, of what was said: {shares}")


def test_a_file_that_no_device_could_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "quickstart", "-o", str(tmp_path / "mine.json")]) == 2
    assert re.search(r"mine\.json: .*expected \.yaml", capsys.readouterr().err)


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["profile", "quickstart", "-o", str(tmp_path / "missing" / "mine.yaml")]) == 2
    shown = capsys.readouterr().err
    assert re.search(r"-o .*mine\.yaml: cannot be written \(No such file or directory\)", shown)
    assert "measuring" not in shown


def test_a_backend_that_divides_the_model_is_refused() -> None:
    plan = plan_recipe("quickstart", [*SMALL, "layout.pools.trainer.count=2", f"{BACKEND}=fsdp"])[1]
    with pytest.raises(
        UserError, match=r"fsdp_backend:FsdpBackend divides the model .* backend=torch for layout\.pools"
    ):
        measure(plan, print)
