"""Texts at which responses end: found in tokens as they come, whatever engine draws them.

A response ends with the first token that completes a stop string in its own text, that of the prompt not counted. The
text is that of all its tokens, decoded together: a stop string may begin and end within tokens, and characters may be
made of several. What is drawn behind that token is thrown away: none by engines that draw a token a poll, else what has
come since the poll before.

Example, stop "\\n\\n": tokens "4" "2" ".\\n" "\\nQ" → the response has all four, its text is "42.".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

from distflow.types import RequestKey, SampleOutput, SampleRequest, SamplingParams

UNFINISHED = "\ufffd"
"""What a character is decoded to of which bytes are missing."""
WINDOW, KEPT = 48, 12
"""Tokens that are decoded together at most, and how many of these are decoded again with those that follow."""
Decode = Callable[[Sequence[int]], str]


class ResponseEnd(NamedTuple):
    """Where a response ends: it has so many tokens, and this text."""

    tokens: int
    text: str


class StopFinder:
    """Looks for the stop strings of one request in its tokens, which come in pieces. `found`: once one is complete."""

    def __init__(self, params: SamplingParams, decode: Decode) -> None:
        self.found: ResponseEnd | None = None
        self.tokens = 0
        """How many have come."""
        self._stops = tuple(params.stop)
        self._longest = max(map(len, self._stops))
        self._least = params.min_new_tokens
        self._included = params.include_stop_str_in_output
        self._decode = decode
        self._before = ""
        """Text before the window, less `_skipped` characters of that of the window itself."""
        self._skipped = 0
        self._window: list[int] = []
        self._text = ""
        """As far as it is known: a character that is not whole yet is not there."""
        self._floor = 0
        """A stop string that ends before this place of the text does not count."""

    def feed(self, tokens: Sequence[int]) -> ResponseEnd | None:
        """Take the next tokens; returns `found`."""
        for token in tokens:
            if self.found is None:
                self._take(token)
        return self.found

    def _take(self, token: int) -> None:
        """Look at each token by itself, however many come at once: a later one may take text away that was there, as
        half a character does with all before it that tokenizers with bytes for lack of others write in bytes."""
        begin = max(0, len(self._text) - self._longest)
        self._advance(token)
        if self.tokens <= self._least:
            self._floor = len(self._text)
        elif (end := self._ends(self._text, begin)) is not None:
            self.found = ResponseEnd(self.tokens, self._text[:end])

    def _ends(self, text: str, begin: int) -> int | None:
        """Find where the text of the response ends: before a stop string, or behind it if it is included."""
        places = [(place, place + len(stop)) for stop in self._stops for place in self._places(text, stop, begin)]
        counted = [(start, end) for start, end in places if end > self._floor]
        if not counted:
            return None
        start, end = min(counted)
        return end if self._included else start

    def _places(self, text: str, stop: str, begin: int) -> Iterable[int]:
        place = text.find(stop, begin)
        while place >= 0:
            yield place
            place = text.find(stop, place + 1)

    def _advance(self, token: int) -> None:
        self._window.append(token)
        self.tokens += 1
        whole = self._decode(self._window)
        self._text = self._before + whole.rstrip(UNFINISHED)[self._skipped :]
        if len(self._window) <= WINDOW:
            return
        kept = self._window[-KEPT:]
        # What is decoded again has to have a text, and whole characters at both ends: of others it may change. Of what
        # is no text at all, bytes without end, that cannot be waited for.
        part = self._decode(kept)
        begins = not part.startswith(UNFINISHED) or len(self._window) > 4 * WINDOW
        if part and begins and not whole.endswith(UNFINISHED):
            self._before, self._skipped, self._window = self._text, len(part), kept


class Decodes(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, begins: bool = False, behind: int | None = None) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special: bool) -> list[str]:
        """Return the texts, one per row."""
        ...


class Stoppable(Protocol):
    """What is needed of an engine."""

    def partials(self) -> list[SampleOutput]:
        """Return what every running sample has produced so far."""
        ...

    def withdraw(self, requests: Collection[RequestKey]) -> None:
        """Drop these requests."""
        ...


@runtime_checkable
class TellsTokens(Protocol):
    """An engine that can tell the newest tokens alone; optional: of others all `partials` are asked for."""

    def tokens_after(self, had: Mapping[RequestKey, int]) -> Mapping[RequestKey, Sequence[int]]:
        """Return the response's tokens from that number on, of those of these requests that run."""


