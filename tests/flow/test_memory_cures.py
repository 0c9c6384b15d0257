"""Verdicts of the plan on memory: what does not fit, by how much, and the settings with which it does."""

from __future__ import annotations

import json
import re

import pytest

from distflow.flow.memory_fit import Capacity, memory_data, memory_lines, placed, with_gpus
from distflow.flow.plan import Plan
from distflow.launch.cli import run
from tests.flow.test_estimate import GIB, LARGE, SEVEN_B, WORKER, colocated_7b, planned

LONG = ("flow.steps.sample.with.max_new_tokens=4096", "batch.tokens_per_microbatch=16384", "batch.prompts=64")
FOUR = ("layout.pools.trainer.count=4", "layout.pools.trainer.backend=fsdp")


def warned(plan: Plan, gib: float) -> list[str]:
    return list(memory_data(plan, with_gpus(plan, Capacity(), gib))["warnings"])


def too_little(plan: Plan, gib: float) -> str:
    """The only warning of a GPU."""
    (told,) = (line for line in warned(plan, gib) if "does not fit" in line)
    return told


def named(told: str) -> list[tuple[dict[str, str], float]]:
    """The settings of each cure, and the GiB that it comes to."""
    found = re.findall(r"with ([\w. :\[\]]+?) \((\d+\.\d\d) GiB", told)
    return [(dict(one.split(": ") for one in settings.split(" and ")), float(size)) for settings, size in found]


def test_it_warns_where_a_gpu_or_the_host_is_too_small() -> None:
    plan = planned("layout=colocated")
    enough = Capacity(64 * GIB, (80 * GIB,))
    assert not any("warning" in line for line in memory_lines(plan, enough))
    (warning,) = memory_data(plan, Capacity(64 * GIB, (24 * GIB,)))["warnings"]
    assert warning.startswith("cuda:0 has 24.00 GiB, and worker/0 may need ")
    assert (
        "with layout.pools.worker.backend: fsdp and layout.pools.worker.count: 2 and layout.pools.worker.offload: true "
        "(20.16 GiB on each of 2 GPUs)" in warning
    ), "more GPUs alone would be four"
    (warning,) = memory_data(plan, Capacity(16 * GIB))["warnings"]
    assert warning.startswith("this host has 16.00 GiB of memory, and 1 worker(s) here may need ")


def test_where_no_gpu_is_seen_it_warns_of_what_no_common_one_holds_and_says_what_fits() -> None:
    large = [SEVEN_B, "models.policy.gradient_checkpointing=false", *FOUR, "layout.pools.trainer.device=cuda", *LONG]
    (warning,) = [line for line in memory_lines(planned(*large), Capacity()) if "warning" in line]
    assert "trainer/0 … trainer/3 may need" in warning
    assert "none is seen here, and common ones have up to 80.00 GiB (--gpu-gib says otherwise): does not fit" in warning
    assert "models.policy.gradient_checkpointing: true" in warning
    large[1] = "models.policy.gradient_checkpointing=true"
    assert not any("warning" in line for line in memory_lines(planned(*large), Capacity()))


@pytest.mark.parametrize("gib", [24.0, 40.0, 80.0])
@pytest.mark.parametrize("layout", ["split", "colocated"])
def test_each_cure_that_is_named_is_enough_and_comes_to_what_is_said(layout: str, gib: float) -> None:
    pool = "trainer" if layout == "split" else "worker"
    settings = [f"layout={layout}", SEVEN_B, "models.policy.gradient_checkpointing=false", *LONG]
    settings += [f"layout.pools.{pool}.count=4", f"layout.pools.{pool}.backend=fsdp"]
    plan = planned(*settings)
    told = next(line for line in warned(plan, gib) if f"{pool}/0 … {pool}/3" in line)
    seen = with_gpus(plan, Capacity(), gib)
    needed = next(one.estimate.device for one in placed(plan, seen) if one.estimate.worker == f"{pool}/0") / GIB
    assert f"does not fit {gib:.0f} GB by {needed - 0.94 * gib:.1f} GiB (6% of it are left free)" in told
    assert named(told) or gib == 24.0
    for changes, size in named(told):
        cured = planned(*settings, *(f"{key}={value}" for key, value in changes.items()))
        found = placed(cured, with_gpus(cured, Capacity(), gib))
        then = next(one.estimate.device for one in found if one.estimate.worker == f"{pool}/0") / GIB
        assert then == pytest.approx(size, abs=0.01)
        assert (then <= 0.94 * gib) == ("not even with" not in told)


