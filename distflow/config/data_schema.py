"""Sections `data` and `val` of a recipe: prompts, and validation. The text under each field is its documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from distflow.config.paths import FED
from distflow.config.section import Section

MOST_FED_ROWS = 10_000_000
"""Rows that clients may put into a run."""


class SourceConfig(Section):
    """One of several sources of prompts."""

    source: str = Field(min_length=1)
    """As `data.source`."""
    with_: dict[str, Any] = Field(default={}, alias="with")
    """As `data.with`."""
    fields: dict[str, str] = Field(default={})
    """As `data.fields`."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the prompts that come from this source, relative to the weights of the others."""


class DifficultyPoolConfig(Section):
    """Prompts within a range of pass rates."""

    up_to: float = Field(ge=0.0, le=1.0)
    """Highest pass rate in the pool, which begins above that of the pool before."""
    weight: float = Field(default=1.0, ge=0.0)
    """How often its prompts are visited, relative to the pool with the largest weight, which is visited in each pass
    over the data; unseen prompts are too."""


class DifficultyConfig(Section):
    """Draw prompts by their pass rates: the share of the samples of a prompt's last visit that were solved."""

    pools: dict[str, DifficultyPoolConfig] = Field(default={})
    """Ranges of pass rates by name, each with a weight; the last one is up to 1. Without any, all prompts are alike."""
    retire_solved: int | None = Field(default=None, ge=1, json_schema_extra={"unit": "visits"})
    """Visit a prompt no more once all its samples were solved in so many visits in a row; null: never."""
    retire_unsolved: int | None = Field(default=None, ge=1, json_schema_extra={"unit": "visits"})
    """Visit a prompt no more once none of its samples was solved in so many visits in a row; null: never."""
    solved_score: float = 1.0
    """A sample with at least this score, or without scores this reward, is solved."""
    reopen_below: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Visit all prompts again, as if unseen, once less than this share of them is left; 0: once none is."""

    @property
    def ranges(self) -> list[tuple[str, DifficultyPoolConfig]]:
        """The pools, from the hardest prompts to the easiest."""
        return sorted(self.pools.items(), key=lambda item: item[1].up_to)


class DataConfig(Section):
    """Where prompts come from: one source, or a mixture of several (`mix`)."""

    source: str | None = Field(default=None, min_length=1)
    """A file of prompts or a folder of them (.jsonl, .json, .csv, .tsv, each also as .gz or .zst; .parquet; a data set
    saved by Hugging Face datasets), or `hub:ID`; or a function that returns prompts: `module:name` or `./file.py:name`
    (docs/data.md)."""
    with_: dict[str, Any] = Field(default={}, alias="with")
    """Arguments of that function, by name; of a file or folder: `split`."""
    fields: dict[str, str] = Field(default={})
    """Names of columns, where they differ: `{prompt: question, answer: solution}`; `a.b` is column b within a."""
    mix: dict[str, SourceConfig] = Field(default={})
    """Several sources by name instead of `source`; each prompt position belongs to one of them, by weight and seed."""
    shuffle: bool = True
    """Shuffle each pass over the data, seeded by run.seed."""
    chat: bool = False
    """Wrap each prompt that is a text as a user's turn of the model's chat template; chat messages always are."""
    chat_template_args: dict[str, Any] = Field(default={})
    """Further arguments of the chat template, such as `{enable_thinking: false}`."""
    max_prompt_tokens: int = Field(default=512, ge=1, json_schema_extra={"unit": "tokens"})
    """Longest prompt, in tokens; `overlong` says what becomes of a longer one."""
    overlong: Literal["error", "drop"] = "error"
    """What becomes of a prompt longer than max_prompt_tokens: an error that names it, or it is left out (drop)."""
    strict: bool = False
    """Whether it is an error, and not a warning, that a part of a conversation, such as tools, calls or reasoning, does
    not reach the model as it was given."""
    difficulty: DifficultyConfig | None = None
    """Draw prompts by how many of their samples were solved; null: each pass over the data visits all of them."""

    @property
    def sources(self) -> dict[str, SourceConfig]:
        """The sources by name: those of `mix`, or one without a name."""
        if self.mix or self.source is None:
            return self.mix
        return {"": SourceConfig.model_validate({"source": self.source, "with": self.with_, "fields": self.fields})}

    @property
    def fed(self) -> bool:
        """Whether clients put the prompts while the run goes on."""
        return self.source == FED

    @property
    def shown(self) -> str:
        """The sources as text, for messages."""
        return ", ".join(one.source for one in self.sources.values())


class ValConfig(Section):
    """Validation: how good the policy is on prompts that it may not be trained on."""

    every: int | None = Field(default=None, ge=1, json_schema_extra={"unit": "training steps"})
    """Validate after every so many training steps, and after the last one; null: only after the last."""
    at_start: bool = True
    """Validate before the first training step too."""
    data: DataConfig | None = None
    """Where its prompts come from, taken in their order; null: from the prompts of training. Unless they are given,
    chat, chat_template_args, max_prompt_tokens, overlong and strict are those of data. Rows that are held out have to
    be named."""
    prompts: int | None = Field(default=None, ge=1, json_schema_extra={"unit": "prompts"})
    """Use the first so many of them; null: all."""
    samples_per_prompt: int = Field(default=1, ge=1, le=1 << 20, json_schema_extra={"unit": "samples"})
    """k of `val/avg@k`, `val/pass@k` and `val/maj@k`."""
    sampling: dict[str, Any] = Field(default={})
    """Settings of the flow's generate step that differ, such as temperature."""


WRITTEN_ALIKE = ("chat", "chat_template_args", "max_prompt_tokens", "overlong", "strict")
"""Keys of `val.data` that are those of `data` unless they are given: prompts of one form are compared."""


def inherited(recipe: object) -> object:
    """The values of a recipe, with what `val.data` takes from `data`."""
    match recipe:
        case {"data": Mapping() as data, "val": {"data": Mapping() as own} as val, **others}:
            given = {key: data[key] for key in WRITTEN_ALIKE if key in data}
            return {**others, "data": data, "val": {**val, "data": {**given, **own}}}
    return recipe
