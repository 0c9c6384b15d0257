"""Validation at the first owner: rounds of leases on the versions that are due, and what comes of them.

Round r is on the weights of version `versions[r]`. Its leases are withheld until that version is published, and then
granted before those for training (`distflow/exchange/rollout_core.py`). A resumed run validates the version that it
begins with again, if that one is due: its results may have been lost.

`due` is called under the worker's lock, all else by the main thread, which does the work: a round ends when it looks.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from statistics import fmean

from torch import Tensor

from distflow.algorithms.evaluation import Graded, summary
from distflow.config.data_schema import DataConfig
from distflow.config.schema import RunConfig
from distflow.data.answers_in_text import find_answer
from distflow.data.batch import Batch
from distflow.data.formats import DATA_SOURCE
from distflow.data.order import PromptOrder
from distflow.data.samples import last_rows, left_out
from distflow.errors import UserError
from distflow.exchange.lease_lanes import Lanes
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.ledgers import snapshot_at
from distflow.exchange.messages import LeasePrompt
from distflow.exchange.owner import OwnerCore
from distflow.exchange.prompt_reader import PromptReader
from distflow.exchange.sample_channel import InboundSamples
from distflow.flow.memory import group_bytes
from distflow.log import logger
from distflow.runtime.assembly import Setting
from distflow.runtime.dumps import DumpWriter, dumped
from distflow.runtime.metrics import MetricWriter
from distflow.runtime.node import Node
from distflow.runtime.owner_side import (
    READ_AHEAD,
    build_prompts,
    connect_owner,
    lease_settings,
    tell_of_prompts,
    uses_of,
)
from distflow.runtime.protocols import Tokenizer
from distflow.runtime.steps import user_code
from distflow.runtime.waits import WaitBoard
from distflow.types import FINISH_REASONS, REWARD_MEAN, REWARD_PARTS, VAL, VALIDATION, Uid, is_validated

log = logger(__name__)


def val_settings(setting: Setting, prompts: int = 1) -> LeaseSettings | None:
    """The settings of the lease protocol for validation, if there is any.

    `prompts` of a round: only its owner knows how many there are.
    """
    plan, train = setting.plan, lease_settings(setting)
    val = plan.val
    if val is None:
        return None
    longest = group_bytes(val.samples_per_prompt, val.data.max_prompt_tokens, val.sample_tokens)
    return replace(
        train,
        ledgers=1,
        groups_per_ledger=prompts,
        samples_per_prompt=val.samples_per_prompt,
        # A round is leased when its version is published, whether or not those before it have been collected: workers
        # that then find nothing to validate take newer weights. What arrives is judged already: its rows are small.
        max_staleness=len(val.versions),
        training_steps=len(val.versions),
        memory_bytes=prompts * longest * len(val.versions),
        group_bytes=lambda prompt_tokens: longest,
        max_prompt_tokens=val.data.max_prompt_tokens,
        kind="val",
        versions=val.versions,
        seed=setting.recipe.run.seed,
    )


class Validation:
    """The rounds of this owner, each over the same prompts. Raises UserError if there are none."""

    def __init__(
        self,
        setting: Setting,
        node: Node,
        lanes: Lanes,
        writer: MetricWriter,
        tokenizer: Tokenizer,
        dumps: DumpWriter | None = None,
    ) -> None:
        plan = setting.plan.val
        assert plan is not None, "without validation, nothing is built"
        self._plan = plan
        self._board: WaitBoard = node.board
        self._writer = writer
        self._term = setting.document.term
        self._no_progress_s = setting.recipe.limits.no_progress_s
        self._where = f"validation data {plan.data.shown} on {setting.me.name}"
        with user_code(self._where):
            self._places = list(islice(every_prompt(setting, plan.data, tokenizer, self._where), plan.prompts))
        self._prompts = len(self._places)
        self._judged = judged_metrics(setting.recipe.run)
        self.scores: dict[str, dict[int, float]] = {metric: {} for metric in self._judged.values()}
        """What checkpoints are kept for, and what may end the run, by metric and version."""
        self._due = 0
        """Rounds whose version has been published."""
        self._reading = False
        """Whether the next prompt of a round that is due has not been read yet."""
        self._sources: dict[int, str] = {}
        """By prompt; set by the reader's thread before the prompt is leased."""
        self._graded: dict[int, Graded] = {}
        """Of the open round, by prompt."""
        self._dumps, self._dump_fields = dumps, setting.plan.dump_fields
        self._taken: list[tuple[Batch, list[str]]] = []
        """Of the open round, for the dumps: groups, with the worker that generated each row."""
        self._rewards: dict[str, list[float]] = {}
        """Of the open round, by what training calls their mean: rewards and parts of the samples that have them."""
        self._lengths: list[int] = []
        self._cut = self._newer = self._failed = 0
        settings = val_settings(setting, self._prompts)
        assert settings is not None, "there is a plan for it"
        first = bisect_left(plan.versions, setting.start.number)
        self._reader = PromptReader(
            self._read, 1, READ_AHEAD, lambda: tell_of_prompts(node, self._inbound, self._reader), node.board.fault
        )
        self._core = OwnerCore(
            str(setting.me.name),
            settings,
            [0],
            self._prompt_at,
            term=self._term,
            snapshot=snapshot_at(first, settings),
            begins=setting.begins,
        )
        # A worker whose ask is refused takes newer weights: none is while there is more of a round.
        self._core.reading = lambda: self._reading
        self._inbound = InboundSamples(self._core, lanes.post)
        connect_owner(node, lanes, self._inbound, self._reader)

    @property
    def inbound(self) -> InboundSamples:
        """Where results come in."""
        return self._inbound

    def due(self, version: int) -> None:
        """This version is published: lease what is to be measured on it. Called under the worker's lock."""
        self._due = self._core.settings.rounds_due(version)
        self._inbound.send(self._core.prompts_arrived(time.monotonic()))

    def collect(self) -> None:
        """Grade what has arrived, and write the metrics of a round that is complete."""
        with self._board.condition:
            positions = self._core.consumable()
            self._inbound.send(self._core.take(positions, time.monotonic()))
            groups = self._inbound.pop(positions)
            complete = bool(positions) and self._core.step_complete()
        for group in groups:
            rows = group.rows.rows
            self._grade(rows)
            if self._dumps is not None:
                batch = dumped(rows, self._dump_fields)
                self._taken.append((batch, [group.worker] * batch.rows))
        if not complete:
            return
        version = self._plan.versions[self._core.version]
        self._write(version)
        with self._board.condition:
            self._inbound.send(self._core.advance(self._core.version + 1, time.monotonic()))
            self._board.condition.notify_all()

    def settle(self) -> None:
        """Wait until all rounds that are due are complete, and collect them."""
        while self._core.version < self._due:
            self._board.until(
                lambda: True if self._core.consumable() else None,
                name=f"validation of version {self._plan.versions[self._core.version]}",
                # Asked for in the wait, which has the lock under which they change.
                peers=lambda: tuple(holder.name for holder in self._core.holders()),
                limit_s=self._no_progress_s,
                progress=lambda: self._core.progress_count,
            )
            self.collect()

    def finish(self) -> None:
        """Nothing more is validated: tell the generating workers. Called under the worker's lock."""
        self._inbound.send(self._core.finish(time.monotonic()))

    def close(self) -> None:
        """Finish the dumps; raises errors of writing."""
        if self._dumps is not None:
            self._dumps.close()

    # -- prompts

    def _prompt_at(self, position: int) -> LeasePrompt | None:
        due = (position - VALIDATION) // self._prompts < self._due
        found = self._reader.prompt_at(position) if due else None
        self._reading = due and found is None
        return found

    def _read(self, position: int) -> LeasePrompt:
        number, index = divmod(position - VALIDATION, self._prompts)
        with user_code(f"{self._where}, at prompt {index}"):
            order, place = self._places[index]
            prompt = order.prompt(place)
        self._sources[index] = str(json.loads(prompt.task).get(DATA_SOURCE, ""))
        return LeasePrompt(Uid(number, index, position), prompt.token_ids, prompt.text, prompt.task)

    # -- results

    def _grade(self, rows: Batch) -> None:
        """Note the samples of one group; of several sequences of a sample, the last one counts."""
        rows = last_rows(rows)
        given, failed = rows.dense("score" if "score" in rows else "reward"), left_out(rows)
        scores = given.masked_fill(failed, 0.0).tolist()
        self._failed += int(failed.sum())
        for name, values in _rewards_of(rows, ~failed):
            self._rewards.setdefault(name, []).extend(values)
        answers = [find_answer(text) for text in rows.texts("response_text")]
        uid = Uid(*rows.dense("uid")[0].tolist())
        self._graded[uid.prompt] = Graded(scores, answers, self._sources[uid.prompt])
        self._lengths += rows.ragged("response_ids").lengths.tolist()
        self._newer += sum(map(self._is_newer, rows.ragged("policy_versions").rows()))
        self._cut += int((rows.dense("finish_reason") == FINISH_REASONS.index("length")).sum())

    def _write(self, version: int) -> None:
        graded, lengths = [self._graded[prompt] for prompt in sorted(self._graded)], self._lengths
        rewards = {name: fmean(found) for name, found in self._rewards.items() if found}
        values = (
            summary(graded)
            | rewards
            | {
                "prompts": float(len(graded)),
                "response_length/mean": fmean(lengths),
                "response_length/clip_ratio": self._cut / len(lengths),
                "newer_version_share": self._newer / len(lengths),
                "failed": float(self._failed),
            }
        )
        named = {f"{VAL}{name}": value for name, value in values.items()}
        note_scores(self.scores, self._judged, version, named)
        self._writer.write(version, self._term, named, measured=False)
        average = f"avg@{self._plan.samples_per_prompt}"
        shown = {average: values[average], **(rewards if len(rewards) > 1 else {})}
        told = ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
        log.info("validation after training step %d: %s", version, told)
        if self._failed:
            log.warning(
                "%d of %d samples that validate version %d failed, and score 0: generation or their reward raised an "
                "error",
                self._failed,
                len(lengths),
                version,
            )
        if self._newer:
            log.warning(
                "%d of %d samples that validate version %d come from a later one: workers were lost or came too late",
                self._newer,
                len(lengths),
                version,
            )
        if self._dumps is not None:
            self._dumps.write(version, self._term, self._taken)
        self._taken, self._graded, self._lengths, self._rewards = [], {}, [], {}
        self._cut = self._newer = self._failed = 0

    def _is_newer(self, spans: Tensor) -> bool:
        """Whether a sample, with these spans of versions, is not of the version that is measured alone."""
        return bool((spans.reshape(-1, 4)[:, 1] != self._plan.versions[self._core.version]).any())


