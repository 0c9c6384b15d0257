"""How long devices take: a decode step, a training batch, new weights. Data files name figures and their sources.

    decode step of b samples, c tokens of context each:  max(floor_s, b · sample_s) + b · c · context_s
    forward and backward of rows of n tokens:            latency_s + Σ (n · token_s + n² · pair_s)
    a version of the weights:                            publish_s at the trainer, bytes to the engine, swap_s there

The first is a roofline: reading the weights once bounds a small batch (floor_s), arithmetic a large one (sample_s), and
reading the keys and values of the context is added to both.

Example: load("h100-qwen2.5-7b").decode.seconds(samples=64, context=2_000)  # about 0.010
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, get_args, get_type_hints

import msgspec

from distflow.config.yamlfile import read_yaml
from distflow.errors import UserError, did_you_mean
from distflow.parts import CostRule, Lengths

DEVICES = Path(__file__).with_name("devices")
FORWARD = 1.0 / 3.0
"""Of the time of forward and backward: 2 of 6 FLOP for each parameter and token (arXiv:2001.08361)."""
RECOMPUTED = 4.0 / 3.0
"""Factor on that time where activations are recomputed: one more forward, 8 FLOP in place of 6 (arXiv:2104.04473)."""
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)]
"""Of one thing that a device does: more than an hour is a slip of the pen."""
StepSeconds = Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)]
Bytes = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]
Rate = Annotated[float, msgspec.Meta(ge=1.0, le=1e18)]
"""Bytes per second."""
Positive = Annotated[float, msgspec.Meta(gt=0.0, le=1e18)]


@dataclass(frozen=True, slots=True)
class DecodeLatency:
    """Of one engine, however many devices it has."""

    floor_s: StepSeconds
    """Seconds of a decode step of a small batch: reading all weights once, and launching kernels."""
    sample_s: Seconds
    """Seconds for each sample of a batch so large that arithmetic bounds it."""
    context_s: Seconds = 0.0
    """Seconds for each token of context of each sample."""
    prefill_s: Seconds = 0.0
    """Seconds for each prompt token that is computed."""

    def seconds(self, samples: float, context: float = 0.0) -> float:
        """Seconds of one decode step of `samples` samples whose mean context is `context` tokens."""
        return max(self.floor_s, samples * self.sample_s) + samples * context * self.context_s


@dataclass(frozen=True, slots=True)
class TrainLatency:
    """Of one replica, however many devices it has."""

    token_s: Seconds
    """Seconds of forward and backward for each token."""
    pair_s: Seconds = 0.0
    """And for each pair of tokens of a row, as attention takes them."""
    latency_s: Seconds = 0.0
    """And for each batch, whatever it holds."""
    apply_s: Seconds = 0.0
    """Seconds of an optimizer step, summing the gradients included."""
    recomputed: bool = False
    """Whether these are the times of a backend that recomputes activations (`gradient_checkpointing`)."""
    packed: bool = False
    """Whether they are those of a backend that packs: a prompt that rows share is counted once."""

    def passes(self, trained: float, forwards: float = 0.0, *, recomputes: bool = False) -> float:
        """How often `seconds` it takes to train on rows so many times, and to compute so many forwards of them besides.

        `recomputes`: whether the recipe has activations recomputed, whatever these times are of.
        """
        each = RECOMPUTED if recomputes else 1.0
        return (trained * each + forwards * FORWARD) / (RECOMPUTED if self.recomputed else 1.0)

    def seconds(self, lengths: Iterable[float]) -> float:
        """Seconds of forward and backward of rows of these lengths in tokens, which have nothing in common."""
        return self.latency_s + sum(n * self.token_s + n * n * self.pair_s for n in lengths)

    def seconds_of(self, rows: Lengths) -> float:
        """Seconds of forward and backward of rows that may share prompts."""
        tokens, pairs = terms_of(rows, packed=self.packed)
        return self.latency_s + tokens * self.token_s + pairs * self.pair_s


def terms_of(rows: Lengths, *, packed: bool) -> tuple[float, float]:
    """Tokens that are computed, and pairs of them as attention takes them; `packed`: by a model that packs."""
    tokens = CostRule(0, packs=packed).cost(rows)
    return tokens, CostRule(0, 1.0, packs=packed).cost(rows) - tokens


@dataclass(frozen=True, slots=True)
class WeightLatency:
    """Of a new version of the policy's weights."""

    bytes: Positive
    publish_s: Seconds = 0.0
    """Seconds for which the trainer stands still."""
    swap_s: Seconds = 0.0
    """Seconds for which an engine stands still."""
    host_bytes_s: Rate = 2e10
    """Bytes per second from the shared memory of a host into what an engine of that host loads from."""
    link_bytes_s: Rate = 1e9
    """Bytes per second between hosts."""

    def arrives_s(self, *, one_host: bool) -> float:
        """Seconds from publishing until an engine can load a version; on another host it first crosses a link."""
        return self.bytes / self.host_bytes_s + (0.0 if one_host else self.bytes / self.link_bytes_s)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a device has room for, as far as the theory of asynchrony asks."""

    bytes: Positive
    """Of the device."""
    cache_token: Bytes
    """Bytes of keys and values of a token that is generated."""
    train_token: Bytes
    """Bytes of activations of a token that is trained on, where they are recomputed."""
    train_factor: Positive = 8.0
    """Bytes held for training, for each byte of published weights: 16 a parameter of bfloat16, with Adam's state."""


@dataclass(frozen=True, slots=True)
class DeviceCount:
    """How many devices (GPUs) the figures are of."""

    engine: Annotated[int, msgspec.Meta(ge=1)] = 1
    trainer: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Of a training worker."""


@dataclass(frozen=True, slots=True)
class DeviceLatency:
    """A kind of device with a model of some size: the content of a data file."""

    device: str
    model: str
    sources: tuple[str, ...]
    """Where the figures come from: a document, a computation, or the command that measured them."""
    decode: DecodeLatency
    train: TrainLatency
    weights: WeightLatency
    memory: DeviceMemory | None = None
    gpus: DeviceCount = DeviceCount()


def names() -> list[str]:
    """Names of the shipped data files."""
    return sorted(path.stem for path in DEVICES.glob("*.yaml"))


def load(name: str) -> DeviceLatency:
    """The model of a shipped name, or of a path that ends in .yaml. Raises UserError if there is none."""
    path = Path(name) if name.endswith(".yaml") else DEVICES / f"{name}.yaml"
    if not path.is_file():
        hint = did_you_mean(name, names())
        if name.endswith(".yaml"):
            why = f"this file does not exist; {hint}"
        elif path.parent == DEVICES:
            why = f"no such data file; {hint}; or a path of .yaml"
        else:
            why = f"a path of one ends in .yaml; {hint}"
        raise UserError(f"latency model {name!r}: {why}")
    value = read_yaml(path).value
    _check_keys(path, DeviceLatency, value)
    try:
        return msgspec.convert(value, DeviceLatency, strict=False)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: not a latency model: {error}") from None


def _check_keys(path: Path, kind: type, value: object, where: str = "") -> None:
    """Raise UserError for a key that means nothing, here or further down."""
    if not isinstance(value, Mapping):
        return
    parts = get_type_hints(kind)
    for key, part in value.items():
        if key not in parts:
            raise UserError(f"{path}: {where}{key} means nothing in a latency model; {did_you_mean(str(key), parts)}")
        inner = next((one for one in (parts[key], *get_args(parts[key])) if is_dataclass(one)), None)
        if isinstance(inner, type):
            _check_keys(path, inner, part, f"{where}{key}.")
