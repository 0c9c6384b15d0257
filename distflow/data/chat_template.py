"""A model's chat template as the data meets it: it writes conversations, and what it leaves out of them is told.

Imports no torch.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from distflow.data.messages import ASSISTANT, TRAINS, Message, calls_of, content_text, with_arguments
from distflow.data.tokenizer import Tokenizer
from distflow.errors import UserError
from distflow.log import logger

log = logger(__name__)

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message for what a model thought before it answered."""
_READ = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", TRAINS})
"""Keys of a message that are looked at one by one, or need not be written."""
_OF_RECORD = frozenset(
    (
        *("id", "type", "object", "model", "index", "timestamp", "created", "created_at", "finish_reason"),
        *("stop_reason", "stop_sequence", "usage", "logprobs", "tool_call_id"),
    )
)
"""Keys of what an API has answered that tell nothing to a model, in a message and within its other keys."""
_THOUGHT = re.compile("reason|think|thought")
_PROBE = "aprobe"
_ASKS = {"role": "user", "content": "0"}
_ANSWERS = {"role": ASSISTANT, "content": _PROBE}
_THOUGHT_END = "</think>"
_OPEN = re.compile(r"(?:<(think|thinking|thought|reasoning)>|\[(THINK)\])\s*\Z")
"""The beginning of a thought at the end of a generation prompt."""
_SHOWN = 60
_NOTHING_TO_ESCAPE = re.compile(r"""[^\\"'<>&\x00-\x1f\x7f-\U0010ffff]*""")


class Given(NamedTuple):
    """A piece of a conversation that its template should write."""

    key: str
    """Where it stands in the data: content, tool_calls, tools …"""
    place: str
    """Which turn or tool it is of, for messages."""
    forms: tuple[str, ...]
    """Texts of which one should be there."""
    by_design: bool = False
    """Whether templates leave it out on purpose: the reasoning of turns before the last user's."""
    shared: bool = False
    """Whether it may be a part of another piece: a plain number, or the name of a tool beside its result."""


