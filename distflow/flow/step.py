"""The `@step` decorator: what a step function reads and writes, where it may run, and what its settings may be."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

from distflow.types import DROP_REASON, LEFT_OUT, SEQUENCE, Role, Scope, prefixed, written

ATTRIBUTE = "__distflow_step__"
SEVERAL_UPDATES = "several_updates"
"""Condition of `reads_when` that no setting states: batch.minibatches × batch.epochs is more than 1."""
ROLLOUT = "rollout_logprobs"
"""Log-probs over the whole vocabulary, of the engine that sampled."""
FILTERED = "rollout_filtered_logprobs"
"""Log-probs of what tokens were drawn from: generate steps write this field where something reads it."""
MASK_TRUNCATED = "batch.mask_truncated"
"""Condition, no setting either, by which steps that train a model read why each response ended."""
GENERATED = (
    "uid",
    "group",
    "sample",
    "prompt_ids",
    "prompt_text",
    "task",
    "response_ids",
    "response_mask",
    "response_text",
    ROLLOUT,
    "policy_versions",
    "finish_reason",
    LEFT_OUT,
)
"""Fields that the runtime writes for every generate step."""
READ = tuple(name for name in GENERATED if name not in (ROLLOUT, "policy_versions", LEFT_OUT))
"""Fields that it writes for every read step: no model has sampled these tokens, and none is left out."""
GIVEN = ("uid", "group", "sample", "prompt_ids", "prompt_text", "task")
"""Of these, what a generate step of a further model (`prefix`) gets from other steps."""
SEQUENCES = (SEQUENCE, "sequence_prompt")
"""Fields that it writes too where an environment is declared: only then a sample can have several sequences."""
ENVIRONMENT = ("replay", "repeatable")
"""What the environment of a generate step may allow."""
BY_CLIENT = "distflow.workers.clients:by_client"
"""The step whose fields are written by clients, programs outside the run; a recipe names them."""
CLIENT_KINDS = ("number", "text", "number_per_token")
"""What such a field may hold: one number or text for a sample, or a number for each of its response tokens."""
ROOM = ("max_tokens", "max_new_tokens", "max_response_tokens")
"""Settings that say how long a sample may be: with an environment's tokens, of a generate step, of a read step."""
ERROR_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        "on_error": "retry",
        "max_attempts": 3,
        "max_error_rate": None,
        "timeout_s": 3600.0,
        "turn_timeout_s": 600.0,
        "max_sample_tokens": None,
    }
)
"""Settings that every generate step has beside those of its function, with their defaults: what becomes of a sample on
which it fails (`runtime/sample_errors.py`), how long it may take, in seconds, in all and without tokens, and how many
tokens all its sequences may have."""
SAMPLING_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        "min_p": 0.0,
        "min_new_tokens": 0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "stop": [],
        "include_stop_str_in_output": False,
    }
)
"""Settings of sampling that every generate step has whose function has none of that name, with their defaults: they
hold for every call of `generate`, unless its `SamplingParams` say something else than these."""
SEQUENCES_A_SAMPLE = 4
"""Of the greatest length, so many have room in a sample if nothing else is said."""
_ERROR_LIMITS = {"leave_out": 0.25, "retry": 0.25}
SAMPLE_TOKENS = 22
"""How many tokens have as many bytes as what a sample has besides (`flow/memory.py`)."""
_Function = TypeVar("_Function", bound=Callable[..., Any])
Arguments = Mapping[str, str | Mapping[str, str] | None]
"""Arguments that a plug-in may take, by name, each with the field that is read for it, or for its attributes."""

_BOUND = re.compile(r"\s*(>=|<=|>|<)\s*(-?\d+(?:\.\d+)?)\s*")
_HOLDS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True, slots=True)
class StepSpec:
    """The decorator's arguments."""

    role: Role
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    scope: Scope = "sample"
    reads_when: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fills: Mapping[str, float] = field(default_factory=dict)
    plugins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    arguments: Mapping[str, Arguments] = field(default_factory=dict)
    """Of `plugins`, those that take any of the arguments offered."""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ranges: Mapping[str, str] = field(default_factory=dict)
    may_write: tuple[str, ...] = ()
    environment: tuple[str, ...] | None = None
    head: str | None = None
    only_with: Mapping[str, str] = field(default_factory=dict)
    reads_if_there: tuple[str, ...] = ()
    widths: Mapping[str, str] = field(default_factory=dict)
    own_model: bool = False
    samples: int = 1
    """Of a read step: most samples of a row of the data."""
    setup: Callable[[Any], Any] | None = None
    """Of a generate step: what its episodes share. None in a declaration that was read from source."""


