"""The owner's side of a training worker: its ledgers, the messages that reach them, and their prompts, read ahead.

`build_inbound` wires the owner's core (`distflow/exchange/owner.py`) and the reader of prompts
(`distflow/exchange/prompt_reader.py`) to the worker.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from typing import Any, NamedTuple

from distflow.comm.message import Message
from distflow.config.data_schema import DataConfig, DifficultyConfig
from distflow.config.paths import FED
from distflow.config.plugins import TOKENIZER
from distflow.data.difficulty import Difficulty, DifficultyRule
from distflow.data.fed import PROMPTS, RowLog
from distflow.data.files import Row
from distflow.data.gold import needed_by
from distflow.data.loading import open_source
from distflow.data.order import PromptOrder, PromptSettings, SourceUse
from distflow.data.responses import Reading
from distflow.errors import DistflowError, NoProgressError, Problem, RunStopped, UserError, did_you_mean
from distflow.exchange import facts
from distflow.exchange.feed_thread import FeedThread
from distflow.exchange.kept_samples import KeptSamples
from distflow.exchange.lease_lanes import Lanes
from distflow.exchange.lease_settings import LeaseSettings, planned_settings
from distflow.exchange.ledgers import merge_snapshots
from distflow.exchange.messages import Lease, LeasePrompt
from distflow.exchange.outside import Outside
from distflow.exchange.own_samples import OwnSamples, samples_of
from distflow.exchange.owner import OwnerCore
from distflow.exchange.prompt_feed import (
    CLIENT_KINDS,
    OWNER_KINDS,
    FeedLinks,
    FeedSettings,
    PromptFeed,
)
from distflow.exchange.prompt_reader import PromptReader
from distflow.exchange.sample_channel import InboundSamples
from distflow.exchange.store_channel import KINDS as STORE_KINDS
from distflow.exchange.store_channel import OWNERS, ClientStep, SampleStore, refusal
from distflow.flow.data_check import columns_called_with, reward_calls
from distflow.flow.edges import SAMPLES
from distflow.flow.imported_step import check_step
from distflow.flow.memory import MIB
from distflow.flow.plan import Plan, StepPlan
from distflow.flow.resolve import resolve
from distflow.flow.reward_form import may_take_lists
from distflow.flow.step import READ, reads_all_turns, response_tokens
from distflow.flow.step_declaration import read_declaration
from distflow.flow.step_settings import chosen_shipped
from distflow.log import logger
from distflow.runtime.assembly import Setting
from distflow.runtime.disk import ConsumerList
from distflow.runtime.node import Node
from distflow.runtime.protocols import Tokenizer
from distflow.runtime.steps import user_code
from distflow.runtime.waits import WaitBoard
from distflow.types import GivenResponse, LeaseKind, Prompt

CONSUMERS = "consumers"
"""Folder of a run in which each owner lists the lossless consumers that it has."""
READ_AHEAD = 64
"""Fewest prompts that are read ahead; otherwise those of two training steps."""

log = logger(__name__)


class Uses(NamedTuple):
    """Uses that a flow has for the rows of the data."""

    reading: Reading | None
    """How it makes samples of them; None where a model generates them."""
    needs: Mapping[str, str]
    """What its shipped reward functions need of each row's task, by key: the name of the function."""
    columns: Mapping[str, str]
    """Columns without which a user's reward function cannot be called, by name: the function."""
    prompts: bool
    """Reward functions may ask for the prompt as the data has it: for messages, where it is a conversation."""
    own: Sequence[str] = ()
    """The user's reward functions."""


def prompt_order(
    sources: Sequence[SourceUse], tokenizer: Tokenizer, settings: PromptSettings, uses: Uses
) -> PromptOrder:
    """Build the order of the prompts of these sources for what the flow does with them."""
    about = (uses.reading, uses.needs, uses.columns)
    return PromptOrder(sources, tokenizer, settings, *about, prompts=uses.prompts)