class ChatTemplate:
    """Writes conversations, and tells once of each key of messages that the template leaves out."""

    def __init__(self, tokenizer: Tokenizer, arguments: Mapping[str, Any], *, strict: bool = False) -> None:
        """`strict`: what is left out is an error."""
        self._tokenizer = tokenizer
        self._arguments = arguments
        self._strict = strict
        self._told: set[str] = set()

    def write(self, turns: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, asks: bool = False) -> str:
        """Write a conversation; `asks`: the generation prompt follows. Raises what the tokenizer's `chat_text` does."""
        return self._tokenizer.chat_text(list(map(self._turn, turns)), tools, self._arguments, asks=asks)

    def begin(self, turns: Sequence[Message], opening: Message, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Write a conversation and the beginning of an answer: behind the generation prompt, as the answer would be.

        Where the template has none, and only parts the two by white space, it is written as the template parts them.
        """
        asked, text = self.write(turns, tools, asks=True), content_text(opening)
        opened = open_thought(asked)
        if opened is not None and text.lstrip().startswith(opened.tag):
            return asked + opened.within(text)
        if not text.strip():
            return asked + text
        written = [*map(self._turn, turns), self._turn(opening)]
        try:
            going_on = self._tokenizer.chat_text(written, tools, self._arguments, asks=False, continues=True)
        except ValueError:  # the template leaves out a part of what it was given
            return asked + text
        as_given = going_on.startswith(asked) and going_on[len(asked) :].strip() == text.strip()
        # Many templates trim what they write; a line that has ended, behind ```python for one, is part of a beginning.
        return going_on.rstrip() + text[len(text.rstrip()) :] if as_given else asked + text

    def check(self, written: str, turns: Sequence[Message], tools: Sequence[Mapping[str, Any]], label: str) -> None:
        """Compare what was given with what was written, and warn of what is missing, once for each key.

        White space, escapes of JSON and HTML, and how values that are not text are written make no difference. Raises
        UserError instead where `strict` holds. `label`: the row, for messages.
        """
        for lost in left_out(written, turns, tools):
            if lost.by_design:
                if "by design" not in self._told:
                    self._told.add("by design")
                    log.info("data: the chat template leaves out the reasoning of turns before the last user's")
                continue
            self.tell(
                lost.key,
                label,
                f"the chat template leaves out {lost.key!r} of {lost.place}: {_cut(lost.forms[0])!r} — rename "
                "it as the template reads it, take a template that writes it (chat_template.jinja in the tokenizer's "
                "folder), or remove it from the data",
            )

    def tell(self, key: str, label: str, message: str) -> None:
        """Warn of something in a row that does not reach the model as it should, once for each key; raises UserError
        instead where `strict` holds."""
        if self._strict:
            raise UserError(f"{message} (data.strict)")
        if key not in self._told:
            self._told.add(key)
            log.warning("data: %s: %s; told once (data.strict=true makes it an error)", label, message)

    def _turn(self, message: Message) -> dict[str, Any]:
        """A message as the template reads it: its content as parts or as text, nothing that concerns training alone."""
        turn = {key: value for key, value in message.items() if key != TRAINS}
        content = turn.get("content")
        if isinstance(content, list) and not self._reads_parts:
            turn["content"] = content_text(message)
        elif isinstance(content, str) and self._wants_parts:
            turn["content"] = [{"type": "text", "text": content}]
        if not calls_of(turn):
            return turn
        forms, says = self._forms_of_calls, bool(content_text(message).strip())
        content, as_text = next((form for form in forms if says or form[0] == turn.get("content")), forms[0])
        return with_arguments(turn if says else {**turn, "content": content}, as_text=as_text)

    @cached_property
    def _wants_parts(self) -> bool:
        """Tell whether content has to be a list of parts."""
        return not self._probe(_PROBE) and self._reads_parts

    @cached_property
    def _reads_parts(self) -> bool:
        """Tell whether content may be a list of parts."""
        return self._probe([{"type": "text", "text": _PROBE}])

    @cached_property
    def _forms_of_calls(self) -> list[tuple[str | None, bool]]:
        """Find the forms of a turn that only calls which the template can write, at least one: its content, null or
        blank, and whether the arguments are JSON text, since it cannot write objects, or not as JSON."""

        def probe(content: str | None, arguments: object) -> str:
            call = {"type": "function", "id": "000000000", "function": {"name": "f", "arguments": arguments}}
            return self._tried([_ASKS, {"role": ASSISTANT, "content": content, "tool_calls": [call]}])

        written = {
            (content, as_text): probe(content, json.dumps({_PROBE: _PROBE}) if as_text else {_PROBE: _PROBE})
            for as_text in (False, True)
            for content in (None, "")
        }
        fair = {form: text for form, text in written.items() if text and "None" not in text}
        whole = [form for form, text in fair.items() if _PROBE in text and f"'{_PROBE}'" not in text]
        return whole or list(fair) or [("", False)]

    @cached_property
    def blank(self) -> str:
        """What the template writes behind its generation prompt for an answer that says nothing."""
        return self._tried([_ASKS, {"role": ASSISTANT, "content": ""}]).removeprefix(self._tried([_ASKS], asks=True))

    @cached_property
    def ending(self) -> str:
        """What the template ends an answer with, as far as it ends those within a conversation with that too."""
        ended = self._tried([_ASKS, _ANSWERS]).rpartition(_PROBE)[2].rstrip()
        return ended.removesuffix(self.closing).rstrip() if self.closing else ended

    @cached_property
    def closing(self) -> str:
        """A token that the template writes behind a conversation that ends, and not behind the turns within one."""
        ended = self._tried([_ASKS, _ANSWERS]).rpartition(_PROBE)[2].rstrip()
        goes_on = self._tried([_ASKS, _ANSWERS, _ASKS]).rpartition(_PROBE)[2]
        token = self._tokenizer.eos_token_id
        end = "" if token is None else self._tokenizer.decode_batch([[token]], skip_special=False)[0]
        within = ended.removesuffix(end).rstrip()
        return end if end and within and not goes_on.startswith(ended) and goes_on.startswith(within) else ""

    @cached_property
    def behind(self) -> str:
        """Text between an answer and the content of a user's turn; empty if the template takes none."""
        return self._tried([_ASKS, _ANSWERS, _ASKS]).rpartition(_PROBE)[2].partition(_ASKS["content"])[0]

    def _probe(self, content: object) -> bool:
        written = self._tried([{"role": "user", "content": content}], asks=True)
        return _PROBE in written and "'type'" not in written and '"type"' not in written

    def _tried(self, turns: Sequence[Message], *, asks: bool = False) -> str:
        """Write turns to see what the template makes of them; nothing if it fails."""
        try:
            return self._tokenizer.chat_text(turns, (), self._arguments, asks=asks)
        except ValueError:
            return ""


class OpenThought(NamedTuple):
    """A thought that the generation prompt begins."""

    tag: str
    """<think> or the like."""
    end: str
    """The tag that ends it."""

    def within(self, text: str) -> str:
        """A text that begins with the tag, as it goes on behind the generation prompt."""
        rest = text.lstrip().removeprefix(self.tag)
        return rest.removeprefix("\n")

    def answer(self, turn: Message) -> str | None:
        """An answer as it goes on behind the generation prompt: a thought, its end, and what was answered; None if
        the answer has no thought that ends."""
        content = content_text(turn)
        thought = next((turn[key] for key in REASONING if isinstance(turn.get(key), str)), None)
        if self.end in content:
            return self.within(content) if content.lstrip().startswith(self.tag) else content
        return None if thought is None else f"{thought.strip()}\n{self.end}\n\n{content}"


def open_thought(asked: str) -> OpenThought | None:
    """Find the thought that a generation prompt begins; None if it begins none."""
    found = _OPEN.search(asked)
    if found is None:
        return None
    return OpenThought(f"<{found[1]}>", f"</{found[1]}>") if found[1] else OpenThought("[THINK]", "[/THINK]")


def left_out(written: str, turns: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Given]:
    """Find the pieces of a conversation that are not in the text which a template made of it."""
    whole = rest = _plain(written)
    missing: list[Given] = []
    # The longest first, each taken away once found: what is part of one piece does not count as another.
    for piece in sorted(pieces(turns, tools), key=lambda one: -len(one.forms[0])):
        within = whole if piece.shared else rest
        found = next((form for form in map(_plain, piece.forms) if form in within), None)
        if found is None:
            missing.append(piece)
        elif not piece.shared:
            rest = rest.replace(found, "\0", 1)
    return missing


def pieces(turns: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Iterator[Given]:
    """Take a conversation apart: its contents, reasoning, calls with their arguments, names, and tools, and the texts
    of keys that nothing here knows."""
    users = [number for number, turn in enumerate(turns) if turn["role"] == "user"]
    for number, turn in enumerate(turns):
        earlier = bool(users) and number < users[-1]
        yield from (
            piece for piece in _of_turn(turn, f"message {number} ({turn['role']})", earlier) if _plain(piece.forms[0])
        )
    for number, tool in enumerate(tools):
        found = _of_tool(tool, f"tool {number}")
        yield from (piece for piece in found if _plain(piece.forms[0]))


def _of_turn(turn: Message, place: str, earlier: bool) -> Iterator[Given]:
    content = turn.get("content") or ""
    for text in [content] if isinstance(content, str) else [part["text"] for part in content]:
        thought, ended, answer = text.rpartition(_THOUGHT_END) if turn["role"] == ASSISTANT else ("", "", text)
        if ended:
            yield Given("content", place, _forms(thought.removeprefix("<think>")), by_design=earlier)
        yield Given("content", place, _forms(answer))
    for key in turn.keys() - _READ - _OF_RECORD:
        thought = _THOUGHT.search(key) is not None
        # Whatever a template knows nothing of may say again what another key says.
        again = key not in REASONING or not isinstance(turn[key], str)
        for text in _texts(turn[key]):
            yield Given(key, place, _forms(text), by_design=earlier and thought, shared=again)
    for call in calls_of(with_arguments(dict(turn), as_text=False)):
        for key in ("name", "arguments"):
            yield from (Given("tool_calls", place, *leaf) for leaf in (_leaves(call[key]) if key in call else ()))
    if isinstance(turn.get("name"), str):
        yield Given("name", place, _forms(turn["name"]), shared=True)


def _of_tool(tool: Mapping[str, Any], place: str) -> Iterator[Given]:
    function = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
    texts = [function.get("name"), function.get("description")]
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    for name, schema in (properties or {}).items() if isinstance(properties, Mapping) else ():
        texts += [name, schema.get("description") if isinstance(schema, Mapping) else None]
    yield from (Given("tools", place, _forms(text)) for text in texts if isinstance(text, str))


def _leaves(value: object) -> Iterator[tuple[tuple[str, ...], bool, bool]]:
    """Find the texts, keys and plain values within a value: their forms, `by_design` and `shared` of `Given`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield _forms(str(key)), False, False
            yield from _leaves(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield _forms(value), False, False
    else:
        whole = (str(int(value)),) if isinstance(value, float) and value.is_integer() else ()
        yield (json.dumps(value), str(value), *whole), False, True


def _texts(value: object) -> Iterator[str]:
    """Find the texts within the value of a key that no format here knows."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in (value[key] for key in value if key not in _OF_RECORD):
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def _forms(text: str) -> tuple[str, ...]:
    """Find how a text may be written: as it is, with the escapes of JSON once and twice, of Python and
    of HTML."""
    text = text.strip()
    if _NOTHING_TO_ESCAPE.fullmatch(text):
        return (text,)
    once, ascii_only = json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]
    twice = json.dumps(once, ensure_ascii=False)[1:-1]
    # As jinja2's own tojson writes it; that of transformers does not.
    for_pages = ascii_only.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&'"})
    return tuple(dict.fromkeys((text, once, ascii_only, twice, for_pages, repr(text)[1:-1], html.escape(text))))


def _plain(text: str) -> str:
    return "".join(text.split()).casefold()


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
