"""What is known of this host: its memory, its GPUs, its Pythons; and that a bare Python can tell it."""

from __future__ import annotations

import json
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distflow.flow.memory_fit import GIB
from distflow.flow.recipe_check import plan_recipe
from distflow.launch.agent import host_facts
from distflow.launch.agent.host_facts import ask_python, gpus, memory
from distflow.launch.deploy.host_checks import Needs, capacity, facts_here, slow_here, space_problems
from distflow.launch.deploy.placement import needs_here


def test_memory_of_this_host_and_its_gpus() -> None:
    found = capacity()
    assert found.host is not None
    assert found.host > GIB / 2
    # PyTorch may have been built without support for GPUs that are there.
    assert len(found.gpus) >= torch.cuda.device_count()
    assert all(size > GIB for size in found.gpus)


def test_what_this_host_is_like(tmp_path: Path) -> None:
    found = facts_here(tmp_path / "not" / "yet", Needs(packages=("torch", "no-such"), paths=("/", "/no/such")))
    assert found.code.python.version == sys.version_info[:3]
    assert found.code.python.packages == {"torch": torch.__version__, "no-such": None}
    assert 0 < found.memory.free <= found.memory.total
    assert 0 < found.disk.free <= found.disk.total
    assert (found.unwritable, found.taken, found.missing) == (None, False, ("/no/such",))


def test_what_the_checkpoints_of_a_run_take_here(tmp_path: Path) -> None:
    assert facts_here(tmp_path, Needs()).checkpoints == 0
    for step, size in ((2, 1000), (4, 10)):
        folder = tmp_path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(bytes(size))
    assert facts_here(tmp_path, Needs()).checkpoints == 1010


def test_a_processor_without_bfloat16_is_told() -> None:
    """On a CPU alone: what is computed on GPUs is no affair of this processor's."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    slow = not flags & {"avx512_bf16", "amx_bf16"}

    def told(*overrides: str) -> list[str]:
        return [*slow_here(plan_recipe("quickstart", ["layout.pools.trainer.device=cpu", *overrides])[1])]

    assert told() == []
    assert bool(told("models.policy.dtype=bfloat16")) == slow
    on_gpus = [f"layout.pools.{pool}.device=cuda" for pool in ("trainer", "rollout")]
    assert told("models.policy.dtype=bfloat16", *on_gpus) == []


def test_a_container_may_have_less_memory_than_the_machine(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable: 800 kB\nHugePages_Total: 0\n")
    assert memory(meminfo, tmp_path) == {"free": 800 << 10, "total": 1000 << 10}
    (tmp_path / "memory.max").write_text("max\n")
    assert memory(meminfo, tmp_path) == {"free": 800 << 10, "total": 1000 << 10}
    (tmp_path / "memory.max").write_text(f"{500 << 10}\n")
    (tmp_path / "memory.current").write_text(f"{450 << 10}\n")
    (tmp_path / "memory.stat").write_text(f"anon {150 << 10}\ninactive_file {300 << 10}\n")
    assert memory(meminfo, tmp_path) == {"free": 350 << 10, "total": 500 << 10}, "cached files can be dropped"


@pytest.mark.parametrize(
    "visible, expected",
    [(None, [80, 0, 40]), ("", []), ("-1", []), ("2,0", [40, 80]), ("0,1,2,3", [80, 0, 40]), ("GPU-9af3", [80])],
)
def test_gpus_are_those_that_a_process_may_use(
    visible: str | None, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA A, B, 80\nNVIDIA GB10, [N/A]\nNVIDIA C, 40'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu["memory"] >> 20 for gpu in gpus()] == expected
    assert [gpu["name"] for gpu in gpus()][:1] == [{80: "NVIDIA A, B", 40: "NVIDIA C"}[size] for size in expected[:1]]
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert gpus() == []


def test_output_of_tools_may_be_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'Driver \\377 warns\\nNVIDIA C\\377, 40\\n'\n")
    tool.chmod(0o755)
    assert gpus() == [{"name": "NVIDIA C\ufffd", "memory": 40 << 20}]
    assert ask_python(str(tool), [], [])["fault"].startswith(
        "not a Python interpreter: expected JSON on its standard output, got 'Driver \ufffd"
    )


def test_a_python_without_any_package_can_describe_its_host(tmp_path: Path) -> None:
    """`-I -S`: neither our package nor what is installed can be imported."""
    asked = {"run_dir": str(tmp_path), "nonce": "", "paths": [], "packages": ["torch"], "modules": [], "pythons": []}
    program = f"{Path(host_facts.__file__).read_text()}\nprint(json.dumps(describe(**json.loads(sys.argv[1]))))"
    command = [sys.executable, "-I", "-S", "-c", program, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    code = json.loads(done.stdout)["code"]
    assert (code["distflow"], code["python"]["packages"]) == (None, {"torch": None})


def test_a_run_that_this_machine_has_no_room_for_is_refused_as_on_hosts(tmp_path: Path) -> None:
    endless = ["run.training_steps=100000000", "run.save_every=1", "run.keep_checkpoints=100000000"]
    (problem,) = space_problems(tmp_path / "runs", needs_here(plan_recipe("quickstart", endless)[1]))
    assert re.search(rf"this machine: disk — {tmp_path}: .* GiB free, about \d+\.\d GiB needed", str(problem))
    assert space_problems(tmp_path / "runs", needs_here(plan_recipe("quickstart", [])[1])) == []


def test_what_a_killed_run_has_left_in_shared_memory_is_told_from_what_is_in_use() -> None:
    name = host_facts.SHM / f"distflow-facts-{os.getpid()}-policy-t0-"
    left, used = Path(f"{name}0"), Path(f"{name}1")
    for path in (left, used):
        path.write_bytes(b"x" * 4096)
    try:
        with used.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            found = host_facts.abandoned()
            assert str(left) in found
            assert str(used) not in found
    finally:
        for path in (left, used):
            path.unlink()
