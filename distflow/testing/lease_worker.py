"""The generating worker of `lease_network`: the cores of a real one, a weight receiver, and an engine in virtual time.

Each token names the worker that produced it, and every prefix that any worker ever had is remembered: a lease that
comes with tokens must come with one of these, from one worker and what that one went on from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor

from distflow.exchange.lease_client import HolderCore
from distflow.exchange.messages import Lease, Message, Outgoing, OwnerMessage
from distflow.exchange.owner_links import Home
from distflow.exchange.rollout_core import FinishedGroup, RolloutCore, Turn
from distflow.testing.lease_scenario import Crash, Leave, Pause, Record, Scenario, prompt_at
from distflow.types import FinishReason, SampleOutput, Span, Version
from distflow.weights.in_place import InPlace
from distflow.weights.manifest import Manifest
from distflow.weights.receiver import WeightInbox

Tokens = list[int]


class Surroundings(Protocol):
    """The part of the network that a worker uses."""

    scenario: Scenario
    now: float
    version: int
    term: int
    begins: dict[int, int]
    owner_names: list[str]
    record: Record
    versions: dict[tuple[str, int], set[Version]]
    """All tokens with which a worker finished a position."""
    histories: dict[tuple[int, int], list[Tokens]]
    """All tokens that workers produced, by position and sample."""

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedule an event."""

    def send(self, sender: str, outgoing: Sequence[Outgoing]) -> None:
        """Send messages."""

    def tell_lost(self, worker: str, incarnation: int) -> None:
        """Report that a worker's process has ended."""

    def train_when_ready(self) -> None:
        """Begin the training step if it can."""


@dataclass(slots=True)
class _Running:
    """A group in the engine: `rate` tokens per second and sample, up to `length`."""

    lease: Lease
    began: float
    rate: float
    length: int
    version: Version
    samples: list[Tokens]
    spans: list[list[Span]]
    had: list[int] = field(default_factory=list)

    def grow(self, now: float, mark: int, version: Version) -> int:
        """Advance all samples to `now`; returns the number of new tokens."""
        new = 0
        for tokens, spans, had in zip(self.samples, self.spans, self.had, strict=True):
            goal = min(self.length, had + int((now - self.began) * self.rate + 1e-9))
            if goal > len(tokens):
                new += goal - len(tokens)
                spans.append(Span(version.term, version.number, len(tokens), goal))
                tokens += [mark] * (goal - len(tokens))
        return new

    def produced(self) -> int:
        """Tokens so far, of all samples."""
        return sum(map(len, self.samples))

    def outputs(self) -> list[SampleOutput]:
        """The samples in the form in which an engine returns them."""
        return [
            SampleOutput(
                self.lease.position,
                number,
                tuple(tokens),
                tuple(float(place) for place in range(len(tokens))),
                tuple(spans),
                self._reason(tokens),
            )
            for number, (tokens, spans) in enumerate(zip(self.samples, self.spans, strict=True))
        ]

    def versions(self) -> set[Version]:
        """The versions of its tokens, and the one it started under."""
        return {self.version, *(Version(span.term, span.version) for spans in self.spans for span in spans)}

    def _reason(self, tokens: Tokens) -> FinishReason:
        return "length" if len(tokens) == self.length else "abort"


class Memory:
    """Empty weights that stay readable, even after the term in which they were published."""

    def fetch(self, manifest: Manifest) -> Sequence[tuple[str, Tensor]]:
        """No tensors."""
        return ()

    def intact(self, manifest: Manifest) -> bool:
        """Always: nothing overwrites them."""
        return True

    def doubt(self, manifest: Manifest) -> None:
        """Nothing to do: nothing was found out about them."""

    def begin_term(self, term: int) -> None:
        """Nothing to do: they stay readable."""

    def close(self) -> None:
        """Nothing to release."""


