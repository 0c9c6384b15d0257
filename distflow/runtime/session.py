"""The session of one worker process: build the worker, meet the peers, run the script, leave in order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

import torch

from distflow.comm.collective import LOOPBACK
from distflow.comm.endpoint import Endpoint
from distflow.comm.membership import Membership
from distflow.comm.message import Message
from distflow.comm.processes import process_alive
from distflow.errors import RunStopped, StepError
from distflow.exchange.sample_channel import InboundSamples, OutboundSamples
from distflow.flow.memory import frame_bytes
from distflow.flow.plan import digest_parts
from distflow.log import logger
from distflow.runtime import ports
from distflow.runtime.assembly import (
    Setting,
    build_contexts,
    build_engine,
    build_models,
    build_tokenizer,
    build_trace,
    device_of,
    join_models,
)
from distflow.runtime.disk import Disk
from distflow.runtime.generating import Generating, OffloadedModels, Turns, build_trajectories, build_turns
from distflow.runtime.lockstep import Rounds
from distflow.runtime.metrics import MetricStore, MetricWriter, PeakMemory
from distflow.runtime.node import CheckpointReports, Greeting, Hosts, Lanes, Node, identity
from distflow.runtime.ports import Base
from distflow.runtime.process_record import note_term
from distflow.runtime.protocols import Alone, Backend, Tokenizer
from distflow.runtime.replicas import Replicas
from distflow.runtime.rollout_loop import RolloutLoop
from distflow.runtime.steps import SAMPLES, StepContext, StepRunner, Worker
from distflow.runtime.training import Training
from distflow.runtime.waits import WaitBoard
from distflow.runtime.weight_publisher import BEGINS, OWNERS, TERM, read_facts
from distflow.types import Version, WorkerName
from distflow.weights.receiver import WeightInbox
from distflow.weights.transport import InprocLink

log = logger(__name__)


class Session:
    """All parts of one worker, and the order in which they start and stop. `run` is called once."""

    def __init__(self, setting: Setting, incarnation: int) -> None:
        self._setting = setting
        self._name = str(setting.me.name)
        self._incarnation = incarnation
        self._trains = self._name in setting.owners
        self._generates = setting.me.generates is not None
        self._board = WaitBoard()
        self._hosts = Hosts(setting)
        most = frame_bytes(setting.recipe, setting.plan.response_tokens)
        endpoint = Endpoint(
            self._name, incarnation, self._hosts.roster, listener=self._hosts.listener, max_frame_bytes=most
        )
        me = identity(self._name, incarnation, setting.plan.digest, digest_parts(setting.plan), setting.document.host)
        self._node = Node(endpoint, Membership(me, _peers(setting), process_alive, read_facts), self._board)
        self._disk = Disk()
        self._metrics = MetricStore(build_trace(setting, incarnation, self._disk))
        self._disk.count = self._metrics.add
        self._replicas = self._make_replicas() if self._trains else None
        peak = PeakMemory(device_of(setting))
        self._writer = MetricWriter(setting.run_dir, setting.me.name.file_stem, self._disk, peak.take)
        self._base = Base(
            setting,
            self._node,
            self._hosts,
            Lanes(endpoint),
            self._disk,
            self._metrics,
            self._writer,
            InprocLink(setting.plan.primary),
        )
        self._inbox: WeightInbox | None = None
        self._version: Version | None = None
        """Version of the weights that samples come from, on workers that do not train."""
        self._owners: Callable[[], tuple[str, ...]] = lambda: setting.owners
        self._contexts: Mapping[str, StepContext] = {}
        self._models: Mapping[str, Backend] = {}
        self._rounds: Rounds | None = None
        self._turns = Turns()
        self._training: Training | None = None
        self._generating: Generating | None = None
        self._terminated = False
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
                self._replicas.connect(device_of(self._setting), even_alone=self._rounds is not None)
            join_models(self._setting, self._models)
            script(worker)
            self._check_that_all_is_done()
            self._note_term()
            self._part()
            orderly = True
        except RunStopped:
            if self._training is not None:
                self._training.save_now()
                self._training.dismiss()
            self._part()
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
        generates = self._generating is not None and self._training is None and self._generating.loop.open()
        trains = self._training is not None and not self._training.finished
        if generates or trains:
            loop = "w.training_steps()" if trains else "w.leases()"
            raise StepError(
                f"the script of {self._name} returned before the run was over — it must go on until the loop over "
                f"{loop} ends by itself"
            )

    def _note_term(self) -> None:
        """Record the term this worker was done in: if training restarts, the agent knows whether it is needed."""
        over_in = None if self._generating is None else self._generating.loop.over_in
        if over_in is not None:
            note_term(self._setting.run_dir / "workers" / f"{self._setting.me.name.file_stem}.yaml", over_in)

    def _part(self) -> None:
        if self._replicas is not None:
            self._replicas.leave()

    def _register(self, tokenizer: Tokenizer) -> tuple[InboundSamples | None, OutboundSamples | None]:
        """Set up what receives messages from the start: the owner's side and the holder's side."""
        setting = self._setting
        inbound = ports.owns(self._base, tokenizer) if self._trains else None
        outbound = None
        if self._generates:
            self._inbox = ports.reads(self._base)
            outbound = ports.holds(self._base, self._inbox, inbound)
        if outbound is not None and not self._trains:
            core = outbound.core
            self._owners = lambda: core.owners
        if self._trains and setting.document.owners is not None:
            begins = list(setting.begins.items())
            self._node.facts |= {OWNERS: list(setting.owners), TERM: setting.document.term, BEGINS: begins}
        Greeting(self._node, self._hosts, self._is_peer)
        CheckpointReports(self._node, self._hosts.here)
        self._node.on_agent("drain", self._drain)
        self._node.counts = self._metrics.counts
        if self._trains:
            # Everything a trainer measures shows progress, each micro-batch too: generating workers wait by it.
            self._node.count_work(lambda: self._metrics.recorded)
        return inbound, outbound

    def _build(self) -> Worker:
        setting = self._setting
        if setting.recipe.run.deterministic:
            torch.use_deterministic_algorithms(True)
            # Without it, PyTorch refuses matrix products on a GPU.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        tokenizer = build_tokenizer(setting)
        inbound, outbound = self._register(tokenizer)
        # The worker answers messages from here on; models may take minutes to load.
        self._node.start()
        self._open_checkpoint()
        device = device_of(setting)
        models = build_models(setting, device, self._replicas or Alone())
        if self._replicas is not None and any(model.lockstep for model in models.values()):
            no_progress_s = setting.recipe.limits.no_progress_s
            self._rounds = Rounds(models, self._replicas, self._board, self._metrics, no_progress_s)
        self._models = models if self._rounds is None else self._rounds.models
        aside = OffloadedModels(models, wanted=setting.me.offload and device.startswith("cuda"))
        engine = build_engine(setting, device, self._incarnation, self._go_on) if outbound is not None else None
        contexts = build_contexts(setting, self._metrics, self._models, engine, tokenizer)
        self._contexts = contexts
        steps = StepRunner(self._name, setting.me.steps, contexts)
        if outbound is not None and engine is not None and self._inbox is not None:
            samples = build_trajectories(setting, steps.generate_step(), tokenizer)
            loop = RolloutLoop(engine, samples, outbound, self._inbox, self._node, self._metrics, setting.recipe)
            if self._trains:
                self._turns = build_turns(setting, engine, self._models, self._base.link, self._inbox, self._metrics)
                aside.restore()
            loop.on_version(self._turns.taken if self._trains else self._new_version)
            edge = setting.plan.edge(SAMPLES)
            self._generating = Generating(loop, outbound, samples, engine, self._node, edge, self._metrics, self._turns)
        if inbound is not None and self._replicas is not None:
            held = ports.HeldModels(self._models, contexts, self._rounds, self._turns)
            self._training = ports.trains(self._base, inbound, self._replicas, held, self._inbox)
        return Worker(setting.me.name, steps, self._generating, self._training)

    def _open_checkpoint(self) -> None:
        """Count what is read of the checkpoint to resume from; the first training worker of a host verifies it."""
        resumed = self._setting.resumed
        if resumed is not None:
            self._node.count_checkpoint(lambda: resumed.read)
            if self._hosts.leads(self._name):
                resumed.verify(self._board.raise_if_over)

    def _make_replicas(self) -> Replicas:
        address, limits = self._setting.document.address or LOOPBACK, self._setting.recipe.limits
        return Replicas(self._name, self._setting.owners, self._node, limits, address)

    def _go_on(self) -> None:
        """Raise what ends a wait inside the engine. A worker that trains stops only where all replicas do."""
        if self._training is None:
            self._board.raise_if_over()
        else:
            self._board.raise_fault()

    def _is_peer(self, name: str) -> bool:
        """Whether a worker that joins later is a peer: for a training worker, every generating one."""
        source = self._setting.plan.edge(SAMPLES).source
        return self._trains and name != self._name and WorkerName.parse(name).pool == source

    def _drain(self, message: Message) -> None:
        if self._generating is None or self._trains:
            log.warning("drain request ignored: %s is a training worker and cannot be drained", self._name)
            return
        self._generating.loop.drain()

    def _on_terminate(self, number: int, frame: object) -> None:
        """The machine may be about to be reclaimed: a generating worker hands back its leases first, if it can."""
        if self._terminated or self._generating is None or self._trains:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            os.kill(os.getpid(), signal.SIGTERM)
        self._terminated = True
        if self._generating is not None:
            self._generating.loop.drain()

    def _meet(self) -> None:
        """Wait for peers: a training worker for all replicas and one generating worker, others for all owners."""
        membership = self._node.membership
        if not membership.peers:
            return
        generating = [name for name in membership.peers if name not in self._setting.owners]

        def met() -> bool | None:
            # A peer that has left again counts: an owner may have finished while the models were loaded here.
            all_owners = all(membership.met(name) for name in self._owners() if name != self._name)
            enough = not generating or not self._trains or any(map(membership.met, generating))
            return True if all_owners and enough else None

        self._board.until(
            met,
            name="first contact",
            peers=tuple(membership.peers),
            limit_s=self._setting.recipe.limits.connect_s,
            limit="limits.connect_s",
            progress=lambda: sum(map(membership.met, membership.peers)),
        )
        log.info("connected to %s", ", ".join(name for name in membership.peers if membership.present(name)))

    def _new_version(self, number: int) -> None:
        """The engine has loaded new weights: write the metrics measured with the previous ones."""
        self._write_metrics()
        self._version = self._inbox.loaded if self._inbox is not None else None
        self._node.facts |= {"version": number, "step": number}
        for context in self._contexts.values():
            context.training_step, context.policy_version = number, number

    def _write_metrics(self) -> None:
        """Write the metrics; generation with version v is for training step v, which files call v + 1."""
        if self._version is not None and self._version.number < self._setting.plan.batch.training_steps:
            self._writer.write(self._version.number + 1, self._version.term, self._metrics.drain())

    def _leave(self, *, orderly: bool) -> None:
        self._node.facts |= {"state": "finished"}
        if self._generating is not None:
            self._generating.leave()
            if self._training is None:
                self._write_metrics()
        if self._inbox is not None:
            self._inbox.close()
        if self._training is not None:
            # While this worker still answers: others wait by its progress.
            self._training.finish_saving()
        self._node.close(orderly=orderly)
        if self._replicas is not None:
            self._replicas.close()
        # Weights are withdrawn last: after a failure another worker may still be reading them.
        if self._training is not None:
            self._training.close()
        self._writer.close()
        self._metrics.trace.close()


def _peers(setting: Setting) -> list[str]:
    """The workers that this one exchanges samples or weights with."""
    me, plan = str(setting.me.name), setting.plan
    if me not in setting.owners:
        return list(setting.owners)
    lost = set(plan.owners) - set(setting.owners)
    others = [worker for worker in plan.workers if str(worker.name) != me and str(worker.name) not in lost]
    return [str(w.name) for w in others if w.generates is not None or str(w.name) in setting.owners]
