"""When checkpoints are begun, agreed on and given up: replicas as threads, with disks that are slow or full."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distflow.comm.fact_exchange import Fact
from distflow.config.schema import RunConfig
from distflow.errors import UserError, WorkerFailed
from distflow.runtime.checkpoint.commit import Keeping, drafts
from distflow.runtime.checkpoint.format import Shard, share_of
from distflow.runtime.checkpoint.parts import CheckpointReader, CheckpointWriter, ModelFolders
from distflow.runtime.checkpoint.policy import PUT_OFF, STALL, WRITE, Saving, SavingParts
from distflow.runtime.metrics import MetricStore
from distflow.runtime.waits import WaitBoard
from distflow.types import Version

WAIT_S = 10.0


class Meeting:
    """Where replicas that are threads of this process agree."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.facts: list[Fact] = [{}] * size
        self._barrier = threading.Barrier(size, timeout=WAIT_S)

    def replica(self, rank: int) -> Any:
        def agree(what: str, fact: Fact) -> list[Fact]:
            self.facts[rank] = {"what": what, **fact}
            self._barrier.wait()
            found = list(self.facts)
            self._barrier.wait()
            assert {fact["what"] for fact in found} == {what}
            return found

        return SimpleNamespace(rank=rank, size=self.size, agree=agree)


class Disk(CheckpointWriter):
    """Slow while `gate` is closed, full while `full` is set."""

    def __init__(self, folder: Path, stem: str) -> None:
        super().__init__(folder, stem, "digest", Keeping(9, "score"))
        self.gate = threading.Event()
        self.gate.set()
        self.full = False
        self.began = threading.Event()

    def write_parts(
        self, version: Version, models: Any, worker: Mapping[str, Any], unread: bytes = b""
    ) -> dict[str, list[Any]]:
        self.began.set()
        assert self.gate.wait(WAIT_S)
        parts = super().write_parts(version, models, worker, unread)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return parts


class Replica:
    """A model of one tensor, which every `apply` counts up."""

    def __init__(
        self, folder: Path, meeting: Meeting, rank: int, folders: ModelFolders | None = None, **rules: Any
    ) -> None:
        self.weight = torch.zeros(4)
        self.disk = Disk(folder, f"trainer-{rank}")
        self.metrics = MetricStore()
        self.number = 0
        model = SimpleNamespace(state_shards=lambda: self.shards(rank, meeting.size))
        parts = SavingParts(
            home="trainer",
            core=SimpleNamespace(snapshot=lambda: {"version": self.number}),  # type: ignore[arg-type]
            models={"policy": model},  # type: ignore[dict-item]
            contexts={},
            writer=self.disk,
            commits=rank == 0,
            record=lambda: None,
            flush=lambda: None,
            folders=folders,
        )
        run = RunConfig(**{"training_steps": 99, "save_every": 1, **rules})
        self.board = WaitBoard()
        self.saving = Saving(parts, run, WAIT_S, meeting.replica(rank), self.board, self.metrics)

    def shards(self, rank: int, size: int) -> list[Shard]:
        return list(share_of({"weight": self.weight, "moment": self.weight}, rank, size))

    def step(self) -> None:
        self.saving.wait_for_copy()
        self.weight += 1.0
        self.number += 1
        self.saving.step_done(Version(0, self.number))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
            self.settle()

    def settle(self) -> None:
        if self.saving._flight is not None:
            self.saving._flight.written.exception(WAIT_S)

    def close(self) -> None:
        self.saving.close(WAIT_S)


@pytest.fixture
def alone(tmp_path: Path) -> Callable[..., Replica]:
    return lambda **rules: Replica(tmp_path, Meeting(1), 0, **rules)


def together(replicas: list[Replica], work: Callable[[Replica], object]) -> None:
    with ThreadPoolExecutor(len(replicas)) as pool:
        for done in [pool.submit(work, replica) for replica in replicas]:
            done.result(WAIT_S)


def saved(folder: Path) -> list[int]:
    return [int(path.parent.name.removeprefix("step_")) for path in sorted(folder.glob("checkpoints/*/COMMIT"))]


def value(folder: Path, number: int) -> float:
    reader = CheckpointReader(folder / f"checkpoints/step_{number:06d}", "trainer-0")
    return float(reader.model("policy")["weight"][0])


def test_training_goes_on_while_the_disk_is_slow_and_what_is_saved_is_of_its_step(
    alone: Callable[..., Replica], tmp_path: Path
) -> None:
    replica = alone()
    replica.disk.gate.clear()
    for _ in range(4):
        replica.step()
    assert saved(tmp_path) == []
    assert replica.metrics.drain()[PUT_OFF] == 3
    replica.disk.gate.set()
    replica.settle()
    assert saved(tmp_path) == [1]
    # What was due meanwhile is begun as one, after the first step that finds the disk free.
    replica.steps(1)
    assert saved(tmp_path) == [1, 5]
    assert [value(tmp_path, number) for number in (1, 5)] == [1.0, 5.0]
    drained = replica.metrics.drain()
    assert drained[WRITE] > 0
    assert drained[STALL] >= 0


