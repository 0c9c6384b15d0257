"""Predictions of the simulator: against figures computed by hand, and as the command shows them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

from distflow.config.outputs import check_writable
from distflow.config.schema import Refresh
from distflow.errors import UserError
from distflow.exchange.dealing import DealRule, Offer, deal_step
from distflow.exchange.lease_settings import LeaseSettings
from distflow.flow.memory import group_bytes
from distflow.flow.recipe_check import plan_recipe
from distflow.launch.cli import group, run
from distflow.launch.commands import simulate as simulate_command
from distflow.parts import CostRule
from distflow.sim import predict
from distflow.sim.fluid_engine import FluidEngine, FluidSample, SampleTurns
from distflow.sim.latency import DEVICES, DecodeLatency, DeviceCount, DeviceLatency, TrainLatency, WeightLatency
from distflow.sim.lengths import Lognormal, read_trace
from distflow.sim.notes import early_notes
from distflow.sim.predict import Load, Prediction, SimulateOptions, load_of, on_one_host, simulate, whole_rounds
from distflow.sim.trainer import SharedDeal
from distflow.sim.workload import Job
from distflow.types import Version

DEVICE = DeviceLatency(
    "a device",
    "a model",
    (),
    DecodeLatency(0.01, 0.0),
    TrainLatency(1e-4, apply_s=0.5),
    WeightLatency(1e9, publish_s=0.25, swap_s=0.1, link_bytes_s=1e9),
)
ALIKE = Lognormal(100, 0.0)


def load_for(
    staleness: int | None, *, rollouts: int = 2, replicas: int = 1, slots: int = 32, **changes: object
) -> Load:
    settings = LeaseSettings(
        ledgers=4,
        groups_per_ledger=4,
        samples_per_prompt=4,
        max_staleness=staleness,
        training_steps=1,
        memory_bytes=1 << 30,
        group_bytes=lambda prompt_tokens: group_bytes(4, prompt_tokens, 1000),
        max_prompt_tokens=20,
    )
    job = Job(samples=4, prompt_tokens=20, response_tokens=1000, budget=500)
    return replace(Load(settings, rollouts, replicas, slots, job), **changes)  # type: ignore[arg-type]


def sample(position: int, length: int) -> FluidSample:
    return FluidSample(position, 0, length)


def test_samples_that_run_together_take_the_time_of_their_steps() -> None:
    engine = FluidEngine(2, DecodeLatency(1.0, 0.75), mark=7)
    engine.load(Version(0, 3))
    engine.add([sample(0, 4), sample(1, 10), sample(2, 1)])
    # Two run: max(1, 2 · 0.75) = 1.5 s a step.
    assert engine.next_end() == pytest.approx(6.0)
    assert [(out.position, out.token_ids) for out in engine.take_ended(6.0)] == [(0, (7,) * 4)]
    assert engine.next_end() == pytest.approx(7.5)
    assert [out.position for out in engine.take_ended(7.5)] == [2]
    # The last runs alone, a second a step.
    assert engine.next_end() == pytest.approx(12.5)
    engine.load(Version(0, 4))
    (last,) = engine.take_ended(12.5)
    assert [(span.version, span.start, span.end) for span in last.spans] == [(3, 0, 5), (4, 5, 10)]
    assert engine.produced == 15


def test_between_two_turns_the_engine_waits_for_the_environment() -> None:
    engine = FluidEngine(2, DecodeLatency(1.0, 0.0), turns=SampleTurns(4, 0.5))
    engine.add([sample(0, 10), sample(1, 4)])
    ended, at = {}, 0.0
    while (end := engine.next_end()) is not None:
        at = end
        ended |= {out.position: at for out in engine.take_ended(at)}
    # 0 has turns of 4, 4 and 2 tokens; 1 is over with its only one.
    assert ended == {1: pytest.approx(4.0), 0: pytest.approx(11.0)}
    assert (engine.stalled_s, engine.produced) == (pytest.approx(1.0), 14)


def test_an_end_that_the_time_is_too_coarse_to_tell_comes_once() -> None:
    """After weeks of virtual time a double counts nanoseconds, and a step of 6.5 ms is more exact than that."""
    now, ended = 4e6, 0
    engine = FluidEngine(8, DecodeLatency(0.0065, 0.0), turns=SampleTurns(2, 3600.0))
    engine.advance(now)
    engine.add([sample(position, 4) for position in range(8)])
    for _ in range(1000):
        if (end := engine.next_end()) is None:
            break
        now += end - now
        ended += len(engine.take_ended(now))
    assert ended == 8


def test_slow_devices_are_not_looked_at_more_often_than_fast_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "LONG_STEP_S", 10.0)

    def on(floor_s: float) -> Prediction:
        device = replace(DEVICE, decode=DecodeLatency(floor_s, 0.0))
        return simulate(load_for(0), device, ALIKE, SimulateOptions(steps=2))

    slow, slower = on(0.1), on(1000.0)
    assert slower.step_s > 5000 * slow.step_s
    assert slower.messages_group < 2 * slow.messages_group


def test_long_environments_are_not_looked_at_more_often_than_short_ones() -> None:
    def turned(seconds: float) -> Prediction:
        load = load_for(1, slots=8)
        job = replace(load.job, turns=SampleTurns(50, seconds))
        return simulate(replace(load, job=job), DEVICE, ALIKE, SimulateOptions(steps=2))

    short, long = turned(10.0), turned(1000.0)
    assert long.step_s > 50 * short.step_s
    assert long.messages_group < 2 * short.messages_group


def test_context_makes_each_step_longer_than_the_one_before() -> None:
    engine = FluidEngine(8, DecodeLatency(1.0, 0.0, context_s=0.1))
    engine.add([FluidSample(0, 0, 4, prompt=10)])
    # 1 + 0.1 · (10 + i) seconds for step i, as a fluid: 4 · 2 + 0.1 · 4² / 2.
    assert engine.next_end() == pytest.approx(8.8)
    engine.advance(4.4)
    assert engine.next_end() == pytest.approx(8.8)


def test_a_step_without_staleness_is_the_sum_of_its_parts() -> None:
    """64 samples of 100 tokens in 2 · 32 slots: 1 s; the last group trained, update, weights over the link, swap."""
    found = simulate(load_for(0, one_host=False), DEVICE, ALIKE, SimulateOptions(steps=4))
    train_s = 64 * 120 * 1e-4
    parts = 1.0 + train_s + 0.5 + 0.25 + 1.0 + 0.05 + 0.1
    assert found.step_s == pytest.approx(parts, abs=0.1)
    assert found.staleness == {0: 1.0}
    generating, training = found.pools
    assert generating.shares["decode"] == pytest.approx(1.0 / parts, abs=0.05)
    assert training.shares["train"] == pytest.approx(train_s / parts, abs=0.05)
    assert generating.shares["loads"] == pytest.approx(0.1 / parts, abs=0.01)
    assert training.shares["first"] == pytest.approx((1.0 + 1.0 + 0.1) / parts, abs=0.1)
    assert sum(generating.shares.values()) == pytest.approx(1.0, abs=0.01)
    assert sum(training.shares.values()) == pytest.approx(1.0, abs=0.01)


def test_weights_cross_a_link_only_between_hosts() -> None:
    """1 GB: 0.05 s out of a host's memory, and 1 s more over a link; 3 devices are on one host, 9 are not."""
    near, far = (
        simulate(load_for(0, one_host=here), DEVICE, ALIKE, SimulateOptions(steps=3)) for here in (True, False)
    )
    assert far.step_s - near.step_s == pytest.approx(1.0, abs=0.1)
    assert (near.arrives_s, far.arrives_s) == (pytest.approx(0.05), pytest.approx(1.05))
    assert [on_one_host(load_for(0, rollouts=n), DEVICE) for n in (7, 8)] == [True, False]
    assert not on_one_host(load_for(0, rollouts=4, engine_gpus=2), DEVICE)
    assert not on_one_host(load_for(0), replace(DEVICE, gpus=DeviceCount(engine=4)))
    words = ["layout=async", "layout.pools.trainer.hosts=[gpu-1]"]
    assert load_of(plan_recipe("quickstart", words, need_files=False)[1]).one_host is False