class LeaseWorker:
    """A generating worker: its cores, a weight receiver, and an engine that takes time."""

    def __init__(self, network: Surroundings, number: int) -> None:
        self.network = network
        self.number = number
        self.name = f"rollout/{number}"
        self.incarnation = -1
        self.alive = False
        self.leaving = False
        self.paused_until = 0.0
        self.term = 0
        self.version = Version(0, 0)
        """Version of the weights in its engine."""
        self.fetched = False
        """Whether the weights announced can be loaded."""
        self.running: dict[int, _Running] = {}
        self.mail: list[Message] = []
        self.judging = False
        """Whether it computes the reward of a group, and does nothing else meanwhile."""
        self.inbox: WeightInbox
        self.holder: HolderCore
        self.core: RolloutCore

    def start(self) -> None:
        """Start an incarnation."""
        scenario = self.network.scenario
        self.incarnation += 1
        self.alive, self.judging, self.fetched = True, False, False
        self.term = self.network.term
        self.inbox = WeightInbox(InPlace(Memory()))
        self.inbox.begin_term(self.term, self.network.begins)
        self.inbox.announce(_manifest(Version(self.term, self.network.version)))
        self.inbox.load(self)
        self.running.clear()
        self.mail.clear()
        self.holder = HolderCore(
            self.name,
            self.incarnation,
            self.network.owner_names,
            scenario.settings,
            home=Home(self.number),
            term=self.network.term,
            seed=scenario.seed * 1000 + self.number,
        )
        self.core = RolloutCore(self.holder)
        self._generate_for(self.network.version)
        self.work()

    def die(self, crash: Crash) -> None:
        """Crash."""
        if not self.alive or self.leaving:
            return
        self.alive = False
        if crash.noticed:
            self.network.after(0.5, partial(self.network.tell_lost, self.name, self.incarnation))
        if crash.restart_s is not None:
            self.network.after(crash.restart_s, self.start)

    def pause(self, pause: Pause) -> None:
        """Suspend it."""
        self.paused_until = max(self.paused_until, self.network.now + pause.seconds)
        self.network.after(pause.seconds, self._resume)

    def leave(self, _leave: Leave) -> None:
        """Be drained."""
        if not self.alive or self.leaving:
            return
        if self.paused:
            self.network.after(1.0, partial(self.leave, _leave))
            return
        outputs = self._outputs()
        self.leaving = True
        self.running.clear()
        self.network.send(self.name, self.core.hand_back(outputs, self.network.now).train)

    @property
    def paused(self) -> bool:
        """Whether it is suspended now."""
        return self.network.now < self.paused_until

    @property
    def frozen(self) -> bool:
        """Whether it leaves its engine alone to train: it knows that the set of its training step is closed."""
        return not self.core.endless and self.core.over and not self.holder.run_finished

    def hear(self, message: Message) -> None:
        """Receive a message; a suspended worker reads it later."""
        if self.alive and self.paused:
            self.mail.append(message)
        elif self.alive and isinstance(message, OwnerMessage) and message.term == self.term:
            # A message of another term: from a process that has ended, or that is not known yet.
            self.network.send(self.name, self.holder.handle(message, self.network.now))
            self.work()

    def tick(self) -> None:
        """Let the core act on the time that has passed."""
        if not self.alive or self.paused:
            return
        if not (self.frozen or self.judging or self.leaving):
            self._report()
        self.network.send(self.name, self.holder.tick(self.network.now))
        self.work()

    def begin_term(self, term: int) -> None:
        """The owners have restarted; a little later their weights arrive, too."""
        network = self.network
        if not self.alive or self.leaving or term != network.term:
            return
        if self.paused:
            network.after(1.0, partial(self.begin_term, term))
            return
        self.term = term
        before = set(self.holder.held())
        begins, names = network.begins, network.owner_names
        self.inbox.begin_term(term, begins)
        out = self.holder.begin_term(term, names, begins, self.inbox.loaded, network.now)
        network.record.kept += len(before & set(self.holder.held()))
        self._generate_for(network.version)
        network.send(self.name, out)
        network.after(0.5 + network.scenario.load_s, partial(self.refresh, Version(term, network.version)))
        network.after(network.scenario.step_s, self._go_on)

    def refresh(self, version: Version) -> None:
        """New weights are announced and loaded a little later; a colocated worker generates again."""
        if self.alive:
            self.inbox.announce(_manifest(version))
            self._generate_for(version.number)
            self.network.after(self.network.scenario.load_s, self._fetch)

    def begin_update(self, version: Version) -> None:
        """What was generated so far came from the former weights."""
        self._outputs()
        self.version = version

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """There are no tensors."""

    def end_update(self) -> None:
        """The engine continues."""

    def _fetch(self) -> None:
        self.fetched = self.inbox.waiting
        self._go_on()

    def _generate_for(self, step: int) -> None:
        self.core.until(step if self.network.scenario.colocated else None)

    def work(self) -> None:
        """Do what the worker's loop does before a decode step."""
        self.holder.take_acked()
        if self.leaving:
            self._go_when_done()
        elif self.frozen:
            self.network.train_when_ready()
        elif not (self.judging or self.paused) and self.core.open():
            turn = self._turn()
            while turn.load or turn.abort:
                if turn.load:
                    self.inbox.load(self)
                    self.fetched = False
                for position in turn.abort:
                    del self.running[position]
                turn = self._turn()
            for lease in turn.start:
                self.begin(lease)

    def _turn(self) -> Turn:
        newer = self.fetched and self.inbox.waiting
        turn = self.core.turn(self._free_slots(), self.version, self.inbox.loaded, newer, self.network.now)
        self.network.send(self.name, turn.messages.train)
        return turn

    def _free_slots(self) -> int:
        scenario = self.network.scenario
        return (scenario.groups_at_once - len(self.running)) * scenario.settings.samples_per_prompt

    def begin(self, lease: Lease) -> None:
        """Start a group, or continue one."""
        scenario, record = self.network.scenario, self.network.record
        position, samples = lease.position, scenario.settings.samples_per_prompt
        assert position not in self.running, f"{self.name} started {position} twice"
        tokens: list[Tokens] = [[] for _ in range(samples)]
        spans: list[list[Span]] = [[] for _ in range(samples)]
        for sample in lease.begun:
            known = self.network.histories[position, sample.sample]
            assert any(tuple(had[: len(sample.token_ids)]) == sample.token_ids for had in known), "tokens were mixed"
            assert sample.logprobs == tuple(map(float, range(len(sample.token_ids)))), "log-probs were mixed"
            tokens[sample.sample], spans[sample.sample] = list(sample.token_ids), list(sample.spans)
            record.continued += len(sample.token_ids)
        record.started += 1
        record.copies += lease.copy
        for number, had in enumerate(tokens):
            self.network.histories.setdefault((position, number), []).append(had)
        seconds = scenario.seconds(position) * scenario.slowness(self.number)
        rate, length = scenario.tokens / seconds, scenario.tokens
        run = _Running(lease, self.network.now, rate, length, self.version, tokens, spans, list(map(len, tokens)))
        self.running[position] = run
        self.core.report({position: 1}, None, self.inbox.loaded)
        left = max(length - had for had in run.had) / rate
        self.network.after(left, partial(self.end, run, self.incarnation))

    def end(self, run: _Running, incarnation: int) -> None:
        """Finish a group."""
        position = run.lease.position
        current = incarnation == self.incarnation and position in self.running and self.running[position] is run
        if not self.alive or not current:
            return
        if self.frozen or self.paused or self.judging:
            self.network.after(0.25, partial(self.end, run, incarnation))
            return
        self._grow(run)
        del self.running[position]
        (whole,) = self.core.collect(run.outputs())
        self.network.send(self.name, self.core.ask(self._free_slots(), self.network.now).train)
        step_s = self.network.scenario.step_s
        if step_s:
            self.judging = True
            self.network.after(step_s, partial(self._deliver, whole, run.versions(), incarnation))
        else:
            self._deliver(whole, run.versions(), incarnation)

    def _deliver(self, whole: FinishedGroup, versions: set[Version], incarnation: int) -> None:
        if not self.alive or incarnation != self.incarnation:
            return
        self.judging = False
        position, scenario = whole.lease.position, self.network.scenario
        self.network.versions[self.name, position] = versions
        oldest = min(versions)
        nbytes = scenario.settings.group_bytes(len(prompt_at(position).prompt_ids))
        reason = scenario.dropped(position)
        # A group is as long as it takes, whatever tokens are sent.
        self.holder.report(position, round(100 * scenario.seconds(position)), oldest.number)
        self.network.send(self.name, self.holder.finished(position, oldest, nbytes, reason, self.network.now))
        self.work()

    def _report(self) -> None:
        """Do what the worker's loop does after a decode step."""
        outputs = self._outputs()
        progress = {position: max(1, run.produced()) for position, run in self.running.items()}
        due = self.core.wants_partials(self.network.now)
        self.core.report(progress, outputs if due else None, self.inbox.loaded)

    def _outputs(self) -> list[SampleOutput]:
        """What all samples have now."""
        for run in self.running.values():
            self._grow(run)
        return [output for run in self.running.values() for output in run.outputs()]

    def _grow(self, run: _Running) -> None:
        mark = 100 * self.number + self.incarnation
        self.network.record.produced += run.grow(self.network.now, mark, self.version)

    def _resume(self) -> None:
        if not self.paused and self.alive:
            mail, self.mail = self.mail, []
            for message in mail:
                self.hear(message)
            self.work()

    def _go_on(self) -> None:
        if self.alive and not self.paused:
            self.work()

    def _go_when_done(self) -> None:
        if not self.core.released:
            return
        self.network.send(self.name, self.holder.leave())
        self.alive = False
        self.network.after(0.5, partial(self.network.tell_lost, self.name, self.incarnation))


def _manifest(version: Version) -> Manifest:
    return Manifest("policy", version, "", 0, (), ())