def test_what_the_phase_that_binds_does_not_hold_is_no_cure() -> None:
    """The engine is away while the model trains."""
    plan = colocated_7b(
        "models.policy.gradient_checkpointing=false", "batch.tokens_per_microbatch=20000", f"{WORKER}.slots=8"
    )
    told = too_little(plan, 80.0)
    assert "memory_fraction" not in told
    assert next(list(changes) for changes, _ in named(told)) == ["models.policy.gradient_checkpointing"]


@pytest.mark.parametrize("gib", [80.0, 90.0])
def test_what_no_setting_makes_fit_is_said_with_what_would(gib: float) -> None:
    """A model that is whole on each GPU twice, once for the engine and once to be read: more workers are no cure."""
    large = (
        "models.policy.init={model_type: qwen3_moe, hidden_size: 2048, intermediate_size: 6144, "
        "num_hidden_layers: 48, num_attention_heads: 32, num_key_value_heads: 4, head_dim: 128, vocab_size: 151936, "
        "num_experts: 128, num_experts_per_tok: 8, moe_intermediate_size: 768}"
    )
    told = too_little(colocated_7b(large, "models.policy.gradient_checkpointing=true", "batch.ledgers=8"), gib)
    assert "— not even with " in told
    assert re.search(r"on GPUs of their own \(layout=split\), training would take \d+\.\d\d GiB and generation", told)


def test_what_is_refused_is_no_cure() -> None:
    colocated = ["layout=colocated", SEVEN_B, "models.policy.gradient_checkpointing=true"]
    colocated += ["batch.tokens_per_microbatch=64", "layout.pools.worker.count=1"]
    kept = "layout.pools.worker.backend_options={offload_optimizer: true}"
    assert "layout.pools.worker.offload: true" in too_little(planned(*colocated), 140.0)
    refused = planned(*colocated, "layout.pools.worker.backend=deepspeed", kept)
    assert "layout.pools.worker.offload" not in too_little(refused, 24.0)
    assert "offload" not in too_little(planned(SEVEN_B), 100.0), "nothing takes turns"


def test_what_just_fits_leaves_the_reserve(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("layout=colocated")
    needed = placed(plan, with_gpus(plan, Capacity(), 80.0))[0].estimate.device / GIB
    for share, fits in ((0.95, False), (0.93, True)):
        seen = with_gpus(plan, Capacity(), needed / share)
        assert bool(memory_data(plan, seen)["warnings"]) != fits
    words = ["plan", "quickstart", LARGE, "models.policy.dtype=bfloat16", "layout=colocated"]
    assert run([*words, "--gpu-gib", "9"]) == 0
    assert "does not fit 9 GB by" in capsys.readouterr().out
    assert run([*words, "--gpu-gib", "200"]) == 0
    assert f"worker/0: fits 200 GB with {188 - needed:.1f} GiB to spare (6% of it" in capsys.readouterr().out
    assert run([*words, "--gpu-gib", "200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["this_host"]["gpus"] == [200 * GIB]


@pytest.mark.parametrize(("gib", "layout"), [(9.0, "colocated"), (12.5, "split")])
def test_an_engine_without_room_for_a_sample_is_told_apart(gib: float, layout: str) -> None:
    pool = "worker" if layout == "colocated" else "rollout"
    engine = [f"layout.pools.{pool}.{setting}" for setting in ("engine=sglang", "device=cuda")]
    plan = planned(f"layout={layout}", SEVEN_B, *engine)
    (told,) = [line for line in warned(plan, gib) if "no room" in line]
    assert told.startswith(f"an engine of {pool} has no room for a single sample of ")
    assert ("layout=split" in told) == (layout == "colocated")
    assert not any("slots=" in line for line in warned(plan, gib))
