"""What is refused about a host, with the cure; everything at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distflow.flow.estimate import PROCESS
from distflow.flow.memory import group_bytes
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.sizes import model_size
from distflow.launch.deploy.host_checks import (
    GIB,
    Expected,
    Facts,
    ResourceRequest,
    clock_problems,
    judge,
    link_problems,
    notes,
)
from distflow.launch.deploy.hostfile import parse_hosts
from distflow.launch.deploy.placement import needs_of, place_workers

HOSTS = parse_hosts("a slots=2\nb slots=2\nc", "hosts")
PACKAGES = {"torch": "2.13.0", "transformers": "5.1", "pyzmq": "27.0"}
EXPECTED = Expected("0.1.0", "abc", "3.11.7", PACKAGES, resume=False)
NEED = ResourceRequest(memory=2 * GIB, memory_beside_gpus=GIB, disk=GIB, shm=GIB, gpus=0, paths=("/models/mine",))
FACTS = Facts(
    hostname="a",
    python="3.11.9",
    packages=PACKAGES,
    distflow="0.1.0",
    digest="abc",
    package="/site/distflow",
    cpus=2,
    free_memory=4 * GIB,
    gpus=(),
    ssh_address=None,
    same_folder=False,
    taken=False,
    unwritable=None,
    free_disk=2 * GIB,
    free_shm=2 * GIB,
    missing=(),
)


def complaints(expected=EXPECTED, optional=(), **changed):
    return [str(p) for p in judge(HOSTS[0], replace(FACTS, **changed), expected, NEED, "/runs/x", optional)]


def test_a_host_like_the_head_is_fit():
    assert complaints() == []
    assert complaints(same_folder=True, taken=True) == []


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"distflow": None, "digest": None}, "hosts:1: a — distflow is not installed for its Python 3.11.9 — install"),
        ({"digest": "def"}, "its distflow in /site/distflow has the code def, here it is abc — bring the same code"),
        ({"digest": "def", "distflow": "0.2"}, "(version 0.2, here 0.1.0)"),
        ({"python": "3.12.1"}, "its Python is 3.12.1, here it is 3.11.7 — give one of the same version: python=…"),
        ({"packages": {**PACKAGES, "torch": None}}, "its torch is missing, here it is 2.13.0 — install torch==2.13.0"),
        ({"unwritable": "read-only"}, "/runs/x: read-only — give a folder that can be written there: dir=…"),
        ({"taken": True}, "/runs/x exists there already, and it is not this machine's — choose another name"),
        ({"free_memory": GIB}, "1.0 GiB of memory are free, about 2.0 GiB are needed — place fewer workers"),
        ({"free_memory": GIB // 2, "gpus": ("H200",)}, "0.5 GiB of memory are free, about 1.0 GiB are needed"),
        ({"free_disk": 0}, "0.0 GiB of disk space for the run folder are free, about 1.0 GiB are needed"),
        ({"free_shm": 0}, "room in /dev/shm are free, about 1.0 GiB are needed — remount it larger"),
        ({"missing": ("/models/mine",)}, "there is no /models/mine, which its workers read — copy it there"),
    ],
)
def test_what_makes_a_host_unfit_is_said_with_the_cure(changed, message):
    found = complaints(**changed)
    assert len(found) == 1
    assert message in found[0]


def test_workers_that_ask_for_a_gpu_need_one():
    need = replace(NEED, gpus=2)
    (problem,) = judge(HOSTS[0], FACTS, EXPECTED, need, "/runs/x")
    assert "it has no GPU that nvidia-smi shows, and 2 worker(s) placed there have device: cuda — pin" in str(problem)
    assert judge(HOSTS[0], replace(FACTS, gpus=("H100",)), EXPECTED, need, "/runs/x") == []


def test_everything_wrong_with_a_host_is_said_at_once():
    assert len(complaints(digest="def", free_memory=0, missing=("/models/mine",))) == 3


def test_a_resumed_run_finds_its_folder_there_and_plug_ins_may_be_missing():
    assert complaints(replace(EXPECTED, resume=True), taken=True) == []
    assert complaints(optional=("/own/step.py",), missing=("/own/step.py",)) == []


def test_clocks_may_differ_a_little():
    assert [str(p) for p in clock_problems(dict(enumerate(HOSTS)), {0: 0.0, 1: 5.1, 2: -4.9})] == [
        "hosts:2: b — its clock is off by +5.1 s; at most 5 s are allowed — set the clocks by NTP on all hosts"
    ]
    said = [list(notes(HOSTS[0], replace(FACTS, clock_offset=off))) for off in (0.4, -0.6, 6.0)]
    assert [len(lines) for lines in said] == [0, 1, 0]
    assert "a: its clock is off by -0.6 s" in said[1][0]


def test_links_that_do_not_work_are_shown_as_a_matrix():
    addresses = {0: "10.0.0.1", 1: "10.0.0.2", 2: "10.0.0.3"}
    assert link_problems(dict(enumerate(HOSTS)), addresses, {}) == []
    (problem,) = link_problems(dict(enumerate(HOSTS)), addresses, {(1, 2): "Connection refused", (2, 0): "no answer"})
    lines = str(problem).splitlines()
    assert lines[0] == "hosts: links — some hosts cannot reach each other"
    assert lines[1:3] == [
        "  b cannot reach c at 10.0.0.3: Connection refused",
        "  c cannot reach a at 10.0.0.1: no answer",
    ]
    assert [line.split() for line in lines[3:7]] == [
        ["from\\to", "a", "b", "c"],
        ["a", "-", "ok", "ok"],
        ["b", "ok", "-", "NO"],
        ["c", "NO", "ok", "-"],
    ]
    assert "let the hosts of a run open TCP connections to each other" in lines[-1]


def test_hosts_need_what_their_workers_do(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    plan = plan_recipe("smollm2", [f"models.policy.path={model}", "layout.pools.rollout.count=1"])[1]
    generates, trains = needs(plan)
    assert generates.paths == trains.paths == (str(model),)
    assert generates.memory == trains.memory == PROCESS, "nothing is known of a model that is not here"
    plan = plan_recipe("quickstart", ["layout.pools.rollout.count=1"])[1]
    generates, trains = needs(plan)
    weights = model_size(plan.recipe.models["policy"]).weights
    assert generates.memory == PROCESS + 2 * weights, "the engine's, and those that it has fetched"
    samples = trains.memory - PROCESS - 4 * weights
    assert 0 < samples < 256 << 20, "beside gradients and two moments"
    beside = (generates.memory_beside_gpus, trains.memory_beside_gpus)
    assert beside == (PROCESS + 2 * weights, PROCESS + max(weights, samples)), "what is loaded passes through the host"
    assert (generates.shm, trains.shm) == (0, 4 * weights), "and the version that others are reading"
    run = plan.recipe.run
    dumps = run.training_steps * 32 * group_bytes(8, plan.recipe.data.max_prompt_tokens, 4)
    assert trains.disk - generates.disk == 3 * 3 * weights + dumps, "two checkpoints, and one that is being written"
    less = ["run.dump_limit_mb=1", "run.hf_every=90", "models.policy.dtype=bfloat16", "layout.pools.rollout.count=1"]
    _, trains = needs(plan_recipe("quickstart", less)[1])
    parameters = weights // 4
    assert trains.disk - generates.disk == 3 * 14 * parameters + run.training_steps // 90 * 2 * parameters + (1 << 20)


def test_moments_that_stay_in_the_hosts_memory_are_needed_beside_gpus():
    pool = "layout.pools.trainer"
    offloads = [f"{pool}.backend=deepspeed", f"{pool}.backend_options={{offload_optimizer: true}}"]
    one = ["layout.pools.rollout.count=1", "models.policy.dtype=float32"]
    plain, offloading = (needs(plan_recipe("quickstart", [*one, *more])[1])[1] for more in (offloads[:1], offloads))
    assert offloading.memory == plain.memory, "on a CPU it is all the same memory"
    weights = model_size(plan_recipe("quickstart", one)[1].recipe.models["policy"]).weights
    assert offloading.memory_beside_gpus - plain.memory_beside_gpus == 3 * weights


def needs(plan):
    """Of a host that generates, and of one that trains."""
    placing = place_workers(plan, parse_hosts("generates\ntrains", "hosts"))
    return [needs_of(plan, placing, number) for number in range(2)]
