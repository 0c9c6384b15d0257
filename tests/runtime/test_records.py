"""Metrics and dumps as files."""

import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.runtime.disk import Disk
from distflow.runtime.dumps import DumpWriter, dumped
from distflow.runtime.metrics import MetricStore, MetricWriter
from distflow.types import WorkerName


def test_means_carry_their_weight_and_sums_extremes_and_values_do_not() -> None:
    store = MetricStore()
    store.mean("a/mean", 1.0, weight=3)
    store.mean("a/mean", 5.0)
    store.max("a/max", 2.0)
    store.max("a/max", -1.0)
    store.min("a/min", 2.0)
    store.min("a/min", -1.0)
    store.add("count", 2)
    store.add("count", 3)
    store.set("lr", 0.5)
    store.set("lr", 0.25)
    assert store.drain() == {
        "a/mean": 2.0,
        "a/mean.weight": 4.0,
        "a/max": 2.0,
        "a/min": -1.0,
        "count": 5.0,
        "count.summed": 1.0,
        "lr": 0.25,
    }
    assert store.drain() == {}


def test_a_mean_without_weight_is_zero_and_not_an_error() -> None:
    store = MetricStore()
    store.mean("a", 3.0, weight=0)
    assert store.drain() == {"a": 0.0, "a.weight": 0.0}


def test_time_is_added_up_also_when_the_body_raises() -> None:
    store = MetricStore()
    with store.timed("t"):
        pass
    with pytest.raises(OSError), store.timed("t"):
        raise OSError
    assert store.drain()["t"] >= 0


def test_several_threads_lose_nothing() -> None:
    store = MetricStore()

    def work() -> None:
        for _ in range(2000):
            store.add("n", 1)
            store.mean("m", 2.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.drain() == {"n": 8000, "m": 2.0, "m.weight": 8000, "n.summed": 1.0}


def test_lines_are_flat_json_appended_at_once(tmp_path: Path) -> None:
    writer = MetricWriter(tmp_path, "rollout-1", Disk())
    writer.write(3, 1, {"b": math.nan, "a": 1.5, "c": math.inf})
    path = tmp_path / "metrics" / "rollout-1.jsonl"
    assert json.loads(path.read_text()) == {"step": 3, "term": 1, "a": 1.5, "b": None, "c": None}
    writer.close()
    again = MetricWriter(tmp_path, "rollout-1", Disk())
    again.write(4, 2, {})
    again.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [3, 4]


def samples(rows: int = 2, **columns: Any) -> Batch:
    return Batch(
        {
            "uid": torch.tensor([[0, 7, 5]] * rows),
            "sample": torch.arange(rows),
            "prompt_text": Ragged.from_texts(["4+5 = ü"] * rows),
            "response_text": Ragged.from_texts([str(row) * row for row in range(rows)]),
            "response_ids": Ragged.from_rows([[3] * row for row in range(rows)], torch.int64),
            "policy_versions": Ragged(torch.tensor([[0, 2, 0, 1]] * rows), torch.arange(rows + 1)),
            "finish_reason": torch.arange(rows) % 3,
            **columns,
        }
    )


def test_a_dump_has_one_line_a_sample_in_the_order_trained(tmp_path: Path) -> None:
    writer = DumpWriter(tmp_path, WorkerName.parse("trainer/0"), Disk(), 1 << 30)
    more = {"reward": torch.tensor([0.1, 1.0]), "rewards/style": torch.tensor([math.nan, 0.3333333])}
    writer.write(17, 2, [(samples(1), ["rollout/0"]), (samples(2, **more), ["rollout/1", "rollout/0"])])
    writer.close()
    path = tmp_path / "rollouts" / "step_000017" / "trainer-0.jsonl"
    first, _, last = [
        json.loads(line, parse_constant=pytest.fail) for line in path.read_text(encoding="utf-8").splitlines()
    ]
    assert "reward" not in first
    assert last == {
        "uid": [0, 7, 5],
        "sample": 1,
        "step": 17,
        "term": 2,
        "prompt": "4+5 = ü",
        "response": "1",
        "response_ids": [3],
        "policy_versions": [[0, 2, 0, 1]],
        "finish_reason": "length",
        "reward": 1.0,
        "rewards": {"style": 0.333333},
        "worker": "rollout/0",
    }


def test_a_dump_has_a_line_for_each_sequence_of_a_sample_with_its_own_prompt(tmp_path: Path) -> None:
    more = {"sequence": torch.tensor([0, 1]), "sequence_prompt": Ragged.from_texts(["", "so far 4"])}
    whole = samples(2, **more, sample=torch.zeros(2, dtype=torch.int64))
    writer = DumpWriter(tmp_path, WorkerName.parse("trainer/0"), Disk(), 1 << 30)
    writer.write(1, 0, [(dumped(whole, ()), ["rollout/0"] * 2)])
    writer.close()
    path = tmp_path / "rollouts" / "step_000001" / "trainer-0.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [(line["sample"], line["sequence"], line["prompt"], line["response"]) for line in lines]
    assert found == [(0, 0, "4+5 = ü", ""), (0, 1, "so far 4", "1")]


def test_fields_of_the_users_are_dumped_whatever_their_shape(tmp_path: Path) -> None:
    whole = samples(
        2,
        **{
            "advantage": Ragged(torch.tensor([0.1, math.nan, -2.0]), torch.tensor([0, 2, 3])),
            "mine/pair": torch.tensor([[1, 2], [3, 4]]),
            "mine/note": Ragged.from_texts(["odd", ""]),
            "mine/size": torch.tensor([1 / 3, math.inf]),
            "rollout_logprobs": torch.zeros(2),
        },
    )
    writer = DumpWriter(tmp_path, WorkerName.parse("trainer/0"), Disk(), 1 << 30)
    writer.write(1, 0, [(dumped(whole, ("advantage", "mine/*")), ["rollout/0"] * 2)])
    writer.close()
    path = tmp_path / "rollouts" / "step_000001" / "trainer-0.jsonl"
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text(encoding="utf-8").splitlines()]
    own = [{name: line[name] for name in line if name.startswith(("advantage", "mine/"))} for line in lines]
    assert own == [
        {"advantage": [0.1, None], "mine/pair": [1, 2], "mine/note": "odd", "mine/size": 0.333333},
        {"advantage": [-2.0], "mine/pair": [3, 4], "mine/note": "", "mine/size": None},
    ]
    assert "rollout_logprobs" not in lines[0]