def test_recomputed_activations_take_another_forward() -> None:
    words = ["layout=async", "models.policy.gradient_checkpointing=true"]
    assert load_of(plan_recipe("quickstart", words, need_files=False)[1]).job.recomputes
    plain, again = (
        simulate(replace(load, job=replace(load.job, recomputes=on)), DEVICE, ALIKE, SimulateOptions(steps=3))
        for load in [load_for(0)]
        for on in (False, True)
    )
    trained_s = [one.pools[1].shares["train"] * one.step_s for one in (plain, again)]
    assert trained_s[1] / trained_s[0] == pytest.approx(4 / 3, rel=0.02)
    # Of 3 parts a forward is one; a device that was measured with recomputation had 4.
    measured = TrainLatency(1e-4, recomputed=True)
    assert DEVICE.train.passes(2, 1, recomputes=True) == pytest.approx(2 * 4 / 3 + 1 / 3)
    assert measured.passes(2, 1, recomputes=True) == pytest.approx(2 + 1 / 4)
    assert measured.passes(1) == pytest.approx(3 / 4)


def test_trainers_that_no_rollout_asks_first_get_samples_as_early_as_the_others() -> None:
    """Five rollouts for eight trainers; who has leased as far ahead as may be waits long for newer weights."""
    slow = WeightLatency(1e9, publish_s=0.05, swap_s=0.4, link_bytes_s=2.5e8)
    device = replace(DEVICE, train=TrainLatency(1e-3, apply_s=0.1), weights=slow)
    load = load_for(8, rollouts=5, replicas=8, slots=16, one_host=False)
    load = replace(load, settings=replace(load.settings, ledgers=16))
    training = simulate(load, device, Lognormal(100, 0.6), SimulateOptions(steps=20)).pools[1]
    assert training.shares["first"] + training.shares["later"] < 0.05


