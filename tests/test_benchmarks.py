"""Benchmarks still run, at a tiny size: what they stand in for may have changed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import yaml

import benchmarks.__main__ as benchmarks
from benchmarks import agents, control_path, emulated, house, on_gpu
from benchmarks.parts import gpu as gpu_parts
from benchmarks.parts import other_systems
from benchmarks.parts.team import MemberFailed, Team
from benchmarks.parts.turns import take_turns
from distflow.errors import UserError
from distflow.exchange.length_ranker import LengthRanker, recall
from distflow.sim.emulation import DrawnLengths, EmulatedEngineOptions
from tests.hosts.bridged import bits_per_second, why_no_hosts

RESULTS = Path(benchmarks.__file__).with_name("RESULTS.md")


def test_the_program_lists_all_and_tells_a_mistyped_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks.main(["--list"]) == 0
    listed = capsys.readouterr().out
    for name in benchmarks.names():
        assert importlib.util.find_spec(f"benchmarks.{name}") is not None
        assert re.search(rf"^{name} +[A-Z]", listed, re.M), name
    assert benchmarks.main(["wieghts"]) == 2
    assert "did you mean 'weights'?" in capsys.readouterr().err


def test_each_command_of_the_results_names_a_benchmark() -> None:
    text = RESULTS.read_text()
    named = set(re.findall(r"-m benchmarks (\w+)", text))
    assert named <= set(benchmarks.names())
    assert len(named) > 20
    assert len(text.splitlines()) <= 400, "one current table a quantity; git has the others"


def test_the_agents_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["agents", "--hosts", "2", "--rounds", "1"])
    agents.main()
    assert capsys.readouterr().out.startswith("16 workers on 2 hosts: quiet ")


def test_every_part_of_the_gpu_script_is_rehearsed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "on_gpu", "--rehearse", "-o", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(said) == {*on_gpu.FIRST, *on_gpu.REST}
    assert len(said) <= 8, "so many files come back"
    assert {one["device"] for one in said.values()} == {"cpu"}
    found = {name: one["found"] for name, one in said.items()}
    assert {step["samples"] for step in found["decode"]["measured"]["decode"]} == {1, 2}
    kinds = [(row["packed"], row["recomputed"], row["entropy"]) for row in found["update"]["rows"]]
    assert sorted(kinds) == sorted(product((False, True), repeat=3))
    assert all(row["tokens_s"] > 0 and row["planned_gib"] > 0 for row in found["update"]["rows"])
    assert [line["step"] for line in found["run"]["steps"]] == [1]
    assert found["copies"]["equal"]
    assert found["lora"]["seconds"] > 0
    assert found["out_of_memory"]["small_again"] == "computed"
    assert found["tests"]["counts"]["chosen"] > 0


def test_a_part_of_the_gpu_script_that_fails_or_hangs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(setting: gpu_parts.Setting) -> None:
        raise RuntimeError(f"no card in {setting.device}")

    monkeypatch.setattr(gpu_parts, "copies", broken)
    monkeypatch.setattr(gpu_parts, "lora", lambda setting: time.sleep(60))
    monkeypatch.setattr(gpu_parts, "decode", lambda setting: os._exit(3))
    for name, limit_s, why in (
        ("copies", 30, "RuntimeError: no card in cpu"),
        ("lora", 0.2, "not done within 0.2 s"),
        ("decode", 30, "exit 3"),
    ):
        assert not on_gpu.run_part(name, limit_s, tmp_path, rehearse=True)
        assert json.loads((tmp_path / f"{name}.json").read_text())["error"] == why


def test_the_wheels_for_a_gpu_are_all_that_its_image_lacks_and_may_travel(tmp_path: Path) -> None:
    project = tomllib.loads((on_gpu.WHEELS.parents[1] / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=\[]", one)[0] for one in project["dependencies"]}
    of_the_image = {"torch", "transformers", "safetensors", "numpy", "packaging", "fsspec"}
    named = {one.partition("==")[0] for one in on_gpu.wheels()}
    assert needed - of_the_image <= named
    assert not named & of_the_image
    assert 10 << 20 < sum(on_gpu.wheels().values()) <= on_gpu.MOST_BYTES
    (tmp_path / "one.whl").write_bytes(bytes(100))
    assert on_gpu.check_size(tmp_path) == 0
    os.truncate(tmp_path / "one.whl", (64 << 20) + 1)
    assert on_gpu.check_size(tmp_path) == 1


def test_the_size_of_the_house() -> None:
    """Limits of what a reader has to find his way through; figures in benchmarks/RESULTS.md."""
    known = house.modules()
    rooms = [name for name in known if name.startswith(("distflow.launch", "distflow.runtime"))]
    assert len(rooms) <= 110
    assert max(len(path.read_text().splitlines()) for path in known.values()) <= 600


def test_long_prompts_of_the_schedules_are_long_in_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what is learned in a pass misleads the next one: a recall of 0.08, where 0.2 is chance."""
    asked: list[dict[str, Any]] = []

    def run(_steps: int, *overrides: str) -> list[dict[str, float]]:
        asked.append({key: yaml.safe_load(value) for key, _, value in (one.partition("=") for one in overrides)})
        return [{"timing_s/step": 1.0}]

    monkeypatch.setattr(emulated, "run", run)
    emulated.schedules(1, 5)
    assert {one["layout.schedule"] for one in asked} == {"fifo", "longest_first", "skew_aware"}
    options, samples = asked[0]["layout.pools.rollout.engine_options"], asked[0]["batch"]["samples_per_prompt"]
    prompts, groups = 10 ** asked[0]["data"]["with"]["digits"], asked[0]["batch"]["prompts"]
    lengths, ranker, found = DrawnLengths(EmulatedEngineOptions.parse(options)), LengthRanker(), []
    for step in range(8):
        seen = []
        for position in range(step * groups, (step + 1) * groups):
            drawn = lengths.draw(0, [position] * samples, range(samples), [emulated.NEW_TOKENS] * samples)
            prompt = position % prompts
            seen.append((prompt, (prompt // 10, prompt % 10, 10), sum(drawn) / samples))
        found.append(recall([ranker.predict(prompt, ids) for prompt, ids, _ in seen], [mean for _, _, mean in seen]))
        for prompt, ids, mean in seen:
            ranker.learn(prompt, ids, mean)
    assert sum(found[4:]) / 4 > 0.4


@pytest.fixture
def bench(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Runs one benchmark at a tiny size, without other systems, and returns what it prints."""
    monkeypatch.setattr(other_systems, "USUAL", tmp_path / "bin" / "python")

    def run(*arguments: str) -> dict[str, Any]:
        assert benchmarks.main([*arguments, "--json", "--repetitions", "1"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def test_the_step_reaches_its_trainers(bench: Callable[..., dict[str, Any]]) -> None:
    found = bench("step", "--workers", "4", "--samples", "64", "--tokens", "8")
    assert found["seconds"] > 0.0
    assert 1 / 4 <= found["busiest_share"] <= 1 / 2
    assert "make peers-venv" in found["left_out"]["verl"]


def test_rows_are_exchanged_in_turn_with_what_memory_does(bench: Callable[..., dict[str, Any]]) -> None:
    found = bench("rows", "exchange", "--rows", "80", "--row-bytes", "65536")
    for name in ("put_gb_s", "get_ms", "touch_gb_s", "cpu_s_per_gb", "shm_copy_gb_s", "lane_of_plain_zmq"):
        assert found[name] > 0.0, name
    assert list(found["left_out"]) == ["transferqueue"]


def test_a_row_is_seen_by_who_waits_for_it(bench: Callable[..., dict[str, Any]]) -> None:
    found = bench("rows", "latency", "--count", "5", "--row-bytes", "64")
    assert 0.0 < found["visible_p50_ms"] <= found["visible_p99_ms"]
    assert found["cycles_per_s"] > 0.0
    assert found["zmq_rtt_ms"] > 0.0


def test_weights_reach_readers_here_and_afar(bench: Callable[..., dict[str, Any]]) -> None:
    found = bench("weights", "--megabytes", "4")
    for name in (
        "shm_memcpy_ratio",
        "publish_stall_ratio",
        "first_memcpy_ratio",
        "shm_cpu_s_per_gb",
        "swarm_gb_s",
        "encrypted_gb_s",
        "raw_tcp_gb_s",
        "cpu_s_per_gb",
        "collective_gb_s",
        "collective_of_raw_tcp",
    ):
        assert found[name] > 0.0, name
    assert found["collective_uplink_ratio"] == pytest.approx(1.0, abs=0.01)
    for hosts in (1, 4, 12):
        assert 1.0 <= found[f"uplink_ratio_{hosts}"] < hosts + 0.5, "not to each host by itself"


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from taking_turns import serve
print("not an answer")
if "--dies" in sys.argv:
    raise SystemExit("no such package")
serve({{"quick": lambda: {{"seconds": 0.5}}, "dead": lambda: sys.exit("it is dead")}}, {{"other": "not here"}})
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "peer.py").write_text(SCRIPT.format(folder=str(other_systems.SCRIPTS)))
    monkeypatch.setattr(other_systems, "SCRIPTS", tmp_path)
    return "peer"


def test_another_system_takes_turns_and_says_who_is_left_out(script: str) -> None:
    with other_systems.OtherSystems(script, sys.executable, ["quick", "dead", "other"], {}) as others:
        assert others.left_out == {"other": "not here"}
        found = take_turns({"quick": others.turns["quick"]}, 3)
        assert found["quick"].median("seconds") == 0.5
        assert len(found["quick"].turns) == 3
        with pytest.raises(other_systems.OtherSystemFailed, match=r"peer.py ended: .*it is dead"):
            others.turns["dead"]()


def test_the_python_of_other_systems_may_be_a_relative_path(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    with other_systems.OtherSystems(script, "peers/python", ["quick"], {}) as others:
        assert others.turns["quick"]() == {"seconds": 0.5}


def test_a_system_that_is_not_installed_is_left_out_with_the_reason(script: str) -> None:
    with other_systems.OtherSystems(script, sys.executable, ["quick"], {"dies": 1}) as others:
        assert others.turns == {}
        assert others.left_out["quick"].endswith("no such package")


def test_a_member_of_a_team_that_ends_is_told() -> None:
    with Team("benchmarks.parts.team") as team:
        team.start("one", _end, None)
        with pytest.raises(MemberFailed, match="one ended"):
            team.answers(["one"])


def _end(name: str, pipe: Connection, setting: object) -> None:
    """A member that has nothing to say."""


def test_the_step_over_slow_links(bench: Callable[..., dict[str, Any]]) -> None:
    if (why := why_no_hosts(["tc"])) is not None:
        pytest.skip(why)
    found = bench("step", "--links", "200mbit", "--workers", "4", "--samples", "64", "--tokens", "64")
    assert 0.0 < found["link_share"] <= 1.0


@pytest.mark.parametrize("rate", ["fast", "200", "mbit", "1.2.3gbit"])
def test_a_rate_that_tc_would_not_take(rate: str) -> None:
    with pytest.raises(UserError, match="expected a number and kbit, mbit, gbit"):
        bits_per_second(rate)
    assert bits_per_second("200mbit") == 2e8


def test_the_control_path_can_be_measured() -> None:
    found = control_path.once(groups=40, tokens=8, gap_ms=1.0)
    assert min(found[f"{side}_{what}_us"] for side in ("owner", "holder") for what in ("threads", "process")) > 0.0
