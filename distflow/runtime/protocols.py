"""What an engine and a backend must implement. Small on purpose; every adapter passes the suites in `distflow.testing`.

Shapes: B samples, T response tokens of the longest sample of a micro-batch, N of all samples, K candidates for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from distflow.data.batch import Batch, Ragged
from distflow.data.tokenizer import Tokenizer as Tokenizer
from distflow.runtime.checkpoint.format import Shard
from distflow.types import RequestKey, SampleOutput, SampleRequest, Version


def _go_on() -> None:
    """For an engine outside of a run, which is never stopped."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What the runtime hands an engine's constructor: `Engine(spec)`."""

    model: Mapping[str, Any]
    """The recipe's `models.<name>` section, resolved, as plain values."""
    device: str
    """For example cpu or cuda:0."""
    slots: int
    """Samples decoded side by side."""
    max_tokens: int
    """Longest prompt + response a slot must hold; 0: the model's own limit."""
    seed: int
    """The run's seed (randomness of a sample comes from its request)."""
    options: Mapping[str, Any]
    """The pool's `engine_options` section."""
    offload: bool = False
    """`offload` will be called between phases: an engine that cannot free the device's memory must refuse now."""
    shares_device: bool = False
    """The worker has models there too: an engine that reserves memory in advance takes only what its slots need."""
    pool: str = "NAME"
    """The worker's pool, for messages."""
    worker: str = "NAME/0"
    """The worker's name: an engine's own random numbers must differ from worker to worker."""
    life: int = 0
    """How often the worker was started before: an engine's own random numbers must differ from start to start."""
    folder: Path | None = None
    """Folder for sockets of the engine, removed with the run; None: the system's folder for temporary files."""
    deterministic: bool = False
    """`run.deterministic`: tokens and log-probs of a sample must not depend, to the last bit, on what is decoded beside
    it or on where it began. An engine that cannot promise that must refuse now."""
    filtered_logprobs: bool = False
    """Whether a step reads `rollout_filtered_logprobs`; otherwise an engine may leave them out."""
    weighed: bool = False
    """Training weights tokens by the log-probs: an engine that cannot tell those over the whole vocabulary where
    `SamplingParams.departs` must refuse such a sample, unless it is of validation."""
    go_on: Callable[[], None] = _go_on
    """Called every second by code that waits for anything but a decode step: raises RunStopped, or the error that ended
    the run."""


@runtime_checkable
class Engine(Protocol):
    """Generates. One thread calls it; nothing here blocks longer than one decode step (or one prefill)."""

    @property
    def free_slots(self) -> int:
        """Samples that could start now."""

    @property
    def version(self) -> Version | None:
        """Weights in use; None before the first complete update, or while an update is under way (torn)."""

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue samples, which start in this order as slots become free; those of a group come side by side.

        An engine knows no groups beyond that: a group is whole when the runtime has all its samples. A sample with
        `begun` continues after the tokens it has, with the random numbers of the next token position: under equal
        weights it does not differ from one that ran without a break. Raises ValueError for a request that can never
        fit, or a sample that is here already; then nothing is queued.
        """

    def poll(self) -> list[SampleOutput]:
        """Start what fits, decode one token for every running sample, return the samples that finished.

        An output has all that the request sampled, with what was begun elsewhere.
        """

    def begin_update(self, version: Version) -> None:
        """Start replacing the weights; `poll` serves nothing until `end_update`.

        It may be the version in use, if its weights were wrong: what it produced since the last poll is sampled again.
        """

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors in, by their names in a checkpoint; may be called repeatedly. KeyError for an unknown name."""

    def end_update(self) -> None:
        """Finish the update: tokens carry the new version from here on. Raises ValueError if weights are missing."""

    def abort(self, positions: Iterable[int]) -> list[SampleOutput]:
        """Drop these groups; return what their running samples have produced, with finish_reason abort.

        No later `poll` returns any of them, unless they are submitted again. Unknown positions are ignored.
        """

    def withdraw(self, requests: Collection[RequestKey]) -> None:
        """Drop these requests, which nobody waits for any more; unknown ones, and finished ones, are ignored."""

    def partials(self) -> list[SampleOutput]:
        """What every running sample has produced so far, with finish_reason abort; they keep running."""

    def progress(self) -> Mapping[int, int]:
        """Tokens sampled so far by the samples that are queued or running, summed by prompt position."""

    def offload(self) -> None:
        """Free the device's memory: weights and cache. Running samples are kept, and continue after their tokens.

        Weights that are torn (an update has begun) need not be kept.
        """

    def onload(self) -> None:
        """Take the device's memory again. Torn weights stay torn until the next update, which starts over."""

    def close(self) -> None:
        """Give everything back."""


