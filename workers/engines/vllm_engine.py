"""The engine that is vLLM, in this process: this adapter hands it samples, and each poll is a step of it.

New weights are staged, and swapped in between two steps; running samples keep the keys and values of older weights, and
the prefix cache is keyed by version. Samples are drawn by vLLM's own random numbers, seeded for each sample: the same
tokens in any batch as far as rounding allows, but others than those of the torch engine, and a sample that another
worker began goes on with fresh ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import count

from torch import Tensor

from distflow.errors import UserError
from distflow.runtime.protocols import EngineSpec
from distflow.types import GroupRequest, SampleOutput, Version
from distflow.weights.canary import Rows
from distflow.workers.engines.adapter import ModelOutline, as_torch, engine_seed, outline_model, sample_seed
from distflow.workers.engines.adapter_options import use_of
from distflow.workers.engines.samples import RequestLimits, Sample, Samples, salt
from distflow.workers.engines.staged_weights import StagedWeights
from distflow.workers.engines.vllm_core import SampleRequest, VLLMCore
from distflow.workers.engines.vllm_options import VLLMOptions
from distflow.workers.parameters import ParameterTable

COLDEST = 0.01
"""Least temperature above 0 that vLLM keeps to; below, it would take this one."""


class VLLMEngine:
    """Implements `distflow.runtime.protocols.Engine`. Serves nothing until the first complete update."""

    def __init__(self, spec: EngineSpec) -> None:
        """Returns when vLLM can run. Raises UserError for what it cannot do, WorkerFailed if it does not start."""
        options = VLLMOptions.parse(spec.options)
        if spec.slots < 1:
            raise UserError(f"engine vllm: {spec.slots} slots; expected at least 1")
        model = outline_model(spec.model, options.dtype_for(spec.model))
        self.limits = RequestLimits.of(model.config, spec.max_tokens)
        options.check(use_of(spec, self.limits.max_tokens, model.config))
        self.seeded = options.seeded
        self.releases = spec.device != "cpu"
        self.samples = Samples(spec.slots, continues=not spec.deterministic)
        self.offloaded = False
        self.precision = options.quantization or options.dtype_for(spec.model)
        """What it computes in."""
        self._names = count()
        self.core, self.staged = self._start(spec, options, model)
        self.weights = ParameterTable(self.staged.tensors)

    @property
    def free_slots(self) -> int:
        """Samples that could start now."""
        return self.samples.free_slots

    @property
    def version(self) -> Version | None:
        """Weights in use; None before the first complete update, and while one is under way."""
        return self.weights.version

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queue groups; raises ValueError naming the position and the limit for one that can never run.

        Nothing is queued if one of them is refused.
        """
        self.limits.check_all(requests, self.samples.groups)
        for request in requests:
            if 0 < request.params.temperature < COLDEST:
                what = f"temperature {request.params.temperature}; vLLM takes 0, or {COLDEST} and more"
                raise ValueError(f"group at position {request.position}: {what}")
        for request in requests:
            self.samples.add(request)

    def poll(self) -> list[SampleOutput]:
        """Start what fits, decode one token for every running sample, return the samples that finished.

        Raises WorkerFailed if vLLM fails.
        """
        version = self.weights.version
        if version is None:
            return []
        assert not self.offloaded, "an offloaded engine was polled; call onload first"
        outputs = self.samples.take_complete()
        self._admit(version)
        running = self.samples.running
        if running:
            rows = [
                (name, tokens, logprobs, running[name].marks, finish)
                for name, tokens, logprobs, finish in self.core.step()
                if name in running
            ]
            outputs += self.samples.take(rows)
        return outputs

    def begin_update(self, version: Version) -> None:
        """Start replacing the weights; `poll` serves nothing until `end_update`.

        If the old ones are of this very version they are wrong: running samples go back to the tokens that they had at
        the last poll, and wait.
        """
        if version == self.weights.version:
            self.core.abort(self.samples.put_back(begun=True))
        self.weights.begin(version)

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Stage these named parameters; raises KeyError for an unknown name, ValueError for a wrong shape."""
        self.weights.update(tensors)

    def end_update(self) -> None:
        """Swap in what is staged: tokens from here on carry the new version. Raises ValueError if some are missing.

        Samples without a token restart, so that they read nothing that older weights computed.
        """
        version = self.weights.end()
        self.core.abort(self.samples.put_back(begun=False))
        self._load()
        for sample in self.samples.running.values():
            sample.marks = [*sample.marks, (version.term, version.number, len(sample.tokens))]

    def logprobs(self, rows: Rows) -> list[list[float]] | None:
        """Log-prob (nats, temperature 1) of every token but the first of each row; samples go on meanwhile.

        None if vLLM had no room for them in time.
        """
        return self.core.logprobs(rows)

    def abort(self, positions: Iterable[int]) -> list[SampleOutput]:
        """Drop these groups; returns what their running samples had produced, with finish_reason abort."""
        dropped = set(positions)
        partials = self.samples.outputs(dropped)
        self.core.abort(self.samples.forget(dropped))
        return partials

    def partials(self) -> list[SampleOutput]:
        """What every running sample has produced so far, with finish_reason abort; they run on."""
        return self.samples.outputs()

    def progress(self) -> Mapping[int, int]:
        """Tokens produced so far by each group that is queued or running, by prompt position."""
        return self.samples.progress()

    def offload(self) -> None:
        """Give back the GPU's memory; on a CPU nothing changes.

        Running samples are taken out, to go on behind the tokens that they have.
        """
        self.offloaded = True
        if self.releases:
            self.core.abort(self.samples.put_back(begun=True))
            self.core.release()

    def onload(self) -> None:
        """Take the memory again; the weights come from where they are staged."""
        self.offloaded = False
        if self.releases:
            self.core.resume()
            if self.weights.version is not None:
                self._load()

    def close(self) -> None:
        """Give everything back; a closed engine has no further use."""
        self.core.close()
        self.weights = ParameterTable({})
        self.staged.close()

    def _start(self, spec: EngineSpec, options: VLLMOptions, model: ModelOutline) -> tuple[VLLMCore, StagedWeights]:
        seed = engine_seed(spec)
        args = options.engine_args(use_of(spec, self.limits.max_tokens, model.config), model.config, seed)
        if find_spec("vllm") is None:
            raise UserError(
                "engine vllm: vLLM is not installed for this Python; `make vllm-venv` makes an environment with it for "
                "layout.pools.NAME.python, docs/engines.md says what a GPU needs"
            )
        staged = StagedWeights(model.shapes, as_torch(options.dtype_for(spec.model)), model.tied)
        try:
            return VLLMCore(model.text, args, options.args, batch_invariant=spec.deterministic), staged
        except Exception:
            staged.close()
            raise

    def _admit(self, version: Version) -> None:
        started = self.samples.admit(lambda: str(next(self._names)))
        for sample in started.values():
            sample.marks = [(version.term, version.number, 0)]
        self.core.add([self._wanted(name, sample, version) for name, sample in started.items()])

    def _wanted(self, name: str, sample: Sample, version: Version) -> SampleRequest:
        request = sample.group.request
        params, begun = request.params, len(sample.before.token_ids)
        return SampleRequest(
            name=name,
            token_ids=sample.input_ids,
            salt=salt(version),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            max_tokens=params.max_new_tokens - begun,
            stop_token_ids=params.stop_token_ids,
            seed=sample_seed(sample) if self.seeded else None,
        )

    def _load(self) -> None:
        self.core.load(self.staged.described(os.getpid(), self.staged.descriptor))
