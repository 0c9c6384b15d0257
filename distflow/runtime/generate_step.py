"""A generate step: a user's coroutine, one call for each sample, which says what to sample after which tokens.

    @step(role="generate", …)
    async def sample(episode, generate, ctx, *, temperature: float = 1.0, max_new_tokens: int = 16):
        await generate(episode.prompt_ids, SamplingParams(temperature, max_new_tokens=max_new_tokens))

Steps run on the worker's event loop (`attempt.py`, `episode_loop.py`), and may await anything; those that are plain
functions have threads. Meanwhile the worker's main thread (`rollout_loop.py`) takes leases and weights and decodes.
What a step asked for and got is recorded there (`trajectories.py`), for each sample as a `Trajectory`: sequences of
segments, from the model and in between. Of finished samples `assemble` makes a batch, with a row for each sequence.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from numbers import Real
from typing import Any, NamedTuple, Protocol

import torch
from xxhash import xxh3_64_intdigest

from distflow.data.batch import Batch, Column, Ragged
from distflow.data.samples import PROMPT_TEXT, untrained_where_left_out
from distflow.errors import UserError
from distflow.flow.plan import StepPlan
from distflow.flow.step import (
    FILTERED,
    GENERATED,
    ROLLOUT,
    SAMPLING_SETTINGS,
    SEQUENCES,
    response_tokens,
    sample_tokens,
)
from distflow.runtime.attempt import Attempt, ContextFull, Hear
from distflow.runtime.episode_loop import CLEANUP_S, Begin, Episodes
from distflow.runtime.protocols import Tokenizer
from distflow.runtime.sample_errors import EpisodeErrors, EpisodeFailed
from distflow.types import (
    DROP_REASON,
    FINISH_REASONS,
    LEFT_OUT,
    LOGGED,
    REWARD,
    REWARD_PARTS,
    SEQUENCE,
    BegunSample,
    CallNumber,
    Completion,
    Episode,
    FinishReason,
    LeaseKind,
    SampleKey,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    Span,
    Uid,
    Version,
)


class Generate(Protocol):
    """What a generate step awaits, if it is an `async def`."""

    def __call__(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, train: bool = True, aside: bool = False
    ) -> Awaitable[Completion]:
        """What the model writes after these tokens, sampled so. `train`: whether these tokens are trained on; `aside`:
        they are no part of the sample, and only the step sees them.

        Tokens that begin with all that a sequence of the sample has continue it; others begin a new sequence.
        """


class GenerateInThread(Protocol):
    """What a generate step calls, if it is a plain function."""

    def __call__(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, train: bool = True, aside: bool = False
    ) -> Completion:
        """The same: returns when the tokens are there."""


@dataclass(frozen=True, slots=True)
class GivenSampling:
    """What a recipe says of the sampling of all calls of a step, as `SamplingParams` have it."""

    given: Mapping[str, Any]

    @classmethod
    def of(cls, settings: Mapping[str, Any], own: Collection[str]) -> GivenSampling:
        """Read it among all settings of a step; `own`: the parameters of its function, which passes these on itself.

        Raises UserError for values of another kind.
        """
        named = {name: settings[name] for name in SAMPLING_SETTINGS if name in settings and name not in own}
        try:
            params = SamplingParams(**{name: value for name, value in named.items() if value is not None})
        except TypeError as error:
            raise UserError(f"settings of a generate step: {error}") from error
        return cls({name: getattr(params, name) for name in named if getattr(params, name) != getattr(_PLAIN, name)})

    def over(self, params: SamplingParams) -> SamplingParams:
        """Add it to what a call asks for, which says nothing of what it leaves at the default."""
        if not self.given:
            return params
        return replace(params, **{n: v for n, v in self.given.items() if getattr(params, n) == getattr(_PLAIN, n)})


_PLAIN = SamplingParams()


class GenerateStep:
    """The generate step of one worker: what an attempt at a sample calls, and what becomes of one that fails.

    `begin` calls the step for an episode, on `loop`; `blocking`: it is a plain function. `failed` makes what is raised
    of what a user's step raises for an episode; `errors` says what becomes of the sample.
    """

    def __init__(
        self,
        plan: StepPlan,
        begin: Begin,
        where: str,
        failed: Callable[[BaseException, Episode], Exception],
        errors: EpisodeErrors,
        sampling: Mapping[LeaseKind, GivenSampling],
        loop: Episodes,
        *,
        blocking: bool = False,
    ) -> None:
        self.plan = plan
        self.where = where
        """Which step, on which worker."""
        self.further = tuple(name for name in plan.writes if name not in (*GENERATED, FILTERED, *SEQUENCES))
        """The fields that it returns a number for, for each sample."""
        self.begin = begin
        self.errors = errors
        self.metrics = errors.metrics
        self.sampling = sampling
        self.failed = failed
        self.loop = loop
        self.blocking = blocking

    def attempt(self, episode: Episode, hear: Hear, *, number: int = 1, first: int = 0) -> Attempt:
        """Make an attempt at a sample, which is to be begun. `hear` gets what it does, by any thread."""
        return self.loop.attempt(self, episode, hear, number=number, first=first)

    def blocks(self, place: str) -> str:
        """Say that a coroutine holds up the others, and what to do."""
        return (
            f"{self.where} blocks the event loop at {place}: all other samples of this worker wait for it, though not "
            "the engine — let the step be a plain def, which has a thread of its own, or await asyncio.to_thread(…)"
        )

    def lingers(self, place: str) -> str:
        """Say that a thread goes on for nobody, and what to do."""
        return (
            f"{self.where} is still busy at {place} in a thread, {CLEANUP_S:g} s after the end of its sample, by a "
            "time-out or otherwise: nobody waits for that, and nothing can end it — give what waits there a time-out "
            "of its own (timeout= of requests, subprocess.run, a socket)"
        )

    def leaves(self, task: str) -> str:
        """Say that a task went on when its episode ended, and what to do."""
        return (
            f"{self.where} left the task {task} behind, and it was cancelled with the episode that had begun it — if "
            "other episodes need it too, they wait for it until they are timed out: let the step's `setup` begin what "
            "all episodes share (@step(…, setup=…), ctx.shared); what is of one episode let the step await, or cancel"
        )

    def failure(self, did: str, more: str, place: str = "") -> EpisodeFailed:
        """What to raise for what a step has done wrong on a sample; `more`: what the message adds to that."""
        return EpisodeFailed(f"{self.where} {did}{more}", did, did.split()[0], place)

    def full(self, had: int, most: int, setting: str) -> ContextFull:
        """What to raise where a sequence, or a sample, has all tokens that this setting allows."""
        whose = "sequence" if setting == "max_tokens" else "sample"
        cure = f"let it return before, or raise {setting} (flow.steps.{self.plan.name}.with)"
        did = f"asks for more after {had} tokens behind the prompt"
        return ContextFull(did, f", and its longest {whose} has {most}: {cure}")

    @property
    def nothing(self) -> Mapping[str, float]:
        """What counts as returned where the step has come to no end of its own."""
        return {name: nan if name.startswith(REWARD_PARTS) else 0.0 for name in self.further}

    def returned(self, value: object) -> Mapping[str, float]:
        """Take what the step returned, if it is what it declares; raises EpisodeFailed."""
        expected = self.further
        if value is None and not expected:
            return {}
        given = {} if value is None else value
        if not isinstance(given, Mapping) or set(given) != set(expected):
            shown = sorted(map(str, given)) or "{}" if isinstance(given, Mapping) else f"a {type(given).__name__}"
            shown = "None" if value is None else shown
            wanted = f"a mapping with a number for each of {sorted(expected)}" if expected else "nothing"
            declared = "what its @step(writes=…) lists is what it returns for each sample"
            raise self.failure(f"returned {shown}", f"; expected {wanted}: {declared}")
        wrong = {name: value for name, value in given.items() if not _is_number(name, value)}
        if wrong:
            raise self.failure(f"returned {wrong}", f"; expected a number for each of {sorted(expected)}")
        return given


class SampleLimits(NamedTuple):
    """What there may be of a prompt's samples."""

    samples: int
    """Of one prompt."""
    tokens: int
    """That a sequence may have behind as many as the data's prompt has: a slot of the engine holds so many."""
    sample_tokens: int
    """That a sample may have behind the data's prompt, an environment's and the prompts of later sequences included: so
    much was reserved for it."""

    @classmethod
    def of(cls, samples: int, settings: Mapping[str, Any]) -> SampleLimits:
        """By the settings of the step that makes them."""
        return cls(samples, int(response_tokens(settings)), sample_tokens(settings))