def test_the_state_does_not_change_before_it_is_copied(alone: Callable[..., Replica], tmp_path: Path) -> None:
    replica = alone(save_every=100)
    replica.steps(1)
    started, go_on = threading.Event(), threading.Event()

    take = replica.saving._thread._copies.take

    def slowly(model: str, own: Any) -> list[Shard]:
        started.set()
        assert go_on.wait(WAIT_S)
        return take(model, own)

    replica.saving._thread._copies.take = slowly  # type: ignore[method-assign]
    replica.saving._owed = True
    replica.step()
    assert started.wait(WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(replica.step)
        assert not later.done()
        assert replica.weight[0] == 2.0
        go_on.set()
        later.result(WAIT_S)
    replica.settle()
    assert replica.weight[0] == 3.0
    assert value(tmp_path, 2) == 2.0


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(alone: Callable[..., Replica], tmp_path: Path) -> None:
    replica = alone()
    replica.steps(2)
    replica.disk.full = True
    replica.steps(2)
    assert saved(tmp_path) == [1, 2]
    replica.disk.full = False
    replica.steps(2)
    replica.saving.close(WAIT_S)
    assert saved(tmp_path)[:2] == [1, 2]
    assert saved(tmp_path)[-1] == 6
    assert drafts(tmp_path / "checkpoints") == []
    assert replica.metrics.drain()["checkpoint/failed/count"] == 2


def test_the_last_checkpoint_is_whole_before_the_run_ends_or_the_run_fails(
    alone: Callable[..., Replica], tmp_path: Path
) -> None:
    replica = alone(save_every=0, training_steps=2)
    replica.step()
    replica.disk.full = True
    message = "training step 2, could .* No space left .* No checkpoint exists; --resume would begin again at step 1"
    with pytest.raises(WorkerFailed, match=message):
        replica.step()
    replica.disk.full = False
    replica.saving.save_now(Version(0, 2))
    assert saved(tmp_path) == [2]


def test_two_replicas_commit_what_both_have_written(tmp_path: Path) -> None:
    meeting = Meeting(2)
    replicas = [Replica(tmp_path, meeting, rank, save_every=2, training_steps=6) for rank in range(2)]
    replicas[1].disk.gate.clear()
    together(replicas, lambda replica: [replica.step() for _ in range(3)])
    assert saved(tmp_path) == []
    replicas[1].disk.gate.set()
    together(replicas, Replica.settle)
    together(replicas, lambda replica: replica.steps(3))
    assert saved(tmp_path) == [2, 4, 6]
    assert [value(tmp_path, number) for number in (2, 4, 6)] == [2.0, 4.0, 6.0]


def test_when_one_replica_has_no_room_all_give_it_up(tmp_path: Path) -> None:
    meeting = Meeting(2)
    replicas = [Replica(tmp_path, meeting, rank, save_every=2, training_steps=5) for rank in range(2)]
    replicas[1].disk.full = True
    together(replicas, lambda replica: replica.steps(3))
    replicas[1].disk.full = False
    together(replicas, lambda replica: replica.steps(2))
    assert saved(tmp_path) == [4, 5]
    assert drafts(tmp_path / "checkpoints") == []


def test_after_some_seconds_all_save_when_one_finds_that_it_is_time(tmp_path: Path) -> None:
    meeting = Meeting(2)
    seconds = (1e-9, 1000.0)
    replicas = [Replica(tmp_path, meeting, rank, save_every=0, save_every_s=seconds[rank]) for rank in range(2)]
    together(replicas, lambda replica: replica.steps(2))
    together(replicas, Replica.close)
    assert saved(tmp_path) == [1]


def test_the_score_is_the_mean_over_all_replicas(tmp_path: Path) -> None:
    meeting = Meeting(2)
    replicas = [Replica(tmp_path, meeting, rank, save_every=1, keep_best="score") for rank in range(2)]

    def step(replica: Replica) -> None:
        rank = replicas.index(replica)
        replica.metrics.mean("score/mean", (0.2, 0.8)[rank], (1.0, 3.0)[rank])
        replica.steps(1)
        replica.metrics.drain()
        replica.steps(1)

    together(replicas, step)
    together(replicas, Replica.close)
    commit = (tmp_path / "checkpoints" / "step_000001" / "COMMIT").read_text()
    assert '"value": 0.65' in commit


def test_a_metric_that_nobody_measures_is_refused_at_the_first_step(alone: Callable[..., Replica]) -> None:
    replica = alone(save_every=0, keep_best="critic/skore")
    replica.metrics.mean("critic/score/mean", 1.0)
    with pytest.raises(
        UserError, match="run.keep_best: no training .* 'critic/skore' .* choose one of critic/score/mean"
    ):
        replica.step()


def test_a_folder_that_a_killed_life_owed_is_made_of_the_checkpoint_it_goes_on_from(tmp_path: Path) -> None:
    first = Replica(tmp_path, Meeting(1), 0, save_every=5)
    first.steps(5)
    first.close()
    (tmp_path / "hf" / "draft_000004").mkdir(parents=True)
    written: list[float] = []

    def write(state: Mapping[str, torch.Tensor], section: object, folder: Path, note: object) -> None:
        written.append(float(state["weight"][0]))
        (folder / "model").touch()

    for number, every, expected in ((5, 0, []), (5, 6, []), (5, 4, [5.0]), (5, 4, [5.0])):
        again = Replica(tmp_path, Meeting(1), 0, ModelFolders(tmp_path, "policy", {}, write), hf_every=every)
        again.saving.already(number)
        again.close()
        assert written == expected
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["step_000005"]
