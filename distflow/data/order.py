"""The prompts of a run by position: from the sources, in their order, in the model's tokens. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from distflow.data.chat_template import ChatTemplate
from distflow.data.conversation import first_answer
from distflow.data.fed import FedRows
from distflow.data.formats import DATA_SOURCE, PROMPT
from distflow.data.gold import ANSWER, has
from distflow.data.messages import ASSISTANT, as_text, conversation, tools_of
from distflow.data.mixing import Mixture, Visits, pass_order
from distflow.data.responses import DataRow, Reading, in_tokens
from distflow.data.rows import is_replaced, marked_as_beginning, prompt_of, with_answer
from distflow.data.sources import PromptSource, PromptText, ReasoningGymSource
from distflow.data.tokenizer import Tokenizer
from distflow.errors import PluginError, UserError
from distflow.log import logger
from distflow.types import GivenResponse, Prompt, Uid

log = logger(__name__)

MAX_TEXT = 8 << 20
"""Characters of one prompt's text and task together."""
TOKEN_IDS = 1 << 31
"""Upper bound of token ids, which are sent as 4-byte integers."""
_MODEL = "model"
"""A role by which others call the assistant."""
LONG = "long"
"""The reason for which overlong prompts are left out; others are the keys that their tasks lack."""


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """`run.seed` and the recipe's `data` section, as far as they concern order and tokens."""

    seed: int
    shuffle: bool
    chat: bool
    max_prompt_tokens: int
    overlong: str = "error"
    """error, or drop."""
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    """What the chat template leaves out is an error."""
    unanswered: str = "drop"
    """What becomes of a prompt whose task lacks what the reward needs: error, or drop."""


