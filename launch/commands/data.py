"""`distflow data preview`: prompts as the model sees them, their lengths, and the reward of their gold answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from distflow.errors import DistflowError, Problem, RecipeError, UserError

if TYPE_CHECKING:
    from distflow.data.batch import Batch
    from distflow.flow.plan import Plan, StepPlan
    from distflow.runtime.protocols import Tokenizer
    from distflow.types import Prompt

LOOKED_AT = 100
"""Prompts whose lengths and rewards are looked at, if not more are shown."""
SHOWN_TEXT = 2000
"""Characters shown of a prompt."""


@click.group()
def command() -> None:
    """Look at the data of a recipe."""


@command.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("-n", "count", default=3, show_default=True, type=click.IntRange(min=1), help="Prompts to show.")
def preview(recipe: str, overrides: tuple[str, ...], count: int) -> int:
    """Show the first prompts of a run of RECIPE, and what its reward gives for their gold answers (loads torch)."""
    from distflow.config.plugins import TOKENIZER
    from distflow.data.fed import AWAITED
    from distflow.flow.recipe_check import plan_recipe
    from distflow.flow.resolve import resolve
    from distflow.flow.reward_form import names_answer
    from distflow.runtime.owner_side import build_prompts, uses_of

    loaded, plan = plan_recipe(recipe, overrides)
    if plan.recipe.data.fed:
        click.echo(AWAITED)
        return 0
    try:
        tokenizer = resolve(TOKENIZER)(plan.recipe.models[plan.primary].model_dump())
        data = plan.recipe.data
        order = build_prompts(data, plan.recipe.run.seed, tokenizer, f"data source {data.shown}", uses_of(plan))
        # Behind the last one that is not left out, another pass begins.
        positions = range(min(max(count, LOOKED_AT), len(order)))
        samples = [_Sample(*order.of_any_length(n)) for n in positions if order.uid(n).epoch == 0]
    except UserError as error:
        raise RecipeError([Problem(loaded.origin("data.source"), "data", str(error).removeprefix("data: "))]) from error
    fault = "" if plan.reads else _judge(plan, tokenizer, samples)
    limit = plan.recipe.data.max_prompt_tokens
    for position, sample in enumerate(samples[:count]):
        _show(position, sample, tokenizer)
    lengths = [len(sample.prompt.token_ids) for sample in samples]
    click.echo(
        f"{len(lengths)} of {len(order)} prompts: {min(lengths)} to {max(lengths)} tokens, "
        f"{sum(lengths) / len(lengths):.1f} on average (data.max_prompt_tokens {limit})"
    )
    for line in order.left_out():
        click.echo(line)
    if plan.reads is None:
        _show_ends(tokenizer)
        _show_rewards(samples, fault, asked=any(map(names_answer, uses_of(plan).own)))
        if not fault:
            _show_conflict(plan, tokenizer, samples)
    else:
        _show_responses(plan.reads, samples, loaded.origin)
    wrong = [sample.label for sample in samples if not 1 <= len(sample.prompt.token_ids) <= limit]
    if wrong:
        key, message = "data.max_prompt_tokens", f"{len(wrong)} of {len(samples)} prompts are longer, or empty"
        hint = "raise it, or leave such prompts out: data.overlong=drop"
        raise RecipeError([Problem(loaded.origin(key), key, f"{message}, first {wrong[0]}", hint)])
    return 0


@dataclass(slots=True)
class _Sample:
    """A prompt, and what its gold answer gets."""

    label: str
    prompt: Prompt
    answer: str | None = field(init=False)
    """The first of its gold answers."""
    form: str = ""
    """How the answer was given to the reward."""
    values: dict[str, float] = field(default_factory=dict)
    """Reward, score and parts, of the form with the highest score."""

    def __post_init__(self) -> None:
        from distflow.data.gold import as_written, gold_answers

        answers = gold_answers(json.loads(self.prompt.task))
        self.answer = as_written(answers[0]) if answers else None

    def response(self, form: str) -> str:
        return form.format(self.answer)


def _show(position: int, sample: _Sample, tokenizer: Tokenizer) -> None:
    prompt = sample.prompt
    click.echo(f"position {position}: {sample.label}, {len(prompt.token_ids)} tokens")
    text = tokenizer.decode_batch([prompt.token_ids], skip_special=False)[0]
    for line in _cut(text).split("\n"):
        click.echo(f"  | {line}")
    for number, response in enumerate(prompt.responses):
        trained = response.mask or (response.trains,) * len(response.token_ids)
        written = with_brackets(response.token_ids, trained, tokenizer)
        told = [f"{len(response.token_ids)} tokens", *(f"{name} {value:g}" for name, value in response.fields.items())]
        told += [] if response.trains else ["not trained on"]
        told += [f"{sum(response.mask)} of them trained on"] if response.mask else []
        click.echo(f"  response {number} ({', '.join(told)}): {_cut(written)!r}")
    click.echo(f"  task {_cut(prompt.task)}")
    if sample.values:
        values = ", ".join(f"{name} {value:g}" for name, value in sample.values.items())
        click.echo(f"  gold answer {_cut(sample.response(sample.form))!r}: {values}")
    click.echo("")


def with_brackets(token_ids: Sequence[int], marked: Sequence[bool], tokenizer: Tokenizer) -> str:
    """The text of a response, with brackets around the tokens that are marked."""
    runs = [
        (within, [token for _, token in run])
        for within, run in groupby(zip(marked, token_ids, strict=True), itemgetter(0))
    ]
    texts = tokenizer.decode_batch([tokens for _, tokens in runs], skip_special=False)
    return "".join(f"[{text}]" if within else text for (within, _), text in zip(runs, texts, strict=True))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]}… ({len(text)} characters)"


def _show_ends(tokenizer: Tokenizer) -> None:
    ends = tokenizer.end_tokens
    written = tokenizer.decode_batch([[token] for token in ends], skip_special=False)
    shown = [f"{text!r} ({token})" for token, text in zip(ends, written, strict=True)]
    click.echo(f"responses end with {' or '.join(shown) or 'no token: the tokenizer has no end token'}")


def _show_rewards(samples: Sequence[_Sample], fault: str, *, asked: bool) -> None:
    """`asked`: a reward function of the user's asks for the gold answer; where a shipped one does, it is there."""
    if fault:
        click.echo(fault)
        return
    without = sum(sample.answer is None for sample in samples)
    if without and asked:
        click.echo(
            f"{without} of {len(samples)} prompts have no gold answer: `answer` of the task is null, or not there "
            "(data.fields.answer)"
        )
    judged = [sample for sample in samples if sample.values]
    if not judged:
        return
    scores = [sample.values["score"] for sample in judged]
    click.echo(f"gold answers: score {sum(scores) / len(scores):g} on average, reward of {len(judged)} looked at")
    low = [sample for sample in judged if sample.values["score"] < 1.0]
    if low:
        first = low[0]
        click.echo(
            f"warning: {len(low)} of {len(judged)} gold answers get a score below 1, first that of {first.label}: "
            f"{first.response(first.form)!r} gets {first.values['score']:g} — check the reward function and the answer"
        )


