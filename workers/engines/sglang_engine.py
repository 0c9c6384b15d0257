"""The engine that is SGLang, in a process of its own: this adapter hands it samples and collects their tokens.

SGLang decodes by itself, between polls too; a poll takes what has come in. New weights are staged while it goes on and
swapped in between two decode steps; running samples keep the keys and values of older weights, and SGLang tells which
tokens came from which version. Samples are drawn by SGLang's own random numbers: a seed repeats neither the tokens nor
their order. An SGLang that dies is started again and goes on behind the tokens that had come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from distflow.comm.collective import INTERFACE, LOOPBACK, interface_of
from distflow.errors import KeyedError, UserError, WorkerFailed
from distflow.log import logger
from distflow.runtime.protocols import EngineSpec
from distflow.types import GroupRequest, SampleOutput, Version
from distflow.weights.canary import Rows
from distflow.workers.engines.adapter import ModelOutline, as_torch, engine_seed, outline_model, sample_seed
from distflow.workers.engines.adapter_options import use_of
from distflow.workers.engines.samples import RequestLimits, Sample, Samples, is_greedy, salt
from distflow.workers.engines.sglang_options import SGLangOptions, memory_saver
from distflow.workers.engines.sglang_process import EngineGone, EngineProcess, EngineStart
from distflow.workers.engines.staged_weights import LOADER, StagedWeights
from distflow.workers.parameters import ParameterTable

log = logger(__name__)

WAIT_S = 0.05
"""A poll waits so long for tokens, if there are none yet."""
DEATHS = 3
DEATHS_S = 600.0
"""SGLang may die so often within so long."""


class SGLangEngine:
    """Implements `distflow.runtime.protocols.Engine`. Serves nothing until the first complete update."""

    def __init__(self, spec: EngineSpec) -> None:
        """Returns when SGLang runs. Raises UserError for what it cannot do, WorkerFailed if it does not start."""
        options = SGLangOptions.parse(spec.options)
        if spec.slots < 1:
            raise UserError(f"engine sglang: {spec.slots} slots; expected at least 1")
        model = outline_model(spec.model, options.dtype_for(spec.model))
        self.limits = RequestLimits.of(model.config, spec.max_tokens)
        options.check(use_of(spec, self.limits.max_tokens, model.config))
        self.releases = memory_saver(spec.device)
        if spec.offload and not self.releases:
            raise KeyedError(
                f"layout.pools.{spec.pool}.offload",
                "engine 'sglang' needs the package torch_memory_saver for it — install it, or remove offload",
            )
        # Then each sample has random numbers of its own.
        self.deterministic = spec.deterministic
        self.samples = Samples(spec.slots, continues=not spec.deterministic)
        self.offloaded = False
        self.precision = options.quantization or options.dtype_for(spec.model)
        """What it computes in."""
        self.process, self.staged = self._start(spec, options, model)
        self.weights = ParameterTable(self.staged.tensors)
        self._deaths: list[float] = []
        self._served = False
        """Whether tokens came since SGLang was started."""

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
            self.samples.add(request)

    def poll(self) -> list[SampleOutput]:
        """Start what fits, take the tokens that have come in, return the samples that finished.

        Waits up to WAIT_S for tokens if there is nothing else to return. Starts SGLang again if it has died; raises
        WorkerFailed if it would die again.
        """
        version = self.weights.version
        if version is None:
            return []
        assert not self.offloaded, "an offloaded engine was polled; call onload first"
        outputs = self.samples.take_complete()
        with self._outlived():
            self._admit(version)
            if self.samples.running:
                outputs += self._collect(0.0 if outputs else WAIT_S)
        return outputs

    def begin_update(self, version: Version) -> None:
        """Start replacing the weights; `poll` serves nothing until `end_update`. SGLang goes on with the old ones.

        If they are of this very version they are wrong: running samples go back to the tokens that they had at the last
        poll, and wait.
        """
        if version == self.weights.version:
            with self._outlived():
                self._abort(self.samples.put_back(begun=True))
        self.weights.begin(version)

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Stage these named parameters; raises KeyError for an unknown name, ValueError for a wrong shape."""
        self.weights.update(tensors)

    def end_update(self) -> None:
        """Swap in what is staged: tokens from here on carry the new version. Raises ValueError if some are missing.

        Samples without a token restart, so that they read nothing that older weights computed.
        """
        version = self.weights.end()
        with self._outlived():
            self._abort(self.samples.put_back(begun=False))
            self._load(version)

    def logprobs(self, rows: Rows) -> Sequence[Sequence[float]] | None:
        """Log-prob (nats, temperature 1) of every token but the first of each row; samples go on meanwhile.

        None if SGLang had no room for them in time, or died: a fresh one loads the weights again.
        """
        answers: list[Sequence[Sequence[float]] | None] = []
        with self._outlived():
            answers.append(self.process.ask({"do": "score", "rows": rows})["logprobs"])
        return answers[0] if answers else None

    def abort(self, positions: Iterable[int]) -> list[SampleOutput]:
        """Drop these groups; returns what their running samples had produced, with finish_reason abort."""
        dropped = set(positions)
        partials = self.samples.outputs(dropped)
        with self._outlived():
            self._abort(self.samples.forget(dropped))
        return partials

    def partials(self) -> list[SampleOutput]:
        """What every running sample has produced so far, with finish_reason abort; they run on."""
        return self.samples.outputs()

    def progress(self) -> Mapping[int, int]:
        """Tokens produced so far by each group that is queued or running, by prompt position."""
        return self.samples.progress()

    def offload(self) -> None:
        """Give back the device's memory, where SGLang can (a GPU, and torch_memory_saver); else nothing changes.

        Running samples are taken out, to go on behind the tokens that they have.
        """
        if self.releases:
            before = self.process
            with self._outlived():
                self._abort(self.samples.put_back(begun=True))
                self.process.ask({"do": "release"})
            if self.process is not before:
                self.process.ask({"do": "release"})
        self.offloaded = True

    def onload(self) -> None:
        """Take the memory again; the weights come from where they are staged."""
        self.offloaded = False
        if self.releases:
            # SGLang's process can only have what this one has given back.
            torch.cuda.empty_cache()
            with self._outlived():
                self.process.ask({"do": "resume"})
                if self.weights.version is not None:
                    self._load(self.weights.version)

    def close(self) -> None:
        """End SGLang; a closed engine has no further use."""
        self.process.close()
        self.weights = ParameterTable({})
        self.staged.close()

    def _start(
        self, spec: EngineSpec, options: SGLangOptions, model: ModelOutline
    ) -> tuple[EngineProcess, StagedWeights]:
        seed = engine_seed(spec)
        use = use_of(spec, self.limits.max_tokens, model.config)
        args = options.server_args(use, self.limits.vocabulary, seed)
        if find_spec("sglang") is None:
            raise UserError(
                "engine sglang: SGLang is not installed for this Python; `make test-venv` installs it for a CPU, "
                "docs/engines.md says what a GPU needs"
            )
        staged = StagedWeights(model.shapes, as_torch(options.dtype_for(spec.model)), model.tied)
        on_cpu = spec.device == "cpu"
        env = {
            "SGLANG_USE_CPU_ENGINE": "1" if on_cpu else "0",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // (options.tensor_parallel if on_cpu else 1))),
            # All of SGLang's processes are on this host, whatever address its name has.
            INTERFACE: interface_of(LOOPBACK),
            "NCCL_SOCKET_IFNAME": f"={interface_of(LOOPBACK)}",
        }
        if on_cpu and options.tensor_parallel > 1:
            env |= {"SGLANG_CPU_OMP_THREADS_BIND": _divide_cores(options.tensor_parallel)}
        args |= {"custom_weight_loader": [LOADER]}
        try:
            start = EngineStart(
                model.text, args, env, staged.descriptor, options.update_by, options.start_s, spec.folder, spec.go_on
            )
            return EngineProcess(start), staged
        except Exception:
            staged.close()
            raise

    @contextmanager
    def _outlived(self) -> Iterator[None]:
        """SGLang may die in here: it is started again, and running samples wait with the tokens that they have.

        What failed must be made up for by a fresh SGLang with the newest weights. Raises what killed it if it died
        before it gave a token, or too often: it would die again.
        """
        try:
            yield
        except EngineGone as gone:
            now = time.monotonic()
            self._deaths = [at for at in self._deaths if now - at < DEATHS_S] + [now]
            if not self._served or len(self._deaths) > DEATHS:
                raise
            log.warning("%s", gone)
            log.warning("SGLang is started again; %d running samples wait for it", len(self.samples.running))
            self.process.close()
            self.samples.put_back(begun=True)
            # Not the same random numbers once more.
            start, args = self.process.start, self.process.start.args
            self.process = EngineProcess(replace(start, args={**args, "random_seed": args["random_seed"] + 1}))
            self._served = False
            if self.weights.version is not None:
                self._load(self.weights.version)

    def _admit(self, version: Version) -> None:
        started = self.samples.admit(self.process.sample_name)
        if started:
            rows = [
                {
                    "rid": name,
                    "ids": sample.input_ids,
                    "params": sampling_params(sample, self.limits.vocabulary, seeded=self.deterministic),
                    "filtered": is_filtered(sample.group.request),
                    "salt": salt(version),
                }
                for name, sample in started.items()
            ]
            self.process.send({"do": "generate", "samples": rows})

    def _collect(self, wait_s: float) -> list[SampleOutput]:
        outputs = []
        for message in self.process.receive(wait_s):
            if "tokens" in message:
                self._served = True
                outputs += self.samples.take(message["tokens"])
            elif message["lost"] in self.samples.running:
                position = self.samples.running[message["lost"]].group.request.position
                raise WorkerFailed(f"engine sglang: a sample of position {position} was refused: {message['text']}")
        return outputs

    def _abort(self, names: Sequence[str]) -> None:
        if names:
            self.process.send({"do": "abort", "rids": names})

    def _load(self, version: Version) -> None:
        described = self.staged.described(self.process.process.pid, self.staged.descriptor)
        self.process.ask({"do": "load", "version": list(version), "staged": described})


