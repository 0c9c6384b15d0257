"""The recipe, as typed and frozen values. The text under each field is its documentation: meaning, unit, default.

`distflow config explain KEY`, the JSON Schema and editors show these texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from distflow.config.data_schema import DataConfig, ValConfig, inherited
from distflow.config.hosts_schema import SecurityConfig, WeightsConfig
from distflow.config.section import Section
from distflow.config.training_schema import LoraConfig, OptimizerConfig
from distflow.types import MOST_WORKERS

PoolRole = Literal["generate", "score", "forward", "train", "validate", "*"]
Refresh = Literal["eager", "when_idle", "at_bound"]
Schedule = Literal["fifo", "longest_first", "skew_aware"]
MaskTruncated = Literal["loss", "all"]
UNBOUNDED = "unbounded"
LONGEST_S = 1e9
"""Longest time that can be given (32 years), for 'never': longer waits are beyond what the system can wait."""
Head = Literal["tokens", "value", "score"]
HEADS: tuple[str, ...] = get_args(Head)
Dtype = Literal["float32", "float64", "bfloat16", "float16"]


ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Implementations that transformers has by name."""
_PINNED = re.compile(r"^[\w.-]+/[\w.-]+@[0-9a-f]{40}$")


def _unbuilt(value: object) -> object:
    if value is not None:
        raise PydanticCustomError("distflow", "not built yet; remove it: one worker holds the whole model")
    return value


def _host_from_0(value: str | int) -> str | int:
    if isinstance(value, int) and value < 0:
        raise PydanticCustomError("distflow", "numbers of hosts count from 0")
    return value


def _tracker(value: object) -> object:
    """Give one message for what is no mapping, for which pydantic would give two."""
    if isinstance(value, Mapping | bool):
        return value
    raise PydanticCustomError(
        "distflow", "expected a mapping of its options, or true, got {given}", {"given": repr(value)}
    )


def _attention(value: object) -> object:
    """Take the names of transformers, and of the hub's kernels only what is pinned."""
    if value == "auto" or value in ATTENTION or (isinstance(value, str) and _PINNED.match(value)):
        return value
    named = isinstance(value, str) and "/" in value
    wrong = f"{value!r} names code that may change" if named else f"{value!r} is not allowed"
    allowed = f"auto, {', '.join(ATTENTION)}, or a kernel of the hub as org/name@commit, with the 40 digits of a commit"
    raise PydanticCustomError("distflow", "{wrong}; allowed: {allowed}", {"wrong": wrong, "allowed": allowed})


def _staleness(value: object) -> object:
    """Give one message for a number or a word, for which pydantic would give two."""
    if value == UNBOUNDED or (type(value) is int and value >= 0):
        return value
    wrong = f"{value} should be greater than or equal to 0" if type(value) is int else f"{value!r} is not allowed"
    raise PydanticCustomError("distflow", "{wrong}; allowed: 0, 1, 2 …, or unbounded", {"wrong": wrong})


class StopConfig(Section):
    """A goal that ends the run, or a limit."""

    metric: str = Field(pattern=r"^\S+$")
    """A mean metric of the training workers, or one of validation, as for keep_best; with one of the next two keys
    (docs/validation.md). Null instead of the section: training_steps alone ends the run."""
    at_least: float | None = None
    """The run ends when the metric reaches this value."""
    at_most: float | None = None
    """The run ends when the metric falls to this value."""

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise PydanticCustomError("distflow", "expected one of at_least and at_most, with a number")
        return self

    def met_by(self, value: float) -> bool:
        """Whether a value of the metric ends the run; nan never does."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is not None and value <= self.at_most

    def newest(self, steps: Sequence[Mapping[str, float]]) -> float | None:
        """The metric's newest value among the metrics of training steps, in their order; None: it has none."""
        names = (self.metric, f"{self.metric}/mean")
        return next((step[name] for step in reversed(steps) for name in names if name in step), None)

    def __str__(self) -> str:
        word, bound = ("at least", self.at_least) if self.at_least is not None else ("at most", self.at_most)
        return f"{self.metric} {word} {bound:g}"