def test_staleness_hides_what_does_not_bound_the_step() -> None:
    fresh, stale = (simulate(load_for(s), DEVICE, ALIKE, SimulateOptions(steps=6)) for s in (0, 2))
    assert stale.step_s < 0.6 * fresh.step_s
    assert max(stale.staleness) <= 2
    assert stale.never_trained == fresh.never_trained == 0


def test_weights_are_loaded_as_refresh_says() -> None:
    """One slow rollout: at the bound it needs one version in four, and it is idle between the groups that fill it."""
    device = replace(DEVICE, weights=replace(DEVICE.weights, swap_s=0.4))
    found = {
        refresh: simulate(load_for(3, rollouts=1, slots=4, refresh=refresh), device, ALIKE, SimulateOptions(steps=12))
        for refresh in get_args(Refresh)
    }
    loads = {refresh: one.pools[0].shares["loads"] * one.step_s for refresh, one in found.items()}
    assert loads["eager"] == pytest.approx(0.4, abs=0.05), "one version a step"
    assert loads["at_bound"] == pytest.approx(0.4 / 4, abs=0.05)
    assert found["at_bound"].step_s < found["eager"].step_s - 0.2
    assert loads["when_idle"] == pytest.approx(loads["eager"], abs=0.05)
    assert max(found["eager"].staleness) <= 1 < max(found["at_bound"].staleness) <= 3


def test_a_slow_worker_is_given_less() -> None:
    slow = SimulateOptions(steps=6, slowness={1: 4.0})
    load = load_for(2, slots=8)
    alike, uneven = simulate(load, DEVICE, ALIKE, SimulateOptions(steps=6)), simulate(load, DEVICE, ALIKE, slow)
    # 1.25 workers in place of 2, and not the pace of the slower one.
    assert uneven.step_s < 0.6 * 4 * alike.step_s


