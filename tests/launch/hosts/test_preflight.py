"""What is refused about a host, with the cure; everything at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distflow.config.plugins import ENGINES
from distflow.flow.estimate import PROCESS
from distflow.flow.memory import group_bytes
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.sizes import model_size
from distflow.launch.agent.host_facts import CodeFacts, Gpu, HostFacts, PythonFacts, Space
from distflow.launch.deploy.host_checks import (
    GIB,
    Needs,
    at_least,
    clock_problems,
    link_problems,
    notes,
    problems_of,
)
from distflow.launch.deploy.hostfile import parse_hosts
from distflow.launch.deploy.placement import disk_for, needs_of, place_workers

HOSTS = parse_hosts("a slots=2\nb slots=2\nc", "hosts")
PACKAGES = {"torch": "2.13.0", "transformers": "5.1", "pyzmq": "27.0"}
HEAD = CodeFacts("/bin/python", PythonFacts((3, 11, 7), PACKAGES), "0.1.0", "abc", "/here/distflow")
NEEDS = Needs(
    memory=at_least(2 * GIB),
    memory_beside_gpus=at_least(GIB),
    disk=at_least(GIB),
    shm=at_least(GIB),
    paths=("/models/mine",),
    head=HEAD,
)
PYTHON = PythonFacts((3, 11, 9), PACKAGES, {"sglang": False})
CODE = replace(HEAD, python=PYTHON, package="/site/distflow")
GPU = Gpu("NVIDIA H200", 141 * GIB)
FACTS = HostFacts(
    run_dir="/runs/x",
    code=CODE,
    pythons=(),
    memory=Space(4 * GIB, 8 * GIB),
    disk=Space(2 * GIB, 8 * GIB),
    shm=Space(2 * GIB, 8 * GIB),
    gpus=(),
    hidden_gpus=0,
    ssh_address=None,
    same_folder=False,
    taken=False,
    unwritable=None,
    missing=(),
)


def complaints(needs=NEEDS, **changed):
    return [str(problem) for problem in problems_of(HOSTS[0], replace(FACTS, **changed), needs)]


def code(**changed):
    return {"code": replace(CODE, **changed)}


def test_a_host_like_the_head_is_fit():
    assert complaints() == []
    assert complaints(same_folder=True, taken=True) == []


@pytest.mark.parametrize(
    "changed, message",
    [
        (code(distflow=None, digest=None), "hosts:1: a — code: distflow is not installed for Python 3.11.9 there — "),
        (code(digest="def"), "code: distflow in /site/distflow has the digest def, here it is abc — install the same"),
        (code(digest="def", distflow="0.2"), "(version 0.2, here 0.1.0)"),
        (
            code(python=replace(PYTHON, version=(3, 12, 1))),
            "python: 3.12.1 there, 3.11.7 here — give a Python of the same",
        ),
        (
            code(python=replace(PYTHON, packages={**PACKAGES, "torch": None})),
            "torch: missing there, 2.13.0 here — install torch==2.13.0 there",
        ),
        ({"unwritable": "read-only"}, "run folder: /runs/x: read-only — give a writable folder: --runs-dir"),
        ({"taken": True}, "/runs/x already exists there, and is not this machine's — choose another name"),
        ({"memory": Space(GIB, 8 * GIB)}, "memory: 1.0 of 8.0 GiB free, about 2.0 GiB needed — use fewer workers"),
        ({"memory": Space(GIB // 2, GIB), "gpus": (GPU,)}, "memory: 0.5 of 1.0 GiB free, about 1.0 GiB needed"),
        (
            {"disk": Space(0, GIB)},
            "disk: /runs/x: 0.0 of 1.0 GiB free, about 1.0 GiB needed — free some space, or give",
        ),
        (
            {"shm": Space(0, GIB)},
            "shared memory: /dev/shm: 0.0 of 1.0 GiB free, about 1.0 GiB needed — make it larger: "
            "mount -o remount,size=2G /dev/shm, or --shm-size=2g for a container",
        ),
        (
            {
                "shm": Space(0, GIB),
                "abandoned": ("/dev/shm/distflow-x-1-policy-t0-0", "/dev/shm/distflow-x-1-policy-t0-1"),
            },
            "shared memory: /dev/shm: 0.0 of 1.0 GiB free, about 1.0 GiB needed — some of it is of runs that no "
            "process here uses: rm /dev/shm/distflow-x-1-policy*; or make it larger: mount -o remount,size=2G "
            "/dev/shm, or --shm-size=2g for a container",
        ),
        (
            {"missing": ("/models/mine",)},
            "/models/mine does not exist, and workers on this host read it — copy it to the same",
        ),
    ],
)
def test_what_makes_a_host_unfit_is_said_with_the_cure(changed, message):
    found = complaints(**changed)
    assert len(found) == 1
    assert message in found[0]


def test_workers_that_ask_for_a_gpu_need_one():
    needs = replace(NEEDS, devices=(("layout.pools.rollout.device", "cuda"), ("layout.pools.x.device", "cuda:1")))
    message = (
        "hosts:1: a — layout.pools.{}.device: {}, but this host has {} available (by nvidia-smi) — set auto or cpu"
    )
    both = [message.format("rollout", "cuda", "0 GPUs"), message.format("x", "cuda:1", "0 GPUs")]
    assert [found.partition(", or")[0] for found in complaints(needs)] == both
    assert [found.partition(", or")[0] for found in complaints(needs, gpus=(GPU,))] == [
        message.format("x", "cuda:1", "1 GPU")
    ]
    assert complaints(needs, gpus=(GPU, GPU)) == []


def test_engines_need_their_library_in_the_python_of_the_host():
    needs = replace(NEEDS, libraries=(("layout.pools.rollout.engine", ENGINES["sglang"]),))
    (found,) = complaints(needs)
    assert "layout.pools.rollout.engine: needs the package 'sglang', which is not installed for /bin/python" in found
    assert "or name a Python that has it: layout.pools.rollout.python=PATH" in found
    assert complaints(needs, **code(python=replace(PYTHON, modules={"sglang": True}))) == []


def test_everything_wrong_with_a_host_is_said_at_once():
    assert len(complaints(**code(digest="def"), memory=Space(0, GIB), missing=("/models/mine",))) == 3


def test_a_resumed_run_finds_its_folder_there_and_plug_ins_may_be_missing():
    assert complaints(replace(NEEDS, resume=True), taken=True) == []
    assert complaints(missing=("/own/step.py",)) == [], "they are sent"


def test_clocks_may_differ_a_little():
    assert [str(p) for p in clock_problems(dict(enumerate(HOSTS)), {0: 0.0, 1: 5.1, 2: -4.9})] == [
        "hosts:2: b — clock is off by +5.1 s; at most 5 s are allowed — synchronise the clocks of all hosts with NTP"
    ]
    said = [list(notes(HOSTS[0], replace(FACTS, clock_offset=off))) for off in (0.4, -0.6, 6.0)]
    assert [len(lines) for lines in said] == [0, 1, 0]
    assert "a: clock is off by -0.6 s" in said[1][0]


def test_a_host_whose_gpus_are_all_hidden_is_noted():
    (said,) = notes(HOSTS[0], replace(FACTS, hidden_gpus=8))
    assert said == "a: CUDA_VISIBLE_DEVICES hides all of its 8 GPUs, so workers run on the CPU"
    assert list(notes(HOSTS[0], replace(FACTS, gpus=(GPU,), hidden_gpus=7))) == []


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
    plan = plan_recipe("reasoning", [f"models.policy.path={model}", "layout.pools.rollout.count=1"])[1]
    generates, trains = needs(plan)
    assert generates.paths == trains.paths == (str(model),)
    assert generates.memory == trains.memory == at_least(PROCESS), "nothing is known of a model that is not here"
    plan = plan_recipe("quickstart", ["layout.pools.rollout.count=1"])[1]
    generates, trains = needs(plan)
    weights = model_size(plan.recipe.models["policy"]).weights
    deltas = weights // 2
    assert generates.memory.fail == PROCESS + 3 * weights + deltas, "the engine's, and two versions that it has fetched"
    samples = trains.memory.fail - PROCESS - 4 * weights - 4 * weights - deltas
    assert 0 < samples < 256 << 20, "beside gradients and two moments"
    beside = (generates.memory_beside_gpus.fail, trains.memory_beside_gpus.fail)
    kept = PROCESS + deltas
    assert beside == (kept + 3 * weights, kept + 4 * weights + max(weights, samples)), (
        "what is loaded passes through the host, and published versions stay there"
    )
    assert (generates.shm.fail, trains.shm.fail) == (2 * weights, 4 * weights), (
        "and the version that others are reading"
    )
    run = plan.recipe.run
    dumps = run.training_steps * 32 * group_bytes(8, plan.recipe.data.max_prompt_tokens, 4)
    assert trains.disk.fail - generates.disk.fail == 3 * 3 * weights + dumps, (
        "two checkpoints, and one that is being written"
    )
    less = ["run.dump_limit_mb=1", "run.hf_every=90", "models.policy.dtype=bfloat16", "layout.pools.rollout.count=1"]
    _, trains = needs(plan_recipe("quickstart", less)[1])
    parameters = weights // 4
    assert trains.disk.fail - generates.disk.fail == 3 * 14 * parameters + run.training_steps // 90 * 2 * parameters + (
        1 << 20
    )


def test_a_host_with_a_folder_of_its_own_needs_room_for_its_own_share():
    hosts = parse_hosts("a\nb\nc\nd", "hosts")
    plan = plan_recipe("quickstart", ["layout.pools.rollout.count=2", "layout.pools.trainer.count=2"])[1]
    placement = place_workers(plan, hosts)
    trains = [host for host in range(4) if set(placement.on(host)) & set(plan.owners)]
    assert trains == [2, 3]
    whole = 3 * model_size(plan.recipe.models["policy"]).weights

    def saved(host: int, together: set[int], held: int = 0, *, resume: bool = False) -> int:
        more = disk_for(plan, placement, host, frozenset(together), held, resume=resume).fail
        return more - disk_for(plan, placement, host, frozenset(together), 1 << 60).fail

    assert [saved(host, {0, 1, 2, 3}) for host in range(4)] == [0, 0, 3 * whole, 3 * whole], "one folder for all"
    assert [saved(host, {host}) for host in range(4)] == [whole, 0, 3 * whole // 2, 3 * whole // 2]
    assert saved(2, {2}, resume=True) == 2 * whole, "it gets the rest of one before the run begins"
    assert saved(2, {2}, whole, resume=True) == whole, "what is there already takes no more room"
    assert saved(2, {0, 2}) == 3 * whole // 2 + whole // 2


def test_moments_that_stay_in_the_hosts_memory_are_needed_beside_gpus():
    pool = "layout.pools.trainer"
    offloads = [f"{pool}.backend=deepspeed", f"{pool}.backend_options={{offload_optimizer: true}}"]
    one = ["layout.pools.rollout.count=1", "models.policy.dtype=float32"]
    plain, offloading = (needs(plan_recipe("quickstart", [*one, *more])[1])[1] for more in (offloads[:1], offloads))
    assert offloading.memory == plain.memory, "on a CPU it is all the same memory"
    weights = model_size(plan_recipe("quickstart", one)[1].recipe.models["policy"]).weights
    assert offloading.memory_beside_gpus.fail - plain.memory_beside_gpus.fail == 3 * weights


def needs(plan):
    """Of a host that generates, and of one that trains."""
    placement = place_workers(plan, parse_hosts("generates\ntrains", "hosts"))
    return [needs_of(plan, placement, number) for number in range(2)]
