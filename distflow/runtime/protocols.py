"""What an engine and a backend must offer. Small on purpose; every adapter passes the suites in `distflow.testing`.

Shapes: B samples, T response tokens of the longest sample of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from distflow.data.batch import Batch
from distflow.runtime.checkpoint.format import Shard
from distflow.types import GroupRequest, SampleOutput, Version


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that distflow uses."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]:
        """Text to token ids, without special tokens being added."""
        ...

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special: bool) -> list[str]:
        """Token ids to texts, one a row."""
        ...

    def chat_prompt(self, text: str) -> list[int]:
        """The text as a user's turn under the model's chat template; plain `encode` where there is none."""
        ...


def _go_on() -> None:
    """An engine without a run around it, which nobody stops."""


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
    """`offload` will be called between phases: an engine that cannot free the device's memory refuses now."""
    shares_device: bool = False
    """The worker has models there too: an engine that takes its memory in advance takes what all slots need, if it can.
    """
    pool: str = "NAME"
    """Whose worker it is in, for messages."""
    life: int = 0
    """How often the worker was started before: an engine's own random numbers must differ from those of a life that was
    lost."""
    folder: Path | None = None
    """For sockets and the like of the engine's own, removed with the run; None: the system's for temporary files."""
    deterministic: bool = False
    """A sample's tokens and log-probs must not depend, to the last bit, on what is decoded beside it, nor on where it
    began: an engine that cannot promise it refuses now (`run.deterministic`)."""
    go_on: Callable[[], None] = _go_on
    """Whoever waits for something else than a decode step calls it every second: raises RunStopped, or what ended the
    run."""


@runtime_checkable
class Engine(Protocol):
    """Generates. One thread calls it; nothing here blocks longer than one decode step (or one prefill)."""

    @property
    def free_slots(self) -> int:
        """Samples that could start now."""
        ...

    @property
    def version(self) -> Version | None:
        """Weights in use; None before the first complete update, or while an update is under way (torn)."""
        ...

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queue groups; samples start as slots become free. Raises ValueError for a request that can never fit.

        Samples in a request's `begun` go on behind the tokens they have, with the numbers that belong to the next
        token position: under equal weights nothing tells them from samples that ran in one piece. Those that are
        finished come out of a later `poll` as they are.
        """
        ...

    def poll(self) -> list[SampleOutput]:
        """Start what fits, decode one token for every running sample, return the samples that finished."""
        ...

    def begin_update(self, version: Version) -> None:
        """Start replacing the weights; `poll` serves nothing until `end_update`.

        The version in use is begun again if its weights are wrong: what they gave since the last poll is drawn anew.
        """
        ...

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy these tensors in, by their names in a checkpoint; may be repeated. KeyError for an unknown one."""
        ...

    def end_update(self) -> None:
        """Weights are whole: tokens from here on carry the new version. Raises ValueError if some are missing."""
        ...

    def abort(self, positions: Iterable[int]) -> list[SampleOutput]:
        """Drop these groups; returns what their running samples had produced, with finish_reason abort.

        Nothing of them comes out of a later `poll`, unless they are submitted again. Unknown positions are ignored.
        """
        ...

    def partials(self) -> list[SampleOutput]:
        """What every running sample has produced so far, with finish_reason abort; they run on."""
        ...

    def progress(self) -> Mapping[int, int]:
        """Tokens produced so far by each group that is queued or running, by prompt position."""
        ...

    def offload(self) -> None:
        """Free the device's memory: weights and cache. Running samples stay, and go on behind the tokens they have.

        Of weights that are torn (an update has begun) nothing need be kept.
        """
        ...

    def onload(self) -> None:
        """Take it again. Weights that were torn are so until the next update, which starts over."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


@runtime_checkable
class Measured(Protocol):
    """An engine or backend that can say what it holds; it need not."""

    def device_bytes(self) -> Mapping[str, int]:
        """Bytes of its tensors that are on its device now (of a CPU: in memory), by what they are for."""
        ...


class Reducer(Protocol):
    """Sums over the data-parallel replicas of a training pool."""

    @property
    def rank(self) -> int:
        """Number of this replica among them."""
        ...

    @property
    def size(self) -> int:
        """Number of replicas."""
        ...

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all replicas; all give the same shapes, in the same order."""
        ...


class Alone:
    """The only replica there is."""

    rank = 0
    size = 1

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """They are the sums."""


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
        """Whether scores of a row must not depend, to the last bit, on the rows beside it; a GPU only repeats."""
        return self.deterministic and not self.device.startswith("cuda")


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What one forward over a micro-batch gives, for response tokens only, padded: [B, T] each."""

    logprobs_BT: Tensor
    entropy_BT: Tensor | None
    mask_BT: Tensor


@runtime_checkable
class Backend(Protocol):
    """Holds one model and, if it is trained, its optimizer. The result never depends on micro-batching."""

    lockstep: bool
    """True when forward or backward is collective (FSDP, ZeRO): the replicas agree on each round of them.

    Then `named_shards` is collective too: all replicas go through it, also those that publish nothing.
    """

    def join(self) -> None:
        """The process group of all replicas (torch.distributed's default group) is there: divide what is divided.

        Called once, by all replicas, before anything else but `close`; `load_state` comes after it. Without `lockstep`
        and with one replica there is no group.
        """
        ...

    def idle(self, *, grad: bool) -> None:
        """Take part in a round without samples of one's own: a forward, with `grad` a backward too, that adds nothing.

        Called only with `lockstep`.
        """
        ...

    def score(self, batch: Batch, *, temperature: float, grad: bool, entropy: bool) -> TokenScores:
        """Log-probs of the response tokens of a micro-batch (fields prompt_ids, response_ids), on the device."""
        ...

    def accumulate(self, loss_sum: Tensor) -> None:
        """Backward of a loss *summed* over tokens or samples; gradients add up until `apply`."""
        ...

    def apply(self, denominator: float) -> float:
        """Divide the gradients by `denominator`, clip, step the optimizer, clear. Returns the norm before clipping."""
        ...

    @property
    def learning_rate(self) -> float:
        """Of the next `apply`."""
        ...

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, one by one, as a checkpoint of the Hugging Face model has them (tied ones once), detached.

        Names and shapes are those on disk, such as one tensor an expert.
        """
        ...

    def state_shards(self) -> Iterator[Shard]:
        """What this replica saves of the state (weights, moments, masters, counters).

        The shards of all replicas together are the whole state once. Nothing for a frozen model. Names are those of
        every backend: `model.<parameter>`, `optimizer.<exp_avg|exp_avg_sq|master>.<parameter>`, `optimizer.steps`; a
        master is there where the parameter itself is of half precision.
        """
        ...

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a whole state, whose tensors may be read only when they are asked for.

        Raises ValueError on a mismatch of names, shapes or types.
        """
        ...

    def offload(self) -> None:
        """Free the device's memory: everything moves off it. Called between `apply` and the next `score` only.

        Tensors that `named_shards` and `state_shards` gave before keep their values, and their memory.
        """
        ...

    def onload(self) -> None:
        """Move it back."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...
