"""The memory of hosts: how much they have, what their workers take together, and who tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distflow.flow.estimate import LIBRARY_BYTES
from distflow.flow.memory_fit import Capacity, counted_twice, host_sum, memory_lines, placed
from distflow.flow.sizes import model_size
from distflow.launch.cli import run
from tests.flow.test_estimate import GIB, LARGE, planned


def test_hosts_may_say_how_much_memory_their_gpus_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 slots=2 gpu_gib=9.5\n")
    words = ["plan", "quickstart", LARGE, "models.policy.dtype=bfloat16", "layout=colocated", "--hosts"]
    assert run([*words, str(tmp_path / "hosts")]) == 0
    assert "cuda:0 of 127.0.0.1 has 9.50 GiB" in capsys.readouterr().out
    (tmp_path / "hosts").write_text("127.0.0.1 slots=2 gpu_gib=much\n")
    assert run([*words, str(tmp_path / "hosts")]) == 2
    assert "gpu_gib=much is not the memory of a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "hosts, told",
    [
        ("a slots=2 gpu_gib=9.5", "cuda:0 … cuda:1 of a have 9.50 GiB, and worker/0 … worker/1 may need"),
        (
            "a slots=1 gpu_gib=4\nb slots=1 gpu_gib=4",
            "cuda:0 of each of a, b have 4.00 GiB, and worker/0 … worker/1 may",
        ),
        ("a slots=1 gpu_gib=200\nb slots=1 gpu_gib=4", "cuda:0 of b has 4.00 GiB, and worker/1 may need"),
        ("a slots=2 gpu_gib=200\nb slots=2 gpu_gib=4\nc gpu_gib=3", "cuda:0 of b has 4.00 GiB, and worker/1 may need"),
        ("a:2", ""),
    ],
)
def test_all_who_judge_the_memory_of_hosts_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hosts: str, told: str
) -> None:
    (tmp_path / "hosts").write_text(hosts)
    for words in (["validate"], ["plan"], ["launch", "--dry-run", "--runs-dir", str(tmp_path)]):
        given = ["quickstart", LARGE, "models.policy.dtype=bfloat16", "layout=colocated", "layout.pools.worker.count=2"]
        assert run([*words, *given, "--hosts", str(tmp_path / "hosts")]) == 0
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        found = [line for line in lines if line.startswith("warning: cuda:")]
        assert len(found) == bool(told), words
        assert all(line.startswith(f"warning: {told}") for line in found), words
    assert run(["plan", *given, "--hosts", str(tmp_path / "hosts"), "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert [f"warning: {text}" for text in memory["warnings"] if text.startswith("cuda:")] == found
    assert [one["of"] for one in memory["workers"]] == ["a", "b" if "\nb" in hosts else "a"]


@pytest.mark.parametrize(
    ("engine", "share"), [("vllm", "gpu_memory_utilization"), ("sglang", "memory_fraction")], ids=["vllm", "sglang"]
)
def test_all_who_judge_an_engine_without_room_for_a_sample_refuse_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, share: str
) -> None:
    (tmp_path / "hosts").write_text("a slots=2 gpu_gib=80\n")
    hosts = ["--hosts", str(tmp_path / "hosts")]
    key = f"layout.pools.rollout.engine_options.{share}"
    given = ["quickstart", LARGE, "models.policy.dtype=bfloat16", f"layout.pools.rollout.engine={engine}"]
    given += ["layout.pools.rollout.count=1", "layout.pools.rollout.device=cuda", "layout.pools.trainer.device=cuda"]
    words = [*given, f"+{key}=0.01"]
    refused = []
    for command in (["validate"], ["launch", "--dry-run", "--runs-dir", str(tmp_path)]):
        assert run([*command, *words, *hosts]) == 2, command
        refused.append([line for line in capsys.readouterr().err.splitlines() if "no room" in line])
    assert refused[0] == refused[1]
    (line,) = refused[0]
    assert line.startswith(f"command line: {key} — an engine of rollout has no room for a single sample of ")
    assert "there is room for 0 tokens in its share of 0.01 — " in line
    least = line.rpartition("=")[2].removesuffix(" or more")
    assert line.endswith(f"{key}={least} or more")
    # It is the least with which it runs.
    for tried, code in ((float(least), 0), (float(least) - 0.01, 2)):
        assert run(["validate", *given, f"+{key}={tried:g}", *hosts]) == code, tried
    capsys.readouterr()
    assert run(["plan", *words, *hosts]) == 0
    out = capsys.readouterr().out
    assert "warning: an engine of rollout has no room" in out
    assert "rollout/0: fits" not in out
    assert "trainer/0: fits 80 GB" in out
    # Of a job it is not known what its GPUs have: it is told.
    assert run(["launch", *words, "--slurm", "nodes=2", "--dry-run", "--runs-dir", str(tmp_path)]) == 0
    assert "note: an engine of rollout has no room for a single sample" in capsys.readouterr().err


def test_each_host_is_told_what_its_workers_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=2\nc slots=4\n")
    words = ["plan", "quickstart", "layout.pools.rollout.count=2", "layout.pools.trainer.hosts=[a]"]
    words += ["layout.pools.rollout.hosts=[b]"]
    assert run([*words, "--json", "--hosts", str(tmp_path / "hosts")]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    rollout, _, trainer = memory["workers"]
    assert [one["of"] for one in memory["workers"]] == ["b", "b", "a"]
    assert run([*words, "--hosts", str(tmp_path / "hosts")]) == 0
    found = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("all on")]
    shared = rollout["shared"]
    takes = {"a": trainer["host"] + shared, "b": 2 * rollout["host"] + shared - LIBRARY_BYTES}
    assert [line.partition(" of its")[0] for line in found] == [
        f"all on {name}: {size / GIB:.2f} GiB" for name, size in takes.items()
    ]


def test_what_workers_share_counts_once_in_the_sum_of_a_host() -> None:
    plan = planned("layout.pools.rollout.count=3")
    found = placed(plan, Capacity())
    published = 3 * model_size(plan.recipe.models["policy"]).published
    needed, shared = host_sum(plan, found)
    assert shared == published
    assert needed == sum(one.host_bytes for one in found) + published - counted_twice(plan.workers)
    lines = memory_lines(plan, Capacity())
    (told,) = [line for line in lines if line.startswith("all on one host")]
    assert f"{needed / GIB:.2f} GiB of its memory, of which {published / GIB:.2f} are published weights" in told
    (row,) = [line for line in lines if line.startswith("trainer/0")]
    assert row.split()[-1] == f"{found[-1].host_bytes / GIB:.2f}", "without what is shared"
