"""Training on responses that were compared, or called good or bad: what a row of the data gives, and the updates on it.

Shapes: B samples, P pairs, T response tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distflow.algorithms import preference
from distflow.data.batch import Batch, Ragged
from distflow.data.micro_batches import split_groups
from distflow.data.responses import DataRow, RowResponse
from distflow.errors import UserError
from distflow.flow.step import step
from distflow.log import logger
from distflow.runtime.metrics import MetricStore
from distflow.runtime.protocols import TrainedScorer
from distflow.runtime.steps import StepContext
from distflow.workers.trainer import describe
from distflow.workers.within_memory import PartLoss, accumulate, cut_by, in_parts

log = logger(__name__)

MOST_TOLD = 5
"""Pairs of equal texts that are warned of."""
_equal: set[str] = set()
"""Those that were."""
_LABELS = {"true": True, "1": True, "false": False, "0": False}
CHOSEN, REJECTED = ("chosen", "answer"), "rejected"
_JUDGED = "judged_ids"
"""Prompt and response as a reward model reads them."""
_READ = ["prompt_ids", "response_ids", "response_mask", "ref_logprobs", "group", "sample"]


@step(role="read", reads=[], writes=[], samples=2, choices={"max_response_tokens": ">= 1"})
def pair(row: DataRow, *, max_response_tokens: int = 1024) -> list[RowResponse]:
    """The column `chosen`, or else `answer`, and the column `rejected`: a group of two, in this order."""
    return [RowResponse.of(turn) for turn in _compared(row)]


def _compared(row: DataRow) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    chosen, rejected = row.turn(*CHOSEN), row.turn(REJECTED)
    if chosen == rejected and row.label not in _equal and len(_equal) < MOST_TOLD:
        _equal.add(row.label)
        further = "" if len(_equal) < MOST_TOLD else "; further ones are not told"
        log.warning("data: %s has the same text as chosen and rejected, which teaches nothing%s", row.label, further)
    return chosen, rejected


@step(
    role="train",
    reads=["prompt_ids", "response_ids", "response_mask", "ref_logprobs", "group", "sample"],
    writes=[],
    scope="group",
    head="tokens",
    choices={"loss": ["sigmoid", "ipo"], "beta": "> 0", "label_smoothing": ">= 0, < 0.5"},
)
def dpo(
    batch: Batch, ctx: StepContext, *, loss: str = "sigmoid", beta: float = 0.1, label_smoothing: float = 0.0
) -> Batch:
    """Accumulate the gradient of direct preference optimisation over pairs, in micro-batches that hold whole pairs.

    `loss`: sigmoid (`label_smoothing`) or ipo; see `distflow.algorithms.preference`. The gradient is divided by the
    number of pairs. `ref_logprobs` are those of a frozen reference. Raises UserError for groups that are no pairs.
    """
    if loss == "ipo" and label_smoothing:
        raise UserError(f"label_smoothing={label_smoothing} is for loss=sigmoid, and loss is ipo: remove it")
    if ctx.update_epoch == 0:
        describe(batch, ctx.metrics)

    def loss_of(part: Batch) -> PartLoss:
        check_pairs(part, ctx.step_name)
        ratios_P2 = _log_ratios(part, ctx).view(-1, 2)
        chosen_P, rejected_P = ratios_P2.unbind(1)
        if loss == "ipo":
            loss_P = preference.ipo(chosen_P, rejected_P, beta=beta)
        else:
            loss_P = preference.dpo(chosen_P, rejected_P, beta=beta, label_smoothing=label_smoothing)
        rewards_P = beta * chosen_P.detach(), beta * rejected_P.detach()
        return _mean_of(loss_P, ctx, partial(tell_pairs, ctx.metrics, *rewards_P))

    accumulate(batch, ctx, loss_of, cut_by(_READ, whole_groups=True))
    return batch


@step(
    role="train",
    reads=["prompt_ids", "response_ids", "prompt_text", "response_text", "group", "sample"],
    writes=[],
    scope="group",
    head="score",
)
def bradley_terry(batch: Batch, ctx: StepContext) -> Batch:
    """Accumulate the gradient of a reward model on pairs (`distflow.algorithms.preference.bradley_terry`).

    The model scores prompt and response as text, by its own chat template, as `distflow.workers.reward_model:judge`
    asks it to once it is trained. The gradient is divided by the number of pairs. Raises UserError for groups that are
    no pairs, texts that are longer than the model takes, and backends that cannot train such models.
    """
    backend = ctx.backend
    if not isinstance(backend, TrainedScorer):
        raise UserError(f"models.{ctx.model}: this backend cannot train scores of whole texts — backend: torch")
    if ctx.update_epoch == 0:
        describe(batch, ctx.metrics)
    texts = zip(batch.texts("prompt_text"), batch.texts("response_text"), strict=True)
    rows = [backend.encode(prompt, response) for prompt, response in texts]
    lengths, longest = torch.tensor([len(row) for row in rows]), backend.longest_text()
    if longest is not None and int(lengths.max()) > longest:
        position = int(batch.dense("group")[lengths.argmax()])
        raise UserError(
            f"prompt and response at position {position} have {int(lengths.max())} tokens, and the model takes "
            f"{longest}: lower max_response_tokens and data.max_prompt_tokens, with data.overlong=drop"
        )

    def cut(some: Batch, tokens: int, _packs: bool) -> Iterator[tuple[Tensor, Batch]]:
        for numbers in split_groups(some, tokens, some.ragged(_JUDGED).lengths):
            yield numbers, some.select(numbers)

    def loss_of(part: Batch) -> PartLoss:
        check_pairs(part, ctx.step_name)
        ids = [row.tolist() for row in part.ragged(_JUDGED).rows()]
        chosen_P, rejected_P = backend.rate_texts(ids).view(-1, 2).unbind(1)
        told = partial(tell_pairs, ctx.metrics, chosen_P.detach(), rejected_P.detach())
        return _mean_of(preference.bradley_terry(chosen_P, rejected_P), ctx, told)

    accumulate(batch.with_columns(**{_JUDGED: Ragged.from_rows(rows, torch.int64)}), ctx, loss_of, cut)
    return batch


def check_pairs(part: Batch, name: str) -> None:
    """Raises UserError unless the rows are chosen and rejected responses in turn, those of a group side by side."""
    rows, groups = part.rows, part.dense("group")
    in_turn = rows % 2 == 0 and torch.equal(part.dense("sample"), torch.arange(rows) % 2)
    if not in_turn or not torch.equal(groups[::2], groups[1::2]):
        raise UserError(
            f"step {name!r} compares pairs, and a group of this batch has not two samples, chosen and rejected — let "
            "distflow.workers.preference:pair read the data, or a read step that returns them in this order"
        )


def tell_pairs(metrics: MetricStore, chosen_P: Tensor, rejected_P: Tensor) -> None:
    """Metrics of pairs by the rewards of their responses: how many are in order, by how much, and both means."""
    pairs = len(chosen_P)
    margin_P = (chosen_P - rejected_P).double()
    metrics.mean("preference/accuracy", float((margin_P > 0).double().mean()), pairs)
    metrics.mean("preference/margin", float(margin_P.mean()), pairs)
    metrics.mean("preference/chosen", float(chosen_P.double().mean()), pairs)
    metrics.mean("preference/rejected", float(rejected_P.double().mean()), pairs)


def _log_ratios(part: Batch, ctx: StepContext, *, grad: bool = True) -> Tensor:
    """[B]: log π − log π_ref of whole responses."""
    scores = ctx.backend.score(part, temperature=1.0, grad=grad, entropy=False)
    logprobs_BT = scores.logprobs_BT
    ref_BT = part.padded("ref_logprobs").to(logprobs_BT)
    return ((logprobs_BT - ref_BT) * scores.mask_BT).sum(1)


def _mean_of(loss_N: Tensor, ctx: StepContext, tell: Callable[[], None]) -> PartLoss:
    """The loss of so many pairs or samples, by whose number the gradient is divided."""

    def note() -> None:
        ctx.metrics.mean("actor/loss", float(loss_N.detach().double().mean()), len(loss_N))
        tell()

    return PartLoss(loss_N.sum(), len(loss_N), note)


@step(role="read", reads=[], writes=["label"], samples=3, choices={"max_response_tokens": ">= 1"})
def labelled(row: DataRow, *, max_response_tokens: int = 1024) -> list[RowResponse]:
    """The column `response` with its `label` (true: good), or of a pair the chosen one as good, the rejected as bad.

    The last sample is a response to the next row's prompt, which is not trained on: how far the policy is from the
    reference is measured by it (see `kl_point`).
    """
    return [*_judged(row), replace(_judged(row.following())[0], fields={"label": 0.0}, trains=False)]


def _judged(row: DataRow) -> list[RowResponse]:
    if "label" not in row.task and (REJECTED in row.task or "chosen" in row.task):
        chosen, rejected = _compared(row)
        return [RowResponse.of(chosen, {"label": 1.0}), RowResponse.of(rejected, {"label": 0.0})]
    if "label" not in row.task:
        there = ", ".join(row.task) or "none besides the prompt"
        raise UserError(f"there is no column 'label'; there are {there} — data.fields.label=COLUMN")
    label = row.task["label"]
    if isinstance(label, str):  # of CSV
        label = _LABELS.get(label.strip().lower(), label)
    if type(label) is not bool and label not in (0, 1):
        raise UserError(f"the column 'label' is {str(label)[:60]!r}; expected true or false (1 or 0)")
    return [RowResponse.of(row.turn("response", "answer"), {"label": float(label)})]


@step(
    role="train",
    reads=["prompt_ids", "response_ids", "response_mask", "ref_logprobs"],
    writes=["kl_point"],
    scope="batch",
    head="tokens",
)
def kl_point(batch: Batch, ctx: StepContext) -> Batch:
    """Write `kl_point`, the same for all samples: an estimate of KL(π || π_ref), of the policy before its updates.

    As in the paper (arXiv 2402.01306, section 4.1) it is the mean of log π(y'|x) − log π_ref(y'|x), at least 0, where
    y' is a response to another prompt: that of the next row of the data. The mean is over the samples of the training
    step that are not trained on, of all training workers, while the authors' code takes it over a micro-batch.
    """
    mismatched = ~batch.padded("response_mask").any(1)
    total = torch.zeros(2, dtype=torch.float64)
    fields = ["prompt_ids", "response_ids", "response_mask", "ref_logprobs"]
    others = batch.select(mismatched.nonzero().flatten())
    for _, ratios_B in in_parts(others, ctx, partial(_log_ratios, ctx=ctx, grad=False), cut_by(fields)):
        total += torch.tensor([float(ratios_B.double().sum()), float(len(ratios_B))], dtype=torch.float64)
    summed, count = ctx.all_reduce(total).tolist()
    if not count:
        raise UserError(
            f"step {ctx.step_name!r}: no sample of this training step is there to be compared by — let "
            "distflow.workers.preference:labelled read the data, which adds one to each row"
        )
    point = max(0.0, summed / count)
    ctx.metrics.set("preference/kl_point", point)
    return batch.with_columns(kl_point=torch.full((batch.rows,), point, dtype=torch.float64))


@step(
    role="train",
    reads=["prompt_ids", "response_ids", "response_mask", "ref_logprobs", "label", "kl_point"],
    writes=[],
    scope="sample",
    head="tokens",
    choices={"beta": "> 0", "desirable_weight": ">= 0", "undesirable_weight": ">= 0"},
)
def kto(
    batch: Batch,
    ctx: StepContext,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Batch:
    """Accumulate the gradient of Kahneman–Tversky optimisation (`distflow.algorithms.preference.kto`) in micro-batches.

    The gradient is divided by the number of samples that are trained on. The paper advises weights by which good
    samples count 1 to 4/3 times as much in all as bad ones, or the other way round.
    """
    trained = batch.select(batch.padded("response_mask").any(1).nonzero().flatten())
    if ctx.update_epoch == 0:
        describe(trained, ctx.metrics)
    fields = ["prompt_ids", "response_ids", "response_mask", "ref_logprobs", "label", "kl_point"]
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}

    def loss_of(part: Batch) -> PartLoss:
        ratios_B = _log_ratios(part, ctx)
        desirable_B = (part.dense("label") > 0).to(ratios_B.device)
        point_B = part.dense("kl_point").to(ratios_B)
        found_B = beta * (ratios_B.detach() - point_B), beta * ratios_B.detach()
        told = partial(_tell_labelled, ctx.metrics, *found_B, desirable_B)
        return _mean_of(preference.kto(ratios_B, desirable_B, point_B, beta=beta, **weights), ctx, told)

    accumulate(trained, ctx, loss_of, cut_by(fields))
    return batch


def _tell_labelled(metrics: MetricStore, gains_B: Tensor, rewards_B: Tensor, desirable_B: Tensor) -> None:
    metrics.mean("preference/accuracy", float(((gains_B > 0) == desirable_B).double().mean()), len(gains_B))
    for name, of in (("chosen", desirable_B), ("rejected", ~desirable_B)):
        if bool(of.any()):
            metrics.mean(f"preference/{name}", float(rewards_B[of].double().mean()), int(of.sum()))
