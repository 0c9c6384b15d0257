"""What the adapters of other projects' engines (SGLang, vLLM) have in common: all but the calls of the project."""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
import xxhash
from torch import Tensor

from distflow.config.plugins import PluginUse
from distflow.errors import UserError
from distflow.runtime.protocols import EngineSpec
from distflow.types import RequestKey, SampleOutput, SampleRequest, Version, departing, lease_kind
from distflow.weights.canary import Rows
from distflow.workers.engines.adapter_options import AdapterOptions
from distflow.workers.engines.samples import NamedSamples, RequestLimits, Sample
from distflow.workers.engines.staged_weights import StagedWeights
from distflow.workers.merging import AdapterTable, stage_base
from distflow.workers.models import load_config, outline
from distflow.workers.parameters import ParameterTable, constants_of, stored_form


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A model without its weights."""

    config: Any
    """The transformers configuration."""
    text: str
    """`config.json` for the inner engine, which reads neither weights nor a tokenizer from disk."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each stored tensor by its name in the checkpoint; tied ones once."""
    tied: Mapping[str, str]
    """Further names of tied parameters, each with its name in `shapes`."""
    wide: frozenset[str]
    """Names in `shapes` that stay in float32 in an engine of half precision: what training leaves as it is."""


def outline_model(model: Mapping[str, Any], dtype: str) -> ModelOutline:
    """From the recipe's `models.<name>` section; raises UserError as `distflow.workers.models` does."""
    built = outline({**model, "dtype": dtype})
    stored = stored_form(built)
    shapes = {part.name: part.shape for parts in stored.tensors.values() for part in parts}
    tied = {alias: stored.tensors[name][0].name for alias, name in stored.tied.items()}
    constants = constants_of(built).items()
    wide = frozenset(p.name for name, kept in constants for p in stored.tensors[name] if kept.dtype == torch.float32)
    config = load_config(model)
    settings = config.to_dict()
    # A sample ends at the stop tokens of its request, and nowhere else.
    settings |= {"eos_token_id": None, "architectures": [type(built).__name__], "dtype": dtype}
    return ModelOutline(config, json.dumps(settings), shapes, tied, wide)


def use_of(spec: EngineSpec, longest: int, config: Any) -> PluginUse:
    """What the options are checked against: `longest` sample in tokens, `config` of transformers."""
    return PluginUse(
        model=spec.model,
        device=spec.device,
        pool=spec.pool,
        offload=spec.offload,
        shares_device=spec.shares_device,
        deterministic=spec.deterministic,
        slots=spec.slots,
        longest=longest,
        heads=getattr(config.get_text_config(), "num_attention_heads", 0),
    )


def engine_seed(spec: EngineSpec) -> int:
    """A 32-bit seed that differs between workers and between restarts of a worker, and is the same in the next run."""
    return zlib.crc32(f"{spec.seed} {spec.worker} {spec.life}".encode())


def sample_seed(sample: Sample) -> int:
    """A 63-bit seed (what a torch generator takes) for this sample, from where it starts here."""
    request, first = sample.request, sample.request.offset + len(sample.before.token_ids)
    drawn = f"{request.seed} sample {request.position} {request.sample} {first}"
    drawn += f" {'.'.join(map(str, request.stream))}" if request.stream else ""
    return xxhash.xxh3_64_intdigest(drawn.encode()) >> 1


def cache_salt(version: Version) -> str:
    """Keeps the prefix cache of one version apart from that of others."""
    return f"{version.term}.{version.number}"


class InnerEngine(Protocol):
    """What an adapter wraps."""

    def close(self) -> None:
        """End it and give everything back."""
        ...


OptionsT = TypeVar("OptionsT", bound=AdapterOptions)
InnerT = TypeVar("InnerT", bound=InnerEngine)