class SomeSteps(TypedDict, total=False):
    """What only steps of some kinds declare."""

    fills: Mapping[str, float] | None
    may_write: Sequence[str]
    environment: Sequence[str] | None
    head: str | None
    only_with: Mapping[str, str] | None
    reads_if_there: Sequence[str]
    widths: Mapping[str, str] | None
    own_model: bool
    samples: int
    setup: Callable[[Any], Any] | None


_MADE: Mapping[str, Sequence[str]] = {"generate": (*GENERATED, FILTERED), "read": READ}
"""Fields that all steps of a role write."""


def step(
    *,
    role: Role,
    reads: Sequence[str],
    writes: Sequence[str],
    scope: Scope = "sample",
    reads_when: Mapping[str, Sequence[str]] | None = None,
    plugins: Mapping[str, Sequence[str] | Arguments] | None = None,
    choices: Mapping[str, Sequence[str] | str] | None = None,
    **of_some: Unpack[SomeSteps],
) -> Callable[[_Function], _Function]:
    """Declare a step. All arguments must be literals: the planner reads them from the source, without importing it.

    `role`: generate, read, score, forward, client, train. `reads`, `writes`: fields. `scope`: what a call must see:
    single samples, whole groups, or the whole batch. `reads_when`: further reads while a setting is truthy, for example
    `{"kl_coef": ["ref_logprobs"]}`; `several_updates` stands for batch.minibatches × batch.epochs > 1. `fills`: fields
    that some workers' own steps write, with the value elsewhere. `plugins`: settings that may name a function, and its
    parameters, for example `{"function": ["sample"]}`. One setting may instead name a function that takes any of the
    arguments offered, by name: its other parameters, keyword-only, are settings of the step, which takes them as
    `**settings`, and the step reads the field given for each argument that the function takes, or for each attribute of
    it that it mentions (None where it needs no field): `{"function": {"rewards_B": "reward"}}`, `{"loss": {"terms":
    {"ref_logprobs": "ref_logprobs"}}}`.

    `choices`: names that a setting may take, besides a function if it is among `plugins`, for example
    `{"kl": ["k1", "k2"]}`; a name that ends in `/N` stands for any whole number > 0 there, `module:name` for the
    function `name`; a text is the range of a number: `{"top_p": "> 0, <= 1"}`. `may_write`: fields that a score step
    does not always write, for example `["rewards/*"]`; `drop_reason` and `left_out` are always among them. `head`: what
    the last layer of the step's model has to give (`models.NAME.head`); a call of `ctx.backend.score`, `.values` or
    `.score_texts` in the function itself tells it too. `only_with`: settings that have an effect only while another one
    is truthy, for example `{"kl": "kl_coef"}`. `samples`: of a read step, how many it makes of a row at most.
    `reads_if_there`: fields that the step reads if another one writes them. `widths`: fields with several values for
    each response token, and the setting that says how many, for example `{"candidate_ids": "top_k"}`. `own_model`:
    whether the model must be another one than the policy. `setup`, no literal but a name: an async context manager over
    ctx, entered before the first episode of a generate step; what it yields is `ctx.shared`.
    """
    named, functions = choices or {}, plugins or {}
    some = _of_some(of_some)
    may_write: tuple[str, ...] = some.pop("may_write", ())
    always_may = {"score": (DROP_REASON, LEFT_OUT), "generate": (DROP_REASON, LEFT_OUT)}.get(role, ())
    may_write = (*may_write, *(name for name in always_may if not written(name, (*writes, *may_write))))
    always = (*_MADE.get(role, ()), *(SEQUENCES if "environment" in some else ()))
    spec = StepSpec(
        role=role,
        reads=tuple(reads),
        writes=tuple(dict.fromkeys((*always, *writes))),
        scope=scope,
        reads_when={setting: tuple(fields) for setting, fields in (reads_when or {}).items()},
        plugins={setting: tuple(names) for setting, names in functions.items() if not isinstance(names, Mapping)},
        arguments={setting: names for setting, names in functions.items() if isinstance(names, Mapping)},
        choices={setting: tuple(names) for setting, names in named.items() if not isinstance(names, str)},
        ranges={setting: text for setting, text in named.items() if isinstance(text, str)},
        may_write=may_write,
        **some,
    )

    def attach(function: _Function) -> _Function:
        setattr(function, ATTRIBUTE, spec)
        return function

    return attach