class StopWatch:
    """The requests with stop strings that one engine works on."""

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._finders: dict[RequestKey, StopFinder] = {}
        self._complaints: dict[tuple[str, ...], str] = {}

    def follow(self, request: SampleRequest, had: Sequence[int]) -> ResponseEnd | None:
        """Look out for the end of a request, which has these tokens already; returns it if that is among them."""
        if not request.params.stop:
            return None
        finder = StopFinder(request.params, self._decode)
        self._finders[request.key] = finder
        return finder.feed(had)

    def look(
        self, engine: Stoppable, outputs: list[SampleOutput], is_open: Callable[[RequestKey], bool]
    ) -> list[SampleOutput]:
        """Return, after a poll, the outputs, each up to its end, and those of samples that have come to it while they
        ran, which are taken from the engine. `is_open`: tells whether a request is still waited for."""
        if not self._finders:
            return outputs
        self._finders = {key: finder for key, finder in self._finders.items() if is_open(key)}
        outputs = [self._ended(output) for output in outputs]
        gone = {output.key for output in outputs}
        running = {key: finder for key, finder in self._finders.items() if key not in gone}
        new = _new_tokens(engine, {key: finder.tokens for key, finder in running.items()}) if running else {}
        ended = [key for key, tokens in new.items() if running[key].feed(tokens) is not None]
        if ended:
            outputs += [self._ended(partial) for partial in engine.partials() if partial.key in ended]
            engine.withdraw(ended)
        return outputs

    def shown(self, key: RequestKey, text: str) -> tuple[str, str]:
        """Return the text of an answered request, given that of all its tokens, and what is cut off behind it."""
        finder = self._finders.pop(key, None)
        if finder is None or finder.found is None:
            return text, ""
        found = finder.found.text
        return found, text[len(found) :] if text.startswith(found) else ""

    def complaint(self, stops: tuple[str, ...]) -> str:
        """Say why one of these can never be found in a text; "" if all can."""
        if stops not in self._complaints:
            told = (stop_complaint(self._tokenizer, stop) for stop in stops)
            self._complaints[stops] = next(filter(None, told), "")
        return self._complaints[stops]

    def _decode(self, tokens: Sequence[int]) -> str:
        (text,) = self._tokenizer.decode_batch([tokens], skip_special=True)
        return text

    def _ended(self, output: SampleOutput) -> SampleOutput:
        finder = self._finders.get(output.key)
        if finder is None:
            return output
        found = finder.found or finder.feed(output.token_ids[finder.tokens :])
        return output if found is None else cut_at(output, found.tokens)


def cut_at(output: SampleOutput, tokens: int) -> SampleOutput:
    """Return the first tokens of an output, at which it stops."""
    clipped = (span._replace(end=min(span.end, tokens)) for span in output.spans)
    return replace(
        output,
        token_ids=output.token_ids[:tokens],
        logprobs=output.logprobs[:tokens],
        filtered_logprobs=output.filtered_logprobs[:tokens],
        spans=tuple(span for span in clipped if span.end > span.start),
        finish_reason="stop",
    )


def stop_complaint(tokenizer: Decodes, stop: str) -> str:
    """Say why a stop string can never be found in a response; "" if it can."""
    try:
        tokens = tokenizer.encode(stop)
    except ValueError as error:
        return f"stop {stop!r} can never come: {error}"
    (shown,), (whole,) = (tokenizer.decode_batch([tokens], skip_special=skips) for skips in (True, False))
    if shown == whole:
        return ""
    lost = [token for token in tokens if not tokenizer.decode_batch([[token]], skip_special=True)[0]]
    return f"stop {stop!r} has special tokens, which texts leave out: stop_token_ids={lost} instead"


def _new_tokens(engine: Stoppable, had: Mapping[RequestKey, int]) -> Mapping[RequestKey, Sequence[int]]:
    if isinstance(engine, TellsTokens):
        return engine.tokens_after(had)
    return {one.key: one.token_ids[had[one.key] :] for one in engine.partials() if one.key in had}
