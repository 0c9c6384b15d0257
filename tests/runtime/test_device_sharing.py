"""The two sides of a colocated worker take turns on its device: who is there when, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from distflow.errors import Overtaken, UserError
from distflow.runtime.generating import OFFLOAD, Generating, OffloadedModels, OffloadTurns
from distflow.runtime.metrics import MetricStore
from distflow.testing.fakes import FakeBackend, FakeEngine
from distflow.types import SampleOutput, Version
from tests.runtime.kit import World, lease_settings


class Device:
    """Where both sides say that they come and go."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.there: set[str] = {"engine", "policy"}

    def leave(self, who: str) -> None:
        self.log.append(f"{who} leaves")
        self.there.remove(who)

    def come(self, who: str) -> None:
        self.log.append(f"{who} comes")
        assert not self.there, f"{who} came while {self.there} was there"
        self.there.add(who)


class Engine(FakeEngine):
    def __init__(self, device: Device, **fields: Any) -> None:
        super().__init__(**fields)
        self.device = device

    def poll(self) -> list[SampleOutput]:
        assert self.device.there == {"engine"}
        return super().poll()

    def offload(self) -> None:
        self.device.leave("engine")

    def onload(self) -> None:
        self.device.come("engine")


class Model(FakeBackend):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def apply(self, denominator: float) -> float:
        assert self.device.there == {"policy"}
        return super().apply(denominator)

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        assert self.device.there == {"policy"}
        return super().named_shards()

    def state_shards(self) -> Any:
        # Through the fake's own parameters, which are no device's.
        assert self.device.there == {"policy"}
        return super().state_shards()

    def offload(self) -> None:
        self.device.leave("policy")

    def onload(self) -> None:
        self.device.come("policy")


class Colocated:
    """A world in which both sides share a device."""

    def __init__(self, folder: Path, *, renewed: bool = True, overrides: tuple[str, ...] = (), **changes: Any) -> None:
        self.device = Device()
        self.renewed = renewed
        settings = lease_settings(announce_closed=True, **changes)
        self.world = World(folder, settings, engine=Engine(self.device), overrides=overrides, turns=self.make_turns)
        self.world.loop.on_version(self.world.turns.taken)

    def make_turns(self, world: World) -> OffloadTurns:
        world.backend = Model(self.device)
        world.context.models = {"policy": world.backend}
        models = {"policy": world.backend}
        return OffloadTurns(world.engine, models, world.link, world.inbox, world.metrics, renewed=self.renewed)

    def generate(self) -> list[int]:
        self.world.turns.generate()
        return self.world.generate_all()


def test_the_engine_leaves_before_models_come_and_the_other_way_round(tmp_path: Path) -> None:
    colocated = Colocated(tmp_path)
    world = colocated.world
    steps = world.steps()
    for t in range(2):
        assert next(steps) == t
        assert sorted(colocated.generate()) == list(range(4 * t, 4 * t + 4))
        world.train(t)
    round_trip = ["policy leaves", "engine comes", "engine leaves", "policy comes"]
    assert colocated.device.log == ["engine leaves", *round_trip, *round_trip]
    assert OFFLOAD in world.metrics.drain()


def test_weights_are_let_go_with_the_engine_and_come_anew(tmp_path: Path) -> None:
    colocated = Colocated(tmp_path)
    world = colocated.world
    steps = world.steps()
    next(steps)
    colocated.generate()
    newest = world.inbox._newest
    assert newest is not None
    with pytest.raises(Overtaken, match="is gone"):
        world.link.fetch(newest)
    world.train(0)
    assert world.engine.version is None, "torn: nothing of it was kept"
    next(steps)
    world.turns.generate()
    world.submit()
    assert world.engine.version == Version(0, 1)


def test_an_engine_that_takes_weights_later_keeps_those_that_it_has(tmp_path: Path) -> None:
    overrides = ("layout.max_staleness=2", "layout.refresh=at_bound")
    colocated = Colocated(tmp_path, renewed=False, overrides=overrides, max_staleness=2)
    world = colocated.world
    steps = world.steps()
    next(steps)
    colocated.generate()
    world.train(0)
    assert world.engine.version == Version(0, 0)
    next(steps)
    world.turns.generate()
    newest = world.inbox._newest
    assert newest is not None
    fetched = dict(world.link.fetch(newest))
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in fetched.values()), "of version 1"


def test_models_wait_for_whoever_reads_them(tmp_path: Path) -> None:
    colocated = Colocated(tmp_path)
    turns = colocated.world.turns
    next(colocated.world.steps())
    turns.settled_by(lambda: colocated.device.log.append("copied"))
    turns.generate()
    assert colocated.device.log[-3:] == ["copied", "policy leaves", "engine comes"]


def test_a_stop_in_mid_generation_saves_models_that_are_back(tmp_path: Path) -> None:
    colocated = Colocated(tmp_path)
    world = colocated.world
    steps = world.steps()
    next(steps)
    colocated.generate()
    world.train(0)
    next(steps)
    world.turns.generate()
    assert colocated.device.there == {"engine"}
    world.training.save_now()
    assert colocated.device.there == {"policy"}
    assert list(tmp_path.glob("checkpoints/step_000001/COMMIT"))
    world.training.close()


def test_generating_again_without_new_weights_is_an_error_not_a_wait(tmp_path: Path) -> None:
    colocated = Colocated(tmp_path)
    world = colocated.world
    next(world.steps())
    colocated.generate()
    world.turns.train()
    with pytest.raises(UserError, match=r"generates again without w\.publish.*layout\.refresh"):
        world.turns.generate()


class Loop:
    endless = False

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open

    def groups(self) -> list[Any]:
        return []

    def open(self) -> bool:
        return self.is_open


@pytest.mark.parametrize("is_open", [True, False])
def test_nothing_moves_for_a_step_whose_samples_are_there(tmp_path: Path, *, is_open: bool) -> None:
    """At staleness 1 a generating phase may find all owners served by the one before."""
    colocated = Colocated(tmp_path)
    world = colocated.world
    next(world.steps())
    edge, metrics = cast("Any", None), MetricStore()
    generating = Generating(
        world.loop, {"train": world.outbound}, world.samples, world.engine, world.node, edge, metrics, world.turns
    )
    assert list(generating.generate("sample", cast("Any", Loop(is_open=is_open)))) == []
    assert colocated.device.there == ({"engine"} if is_open else {"policy"})


class Large(Model):
    """Says what it has on the device."""

    def offload(self) -> None:
        self.device.leave("policy")

    def onload(self) -> None:
        self.device.come("policy")

    def device_bytes(self) -> dict[str, int]:
        return {"weights": 5 if "policy" in self.device.there else 0}


def test_an_engine_is_made_while_the_models_are_away() -> None:
    device = Device()
    device.there = {"policy"}
    absent = Device()
    absent.there = set()
    aside = OffloadedModels({"policy": Large(device), "divided later": Large(absent)}, wanted=True)
    assert device.there == set()
    aside.restore()
    aside.restore()
    assert device.log == ["policy leaves", "policy comes"]
    assert absent.log == []
    OffloadedModels({"policy": Large(device)}, wanted=False).restore()
    assert len(device.log) == 2
