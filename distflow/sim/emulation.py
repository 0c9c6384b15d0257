"""Options of the emulated engine and backends, and what follows from them: for real runs of them and the simulator.

Imports no torch: the plan checks them. Example, in a recipe:

    engine: distflow.testing.emulated:EmulatedEngine
    engine_options: {device: h100-qwen2.5-7b, time_scale: 0.1, median: 900, sigma: 1.1}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from distflow.config.plugins import check_keys
from distflow.data.randomness import length_draws
from distflow.errors import UserError
from distflow.sim.latency import DeviceLatency, Positive, load
from distflow.sim.lengths import MOST_MEDIAN, MOST_SIGMA, Lengths, Lognormal, read_trace

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Whole = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDevice:
    """What engines and backends have in common."""

    SECTION: ClassVar[str] = "options"

    device: str = "h100-qwen2.5-7b"
    """A latency model: a shipped name, or a path that ends in .yaml."""
    time_scale: Positive = 1.0
    """Seconds of the clock on the wall for each second of the model."""
    slow: Positive = 1.0
    """Factor on the time of this device."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """Read the section; raises UserError for unknown keys and impossible values."""
        check_keys(cls.SECTION, "emulated devices", options, [each.name for each in dataclasses.fields(cls)])
        try:
            parsed = msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as error:
            raise UserError(f"{cls.SECTION} of an emulated device: {error}") from None
        parsed.latency()
        return parsed

    def latency(self) -> DeviceLatency:
        """The latency model, in its own seconds. Raises UserError if there is none."""
        return load(self.device)

    @property
    def gpus(self) -> int:
        """How many GPUs the worker needs, if it runs on GPUs."""
        return 1

    @property
    def real_s(self) -> float:
        """Seconds on the wall for each second of the latency model."""
        return self.time_scale * self.slow


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedEngineOptions(EmulatedDevice):
    """`engine_options` of the emulated engine."""

    SECTION: ClassVar[str] = "engine_options"

    link: Literal["host", "network"] = "host"
    """What new weights come by: `host_bytes_s` of the latency model alone, or `link_bytes_s` first."""
    poll_s: Positive = 0.02
    """Seconds on the wall after which decoding is interrupted to look for news, unless a sample is finished before."""
    median: Annotated[float, msgspec.Meta(gt=0.0, le=MOST_MEDIAN)] = 200.0
    """Median length in tokens; none is longer than the step's max_new_tokens."""
    sigma: Annotated[float, msgspec.Meta(ge=0.0, le=MOST_SIGMA)] = 1.0
    """Standard deviation of the logarithm of the length: 1.1 is a heavy tail, 0 none."""
    prompt_share: Share = 0.0
    """Share of that logarithm's variance that the prompt explains."""
    trace: str = ""
    """A file of measured lengths in place of these: a line for each prompt, the lengths of its samples."""
    longer_every: Whole = 0
    """Every n-th prompt position has `longer` times the length; 0: none."""
    longer: Positive = 1.0

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """As EmulatedDevice; raises UserError for a trace that cannot be read, too."""
        parsed = super(EmulatedEngineOptions, cls).parse(options)
        both = sorted({"median", "sigma", "prompt_share"} & set(options)) if parsed.trace else []
        if both:
            raise UserError(f"engine_options: {', '.join(both)} beside a trace, which has all lengths: remove one")
        parsed.distribution()
        return parsed

    def refuses_sampling(self, setting: str, *, weighed: bool, deterministic: bool) -> tuple[str, str] | None:
        """Say why it does not take a setting of sampling, and what to do; None: it does."""
        if setting not in ("stop", "min_new_tokens"):
            return None
        why = "the emulated engine draws how long samples are, and all its tokens are the same"
        return why, f"leave {setting} out, or engine torch, sglang or vllm"

    def transfer_s(self) -> float:
        """Seconds of the model until a version that is published has arrived."""
        return self.latency().weights.arrives_s(one_host=self.link == "host")

    def distribution(self) -> Lengths:
        """How long samples are, but for `longer`. Raises UserError for a trace that cannot be read."""
        if self.trace:
            return read_trace(Path(self.trace))
        return Lognormal(self.median, self.sigma, self.prompt_share)


class DrawnLengths:
    """Lengths of samples by name: alike wherever they are drawn, in a run or in the simulator."""

    def __init__(self, options: EmulatedEngineOptions) -> None:
        self._options = options
        self._lengths = options.distribution()

    def draw(
        self,
        seed: int,
        positions: Sequence[int],
        samples: Sequence[int],
        limits: Sequence[int],
        first: Sequence[int] | None = None,
    ) -> list[int]:
        """Tokens of sample `samples[r]` of prompt `positions[r]`, at most `limits[r]`; `first` as in `length_draws`."""
        draws = length_draws(seed, positions, samples, first).tolist()
        return [self._length(*row) for row in zip(draws, positions, limits, strict=True)]

    def _length(self, draw: tuple[float, float], position: int, limit: int) -> int:
        every = self._options.longer_every
        if not every or position % every:
            return self._lengths.length(*draw, limit)
        return max(1, min(limit, round(self._lengths.length(*draw, 1 << 30) * self._options.longer)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedBackendOptions(EmulatedDevice):
    """`backend_options` of the emulated backends."""

    SECTION: ClassVar[str] = "backend_options"

    size: Annotated[int, msgspec.Meta(ge=1)] = 1 << 16
    """Number of float32 parameters that there really are, are summed over the replicas, and published."""
    rounds_file: str = ""
    """Of EmulatedDividedBackend: a file, by replica, for the seconds of its rounds; a line for each training step."""
