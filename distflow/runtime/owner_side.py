"""The owner's side of a training worker: its ledgers, the messages that reach them, and their prompts, read ahead.

`build_inbound` wires the owner's core (`distflow/exchange/owner.py`) to the worker.

`PromptReader` reads prompts on a thread of its own, because data sources and tokenizers may be slow. The core asks for
the prompt of a position with `prompt_at`, under the worker's lock, and gets None while it has not been read. Positions
that were asked for are read first; then those that each ledger will need next, lowest first, until enough prompts are
in memory. Which positions exist and which worker gets them is decided elsewhere.

Only this thread calls the source and the tokenizer. An exception they raise is kept in place of the prompt and becomes
the worker's fault when that prompt is asked for: a prompt that is never needed does not end the run.

Example, 2 ledgers: prompt_at(0) → None; 0 is read, then 2, 4, … (the rest of its ledger) → `arrived` → prompt_at(0).
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from distflow.config.data_schema import DataConfig, DifficultyConfig
from distflow.config.plugins import TOKENIZER
from distflow.data.difficulty import Difficulty, DifficultyRule
from distflow.data.loading import open_source
from distflow.data.order import PromptOrder, PromptSettings
from distflow.data.responses import Reading
from distflow.errors import DistflowError, Problem, UserError
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.ledgers import merge_snapshots
from distflow.exchange.messages import Lease, LeasePrompt
from distflow.exchange.own_samples import OwnSamples, samples_of
from distflow.exchange.owner import OwnerCore
from distflow.exchange.sample_channel import InboundSamples
from distflow.flow.memory import MIB, group_bytes
from distflow.flow.plan import Plan
from distflow.flow.resolve import check_step, resolve
from distflow.flow.step import READ, reads_all_turns, response_tokens
from distflow.log import logger
from distflow.runtime.assembly import Setting
from distflow.runtime.node import Lanes, Node
from distflow.runtime.protocols import Tokenizer
from distflow.runtime.steps import user_code
from distflow.types import GivenResponse, LeaseKind, Prompt

READ_AHEAD = 64
"""Fewest prompts that are read ahead; otherwise those of two training steps."""
AHEAD_BYTES = 64 << 20
"""Most memory for prompts that have not been asked for yet."""
GATHER_S = 0.02
"""While several prompts are waited for, `arrived` is called this often, and once more for the last of them."""
LOOK_EVERY_S = 1.0
"""How often an idle reader checks whether it was closed; it is woken when there is something to read."""
CLOSE_S = 1.0
"""How long to wait at the end for the prompt being read: a slow source must not delay it."""
_TOKEN_BYTES, _PROMPT_BYTES = 40, 1024
"""Rough memory of a prompt: per token, and besides its tokens and text."""

Read = LeasePrompt | Exception
log = logger(__name__)


@dataclass(slots=True)
class _Ledger:
    """Prompts of one ledger that have been read, by rising position, and the position to read next."""

    next: int
    read: deque[tuple[int, Read]] = field(default_factory=deque)


class PromptReader:
    """The reader's thread calls `read(position)`, and `arrived()` when prompts that were asked for have been read.

    `stride`, the number of ledgers, is the distance between positions of one ledger. At most `ahead` prompts are read
    before they are asked for. `fault` gets the exception of a prompt that could not be read. A handler of `arrived`
    calls `take_news`.
    """

    def __init__(
        self,
        read: Callable[[int], LeasePrompt],
        stride: int,
        ahead: int,
        arrived: Callable[[], None],
        fault: Callable[[Exception], None],
    ) -> None:
        self._read = read
        self._stride = stride
        self._most = ahead
        self._arrived = arrived
        self._fault = fault
        self._changed = threading.Condition()
        self._ledgers: dict[int, _Ledger] = {}
        self._order: list[int] = []
        """Heap of positions to read ahead, the lowest first; some may be out of date."""
        self._wanted: dict[int, None] = {}
        """Positions that were asked for and have not been read yet."""
        self._news = False
        """Whether something that was asked for has been read since the last `take_news`."""
        self._told_at = 0.0
        self._count = self._bytes = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="prompts", daemon=True)

    def start(self) -> None:
        """Start to read what is asked for."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def prompt_at(self, position: int) -> LeasePrompt | None:
        """The prompt of a position, each once; None if it has not been read, and `arrived` will follow.

        The positions of a ledger are asked for in rising order; prompts in between are dropped.
        """
        with self._changed:
            ledger = self._ledgers.setdefault(position % self._stride, _Ledger(position))
            while ledger.read and ledger.read[0][0] < position:
                self._forget(ledger)
            if not ledger.read or ledger.read[0][0] != position:
                self._want(ledger, position)
                return None
            found = ledger.read[0][1]
            if not isinstance(found, Exception):
                self._forget(ledger)
                self._changed.notify_all()
                return found
        self._fault(found)
        return None

    def take_news(self) -> bool:
        """Whether something that was asked for has been read since the last call."""
        with self._changed:
            news, self._news = self._news, False
            self._told_at = time.monotonic()
            return news

    def _want(self, ledger: _Ledger, position: int) -> None:
        if not self._wanted:
            self._told_at = time.monotonic()
        if position not in self._wanted:
            self._wanted[position] = None
            ledger.next = max(ledger.next, position)
            self._changed.notify_all()

    def _forget(self, ledger: _Ledger) -> None:
        self._count -= 1
        self._bytes -= _size(ledger.read.popleft()[1])

    # -- the reader's thread

    def _run(self) -> None:
        try:
            self._read_on()
        except Exception as error:  # our own error: those who wait for prompts must not wait forever
            self._fault(error)

    def _read_on(self) -> None:
        while (position := self._await()) is not None:
            try:
                found: Read = self._read(position)
            except Exception as error:  # of the user's code: raised where the prompt would be used
                found = error
            if self._keep(position, found):
                self._arrived()

    def _await(self) -> int | None:
        """Wait for the next position to read; None when closed."""
        with self._changed:
            while not self._closed:
                position = self._next()
                if position is not None:
                    return position
                self._changed.wait(LOOK_EVERY_S)
        return None

    def _next(self) -> int | None:
        if self._wanted:
            return next(iter(self._wanted))
        if self._count >= self._most or self._bytes >= AHEAD_BYTES:
            return None
        while self._order:
            position = self._order[0]
            if self._ledgers[position % self._stride].next == position:
                return position
            heapq.heappop(self._order)
        return None

    def _keep(self, position: int, found: Read) -> bool:
        """Keep what was read; return whether to call `arrived`."""
        with self._changed:
            ledger = self._ledgers[position % self._stride]
            (ledger.read.appendleft if position < ledger.next else ledger.read.append)((position, found))
            self._count += 1
            self._bytes += _size(found)
            if position >= ledger.next and not isinstance(found, Exception):
                ledger.next = position + self._stride
                heapq.heappush(self._order, ledger.next)
            if position in self._wanted:
                del self._wanted[position]
                self._news = True
            return self._news and (not self._wanted or time.monotonic() - self._told_at >= GATHER_S)


