"""PPO as whole runs in one process, with a critic beside the policy or on workers of its own."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from distflow import StepContext
from distflow.launch.run.resume import find_checkpoint
from distflow.runtime import ports
from distflow.runtime.updates import Updates
from distflow.types import WorkerName
from tests.polling import eventually
from tests.runtime import late_round
from tests.runtime.whole_runs import Network, WholeRun, in_memory

STEPS, STOP_AT = 5, 2
CRITIC = (
    "flow=ppo",
    "layout=critic",
    "layout.pools.trainer.count=2",
    "batch.prompts=4",
    "batch.ledgers=2",
    "batch.minibatches=2",
    f"run.training_steps={STEPS}",
)
CLOSE = 1e-6
POLICY, VALUES = ("actor/grad_norm", "actor/epochs"), ("critic/grad_norm",)
"""What any layout measures alike."""


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    with in_memory():
        yield


def test_a_stop_while_owners_deal_is_followed_by_all_homes_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One owner has told the critics to train; another one is asked to stop, and has a round to compute before."""
    call = "flow.steps.old_logprobs.call=tests.runtime.late_round:old_logprobs"
    # Rows of one length, so that both replicas have equally many rounds but for the one more.
    run = WholeRun(tmp_path, [*CRITIC, call, "flow.steps.sample.with.max_new_tokens=1"], divided=["trainer"])

    def stop(ctx: StepContext) -> None:
        if ctx.training_step == STOP_AT:
            (rows,) = run.sessions["trainer/0"]._rows_out.values()
            eventually(lambda: rows._core.step == STOP_AT + 1, "the first owner to close the step")
            for name in run.sessions:
                run.stop(name)

    monkeypatch.setattr(late_round, "BEFORE", [stop])
    run.go()
    assert set(run.ended.values()) == {"stopped"}
    found = find_checkpoint(tmp_path)
    assert found.step == STOP_AT + 1, "the step that was begun, at both homes"
    assert not found.ignored


