"""The session of one worker process: build the worker, meet the peers, run the script, leave in order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import torch

from distflow.comm.message import Message
from distflow.comm.tracker_processes import FLUSH_S
from distflow.errors import RunEnded, RunStopped, StepError, TermEnded
from distflow.exchange.lease_lanes import Lanes
from distflow.exchange.tally import Tallies
from distflow.flow.edges import SAMPLES
from distflow.log import logger
from distflow.runtime import ports
from distflow.runtime.assembly import (
    Setting,
    build_contexts,
    build_engine,
    build_models,
    build_tokenizer,
    build_trace,
    join_models,
    start_episodes,
    start_trackers,
)
from distflow.runtime.calls import Asking, Calls
from distflow.runtime.checkpoint.policy import CheckpointReports
from distflow.runtime.disk import Disk
from distflow.runtime.episode_loop import SETTLE_S, EpisodeLoop, Episodes
from distflow.runtime.further_generating import FurtherGenerating, build_further
from distflow.runtime.further_training import FurtherTraining
from distflow.runtime.generating import Generating, OffloadedModels, Turns
from distflow.runtime.lockstep import Rounds
from distflow.runtime.metrics import MetricStore, MetricWriter, PeakMemory
from distflow.runtime.node import Greeting, Hosts
from distflow.runtime.owner_side import Owned
from distflow.runtime.ports import Base, HeldModels, Outbound
from distflow.runtime.process_record import note_term
from distflow.runtime.protocols import Alone, Backend, Engine, Tokenizer
from distflow.runtime.replicas import Replicas, build_replicas, build_shard_links
from distflow.runtime.rollout_loop import RolloutLoop
from distflow.runtime.rows import InboundRows, OutboundRows
from distflow.runtime.serving import Answering
from distflow.runtime.steps import StepContext, StepRunner
from distflow.runtime.training import Training
from distflow.runtime.validation import Validation
from distflow.runtime.waits import WaitBoard
from distflow.runtime.worker import Worker
from distflow.types import Version, in_pool
from distflow.weights.receiver import WeightInbox
from distflow.weights.transport import InprocLink

log = logger(__name__)


class Session:
    """All parts of one worker, and the order in which they start and stop. `run` is called once."""

    def __init__(self, setting: Setting, incarnation: int) -> None:
        self._setting = setting
        self._name = str(setting.me.name)
        self._incarnation = incarnation
        self._standing = setting.standing
        self._trains = bool(self._standing.members)
        self._owns = bool(self._standing.ledgers)
        self._leases = setting.plan.primary in setting.me.generates
        self._board = WaitBoard()
        self._hosts = Hosts(setting)
        self._node = self._hosts.node(incarnation, self._board)
        self._disk = Disk()
        service = None if self._owns or self._leases else setting.me.name.pool
        self._metrics = MetricStore(build_trace(setting, incarnation, self._disk), service)
        self._disk.count = self._metrics.add
        self._replicas = build_replicas(setting, self._node) if self._trains else None
        peak = PeakMemory(setting.device)
        self._writer = MetricWriter(setting.run_dir, setting.me.name.file_stem, self._disk, peak.take)
        links = {name: InprocLink(name) for name in setting.me.generates if name in self._standing.gradients}
        ends = (self._disk, self._metrics, self._writer, links, build_shard_links(setting, self._node, self._hosts))
        self._base = Base(setting, self._node, self._hosts, Lanes(self._node.endpoint), *ends)
        self._inboxes: Mapping[str, WeightInbox] = {}
        self._version: Version | None = None
        """Version of the weights that samples come from, on workers that do not train."""
        self._owners: Callable[[], tuple[str, ...]] = lambda: setting.owners
        self._contexts: Mapping[str, StepContext] = {}
        self._tallies = Tallies(self._owns)
        self._models: Mapping[str, Backend] = {}
        self._rounds: Rounds | None = None
        self._turns = Turns()
        self._asking: Calls | None = None
        self._rows_out: Mapping[str, OutboundRows] = {}
        self._rows_in: InboundRows | None = None
        self._further: dict[str, FurtherGenerating] = {}
        """Engines for further models, by step."""
        self._training: Training | FurtherTraining | None = None
        self._validation: Validation | None = None
        self._generating: Generating | None = None
        self._serving: Answering | None = None
        self._episodes: Episodes = EpisodeLoop(SETTLE_S, self._begin_again)
        self._trackers = start_trackers(setting, self._metrics.add)
        self._settled = self._terminated = self._told_to_leave = False
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        """What SIGTERM does outside of this session."""

    def run(self, script: Callable[[Worker], None]) -> None:
        """Build the worker, run the script, leave. Raises what the script raised, and RunStopped after a clean stop."""
        orderly = False
        if self._on_sigterm is not signal.SIG_IGN:
            # In a Slurm job it is ignored, as our parent has set it.
            signal.signal(signal.SIGTERM, self._on_terminate)
        try:
            worker = self._build()
            self._meet()
            if self._replicas is not None:
                self._replicas.connect(self._setting.device, even_alone=self._rounds is not None)
            join_models(self._setting, self._models)
            with suppress(RunEnded):
                script(worker)
            self._check_that_all_is_done()
            if self._training is not None:
                self._training.finish()
            self._note_term()
            if self._replicas is not None:
                self._replicas.leave()
            orderly = True
        except TermEnded:
            assert self._replicas is not None, "only who trains ends a term"
            # Now: as soon as one has gone, the agents end the others.
            self._settle(FLUSH_S)
            self._replicas.leave()
            raise
        except RunStopped:
            if self._training is not None:
                self._training.save_now()
                self._training.dismiss()
            if self._replicas is not None:
                self._replicas.leave()
            orderly = True
            raise
        finally:
            self._leave(orderly=orderly)
        if self._terminated:
            # Everything is handed back. Die of the signal, so that the agent sees it and starts this worker again.
            signal.signal(signal.SIGTERM, self._on_sigterm)
            os.kill(os.getpid(), signal.SIGTERM)

    def _check_that_all_is_done(self) -> None:
        """Refuse a script that returns too early: the other workers would wait for this one."""
        loop = None
        if self._training is not None:
            loop = None if self._training.finished else "w.training_steps()"
        elif self._generating is not None:
            loop = "w.leases()" if self._generating.loop.open() else None
        elif self._serving is not None:
            loop = None if self._serving.over else "w.requests()"
        if loop is not None:
            raise StepError(
                f"the script of {self._name} returned before the run was over — it must go on until the loop over "
                f"{loop} ends by itself"
            )

    def _note_term(self) -> None:
        """Record the term this worker was done in: if training restarts, the agent knows whether it is needed."""
        service = None if self._serving is None or self._trains else self._serving.over_in
        over_in = service if self._generating is None else self._generating.loop.over_in
        if over_in is not None:
            note_term(self._setting.run_dir / "workers" / f"{self._setting.me.name.file_stem}.yaml", over_in)

    def _register(self, tokenizer: Tokenizer) -> tuple[Owned | None, Outbound | None]:
        """Set up what receives messages from the start: the owner's side and the holder's side."""
        setting = self._setting
        inbound = None if (owned := ports.owns(self._base, tokenizer)) is None else owned.inbound
        self._validation = ports.validates(self._base, tokenizer)
        outbound = None
        self._asking, self._serving = ports.asks(self._base), ports.answers(self._base)
        if setting.me.generates:
            self._inboxes = ports.reads(self._base)
        if self._leases:
            outbound = ports.holds(self._base, self._inboxes, inbound, self._validation, self._asking)
        if outbound is not None and not self._owns:
            core = outbound.own.core
            self._owners = lambda: core.owners
        if self._owns:
            self._rows_out = ports.sends(self._base)
        elif self._trains:
            self._rows_in = ports.receives(self._base)
        Greeting(self._node, self._hosts, setting.is_peer)
        CheckpointReports(self._node, self._hosts.here)
        self._node.on_agent("drain", self._drain)
        self._node.counts = self._metrics.counts
        self._node.on_tick(self._count_together)
        self._node.on_tick(self._leave_if_told)
        if self._trains:
            # Everything a trainer measures shows progress, each micro-batch too: generating workers wait by it.
            self._node.count_work(lambda: self._metrics.recorded)
        return owned, outbound

    def _count_together(self, now: float) -> None:
        """Hear what others have judged, and say what is judged here."""
        for name, peer in self._node.membership.peers.items():
            self._tallies.hear(name, peer.incarnation, peer.facts)
        self._node.facts |= self._tallies.facts()

    def _build(self) -> Worker:
        setting = self._setting
        if setting.recipe.run.deterministic:
            torch.use_deterministic_algorithms(True)
            # Without it, PyTorch refuses matrix products on a GPU.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        tokenizer = build_tokenizer(setting)
        if setting.me.generates and setting.me.environments == "process":
            # It imports the steps while models are loaded here.
            self._episodes = start_episodes(setting, self._metrics, self._now, self._board)
        owned, outbound = self._register(tokenizer)
        # The worker answers messages from here on; models may take minutes to load.
        self._node.start()
        self._open_checkpoint()
        device = setting.device
        models = build_models(setting, device, self._replicas or Alone())
        if self._replicas is not None and any(model.lockstep for model in models.values()):
            no_progress_s = setting.recipe.limits.no_progress_s
            self._rounds = Rounds(models, self._replicas, self._board, self._metrics, no_progress_s)
        self._models = models if self._rounds is None else self._rounds.models
        aside = OffloadedModels(models, wanted=setting.me.offload and device.startswith("cuda"))
        own = (device, self._incarnation, self._go_on)
        engines = {model: build_engine(setting, model, *own) for model in setting.me.generates}
        self._contexts = contexts = build_contexts(setting, self._metrics, self._models, engines, tokenizer)
        for name, context in contexts.items():
            context.tally = self._tallies.of(name)
        steps = StepRunner(self._name, setting.me.steps, contexts, loop=self._episodes)
        for step in (step for step in setting.me.steps if step.generates_further):
            model, generate = str(step.model), steps.generate_step(step.name)
            about = (engines[model], self._inboxes[model], tokenizer, self._node, self._metrics)
            self._further[step.name] = build_further(setting, generate, step, *about)
        if outbound is not None:
            self._generating = self._make_generating(outbound, steps, engines[setting.plan.primary], tokenizer)
            aside.restore()
        if self._serving is not None:
            self._serve(self._serving)
        if self._replicas is not None:
            held = HeldModels(self._models, contexts, self._rounds, self._turns, tokenizer)
            self._training = self._make_training(owned, self._replicas, held, steps)
        asked = [*self._further, *(port.edge for port in setting.me.ports if port.end in ("asks", "collects"))]
        serving = None if self._trains else self._serving
        return Worker(setting.me.name, steps, asked, self._generating, self._training, serving)

    def _make_generating(
        self, outbound: Outbound, steps: StepRunner, engine: Engine, tokenizer: Tokenizer
    ) -> Generating:
        plan = self._setting.plan
        sampling, inbox = self._contexts[plan.generate_step.name], self._inboxes[plan.primary]
        about = (self._base, outbound, inbox, engine, self._models, steps, tokenizer)
        generating, self._turns = ports.generates(*about)
        generating.loop.on_version(self._turns.taken if self._owns else self._new_version)
        if self._asking is not None or self._further:
            asking = (self._asking, self._further, self._node, plan, lambda: sampling.training_step, generating.find)
            generating.asks_by(Asking(*asking, self._setting.recipe.limits.drain_s / 4))
        return generating

    def _serve(self, serving: Answering) -> None:
        """Connect what this worker answers with what it counts its steps by, and with the engine that makes it."""
        made = [further for further in self._further.values() if further.plan.name in serving.steps]
        for further in made:
            serving.generates_by(further)
            if not self._trains:
                further.on_version(partial(self._new_weights, serving))
        if not made and not self._trains:
            serving.on_step(self._new_step)

    def _make_training(
        self, owned: Owned | None, replicas: Replicas, held: HeldModels, steps: StepRunner
    ) -> Training | FurtherTraining:
        publishing = ports.publishes(self._base, held, self._inboxes)
        publishing.serve_clients(self._node)
        if owned is not None:
            ends = ports.OwnerEnds(*owned, self._rows_out, self._asking, self._validation)
            return ports.trains(self._base, ends, replicas, held, publishing, steps)
        assert self._rows_in is not None, f"{self._name} trains a further model, on rows of the owners"
        rows = ports.FurtherEnds(self._rows_in, self._serving)
        return ports.trains_further(self._base, rows, replicas, held, steps, publishing)

    def _open_checkpoint(self) -> None:
        """Count what is read of the checkpoint to resume from; the first training worker of a host verifies it."""
        resumed = self._setting.resumed
        if resumed is not None:
            self._node.count_checkpoint(lambda: resumed.read)
            if self._standing.commits:
                resumed.verify(self._board.raise_if_over)

    def _go_on(self) -> None:
        """Raise what ends a wait inside the engine. A worker that trains stops only where all replicas do."""
        (self._board.raise_if_over if self._training is None else self._board.raise_fault)()

    def _now(self, step: str) -> tuple[int, int]:
        """The training step and the version that a generate step samples for."""
        return self._contexts[step].training_step, self._contexts[step].policy_version

    def _drain(self, message: Message) -> None:
        if self._leaves_early is None:
            log.warning("drain request ignored: %s is a training worker and cannot be drained", self._name)
        else:
            self._leaves_early.drain()

    @property
    def _leaves_early(self) -> Answering | RolloutLoop | None:
        """Whose `drain` hands back what this worker has, and ends it; training workers have none."""
        return None if self._trains else self._serving if self._generating is None else self._generating.loop

    def _on_terminate(self, number: int, frame: object) -> None:
        """The machine may be about to be reclaimed: a worker that can hands back what it has first."""
        if self._terminated or self._leaves_early is None:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            os.kill(os.getpid(), signal.SIGTERM)
        # The endpoint's thread does it: a signal comes in the midst of whatever the main thread does, which may go
        # through what is to be handed back, or hold a lock that others wait for.
        self._terminated = self._told_to_leave = True

    def _leave_if_told(self, now: float) -> None:
        """Hand back what this worker has, once."""
        if self._told_to_leave and self._leaves_early is not None:
            self._told_to_leave = False
            self._leaves_early.drain()

    def _begin_again(self, why: str) -> None:
        """End this worker as a signal would, which lets it hand back what it has: its agent starts it again."""
        log.error("%s: this worker hands back what it has, and is started again", why)
        self._on_sigterm = signal.SIG_DFL  # also in a Slurm job
        self._on_terminate(signal.SIGTERM, None)

    def _meet(self) -> None:
        """Wait for the process of its episodes, if it has one, and for peers: a training worker for all replicas and
        one generating worker, others for all owners."""
        self._episodes.await_start()
        membership = self._node.membership
        if not membership.peers:
            return
        sources = [edge.source for edge in self._setting.plan.edges if edge.name == SAMPLES]

        def met() -> bool | None:
            # Those that the plan names may all have been replaced since by others, of whom the agent tells.
            there = (name for source in sources for name in in_pool(source, membership.peers))
            generating = [name for name in there if name not in self._setting.members]
            # A peer that has left again counts: an owner may have finished while the models were loaded here.
            needed = self._standing.members or self._owners()
            all_needed = all(membership.met(name) for name in needed if name != self._name)
            enough = not generating or not self._trains or any(map(membership.met, generating))
            return True if all_needed and enough else None

        self._board.until(
            met,
            name="first contact",
            peers=lambda: tuple(membership.peers),
            limit_s=self._setting.recipe.limits.connect_s,
            limit="limits.connect_s",
            progress=lambda: sum(map(membership.met, membership.peers)),
        )
        # A copy: the endpoint's thread adds peers meanwhile.
        log.info("connected to %s", ", ".join(filter(membership.present, list(membership.peers))))

    def _new_version(self, version: Version) -> None:
        """An engine has loaded new weights: write the metrics measured with the previous ones."""
        self._write_metrics()
        self._version, number = version, version.number
        self._node.facts |= {"version": number, "step": number}
        for context in self._contexts.values():
            context.training_step, context.policy_version = number, number

    def _new_weights(self, serving: Answering, version: Version) -> None:
        """The same of a worker that generates for others: it answers with this version from now on."""
        self._new_version(version)
        with self._board.condition:
            serving.version(version)

    def _new_step(self, t: int) -> None:
        """This worker runs a step for others, for the first time in a training step: write what was measured before."""
        assert self._serving is not None, "only a service runs steps for others"
        # A later term begins at an earlier training step, and what was waited for it belongs to none.
        version = Version(self._serving.term, t)
        if self._version is None or version > self._version:
            self._write_metrics()
            self._version = version
            self._node.facts |= {"step": t}
        for context in self._contexts.values():
            context.training_step, context.policy_version = t, t

    def _write_metrics(self) -> None:
        """Write the metrics; generation with version v is for training step v, which files call v + 1."""
        if self._setting.only_validates:
            # No training step waits for this worker, or is slower for it.
            self._metrics.drain()
        elif self._version is not None and self._version.number < self._setting.plan.batch.training_steps:
            self._writer.write(self._version.number + 1, self._version.term, self._metrics.drain())

    def _settle(self, trackers_s: float) -> None:
        """Finish what is saved and tracked, while this worker still answers: others wait by its progress."""
        if self._settled:
            return
        self._settled = True
        if self._training is not None:
            self._training.finish_saving()
        with self._board.shown("the trackers of the run", ()):
            self._trackers.close(trackers_s)

    def _leave(self, *, orderly: bool) -> None:
        self._node.facts |= {"state": "finished"}
        if self._generating is not None:
            self._generating.leave()
        self._episodes.close()
        if self._training is None:
            self._write_metrics()
        for close in (*(one.close for one in self._further.values()), *(one.close for one in self._inboxes.values())):
            close()
        hurry_s = self._setting.recipe.limits.drain_s / 4
        self._settle(FLUSH_S if orderly and self._board.stopping is None else hurry_s)
        self._node.close(orderly=orderly)
        if self._replicas is not None:
            self._replicas.close()
        # Weights are withdrawn last: after a failure another worker may still be reading them.
        if self._training is not None:
            self._training.close()
        self._writer.close()
        self._metrics.trace.close()