def _size(found: Read) -> int:
    if isinstance(found, Exception):
        return 0
    return _PROMPT_BYTES + _TOKEN_BYTES * len(found.prompt_ids) + len(found.prompt_text) + len(found.task)


def build_prompts(
    data: DataConfig, seed: int, tokenizer: Tokenizer, where: str, reading: Reading | None = None
) -> PromptOrder:
    """Build the source; raises StepError, with `where`, for exceptions of the source, else UserError."""
    settings = PromptSettings(
        seed, data.shuffle, data.chat, data.max_prompt_tokens, data.overlong, data.chat_template_args
    )
    with user_code(f"{where}, when it was made with {data.with_}"):
        sources = [open_source(name, source, resolve) for name, source in data.sources.items()]
        return PromptOrder(sources, tokenizer, settings, reading)


def reading_of(plan: Plan) -> Reading | None:
    """How the flow makes samples of the rows of the data; None where a model generates them."""
    step = plan.reads
    if step is None:
        return None
    function = resolve(step.call)
    check_step(function, step)
    own = tuple(name for name in step.writes if name not in READ)
    longest = int(response_tokens(step.settings))
    make, samples = partial(function, **step.settings), plan.batch.samples_per_prompt
    return Reading(make, step.name, samples, longest, own, reads_all_turns(step.settings))