@pytest.mark.parametrize("layout", ["split", "critic"])
def test_a_stop_between_two_updates_comes_after_the_training_step(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed, it is as if nobody had stopped it: no update is taken twice."""
    batches = Batches(prompts=8, ledgers=4, minibatches=2, epochs=2, warmup=0, target_kl=None)
    settings = [*batches.settings, f"layout={layout}", "layout.pools.trainer.count=2"]
    run, real = WholeRun(tmp_path, settings), Updates.apply

    def apply(self: Updates, model: str, *given: Any) -> None:
        real(self, model, *given)
        if self._step == STOP_AT:
            for name in run.sessions:
                run.stop(name)

    with monkeypatch.context() as patch:
        patch.setattr(Updates, "apply", apply)
        run.go()
    assert find_checkpoint(tmp_path).step == STOP_AT + 1
    check(run, batches, STOP_AT + 1)
    again = WholeRun(tmp_path, settings, term=1)
    again.go()
    check(again, batches, STEPS)


@pytest.mark.parametrize("slow", ["critic_update", "update"])
def test_a_home_that_trains_for_long_is_waited_for(tmp_path: Path, slow: str) -> None:
    """Much longer than limits.no_progress_s: whoever waits for it sees that it goes on."""
    few = ["batch.prompts=6", "batch.ledgers=1", "layout.pools.trainer.count=1", "layout.pools.critic.count=1"]
    settings = [*few, "batch.minibatches=1", "run.training_steps=2", "limits.no_progress_s=5"]
    run = WholeRun(tmp_path, [*CRITIC, *settings, f"flow.steps.{slow}.call=tests.runtime.slow_updates:{slow}"])
    run.go()
    assert set(run.ended.values()) == {"done"}


@dataclass(frozen=True)
class Batches:
    """What the result depends on."""

    prompts: int
    ledgers: int
    minibatches: int
    epochs: int
    warmup: int
    target_kl: float | None

    @classmethod
    def drawn(cls, draw: random.Random) -> Batches:
        ledgers, each, epochs = draw.choice((1, 2, 3, 4)), draw.choice((1, 2, 4)), draw.choice((1, 1, 2, 3))
        minibatches = draw.choice([parts for parts in (1, 2, 4) if each % parts == 0])
        target_kl = draw.choice((None, 1e-9, 1e-4, 10.0)) if epochs > 1 else None
        return cls(ledgers * each, ledgers, minibatches, epochs, draw.choice((0, 0, 1, 2)), target_kl)

    @property
    def settings(self) -> list[str]:
        target = [] if self.target_kl is None else [f"batch.target_kl={self.target_kl}"]
        return [
            "flow=ppo",
            f"batch.prompts={self.prompts}",
            f"batch.ledgers={self.ledgers}",
            f"batch.minibatches={self.minibatches}",
            f"batch.epochs={self.epochs}",
            f"batch.critic_warmup={self.warmup}",
            f"run.training_steps={STEPS}",
            *target,
        ]


def measured(folder: Path, stem: str) -> dict[int, dict[str, Any]]:
    """The last metrics of each training step that a worker has written."""
    lines = map(json.loads, (folder / "metrics" / f"{stem}.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if "step" in line}


@cache
def undisturbed(batches: Batches) -> dict[int, dict[str, Any]]:
    """With the critic beside the policy, on a single worker."""
    with TemporaryDirectory() as folder:
        few = ["layout=split", "layout.pools.trainer.count=1", "layout.pools.rollout.count=1"]
        WholeRun(Path(folder), [*batches.settings, *few]).go()
        return measured(Path(folder), "trainer-0")


def check(run: WholeRun, batches: Batches, done: int) -> None:
    """Both homes have trained on the same `done` training steps, with the same result as the undisturbed run."""
    groups: Counter[int] = Counter()
    for name in run.plan.members:
        stem, homes = name.replace("/", "-"), run.plan.pool(WorkerName.parse(name).pool).homes
        lines = measured(run.folder, stem) if done else {}
        assert sorted(lines) == list(range(1, done + 1)), f"training steps of {name}"
        groups.update({t: int(line.get("critic/groups/count", 0)) for t, line in lines.items()})
        for t, line in lines.items():
            for metric in (*(POLICY if "policy" in homes else ()), *(VALUES if "critic" in homes else ())):
                expected = undisturbed(batches)[t].get(metric, 0.0)
                assert line.get(metric, 0.0) == pytest.approx(expected, rel=CLOSE), f"{metric} of step {t} at {name}"
    dealt = batches.prompts if any(edge.kind == "rows" for edge in run.plan.edges) else 0
    assert all(groups[t] == dealt for t in range(1, done + 1)), f"groups that trained critics: {groups}"
    dumps = [line for file in run.folder.glob("rollouts/step_*/*.jsonl") for line in file.read_text().splitlines()]
    trained = Counter((line["uid"][2], line["sample"]) for line in map(json.loads, dumps))
    assert set(trained.values()) <= {1}, "each sample once"
    assert {position for position, _ in trained} == set(range(done * batches.prompts))


def layout_drawn(draw: random.Random, ledgers: int) -> list[str]:
    """Any layout, the critic mostly on workers of its own, and other things on which the result does not depend."""
    layout = draw.choice(("critic", "services", "colocated", "split"))
    critics = f"{{count: {draw.randint(1, 3)}, steps: [values, critic_update], backend: torch}}"
    home = "worker" if layout == "colocated" else "trainer"
    generating = [] if layout == "colocated" else [f"layout.pools.rollout.count={draw.randint(1, 2)}"]
    return [
        f"layout={layout}",
        f"layout.pools.{home}.count={draw.randint(1, min(3, ledgers))}",
        *([] if layout == "split" else [f"layout.pools.critic={critics}"]),
        *generating,
        f"layout.stealing={draw.choice(('true', 'false'))}",
        f"batch.tokens_per_microbatch={draw.choice((8, 24, 8192))}",
        f"run.save_every={draw.choice((0, 1, 2, 3))}",
    ]


def stops_drawn(draw: random.Random, run: WholeRun) -> Callable[[float], None]:
    """Ask all workers to stop, at about the same time, at any moment or never."""
    if draw.random() < 0.3:
        return lambda seconds: None
    after, waits = draw.uniform(0, STEPS), draw.choice((0.0, 0.2, 1.0))
    late = {str(worker.name): waits * draw.random() for worker in run.plan.workers}
    began: list[float] = []

    def each(seconds: float) -> None:
        steps = [one._node.facts["step"] for name, one in run.sessions.items() if name in run.plan.owners]
        # A step may take a second on a slow machine: within it, anything may happen.
        if not began and steps and max(steps) >= int(after) and draw.random() < 0.05:
            began.append(seconds)
        for name, delay_s in late.items():
            if began and seconds >= began[0] + delay_s:
                run.stop(name)

    return each


def disturbed(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of anything, stopped at any moment; if it was, what resumes it."""
    draw = random.Random(seed)
    batches = Batches.drawn(draw)
    settings = [*batches.settings, *layout_drawn(draw, batches.ledgers)]
    divided = [pool for pool in ("trainer", "worker", "critic") if draw.random() < 0.35]
    # Room for all rows of several training steps, or for hardly any beside those of the one that is trained on.
    monkeypatch.setattr(ports, "MIB", draw.choice((ports.MIB, 300, 3000)))
    network = Network(seed, loss=draw.choice((0.0, 0.0, 0.02)), delay_s=draw.choice((0.0, 0.01, 0.05)))
    run = WholeRun(folder, settings, network, divided=divided)
    run.go(each=stops_drawn(draw, run))
    ends = {run.ended[name] for name in run.plan.members}
    assert len(ends) == 1, f"all homes end alike: {run.ended}"
    found = find_checkpoint(folder)
    assert not found.ignored
    assert ends == {"stopped"} or found.step == STEPS
    check(run, batches, found.step)
    if ends == {"stopped"}:
        again = WholeRun(folder, settings, divided=divided, term=1)
        again.go()
        assert set(again.ended.values()) == {"done"}
        check(again, batches, STEPS)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_lost_late_or_stopped_changes_nothing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturbed(seed, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 150))
def test_whatever_is_lost_late_or_stopped_changes_nothing_many(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturbed(seed, tmp_path, monkeypatch)
