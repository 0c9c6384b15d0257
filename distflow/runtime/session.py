"""One life of one worker: build it, meet the peers, run the script, leave in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from distflow.comm.addresses import run_tag
from distflow.comm.endpoint import Endpoint
from distflow.comm.membership import Membership
from distflow.comm.processes import process_alive
from distflow.errors import RunStopped
from distflow.flow.digest import digest_parts
from distflow.log import logger
from distflow.runtime.assembly import Setting, build_contexts, build_engine, build_models, build_tokenizer, device_of
from distflow.runtime.checkpoint import CheckpointWriter
from distflow.runtime.context import StepContext
from distflow.runtime.dumps import DumpWriter
from distflow.runtime.feed import LeaseFeed
from distflow.runtime.generating import Generating
from distflow.runtime.lanes import Lanes
from distflow.runtime.metrics import MetricStore, MetricWriter
from distflow.runtime.node import Node, identity
from distflow.runtime.sides import WEIGHTS, build_inbound, build_inbox, build_outbound
from distflow.runtime.steps import StepRunner
from distflow.runtime.training import Training, TrainingLimits, TrainingParts
from distflow.runtime.waits import WaitBoard
from distflow.runtime.worker import SAMPLES, Worker
from distflow.types import Version
from distflow.weights.inbox import WeightInbox
from distflow.weights.inproc import InprocLink
from distflow.weights.link import WeightPublisher
from distflow.weights.manifest import Manifest
from distflow.weights.shm import ShmPublisher, ShmReader

log = logger(__name__)


class Session:
    """Everything of one worker. `run` is called once."""

    def __init__(self, setting: Setting, incarnation: int) -> None:
        self._setting = setting
        self._name = str(setting.me.name)
        self._term = setting.document.term
        self._trains = self._name in setting.plan.owners
        self._generates = setting.me.generates is not None
        self._board = WaitBoard()
        endpoint = Endpoint(self._name, incarnation, setting.document.roster)
        me = identity(self._name, incarnation, setting.plan.digest, digest_parts(setting.plan))
        self._node = Node(endpoint, Membership(me, _peers(setting), process_alive), self._board)
        self._lanes = Lanes(endpoint)
        self._metrics = MetricStore()
        self._writer = MetricWriter(setting.run_dir, setting.me.name.file_stem)
        self._link = InprocLink(setting.plan.primary)
        self._inbox: WeightInbox | None = None
        self._newest: Manifest | None = None
        self._version: int | None = None
        self._contexts: Mapping[str, StepContext] = {}
        self._training: Training | None = None
        self._generating: Generating | None = None

    def run(self, script: Callable[[Worker], None]) -> None:
        """Build, run the script, leave. Raises what the script raised; RunStopped after a clean stop."""
        orderly = False
        try:
            worker = self._build()
            self._meet()
            script(worker)
            orderly = True
        except RunStopped:
            if self._training is not None:
                self._training.save_now()
                self._training.dismiss()
            orderly = True
            raise
        finally:
            self._leave(orderly=orderly)

    def _build(self) -> Worker:
        setting = self._setting
        if setting.recipe.run.deterministic:
            torch.use_deterministic_algorithms(True)
        tokenizer = build_tokenizer(setting)
        inbound = build_inbound(setting, self._node, self._lanes, tokenizer) if self._trains else None
        outbound = build_outbound(setting, self._node, self._lanes, inbound) if self._generates else None
        if self._generates:
            self._inbox = build_inbox(self._node, self._link if self._trains else ShmReader())
        self._node.on_joined(self._welcome)
        if self._trains:
            # Whatever a trainer measures is a sign of work, each micro-batch too: generating workers wait by it.
            self._node.count_work(lambda: self._metrics.recorded)
        # From here on the worker answers; models may take minutes to load.
        self._node.start()
        device = device_of(setting)
        models = build_models(setting, device)
        engine = build_engine(setting, device) if outbound is not None else None
        contexts = build_contexts(setting, self._metrics, models, engine, tokenizer)
        self._contexts = contexts
        steps = StepRunner(self._name, setting.me.steps, contexts)
        if outbound is not None and engine is not None and self._inbox is not None:
            feed = LeaseFeed(outbound, self._inbox, self._node, self._metrics, setting.recipe)
            feed.on_version(self._new_version)
            edge = setting.plan.edge(SAMPLES)
            self._generating = Generating(feed, outbound, steps, engine, self._node, edge, self._metrics)
        if inbound is not None:
            parts = TrainingParts(
                inbound=inbound,
                models=models,
                contexts=contexts,
                publishers={setting.plan.primary: self._publisher()},
                announce=self._announce,
                dumps=DumpWriter(setting.run_dir, setting.me.name),
                checkpoints=self._checkpoints(),
                metrics=self._metrics,
                writer=self._writer,
            )
            start = Version(self._term, 0 if setting.resumed is None else setting.resumed.version.number)
            self._training = Training(parts, _limits(setting), self._node, start)
        return Worker(setting.me.name, steps, self._generating, self._training)

    def _publisher(self) -> WeightPublisher:
        setting = self._setting
        if self._generates:
            return self._link
        return ShmPublisher(run_tag(setting.run_dir), setting.plan.primary, self._term)

    def _checkpoints(self) -> CheckpointWriter:
        setting = self._setting
        keep = setting.recipe.run.keep_checkpoints
        return CheckpointWriter(setting.run_dir, setting.me.name.file_stem, setting.plan.digest, keep)

    def _meet(self) -> None:
        """An owner needs one generating worker, a generating worker all owners: of the same recipe, and soon."""
        membership = self._node.membership
        if not membership.peers:
            return
        enough = any if self._trains else all
        self._board.until(
            # Met and gone again is met: an owner may have finished while the models were loaded here.
            lambda: True if enough(map(membership.met, membership.peers)) else None,
            name="first contact",
            peers=tuple(membership.peers),
            limit_s=self._setting.recipe.limits.connect_s,
            limit="limits.connect_s",
            progress=lambda: sum(map(membership.met, membership.peers)),
        )
        log.info("met %s", ", ".join(name for name in membership.peers if membership.present(name)))

    def _announce(self, manifest: Manifest) -> None:
        """Tell every generating worker of new weights (under the board's lock)."""
        self._newest = manifest
        if self._inbox is not None:
            self._inbox.announce(manifest)
        body = manifest.to_wire()  # once for all: it lists every parameter
        for name in filter(self._node.membership.present, self._node.membership.peers):
            self._node.send(name, WEIGHTS, body)

    def _welcome(self, name: str, _incarnation: int) -> None:
        """Tell one worker of the newest weights, if it is there."""
        if self._newest is not None and self._node.membership.present(name):
            self._node.send(name, WEIGHTS, self._newest.to_wire())

    def _new_version(self, number: int) -> None:
        """The engine here took new weights: what was measured with the former ones is written down."""
        if self._training is None:
            self._write_metrics()
            self._version = number
            self._node.facts |= {"version": number, "step": number}
            for context in self._contexts.values():
                context.training_step, context.policy_version = number, number

    def _write_metrics(self) -> None:
        """Generation with version v is for training step v, which files call v + 1."""
        if self._version is not None and self._version < self._setting.plan.batch.training_steps:
            self._writer.write(self._version + 1, self._term, self._metrics.drain())

    def _leave(self, *, orderly: bool) -> None:
        self._node.facts |= {"state": "finished"}
        if self._generating is not None:
            self._generating.leave()
            if self._training is None:
                self._write_metrics()
        self._node.close(orderly=orderly)
        # Weights are withdrawn last: after a failure somebody may still be reading them.
        if self._training is not None:
            self._training.close()
        self._writer.close()


def _peers(setting: Setting) -> list[str]:
    """Those this worker exchanges samples or weights with."""
    me, plan = str(setting.me.name), setting.plan
    others = [worker for worker in plan.workers if str(worker.name) != me]
    if me in plan.owners:
        return [str(worker.name) for worker in others if worker.generates is not None]
    return [name for name in plan.owners if name != me]


def _limits(setting: Setting) -> TrainingLimits:
    recipe = setting.recipe
    return TrainingLimits(
        batch=setting.plan.batch,
        streamed=setting.plan.streamed and not recipe.run.deterministic,
        dump_every=recipe.run.dump_rollouts,
        save_every=recipe.run.save_every,
        stop_after=recipe.run.stop_after,
        no_progress_s=recipe.limits.no_progress_s,
        drain_s=recipe.limits.drain_s,
    )