def _show_responses(step: StepPlan, samples: Sequence[_Sample], origin: Callable[[str], str]) -> None:
    """The lengths of the responses that the data gives; raises RecipeError if some are too long."""
    from distflow.flow.step import response_tokens

    limit = int(response_tokens(step.settings))
    lengths = [len(response.token_ids) for sample in samples for response in sample.prompt.responses]
    click.echo(
        f"their {len(lengths)} responses: {min(lengths)} to {max(lengths)} tokens, {sum(lengths) / len(lengths):.1f} "
        f"on average, end tokens included (max_response_tokens {limit})"
    )
    long = [s.label for s in samples if any(len(one.token_ids) > limit for one in s.prompt.responses)]
    if long:
        key, hint = f"flow.steps.{step.name}.with.max_response_tokens", "raise it, or leave such rows out: "
        message = f"responses of {len(long)} of {len(samples)} prompts are longer, first of {long[0]}"
        raise RecipeError([Problem(origin(key), key, message, f"{hint}data.overlong=drop")])


def _judge(plan: Plan, tokenizer: Tokenizer, samples: Sequence[_Sample]) -> str:
    """Give each gold answer to the step that writes the reward; returns why that is not possible, or empty."""
    from distflow.data.gold import FORMS

    step = _reward_step(plan)
    if step is None:
        return "rewards of gold answers are not shown: no score step gives them without a model"
    for form in FORMS:
        open_ones = [s for s in samples if not ("score" in s.values and s.values["score"] >= 1)]
        rows = _rows(tokenizer, [(sample, form) for sample in open_ones])
        if not rows:
            continue
        batch = _batch(rows)
        lacking = [name for name in step.reads if name not in batch]
        if lacking:
            return f"rewards of gold answers are not shown: step {step.name!r} reads {lacking[0]}, which only a run has"
        try:
            judged = _run(step, batch, tokenizer)
        except DistflowError as error:
            if any(sample.values for sample in samples):
                continue  # it works, and just not on a form that nobody asked for
            return f"warning: the reward fails on gold answers:\n{error}"
        for row, (sample, _, _) in enumerate(rows):
            values = dict(_values(judged, row))
            if not sample.values or values["score"] > sample.values["score"]:
                sample.form, sample.values = form, values
    return ""