def test_colocated_workers_generate_and_train_in_turn() -> None:
    load = load_for(0, rollouts=2, replicas=2, slots=64, colocated=True)
    load = replace(load, settings=replace(load.settings, announce_closed=True), job=replace(load.job, colocated=True))
    found = simulate(load, DEVICE, ALIKE, SimulateOptions(steps=4))
    assert found.step_s == pytest.approx(1.0 + 32 * 120 * 1e-4 + 0.5 + 0.1, abs=0.1)
    assert found.pools[0].shares["trains"] > 0.3


def test_the_plan_says_what_is_simulated() -> None:
    words = ["layout=async", "layout.pools.rollout.count=3", "layout.pools.rollout.slots=48", "layout.max_staleness=2"]
    _, plan = plan_recipe("quickstart", [*words, "layout.refresh=when_idle"], need_files=False)
    load = load_of(plan)
    assert (load.rollouts, load.slots, load.settings.max_staleness, load.colocated) == (3, 48, 2, False)
    assert load.refresh == "when_idle"
    assert load.settings.memory_bytes == plan.owner_plan.sample_memory_mb << 20
    _, supervised = plan_recipe("quickstart", ["flow=sft"], need_files=False)
    with pytest.raises(UserError, match="this flow trains on files and generates nothing"):
        load_of(supervised)