def test_a_step_written_again_replaces_the_former_one(tmp_path: Path) -> None:
    """After a resume the training step is done once more; its samples must not stand there twice."""
    for term in (0, 1):
        writer = DumpWriter(tmp_path, WorkerName.parse("trainer/0"), Disk(), 1 << 30)
        writer.write(1, term, [(samples(2), ["rollout/0"] * 2)])
        writer.close()
    lines = (tmp_path / "rollouts" / "step_000001" / "trainer-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["term"] for line in lines] == [1, 1]


def test_dumps_stay_within_their_limit_and_the_oldest_go_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    other = tmp_path / "rollouts" / "step_000001" / "trainer-1.jsonl"
    other.parent.mkdir(parents=True)
    other.write_text("of another worker")
    for steps in (range(1, 30), range(30, 60)):  # in two lives
        writer = DumpWriter(tmp_path, WorkerName.parse("trainer/0"), Disk(), 4096)
        for step in steps:
            writer.write(step, 0, [(samples(), ["rollout/0"] * 2)])
        writer.close()
    found = sorted(tmp_path.glob("rollouts/*/trainer-0.jsonl"))
    assert 2048 < sum(path.stat().st_size for path in found) <= 4096
    assert [int(path.parent.name[5:]) for path in found] == list(range(60 - len(found), 60))
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        "step_000001",
        *(path.parent.name for path in found),
    ]
    assert other.exists()
    assert "dumps have reached run.dump_limit_mb" in caplog.text


def test_dumps_that_the_disk_refuses_are_kept_until_there_is_room(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    writer = DumpWriter(tmp_path, WorkerName.parse("trainer/0"), Disk(), 1 << 30)
    writer.write(1, 0, [(samples(), ["rollout/0"] * 2)])
    with pytest.raises(OSError, match="rollouts"):
        writer.flush()
    writer.write(2, 0, [(samples(), ["rollout/0"] * 2)])
    with pytest.raises(OSError, match="rollouts"):
        writer.flush()
    (tmp_path / "rollouts").unlink()
    writer.flush()
    writer.close()
    assert sorted(path.parent.name for path in tmp_path.glob("rollouts/*/*")) == ["step_000001", "step_000002"]


def test_a_line_of_metrics_without_room_is_lost_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = MetricWriter(tmp_path, "trainer-0", Disk())
    writer.write(1, 0, {"x": 1.0})
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:5]))
    writer.write(2, 0, {"x": 2.0})
    monkeypatch.setattr(os, "write", write)
    writer.write(3, 0, {"x": 3.0})
    writer.close()
    lines = (tmp_path / "metrics/trainer-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3]