def first_prompt(plan: Plan, key_where: str) -> tuple[Prompt | None, list[Problem]]:
    """The prompt at position 0, with which a run would begin, or what is wrong with the source or the tokenizer.

    `key_where`: where the recipe names the data source.
    """
    recipe = plan.recipe
    where = f"data source {recipe.data.shown}"
    try:
        tokenizer = resolve(TOKENIZER)(recipe.models[plan.primary].model_dump())
        prompts = build_prompts(recipe.data, recipe.run.seed, tokenizer, where, reading_of(plan))
        with user_code(f"{where}, at prompt position 0"):
            return prompts.prompt(0), []
    except UserError as error:
        message, cure = str(error), "correct data.source, data.with or the tokenizer"
    except DistflowError as error:
        message, cure = f"it fails:\n{error}", "the workers would fail in the same way"
    return None, [Problem(key_where, "data.source", message, cure)]


def lessors(owners: Sequence[str], kind: LeaseKind) -> list[str]:
    """Those that lease groups of a kind: for validation the first owner alone."""
    return list(owners[:1] if kind == "val" else owners)


def lease_settings(setting: Setting) -> LeaseSettings:
    """The settings of the lease protocol that the recipe implies."""
    recipe, batch = setting.recipe, setting.plan.batch
    new_tokens = setting.plan.response_tokens
    samples, later = batch.samples_per_prompt, setting.plan.later_bytes
    owner = setting.me if str(setting.me.name) in setting.plan.owners else setting.plan.owner_plan
    return LeaseSettings(
        ledgers=batch.ledgers,
        groups_per_ledger=batch.groups_per_ledger,
        samples_per_prompt=samples,
        max_staleness=batch.max_staleness,
        training_steps=batch.training_steps,
        memory_bytes=owner.sample_memory_mb * MIB,
        group_bytes=lambda prompt_tokens: group_bytes(samples, prompt_tokens, new_tokens, later),
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        seed=recipe.run.seed,
        max_refills=batch.max_refills,
        announce_closed=bool(owner.generates),
        hedging=recipe.layout.hedging and setting.plan.origin.allows("repeatable"),
        host_silence_s=recipe.limits.host_silence_s,
        partial_rollouts=recipe.layout.partial_rollouts and setting.plan.origin.allows("replay"),
    )