@dataclass(frozen=True, slots=True)
class SampleOrigin:
    """What a sample begins with: the prompt of its lease or, of a further model, the one that a step has written."""

    uid: Uid
    prompt_ids: tuple[int, ...]
    prompt_text: str
    task: str
    """As JSON text."""
    seed: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one writer, in a row. An environment's have neither log-probs nor versions, and are not trained on."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    spans: tuple[Span, ...] = ()
    trains: bool = False
    text: str = ""
    """Of a model's tokens."""
    filtered: tuple[float, ...] = ()
    """Log-probs of what the tokens were drawn from, where that is known and another distribution."""
    cut_off: str = ""
    """Text of the last tokens that is no part of `text`: from a stop string on."""


@dataclass(slots=True, eq=False)
class TokenSequence:
    """Tokens in one context: a prompt that the model did not write there, and what follows it."""

    prompt_ids: tuple[int, ...]
    segments: list[Segment] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    """Of what the model wrote last."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + sum(len(segment.token_ids) for segment in self.segments)

    @property
    def response_ids(self) -> tuple[int, ...]:
        """All tokens behind the prompt."""
        if len(self.segments) == 1:
            return self.segments[0].token_ids
        return tuple(token for segment in self.segments for token in segment.token_ids)

    def add(self, answered: AnsweredCall) -> None:
        """Add what the model has written."""
        self.segments.append(answered.segment)
        self.finish_reason = answered.finish_reason

    def cut(self) -> None:
        """Take away the environment's tokens behind those of the model: what was asked for after them is not there."""
        while self.segments and not self.segments[-1].spans:
            self.segments.pop()

    def leads_to(self, prefix: tuple[int, ...]) -> bool:
        """Whether the prefix begins with all tokens that are here."""
        at = 0
        for part in (self.prompt_ids, *(segment.token_ids for segment in self.segments)):
            if prefix[at : at + len(part)] != part:
                return False
            at += len(part)
        return True