class RunConfig(Section):
    """The run as a whole."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the run and of its folder under runs/. Default: the recipe file's name."""
    training_steps: int = Field(ge=0, json_schema_extra={"unit": "training steps"})
    """Length of the run, in training steps: batches trained on. 0: only validate."""
    seed: int = Field(default=0, ge=0, lt=1 << 64)
    """Decides data order, initial weights and every sampled token."""
    save_every: int = Field(default=0, ge=0, json_schema_extra={"unit": "training steps"})
    """Training steps between checkpoints; 0: only at the end and when the run is stopped."""
    save_every_s: float | None = Field(default=None, gt=0, le=LONGEST_S, json_schema_extra={"unit": "seconds"})
    """Seconds after which another checkpoint is due, at the end of the training step then under way; null: never."""
    stop_after: int | None = Field(default=None, ge=1, json_schema_extra={"unit": "training steps"})
    """Save and end after this training step, as if stopped; null: continue to training_steps."""
    deterministic: bool = False
    """Repeat to the last bit, even if killed and resumed: micro-batches in a fixed order, log-probs that do not depend
    on the rest of a batch. Needs max_staleness 0; slower (docs/checkpoints.md)."""
    dump_rollouts: int = Field(default=1, ge=0, json_schema_extra={"unit": "training steps"})
    """Write the samples of every Nth training step to rollouts/; 0: never."""
    dump_fields: list[str] | None = None
    """Fields written there besides the standard ones: names or patterns (`stats/*`). Null: all that plug-ins write."""
    dump_limit_mb: int = Field(default=1024, ge=1, json_schema_extra={"unit": "MiB"})
    """Most space for the dumps of one training worker in rollouts/; beyond it the oldest training steps are removed."""
    trace: bool = True
    """Record what each worker does and when, for `distflow trace`."""
    trace_limit_mb: int = Field(default=16, ge=1, json_schema_extra={"unit": "MiB"})
    """Most space for the trace of one worker in the run folder; beyond it the older half is removed."""
    hf_every: int = Field(default=0, ge=0, json_schema_extra={"unit": "training steps"})
    """Training steps between Hugging Face folders of the trained model, in hf/ of the run folder; 0: none."""
    keep_checkpoints: int | None = Field(default=2, ge=1, json_schema_extra={"unit": "checkpoints"})
    """How many of the newest checkpoints are kept; null: all of them."""
    keep_best: str | None = Field(default=None, pattern=r"^\S+$")
    """A mean metric of the training workers, such as critic/score, or one of validation, such as val/avg@1: the
    checkpoint with its best value is kept too."""
    keep_best_mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value of keep_best is the best."""
    stop_when: StopConfig | None = None
    """A metric and a value that end the run (docs/validation.md); null: continue to training_steps."""
    copy_to: str | None = Field(default=None, pattern=r"^\S+$")
    """A second place for checkpoints and Hugging Face folders: a folder, or a store by its address, such as
    s3://bucket/prefix. They are copied there while training goes on, and kept as here (docs/copies.md)."""
    trackers: dict[str, Annotated[dict[str, Any] | bool, BeforeValidator(_tracker)]] = Field(default={})
    """What follows the run from outside, by name, each with its options, or true for none (docs/trackers.md):
    tensorboard, wandb, trackio, mlflow, swanlab, prometheus, or any name with `call`."""

    @property
    def judged(self) -> dict[str, str]:
        """The metrics that decide which checkpoints are kept, and when the run ends, by key."""
        goal = {} if self.stop_when is None else {"run.stop_when.metric": self.stop_when.metric}
        return goal if self.keep_best is None else {"run.keep_best": self.keep_best, **goal}


class BatchConfig(Section):
    """What one training step consumes. Everything else about batches is derived; `distflow plan` shows it."""

    prompts: int = Field(ge=1, json_schema_extra={"unit": "prompts per training step"})
    """Prompts (groups) per training step. A multiple of `ledgers`."""
    samples_per_prompt: int = Field(default=1, ge=1, json_schema_extra={"unit": "samples"})
    """Samples per prompt (G); together they are one group. Flows that read samples from the data say it themselves."""
    ledgers: int = Field(default=8, ge=1, json_schema_extra={"unit": "ledgers"})
    """Independent order books of the data (K), so that results do not depend on the number of workers.
    Divides `prompts`; at least the number of training replicas."""
    tokens_per_microbatch: int = Field(default=8192, ge=1, json_schema_extra={"unit": "tokens"})
    """Tokens (prompt and response) of one forward and backward, as the model computes them: packed, a shared prompt
    once and no padding (`backend_options.packed`), else padded to the longest row. Bounds memory; never changes the
    result."""
    minibatches: int = Field(default=1, ge=1, json_schema_extra={"unit": "optimizer steps per epoch"})
    """Equal parts that a training step is cut into, with an optimizer step each. Divides `prompts` / `ledgers`."""
    epochs: int = Field(default=1, ge=1, json_schema_extra={"unit": "passes over a training step's samples"})
    """How often each training step's samples are trained on."""
    target_kl: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, json_schema_extra={"unit": "nats per token"}
    )
    """No further epoch for the policy once an epoch has moved it further than this, by the mean of r - 1 - log r."""
    critic_warmup: int = Field(default=0, ge=0, json_schema_extra={"unit": "training steps"})
    """Training steps at the beginning in which only critics are trained."""
    mask_truncated: MaskTruncated | None = None
    """What becomes of responses that were cut off before they ended. null: they are trained on as all others; loss:
    their tokens are left out of the loss, and their rewards still count among those of the group (arXiv 2503.14476,
    section 3.4); all: their samples are left out altogether, also of means and deviations."""
    max_refills: int | None = Field(default=None, ge=0, json_schema_extra={"unit": "groups per ledger and step"})
    """Groups a ledger may replace within one training step before the run stops and says why. Default: 10 per group."""


