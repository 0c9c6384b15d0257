"""Synthetic batches: the cases that every step meets in a run, with just the fields that it would be given there.

Shapes: B rows, N response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from distflow.data.batch import Batch, Column, Ragged
from distflow.flow.plan import StepPlan
from distflow.testing.plugins.mentions import shape_of
from distflow.types import A_TOKEN, DROP_REASON, LEFT_OUT, REWARD_PARTS, SEQUENCE, TOKENS, Scope, written
from distflow.workers.tokenizers import CharTokenizer

_PRINTABLE = [chr(code) for code in range(32, 127) if chr(code) not in "0123456789="]
TOKENIZER = CharTokenizer("chars:0123456789=" + "".join(_PRINTABLE) + "\n")
"""Of all characters of ASCII."""
VOCABULARY = len(TOKENIZER.tokens)
LONGEST, CANDIDATES = 6, 3


@dataclass(frozen=True, slots=True)
class Case:
    """What a batch is like. `name` completes `fails with …`."""

    name: str
    groups: int = 3
    samples: int = 4
    equal: bool = False
    """All samples of a group have one reward."""
    empty: bool = False
    """A response without tokens, one of which none is trained on, and a group of which none is."""
    far: bool = False
    """Log-probs and rewards of the greatest size that occurs."""
    several: bool = False
    """Some samples have two sequences."""
    baseline: bool = False
    """The last sample of each group is not trained on, as `sample_with_baseline` makes it."""
    usual: bool = True
    """Whether all flows meet it; else what goes wrong is a note."""


USUAL = Case("12 samples in 3 groups")
CASES = (
    USUAL,
    Case("groups of one sample", groups=4, samples=1),
    Case("a single sample", groups=1, samples=1),
    Case("groups of equal rewards", equal=True),
    Case("empty responses, and some that are not trained on", empty=True),
    Case("log-probs and rewards of great size", far=True),
    Case("samples of several sequences", several=True, usual=False),
)
_LOGPROBS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs", "rollout_filtered_logprobs")


def given_fields(plan: StepPlan) -> list[str]:
    """The fields that a step can rely on: what it reads, and those that every worker sends with them."""
    a_token = any(written(field, plan.writes) for field in A_TOKEN)
    group = ["group"] if plan.scope == "group" else []
    return list(dict.fromkeys(["uid", "sample", *group, *plan.reads, *([TOKENS] if a_token else [])]))


def make_batch(case: Case, plan: StepPlan, source: str, tasks: Sequence[tuple[str, str]]) -> Batch:
    """A batch of a case. `source`: the text of the plug-in's file; `tasks`: prompts with tasks as JSON text."""
    drawn = torch.Generator().manual_seed(len(case.name))
    rows = _rows(case)
    count = len(rows)
    columns: dict[str, Column] = {
        "uid": torch.tensor([[0, group % 5, group] for group, _, _ in rows]),
        "group": torch.tensor([group for group, _, _ in rows]),
        "sample": torch.tensor([sample for _, sample, _ in rows]),
    }
    columns[SEQUENCE] = torch.tensor([sequence for _, _, sequence in rows])
    columns["sequence_prompt"] = Ragged.from_texts(["12=" if sequence else "" for _, _, sequence in rows])
    columns |= _responses(case, rows, drawn, tasks)
    columns |= _judged(case, rows, drawn)
    responses = columns[TOKENS]
    assert isinstance(responses, Ragged), "made above"
    columns |= _a_token(case, responses, drawn)
    columns |= {name: Ragged.from_texts([""] * count) for name in (DROP_REASON, LEFT_OUT)}
    names = [*given_fields(plan), *([SEQUENCE] if case.several else [])]
    for name in names:
        if name not in columns and "*" not in name:
            columns[name] = _own(name, source, responses, drawn)
    return Batch({name: columns[name] for name in dict.fromkeys(names) if name in columns})


def _rows(case: Case) -> list[tuple[int, int, int]]:
    """Group, number in the group and number of the sequence of each row."""
    found = []
    for group in range(case.groups):
        for sample in range(case.samples):
            several = 2 if case.several and (group + sample) % 3 == 0 else 1
            found += [(7 + group, sample, sequence) for sequence in range(several)]
    return found


def _responses(
    case: Case, rows: Sequence[tuple[int, int, int]], drawn: torch.Generator, tasks: Sequence[tuple[str, str]]
) -> dict[str, Column]:
    count = len(rows)
    lengths = torch.randint(1, LONGEST + 1, (count,), generator=drawn).tolist()
    lengths[0] = LONGEST
    if case.empty:
        lengths[1] = 0
    ids = [torch.randint(2, VOCABULARY, (length,), generator=drawn).tolist() for length in lengths]
    stopped = [number % 3 < 2 and bool(row) for number, row in enumerate(ids)]
    ids = [[*row[:-1], 1] if stop else row for row, stop in zip(ids, stopped, strict=True)]
    responses = Ragged.from_rows(ids, torch.int64)
    mask = torch.ones_like(responses.values, dtype=torch.bool)
    if case.empty:
        # Row 2, and the whole last group.
        for row in (2, *range(count - case.samples, count)):
            mask[responses.offsets[row] : responses.offsets[row + 1]] = False
    if case.baseline:
        for row in (row for row, (_, sample, _) in enumerate(rows) if sample == case.samples - 1):
            mask[responses.offsets[row] : responses.offsets[row + 1]] = False
    about = [tasks[group % len(tasks)] for group, _, _ in rows]
    prompts = [TOKENIZER.encode(str(group) + "=") for group, _, _ in rows]
    spans = Ragged.from_rows([[] for _ in rows], torch.int64)
    versions = torch.tensor([[0, 3, 0, length] for length in lengths if length]).view(-1, 4)
    counts = torch.tensor([0, *[int(length > 0) for length in lengths]]).cumsum(0)
    first = [sequence == 0 for _, _, sequence in rows]
    return {
        "prompt_ids": Ragged.from_rows(prompts, torch.int64),
        "prompt_text": Ragged.from_texts(
            [text if whole else "" for (text, _), whole in zip(about, first, strict=True)]
        ),
        "task": Ragged.from_texts([task for _, task in about]),
        TOKENS: responses,
        "response_mask": responses.like(mask),
        "response_text": Ragged.from_texts(TOKENIZER.decode_batch(ids, skip_special=True)),
        "policy_versions": Ragged(versions, counts) if len(versions) else spans,
        "finish_reason": torch.tensor([0 if stop else 1 for stop in stopped]),
    }