def build_prompts(data: DataConfig, seed: int, tokenizer: Tokenizer, where: str, uses: Uses) -> PromptOrder:
    """Build the source; raises StepError, with `where`, for exceptions of the source, else UserError."""
    with user_code(f"{where}, when it was made with {data.with_}"):
        sources = [open_source(name, source, resolve) for name, source in data.sources.items()]
        return prompt_order(sources, tokenizer, prompt_settings(data, seed), uses)


def prompt_settings(data: DataConfig, seed: int) -> PromptSettings:
    """Return what the section says of order and tokens. Clients are told of rows that cannot be used, and none is
    put."""
    return PromptSettings(
        seed,
        data.shuffle,
        data.chat,
        data.max_prompt_tokens,
        data.overlong,
        data.chat_template_args,
        strict=data.strict,
        unanswered="error" if data.fed else "drop",
    )


def uses_of(plan: Plan) -> Uses:
    """Return what the flow does with the rows of the data."""
    if plan.reads is not None:
        return Uses(reading_of(plan), {}, {}, prompts=False)
    calls = dict(reward_calls(plan))
    prompts = any(map(may_take_lists, calls))
    return Uses(None, needs_of(plan), columns_called_with(plan), prompts=prompts, own=[*calls])


def needs_of(plan: Plan) -> dict[str, str]:
    """Return what the shipped reward functions of the flow need, by key; of users' own functions nothing is known."""
    found: dict[str, str] = {}
    for step in plan.steps:
        if step.role != "score" or step.prefix or not step.call.startswith("distflow."):
            continue
        spec = read_declaration(step.call).spec
        for setting in spec.plugins:
            for call in chosen_shipped(step.settings[setting], spec.choices.get(setting, ())):
                found = {**dict.fromkeys(needed_by(resolve(call)), call.rpartition(":")[2]), **found}
    return found


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
        prompts = build_prompts(recipe.data, recipe.run.seed, tokenizer, where, uses_of(plan))
        with user_code(f"{where}, at prompt position 0"):
            return prompts.prompt(0), []
    except UserError as error:
        message, hint = str(error), "correct data.source, data.with or the tokenizer"
    except DistflowError as error:
        message, hint = f"it fails:\n{error}", "the workers would fail in the same way"
    return None, [Problem(key_where, "data.source", message, hint)]


def lessors(owners: Sequence[str], kind: LeaseKind) -> list[str]:
    """Those that lease groups of a kind: for validation the first owner alone."""
    return list(owners[:1] if kind == "val" else owners)


def lease_settings(setting: Setting) -> LeaseSettings:
    """The settings of the lease protocol that the recipe implies."""
    owner = setting.me if str(setting.me.name) in setting.plan.owners else setting.plan.owner_plan
    return planned_settings(setting.plan, owner)


def build_inbound(setting: Setting, node: Node, lanes: Lanes, tokenizer: Tokenizer) -> InboundSamples:
    """Wire the owner's side: its ledgers, new or from the checkpoint, and the messages that reach them."""
    name, plan = str(setting.me.name), setting.plan
    where = f"data source {setting.recipe.data.shown} on {name}"
    order = build_prompts(setting.recipe.data, setting.recipe.run.seed, tokenizer, where, uses_of(plan))
    given: dict[int, Sequence[GivenResponse]] = {}

    feed = build_feed(setting, node, order, tokenizer, lambda: _more_rows(node, core, reader))

    def read(position: int) -> LeasePrompt | None:
        if feed is not None and not feed.has(position):
            return None
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
    prompts = reader.prompt_at if feed is None else feed.noting(reader.prompt_at)
    settings = lease_settings(setting)
    if setting.recipe.data.difficulty is not None:
        with user_code(where):
            settings = replace(settings, difficulty=_difficulty(setting.recipe.data.difficulty, order, setting))
    core = OwnerCore(name, settings, list(ledgers), prompts, term=term, snapshot=snapshot, begins=setting.begins)
    if feed is not None:
        core.lacks = lambda: feed.lacks
        feed.start()
        node.on_close(lambda: feed.close(over=core.finished))
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


