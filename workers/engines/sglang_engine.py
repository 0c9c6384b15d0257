"""The SGLang engine: SGLang runs in a process of its own; this adapter gives it samples and collects their tokens.

SGLang decodes by itself, between polls too; a poll takes the tokens that have arrived. SGLang reports which tokens came
from which version. Samples are drawn with SGLang's own random numbers: a seed repeats neither the tokens nor their
order. An SGLang that dies is restarted, and samples continue after the tokens that had arrived.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from distflow.comm.collective import INTERFACE, LOOPBACK, interface_of
from distflow.errors import KeyedError, WorkerFailed
from distflow.log import logger
from distflow.runtime.protocols import EngineSpec
from distflow.types import SampleOutput, Version
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
from distflow.workers.engines.sglang_options import SGLangOptions, memory_saver
from distflow.workers.engines.sglang_process import EngineGone, EngineProcess, EngineStart
from distflow.workers.engines.staged_weights import LOADER, StagedWeights

log = logger(__name__)

WAIT_S = 0.05
"""How long a poll waits for tokens."""
SCORE_S = 1.0
"""How long a canary holds the worker up: longer than SGLang takes if it has room for it."""
LEAST_TOP_P = 1e-6
"""A share that the likeliest token alone exceeds in any vocabulary."""
DEATHS = 3
DEATHS_S = 600.0
"""How often SGLang may die within so many seconds."""


class SGLangEngine(EngineAdapter[SGLangOptions, EngineProcess]):
    """Implements `distflow.runtime.protocols.Engine`."""

    install = "`make test-venv` installs it for a CPU"

    def __init__(self, spec: EngineSpec) -> None:
        """Returns when SGLang runs. Raises UserError for what it cannot do, WorkerFailed if it does not start."""
        super().__init__(spec, SGLangOptions.parse(spec.options))
        self.tells_filtered = spec.filtered_logprobs
        self._deaths: list[float] = []
        self._served = False
        """Whether tokens have arrived since SGLang was started."""
        self._score: int | None = None
        """What `logprobs` has asked SGLang for, while there is no answer."""
        self._scored: Sequence[Sequence[float]] | None = None

    def logprobs(self, rows: Rows) -> Sequence[Sequence[float]] | None:
        """Log-prob (nats, temperature 1) of every token but the first of each row; samples go on meanwhile.

        None if SGLang had no room for them at once (see `scoring`), or died: a restarted one loads the weights again.
        """
        self._give_up_score()
        with self._surviving():
            self._score = self.inner.begin({"do": "score", "rows": rows})
            self._look_for_score(SCORE_S)
        return self._scored

    @property
    def scoring(self) -> bool:
        """Whether SGLang still has had no room for what `logprobs` was asked for last."""
        if self._score is not None:
            with self._surviving():
                self._look_for_score(0.0)
        return self._score is not None

    def late_logprobs(self) -> Sequence[Sequence[float]] | None:
        """What was found then; None if there was no room for long, or SGLang died."""
        return self._scored

    def _look_for_score(self, wait_s: float) -> None:
        assert self._score is not None, "it was asked for"
        answer = self.inner.answer(self._score, wait_s)
        if answer is not None:
            self._score, self._scored = None, answer["logprobs"]

    def _give_up_score(self) -> None:
        """What it finds is of other weights."""
        if self._score is not None:
            self.inner.forget(self._score)
        self._score = self._scored = None

    def _can_release(self, spec: EngineSpec) -> bool:
        releases = memory_saver(spec.device)
        if spec.offload and not releases:
            raise KeyedError(
                f"layout.pools.{spec.pool}.offload",
                "engine 'sglang' needs the package torch_memory_saver for it — install it, or remove offload",
            )
        return releases

    def _start(
        self, spec: EngineSpec, options: SGLangOptions, model: ModelOutline, staged: StagedWeights
    ) -> EngineProcess:
        use = use_of(spec, self.limits.max_tokens, model.config)
        args = options.server_args(use, self.limits.vocabulary, engine_seed(spec)) | {"custom_weight_loader": [LOADER]}
        on_cpu = spec.device == "cpu"
        env = {
            "SGLANG_USE_CPU_ENGINE": "1" if on_cpu else "0",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "HF_HUB_OFFLINE": "1",
            # Log-probs are those after temperature, whatever the surroundings say.
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
            "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // (options.tensor_parallel if on_cpu else 1))),
            # All of SGLang's processes are on this host, whatever address its name resolves to.
            INTERFACE: interface_of(LOOPBACK),
            "NCCL_SOCKET_IFNAME": f"={interface_of(LOOPBACK)}",
        }
        if on_cpu and options.tensor_parallel > 1:
            env |= {"SGLANG_CPU_OMP_THREADS_BIND": _divide_cores(options.tensor_parallel)}
        return EngineProcess(
            EngineStart(
                model.text, args, env, staged.descriptor, options.update_by, options.start_s, spec.folder, spec.go_on
            )
        )

    def _begin(self, started: Mapping[str, Sample], version: Version) -> None:
        rows = [
            {
                "rid": name,
                "ids": sample.input_ids,
                "params": sampling_params(sample, self.limits.vocabulary, seeded=self.deterministic),
                "filtered": self.tells_filtered and sample.request.params.departs,
                "cache_salt": cache_salt(version),
            }
            for name, sample in started.items()
        ]
        self.inner.send({"do": "generate", "samples": rows})

    def _collect(self) -> list[SampleOutput]:
        outputs = []
        for message in self.inner.receive(WAIT_S):
            if "tokens" in message:
                self._served = True
                for name, tokens, logprobs, starts, finish, *filtered in message["tokens"]:
                    outputs += self.samples.take(name, tokens, logprobs, finish, starts, *filtered)
            elif message["lost"] in self.samples.running:
                position = self.samples.running[message["lost"]].request.position
                raise WorkerFailed(f"engine sglang: a sample of position {position} was refused: {message['text']}")
        return outputs

    def _drop(self, names: Sequence[str]) -> None:
        if names:
            self.inner.send({"do": "abort", "rids": names})

    def _load(self, version: Version) -> None:
        self._give_up_score()
        described = self.staged.described(self.inner.process.pid, self.staged.descriptor)
        self.inner.ask({"do": "load", "version": list(version), "staged": described})

    def _release(self) -> None:
        self.inner.ask({"do": "release"})

    def _resume(self) -> None:
        # SGLang's process can only have what this one has given back.
        torch.cuda.empty_cache()
        self.inner.ask({"do": "resume"})

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """If SGLang dies in here it is restarted with the newest weights; running samples wait with what they have.

        The rest of the block is skipped then. Re-raises what killed SGLang if it died before it gave a token, or too
        often: it would die again.
        """
        try:
            yield
        except EngineGone as gone:
            now = time.monotonic()
            self._deaths = [at for at in self._deaths if now - at < DEATHS_S] + [now]
            if not self._served or len(self._deaths) > DEATHS:
                raise
            log.warning("%s", gone)
            log.warning("restarting SGLang; %d running samples will continue then", len(self.samples.running))
            self.inner.close()
            self._score = None
            self.samples.put_back(begun=True)
            # With another seed, or it would draw the same random numbers again.
            start, args = self.inner.start, self.inner.start.args
            self.inner = EngineProcess(replace(start, args={**args, "random_seed": args["random_seed"] + 1}))
            self._served = False
            if self.weights.version is not None:
                self._load(self.weights.version)


def sampling_params(sample: Sample, vocabulary: int, *, seeded: bool = False) -> dict[str, Any]:
    """SGLang's sampling settings for the rest of a sample; `seeded`: with random numbers of the sample's own."""
    params = sample.request.params
    wanted: dict[str, Any] = {
        "max_new_tokens": sample.remaining,
        "temperature": params.temperature,
        "stop_token_ids": list(params.stop_token_ids),
    }
    wanted |= {"sampling_seed": sample_seed(sample)} if seeded else {}
    wanted |= {"min_p": params.min_p} if params.filters and params.min_p else {}
    wanted |= {"logit_bias": {str(token): bias for token, bias in params.biases}} if params.logit_bias else {}
    if params.departs:
        # With top_k 1 SGLang would leave the temperature out of the log-probs; and it returns filtered ones only where
        # top_k bounds what is left.
        top_p = LEAST_TOP_P if params.top_k == 1 else params.top_p
        wanted |= {"top_p": top_p, "top_k": vocabulary if params.top_k < 2 else min(params.top_k, vocabulary)}
    return wanted


def _divide_cores(parts: int) -> str:
    """This process's cores in equal parts, in the form SGLang reads; all cores for each part if there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // parts
    divided = [cores[part * each : (part + 1) * each] if each else cores for part in range(parts)]
    return "|".join(",".join(map(str, some)) for some in divided)
