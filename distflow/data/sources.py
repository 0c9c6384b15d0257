"""Prompt sources, and the seeded order in which a run goes through one. Imports no torch.

A source is what `data.source` returns: it has a length and returns the prompt of an index, always the same one.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from distflow.data.randomness import permutation
from distflow.errors import PluginError, UserError
from distflow.types import Prompt, Uid

_KEPT_EPOCHS = 2
MAX_TEXT = 8 << 20
"""Characters of one prompt's text and task together."""
TOKEN_IDS = 1 << 31
"""Upper bound of token ids, which are sent as 4-byte integers."""


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as text, and what the reward needs to know about it (plain values that JSON can hold)."""

    text: str
    task: Mapping[str, Any]


@runtime_checkable
class PromptSource(Protocol):
    """What a data source offers."""

    def __len__(self) -> int:
        """Number of prompts; at least 1."""
        ...

    def __getitem__(self, index: int) -> PromptText:
        """Prompt `index`, 0 ≤ index < len."""
        ...


class PromptTokenizer(Protocol):
    """The part of a tokenizer that encodes prompts."""

    def encode(self, text: str) -> list[int]:
        """Text to token ids, without special tokens being added."""
        ...

    def chat_prompt(self, text: str) -> list[int]:
        """The text as a user's turn under the model's chat template."""
        ...


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """`run.seed` and the recipe's `data` section, as far as they concern order and tokens."""

    seed: int
    shuffle: bool
    chat: bool
    max_prompt_tokens: int


class PromptOrder:
    """Global prompt position 0, 1, 2, … → prompt: one seeded permutation of the source after another."""

    def __init__(self, source: PromptSource, tokenizer: PromptTokenizer, settings: PromptSettings) -> None:
        if not isinstance(source, PromptSource):
            raise PluginError(
                f"the data source is a {type(source).__name__}; expected an object with __len__ and __getitem__(index)"
            )
        if len(source) < 1:
            raise UserError(f"the data source {type(source).__name__} is empty; expected at least one prompt")
        self._source = source
        self._tokenizer = tokenizer
        self._settings = settings
        self._orders: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def __len__(self) -> int:
        """Number of prompts in one pass."""
        return len(self._source)

    def uid(self, position: int) -> Uid:
        """Identity of the prompt at a position; raises ValueError for a negative one."""
        if position < 0:
            raise ValueError(f"prompt position {position}: positions count from 0")
        epoch, place = divmod(position, len(self._source))
        index = int(self._order(epoch)[place]) if self._settings.shuffle else place
        return Uid(epoch, index, position)

    def prompt(self, position: int) -> Prompt:
        """The prompt at a position; raises UserError if it is empty, too long, or cannot be written in tokens."""
        _, index, _ = self.uid(position)
        given = self._source[index]
        if not isinstance(given, PromptText):
            raise PluginError(
                f"data source: prompt {index} is a {type(given).__name__}; expected a PromptText(text, task)"
            )
        task = _as_json(index, given.task)
        size = len(given.text) + len(task)
        if size > MAX_TEXT:
            raise UserError(
                f"data: prompt {index} and its task take {size} characters, expected at most {MAX_TEXT}: they are sent "
                "with every lease — put large values into a file and its name into the task"
            )
        return Prompt(index, self._encode(index, given.text), given.text, task)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            self._orders[epoch] = permutation(self._settings.seed, epoch, len(self._source))
            while len(self._orders) > _KEPT_EPOCHS:
                self._orders.popitem(last=False)
        return self._orders[epoch]

    def _encode(self, index: int, text: str) -> tuple[int, ...]:
        write = self._tokenizer.chat_prompt if self._settings.chat else self._tokenizer.encode
        try:
            ids = tuple(write(text))
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"data: prompt {index} cannot be written in this model's tokens: {error}") from error
        if ids and not 0 <= min(ids) <= max(ids) < TOKEN_IDS:
            raise UserError(
                f"data: prompt {index} has token ids from {min(ids)} to {max(ids)}, expected 0 to {TOKEN_IDS - 1}: "
                "no model accepts what this tokenizer returned"
            )
        limit = self._settings.max_prompt_tokens
        if not 1 <= len(ids) <= limit:
            raise UserError(
                f"data: prompt {index} has {len(ids)} tokens, expected 1 to {limit} (data.max_prompt_tokens); "
                f"raise the limit or leave it out of the source. It begins {text[:60]!r}"
            )
        return ids


def _as_json(index: int, task: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(task), ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"data: the task of prompt {index} cannot be written as JSON: {error}") from error


class ReasoningGymSource:
    """A data set of the reasoning-gym package; each task carries what its `score_answer` needs."""

    def __init__(self, name: str, dataset: Any) -> None:
        self._name = name
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> PromptText:
        entry = self._dataset[index]
        # Metadata may contain tuples, dates or numpy numbers; values without a JSON type are kept as text.
        plain = json.loads(json.dumps(entry, default=str))
        return PromptText(entry["question"], {"dataset": self._name, "answer": entry["answer"], "entry": plain})


def reasoning_gym(
    *, dataset: str, size: int = 1000, seed: int = 0, config: Mapping[str, Any] | None = None
) -> ReasoningGymSource:
    """`size` generated tasks of a reasoning-gym data set, for example chain_sum, with the settings it takes.

    Raises UserError when the package is missing, or does not know the data set or one of its settings.
    """
    try:
        package = import_module("reasoning_gym")
    except ImportError as error:
        raise UserError(
            "data.source reasoning_gym needs the package reasoning-gym, which is missing: pip install reasoning-gym"
        ) from error
    try:
        made = package.create_dataset(dataset, size=size, seed=seed, **dict(config or {}))
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(
            f"data: reasoning-gym refuses data set {dataset!r} with {dict(config or {})}: {error}"
        ) from error
    return ReasoningGymSource(dataset, made)