@dataclass(slots=True, eq=False)
class RandomStream:
    """The random numbers of calls that one task makes, each behind the tokens of the one before: whatever other tasks
    ask for, and whenever they do, it draws the same. `name` and `start`: of its first token (`SampleRequest`)."""

    name: CallNumber
    start: int
    """So many tokens come before its first number."""
    had: tuple[int, ...] | None
    """The tokens that a call goes on with; None: another does already."""


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A request that is not answered yet."""

    request: SampleRequest
    sequence: TokenSequence | None
    """What it goes on with; None: it is asked for aside."""
    train: bool
    stream: RandomStream


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A request, and what the model has written."""

    prompt_ids: tuple[int, ...]
    segment: Segment
    finish_reason: FinishReason
    aside: bool
    digest: int

    def record(self, key: SampleKey, call: CallNumber) -> SampleOutput:
        """The form in which it is replayed."""
        part, reason = self.segment, self.finish_reason
        return SampleOutput(*key, part.token_ids, part.logprobs, part.spans, reason, part.filtered, call, self.digest)


@dataclass(slots=True)
class Trajectory:
    """One sample, as far as it is. It begins with an empty sequence, which has the data's prompt."""

    key: SampleKey
    origin: SampleOrigin
    episode: Episode
    attempt: Attempt
    begun: dict[CallNumber, BegunSample]
    """What another worker had of it, as far as it has not been replayed."""
    sequences: list[TokenSequence]
    """In the order in which the model has last been asked for more of each."""
    open: dict[CallNumber, OpenCall] = field(default_factory=dict)
    streams: dict[CallNumber, list[RandomStream]] = field(default_factory=dict)
    """Of each task, by its number, the newest last."""
    branched: bool = False
    """There have been several requests at a time, or requests in another order than that of their numbers."""
    answered: dict[CallNumber, AnsweredCall] = field(default_factory=dict)
    """In the order of the answers."""
    tools: dict[CallNumber, SampleOutput] = field(default_factory=dict)
    """What tools have answered, in the form in which it is replayed."""
    finish_reason: FinishReason = "stop"
    fields: Mapping[str, float] = field(default_factory=dict)
    """What the step returned."""
    left_out: str = ""
    """Why it is left out of training."""
    dropped: str = ""
    """Why its group is dropped."""
    failed: str = ""
    """Why the step failed on it, where it counts all the same."""
    since: float = 0.0
    """The clock when it was begun."""
    waits_since: float = 0.0
    """The clock when it has last got tokens, or was begun."""

    @property
    def tokens(self) -> int:
        """Tokens of all sequences behind the data's prompt."""
        return sum(map(len, self.sequences)) - len(self.origin.prompt_ids)

    @property
    def written(self) -> list[Segment]:
        """What the model has written, in the order of the answers, aside too."""
        return [call.segment for call in self.answered.values()]

    @property
    def free(self) -> list[TokenSequence]:
        """The sequences that no request is open for, the newest last."""
        taken = [call.sequence for call in self.open.values()]
        return [sequence for sequence in self.sequences if sequence not in taken]

    def go_on_behind(self, prefix: tuple[int, ...]) -> TokenSequence:
        """Continue the newest free sequence whose tokens this prefix begins with, by what it has behind them; if there
        is none, begin a sequence with this prompt."""
        found = next((sequence for sequence in reversed(self.free) if sequence.leads_to(prefix)), None)
        if found is None:
            self.sequences.append(TokenSequence(prefix))
            return self.sequences[-1]
        self.sequences.remove(found)
        self.sequences.append(found)
        had = len(found)
        if len(prefix) > had:
            found.segments.append(Segment(prefix[had:]))
        return found

    def stream_of(self, call: CallNumber, prefix: tuple[int, ...], *, aside: bool) -> RandomStream:
        """Draw the tokens of a call from the stream of the call whose tokens it goes on with, if that is of the same
        task; else from a stream of its own. No other call gets these numbers, whatever becomes of this one."""
        mine = self.streams.setdefault(call[:-1], [])
        for stream in reversed([] if aside else mine):
            if stream.had is not None and prefix[: len(stream.had)] == stream.had:
                stream.had = None
                return stream
        stream = RandomStream(call, len(prefix), None)
        if not aside:
            mine.append(stream)
        return stream

    def withdraw(self, call: CallNumber) -> None:
        """Forget a request, and the tokens that the environment has put before what it asked for."""
        sequence = self.open.pop(call).sequence
        if sequence is not None:
            self.leave(sequence)

    def leave(self, sequence: TokenSequence) -> None:
        """Take away what the environment has put before a request that is not answered."""
        sequence.cut()
        if not sequence.segments and sequence is not self.sequences[0]:
            self.sequences.remove(sequence)

    def end(self) -> None:
        """Forget what nobody has waited for. Where several requests were open at a time, the clock may have decided
        which of them has gone on with what: put the sequences together anew, in the order of the calls."""
        for call in list(self.open):
            self.withdraw(call)
        if self.branched:
            self.sequences = [TokenSequence(self.origin.prompt_ids)]
            for _, answered in sorted(self.answered.items()):
                if not answered.aside:
                    self.go_on_behind(answered.prompt_ids).add(answered)
        if any(sequence.segments for sequence in self.sequences):
            self.sequences = [sequence for sequence in self.sequences if sequence.segments]
        self.finish_reason = self.sequences[-1].finish_reason

    def recorded(self, more: Iterable[SampleOutput] = ()) -> tuple[SampleOutput, ...]:
        """What the model has written, and tools answered, call by call: the form in which it is replayed. `more`: of
        open requests."""
        calls = {number: answered.record(self.key, number) for number, answered in self.answered.items()}
        calls |= self.tools
        calls |= {output.call: replace(output, digest=digest_of(self.open[output.call].request)) for output in more}
        return tuple(output for _, output in sorted(calls.items()))

    def versions(self, more: Iterable[SampleOutput] = ()) -> tuple[SampleOutput, ...]:
        """The same without its tokens: from which versions they came."""
        spans = joined((call.spans, len(call.token_ids)) for call in self.recorded(more))
        return (SampleOutput(*self.key, (), (), spans, "abort"),)