def invoke(*words: str) -> str:
    done = CliRunner().invoke(group, ["simulate", "quickstart", "layout=async", "--steps", "2", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_shows_causes_and_writes_a_timeline_and_a_picture(tmp_path: Path) -> None:
    trace, picture = tmp_path / "t.json", tmp_path / "p.png"
    shown = invoke("-o", str(trace), "--plot", str(picture))
    for line in (
        "training step",
        "schedule model",
        "asynchrony       × ",
        "rollout: 2 worker(s), busy",
        "never trained on",
        "not simulated:",
    ):
        assert line in shown
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"trains", "generates"} <= {event["name"] for event in events if event["ph"] == "X"}
    assert {event["args"]["name"].split(" ")[0] for event in events if event["name"] == "process_name"} == {
        "rollout/0",
        "rollout/1",
        "trainer/0",
    }
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_steps_count_in_whole_rounds_of_those_that_wait_for_weights() -> None:
    counted = {None: 8, 0: 8, 1: 8, 2: 9, 3: 8, 4: 10, 8: 9, 20: 21}
    assert {stale: whole_rounds(stale) for stale in counted} == counted
    words = ["simulate", "quickstart", "layout.max_staleness=0,2", "--json"]
    found = json.loads(CliRunner().invoke(group, words).output)
    assert [len(one["steps_s"]) for one in found] == [8, 9]
    given = json.loads(CliRunner().invoke(group, [*words, "--steps", "4"]).output)
    assert [len(one["steps_s"]) for one in given] == [4, 4]


@pytest.mark.parametrize("enough", [2, 7])
def test_one_that_is_ended_early_measures_the_steps_that_it_has(enough: int) -> None:
    told: list[tuple[int, int]] = []

    def watch(ended: int, made: int) -> bool:
        told.append((ended, made))
        return ended >= enough

    whole = simulate(load_for(1), DEVICE, ALIKE, SimulateOptions(8))
    early = simulate(load_for(1), DEVICE, ALIKE, SimulateOptions(8, watch=watch))
    # The first three fill the pipeline, and count only if there are no others.
    ended = told[-1][0]
    assert enough <= ended < 11
    assert {made for _, made in told} == {12}
    assert (len(early.steps), early.wanted, len(whole.steps), whole.wanted) == (max(1, ended - 3), 8, 8, 8)
    assert ended <= 3 or early.steps == whole.steps[: len(early.steps)]


@pytest.mark.parametrize("words", [[], ["layout=colocated"], ["layout.max_staleness=2"]])
def test_without_a_limit_a_large_simulation_goes_on_until_there_is_something_to_say(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(simulate_command, "LIMIT_S", 1e-6)
    done = CliRunner().invoke(group, ["simulate", "quickstart", *words, "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["step_s"] > 0
    assert any(note.startswith("note: ended early: ") for note in figures["notes"])


def test_replicas_that_deal_compute_it_once_and_come_to_the_same() -> None:
    offers = {position: Offer(position % 2, [(100, 50 * position), (0, 7)]) for position in range(32)}
    rule, found, shared = DealRule(32, 4, CostRule(budget=900, packs=True)), dict(enumerate(range(32))), SharedDeal()
    for members, even in ((3, False), (3, False), (2, False), (2, True)):
        assert shared(offers, members, found, rule, even=even) == deal_step(offers, members, found, rule, even=even)
    assert shared(offers, 2, found, rule, even=True) is shared(dict(offers), 2, found, rule, even=True)


def test_the_command_says_what_it_could_not_simulate_in_time() -> None:
    words = ["simulate", "quickstart", "--limit", "0.000001"]
    refused = str(CliRunner().invoke(group, words).exception)
    assert re.search(r"simulate: [01] training steps? had ended when the time of --limit was over.*--limit 6", refused)
    assert early_notes(3, 8)[0].startswith("note: ended early: 3 of 8 training steps in the time that --limit allows")
    assert early_notes(8, 8) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["backend=fsdp"], "note: backend 'fsdp' divides the model over the 2 workers of 'trainer'"),
        (["backend=deepspeed", "zero=3"], "note: backend 'deepspeed' with ZeRO stage 3 divides the model over the 2"),
        (["backend=deepspeed", "zero=2"], "note: backend 'deepspeed' with ZeRO stage 2 divides the model over the 2"),
        (["backend=deepspeed", "zero=1"], ""),
        ([], ""),
    ],
)
def test_what_divided_backends_exchange_is_said_first_not_to_be_simulated(words: list[str], told: str) -> None:
    pool = "layout.pools.trainer"
    shown = invoke(f"{pool}.count=2", *(f"{pool}.{word}" for word in words), "--steps", "1").splitlines()
    above = shown[: shown.index("")]
    assert [line for line in above if "divides" in line] == [line for line in above if told and line.startswith(told)]
    assert bool(told) == any("training takes longer than this says" in line for line in above)


def test_several_values_give_a_table_or_a_list() -> None:
    several = "layout.pools.rollout.count=1,4"
    turns = json.loads(invoke("--json", "--turn-tokens", "1", "--turn-s", "0.5"))
    assert turns["step_s"] > 2 * json.loads(invoke("--json"))["step_s"], "environments take their time"
    head, *rows, note = invoke(several).splitlines()
    assert note.startswith("note: 100% of the responses are cut off")
    assert head.split()[:3] == ["layout.pools.rollout.count", "step", "s"]
    assert [row.split()[0] for row in rows] == ["1", "4"]
    found = json.loads(invoke(several, "--json"))
    assert [one["overrides"] for one in found] == [["layout.pools.rollout.count=1"], ["layout.pools.rollout.count=4"]]
    assert all(one["tokens"]["generated"] >= one["tokens"]["trained"] > 0 for one in found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "median=3,sigma=1,median=4"], r"--lengths .*: median is given twice — leave one out"),
        (["--lengths", "mean=3"], r"--lengths mean=3: expected median=…, sigma=…, prompt_share=… with numbers"),
        *(
            (["--lengths", text], r"expected median from 1 to 1e\+09, sigma from 0 to 10 and prompt_share from 0 to 1")
            for text in ("sigma=-1", "sigma=200", "median=1e300")
        ),
        *(
            (["batch.prompts=8,16", again], r"batch.prompts: given 2 times — give it once, several values as one list")
            for again in ("batch.prompts=32,64", "batch.prompts=32", "+batch.prompts=32")
        ),
        (["--device", "mine/none.yml"], r"latency model 'mine/none.yml': a path of one ends in .yaml"),
        (["--device", "none.yaml"], r"latency model 'none.yaml': this file does not exist"),
        (["--device", "h100-qwen2.5-7"], r"latency model 'h100-qwen2.5-7': no such data file; did you mean"),
        (["batch.prompts=8,16", "-o", "x.json"], r"-o: a timeline is that of one simulation"),
        (["run.seed=" + ",".join(map(str, range(101)))], r"101 simulations: expected at most 100"),
        (["--turn-tokens", "100"], r"--turn-tokens and --turn-s: a turn has both"),
        *(
            (["--turn-tokens", "2", "--turn-s", text], rf"--turn-s {text}: expected seconds from 0 to 3600")
            for text in ("nan", "inf", "-1", "3601")
        ),
        (["--plot", "x.txt"], r"--plot x.txt: unknown kind of picture"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(group, ["simulate", "quickstart", *words], standalone_mode=False, catch_exceptions=False)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sample_s", "samples_s", r"decode.samples_s means nothing in a latency model; did you mean 'sample_s'"),
        ("floor_s: 6.48e-03", "floor_s: .inf", r"Expected `float` <= 3600.0 - at `\$.decode.floor_s`"),
        ("floor_s: 6.48e-03", "floor_s: 3601", r"Expected `float` <= 3600.0 - at `\$.decode.floor_s`"),
        ("link_bytes_s: 5.0e+9", "link_bytes_s: 1e-9", r"Expected `float` >= 1.0 - at `\$.weights.link_bytes_s`"),
        ("apply_s: 0.075", "apply_s: .inf", r"not a latency model: Expected `float` <= 3600.0 - at `\$.train.apply_s`"),
    ],
)
def test_what_no_latency_model_has_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "own.yaml"
    file.write_text((DEVICES / "h100-qwen2.5-7b.yaml").read_text().replace(old, new))
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(
            group, ["simulate", "quickstart", "--device", str(file)], standalone_mode=False, catch_exceptions=False
        )