def _judged(case: Case, rows: Sequence[tuple[int, int, int]], drawn: torch.Generator) -> dict[str, Column]:
    scale = 1e4 if case.far else 1.0
    drawn_values = scale * (torch.rand(len(rows), generator=drawn) - 0.3)
    keys = [(group, 0 if case.equal else sample) for group, sample, _ in rows]
    first = {key: number for number, key in reversed(list(enumerate(keys)))}
    # What belongs to a sample is the same on all its rows.
    reward = drawn_values[torch.tensor([first[key] for key in keys])]
    return {"reward": reward, "score": (reward > 0).float(), "baseline": reward.mean().expand(len(rows)).clone()}


def _a_token(case: Case, responses: Ragged, drawn: torch.Generator) -> dict[str, Column]:
    size = responses.values.numel()
    depth = 25.0 if case.far else 3.0

    def logprobs() -> Ragged:
        return responses.like(-depth * torch.rand(size, generator=drawn))

    def values() -> Ragged:
        return responses.like((100.0 if case.far else 1.0) * torch.randn(size, generator=drawn))

    several = torch.randint(2, VOCABULARY, (size, 1), generator=drawn) + torch.arange(CANDIDATES)
    return {
        "candidate_ids": responses.like((several % VOCABULARY).to(torch.int32)),
        "teacher_candidate_logprobs": responses.like(-1.5 - torch.rand((size, CANDIDATES), generator=drawn)),
        **{name: logprobs() for name in _LOGPROBS},
        **{name: values() for name in ("values", "return", "advantage", "token_rewards", "token_advantage")},
    }


def _own(name: str, source: str, responses: Ragged, drawn: torch.Generator) -> Column:
    """A field that no shipped step writes, in the form in which the plug-in reads it."""
    shape = "sample" if name.startswith(REWARD_PARTS) else shape_of(name, source)
    if shape == "text":
        return Ragged.from_texts(["some text"] * len(responses))
    if shape == "token":
        return responses.like(torch.rand(responses.values.numel(), generator=drawn))
    return torch.rand(len(responses), generator=drawn)


def copied(batch: Batch) -> Batch:
    """The batch with tensors of its own."""
    return Batch({name: _copy(column) for name, column in batch.columns.items()})


def _copy(column: Column) -> Column:
    return Ragged(column.values.clone(), column.offsets.clone()) if isinstance(column, Ragged) else column.clone()


def changed_in_place(before: Batch, after: Batch) -> list[str]:
    """The fields whose tensors are not what they were."""
    return [name for name, column in before.columns.items() if _apart(column, after[name], exact=True)]


def differing(one: Batch, other: Batch, fields: Sequence[str]) -> str | None:
    """The first field with which two batches of the same rows differ by more than rounding, and how; None: none."""
    for name in fields:
        if "*" in name:
            found = differing(one, other, [key for key in one.columns if written(key, [name])])
            if found is not None:
                return found
        elif name in one and name in other:
            apart = _apart(one[name], other[name])
            if apart:
                return f"{name!r} {apart}"
    return None


def _apart(one: Column, other: Column, *, exact: bool = False) -> str:
    if isinstance(one, Ragged) != isinstance(other, Ragged):
        return "has another shape"
    if isinstance(one, Ragged) and isinstance(other, Ragged):
        if not torch.equal(one.offsets, other.offsets):
            return "has another length"
        one, other = one.values, other.values
    assert isinstance(one, Tensor), "a column is ragged or dense"
    assert isinstance(other, Tensor), "a column is ragged or dense"
    if one.shape != other.shape:
        return "has another shape"
    tolerances = {"rtol": 0.0, "atol": 0.0} if exact or not one.is_floating_point() else {"rtol": 1e-3, "atol": 1e-5}
    wrong = ~torch.isclose(one.double(), other.double(), equal_nan=True, **tolerances)
    if not bool(wrong.any()):
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    if one.dtype == torch.uint8:
        return "is another text"
    return f"is {one[place].item():g} and {other[place].item():g}"


def parts_of(batch: Batch, scope: Scope) -> list[list[int]]:
    """The rows that one call may be given at least: one sample, or one group; the batch has one row a sample."""
    bounds = list(range(batch.rows + 1)) if scope == "sample" else batch.group_bounds()
    return [list(range(a, b)) for a, b in pairwise(bounds)]