@dataclass(frozen=True, slots=True)
class SourceUse:
    """A source and how it is used. `name`: in a mixture; empty for the only one."""

    rows: PromptSource
    name: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Names of columns, where rows are mappings."""
    weight: float = 1.0
    where: Callable[[int], str] | None = None
    """Where the prompt of an index stands, if that is known."""

    def label(self, index: int) -> str:
        """The prompt of an index, for messages."""
        of = f" of {self.name}" if self.name else ""
        return f"prompt {index}{of}" + (f" ({self.where(index)})" if self.where is not None else "")


class PromptOrder:
    """Global prompt position 0, 1, 2, … → prompt: one seeded permutation of each source after another, mixed."""

    def __init__(
        self,
        sources: Sequence[SourceUse],
        tokenizer: Tokenizer,
        settings: PromptSettings,
        reading: Reading | None = None,
        needs: Mapping[str, str] | None = None,
        columns: Mapping[str, str] | None = None,
        *,
        prompts: bool = False,
    ) -> None:
        """`reading`: where the data gives responses too. `needs`: keys without which a task cannot be judged, each with
        the reward function that needs it; `columns`: those that must be there, be they null. `prompts`: put the prompt
        into the task where it is a conversation.
        """
        for source in sources:
            _check_source(source.rows)
        sizes = [len(source.rows) for source in sources]
        self._sources = sources
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, settings.chat_template_args, strict=settings.strict)
        self._settings = settings
        self._reading = reading
        self._needs = needs or {}
        self._columns = columns or {}
        self._prompts = prompts
        self._began = False
        """A conversation that ends with an assistant's turn beside another answer has been told of."""
        self._without = ""
        """The first prompt that was left out for what its task lacks, which has been told."""
        self._looked_at: tuple[SourceUse, int, PromptText] | None = None
        """What the filter has seen last, which is mostly what is asked for next."""
        self._mixture = Mixture({source.name: source.weight for source in sources}, settings.seed)
        self._first = [0, *accumulate(sizes)]
        """Number of each source's first prompt, over all sources."""
        self._visits = [
            Visits(size, pass_order(settings.seed, source.name, size, shuffle=settings.shuffle), self._filter(source))
            for source, size in zip(sources, sizes, strict=True)
        ]

    def uid(self, position: int) -> Uid:
        """Identity of the prompt at a position; raises ValueError for a negative one."""
        number, epoch, index = self._at(position)
        return Uid(epoch, self._first[number] + index, position)

    def prompt(self, position: int) -> Prompt:
        """The prompt at a position; raises UserError if it is empty, too long, or cannot be written in tokens."""
        label, prompt = self.of_any_length(position)
        ids, limit = prompt.token_ids, self._settings.max_prompt_tokens
        if not 1 <= len(ids) <= limit:
            raise UserError(
                f"data: {label} has {len(ids)} tokens, expected 1 to {limit} (data.max_prompt_tokens); raise the "
                "limit, leave out what is longer (data.overlong=drop), or leave it out of the source. It begins "
                f"{prompt.text[:60]!r}"
            )
        longest = self.longest_response(prompt)
        if self._reading is not None and longest > self._reading.max_response_tokens:
            raise UserError(
                f"data: a response of {label} has {longest} tokens with its end token, expected at most "
                f"{self._reading.max_response_tokens} (flow.steps.{self._reading.name}.with.max_response_tokens); "
                "raise the limit, leave out what is longer (data.overlong=drop), or leave it out of the source"
            )
        return prompt

    @staticmethod
    def longest_response(prompt: Prompt) -> int:
        """Tokens of the longest response that the data gives."""
        return max((len(response.token_ids) for response in prompt.responses), default=0)

    def of_any_length(self, position: int) -> tuple[str, Prompt]:
        """The prompt at a position however long it is, with its name in messages; raises UserError as `prompt` does."""
        number, _, index = self._at(position)
        source = self._sources[number]
        seen, self._looked_at = self._looked_at, None
        given = seen[2] if seen is not None and seen[:2] == (source, index) else self.given(source, index)
        if lacking := self._lacks(source, index, given):
            raise UserError(f"data: {source.label(index)} {self._lacking(lacking)} — give it one, or leave it out")
        self._check_columns(source, index, given)
        task = _as_json(source.label(index), self._task(given))
        size = len(given.text) + len(task)
        if size > MAX_TEXT:
            raise UserError(
                f"data: {source.label(index)} and its task take {size} characters, expected at most {MAX_TEXT}: they "
                "are sent with every lease — put large values into a file and its name into the task"
            )
        ids = self._encode(source.label, index, given)
        responses = self._made(source, index, given, ids, self._data_row(source, index, given, position))
        return source.label(index), Prompt(self._first[number] + index, ids, given.text, task, responses)

    def __len__(self) -> int:
        """Prompts of all sources, those that are left out included."""
        return self._first[-1]

    @property
    def fed(self) -> FedRows | None:
        """The only source, if its rows come from clients."""
        rows = self._sources[0].rows
        return rows if isinstance(rows, FedRows) else None

    def end(self, rows: int) -> None:
        """The only source, which is not shuffled, has only so many rows: passes go over these."""
        (visits,) = self._visits
        visits.end(rows)

    def count(self) -> int:
        """Prompts of all sources without those that are left out; to find these, it looks at all that it has not."""
        for source, visits in zip(self._sources, self._visits, strict=True):
            unknown = not visits.all_seen
            if visits.count() < len(source.rows) and unknown:
                log.warning("data: %s", self._left_out(source, visits))
        return sum(visits.count() for visits in self._visits)

    @property
    def looked_at(self) -> int:
        """How often a prompt was looked at so far, to find out whether it is left out."""
        return sum(visits.seen for visits in self._visits)

    def left_out(self) -> list[str]:
        """What is known so far of prompts that are left out, a line for each source that has some."""
        pairs = zip(self._sources, self._visits, strict=True)
        return [self._left_out(source, visits) for source, visits in pairs if visits.left_out]

    def _at(self, position: int) -> tuple[int, int, int]:
        """Number of the source, pass over it, and index in it."""
        if position < 0:
            raise ValueError(f"prompt position {position}: positions count from 0")
        number, ordinal = self._mixture.at(position)
        visits = self._visits[number]
        unknown = not visits.all_seen
        found = visits.at(ordinal)
        source = self._sources[number]
        if unknown and visits.all_seen and visits.left_out:
            log.warning("data: %s", self._left_out(source, visits))
        if found is None:
            raise UserError(f"data: {self._left_out(source, visits)}; {self._cure(source, visits)}")
        return number, *found

    def _left_out(self, source: SourceUse, visits: Visits) -> str:
        of = f" of {source.name}" if source.name else ""
        found = []
        for reason, count in sorted(visits.reasons.items(), key=lambda item: item[0] != LONG):
            why = self._lacking(reason, several=True) + ", and are left out" if reason != LONG else self._longer()
            found.append(f"{count} of {visits.seen} prompts{of} {why}")
        return "; ".join(found)

    def _longer(self) -> str:
        bound = f"data.max_prompt_tokens={self._settings.max_prompt_tokens}"
        if self._reading is not None:
            bound += f", or their responses than max_response_tokens={self._reading.max_response_tokens},"
        return f"are longer than {bound} and left out (data.overlong=drop)"

    def _lacking(self, key: str, *, several: bool = False) -> str:
        what = "gold answer" if key == ANSWER else repr(key)
        return f"{'have' if several else 'has'} no {what}, which reward {self._needs[key]} needs"

    def _cure(self, source: SourceUse, visits: Visits) -> str:
        """Return what to do where all prompts of a source are left out."""
        key = next((reason for reason in visits.reasons if reason != LONG), None)
        if key is None:
            return "raise data.max_prompt_tokens"
        there = ", ".join(self.given(source, 0).task) or "nothing"
        return f"the task of the first one has {there} — data.fields.{key}=COLUMN says which column it is"

    def _needed_of(self, source: SourceUse) -> list[str]:
        """Keys that the reward needs and a task of this source may lack; to make one of reasoning-gym may take long."""
        known = ReasoningGymSource.KEYS if isinstance(source.rows, ReasoningGymSource) else ()
        return [key for key in self._needs if key not in known]

    def _lacks(self, source: SourceUse, index: int, given: PromptText) -> str:
        """The first key that the reward needs and this prompt's task has not; empty if there is none."""
        try:
            return next((key for key in self._needed_of(source) if not has(given.task, key)), "")
        except UserError as error:
            raise UserError(f"data: {source.label(index)}: {error}") from error

    def _filter(self, source: SourceUse) -> Callable[[int], str] | None:
        settings = self._settings
        asks = settings.unanswered == "drop" and bool(self._needed_of(source))
        if settings.overlong != "drop" and not asks:
            return None

        def leaves_out(index: int) -> str:
            given = self.given(source, index)
            self._looked_at = source, index, given
            if asks and (lacking := self._lacks(source, index, given)):
                self._tell(source, index, lacking)
                return lacking
            return LONG if settings.overlong == "drop" and self._is_long(source, index, given) else ""

        return leaves_out

    def _tell(self, source: SourceUse, index: int, lacking: str) -> None:
        """Warn of the first prompt that the reward cannot judge: the whole pass may take days."""
        if not self._without:
            self._without = source.label(index)
            log.warning("data: %s %s: it is left out, as all such prompts are", self._without, self._lacking(lacking))

    def _is_long(self, source: SourceUse, index: int, given: PromptText) -> bool:
        ids = self._encode(source.label, index, given)
        if len(ids) > self._settings.max_prompt_tokens:
            return True
        if self._reading is None:
            return False
        # A response of another prompt is not this prompt's: nothing is left out for it.
        own = self._data_row(source, index, given, None)
        limit = self._reading.max_response_tokens
        return any(len(one.token_ids) > limit for one in self._made(source, index, given, ids, own) if one.trains)

    def _row(self, position: int) -> DataRow:
        number, _, index = self._at(position)
        source = self._sources[number]
        return self._data_row(source, index, self.given(source, index), position)

    def _data_row(self, source: SourceUse, index: int, given: PromptText, position: int | None) -> DataRow:
        """A row as read steps get it; without a position it is its own next one."""
        turns = [] if given.reply is not None else [*given.messages, *given.spoken]
        ends = turns[-1]["role"] if turns else ""
        row = DataRow(
            given.task,
            lambda: row if position is None else self._row(position + 1),
            source.label(index),
            given.reply,
            ends,
        )
        return row

    def _made(
        self, source: SourceUse, index: int, given: PromptText, prompt: Sequence[int], row: DataRow
    ) -> tuple[GivenResponse, ...]:
        """The responses that the data gives for a row, in tokens; none in flows that read none."""
        if self._reading is None:
            return ()
        label = source.label(index)
        try:
            return tuple(
                in_tokens(one, given, prompt, self._tokenizer, self._template, label) for one in self._reading.of(row)
            )
        except ValueError as error:  # UserError is one, and so is what a tokenizer raises for a strange character
            raise UserError(f"data: a response of {label}: {error}") from error

    def given(self, source: SourceUse, index: int) -> PromptText:
        """What a source gives for an index, as text and task, whatever the form."""
        try:
            found = self._prompt_of(source.rows[index], source)
        except UserError as error:
            raise UserError(f"data: {source.label(index)}: {error}") from error
        if not isinstance(found, PromptText):
            raise PluginError(
                f"data source: {source.label(index)} is a {type(found).__name__}; expected a PromptText(text, task), a "
                "mapping of columns, or text"
            )
        if not source.name or DATA_SOURCE in found.task:
            return found
        return replace(found, task={**found.task, DATA_SOURCE: source.name})

    def _prompt_of(self, found: object, source: SourceUse) -> object:
        """A prompt with its conversation as messages, of what a source gave; raises UserError."""
        if isinstance(found, str):
            return PromptText(found, {})
        if isinstance(found, Mapping):
            found = prompt_of(found, source.fields)
        elif isinstance(found, PromptText):
            if source.fields:
                raise UserError(_FIELDS_OF.format(type(found).__name__))
            found = replace(found, messages=conversation(found.messages) or (), tools=tools_of(found.tools))
        if not isinstance(found, PromptText):
            return found
        if not found.messages:
            turns = [{"role": "user", "content": found.text}]
            return replace(found, messages=turns) if self._settings.chat else found
        found = replace(found, chat=True)
        if found.messages[-1]["role"] == ASSISTANT and found.reply is None:
            found = with_answer(found, reads=self._reading is not None)
        return found if self._reading is None else self._to_be_trained(found, self._reading)

    def _check_columns(self, source: SourceUse, index: int, given: PromptText) -> None:
        """Raise UserError if the first row that is looked at lacks a column that a reward function is called with."""
        columns, self._columns = self._columns, {}
        for column, function in columns.items():
            if column not in given.task:
                there = ", ".join(given.task) or "none besides the prompt"
                raise UserError(
                    f"data: {source.label(index)} has no column {column!r}, with which reward {function} is called; "
                    f"there are {there} — data.fields.{column}=COLUMN, or a default for this parameter"
                )

    def _task(self, given: PromptText) -> Mapping[str, Any]:
        """The task, with the prompt as the data has it where reward functions may ask for its messages."""
        if not (self._prompts and given.chat):
            return given.task
        turns = [*given.messages, *([] if given.opening is None else [given.opening])]
        return {**given.task, PROMPT: turns}

    @staticmethod
    def _to_be_trained(found: PromptText, reading: Reading) -> PromptText:
        """A conversation as far as it is the prompt of the turns that are trained on; raises UserError."""
        if any(turn["role"] == _MODEL for turn in found.messages):
            raise UserError(f"a turn has the role {_MODEL!r}; expected {ASSISTANT!r}, whose turns are trained on")
        if not reading.all_turns:
            return found
        first = first_answer(found.messages)
        prompt, spoken = found.messages[:first], found.messages[first:]
        return replace(found, messages=prompt, spoken=spoken, text=as_text(prompt)) if spoken else found

    def _encode(self, label: Callable[[int], str], index: int, given: PromptText) -> tuple[int, ...]:
        try:
            text = self._written(label(index), given) if given.messages else given.text
            ids = tuple(self._tokenizer.encode(text, begins=True))
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"data: {label(index)} cannot be written in this model's tokens: {error}") from error
        if not given.messages:
            self._check_text(label(index), given)
        if ids and not 0 <= min(ids) <= max(ids) < TOKEN_IDS:
            raise UserError(
                f"data: {label(index)} has token ids from {min(ids)} to {max(ids)}, expected 0 to {TOKEN_IDS - 1}: "
                "no model accepts what this tokenizer returned"
            )
        return ids

    def _check_text(self, label: str, given: PromptText) -> None:
        """Raise UserError for what a prompt that is a text cannot do without a chat template."""
        if self._settings.chat_template_args:
            raise UserError(
                f"data: {label} is a text, which no chat template writes, but data.chat_template_args are given — "
                "data.chat=true, or remove them"
            )
        if given.tools:
            with _of_row(label):
                self._template.tell(
                    "tools",
                    label,
                    "the prompt is a text, which no chat template writes, so its 'tools' do not reach the model — "
                    "data.chat=true, or remove them from the data",
                )

    def _written(self, label: str, given: PromptText) -> str:
        """The conversation of a prompt, up to where the response begins."""
        turns = given.messages
        if not self._began:
            self._tell_of_last(label, given)
        if given.opening is not None and not given.spoken:
            text = self._template.begin(turns, given.opening, given.tools)
            turns = [*turns, given.opening]
        else:
            text = self._template.write(turns, given.tools, asks=True)
        if self._reading is None:  # else the whole conversation is looked at
            with _of_row(label):
                self._template.check(text, turns, given.tools, label)
        return text

    def _tell_of_last(self, label: str, given: PromptText) -> None:
        """Warn of the first conversation that ends with an assistant's turn beside another answer or response."""
        if given.opening is not None and not marked_as_beginning(given.opening):
            beside = "does not give the answer" if self._reading is None else "is none of the responses"
            what = f"kept as the beginning of the response, since it {beside} beside it — if it is a whole answer,"
        elif self._reading is not None and is_replaced(given):
            what = "left out, since it is a whole answer and none of the responses beside it — if these are not meant,"
        else:
            return
        self._began = True
        cure = "remove it from the messages" if given.opening is not None else "remove their columns"
        log.warning("data: %s: the last assistant's turn is %s %s; told once", label, what, cure)