def test_slots_are_shown_beside_what_the_memory_of_an_engine_holds() -> None:
    sizes = "{model_type: qwen2, hidden_size: 3584, num_hidden_layers: 28, num_attention_heads: 28, "
    sizes += "num_key_value_heads: 4, intermediate_size: 18944, max_position_embeddings: 32768}"
    rollout = "layout.pools.rollout"
    words = ["batch.prompts=64", "batch.samples_per_prompt=8", "--prompt-tokens", "8", "--lengths", "median=4,sigma=0"]
    words += [f"models.policy.init={sizes}", f"{rollout}.engine=sglang", f"{rollout}.device=cuda:0"]
    # 57,344 bytes of keys and values a token; 8 of the prompt and 2 of the response before the mean token.
    few = [*words, f"{rollout}.slots=32", f"{rollout}.engine_options.memory_fraction=0.5"]
    shown, data = invoke(*few), json.loads(invoke(*few, "--json"))
    assert data["kv_samples"] > 32
    assert f"of 32, KV memory for {data['kv_samples']} samples of the mean 10 tokens" in shown
    assert "warning" not in shown
    many = [*few[:-1], f"{rollout}.engine_options.memory_fraction=0.01"]
    assert (
        "warning: the 32 slots of an engine of rollout are more than its KV memory has room for samples (0 of"
        in invoke(*many)
    )


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "quickstart"],
        ["simulate", "quickstart", "--json"],
        ["simulate", "quickstart", "run.seed=0,1"],
        ["plan", "quickstart", "--optimize"],
    ],
    ids=["page", "json", "table", "plan"],
)
def test_what_the_recipe_cuts_off_is_told(words: list[str]) -> None:
    shown = CliRunner().invoke(group, [*words, "--prompt-tokens", "256", "--steps", "1"]).output
    assert shown.count("note: 100% of the responses are cut off at 4 tokens (max_new_tokens)") == 1
    assert re.search(r"note: prompts are cut to \d+ tokens \(data.max_prompt_tokens\)", shown)