def _of_some(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values that cannot be changed, of what is given."""
    found = {name: value for name, value in given.items() if value is not None}
    lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list | tuple)}
    return found | lists | {name: dict(value) for name, value in found.items() if isinstance(value, Mapping)}


def of_runtime(own: Collection[str]) -> frozenset[str]:
    """Name the settings of a generate step that are not for its function, which has these parameters of its own."""
    return frozenset(ERROR_SETTINGS) | (frozenset(SAMPLING_SETTINGS) - frozenset(own))


def error_limit(on_error: str) -> float:
    """The default of `max_error_rate`, by what becomes of a sample that fails: without those that are left out, the
    others teach as before, and one group in four is not replaced."""
    return _ERROR_LIMITS.get(on_error, 0.05)


def error_cure(step: str, on_error: str, counter: str, *, all_failed: bool) -> str:
    """Return what to do where more samples of a step fail than its settings allow. `counter`: the metrics that count
    them; `all_failed`: none was made, which is not what `on_error` is for."""
    key = f"flow.steps.{step}.with"
    gentler = "" if on_error in _ERROR_LIMITS else f"{key}.on_error=leave_out goes on without up to a quarter of them, "
    rest = f"{key}.max_error_rate=1 alone goes on so" if all_failed else f"{gentler}{key}.max_error_rate allows more"
    return f"{counter} count them, and the log of each worker names its first ones: mend what raises them; or {rest}"


def response_tokens(settings: Mapping[str, Any]) -> Any:
    """Most tokens behind the prompt of a sample, by the settings of the step that makes it: the first of `ROOM`."""
    return settings[next(name for name in ROOM if name in settings)]


def sample_tokens(settings: Mapping[str, Any]) -> int:
    """Most tokens behind the data's prompt in all sequences of a sample; of steps that declare an environment, several
    (`max_sample_tokens`)."""
    longest = int(response_tokens(settings))
    # Without an environment, max_new_tokens is what there is.
    most = settings.get("max_sample_tokens") if "max_tokens" in settings else longest
    return SEQUENCES_A_SAMPLE * longest if most is None else int(most)


def reads_all_turns(settings: Mapping[str, Any]) -> bool:
    """Whether a read step takes all turns of the assistant in a conversation, not the last one alone."""
    return settings.get("turns") == "all"


def reserved_tokens(settings: Sequence[Mapping[str, Any]], longest_prompt: int) -> int:
    """Tokens behind the prompt of the data for which each sample's memory is reserved.

    `settings`: of the step that makes the primary model's samples, then of the generate steps of further models, which
    have prompts of their own.
    """
    first, *further = map(sample_tokens, settings)
    return first + sum(longest_prompt + tokens + SAMPLE_TOKENS for tokens in further)


def reads_of(spec: StepSpec, prefix: str) -> tuple[str, ...]:
    """The fields that a step always reads, by their names in the flow."""
    given = GIVEN if prefix and spec.role == "generate" else ()
    return tuple(prefixed(field, prefix) for field in dict.fromkeys((*given, *spec.reads)))


def writes_of(spec: StepSpec, prefix: str) -> tuple[str, ...]:
    """The fields that a step always writes, by their names in the flow."""
    # Whether a sample is left out is one thing for all models, and a step of a further one seldom says so.
    given = (*GIVEN, LEFT_OUT) if prefix and spec.role == "generate" else ()
    return tuple(prefixed(field, prefix) for field in spec.writes if field not in given)


class NamedFields(NamedTuple):
    """Fields that the settings of a step name, not its declaration."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def named_fields(spec: StepSpec, settings: Mapping[str, Any]) -> NamedFields:
    """The fields that a recipe gives to a step of clients: what they see, and what they write, by the names."""
    if spec.role != "client":
        return NamedFields()
    reads, writes = settings.get("reads"), settings.get("writes")
    # What has another form is reported where settings are checked.
    return NamedFields(
        tuple(map(str, reads)) if isinstance(reads, list | tuple) else (),
        tuple(map(str, writes)) if isinstance(writes, Mapping) else (),
    )


def is_range(text: object) -> bool:
    """Whether a text is a range: bounds separated by commas."""
    return isinstance(text, str) and all(_BOUND.fullmatch(bound) for bound in text.split(","))


def within(value: float, text: str) -> bool:
    """Whether a number is within all bounds; NaN is within none."""
    bounds = [_BOUND.fullmatch(bound) for bound in text.split(",")]
    return all(found is not None and _HOLDS[found[1]](value, float(found[2])) for found in bounds)
