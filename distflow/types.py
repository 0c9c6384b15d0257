"""The nouns that all packages share. Standard library only, so that everything may import this file.

Shape legend of all tensor code: B rows (sequences; of most flows each is a sample), T tokens, G samples of one prompt,
V vocabulary, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain
from numbers import Integral, Real
from operator import index
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeGuard

Role = Literal["generate", "read", "score", "forward", "client", "train"]
Scope = Literal["sample", "group", "batch"]
FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")
"""Field `finish_reason` holds indices into this. `error`: the generate step failed on the sample."""
REWARD = "reward"
"""What samples are trained on: one finite number for each."""
REWARD_PARTS = "rewards/"
REWARD_MEAN = "critic/rewards/mean"
"""The metric of the mean reward; that of a part is `rewards/NAME/mean`."""
"""Fields `rewards/<name>` hold the further parts that a reward function returns."""
SEQUENCE = "sequence"
"""Field with the number of each row's sequence within its sample; absent where every sample is one row."""
TOKENS = "response_ids"
LOGGED = "extra/"
"""Fields `extra/<name>` hold what reward functions tell of a sample besides, as JSON text; "" where there is none."""
A_TOKEN = (
    "response_mask",
    "rollout_logprobs",
    "rollout_filtered_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "advantage",
    "return",
    "token_rewards",
    "token_advantage",
    "teacher_logprobs",
)
"""Fields with one value per response token: rows as long as those of `response_ids`."""
SEVERAL_A_TOKEN = ("candidate_ids", "teacher_candidate_logprobs")
"""Fields with K values per response token, [N, K]: tokens that could have stood there, and log-probs of these."""
DROP_REASON = "drop_reason"
"""Text column that a score step may write: a group with a reason in any of its rows is dropped, not trained on."""
UNJUDGED = "reward "
"""What such a reason begins with if the reward function failed on the sample: its score means nothing."""
UNREWARDED = f"{UNJUDGED}missing"
"""The same where no function judged it: all returned None or NaN."""
LEFT_OUT = "left_out"
"""Text column: why a sample is left out of training, or "". Its rows stay, with no token trained on, and nothing that
compares samples counts it (`distflow/data/samples.py`). The runtime writes it, and score steps may."""
Scores = tuple[float, ...]
"""What the samples of a group scored."""
IDENTITY = ("uid", "group", "sample", SEQUENCE, DROP_REASON, LEFT_OUT)
"""Fields that a step with a `prefix` knows by the names that they have in the flow."""
ROLES: tuple[Role, ...] = ("generate", "read", "score", "forward", "client", "train")
SCOPES: tuple[Scope, ...] = ("sample", "group", "batch")

LeaseKind = Literal["train", "val"]
VALIDATION = 1 << 48
"""First prompt position of validation: those of training are far below it."""
VAL = "val/"
"""What the names of the metrics of validation begin with."""
VAL_LOSS = f"{VAL}loss"
"""What flows that read their samples from the data measure: the lower, the better."""

MOST_WORKERS = 4096
"""Of one pool; more are taken for a typo."""


def lease_kind(position: int) -> LeaseKind:
    """What the group at a prompt position is for."""
    return "val" if position >= VALIDATION else "train"


def is_validated(metric: str | None) -> TypeGuard[str]:
    """Whether validation measures a metric, by its name."""
    return metric is not None and metric.startswith(VAL)


def written(field: str, fields: Iterable[str]) -> bool:
    """Whether `field` is among `fields`, which may hold patterns such as `rewards/*`."""
    return any(fnmatchcase(field, pattern) for pattern in fields)


def prefixed(field: str, prefix: str) -> str:
    """The name in the flow of what a step with this `prefix` reads or writes as `field`; "" leaves it as it is."""
    return f"{prefix}/{field}" if prefix and field not in IDENTITY else field


def is_reward_part(field: str) -> bool:
    """Whether a field is a part of the reward, `rewards/<name>`, of any model's samples."""
    return field.startswith(REWARD_PARTS) or f"/{REWARD_PARTS}" in field


def is_logged(field: str) -> bool:
    """Tell whether a field, `extra/<name>`, is what reward functions told of any model's samples."""
    return field.startswith(LOGGED) or f"/{LOGGED}" in field


class Uid(NamedTuple):
    """Identity of a prompt in the data order: pass over the data, index in the data set, global prompt position.

    Example:

        Uid(epoch=0, prompt=7, position=12)
    """

    epoch: int
    prompt: int
    position: int