class StepConfig(Section):
    """One step of the flow: a function and its settings."""

    call: str
    """The step function: `module:name`, or `./file.py:name` beside the recipe."""
    model: str | None = None
    """The model (a key of `models`) that the step uses."""
    prefix: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9_]*$")
    """What precedes the names of the fields that the step reads and writes, so that a further model's samples have
    fields of their own: with `solver`, its `response_ids` is `solver/response_ids` in the flow."""
    with_: dict[str, Any] = Field(default={}, alias="with")
    """Settings, by the names of the function's keyword-only parameters."""


class FlowConfig(Section):
    """The algorithm: steps whose order follows from the fields that they read and write."""

    steps: dict[str, StepConfig] = Field(min_length=1)
    """Steps by name."""


class WorkerSettings(Section):
    """Settings of one worker that differ from its pool's. Anything not given is taken from the pool."""

    engine: str | None = None
    """Generation engine: a short name, `module:name` or `./file.py:name`."""
    engine_options: dict[str, Any] | None = None
    """Options that the engine itself defines."""
    backend_options: dict[str, Any] | None = None
    """Options that the backend itself defines."""
    device: str | None = Field(default=None, pattern=r"^(auto|cpu|cuda|cuda:\d+)$")
    """auto, cpu, cuda or cuda:N."""
    threads: int | None = Field(default=None, ge=1, json_schema_extra={"unit": "threads per worker"})
    """Compute threads."""
    slots: int | None = Field(default=None, ge=1, json_schema_extra={"unit": "samples"})
    """Samples decoded at the same time."""
    episodes: int | None = Field(default=None, ge=1, json_schema_extra={"unit": "samples"})
    """Samples under way at the same time."""
    sample_memory_mb: int | None = Field(default=None, ge=1, json_schema_extra={"unit": "MiB"})
    """Memory reserved for results or rows that arrive, in MiB."""
    steps: list[str] = Field(default=[])
    """Steps of its own, `+./file.py:name`: they may write only fields that they declare with a fill value."""
    script: str | None = None
    """A script of its own instead of the rendered one: a Python file with `def script(w)`."""
    python: str | None = None
    """The Python that runs it, such as a virtual environment's `bin/python`."""


