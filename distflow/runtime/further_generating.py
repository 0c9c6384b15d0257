"""Generates with a further model at one worker: its engine, its weights, and the groups that it makes.

    for groups in w.ask("solve", w.generate("sample", w.leases())): …      # for the groups of the same worker
    for groups in w.generate("solve", w.requests("solve")): w.answer(groups)   # for those of others

Which groups start, and when weights are taken, is decided by `FurtherCore` (`distflow/exchange/further_core.py`).
Whoever has the worker's main thread advances the engine by a decode step at a time: the loop of the primary model's
engine, the loop over requests, or a training worker that waits for rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping

from distflow.data.batch import Batch
from distflow.data.prefixes import own_fields, prompts_complaint
from distflow.data.randomness import step_seed
from distflow.exchange.further_core import FurtherCore, FurtherTurn, WantedGroup
from distflow.flow.plan import Plan, StepPlan
from distflow.runtime.assembly import Setting, build_trajectories
from distflow.runtime.generate_step import GenerateStep
from distflow.runtime.metrics import MetricStore
from distflow.runtime.node import Node
from distflow.runtime.protocols import Engine, Tokenizer
from distflow.runtime.rollout_loop import judge_weights, load_weights
from distflow.runtime.trajectories import Trajectories
from distflow.types import Version, prefixed
from distflow.weights.receiver import WeightInbox


def wrong_prompts(plan: Plan, step: str, rows: Batch) -> str | None:
    """What is wrong with a group that a further model is to generate for; None: nothing."""
    prefix = next(one.prefix for one in plan.further_generation if one.name == step)
    wrong = prompts_complaint(
        own_fields(rows, prefix), plan.batch.samples_per_prompt, plan.recipe.data.max_prompt_tokens
    )
    field = prefixed("prompt_ids", prefix)
    writers = " and ".join(repr(one.name) for one in plan.steps if field in one.writes)
    return None if wrong is None else f"{wrong} — step {writers} writes {field} and what belongs to it"


class FurtherGenerating:
    """The step `plan`, with its fields as they are named in the flow. `seed`: of its samples.

    `publishers`: the workers that weights may come from.
    """

    def __init__(
        self,
        plan: StepPlan,
        engine: Engine,
        samples: Trajectories,
        inbox: WeightInbox,
        node: Node,
        metrics: MetricStore,
        core: FurtherCore,
        seed: int,
    ) -> None:
        self.plan = plan
        self.publishers: tuple[str, ...] = ()
        self._engine = engine
        self._samples = samples
        self._inbox = inbox
        self._node = node
        self._board = node.board
        self._metrics = metrics
        self._seed = seed
        self._core = core
        samples.on_news = self._board.wake
        self._rows: dict[Hashable, Batch] = {}
        """What the open groups are made from."""
        self._position: dict[Hashable, int] = {}
        self._answers: list[tuple[Hashable, Batch]] = []
        self._on_version: Callable[[Version], None] = lambda version: None

    # -- called under the worker's lock

    def ask(self, key: Hashable, rows: Batch, t: int, least: Version) -> None:
        """Make one whole group from its rows, for training step t, with this version or later ones.

        The rows have been checked (`wrong_prompts`).
        """
        position = int(rows.dense("group")[0])
        self._rows[key], self._position[key] = own_fields(rows, self.plan.prefix), position
        self._core.ask(WantedGroup(key, position, rows.rows, t, least))

    def cancel(self, keys: Iterable[Hashable]) -> None:
        """These groups are not wanted any more."""
        gone = set(keys)
        self._core.cancel(gone)
        for key in gone:
            self._rows.pop(key, None)
            self._position.pop(key, None)
        self._answers = [(key, answer) for key, answer in self._answers if key not in gone]

    def take(self) -> list[tuple[Hashable, Batch]]:
        """The groups that are whole since the last call, each with what the step writes, by the names in the flow."""
        answers, self._answers = self._answers, []
        return answers

    @property
    def has_answers(self) -> bool:
        """Whether there are groups to take."""
        return bool(self._answers)

    @property
    def busy(self) -> bool:
        """Whether the engine has something to decode."""
        return self._samples.asks and self._inbox.loaded is not None

    @property
    def something(self) -> bool:
        """Whether an idle worker has something to do here."""
        room = self._samples.room(self._engine.free_slots)
        idle = self._core.something(self._inbox.loaded, self._inbox.waiting, *room)
        return self.busy or self._samples.news or idle

    def has_room(self, samples: int) -> bool:
        """Whether so many samples could start now."""
        free = self._engine.free_slots - self._core.queued
        return free >= samples or not (self._core.running or self._core.queued)

    def waiting(self) -> tuple[str, tuple[str, ...]] | None:
        """What the next group waits for, and from whom; None: nothing."""
        awaited = self._core.awaited(self._inbox.loaded)
        if awaited is None:
            return (self._samples.environments, ()) if self._core.running and not self._samples.asks else None
        return f"weights of version {awaited.number} of {self.plan.model!r} or newer", self.publishers

    @property
    def loaded(self) -> Version | None:
        """The version in the engine."""
        return self._inbox.loaded

    @property
    def signs_of_life(self) -> float:
        """A number that changes while weights arrive over the network, or episodes are within their own time-outs."""
        return self._inbox.chunks + (time.monotonic() if self._core.running and not self._samples.asks else 0.0)

    def begin_term(self, term: int, begins: Mapping[int, int]) -> None:
        """Training has restarted (`begins`: training steps by term)."""
        self._inbox.begin_term(term, begins)
        self._core.begin_term(begins)

    # -- on the main thread

    def on_version(self, handler: Callable[[Version], None]) -> None:
        """Call `handler` with each version that the engine has taken."""
        self._on_version = handler

    def advance(self) -> None:
        """Take newer weights, abort and start groups, and decode a token of all that run."""
        of = f"/{self.plan.model}"
        judge_weights(self._inbox, self._engine, self._metrics, of)
        turn = self._turn()
        while turn.load or turn.abort:
            if turn.load:
                load_weights(self._inbox, self._engine, self._node, self._metrics, self._on_version, of)
            if turn.abort:
                self._engine.abort(turn.abort)
                self._samples.forget(turn.abort)
            turn = self._turn()
        for key in turn.start:
            if (rows := self._rows.get(key)) is not None:
                self._samples.submit(self._engine, self._samples.begin_rows(rows, self._seed))
        if self._core.running:
            self._decode()

    def close(self) -> None:
        """Give the engine back."""
        self._engine.close()

    # -- details

    def _turn(self) -> FurtherTurn:
        engine, inbox = self._engine, self._inbox
        room, spare = self._samples.room(engine.free_slots)
        with self._board.condition:
            return self._core.turn(room, engine.version, inbox.loaded, inbox.waiting, spare)

    def _decode(self) -> None:
        with self._metrics.timed("timing_s/gen"):
            outputs, wrong = self._samples.judge(self._samples.poll(self._engine), self._engine.version)
        self._samples.leave_out(wrong)
        further, done = self._samples.take(outputs)
        self._samples.submit(self._engine, further)
        with self._board.condition:
            whole = [(key, self._position[key]) for key in self._core.collect(done)]
        for key, position in whole:
            answer = self._written(self._samples.batch([position]))
            with self._board.condition:
                if self._rows.pop(key, None) is not None:
                    del self._position[key]
                    self._answers.append((key, answer))
        if outputs or self._samples.asks:
            self._node.work_done()

    def _written(self, rows: Batch) -> Batch:
        """Of whole samples, what the step writes, by the names in the flow."""
        seen = self.plan.as_it_sees()
        names = [*seen.writes, *(name for name in seen.may_write if name in rows)]
        return Batch({prefixed(name, self.plan.prefix): rows[name] for name in names})


def build_further(
    setting: Setting,
    step: GenerateStep,
    plan: StepPlan,
    engine: Engine,
    inbox: WeightInbox,
    tokenizer: Tokenizer,
    node: Node,
    metrics: MetricStore,
) -> FurtherGenerating:
    """What generates at this worker by the step of a further model: nothing runs yet."""
    samples, recipe = build_trajectories(setting, step, tokenizer, metrics), setting.recipe
    seed = step_seed(recipe.run.seed, plan.name)
    for_others = setting.plan.primary not in setting.me.generates
    core = FurtherCore(recipe.layout.refresh, for_others=for_others)
    further = FurtherGenerating(plan, engine, samples, inbox, node, metrics, core, seed)
    further.publishers = setting.home_of(str(plan.model))
    return further