def build_feed(
    setting: Setting, node: Node, order: PromptOrder, tokenizer: Tokenizer, came: Callable[[], None]
) -> FeedThread | None:
    """Where clients put prompts, if the recipe says that they do; otherwise clients that do are refused."""
    data, name, fed = setting.recipe.data, str(setting.me.name), order.fed
    if fed is None:
        why = f"the prompts of this run come from {data.shown}, not from clients (data.source={FED})"
        for kind in CLIENT_KINDS:
            node.on_request(kind, partial(_refuse_rows, node, why))
        return None
    batch = setting.plan.batch
    used = setting.start.number * batch.ledgers * batch.groups_per_ledger
    settings = FeedSettings(fed.rows, fed.ahead, used)
    fed.log = RowLog(setting.run_dir / PROMPTS / f"{setting.me.name.file_stem}.jsonl")
    feed = PromptFeed(
        name,
        setting.owners,
        settings,
        fed.log,
        FeedLinks(
            check=partial(_check_rows, data, setting.recipe.run.seed, tokenizer, uses_of(setting.plan)),
            reply=node.endpoint.reply,
            post=node.endpoint.send,
            came=came,
            passes_over=order.end,
        ),
    )
    thread = FeedThread(feed, node.board.fault)
    for kind in CLIENT_KINDS:
        node.on_request(kind, thread.put)
    for kind in OWNER_KINDS:
        node.on(kind, thread.put)
    node.status_rows["prompts"].append(lambda: [feed.counts])
    return thread


def _check_rows(data: DataConfig, seed: int, tokenizer: Tokenizer, uses: Uses, rows: Sequence[Row]) -> None:
    """Raise UserError unless these rows make prompts."""
    (source,) = data.sources.values()
    order = prompt_order([SourceUse(rows, fields=source.fields)], tokenizer, prompt_settings(data, seed), uses)
    for index in range(len(rows)):
        order.prompt(index)


def _refuse_rows(node: Node, why: str, message: Message) -> None:
    node.endpoint.reply(message, refusal(message, why))


def _more_rows(node: Node, core: OwnerCore, reader: PromptReader) -> None:
    """Clients have put further rows."""
    reader.more()
    with node.board.condition:
        core.progress_count += 1


class Owned(NamedTuple):
    """What an owner gets."""

    inbound: InboundSamples
    """Its ledgers, and the samples that come in."""
    store: SampleStore
    """The same samples for clients outside the run."""


def offer_samples(setting: Setting, node: Node, inbound: InboundSamples) -> Owned:
    """Let clients outside the run read the samples that arrive here (docs/service.md), and say who the owners are."""
    plan = setting.plan
    fields = {*plan.edge(SAMPLES).fields} if plan.reads is None else {*plan.reads.writes}
    edges = [plan.edge(port.edge) for end in ("asks", "collects") for port in setting.me.port(end)]
    fields.update(field for edge in edges if edge.when in ("on arrival", "in window") for field in edge.back)
    limit = setting.recipe.limits.consumer_mb * MIB
    written = [step for step in plan.steps if step.role == "client"]
    steps = list(map(_client_step, written))
    store = SampleStore(inbound, limit, partial(_lacking, sorted(fields)), node.endpoint.reply, steps)
    _go_on(store, setting, node)
    for kind in STORE_KINDS:
        node.on_request(kind, lambda message: store.on_message(message, time.monotonic()))
    begins = list(setting.begins.items())
    node.facts |= {facts.OWNERS: list(setting.owners), facts.TERM: setting.document.term, facts.BEGINS: begins}
    node.on_request(OWNERS, lambda message: node.endpoint.reply(message, {"owners": list(setting.owners)}))
    node.status_rows["consumers"].append(lambda: [one._asdict() for one in store.consumers.counts()])
    outside = Outside(inbound.core, store, plan, written, lambda: node.board.current is not None)
    node.status_rows["outside"].append(outside.status)
    node.on_tick(lambda now: node.facts.update({facts.HELD_UP: outside.lasting(now)}))
    node.on_tick(store.tick)
    node.on_close(partial(_close, store, node))
    return Owned(inbound, store)


def _close(store: SampleStore, node: Node) -> None:
    # The endpoint still hears clients meanwhile, on its own thread.
    with node.board.condition:
        store.close()