class PoolConfig(Section):
    """Workers of one kind: how many, what they do, and on what."""

    count: int = Field(default=1, ge=1, le=MOST_WORKERS, json_schema_extra={"unit": "workers"})
    """Number of workers."""
    roles: list[PoolRole] = Field(default=[])
    """Roles this pool takes: generate, score, forward, train; `*` takes what no other pool takes. `validate`, alone:
    generates for validation only."""
    steps: list[str] = Field(default=[])
    """Single steps this pool takes, by name; they come before roles. `+./file.py:name` adds a step of its own."""
    engine: str = "torch"
    """Generation engine: a short name, `module:name` or `./file.py:name`."""
    engine_options: dict[str, Any] = Field(default={})
    """Options that the engine itself defines."""
    backend: str = "torch"
    """Training backend: a short name, `module:name` or `./file.py:name`."""
    backend_options: dict[str, Any] = Field(default={})
    """Options that the backend itself defines."""
    zero: int | None = Field(default=None, ge=0, le=3)
    """ZeRO stage of backend deepspeed, 0 to 3: short for `backend_options: {zero: …}`."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda|cuda:\d+)$")
    """auto (a GPU if there is one), cpu, cuda, or cuda:N."""
    threads: int = Field(default=1, ge=1, json_schema_extra={"unit": "threads per worker"})
    """Compute threads of each worker."""
    slots: int = Field(default=64, ge=1, json_schema_extra={"unit": "samples"})
    """Samples that one generating worker decodes at the same time; fewer if fewer can be under way at once."""
    episodes: int | None = Field(default=None, ge=1, json_schema_extra={"unit": "samples"})
    """Samples that one generating worker has under way at most, those included that wait for tools and leave their
    slots to others meanwhile; null: 4 times `slots`. A whole group is begun in any case if there is no other."""
    environments: Literal["thread", "process"] = "thread"
    """Where generate steps run with their tools: in a thread beside the engine, or in a process of their own, for what
    computes, forks or crashes: it holds up no engine and ends no worker."""
    sample_memory_mb: int | None = Field(default=None, ge=1, json_schema_extra={"unit": "MiB"})
    """Memory that a training worker reserves for arriving results (for rows to train on, where they come from other
    training workers), in MiB; null: derived from the batch, the longest samples and max_staleness, 256 to 8192 (more if
    one training step needs it). `plan` shows it."""
    offload: bool = False
    """For a pool that generates and trains: the engine leaves the device while the worker trains, and the models while
    it generates. The result is the same."""
    hosts: list[Annotated[str | int, AfterValidator(_host_from_0)]] = Field(default=[])
    """Hosts that its workers run on, by name or pattern (`gpu-*`), or by number: the place in the hosts file, or of the
    node in its job, from 0; none: any. Ignored in a run on one host."""
    each: dict[str, WorkerSettings] = Field(default={})
    """Workers that differ, by index: `each: {"1": {threads: 2}}`."""
    script: str | None = None
    """A script of this pool's own instead of the rendered one: a Python file with `def script(w)`."""
    python: str | None = None
    """The Python that runs its workers, such as a virtual environment's `bin/python`: a path on the workers' host. It
    needs the packages of workers and of the engine, not distflow. Null: the Python of the launch command."""
    parallel: Annotated[dict[str, int] | None, BeforeValidator(_unbuilt)] = None
    """Reserved for tensor and sequence parallelism; refused until built."""

    def settings_of(self, index: int) -> WorkerSettings:
        """What one worker sets for itself."""
        return self.each[str(index)] if str(index) in self.each else WorkerSettings()

    def engine_options_of(self, own: WorkerSettings) -> dict[str, Any]:
        """What the engine of a worker with these settings gets; the pool's options are not for another engine."""
        if own.engine_options is not None:
            return own.engine_options
        return {} if own.engine is not None else self.engine_options

    def backend_options_of(self, own: WorkerSettings | None = None) -> dict[str, Any]:
        """What the backend of a worker with these settings gets, `zero` included; without settings, the pool's."""
        options = self.backend_options if own is None or own.backend_options is None else own.backend_options
        return options if self.zero is None else {**options, "zero": self.zero}


class LayoutConfig(Section):
    """Where the flow runs: pools of workers, and how old a sample may be."""

    pools: dict[str, PoolConfig] = Field(min_length=1)
    """Pools by name."""
    max_staleness: Annotated[int | Literal["unbounded"], BeforeValidator(_staleness)] = Field(
        default=0, json_schema_extra={"unit": "policy versions"}
    )
    """A sample trained at step t was started by policy version t − max_staleness or newer; unbounded: by any version,
    and groups are trained in order of arrival."""
    hedging: bool = True
    """A worker that is half idle and finds nothing to lease also generates a group that takes long on another worker,
    where a copy has the same tokens; so does any worker if the other is silent. The first result counts."""
    stealing: bool = True
    """Training workers share arrived samples: idle ones take them from busy ones, or all are dealt by cost. It changes
    who trains on them, never the result."""
    partial_rollouts: bool = True
    """The owner keeps what running samples have produced, so that another worker can continue them if one is lost."""
    on_failure: Literal["restart", "shrink", "stop"] = "restart"
    """When a training worker is killed: restart (its pool resumes from the last checkpoint, the others wait for it),
    shrink (the same, but without workers that cannot come back), or stop the run."""
    schedule: Schedule = "fifo"
    """Which group is generated next, of those that max_staleness lets through: fifo (in the order of the data),
    longest_first (the longest responses, as far as lengths of earlier groups tell), or skew_aware (that, and workers of
    their own for the longest where that is faster). It changes order and place, never what is trained on."""
    refresh: Refresh = "eager"
    """When a generating worker takes newer weights: eager (at once, within samples), when_idle (between samples), or
    at_bound (only when its next group needs them)."""