def build_inbound(setting: Setting, node: Node, lanes: Lanes, tokenizer: Tokenizer) -> InboundSamples:
    """Wire the owner's side: its ledgers, new or from the checkpoint, and the messages that reach them."""
    name, plan = str(setting.me.name), setting.plan
    where = f"data source {setting.recipe.data.shown} on {name}"
    order = build_prompts(setting.recipe.data, setting.recipe.run.seed, tokenizer, where, reading_of(plan))
    given: dict[int, Sequence[GivenResponse]] = {}

    def read(position: int) -> LeasePrompt:
        with user_code(f"{where}, at prompt position {position}"):
            prompt = order.prompt(position)
        if plan.reads is not None:
            given[position] = prompt.responses
        return LeasePrompt(order.uid(position), prompt.token_ids, prompt.text, prompt.task)

    ledgers = setting.standing.ledgers
    snapshot = None
    if setting.resumed is not None:
        # The parts of all previous owners: their number may have changed.
        snapshot = merge_snapshots(setting.resumed.ledgers())
    term = setting.document.term
    ahead = max(READ_AHEAD, 2 * plan.batch.groups_per_ledger * len(ledgers))

    reader = PromptReader(
        read, plan.batch.ledgers, ahead, lambda: tell_of_prompts(node, inbound, reader), node.board.fault
    )
    prompts = reader.prompt_at
    settings = lease_settings(setting)
    if setting.recipe.data.difficulty is not None:
        with user_code(where):
            settings = replace(settings, difficulty=_difficulty(setting.recipe.data.difficulty, order, setting))
    core = OwnerCore(name, settings, list(ledgers), prompts, term=term, snapshot=snapshot, begins=setting.begins)
    edges = [plan.edge(port.edge) for port in setting.me.port("asks")]
    asked_for = dict.fromkeys(f for e in edges if e.when != "before custody" for f in e.fields if "*" not in f)
    about = (core, lanes.post, plan.later_bytes, tuple(asked_for))
    if plan.reads is None:
        inbound = InboundSamples(*about)
    else:
        inbound = OwnSamples(*about, make=lambda leases: samples_of(leases, _popped(given, leases)))
    connect_owner(node, lanes, inbound, reader)
    node.on_tick(partial(_count_looks, core, order, [0]))
    return inbound


def _difficulty(config: DifficultyConfig, order: PromptOrder, setting: Setting) -> Difficulty:
    """What is known of the prompts' pass rates, as the checkpoint has it."""
    lag, saved = setting.plan.batch.max_staleness, None if setting.resumed is None else setting.resumed.difficulty()
    assert lag is not None, "refused with the plan (flow/data_check.py)"
    about = setting.recipe.run.seed, order.count(), lag
    return Difficulty(DifficultyRule.of(config), *about, setting.start.number, saved)


def _count_looks(core: OwnerCore, order: PromptOrder, counted: list[int], now: float) -> None:
    """Count prompts that were looked at as progress: a run that resumes may look at very many before it has one."""
    looked = order.looked_at
    core.progress_count += looked - counted[0]
    counted[0] = looked


def _popped(
    given: dict[int, Sequence[GivenResponse]], leases: Sequence[Lease]
) -> Mapping[int, Sequence[GivenResponse]]:
    """The responses of these leases, which are kept no longer."""
    return {lease.position: given.pop(lease.position) for lease in leases}


def tell_of_prompts(node: Node, inbound: InboundSamples, reader: PromptReader) -> None:
    """Lease the prompts that have been read since the last call."""
    with node.board.condition:
        if reader.take_news():
            inbound.send(inbound.core.prompts_arrived(time.monotonic()))
            node.board.condition.notify_all()


def connect_owner(node: Node, lanes: Lanes, inbound: InboundSamples, reader: PromptReader) -> None:
    """Start to read prompts; give an owner's core these, the messages for it, the time, and word of lost workers."""
    core = inbound.core
    reader.start()
    node.on_close(reader.close)
    # The reader does the same, unless the next prompt keeps it busy.
    node.on_tick(lambda now: tell_of_prompts(node, inbound, reader))
    core.prompts_arrived(time.monotonic())  # none has; this asks for the first ones
    lanes.register(node, inbound.kinds, inbound.on_message)
    node.on_lost(lambda lost: inbound.send(core.worker_lost(lost.name, lost.incarnation, time.monotonic())))
    node.on_tick(lambda now: _look(inbound, now))
    node.count_work(lambda: core.progress_count)


def _look(inbound: InboundSamples, now: float) -> None:
    core = inbound.core
    inbound.send(core.tick(now))
    for name, count in core.lapsed:
        log.warning("no message from %s for limits.host_silence_s: its %d leases go to other workers", name, count)
    core.lapsed.clear()
