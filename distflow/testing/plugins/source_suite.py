"""The contract of data sources: the same prompt for the same index, wherever and whenever it is asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from distflow.config.data_schema import SourceConfig
from distflow.data.loading import open_source
from distflow.data.order import PromptOrder, PromptSettings, SourceUse
from distflow.errors import DistflowError
from distflow.flow.resolve import resolve
from distflow.runtime.steps import user_code
from distflow.testing.plugins.findings import SuiteReport, cut
from distflow.testing.plugins.subjects import Subject

LOOKED_AT = 32
SLOW_S = 0.1


class AnyTokenizer:
    """Takes every text and every chat."""

    eos_token_id = 0
    end_tokens = (0,)

    def encode(self, text: str, *, begins: bool = False, behind: int | None = None) -> list[int]:
        """Its bytes."""
        return list(text.encode())

    def closes(self, token: int) -> bool:
        """The end token does."""
        return token == self.eos_token_id

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special: bool) -> list[str]:
        """The texts of such bytes."""
        return [bytes(row).decode(errors="replace") for row in rows]

    def chat_text(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        *,
        asks: bool = True,
        continues: bool = False,
    ) -> str:
        """As Python shows them."""
        return str(turns)


def open_data(
    source: str,
    settings: Mapping[str, Any],
    fields: Mapping[str, str],
    *,
    prompts: bool = False,
) -> tuple[SourceUse, PromptOrder]:
    """A source and its prompts, in its own order; `prompts`: as in `PromptOrder`.

    Raises DistflowError, with the user's frames first.
    """
    config = SourceConfig.model_validate({"source": source, "with": dict(settings), "fields": dict(fields)})
    with user_code(f"the data source, when it was made with {dict(settings)}"):
        use = open_source("", config, resolve)
        order = PromptOrder([use], AnyTokenizer(), PromptSettings(0, False, False, 1 << 30), prompts=prompts)
    return use, order


def tasks_of(subject: Subject, most: int) -> list[tuple[str, str]]:
    """The first prompts of the data that a plug-in is tested with, as text and task."""
    assert subject.data is not None, "asked for where there is some"
    data = str(subject.data)
    about = (data, subject.data_settings, subject.data_fields)
    _, order = open_data(*about, prompts=subject.data_prompts)
    with user_code("the data source"):
        found = [order.of_any_length(position)[1] for position in islice(range(len(order)), most)]
    return [(prompt.text, prompt.task) for prompt in found]


def run_source_suite(subject: Subject, report: SuiteReport) -> list[tuple[str, str]] | None:
    """Run the suite; returns the prompts looked at, None where there are none."""
    report.begin("making the data source")
    try:
        _, order = open_data(subject.call, subject.settings, subject.data_fields)
        count = len(order)
        places = sorted({*range(min(count, LOOKED_AT)), count // 2, count - 1})
        found = _read(order, report, places)
        again = _read(order, report, list(reversed(places)))[::-1]
        report.begin("making the data source a second time")
        other = _read(open_data(subject.call, subject.settings, subject.data_fields)[1], report, places)
    except DistflowError as error:
        report.add("wrong", str(error))
        return None
    if found != again:
        report.add("wrong", _unstable("an index a second time", places, found, again))
    elif found != other:
        report.add("wrong", _unstable("a second source made with the same settings", places, found, other))
    else:
        report.add("ok", f"{count} prompts; gives the same for an index twice, in any order, and when it is made again")
    empty = [place for place, (text, _) in zip(places, found, strict=True) if not text]
    if empty:
        report.add(
            "wrong", f"prompt {empty[0]} is empty, {len(empty)} of {len(places)} are: expected at least one token"
        )
    return found


def _unstable(
    when: str, places: Sequence[int], one: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]]
) -> str:
    place, first, second = next((place, a, b) for place, a, b in zip(places, one, other, strict=True) if a != b)
    kind = "text" if first[0] != second[0] else "task"
    a, b = (first[0], second[0]) if kind == "text" else (first[1], second[1])
    return (
        f"gives another {kind} for {when}, first at index {place}: {cut(a)} and {cut(b)} — every training worker reads "
        "the source by itself, and again after a restart: let the index and a seed decide alone"
    )


def _read(order: PromptOrder, report: SuiteReport, places: Sequence[int]) -> list[tuple[str, str]]:
    found, longest = [], 0.0
    for place in places:
        report.begin(f"reading prompt {place}")
        began = time.monotonic()
        with user_code(f"the data source, at index {place}"):
            _, prompt = order.of_any_length(place)
        longest = max(longest, time.monotonic() - began)
        found.append((prompt.text, prompt.task))
    if longest > SLOW_S:
        report.add("note", f"takes up to {longest:.1f} s for a prompt; each training worker reads ahead in one thread")
    return found
