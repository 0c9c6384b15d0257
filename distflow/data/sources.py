"""Prompt sources. Imports no torch.

A source is what `data.source` returns: it has a length and returns the prompt of an index, always the same one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from distflow.errors import UserError


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as text, and what the reward needs to know about it (plain values that JSON can hold).

    `messages`, turns of a chat as mappings with role and content, are written by the model's chat template, with the
    schemas in `tools`; `text` is then what reward functions and readers see. An assistant's turn that ends them is the
    beginning of the response where the task has an `answer` of its own, and else the answer.
    """

    text: str
    task: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    reply: Mapping[str, Any] | None = None
    """The assistant's turn that follows in the data, if there is one."""
    spoken: Sequence[Mapping[str, Any]] = ()
    """Turns between the prompt and its response, where all turns of the assistant are trained on."""
    opening: Mapping[str, Any] | None = None
    """The beginning of the response, an assistant's turn, which is a part of the prompt."""
    chat: bool = False
    """The data has the prompt as messages, and not as a text that `data.chat` makes a turn of."""


@runtime_checkable
class PromptSource(Protocol):
    """What a data source offers."""

    def __len__(self) -> int:
        """Number of prompts; at least 1."""
        ...

    def __getitem__(self, index: int) -> PromptText | Mapping[str, Any] | str:
        """Prompt `index`, 0 ≤ index < len; a mapping is a row of columns, as of a file."""
        ...


class ReasoningGymSource:
    """A data set of the reasoning-gym package; each task carries what its `score_answer` needs."""

    KEYS = ("dataset", "entry")
    """What every task has."""

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