class Version(NamedTuple):
    """A policy version: `term` is the incarnation of the training pool, `number` counts its training steps. Ordered.

    Example:

        Version(term=0, number=3)
    """

    term: int
    number: int

    def meets(self, least: Version) -> bool:
        """Whether what may start with `least`, or later versions, may start with this one."""
        return self.number >= least.number and self.term >= least.term

    def survives(self, begins: Mapping[int, int]) -> bool:
        """Whether every later term began at or after this version. `begins`: training step by term."""
        return all(self.number <= step for term, step in begins.items() if term > self.term)


class Span(NamedTuple):
    """Response tokens `start` ≤ token < `end` of one sample were produced by policy version (`term`, `version`).

    Example:

        Span(term=0, version=3, start=0, end=16)
    """

    term: int
    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class WorkerName:
    """`pool/index`, for example rollout/0."""

    pool: str
    index: int

    def __str__(self) -> str:
        return f"{self.pool}/{self.index}"

    @property
    def file_stem(self) -> str:
        """`pool-index`, the name of this worker's files in the run folder."""
        return f"{self.pool}-{self.index}"

    @classmethod
    def parse(cls, text: str) -> WorkerName:
        """Read `pool/index`; raises ValueError on anything else."""
        pool, slash, index = text.rpartition("/")
        if not (slash and pool and index.isdecimal()):
            raise ValueError(f"worker name {text!r}: expected POOL/INDEX, for example rollout/0")
        return cls(pool, int(index))


def in_pool(pool: str, names: Iterable[str]) -> list[str]:
    """Those of these names, which may be of any form, that are of workers of a pool."""
    return [name for name in names if name.rpartition("/")[0] == pool]


DEPARTING: Mapping[str, Any] = MappingProxyType(
    {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_new_tokens": 0, "repetition_penalty": 1.0, "logit_bias": ()}
)
"""Settings by which tokens are drawn from another distribution than the model's at a temperature, each with the value
that changes nothing."""
SHIFTING = ("min_new_tokens", "repetition_penalty", "logit_bias")
"""Those of them that change logits before the temperature divides them."""
_NUMBERS: Mapping[str, type] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), Real),
    **dict.fromkeys(("top_k", "max_new_tokens", "min_new_tokens"), Integral),
}


def is_flag(value: object) -> bool:
    """Tell whether this is True or False, of Python or of numpy, which is not imported here."""
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))