class ModelConfig(Section):
    """One model: an existing one by `path`, or a new one by `init`."""

    path: str | None = None
    """Folder of a Hugging Face model, or its hub id (hub ids need a network)."""
    init: dict[str, Any] | None = None
    """A new model with random weights: `model_type` and further values of its transformers configuration."""
    tokenizer: str | None = None
    """Folder, hub id, or `chars:0123456789=` (one token per character). Default: the model's own. `init` needs one."""
    dtype: Dtype = "float32"
    """Type of the weights and of the computation."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer, if the model is trained."""
    lora: LoraConfig | None = None
    """Train low-rank adapters beside frozen weights, which alone are published and saved (docs/models.md). Null: all
    weights are trained."""
    quantize: Literal["nf4"] | None = None
    """Round the frozen weights of linear layers to 4 bits each, which backend torch keeps so: nf4 (QLoRA, arXiv
    2305.14314). A trained model needs `lora`. Null: weights keep `dtype`."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    attn_implementation: Annotated[str, BeforeValidator(_attention)] = "auto"
    """How backends compute attention, by the names of transformers: sdpa, eager, flash_attention_2, flash_attention_3,
    flex_attention, or a kernel of the hub as `org/name@commit`. auto: packed, by torch's scaled dot product, where the
    model's layers allow that; else sdpa, or eager for families that have none. Engines have attention of their own."""
    head: Head = "tokens"
    """What the last layer gives: logits of the next tokens; values of the states before them, as a critic does (value);
    or one number for a whole text, as a reward model does (score; a sequence classifier)."""

    @property
    def inherited(self) -> tuple[str, ...]:
        """What this section takes from the policy's: if it names no model it is a copy, but for what it says itself."""
        if self.path is not None or self.init is not None:
            return ()
        own = self.model_fields_set
        kept = (key for key in ("dtype", "quantize", "gradient_checkpointing", "attn_implementation") if key not in own)
        return ("path", "init", "tokenizer", *kept)


class LimitsConfig(Section):
    """How long to wait, and how often to try again."""

    no_progress_s: float = Field(default=600.0, gt=0, le=LONGEST_S, json_schema_extra={"unit": "seconds"})
    """Seconds without any sign of progress after which a wait fails. Healthy slow work never fails."""
    connect_s: float = Field(default=120.0, gt=0, le=LONGEST_S, json_schema_extra={"unit": "seconds"})
    """Seconds for the workers of a run to connect to each other."""
    drain_s: float = Field(default=30.0, gt=0, le=LONGEST_S, json_schema_extra={"unit": "seconds"})
    """Seconds without progress of saving that workers get to save and leave in order when the run stops."""
    consumer_mb: int = Field(default=256, ge=1, json_schema_extra={"unit": "MiB per consumer and owner"})
    """Samples that an owner keeps for each consumer outside the run (docs/service.md). A lossless consumer that has as
    many unread holds the run up; of others the oldest are let go. Steps that clients write have no such bound."""
    restarts: int = Field(default=3, ge=0, json_schema_extra={"unit": "restarts per worker"})
    """How often a worker that does not train is restarted after it was killed, within `restart_window_s`; and how often
    in a row the training pool resumes from the same checkpoint."""
    restart_window_s: float = Field(default=3600.0, gt=0, le=LONGEST_S, json_schema_extra={"unit": "seconds"})
    """Older restarts of a worker do not count: a worker that is killed once a day never ends a run."""
    bad_steps: int = Field(default=20, ge=1, json_schema_extra={"unit": "training steps"})
    """Training steps in a row that may leave a model as it was, because the norms of its gradients were not finite, or
    no sample had a token to train on. After so many, training workers save and the run ends; `--resume` goes on with
    the samples behind them."""
    host_silence_s: float = Field(default=60.0, gt=0, le=LONGEST_S, json_schema_extra={"unit": "seconds"})
    """Seconds without a message from a host's agent before the end of the run no longer waits for that host, and before
    training workers that are cut off from most of the others end (docs/checkpoints.md). A generating worker that is
    silent for as long loses the leases of the training worker that did not hear from it."""


class Recipe(Section):
    """Everything a run needs to know."""

    run: RunConfig
    """The run as a whole."""
    batch: BatchConfig
    """What one training step consumes."""
    flow: FlowConfig
    """The algorithm."""
    layout: LayoutConfig
    """Where it runs."""
    models: dict[str, ModelConfig] = Field(min_length=1)
    """Models by name. Further models that the flow names are copies of `policy` unless they have a `path` or `init`; a
    section may then still give a head, an optimizer, dtype and gradient_checkpointing of their own."""
    data: DataConfig
    """Where prompts come from."""
    val: ValConfig | None = None
    """Validation; null: none."""
    limits: LimitsConfig = LimitsConfig()
    """How long to wait, and how often to try again."""
    weights: WeightsConfig = WeightsConfig()
    """How weights cross hosts."""
    security: SecurityConfig = SecurityConfig()
    """What is encrypted between hosts."""

    @model_validator(mode="before")
    @classmethod
    def _val_data(cls, given: object) -> object:
        return inherited(given)