def _divide_cores(parts: int) -> str:
    """This process's cores, evenly and as SGLang wants to be told of them; all for each part if there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // parts
    divided = [cores[part * share : (part + 1) * share] if share else cores for part in range(parts)]
    return "|".join(",".join(map(str, some)) for some in divided)


def is_filtered(request: GroupRequest) -> bool:
    """Whether tokens are drawn from a part of the vocabulary."""
    return not is_greedy(request) and (request.params.top_k > 0 or request.params.top_p < 1)


def sampling_params(sample: Sample, vocabulary: int, *, seeded: bool = False) -> dict[str, Any]:
    """SGLang's settings for what a sample lacks; `seeded`: with its own random numbers, if SGLang is deterministic."""
    request = sample.group.request
    params = request.params
    wanted: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens - len(sample.before.token_ids),
        "temperature": params.temperature,
        "stop_token_ids": list(params.stop_token_ids),
    }
    wanted |= {"sampling_seed": sample_seed(sample)} if seeded else {}
    if is_filtered(request):
        # SGLang tells log-probs of what is left of the vocabulary only where top_k bounds it.
        wanted |= {"top_p": params.top_p, "top_k": min(params.top_k or vocabulary, vocabulary)}
    elif params.top_k:
        wanted |= {"top_k": params.top_k}
    return wanted