def _reward_step(plan: Plan) -> StepPlan | None:
    """The step that writes the reward; None if a model does."""
    found = [step for step in plan.steps if step.role == "score" and "reward" in step.writes and not step.prefix]
    return found[0] if found and found[0].model is None else None


def _show_conflict(plan: Plan, tokenizer: Tokenizer, samples: Sequence[_Sample]) -> None:
    """Warn of two components that each give 1 to some form of the first gold answer, and never both to the same."""
    from distflow.data.gold import FORMS

    step = _reward_step(plan)
    components = step.settings.get("function") if step is not None else None
    rows = _rows(tokenizer, [(sample, form) for sample in samples if sample.values for form in FORMS][: len(FORMS)])
    if step is None or not isinstance(components, Mapping) or not rows:
        return
    try:
        judged = _run(step, _batch(rows), tokenizer)
    except DistflowError:
        return  # not every function takes every form
    full: dict[str, set[str]] = {}
    for row, (_, form, _) in enumerate(rows):
        for name, value in _values(judged, row):
            if name.removeprefix("rewards/") in components and value >= 1:
                full.setdefault(name.removeprefix("rewards/"), set()).add(form)
    apart = next(((one, two) for one, two in combinations(full, 2) if not full[one] & full[two]), None)
    if apart is not None:
        shown = [next(form for form in FORMS if form in full[name]).format(rows[0][0].answer) for name in apart]
        click.echo(
            f"warning: no form of a response that was tried gets 1 from {apart[0]} and from {apart[1]}: the first "
            f"takes {shown[0]!r}, the second {shown[1]!r} — a response that is right for one is wrong for the other"
        )


def _rows(tokenizer: Tokenizer, given: Sequence[tuple[_Sample, str]]) -> list[tuple[_Sample, str, list[int]]]:
    """Gold answers in forms, with the tokens of those that this model can write."""
    written = [(s, form, _encoded(tokenizer, s.response(form))) for s, form in given if s.answer is not None]
    return [(sample, form, ids) for sample, form, ids in written if ids is not None]


def _encoded(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """The tokens of a response; None if this model cannot write it."""
    try:
        ids = list(tokenizer.encode(text))
    except ValueError:
        return None
    return ids if tokenizer.eos_token_id is None else [*ids, tokenizer.eos_token_id]


def _batch(rows: Sequence[tuple[_Sample, str, list[int]]]) -> Batch:
    """Gold answers as the responses that a generate step would have written."""
    import torch

    from distflow.data.batch import Batch, Ragged
    from distflow.types import FINISH_REASONS, LEFT_OUT

    count = len(rows)
    ids = [response for *_, response in rows]
    numbers = torch.arange(count)
    return Batch(
        {
            "uid": torch.tensor([[0, sample.prompt.index, row] for row, (sample, *_) in enumerate(rows)]),
            "group": numbers,
            "sample": torch.zeros(count, dtype=torch.int64),
            "prompt_ids": Ragged.from_rows([sample.prompt.token_ids for sample, *_ in rows], torch.int64),
            "prompt_text": Ragged.from_texts([sample.prompt.text for sample, *_ in rows]),
            "task": Ragged.from_texts([sample.prompt.task for sample, *_ in rows]),
            "response_ids": Ragged.from_rows(ids, torch.int64),
            "response_mask": Ragged.from_rows([[1] * len(one) for one in ids], torch.bool),
            "response_text": Ragged.from_texts([sample.response(form) for sample, form, _ in rows]),
            "finish_reason": torch.full((count,), FINISH_REASONS.index("stop")),
            LEFT_OUT: Ragged.from_texts([""] * count),
        }
    )


def _run(step: StepPlan, batch: Batch, tokenizer: Tokenizer) -> Batch:
    from distflow.runtime.steps import StepContext, StepRunner

    context = StepContext(step.name, worker="preview", tokenizer=tokenizer)
    return StepRunner("preview", [step], {step.name: context}).call(step.name, batch)


def _values(batch: Batch, row: int) -> Iterator[tuple[str, float]]:
    """Reward, score and parts of a sample, as far as they are there."""
    from distflow.types import is_reward_part

    for name in ("reward", "score", *filter(is_reward_part, batch.columns)):
        column: Any = batch[name] if name in batch else batch["reward"]
        yield name, float(column[row])
