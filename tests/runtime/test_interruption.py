"""What a trainer leaves behind when it ends at the worst moment: killed after a checkpoint, stopped within a step."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from distflow.data.batch import Batch
from distflow.errors import RunStopped, StepError
from distflow.runtime.disk import Disk
from distflow.runtime.dumps import PENDING_STEPS, DumpWriter
from distflow.types import WorkerName
from tests.runtime.kit import GROUP, World, lease_settings


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def world(**limits: int) -> World:
        worlds.append(World(tmp_path, lease_settings(), **limits))
        return worlds[-1]

    yield world
    for made in worlds:
        made.training.close()


def saved_states(folder: Path, step: int) -> dict[str, object]:
    return json.loads((folder / f"checkpoints/step_{step:06d}/worker-trainer-0.json").read_text())["steps"]


def test_a_checkpoint_is_only_written_after_the_dumps_of_its_steps(make: Callable[..., World], tmp_path: Path) -> None:
    """A trainer killed right after COMMIT never sees those samples again, so their record must be there."""
    world = make(save_every=1)
    for t in world.steps():
        world.generate_all()
        world.train(t)
        assert (tmp_path / f"checkpoints/step_{t + 1:06d}/COMMIT").exists()
        (file,) = (tmp_path / f"rollouts/step_{t + 1:06d}").iterdir()
        assert len(file.read_text().splitlines()) == 4 * GROUP


def test_a_stop_within_a_step_saves_what_steps_kept_before_it(make: Callable[..., World], tmp_path: Path) -> None:
    world = make()
    world.context.state["calls"] = 0

    def script() -> None:
        for t in world.steps():
            world.generate_all()
            world.context.state["calls"] += 1
            if t == 1:
                world.node.board.stop("asked to")
            world.train(t)

    with pytest.raises(RunStopped):
        script()
    world.training.save_now()
    assert world.context.state == {"calls": 2}
    assert saved_states(tmp_path, 1) == {"update": {"calls": 1}}
    assert not (tmp_path / "rollouts/step_000002").exists()


def test_what_a_step_keeps_is_saved_with_its_last_value(make: Callable[..., World], tmp_path: Path) -> None:
    world = make(save_every=1)
    for t in world.steps():
        world.generate_all()
        world.context.state["last"] = t
        world.train(t)
        assert saved_states(tmp_path, t + 1) == {"update": {"last": t}}


def test_what_cannot_be_saved_is_told_before_the_hours_of_training(make: Callable[..., World]) -> None:
    world = make()
    world.context.state["baseline"] = torch.zeros(1)
    with pytest.raises(StepError, match=r"step 'update' on worker/0: ctx.state cannot go .* Tensor is not JSON"):
        next(world.steps())


def test_whatever_goes_wrong_with_a_dump_is_raised_and_blocks_nobody(tmp_path: Path) -> None:
    dumps = DumpWriter(tmp_path, WorkerName("trainer", 0), Disk(), 1 << 30)
    lacking = Batch({"reward": torch.zeros(1)})
    dumps.write(1, 0, [(lacking, ["rollout/0"])])
    with pytest.raises(KeyError, match="uid"):
        dumps.flush()
    for step in range(PENDING_STEPS + 2):
        with pytest.raises(KeyError, match="uid"):
            dumps.write(step, 0, [])
    with pytest.raises(KeyError, match="uid"):
        dumps.close()
