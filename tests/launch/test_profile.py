"""`distflow profile`: a latency model that loads, of engines and backends as they are."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest

from distflow.errors import UserError
from distflow.flow.recipe_check import plan_recipe
from distflow.launch.cli import run
from distflow.parts import tokens_of, whole_lengths
from distflow.sim import latency, profiling
from distflow.sim.fitting import fit_decode
from distflow.sim.profiling import measure
from tests.launch.clocked_engine import CLOCK

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
            "train": median(
                batch.seconds / ((0.02 + 0.002 * sum(whole_lengths(batch.lengths))) / 2) for batch in found.train
            ),
            "publish": found.weights.publish_s / (0.06 / 2),
            "swap": found.weights.swap_s / (0.08 / 2),
            "apply": found.apply_s / (0.1 / 2),
        }
        if all(0.9 <= share <= 2.0 for share in shares.values()):
            return
    pytest.fail(f"measured, of what was said: {shares}")


@pytest.mark.parametrize("at_once", [1, 7, 64])
@pytest.mark.parametrize("context_s", [0.0, 4e-8])
def test_a_device_is_fitted_to_what_it_takes_while_all_samples_run(
    at_once: int, context_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 samples of up to 2,048 tokens: those whose prompts are read first decode long before the last ones begin."""
    monkeypatch.setattr(profiling, "time", CLOCK)
    options = f"{{floor_s: 0.00829, context_s: {context_s}, prefill_s: 5.12e-6, at_once: {at_once}}}"
    chosen = ["layout=split", "layout.pools.rollout.slots=64", "batch.prompts=8", "data.max_prompt_tokens=512"]
    chosen += ["models.policy.init.max_position_embeddings=2048", "flow.steps.sample.with.max_new_tokens=1536"]
    chosen += ["layout.pools.rollout.engine=tests.launch.clocked_engine:ClockedEngine"]
    chosen += [f"layout.pools.rollout.engine_options={options}"]
    chosen += [f"{BACKEND}={EMULATED}:EmulatedBackend", f"{BACKEND}_options={{time_scale: 0.0001}}"]
    found = measure(plan_recipe("quickstart", chosen)[1], print)
    assert {step.samples for step in found.decode} == {1, 2, 4, 8, 16, 32, 64}
    fitted, error = fit_decode(found.decode, found.prefill)
    assert fitted.floor_s == pytest.approx(0.00829, rel=0.02)
    assert fitted.context_s == pytest.approx(context_s, rel=0.05, abs=1e-10)
    assert fitted.prefill_s == pytest.approx(5.12e-6, rel=0.2 if context_s else 0.02)
    assert error.worst < 0.02


def test_training_is_timed_as_a_run_does_it() -> None:
    """Groups that share prompts, in micro-batches of the recipe's budget as the model computes them."""
    plan = plan_recipe("quickstart", [*SMALL, "batch.samples_per_prompt=4"])[1]
    found = measure(plan, print).train
    assert all(batch.packed for batch in found)
    assert all(tokens_of(batch.lengths, packs=True) <= 64 for batch in found)
    assert all((own == 0) == bool(row % 4) for batch in found for row, (own, _) in enumerate(batch.lengths))
    most = {n: max(len(b.lengths) for b in found if whole_lengths(b.lengths)[0] == n) for n in (5, 10, 20)}
    assert most == {5: 18, 10: 9, 20: 4}, "padded, they would be 90, 90 and 80 tokens"


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