@contextmanager
def _of_row(label: str) -> Iterator[None]:
    """Name the row in users' errors."""
    try:
        yield
    except UserError as error:
        raise UserError(f"data: {label}: {error}") from error


_FIELDS_OF = "data.fields names columns, but the data source gives {}: remove it"


def _check_source(source: object) -> None:
    if not isinstance(source, PromptSource):
        raise PluginError(
            f"the data source is a {type(source).__name__}; expected an object with __len__ and __getitem__(index)"
        )
    if len(source) < 1:
        raise UserError(f"the data source {type(source).__name__} is empty; expected at least one prompt")


def _as_json(label: str, task: Mapping[str, Any]) -> str:
    try:
        return _sendable(task)
    except (TypeError, ValueError, RecursionError) as error:
        column, reason = next(_unsendable(task), ("", str(error)))
        at = f"column {column!r} of {label}" if column else f"the task of {label}"
        raise UserError(
            f"data: {at} cannot be sent to workers as JSON: {reason} — make it text, numbers, lists or mappings of "
            "these, or leave the column out"
        ) from error


def _sendable(value: object) -> str:
    text = json.dumps(dict(value) if isinstance(value, Mapping) else value, ensure_ascii=False)
    text.encode()  # A lone surrogate is no text.
    return text


def _unsendable(task: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The columns that JSON cannot hold, with the reason."""
    for column, value in task.items():
        try:
            _sendable({column: value})
        except (TypeError, ValueError, RecursionError) as error:
            yield str(column), str(error)
