"""The process of the episodes of steps in a file, served as that of a worker's is."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from distflow.comm.kept_process import KeptProcess
from distflow.flow.plan import StepPlan
from distflow.flow.step import ENVIRONMENT, GENERATED, SEQUENCES
from distflow.runtime.episode_loop import Episodes
from distflow.runtime.episode_process import EpisodeProcess
from distflow.runtime.episode_server import EpisodeServer, ToldMetrics, WorkerPipe, hosted_loop, serve_episodes
from distflow.runtime.generate_step import GenerateStep, SampleLimits
from distflow.runtime.metrics import MetricStore
from distflow.runtime.steps import EpisodeContext, StepContext, StepRunner
from distflow.runtime.trajectories import Trajectories
from distflow.runtime.waits import WaitBoard
from tests.runtime.kit import TOKENIZER, EndlessTokenizer

ENTRY = "tests.runtime.episode_children:serve"
Settings = Mapping[str, Mapping[str, Any]]


def plan_of(file: str, name: str, settings: Mapping[str, Any]) -> StepPlan:
    writes = (*GENERATED, *SEQUENCES, "rewards/told")
    return StepPlan(name, f"{file}:{name}", "generate", "sample", None, settings, (), writes, (), ENVIRONMENT)


def serve(file: str, settings: str, reports: str) -> int:
    """Serve the steps that `settings` names, until the worker says no more."""

    def made(pipe: WorkerPipe) -> EpisodeServer:
        plans = [plan_of(file, name, given) for name, given in json.loads(settings).items()]
        metrics = ToldMetrics(pipe.tell)
        contexts: dict[str, StepContext] = {
            plan.name: EpisodeContext(plan.name, "rollout/0", tokenizer=EndlessTokenizer(), metrics=metrics)
            for plan in plans
        }
        loop = hosted_loop(pipe)
        runner = StepRunner("rollout/0", plans, contexts, loop=loop)
        steps = {plan.name: runner.generate_step(plan.name) for plan in plans}
        return EpisodeServer(pipe, steps, loop, lambda step, version: None)

    return serve_episodes(int(reports), made)


class Steps:
    """Steps of a file, for this process and for one of their own."""

    def __init__(self, file: Path, settings: Settings) -> None:
        self.metrics = MetricStore()
        self.board = WaitBoard()
        self.started = list[KeptProcess]()
        self._file = file
        self._folder = tempfile.TemporaryDirectory(prefix="episodes-")
        self._settings = settings

    @cached_property
    def process(self) -> EpisodeProcess:
        """Where `step` may run them."""
        return EpisodeProcess(self._start, self.now, self.metrics, partial(self.board.shown, peers=()))

    def _start(self) -> KeptProcess:
        about = [str(self._file), json.dumps(self._settings)]
        self.started.append(KeptProcess(ENTRY, about, f"test {self._file}", self.output))
        return self.started[-1]

    @property
    def output(self) -> Path:
        """What the process prints."""
        return Path(self._folder.name) / "episodes.log"

    def now(self) -> tuple[int, int]:
        return (0, 0)

    def step(self, name: str, loop: Episodes) -> GenerateStep:
        context = StepContext(name, "rollout/0", tokenizer=EndlessTokenizer(), metrics=self.metrics)
        runner = StepRunner(
            "rollout/0", [plan_of(str(self._file), name, self._settings[name])], {name: context}, loop=loop
        )
        return runner.generate_step(name)

    def samples(self, name: str, loop: Episodes, samples: int = 3) -> Trajectories:
        limits = {"train": SampleLimits(samples, 120, 240)}
        return Trajectories(self.step(name, loop), limits, TOKENIZER, torch.float32)
