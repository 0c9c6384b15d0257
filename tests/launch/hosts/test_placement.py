"""Workers take turns over the hosts; pinned pools choose first; what does not fit is refused with the counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.errors import UserError
from distflow.flow.estimate import LIBRARY_BYTES
from distflow.flow.gpus import device_of_slot
from distflow.flow.lanes import lanes_of
from distflow.flow.memory_fit import Capacity
from distflow.flow.plan import publisher_for
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.sizes import FETCHED, PINNED, PUBLISHED, model_size
from distflow.launch.cli import run
from distflow.launch.deploy.host_checks import GIB
from distflow.launch.deploy.hostfile import HostsError, parse_hosts
from distflow.launch.deploy.placement import (
    begin_with,
    needs_of,
    place_workers,
    placement_lines,
    shared_memory_lines,
)

IN_TWO = ["layout.pools.rollout.engine=sglang", "layout.pools.rollout.engine_options.tensor_parallel=2"]

TWENTY = "\n".join(f"h{n}" for n in range(20))


def placed(text, *overrides):
    plan = plan_recipe("quickstart", overrides)[1]
    placement = place_workers(plan, parse_hosts(text, "hosts"))
    return {name: (placement.hosts[place.host].name, place.slot) for name, place in placement.places.items()}


def test_pools_are_spread_over_the_hosts_in_turn():
    assert placed("a slots=2\nb slots=2", "layout.pools.rollout.count=3") == {
        "rollout/0": ("a", 0),
        "rollout/1": ("b", 0),
        "rollout/2": ("a", 1),
        "trainer/0": ("b", 1),
    }


def test_a_full_host_is_passed_over():
    found = placed("a slots=1\nb slots=4", "layout.pools.rollout.count=4")
    assert [host for host, _ in found.values()] == ["a", "b", "b", "b", "b"]


def test_pinned_pools_choose_first_and_keep_to_their_hosts():
    found = placed("gpu-1 slots=1\ncpu-1 slots=2\ncpu-2 slots=2", "layout.pools.trainer.hosts=[gpu-*]")
    assert found == {"rollout/0": ("cpu-1", 0), "rollout/1": ("cpu-2", 0), "trainer/0": ("gpu-1", 0)}


def test_pins_by_number_need_no_names():
    found = placed(
        "10.0.0.1 slots=2\n10.0.0.2 slots=2", "layout.pools.trainer.hosts=[1]", "layout.pools.rollout.hosts=[0]"
    )
    assert found == {"rollout/0": ("10.0.0.1", 0), "rollout/1": ("10.0.0.1", 1), "trainer/0": ("10.0.0.2", 0)}
    with pytest.raises(UserError, match=r"trainer.hosts — there is no host 2 — the 2 hosts have the numbers 0 to 1"):
        placed("a\nb", "layout.pools.trainer.hosts=[0, 2]")


def test_validate_finds_places_for_the_hosts_of_a_file(tmp_path, capsys):
    (tmp_path / "hosts").write_text("gpu-1 slots=2\ngpu-2 slots=1\n")
    words = ["validate", "quickstart", "--hosts", str(tmp_path / "hosts"), "layout.pools.rollout.device=cuda"]
    assert run(words) == 0, "this machine need not have one"
    assert "1  gpu-2  1 of 1 slots  rollout/1" in capsys.readouterr().out
    assert run([*words, "layout.pools.rollout.count=3"]) == 2
    assert "4 workers, but the 2 hosts together have 3" in capsys.readouterr().err


JUDGE = ["layout=services", "layout.pools.reward.count=2"]


def test_a_worker_without_a_model_takes_a_slot_and_leaves_the_gpus_to_others():
    """Slots beyond the GPUs of a host are for it: the fifth slot of four GPUs is the first GPU again."""
    found = placed("a slots=3\nb slots=2", *JUDGE)
    assert found == {
        "rollout/0": ("a", 0),
        "rollout/1": ("b", 0),
        "reward/0": ("b", 1),
        "reward/1": ("a", 2),
        "trainer/0": ("a", 1),
    }


@pytest.mark.parametrize("order", ["reward", "trainer"])
def test_it_keeps_to_its_hosts_and_finds_them_full(order):
    pinned = ["layout.pools.reward.hosts=[b]", f"layout.pools.{order}.count=2"]
    found = placed("a slots=4\nb slots=2", "layout=services", *pinned)
    judges = {place for name, place in found.items() if name.startswith("reward")}
    assert judges == ({("b", 1), ("b", 0)} if order == "reward" else {("b", 1)})
    with pytest.raises(UserError, match=r"pool 'reward' has 3 workers, but the hosts that it may run on \(b\) have 2"):
        placed(
            "a slots=4\nb slots=2", "layout=services", "layout.pools.reward.hosts=[b]", "layout.pools.reward.count=3"
        )


FOUR = ["layout.pools.rollout.count=4", "layout.pools.trainer.count=4"]
DIVIDED = [*FOUR, "layout.pools.trainer.backend=fsdp"]


@pytest.mark.parametrize("stage, hosts", [(1, {"a", "b"}), (2, {"a"}), (3, {"a"})])
def test_workers_that_divide_their_models_are_together_on_one_host(stage, hosts):
    zero = ["layout.pools.trainer.backend=deepspeed", f"layout.pools.trainer.backend_options={{zero: {stage}}}"]
    assert trainers(placed("a slots=4\nb slots=4", *FOUR, *zero)) == hosts


def test_they_go_to_the_host_with_most_slots_and_are_spread_only_where_none_has_enough():
    assert trainers(placed("a slots=4\nb slots=8", *DIVIDED)) == {"b"}
    assert trainers(placed("a slots=4\nb slots=4", *FOUR)) == {"a", "b"}, "each has a model of its own"
    plan = plan_recipe("quickstart", DIVIDED)[1]
    apart = placement_lines(plan, place_workers(plan, parse_hosts("a slots=3\nb slots=3\nc slots=3", "hosts")))
    assert "the models of pool 'trainer' are divided over a, b, c, so each micro-batch waits" in apart[-1]
    together = placement_lines(plan, place_workers(plan, parse_hosts("a slots=4\nb slots=4", "hosts")))
    assert not any("divided" in line for line in together)


def test_checkpoints_that_only_one_host_has_are_told_of():
    def noted(*overrides, slots=2):
        plan = plan_recipe("quickstart", overrides)[1]
        lines = placement_lines(plan, place_workers(plan, parse_hosts(f"a slots={slots}\nb slots={slots}", "hosts")))
        return [line for line in lines if "checkpoints are lost" in line]

    (line,) = noted("layout.pools.trainer.hosts=[b]")
    assert line.startswith("note: only b trains: unless the run folder is on a shared file system, all checkpoints are")
    assert line.endswith("run.copy_to keeps a copy elsewhere")
    assert noted("run.copy_to=/elsewhere") == []
    assert noted(*FOUR, slots=4) == [], "two hosts train"


def test_hosts_of_a_site_without_a_training_worker_read_weights_from_one_of_the_others():
    text = "a slots=2\nb slots=2\nc slots=1 site=far\nd slots=1 site=far"
    pinned = ["layout.pools.trainer.hosts=[a, b]"]
    plan = plan_recipe("quickstart", ["layout.pools.trainer.count=2", "layout.pools.rollout.count=4", *pinned])[1]
    placement = place_workers(plan, parse_hosts(text, "hosts"))
    lines = placement_lines(plan, placement)
    assert [line.split("  ")[1] for line in lines] == ["a", "b", "c at far", "d at far"]
    sources = [line.split("weights over the network, from ")[1] for line in lines[2:]]
    assert sources[0] == sources[1], "or each version would cross to that site twice"
    assert lanes_of(plan, plan.edge("samples"), placement.where) == ("shm", "zmq", "zstd")


@pytest.mark.parametrize(
    ("host", "site", "publisher"),
    [(0, "", "t/0"), (2, "near", "t/2"), (5, "near", "t/2"), (6, "near", "t/2"), (7, "", "t/1"), (8, "", "t/0")],
)
def test_weights_come_from_ones_own_host_then_from_ones_own_site(host, site, publisher):
    leaders = {0: "t/0", 1: "t/1", 2: "t/2"}
    assert publisher_for(host, leaders, site, {2: "near"}) == publisher


def test_all_of_a_far_site_read_from_the_same_publisher():
    leaders = {0: "t/0", 1: "t/1", 2: "t/2"}
    assert len({publisher_for(host, leaders, "far", {}) for host in range(3, 20)}) == 1
    assert len({publisher_for(9, leaders, f"far-{n}", {}) for n in range(20)}) == 3, "sites are spread over them"


def test_a_plan_says_how_much_room_weights_take_in_shared_memory():
    sizes = "model_type: qwen2, hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16"
    plan = plan_recipe("quickstart", [f"models.policy.init={{{sizes}}}", "models.policy.dtype=bfloat16"])[1]
    size = model_size(plan.recipe.models["policy"]).published / GIB
    assert shared_memory_lines(plan, None) == [f"this machine  {PUBLISHED * size:.2f}"]
    apart = place_workers(plan, parse_hosts("a slots=1\nb slots=2", "hosts"))
    own, fetched = (PUBLISHED + PINNED) * size, FETCHED * size
    found = dict(line.split() for line in shared_memory_lines(plan, apart))
    assert sorted(found.values()) == sorted([f"{own:.2f}", f"{fetched:.2f}"])


def trainers(found):
    return {host for name, (host, _) in found.items() if name.startswith("trainer")}


def test_a_host_with_a_critic_alone_publishes_nothing_and_its_readers_share_what_one_fetches():
    pinned = [f"layout.pools.{pool}.hosts=[{host}]" for pool, host in (("critic", "b"), ("trainer", "a"))]
    two = ["flow=ppo", "layout=critic", *pinned, "layout.pools.rollout.hosts=[b]"]
    plan = plan_recipe("quickstart", two)[1]
    placement = place_workers(plan, parse_hosts("a slots=4\nb slots=4", "hosts"))
    policy, critic = (needs_of(plan, placement, host) for host in (0, 1))
    weights = policy.shm.fail // 4
    assert critic.shm.fail == 2 * weights > 0, "the version in use, and the next, for all readers there"
    beside = plan_recipe("quickstart", ["flow=ppo", "layout=critic"])[1]
    together = needs_of(beside, place_workers(beside, parse_hosts("a slots=8", "hosts")), 0)
    # Each of two hosts has the libraries once that workers share.
    fetched = policy.memory.fail + critic.memory.fail - together.memory.fail - LIBRARY_BYTES
    assert fetched == (2 + 1) * weights + weights // 2 * 2, (
        "the version that others are reading is published too, and half a version of deltas is kept on each of the two"
    )
    full = plan_recipe("quickstart", [*two, "weights.encoding=full"])[1]
    of_both = sum(needs_of(full, placement, host).memory.fail for host in (0, 1))
    assert of_both == together.memory.fail + 3 * weights + LIBRARY_BYTES


def test_a_host_that_rounds_weights_for_others_needs_room_for_the_rounded_ones_too() -> None:
    found = {}
    for encoding in ("auto", "bf16", "fp8"):
        plan = plan_recipe("quickstart", ["layout.pools.rollout.hosts=[b]", f"weights.encoding={encoding}"])[1]
        for hosts in ("a slots=4\nb slots=4", "b slots=8"):
            needs = needs_of(plan, place_workers(plan, parse_hosts(hosts, "hosts")), 0)
            found[encoding, hosts.count("slots")] = needs.shm.fail
    assert found["bf16", 2] == found["auto", 2] * 3 // 2
    assert found["fp8", 2] == found["auto", 2] * 5 // 4
    assert found["bf16", 1] == found["auto", 1], "nothing is rounded on one host"


def test_the_numbers_can_begin_with_another_host():
    plan = plan_recipe("quickstart")[1]
    placement = place_workers(plan, parse_hosts("a\nb\nc", "hosts"))
    other = begin_with(placement, 1)
    assert [host.name for host in other.hosts] == ["b", "a", "c"]
    assert {n: other.hosts[s.host].name for n, s in other.places.items()} == {
        n: placement.hosts[s.host].name for n, s in placement.places.items()
    }


@pytest.mark.parametrize(
    "text, overrides, message",
    [
        (
            "a\nb",
            [],
            r"hosts: slots — 3 workers, but the 2 hosts together have 2 — add hosts or slots",
        ),
        (
            "a slots=3\nb slots=1\nc slots=1",
            IN_TWO,
            r"hosts: slots — no host has 2 consecutive slots left for each worker of pool 'rollout', as its engine",
        ),
        ("a slots=9", ["layout.pools.trainer.hosts=[b]"], r"trainer.hosts — no host matches 'b'"),
        (
            "a slots=1\nb slots=9",
            ["layout.pools.rollout.hosts=[a]"],
            r"pool 'rollout' has 2 workers, but the hosts that it may run on \(a\) have 1 — give these",
        ),
        (
            "a slots=2\nb slots=2",
            ["layout.pools.trainer.count=2", "security.encrypt=all"],
            r"security.encrypt — all does not encrypt gradients, and training workers on a, b .*trusted_network",
        ),
        (
            TWENTY,
            ["limits.host_silence_s=9"],
            r"limits.host_silence_s — 9 s is too short for 20 hosts, whose agents need 9 s .*: 30 s, or at least 10 s",
        ),
    ],
)
def test_what_does_not_fit_is_refused(text, overrides, message):
    with pytest.raises(UserError, match=message):
        placed(text, *overrides)


@pytest.mark.parametrize(
    ("override", "written", "hosts"),
    [
        ("layout.pools.trainer.hosts=[b]", "layout: {pools: {trainer: {hosts: [b]}}}", "a slots=9"),
        ("limits.host_silence_s=9", "limits: {host_silence_s: 9}", TWENTY),
    ],
)
def test_what_hosts_rule_out_is_told_of_its_place(override: str, written: str, hosts: str, tmp_path: Path) -> None:
    loaded, plan = plan_recipe("quickstart", [override])
    with pytest.raises(HostsError, match=r"^command line: "):
        place_workers(plan, parse_hosts(hosts, "hosts"), loaded.origin)
    (tmp_path / "mine.yaml").write_text(f"defaults: [quickstart, _self_]\n{written}\n")
    loaded, plan = plan_recipe(str(tmp_path / "mine.yaml"), [])
    with pytest.raises(HostsError, match=r"mine\.yaml:2: "):
        place_workers(plan, parse_hosts(hosts, "hosts"), loaded.origin)


@pytest.mark.parametrize("text, silence", [(TWENTY, 10), ("a\nb\nc", 1)])
def test_hosts_may_be_silent_for_long_enough(text, silence):
    assert placed(text, f"limits.host_silence_s={silence}")


def test_an_engine_over_two_gpus_takes_two_slots():
    assert placed("a slots=4\nb slots=2", *IN_TWO) == {
        "rollout/0": ("a", 0),
        "rollout/1": ("b", 0),
        "trainer/0": ("a", 2),
    }


@pytest.mark.parametrize(
    "wanted, gpus, device",
    [("auto", 0, "auto"), ("auto", 4, "cuda:2"), ("cuda", 2, "cuda:0"), ("cpu", 4, "cpu"), ("cuda:3", 4, "cuda:3")],
)
def test_gpus_are_numbered_by_slot_on_each_host(wanted, gpus, device):
    plan = plan_recipe("quickstart", [f"layout.pools.rollout.device={wanted}"])[1]
    assert device_of_slot(plan.workers[0], 2, gpus) == device


def test_plan_shows_the_placement(tmp_path, capsys):
    (tmp_path / "hosts").write_text("a slots=2\nb")
    pinned = "layout.pools.trainer.hosts=[b]"
    assert run(["plan", "quickstart", pinned, "--hosts", str(tmp_path / "hosts")]) == 0
    out = capsys.readouterr().out
    assert "0  a  2 of 2 slots  rollout/0, rollout/1; weights over the network, from trainer/0\n" in out
    assert "1  b  1 of 1 slots  trainer/0\n" in out
    assert "samples (lease): rollout -> trainer over zmq\n" in out
    assert "policy (weights): trainer -> rollout over tcp\n" in out
    assert "ignores" not in out


@pytest.mark.parametrize("command", [["validate"], ["plan"], ["plan", "--json"]])
@pytest.mark.parametrize("pin", ["b", "1"])
def test_pins_are_said_to_be_ignored_where_no_hosts_are_given(tmp_path, capsys, command, pin):
    (tmp_path / "hosts").write_text("a slots=2\nb")
    words = [*command, "quickstart", f"layout.pools.trainer.hosts=[{pin}]"]
    assert run(words) == 0
    assert f"pool 'trainer' is pinned to the hosts {pin}, which a run on one host ignores" in capsys.readouterr().out
    assert run([*words, "--hosts", str(tmp_path / "hosts")]) == 0
    assert "ignores" not in capsys.readouterr().out


@pytest.mark.parametrize("cure", ["security.trusted_network=true", "layout.pools.trainer.hosts=[b]"])
def test_all_is_encrypted_that_can_be_where_nobody_else_reads_the_gradients(cure):
    found = placed("a slots=2\nb slots=3", "layout.pools.trainer.count=2", "security.encrypt=all", cure)
    assert {"trainer/0", "trainer/1"} <= found.keys()


@pytest.mark.parametrize("command", [["plan"], ["launch", "--dry-run"]])
def test_workers_of_several_hosts_are_not_counted_as_if_on_this_one(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("distflow.launch.deploy.host_checks.capacity", lambda: Capacity(host=1 << 20))
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    assert run([*command, "quickstart"]) == 0
    assert "this host has" in capsys.readouterr().out
    assert run([*command, "quickstart", "--hosts", str(tmp_path / "hosts")]) == 0
    assert "this host has" not in capsys.readouterr().out