class EngineAdapter(ABC, Generic[OptionsT, InnerT]):
    """An engine around another project's. Implements `distflow.runtime.protocols.Engine`.

    It serves nothing until the first complete update. New weights are staged in shared memory and swapped in between
    two decode steps; running samples keep the keys and values that older weights computed. A subclass starts `inner`,
    gives it samples, takes their tokens, and has it load the staged weights.
    """

    install: ClassVar[str]
    """Tells which make target installs the project."""

    def __init__(self, spec: EngineSpec, options: OptionsT) -> None:
        """Returns when the inner engine runs. Raises UserError for what it cannot do, WorkerFailed if it fails."""
        if spec.slots < 1:
            raise UserError(f"engine {options.name}: {spec.slots} slots; expected at least 1")
        dtype = options.dtype_for(spec.model)
        model = outline_model(spec.model, dtype)
        self.limits = RequestLimits.of(model.config, spec.max_tokens)
        options.check(use_of(spec, self.limits.max_tokens, model.config))
        self.releases = self._can_release(spec)
        self.samples = NamedSamples(spec.slots, continues=not spec.deterministic)
        self.options = options
        self.weighed = spec.weighed
        self.deterministic = spec.deterministic
        self.offloaded = False
        self.precision = options.quantization or dtype
        """The type it computes in."""
        self.inner, self.staged = self._make(spec, options, model)
        self.weights = self._table(spec, dtype)

    def _table(self, spec: EngineSpec, dtype: str) -> ParameterTable:
        """What arrives is staged, or merged into a base that is staged now."""
        if spec.model.get("lora") is None:
            return ParameterTable(self.staged.tensors)
        layers = stage_base(self.staged.tensors, {**spec.model, "dtype": dtype}, spec.seed)
        return AdapterTable(layers, spec.model["lora"])

    def _make(self, spec: EngineSpec, options: OptionsT, model: ModelOutline) -> tuple[InnerT, StagedWeights]:
        if find_spec(options.name) is None:
            raise UserError(
                f"engine {options.name}: {options.title} is not installed for this Python; {self.install}, "
                "docs/engines.md says what a GPU needs"
            )
        staged = StagedWeights(model.shapes, getattr(torch, options.dtype_for(spec.model)), model.tied, model.wide)
        try:
            return self._start(spec, options, model, staged), staged
        except Exception:
            staged.close()
            raise

    @abstractmethod
    def _can_release(self, spec: EngineSpec) -> bool:
        """Whether it can give the device's memory back for a while; raises UserError if `spec.offload` needs that."""

    @abstractmethod
    def _start(self, spec: EngineSpec, options: OptionsT, model: ModelOutline, staged: StagedWeights) -> InnerT:
        """Start the inner engine; `options` are checked."""

    @abstractmethod
    def _begin(self, started: Mapping[str, Sample], version: Version) -> None:
        """Give the inner engine these samples, by name."""

    @abstractmethod
    def _collect(self) -> list[SampleOutput]:
        """Pass new tokens on to `samples`; returns what finished."""

    @abstractmethod
    def _drop(self, names: Sequence[str]) -> None:
        """Abort these samples (there may be none) in the inner engine."""

    @abstractmethod
    def _load(self, version: Version) -> None:
        """Have the inner engine load what is staged."""

    @abstractmethod
    def _release(self) -> None:
        """Give the device's memory back."""

    @abstractmethod
    def _resume(self) -> None:
        """Take it again, without the weights."""

    @abstractmethod
    def logprobs(self, rows: Rows) -> Sequence[Sequence[float]] | None:
        """Log-prob (nats, temperature 1) of every token but the first of each row; samples go on meanwhile.

        None if the inner engine had no room for them in time.
        """

    def _surviving(self) -> AbstractContextManager[None]:
        """Entered around calls of `inner` that may find it dead."""
        return nullcontext()

    @property
    def free_slots(self) -> int:
        """Samples that could start now."""
        return self.samples.free_slots

    @property
    def version(self) -> Version | None:
        """Weights in use; None before the first complete update, and while one is under way."""
        return self.weights.version

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue samples; raises ValueError naming the position and the limit for one that can never run.

        Nothing is queued if one of them is refused, as also for settings that the engine does not take.
        """
        self.limits.check_all(requests, self.samples.here)
        for request in requests:
            if request.params.departs or request.params.shifts:
                self._check_sampling(request)
        self.samples.add(requests)

    def _check_sampling(self, request: SampleRequest) -> None:
        params = request.params
        # A greedy sample, and one of validation, are no weights.
        weighed = self.weighed and params.departs and lease_kind(request.position) == "train"
        for name in departing(params):
            found = self.options.refuses_sampling(name, weighed=weighed, deterministic=self.deterministic)
            if found is not None:
                names = ("top_p", "top_k") if name in ("top_p", "top_k") else (name,)
                shown = ", ".join(f"{one} {getattr(params, one)}" for one in names)
                why, hint = found
                raise ValueError(f"sample {request.sample} of position {request.position}: {shown}: {why} — {hint}")

    def poll(self) -> list[SampleOutput]:
        """Start what fits, collect new tokens, return the samples that finished; raises WorkerFailed if that fails."""
        version = self.weights.version
        if version is None:
            return []
        assert not self.offloaded, "an offloaded engine was polled; call onload first"
        outputs: list[SampleOutput] = []
        with self._surviving():
            started = self.samples.admit(version)
            if started:
                self._begin(started, version)
            if self.samples.running:
                outputs += self._collect()
        return outputs

    def begin_update(self, version: Version) -> None:
        """Start replacing the weights; `poll` serves nothing until `end_update`.

        If the version in use is replaced by itself, its weights are wrong: running samples go back to the tokens they
        had at the last poll, and wait.
        """
        if version == self.weights.version:
            with self._surviving():
                self._drop(self.samples.put_back(begun=True))
        self.weights.begin(version)

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Stage these named parameters; raises KeyError for an unknown name, ValueError for a wrong shape."""
        self.weights.update(tensors)

    def end_update(self) -> None:
        """Swap in what is staged: tokens from here on carry the new version. Raises ValueError if some are missing.

        Samples without a token restart, so that they attend to nothing that older weights computed.
        """
        version = self.weights.end()
        with self._surviving():
            self._drop(self.samples.put_back(begun=False))
            self._load(version)

    def abort(self, positions: Iterable[int]) -> list[SampleOutput]:
        """Drop these groups; returns what their running samples had produced, with finish_reason abort."""
        dropped = set(positions)
        partials = self.samples.outputs(dropped)
        with self._surviving():
            self._drop(self.samples.forget(self.samples.of(dropped)))
        return partials

    def withdraw(self, requests: Collection[RequestKey]) -> None:
        """Drop these requests; unknown ones are ignored."""
        with self._surviving():
            self._drop(self.samples.forget(set(requests)))

    def partials(self) -> list[SampleOutput]:
        """What every running sample has produced so far, with finish_reason abort; they run on."""
        return self.samples.outputs()

    def tokens_after(self, had: Mapping[RequestKey, int]) -> Mapping[RequestKey, Sequence[int]]:
        """Return the response's tokens from that number on, of those of these requests that run."""
        return self.samples.tokens_after(had)

    def progress(self) -> Mapping[int, int]:
        """Tokens sampled so far by the samples that are queued or running, summed by prompt position."""
        return self.samples.progress()

    def offload(self) -> None:
        """Give the device's memory back, where the inner engine can; otherwise nothing changes.

        Running samples are taken out, to go on after the tokens that they have.
        """
        if self.releases:
            inner = self.inner
            with self._surviving():
                self._drop(self.samples.put_back(begun=True))
                self._release()
            if self.inner is not inner:
                # It was started again, and holds memory again.
                self._release()
        self.offloaded = True

    def onload(self) -> None:
        """Take the memory again; the weights come from where they are staged."""
        self.offloaded = False
        if self.releases:
            with self._surviving():
                self._resume()
                if self.weights.version is not None:
                    self._load(self.weights.version)

    def close(self) -> None:
        """End the inner engine; a closed engine cannot be used again."""
        self.inner.close()
        self.weights = ParameterTable({})
        self.staged.close()