@pytest.mark.parametrize("words", [["simulate"], ["plan", "--optimize"]], ids=["simulate", "plan"])
def test_options_of_emulated_devices_that_are_not_used_are_told(words: list[str]) -> None:
    kit = "distflow.testing.emulated"
    recipe = [
        "layout=async",
        f"layout.pools.rollout.engine={kit}:EmulatedEngine",
        "layout.pools.rollout.engine_options={device: h200-qwen2.5-7b, median: 400}",
        f"layout.pools.trainer.backend={kit}:EmulatedBackend",
        "layout.pools.trainer.backend_options={time_scale: 0.5}",
    ]
    shown = CliRunner().invoke(group, [*words, "quickstart", *recipe, "--steps", "1"]).output
    used = "engine_options of rollout (device, median) and backend_options of trainer (time_scale) are not used"
    assert shown.count(used) == 1
    assert "1 steps" not in shown


@pytest.mark.parametrize("option", ["-o", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "simulate", None)
    file = tmp_path / "missing" / "x.png"
    with pytest.raises(UserError, match=rf"^{option} {file}: cannot be written \(No such file or directory\)"):
        CliRunner().invoke(
            group, ["simulate", "quickstart", option, str(file)], standalone_mode=False, catch_exceptions=False
        )


def test_looking_whether_a_file_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("kept")
    for file in (new, old):
        check_writable("-o", file)
    assert ([path.name for path in tmp_path.iterdir()], old.read_text()) == (["old.json"], "kept")


def test_engines_of_several_gpus_are_not_taken_for_faster_ones() -> None:
    two = [f"layout.pools.rollout.{key}" for key in ("engine=sglang", "engine_options.tensor_parallel=2")]
    words = ["quickstart", "layout=async", *two, "layout.pools.rollout.device=cuda:0", "--steps", "1"]
    shown = CliRunner().invoke(group, ["simulate", *words])
    assert (
        "rollout has 2 GPUs, and the times of NVIDIA H100 SXM 80 GB are of 1: it is simulated as fast" in shown.output
    )
    assert "`distflow profile` measures a latency model of engines with 2 GPUs" in shown.output
    refused = CliRunner().invoke(group, ["plan", *words, "--optimize"]).exception
    assert "rollout shares its model among 2 GPUs, and the times of NVIDIA H100 SXM 80 GB are of 1" in str(refused)
    assert "`distflow profile RECIPE -o mine.yaml`" in str(refused)


def test_a_trace_of_lengths_is_read_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("30 10 20\n\n7\n")
    assert read_trace(file).rows == [[10, 20, 30], [7]]
    file.write_text("30 x\n")
    with pytest.raises(UserError, match=r"lengths.txt:1: expected lengths in tokens"):
        read_trace(file)
    assert run(["simulate", "quickstart", "--trace", str(file), "--steps", "1"]) == 2


def test_it_starts_without_torch() -> None:
    program = "import sys, distflow.sim.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("latency_s", [0.0, 0.5, 5.0])
def test_rows_of_a_batch_share_its_latency_in_the_formulas_too(tmp_path: Path, latency_s: float) -> None:
    file = tmp_path / "own.yaml"
    text = (DEVICES / "h100-qwen2.5-7b.yaml").read_text()
    file.write_text(text.replace("apply_s: 0.075", f"apply_s: 0.075, latency_s: {latency_s}"))
    words = ["simulate", "quickstart", "layout=split", "--device", str(file), "--steps", "4", "--json"]
    found = json.loads(CliRunner().invoke(group, words, standalone_mode=False).output)
    assert found["ideal_s"] <= found["step_s"]
    assert found["model_s"] == pytest.approx(found["step_s"], rel=0.6)
