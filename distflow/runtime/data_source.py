"""The data source of a run, made in the process that reads it: a training worker, or `distflow validate --deep`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distflow.config.plugins import TOKENIZER
from distflow.config.schema import Recipe
from distflow.data.sources import PromptOrder, PromptSettings
from distflow.errors import DistflowError, Problem, UserError
from distflow.flow.plan import Plan
from distflow.flow.resolve import resolve
from distflow.runtime.blame import step_error
from distflow.runtime.protocols import Tokenizer
from distflow.types import Prompt


def build_prompts(recipe: Recipe, tokenizer: Tokenizer, where: str) -> PromptOrder:
    """Make the source; `where` is told with what it raises. Raises StepError for that, else UserError."""
    data = recipe.data
    make = resolve(data.source)
    with blamed(f"{where}, when it was made with {data.with_}"):
        source = make(**data.with_)
        return PromptOrder(
            source, tokenizer, PromptSettings(recipe.run.seed, data.shuffle, data.chat, data.max_prompt_tokens)
        )


def first_prompt(plan: Plan, key_where: str) -> tuple[Prompt | None, list[Problem]]:
    """The prompt at position 0 as a run would begin with, or what is wrong with the source or the tokenizer.

    `key_where`: where the recipe names the data source.
    """
    recipe = plan.recipe
    where = f"data source {recipe.data.source}"
    try:
        tokenizer = resolve(TOKENIZER)(recipe.models[plan.primary].model_dump())
        prompts = build_prompts(recipe, tokenizer, where)
        with blamed(f"{where}, at prompt position 0"):
            return prompts.prompt(0), []
    except UserError as error:
        message, cure = str(error), "correct data.source, data.with or the tokenizer"
    except DistflowError as error:
        message, cure = f"it fails:\n{error}", "the workers would fail in the same way"
    return None, [Problem(key_where, "data.source", message, cure)]


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """A data source is a user's code: what it raises names it, with its frames first."""
    try:
        yield
    except DistflowError:
        raise
    except (Exception, SystemExit) as error:  # an exit would end the thread that reads, and nobody would know
        raise step_error(error, what) from error