@runtime_checkable
class TextScorer(Protocol):
    """A backend that holds a model with `head: score`; optional."""

    def longest_text(self) -> int | None:
        """Tokens of the longest text that the model takes; None: not known."""

    def encode(self, prompt: str, response: str) -> list[int]:
        """Token ids of a prompt and a response by the model's own tokenizer and chat template."""

    def score_texts(self, rows: Sequence[Sequence[int]], *, tokens: int) -> Tensor:
        """One number for each row of token ids, [B]; at most about `tokens` padded tokens at once (0: no limit)."""


@runtime_checkable
class TrainedScorer(TextScorer, Protocol):
    """A backend that trains such a model; optional."""

    def rate_texts(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """One number for each row of token ids, [B], with a gradient: all at once."""


@runtime_checkable
class Adapted(Protocol):
    """A backend that trains low-rank adapters beside a frozen model."""

    def without_adapters(self) -> Backend:
        """The frozen model alone, as a backend that shares its memory."""
        ...


@runtime_checkable
class Measured(Protocol):
    """An engine or backend that can measure what it holds; optional."""

    def device_bytes(self) -> Mapping[str, int]:
        """Bytes of its tensors on its device now (for a CPU: in memory), by purpose."""


@runtime_checkable
class Priced(Protocol):
    """A backend that knows how much attention adds to the cost of long rows; optional."""

    @property
    def quadratic(self) -> float:
        """q: a row of n tokens costs n + q·n², counted in tokens without attention."""


@runtime_checkable
class Repeats(Protocol):
    """A backend that can compute a micro-batch again for which the memory did not suffice; optional."""

    def forget_failed(self) -> bool:
        """Drop what a forward or backward that raised has left, and say whether the sums are as they were before it.

        They are not where gradients of a part of it were added to those of earlier micro-batches.
        """


@runtime_checkable
class Packing(Protocol):
    """A backend that knows whether it packs; optional."""

    @property
    def packs(self) -> bool:
        """Tell whether it computes the prompt of rows that share one once, and no padding (`distflow.parts`)."""


def packs(backend: object) -> bool:
    """Tell whether a backend packs."""
    return isinstance(backend, Packing) and backend.packs


class Reducer(Protocol):
    """Sums over the data-parallel replicas of a training pool."""

    @property
    def rank(self) -> int:
        """Number of this replica, from 0."""

    @property
    def size(self) -> int:
        """Number of replicas."""

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all replicas, which give the same shapes in the same order."""


class Alone:
    """The only replica of its pool."""

    rank = 0
    size = 1

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to do: the tensors are the sums."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What the runtime hands a backend's constructor: `Backend(spec)`."""

    model: Mapping[str, Any]
    """The recipe's `models.<name>` section, resolved, as plain values (with its `optimizer`)."""
    device: str
    trainable: bool
    """False for frozen models: no optimizer, no gradients."""
    seed: int
    training_steps: int
    """Length of the run, for learning-rate schedules."""
    options: Mapping[str, Any]
    """The pool's `backend_options` section."""
    replicas: Reducer = field(default_factory=Alone)
    """`apply` divides, clips and steps by the gradients summed over these."""
    deterministic: bool = False
    """Equal calls must give equal results to the last bit (`run.deterministic`)."""

    @property
    def batch_invariant(self) -> bool:
        """Whether scores of a row must not depend, to the last bit, on other rows; a GPU only has to repeat them."""
        return self.deterministic and not self.device.startswith("cuda")


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Results of one forward over a micro-batch, for response tokens only, padded: [B, T] each."""

    logprobs_BT: Tensor
    entropy_BT: Tensor | None
    mask_BT: Tensor
    candidate_ids_BTK: Tensor | None = None
    """Other tokens that could have stood at each place."""
    candidate_logprobs_BTK: Tensor | None = None
    """Their log-probs, with a gradient if `logprobs_BT` has one."""


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values of the states before each response token, padded: [B, T] each."""

    values_BT: Tensor
    mask_BT: Tensor


@runtime_checkable
class Backend(Protocol):
    """Holds one model and, if it is trained, its optimizer. The result never depends on micro-batching."""

    lockstep: bool
    """True if forward or backward is collective (FSDP, ZeRO): the replicas agree on each round of them.

    Then `named_shards` is collective too: all replicas iterate over it, even those that publish nothing.
    """

    def join(self) -> None:
        """Divide the model, if it is divided: the process group of all replicas (torch's default group) now exists.

        All replicas call it once, before anything but `close`; `load_state` comes after it. A single replica without
        `lockstep` has no group.
        """

    def idle(self, *, grad: bool) -> None:
        """Take part in a round without samples: a forward, with `grad` also a backward, that adds nothing.

        Called only with `lockstep`.
        """

    def score(
        self, batch: Batch, *, temperature: float, grad: bool, entropy: bool, candidates: int | Ragged = 0
    ) -> TokenScores:
        """Log-probs of the response tokens of a micro-batch (fields prompt_ids, response_ids), on the device.

        `candidates`: score as many of the likeliest tokens at each place besides, or those with the given ids [N, K].
        """

    def values(self, batch: Batch, *, grad: bool) -> TokenValues:
        """Values of the states before each response token, by a model with `head: value`, which has no log-probs.

        Raises ValueError for a model with another head, as `score` does for this one.
        """

    def accumulate(self, loss_sum: Tensor) -> None:
        """Run the backward of a loss *summed* over tokens or samples; gradients add up until `apply`."""

    def apply(self, denominator: float) -> float:
        """Divide the gradients by `denominator`, clip, step the optimizer, clear. Returns the norm before clipping.

        If the norm is not finite or exactly 0, the optimizer does not step, on all replicas alike: weights, moments and
        the number of steps stay as they are, and the gradients are cleared as after a step.
        """

    def schedule_at(self, done: int) -> None:
        """The next `apply` has the learning rate after `done` optimizer steps, however many there have been.

        So a schedule keeps pace with the training steps although some optimizer steps are left out.
        """

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next `apply`."""

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights as a checkpoint of the Hugging Face model has them (tied ones once), detached.

        Names and shapes are those on disk, for example one tensor per expert.
        """

    def state_shards(self) -> Iterator[Shard]:
        """Yield what this replica saves of the state (weights, moments, masters, counters); nothing if frozen.

        The shards of all replicas together are the whole state, once. Names are the same for every backend:
        `model.<parameter>`, `optimizer.<exp_avg|exp_avg_sq|master>.<parameter>`, `optimizer.steps`; parameters in half
        precision have a master.
        """

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a whole state, whose tensors may be read from disk only when they are asked for.

        Raises ValueError on a mismatch of names, shapes or types.
        """

    def offload(self) -> None:
        """Free the device's memory by moving everything off it. Called only between `apply` and the next `score`.

        Tensors that `named_shards` and `state_shards` gave before keep their values, and their memory.
        """

    def onload(self) -> None:
        """Move everything back to the device."""

    def close(self) -> None:
        """Give everything back."""