def _rewards_of(rows: Batch, counted_B: Tensor) -> Iterator[tuple[str, list[float]]]:
    """Yield the rewards and their parts of these rows, without parts that a row lacks, by the metric of their mean."""
    for field in ("reward", *sorted(name for name in rows.columns if name.startswith(REWARD_PARTS))):
        if field in rows:
            values_B = rows.dense(field)
            known_B = counted_B & ~values_B.isnan()
            yield (REWARD_MEAN if field == "reward" else f"{field}/mean"), values_B[known_B].tolist()


def judged_metrics(run: RunConfig) -> dict[str, str]:
    """The metrics of validation that decide which checkpoints are kept, and when the run ends, by key."""
    return {key: metric for key, metric in run.judged.items() if is_validated(metric)}


def note_scores(
    scores: Mapping[str, dict[int, float]], judged: Mapping[str, str], version: int, named: Mapping[str, float]
) -> None:
    """Note the values of these metrics, `judged` by key, in `scores`; raises UserError if one was not measured."""
    for key, metric in judged.items():
        if metric not in named:
            choices = ", ".join(named)
            raise UserError(f"{key}: validation does not measure {metric!r} — choose one of {choices}")
        scores[metric][version] = named[metric]


def every_prompt(
    setting: Setting, data: DataConfig, tokenizer: Tokenizer, where: str
) -> Iterator[tuple[PromptOrder, int]]:
    """Every prompt of every source once, in their order, as its place there; without those that are left out."""
    uses = uses_of(setting.plan)
    for name, source in data.sources.items():
        alone = data.model_copy(update={"shuffle": False, "source": None, "mix": {name: source}})
        order = build_prompts(alone, setting.recipe.run.seed, tokenizer, where, uses)
        # Behind the last one that is not left out, another pass begins.
        yield from ((order, place) for place in range(len(order)) if order.uid(place).epoch == 0)