def _is_number(name: str, value: object) -> bool:
    """Whether a step may return this for a field. A part of the reward may be missing: NaN."""
    if not isinstance(value, Real):
        return False
    try:
        return isfinite(value) or name != REWARD
    except OverflowError:
        return False


def digest_of(request: SampleRequest) -> int:
    """Tell requests apart by what they ask for, tokens and parameters: 62 bits."""
    asked = array("q", request.prompt_ids).tobytes() + repr(request.params).encode()
    return xxh3_64_intdigest(asked) >> 2


def joined(parts: Iterable[tuple[Sequence[Span], int]]) -> tuple[Span, ...]:
    """Spans of parts that follow each other, given with the number of tokens of each; neighbours of one version are
    merged."""
    found: list[Span] = []
    start = 0
    for spans, tokens in parts:
        for span in spans:
            moved = span._replace(start=start + span.start, end=start + span.end)
            if found and found[-1][:2] == span[:2] and found[-1].end == moved.start:
                found[-1] = found[-1]._replace(end=moved.end)
            else:
                found.append(moved)
        start += tokens
    return tuple(found)


def assemble(
    samples: Sequence[Trajectory],
    tokenizer: Tokenizer,
    dtype: torch.dtype,
    plan: StepPlan,
    version: Version | None = None,
) -> Batch:
    """One row a sequence: those of a sample side by side, the samples in the given order; log-probs in `dtype`, 0 for
    tokens that the model did not write. Where `plan`, of the generate step, declares an environment, samples may have
    several sequences, and fields tell them apart. A sample without any tokens, since its episodes have failed, has an
    empty row; `version`: of the weights that count as those of rows in which the model wrote nothing.
    """
    several = plan.environment is not None
    rows, whose = list[TokenSequence](), list[Trajectory]()
    for sample in samples:
        begun = [sequence for sequence in sample.sequences if sequence.segments] or sample.sequences[:1]
        rows += begun
        whose += [sample] * len(begun)
    origins = [sample.origin for sample in whose]
    ids = [row.response_ids for row in rows]
    response_ids = Ragged.from_rows(ids, torch.int64)
    batch = Batch(
        {
            "uid": torch.tensor([origin.uid for origin in origins], dtype=torch.int64),
            "group": torch.tensor([origin.uid.position for origin in origins], dtype=torch.int64),
            "sample": torch.tensor([sample.episode.sample for sample in whose], dtype=torch.int64),
            "prompt_ids": Ragged.from_rows([row.prompt_ids for row in rows], torch.int64),
            PROMPT_TEXT: Ragged.from_texts([origin.prompt_text for origin in origins]),
            "task": Ragged.from_texts([origin.task for origin in origins]),
            "response_ids": response_ids,
            "response_mask": response_ids.like(_mask(rows, response_ids)),
            "response_text": Ragged.from_texts(_texts(rows, ids, tokenizer)),
            **{
                field: Ragged.from_rows([_logprobs(row.segments, filtered=field == FILTERED) for row in rows], dtype)
                for field in (ROLLOUT, FILTERED)
                if field in plan.writes
            },
            "policy_versions": _versions(rows, version),
            "finish_reason": torch.tensor([FINISH_REASONS.index(sample.finish_reason) for sample in whose]),
            LEFT_OUT: Ragged.from_texts([sample.left_out for sample in whose]),
            **_further(whose),
        }
    )
    if any(sample.failed for sample in whose):
        told = [json.dumps(sample.failed) if sample.failed else "" for sample in whose]
        batch = batch.with_columns(**{f"{LOGGED}generate_error": Ragged.from_texts(told)})
    if any(sample.dropped for sample in whose):
        batch = batch.with_columns(**{DROP_REASON: Ragged.from_texts([sample.dropped for sample in whose])})
    whole = batch.with_columns(**_told_apart(rows, whose, tokenizer)) if several else batch
    return untrained_where_left_out(whole)