def _go_on(store: SampleStore, setting: Setting, node: Node) -> None:
    """Open the lossless consumers again that were there before a restart, and list them from now on, before the groups
    that clients have been promised arrive. What they had not read goes with checkpoints.
    """
    folder, ledgers = setting.run_dir / CONSUMERS, frozenset(setting.standing.ledgers)
    lists = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    listed = {name: fields for one in lists for name, fields in one.items()}
    for data in () if setting.resumed is None else setting.resumed.unread():
        kept = KeptSamples.decode(data)
        # One that was closed later stays closed. On another host than before nothing is listed.
        kept = replace(kept, consumers=[one for one in kept.consumers if one.name in listed or not lists])
        store.restore(kept, lambda position: position % setting.plan.batch.ledgers in ledgers)
    store.open_again(listed)
    store.listed(listed)

    def written(names: Iterable[str]) -> None:
        with node.board.condition:
            store.listed(names)

    consumers = ConsumerList(folder / f"{setting.me.name.file_stem}.json", written, node.board.fault)
    store.listing.write = consumers.write
    consumers.start()
    node.on_close(consumers.close)


def _client_step(step: StepPlan) -> ClientStep:
    function = resolve(step.call)
    check_step(function, step)
    return ClientStep(step.name, step.reads, partial(function, **step.settings))


def _lacking(known: Sequence[str], fields: Iterable[str]) -> str:
    patterns = [name for name in known if "*" in name]
    lacking = [name for name in fields if name not in known and not any(fnmatch(name, p) for p in patterns)]
    if not lacking:
        return ""
    hint = "only what the run itself reads reaches the training workers: add others to run.dump_fields"
    return f"samples have no field {lacking[0]!r} when they arrive — {did_you_mean(lacking[0], known)}; {hint}"


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
    with node.board.condition:
        # None has; this asks for the first ones, and the reader may come with them before it returns.
        core.prompts_arrived(time.monotonic())
    lanes.register(node.on, inbound.kinds, inbound.on_message)
    node.on_lost(lambda lost: inbound.send(core.worker_lost(lost.name, lost.incarnation, time.monotonic())))
    node.on_tick(lambda now: look(inbound, node.board, now))
    node.count_work(lambda: core.progress_count)
    node.status_rows["arriving"].append(partial(_arriving, core, node.board))


def _arriving(core: OwnerCore, board: WaitBoard) -> list[dict[str, Any]]:
    """Tell how far the open step of an owner has come, for its row of `status`; nothing while nothing is begun."""
    with board.condition:
        step, (here, of, tokens) = core.version + 1, core.ledgers.so_far()
    told = {"kind": core.settings.kind, "step": step, "groups": here, "of": of, "tokens": tokens}
    return [told] if here or tokens else []


def look(inbound: InboundSamples, board: WaitBoard, now: float) -> None:
    """Give an owner's core the time; what it has concluded since ends the run, or goes to the log.

    What ends a run is a fault of the owner, as an error of one of its threads is: all its waits end with it, those of
    its generating side too, its process with exit code 3, and its agent tells the other workers why.
    """
    core = inbound.core
    if core.exhausted is not None and board.stopping is None:
        board.fault(core.exhausted)
    inbound.send(core.tick(now))
    for name, count in core.lapsed:
        log.warning("no message from %s for limits.host_silence_s: its %d leases go to other workers", name, count)
    core.lapsed.clear()


def await_readers(store: SampleStore, board: WaitBoard, drain_s: float) -> None:
    """All samples have arrived: give clients outside the run time to read the last ones."""
    consumers = store.consumers
    with board.condition:
        store.tick(time.monotonic())

    def unread() -> str:
        # Clients are heard meanwhile, on the endpoint's thread.
        with board.condition:
            return ", ".join(map(repr, consumers.unread()))

    try:
        board.until(
            lambda: None if consumers.unread() else True,
            name=lambda: f"consumer {unread()} outside the run to read the last samples",
            peers=(),
            limit_s=drain_s,
            limit="limits.drain_s",
            progress=lambda: consumers.progress,
        )
    except RunStopped:
        log.warning("stopped before consumer %s had read the last samples", unread())
    except NoProgressError as error:
        log.warning("%s; they are lost to it", error)