def departing(settings: Mapping[str, Any] | SamplingParams) -> list[str]:
    """Name the settings of `DEPARTING` that change something; an empty mapping or list, and null, do not."""
    given = settings if isinstance(settings, Mapping) else {name: getattr(settings, name) for name in DEPARTING}
    return [name for name, off in DEPARTING.items() if given.get(name, off) not in (off, None, [], {})]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one response. Values that change nothing: `top_p` 1.0, `top_k` 0, `min_p` 0.0, `min_new_tokens` 0,
    `repetition_penalty` 1.0, no `logit_bias` and no `stop`; temperature 0 is greedy.

    In the order in which they act on logits: `min_new_tokens` rules out `stop_token_ids` for so many tokens;
    `repetition_penalty` divides the logits above 0 of all tokens that are there, those of the prompt too, and
    multiplies those below it (arXiv 1909.05858); `logit_bias` is added, by token id; temperature, top-k, top-p; `min_p`
    leaves what is at least so many times as likely as the likeliest token (arXiv 2407.01082).

    `stop`: texts that end the response with the first token that completes one, behind `min_new_tokens`. The runtime
    looks for them, whatever the engine; `include_stop_str_in_output`: the text has them, too. The tokens always do.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    stop: str | tuple[str, ...] = ()
    include_stop_str_in_output: bool = False

    @property
    def filters(self) -> bool:
        """Tell whether top-k, top-p or min-p keep some tokens from being drawn that the temperature alone would
        allow."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def shifts(self) -> bool:
        """Tell whether logits are changed before the temperature divides them."""
        return self.min_new_tokens > 0 or self.repetition_penalty != 1 or bool(self.logit_bias)

    @property
    def departs(self) -> bool:
        """Tell whether tokens are drawn from another distribution than that of the model at this temperature, over the
        whole vocabulary, which the trainer computes."""
        return self.filters or (self.temperature > 0 and self.shifts)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The pairs of `logit_bias`, by token id."""
        return tuple(dict(self.logit_bias).items())

    @property
    def plain(self) -> SamplingParams:
        """The same without what departs from the model's distribution."""
        return replace(self, **DEPARTING)

    def __post_init__(self) -> None:
        """Give all values the plain types that they have in all requests. Raises TypeError for what is of another kind;
        which numbers are possible is for engines to say."""
        if type(self.stop) is not tuple or type(self.logit_bias) is not tuple:
            self._settle()
        reals = type(self.temperature) is type(self.top_p) is type(self.min_p) is type(self.repetition_penalty) is float
        whole = type(self.top_k) is type(self.max_new_tokens) is type(self.min_new_tokens) is int
        if not (reals and whole and type(self.include_stop_str_in_output) is bool):
            self._plain_numbers()  # to ask the abstract classes takes three times as long
        if type(self.stop_token_ids) is not tuple or not set(map(type, self.stop_token_ids)) <= {int}:
            self._plain_tokens()
        if self.stop and not all(isinstance(text, str) and text for text in self.stop):
            raise TypeError(f"SamplingParams(stop={self.stop!r}): expected texts of at least one character")

    def _plain_numbers(self) -> None:
        for name, kind in _NUMBERS.items():
            value: Any = getattr(self, name)
            if is_flag(value) or not isinstance(value, kind):
                expected = "an integer" if kind is Integral else "a number"
                raise TypeError(f"SamplingParams({name}={getattr(self, name)!r}): expected {expected}")
            plain: Callable[[Any], object] = int if kind is Integral else float
            object.__setattr__(self, name, plain(getattr(self, name)))
        shows = self.include_stop_str_in_output
        if not is_flag(shows):
            raise TypeError(f"SamplingParams(include_stop_str_in_output={shows!r}): expected True or False")
        object.__setattr__(self, "include_stop_str_in_output", bool(shows))

    def _plain_tokens(self) -> None:
        given: Any = self.stop_token_ids
        try:
            found = None if isinstance(given, str) or any(map(is_flag, given)) else tuple(map(index, given))
        except TypeError:
            found = None
        if found is None:
            raise TypeError(f"SamplingParams(stop_token_ids={given!r}): expected token ids, or () for none")
        object.__setattr__(self, "stop_token_ids", found)

    def _settle(self) -> None:
        """Give `stop` and `logit_bias` the forms that they have in all requests: tuples, of pairs by token id."""
        if not isinstance(self.stop, str | Collection):
            raise TypeError(f"SamplingParams(stop={self.stop!r}): expected a text, or several")
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", tuple(str(text) if isinstance(text, str) else text for text in texts))
        try:
            pairs = tuple(sorted((int(token), float(bias)) for token, bias in dict(self.logit_bias).items()))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"SamplingParams(logit_bias={self.logit_bias!r}): expected numbers by token id, as {{13: -2.0}}"
            ) from error
        object.__setattr__(self, "logit_bias", pairs)