def _told_apart(rows: Sequence[TokenSequence], whose: Sequence[Trajectory], tokenizer: Tokenizer) -> dict[str, Column]:
    """The number of each sequence; what it begins with, unless it is the first and that is the data's prompt; and the
    data's prompt, once a sample: a long one on every row would exceed what is reserved for the tokens.
    """
    numbers = [0] * len(rows)
    for n in range(1, len(rows)):
        numbers[n] = numbers[n - 1] + 1 if whose[n] is whose[n - 1] else 0
    own = [n for n, row in enumerate(rows) if numbers[n] or row.prompt_ids != whose[n].origin.prompt_ids]
    texts = tokenizer.decode_batch([rows[n].prompt_ids for n in own], skip_special=False)
    decoded = dict(zip(own, texts, strict=True))
    prompts = ["" if n else sample.origin.prompt_text for n, sample in zip(numbers, whose, strict=True)]
    return {
        SEQUENCE: torch.tensor(numbers, dtype=torch.int64),
        "sequence_prompt": Ragged.from_texts([decoded.get(n, "") for n in range(len(rows))]),
        PROMPT_TEXT: Ragged.from_texts(prompts),
    }


def _mask(rows: Sequence[TokenSequence], response_ids: Ragged) -> torch.Tensor:
    segments = [segment for row in rows for segment in row.segments]
    trained = torch.tensor([segment.trains for segment in segments], dtype=torch.bool)
    if trained.all():
        return torch.ones_like(response_ids.values, dtype=torch.bool)
    return trained.repeat_interleave(torch.tensor([len(segment.token_ids) for segment in segments]))


