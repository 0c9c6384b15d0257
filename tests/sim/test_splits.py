"""Splits of devices between generation and training: counted by hand, found by simulation, and as the command shows."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from distflow.errors import UserError
from distflow.flow.recipe_check import plan_recipe
from distflow.launch.cli import group
from distflow.sim.costs import PaidSlot, PoolNeed, _cheapest_slots
from distflow.sim.latency import DeviceCount, load
from distflow.sim.lengths import Lognormal
from distflow.sim.plan_simulation import SimulationInput
from distflow.sim.predict import Load, SimulateOptions, load_of, simulate
from distflow.sim.splits import (
    BUDGET_S,
    Candidate,
    PoolSplit,
    SplitRule,
    SplitSearch,
    Trials,
    cost_s,
    limit_of,
    search,
    split_rule,
)
from distflow.sim.theory import StepTimes

_SHIPPED = load("h100-qwen2.5-7b")
DEVICE = replace(_SHIPPED, weights=replace(_SHIPPED.weights, swap_s=0.3, host_bytes_s=5e9))
"""With weights that load as quickly as the steps here are short, which would wait for little else."""
RECIPE = (
    "layout=async",
    "batch={prompts: 16, samples_per_prompt: 8, ledgers: 8}",
    "layout.pools.rollout.slots=16",
    "models.policy.init.max_position_embeddings=4096",
    "flow.steps.sample.with.max_new_tokens=1024",
)
LENGTHS = Lognormal(300, 0.8, 0.6)


def found(*words: str, devices: int | None = None, steps: int = 2) -> SplitSearch:
    _, plan = plan_recipe("quickstart", [*RECIPE, *words], need_files=False)
    rule = split_rule(plan, DEVICE, devices)

    def load_for(split: PoolSplit, stale: int | None) -> Load:
        more = () if stale is None else (f"layout.max_staleness={stale}",)
        _, other = plan_recipe("quickstart", [*RECIPE, *words, *rule.words(split), *more], need_files=False)
        return load_of(other)

    inputs = SimulationInput(DEVICE, LENGTHS, "", None, steps, False)
    return search(Trials(rule, load_for, inputs, steps, lambda line: None))


def rule(devices: int, *, engine: int = 1, trainer: int = 1, most: int = 8, least: int = 1) -> SplitRule:
    return SplitRule(PoolSplit(2, 1), devices, engine, trainer, "rollout", "trainer", most, least)


@pytest.mark.parametrize(
    "given, expected",
    [
        (rule(4), ["1 + 3", "2 + 2", "3 + 1"]),
        (rule(4, most=2), ["2 + 2", "3 + 1"]),
        (rule(4, least=2), ["1 + 3", "2 + 2"]),
        (rule(32, engine=4, trainer=8), ["2 + 3", "4 + 2", "6 + 1"]),
        # Of splits with as many generating workers, the one with most training workers.
        (rule(20, engine=8), ["1 + 8", "2 + 4"]),
        (rule(8, engine=1, trainer=8), []),
    ],
)
def test_every_device_that_can_be_used_is_used(given: SplitRule, expected: list[str]) -> None:
    splits = given.splits()
    assert [str(split) for split in splits] == expected
    assert all(given.used(split) <= given.devices for split in splits)


def test_devices_are_counted_by_the_plan_and_by_the_latency_model() -> None:
    _, plan = plan_recipe("quickstart", RECIPE, need_files=False)
    assert split_rule(plan, DEVICE).devices == 3
    large = replace(DEVICE, gpus=DeviceCount(engine=4, trainer=8))
    assert split_rule(plan, large).devices == 2 * 4 + 8
    sglang = "layout.pools.rollout={engine: sglang, engine_options: {tensor_parallel: 2}, device: cuda}"
    _, wide = plan_recipe("quickstart", [*RECIPE, sglang], need_files=False)
    with pytest.raises(UserError, match=r"an engine of rollout shares its model among 2 GPUs, and the times of"):
        split_rule(wide, DEVICE)
    measured = replace(DEVICE, gpus=DeviceCount(engine=2))
    assert (split_rule(wide, measured).engine, split_rule(wide, measured).devices) == (2, 5)
    with pytest.raises(UserError, match="8 devices are too few: a worker of rollout takes 4, and 1 of trainer 8"):
        split_rule(plan, large, 8)
    with pytest.raises(UserError, match="1 device is too few: .* give more with --hosts"):
        split_rule(plan, DEVICE, 1, option="--hosts")


def test_a_divided_model_keeps_the_training_workers_that_it_needs() -> None:
    """15.2 GB of weights make 122 GB to train, and a device has 80."""
    words = (*RECIPE, "layout.pools.trainer={count: 3, backend: fsdp}")
    _, plan = plan_recipe("quickstart", words, need_files=False)
    assert [str(split) for split in split_rule(plan, DEVICE).splits()] == ["1 + 4", "2 + 3", "3 + 2"]


@pytest.mark.parametrize(
    "words, expected",
    [
        (["layout=colocated"], "generate and train in turn, so there is no split to choose — layout=async has"),
        (["flow=sft"], "trains on files and generates nothing"),
    ],
)
def test_layouts_without_a_split_are_refused(words: list[str], expected: str) -> None:
    _, plan = plan_recipe("quickstart", words, need_files=False)
    with pytest.raises(UserError, match=expected):
        split_rule(plan, DEVICE)


def test_the_best_split_is_that_of_a_search_over_all() -> None:
    searched = found(devices=6)
    times = {}
    for split in searched.rule.splits():
        _, plan = plan_recipe("quickstart", [*RECIPE, *searched.rule.words(split)], need_files=False)
        times[split] = simulate(load_of(plan), DEVICE, LENGTHS, SimulateOptions(steps=2)).step_s
    assert searched.best.split == min(times, key=lambda split: times[split])
    assert searched.best.step_s == times[searched.best.split]
    simulated = [one for one in searched.candidates if one.prediction is not None]
    assert len(simulated) < len(searched.candidates), "what the formula rules out is not simulated"
    assert {other.staleness for other in searched.others} == {2}


@pytest.mark.parametrize(
    "words, expected",
    [
        (["layout.pools.rollout.count=1"], "decoding"),
        (["layout.pools.rollout.count=6"], "training alone"),
        (
            ["layout.pools.rollout={count: 6, slots: 64}", "layout.pools.trainer.count=4", "batch.prompts=32"],
            "the longest samples",
        ),
        (["layout.max_staleness=0", "flow.steps.sample.with.max_new_tokens=4"], "new weights"),
    ],
)
def test_what_limits_a_layout_is_named(words: list[str], expected: str) -> None:
    _, plan = plan_recipe("quickstart", [*RECIPE, *words], need_files=False)
    prediction = simulate(load_of(plan), DEVICE, LENGTHS, SimulateOptions(steps=2))
    limit = limit_of(Candidate(PoolSplit(1, 1), StepTimes(1.0, 1.0, 1.0, 1.0), prediction))
    assert limit.name == expected, limit.why


def test_a_split_that_the_recipe_refuses_is_told_and_passed_over() -> None:
    searched = found("layout.pools.rollout={count: 3, slots: 64, each: {2: {slots: 8}}}", steps=2)
    refused = {str(one.split): one.refused for one in searched.candidates if one.refused}
    assert "pool 'rollout' has no worker '2'" in refused["2 + 2"]
    assert searched.best is searched.present


def test_large_simulations_are_bounded_beforehand() -> None:
    _, plan = plan_recipe("quickstart", RECIPE, need_files=False)
    small = load_of(plan)
    large = replace(small, rollouts=200, replicas=8)
    assert cost_s(small, 10.0, 8) < BUDGET_S / 10
    assert cost_s(large, 100.0, 8) > BUDGET_S


@pytest.mark.parametrize(
    "stale, prompts, expected", [(0, 16, 8), (0, 256, 6), (1, 16, 8), (2, 16, 9), (2, 192, 6), (4, 16, 10)]
)
def test_steps_that_count_are_whole_rounds_if_these_do_not_take_long(stale: int, prompts: int, expected: int) -> None:
    words = [*RECIPE, f"layout.max_staleness={stale}", f"batch.prompts={prompts}"]
    _, plan = plan_recipe("quickstart", words, need_files=False)
    inputs = SimulationInput(DEVICE, LENGTHS, "", None, None, False)
    trials = Trials(split_rule(plan, DEVICE), lambda split, stale: load_of(plan), inputs, None, lambda line: None)
    assert trials.steps == expected


def invoke(*words: str) -> str:
    arguments = ["plan", "quickstart", *RECIPE, "--optimize", "--lengths", "median=300,sigma=0.8", "--steps", "2"]
    done = CliRunner().invoke(group, [*arguments, *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_each_simulation_is_told_as_it_is_done() -> None:
    _, plan = plan_recipe("quickstart", RECIPE, need_files=False)
    told: list[str] = []
    inputs = SimulationInput(DEVICE, LENGTHS, "", None, 2, False)
    trials = Trials(split_rule(plan, DEVICE), lambda split, stale: load_of(plan), inputs, 2, told.append)
    trials.simulate(trials.rule.present)
    assert told[0].startswith("simulating 2 + 1, estimated to take ")
    found = trials.known[trials.rule.present]
    assert told[1:] == [f"2 + 1: {found.step_s:.1f} s a training step, limited by {limit_of(found).name}"]


def test_the_command_proposes_words_that_can_be_typed() -> None:
    shown = invoke("layout.pools.rollout.count=1", "layout.pools.trainer.count=3", "--devices", "4")
    assert "best: 3 + 1, " in shown
    assert "layout.pools.rollout.count=3 layout.pools.trainer.count=1" in shown
    busy = next(line.split()[5] for line in shown.splitlines() if line.startswith("present "))
    assert f"what limits the present layout: decoding — rollout decodes {busy} of the time" in shown
    assert "with layout.max_staleness=2: " in shown
    marks = [line.split()[:2] for line in shown.splitlines() if line.lstrip().startswith(("present", "best "))]
    assert marks[:2] == [["present", "1"], ["best", "3"]]


def test_the_same_figures_come_as_data_and_again() -> None:
    once, again = (json.loads(invoke("--json")) for _ in range(2))
    assert once == again
    assert once["devices"] == 3
    assert once["present"]["workers"] == {"rollout": 2, "trainer": 1}
    assert once["best"]["overrides"] == ["layout.pools.rollout.count=2", "layout.pools.trainer.count=1"]
    assert {tuple(one["workers"].values()) for one in once["candidates"]} == {(1, 2), (2, 1)}


HOSTS = """
gpu-1 slots=2 site=frankfurt cost=3.5
gpu-2 slots=2 site=frankfurt cost=1
gpu-3 slots=4 site=oslo cost=2
cpu-1 slots=1 site=nowhere cost=0.01
"""


def test_the_cheapest_split_of_each_site_takes_its_cheapest_devices(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(HOSTS)
    told = json.loads(invoke("--hosts", str(hosts), "--json"))
    assert told["devices"] == 9
    costs = {one["site"]: one for one in told["costs"]}
    assert set(costs) == {"frankfurt", "oslo"}, "one device is too few for a split"
    assert [one["per_million_tokens"] for one in told["costs"]] == sorted(
        one["per_million_tokens"] for one in costs.values()
    )
    for one in costs.values():
        assert one["per_million_tokens"] == pytest.approx(1e6 * one["hourly"] / (3600 * one["tokens_s"]))
    assert costs["oslo"]["hourly"] == 2 * costs["oslo"]["devices"]
    prices = [1, 1, 3.5, 3.5]
    assert costs["frankfurt"]["hourly"] == sum(prices[: costs["frankfurt"]["devices"]])
    shown = invoke("--hosts", str(hosts))
    assert "the cheapest split of each site alone" in shown
    assert "left out: nowhere — has no room for the workers of a split" in shown
    assert "gpu-3" not in typed_as_proposed(hosts)[1]


def typed_as_proposed(hosts: Path, *words: str) -> tuple[str, str]:
    """What --optimize shows, and the plan that the words after `cheapest:` make."""
    shown = invoke("--hosts", str(hosts), *words)
    line = next(line for line in shown.splitlines() if line.startswith("cheapest: "))
    proposed, _, include = line.removeprefix("cheapest: ").partition(" with --include ")
    include = include.rpartition(", ")[0]
    typed = [*words, *shlex.split(proposed), "--hosts", str(hosts), "--include", include]
    placed = CliRunner().invoke(group, ["plan", "quickstart", *RECIPE, *typed])
    assert placed.exit_code == 0, placed.output
    return shown, placed.stdout


def test_the_cheapest_split_is_placed_on_the_slots_that_it_is_priced_by(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("gpu-1 slots=4 cost=9\ngpu-2 slots=4 cost=2\n")
    shown, placed = typed_as_proposed(hosts)
    assert "with --include gpu-2" in shown
    assert "gpu-1" not in placed, "without the words, half of the workers would be there"


def test_the_cheapest_split_heeds_the_hosts_of_a_pool(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("gpu-1 slots=2 site=a cost=9\ngpu-2 slots=2 site=a cost=2\ngpu-3 slots=4 site=b cost=1\n")
    shown, placed = typed_as_proposed(hosts, "layout.pools.trainer.hosts=[gpu-1]")
    assert "left out: b — trainer may run on gpu-1 only" in shown
    assert "gpu-1 at a  1 of 1 slots  trainer/0" in placed
    # A launch refuses a pin to a host that it does not have.
    shown, placed = typed_as_proposed(hosts, "layout.pools.trainer.hosts=[gpu-1, gpu-2]")
    assert "'layout.pools.trainer.hosts=[gpu-2]' with --include gpu-2" in shown
    assert "gpu-1" not in placed


def test_engines_over_several_gpus_take_slots_side_by_side() -> None:
    slots = [PaidSlot("a", 0, 1.0), PaidSlot("b", 0, 2.0), PaidSlot("a", 2, 1.0), PaidSlot("b", 1, 2.0)]
    split = _cheapest_slots(PoolNeed(1, 2, 2), slots)
    assert split == [PaidSlot("b", 0, 2.0), PaidSlot("b", 1, 2.0)]
    assert _cheapest_slots(PoolNeed(2, 2, 2), slots) is None
    assert _cheapest_slots(PoolNeed(2, 1, 1, ("b",)), slots) == split


def test_no_split_is_proposed_that_the_hosts_have_no_place_for(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("gpu-1 slots=1 site=a\ngpu-2 slots=3 site=b\n")
    told = json.loads(invoke("--hosts", str(hosts), "--json", "layout.pools.trainer.hosts=[gpu-1]"))
    refused = {one["workers"]["trainer"]: one["refused"] for one in told["candidates"] if "refused" in one}
    assert told["best"]["workers"]["trainer"] == 1
    assert "(gpu-1) have 1" in refused[2]
    # Pools that keep their workers take slots, too.
    more = ["layout=services", "flow=grpo_kl", "layout.pools.trainer.hosts=[gpu-2]"]
    told = json.loads(invoke("--hosts", str(hosts), "--json", *more))
    assert told["devices"] < 4


def test_training_workers_on_several_sites_are_warned_of(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("gpu-1 slots=2 site=a\ngpu-2 slots=4 site=b\n")
    words = ("--hosts", str(hosts), "layout.pools.rollout.slots=64", "layout.pools.rollout.count=3")
    many = (*words, "layout.pools.trainer.count=3", "flow.steps.sample.with.max_new_tokens=16")
    assert "pin trainer to one of them, such as 'layout.pools.trainer.hosts=[gpu-2]'" in invoke(*many)
    pinned = invoke(*many, "layout.pools.trainer.hosts=[gpu-2]")
    assert "links between hosts are taken to be all alike" in pinned
    assert "pin trainer" not in pinned


def test_an_error_is_what_comes_of_devices_that_no_split_has_workers_for() -> None:
    done = CliRunner().invoke(group, ["plan", "quickstart", *RECIPE, "--optimize", "--devices", "100000"])
    assert isinstance(done.exception, UserError)
    assert "100000 devices cannot be split" in str(done.exception)
    assert "99992 should be less than or equal to 4096" in str(done.exception)
    assert "command line" not in str(done.exception)


def test_prices_are_given_for_all_hosts_or_for_none(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("gpu-1 slots=2 cost=3.5\ngpu-2 slots=2\n")
    done = CliRunner().invoke(group, ["plan", "quickstart", *RECIPE, "--optimize", "--hosts", str(hosts)])
    assert "gpu-2" in str(done.exception)
    assert "has no cost=, and others have" in str(done.exception)
    hosts.write_text("gpu-1 slots=2\ngpu-2 slots=2\n")
    told = json.loads(invoke("--hosts", str(hosts), "--json"))
    assert (told["devices"], told["costs"]) == (4, [])


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--devices", "4"], "--devices: only with --optimize"),
        (["--optimize", "--svg", "x.svg"], "--svg: not together with --optimize"),
        (["--include", "gpu-1"], "name it with --hosts FILE"),
    ],
)
def test_options_of_the_other_page_are_refused(words: list[str], expected: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(group, ["plan", "quickstart", *words])
    assert expected in str(done.exception)