@dataclass(frozen=True, slots=True)
class GivenResponse:
    """A response that the data gives: its tokens, the end token included, its text, and fields that are numbers."""

    token_ids: tuple[int, ...]
    text: str
    fields: Mapping[str, float] = field(default_factory=dict)
    trains: bool = True
    """Whether its tokens are trained on."""
    mask: tuple[bool, ...] = ()
    """Which of them are, where that is not the same for all."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a data source: its tokens, its text, and what the reward needs, as JSON text."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    task: str = "{}"
    responses: tuple[GivenResponse, ...] = ()
    """In flows that read their samples from the data."""


SampleKey = tuple[int, int]
"""A sample: prompt position, and number in the group."""
CallNumber = tuple[int, ...]
"""A call of `generate` within an episode: its number among what the step has begun so far, calls and tasks; within a
task, behind the number of that task. Never by the clock."""
FIRST_CALL: CallNumber = (0,)
RequestKey = tuple[int, int, CallNumber]
"""A request: prompt position, sample and call."""


@dataclass(frozen=True, slots=True)
class BegunSample:
    """One request of a sample that another worker began: to be continued, or answered already.

    `token_ids` and `logprobs` have equal length; `spans` cover them in order. `finish_reason` is "" while the request
    is not answered. `filtered_logprobs` as in `SampleOutput`. `call` and `digest` say which request it was.

    Example:

        BegunSample(0, (4, 9), (-0.1, -0.2), (Span(0, 1, 0, 2),))
    """

    sample: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    finish_reason: str = ""
    filtered_logprobs: tuple[float, ...] = ()
    call: CallNumber = FIRST_CALL
    digest: int = 0
    answer: bytes = b""
    """Of a tool, if it was asked, and not the model."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request to an engine: what follows `prompt_ids` in one sample of the group at a prompt position.

    Samples of one position that have the same tokens to read share their prefix; engines keep the prefixes of different
    versions apart. With `begun` (which is unfinished), the sample continues after its tokens.

    Example:

        SampleRequest(12, sample=0, prompt_ids=(4, 2, 10), seed=5)
    """

    position: int
    sample: int
    prompt_ids: tuple[int, ...]
    seed: int
    params: SamplingParams = field(default_factory=SamplingParams)
    begun: BegunSample | None = None
    call: CallNumber = FIRST_CALL
    """Which of the sample's requests it is: an engine may have several of them at a time."""
    stream: CallNumber = ()
    """Where the random numbers of its tokens come from: calls that go on with each other's tokens share a stream, named
    by the first of them. That of the sample's first sequence has no number."""
    offset: int = 0
    """The number of its first token in that stream."""

    @property
    def key(self) -> RequestKey:
        """Prompt position, sample and call: no engine has two requests of the same."""
        return self.position, self.sample, self.call


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What a request has got, finished or aborted: `token_ids` and `logprobs` have equal length; `spans` cover them in
    order. `call`: of the request; `digest`: of what was asked for, in records alone.

    `logprobs` are natural-log probabilities over the whole vocabulary at the temperature, before anything else that
    `SamplingParams` say, as the trainer computes them. `filtered_logprobs` are those of the distribution that the
    tokens were drawn from: as many, or none where it is the same (`SamplingParams.departs`) or nobody wants them
    (`EngineSpec.filtered_logprobs`). A stop token, if one was sampled, is the last of `token_ids`.

    Example:

        SampleOutput(12, 0, (4, 2, 1), (-0.1, -0.1, -0.2), (Span(0, 3, 0, 3),), "stop")
    """

    position: int
    sample: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    filtered_logprobs: tuple[float, ...] = ()
    call: CallNumber = FIRST_CALL
    digest: int = 0
    answer: bytes = b""
    """In records: of a tool (`ctx.once`), which has no tokens."""

    @property
    def key(self) -> RequestKey:
        """Of the request."""
        return self.position, self.sample, self.call

    @property
    def calls(self) -> tuple[SampleOutput, ...]:
        """The record of a sample that has this request alone."""
        return (self,)

    @property
    def begun(self) -> BegunSample:
        """The same for the next worker."""
        reason = "" if self.finish_reason == "abort" else self.finish_reason
        about = (self.token_ids, self.logprobs, self.spans, reason, self.filtered_logprobs)
        return BegunSample(self.sample, *about, self.call, self.digest, self.answer)


class FinishedSample(NamedTuple):
    """A sample that has come to its end: all that the model has written for it, call by call."""

    position: int
    sample: int
    calls: tuple[SampleOutput, ...]


def joined_filtered(parts: Iterable[tuple[Sequence[float], Sequence[float]]]) -> tuple[float, ...]:
    """Join the filtered log-probs of a sample's parts; empty where no part has any.

    `parts`: of each the log-probs over the whole vocabulary, and the filtered ones. Where nothing was cut off these are
    missing, and equal to the former.
    """
    known = list(parts)
    if not any(filtered for _, filtered in known):
        return ()
    return tuple(chain.from_iterable(filtered or whole for whole, filtered in known))


@dataclass(frozen=True, slots=True)
class Episode:
    """One sample that a generate step is to make: its prompt, and the task that the data source gave for it.

    `sample` is its number in the group, from 0 on.
    """

    uid: Uid
    sample: int
    prompt_ids: tuple[int, ...]
    prompt: str
    task: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """A response as text and tokens, with the task that its data source gave.

    A reward function judges the final response of a sample, its last sequence, with the data's prompt; a generate step
    gets what the model has written in one turn. `response` leaves out special tokens such as the end of the sequence;
    `response_ids` has them.
    """

    prompt: str
    response: str
    task: Mapping[str, Any]
    finish_reason: FinishReason
    response_ids: tuple[int, ...] = ()