def _texts(rows: Sequence[TokenSequence], ids: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[str]:
    """Of whole responses: those of single turns are known."""
    several = [number for number, row in enumerate(rows) if len(row.segments) != 1]
    decoded = dict(zip(several, tokenizer.decode_batch([ids[n] for n in several], skip_special=True), strict=True))
    return [
        decoded[n].removesuffix(row.segments[-1].cut_off if row.segments else "")
        if n in decoded
        else row.segments[0].text
        for n, row in enumerate(rows)
    ]


def _logprobs(segments: Sequence[Segment], *, filtered: bool) -> Sequence[float]:
    known = [segment.filtered if filtered and segment.filtered else segment.logprobs for segment in segments]
    if len(segments) == 1:
        return known[0]
    written = zip(known, segments, strict=True)
    return [logprob for logprobs, segment in written for logprob in logprobs or [0.0] * len(segment.token_ids)]


def _versions(rows: Sequence[TokenSequence], version: Version | None) -> Ragged:
    none = () if version is None else (Span(version.term, version.number, 0, 0),)
    spans = [_spans(row.segments) or none for row in rows]
    counts = torch.tensor([0, *map(len, spans)], dtype=torch.int64)
    values = torch.tensor([tuple(span) for row in spans for span in row], dtype=torch.int64)
    return Ragged(values.reshape(int(counts.sum()), 4), counts.cumsum(0))


def _spans(segments: Sequence[Segment]) -> Sequence[Span]:
    if len(segments) == 1:
        return segments[0].spans
    return joined((segment.spans, len(segment.token_ids)) for segment in segments)


def _further(whose: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """What the step returned for each sample."""
    names = whose[0].fields if whose else ()
    return {name: torch.tensor([float(sample.fields[name]) for sample in whose]) for name in names}
