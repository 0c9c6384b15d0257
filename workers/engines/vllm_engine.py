"""The vLLM engine: vLLM runs in this process; this adapter gives it samples, and each poll is one step of it.

The prefix cache is keyed by version. Samples are drawn with vLLM's own random numbers, seeded for each sample: the same
tokens in any batch as far as rounding allows, but other tokens than the torch engine's, and a sample that another
worker began continues with fresh ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from distflow.runtime.protocols import EngineSpec
from distflow.types import SampleOutput, SampleRequest, Version
from distflow.weights.canary import Rows
from distflow.workers.engines.adapter import (
    EngineAdapter,
    ModelOutline,
    cache_salt,
    engine_seed,
    sample_seed,
    use_of,
)
from distflow.workers.engines.samples import Sample
from distflow.workers.engines.staged_weights import StagedWeights
from distflow.workers.engines.vllm_core import CoreSample, VLLMCore
from distflow.workers.engines.vllm_options import VLLMOptions

COLDEST = 0.01
"""The lowest temperature above 0 that vLLM applies; it would raise lower ones to this."""


class VLLMEngine(EngineAdapter[VLLMOptions, VLLMCore]):
    """Implements `distflow.runtime.protocols.Engine`."""

    install = "`make vllm-venv` makes an environment with it for layout.pools.NAME.python"

    def __init__(self, spec: EngineSpec) -> None:
        """Returns when vLLM can run. Raises UserError for what it cannot do, WorkerFailed if it does not start."""
        options = VLLMOptions.parse(spec.options)
        super().__init__(spec, options)
        self.seeded = options.seeded

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Submit as the base class does; also refuse temperatures that vLLM would change."""
        for request in requests:
            if 0 < request.params.temperature < COLDEST:
                what = f"temperature {request.params.temperature}; vLLM takes 0, or {COLDEST} and more"
                raise ValueError(f"sample {request.sample} of position {request.position}: {what}")
        super().submit(requests)

    def logprobs(self, rows: Rows) -> list[list[float]] | None:
        """Log-prob (nats, temperature 1) of every token but the first of each row; samples go on meanwhile.

        None if vLLM had no room for them in time.
        """
        return self.inner.logprobs(rows)

    def _can_release(self, spec: EngineSpec) -> bool:
        return spec.device != "cpu"

    def _start(self, spec: EngineSpec, options: VLLMOptions, model: ModelOutline, staged: StagedWeights) -> VLLMCore:
        use = use_of(spec, self.limits.max_tokens, model.config)
        args = options.engine_args(use, model.config, engine_seed(spec))
        return VLLMCore(model.text, args, options.args, batch_invariant=spec.deterministic)

    def _begin(self, started: Mapping[str, Sample], version: Version) -> None:
        self.inner.add([self._request(name, sample, version) for name, sample in started.items()])

    def _request(self, name: str, sample: Sample, version: Version) -> CoreSample:
        params = sample.request.params
        return CoreSample(
            name=name,
            token_ids=sample.input_ids,
            cache_salt=cache_salt(version),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            max_tokens=sample.remaining,
            stop_token_ids=params.stop_token_ids,
            seed=sample_seed(sample) if self.seeded else None,
            further=_further(sample),
        )

    def _collect(self) -> list[SampleOutput]:
        return [output for row in self.inner.step() for output in self.samples.take(*row)]

    def _drop(self, names: Sequence[str]) -> None:
        self.inner.abort(names)

    def _load(self, version: Version) -> None:
        self.inner.load(self.staged.described(os.getpid(), self.staged.descriptor))
        for sample in self.samples.running.values():
            sample.use_version(version)

    def _release(self) -> None:
        self.inner.release()

    def _resume(self) -> None:
        self.inner.resume()


def _further(sample: Sample) -> Mapping[str, Any]:
    """Return what few samples ask for, by vLLM's names. What a sample had before counts as its prompt: vLLM's penalty
    counts the tokens of that, too."""
    params = sample.request.params
    least = min(max(0, params.min_new_tokens - len(sample.before.token_ids)), sample.remaining)
    given = {"min_p": params.min_p, "min_tokens": least, "logit_bias": dict(params.logit_bias)}
    wanted = {name: value for name, value in given.items() if value}
    return wanted | ({"repetition_penalty": params.repetition_penalty} if params.repetition_penalty != 1 else {})
