"""vLLM in this process, as the vLLM engine uses it: add samples, step, take tokens, swap weights between steps.

vLLM decodes when called, in the calling thread (its mode without multiprocessing): on a CPU that was one and a half
times as fast as a process of its own, and all tokens of a step are there when it returns. It changes some state of its
process, so nothing else should generate or use torch.distributed for training there.
"""

from __future__ import annotations

import dataclasses
import getpass
import os
import random
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distflow.comm.collective import INTERFACE, LOOPBACK, interface_of
from distflow.errors import UserError, WorkerFailed, did_you_mean
from distflow.log import logger
from distflow.weights.canary import Rows
from distflow.workers.engines.loopback_store import stay_on_loopback
from distflow.workers.engines.staged_weights import EXTENSION, LOAD

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The workers of a host share its cores; with binding, all of them would use the first ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # Its process group consists of this process alone.
    "VLLM_HOST_IP": LOOPBACK,
    "DO_NOT_TRACK": "1",
}
TESTED = "0.32"
SCORE_STEPS = 200
"""Limit for scoring given tokens: running samples may fill the memory until one of them ends."""
log = logger(__name__)
Row = tuple[str, Sequence[int], Sequence[float], str]


@dataclass(frozen=True, slots=True)
class CoreSample:
    """A sample to generate."""

    name: str
    token_ids: Sequence[int]
    cache_salt: str
    """The prefix cache is shared by samples with the same salt only."""
    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    stop_token_ids: Sequence[int]
    seed: int | None
    further: Mapping[str, Any] = field(default_factory=dict)
    """Further settings, by vLLM's names."""


class VLLMCore:
    """One vLLM engine, for use by one thread."""

    def __init__(
        self, config: str, args: Mapping[str, Any], further: Collection[str] = (), *, batch_invariant: bool = False
    ) -> None:
        """`config`: the model's config.json; `args`: vLLM's arguments, without the model's path.

        `further`: the names of those that come from `engine_options.args`. `batch_invariant`: vLLM's mode of that name.

        Raises UserError for arguments that vLLM does not know or refuses, WorkerFailed if it does not start.
        """
        os.environ.update(ENVIRONMENT | ({"VLLM_BATCH_INVARIANT": "1"} if batch_invariant else {}))
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        # The default place; by default it would now be in the temporary folder below, which is removed.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
        os.environ[INTERFACE] = interface_of(LOOPBACK)
        stay_on_loopback()
        self._eager = bool(args["enforce_eager"])
        self._early: list[Row] = []
        self._asked = 0
        with self._compiling(), _untouched(), _folder() as folder:
            Path(folder, "config.json").write_text(config)
            self._engine = _start(folder, args, further)

    def add(self, samples: Sequence[CoreSample]) -> None:
        """Add these samples; they start with the next step."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        for sample in samples:
            params = SamplingParams(
                temperature=sample.temperature,
                top_k=sample.top_k,
                top_p=sample.top_p,
                max_tokens=sample.max_tokens,
                stop_token_ids=list(sample.stop_token_ids),
                seed=sample.seed,
                # Only the log-prob of the token that is drawn.
                logprobs=0,
                flat_logprobs=True,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                **sample.further,
            )
            prompt = {"prompt_token_ids": list(sample.token_ids), "cache_salt": sample.cache_salt}
            with _blamed("refused a sample"):
                self._engine.add_request(sample.name, prompt, params)

    def step(self) -> list[Row]:
        """One step of vLLM: prefill, and one token for every running sample. Rows: name, tokens, log-probs, finish.

        Tokens that were drawn while `logprobs` was computed are returned first, without a step.
        """
        rows, self._early = self._early, []
        return rows or _tokens(self._step())

    def logprobs(self, rows: Rows) -> list[list[float]] | None:
        """Log-prob of every token but the first of each row; None if SCORE_STEPS steps had no room for them."""
        from vllm.sampling_params import SamplingParams

        self._asked += 1
        names = [f"score-{self._asked}-{number}" for number in range(len(rows))]
        params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)
        for name, row in zip(names, rows, strict=True):
            with _blamed("refused tokens to be scored"):
                self._engine.add_request(name, {"prompt_token_ids": list(row), "cache_salt": name}, params)
        found: dict[str, list[float]] = {}
        for _ in range(SCORE_STEPS):
            outputs = self._step()
            self._early += _tokens([output for output in outputs if output.request_id not in names])
            for output in outputs:
                if output.request_id in names and output.finished:
                    found[output.request_id] = _prompt_logprobs(output)
            if len(found) == len(rows):
                return [found[name] for name in names]
        self.abort([name for name in names if name not in found])
        return None

    def _step(self) -> list[Any]:
        with _blamed("failed in a step"), self._compiling():
            outputs: list[Any] = self._engine.step()
        return outputs

    def _compiling(self) -> AbstractContextManager[object]:
        """Keep vLLM from compiling with `enforce_eager`: it still would some functions, which needs a compiler."""
        return torch.compiler.set_stance("force_eager") if self._eager else nullcontext()

    def abort(self, names: Sequence[str]) -> None:
        """Drop these samples; no later step returns tokens of them."""
        if names:
            with _blamed("failed to abort"):
                self._engine.abort_request(list(names))

    def load(self, description: str) -> None:
        """Replace the weights by the staged ones; samples go on with the keys and values that they have."""
        with _blamed("failed to load weights"):
            self._engine.collective_rpc(LOAD, args=(description,))

    def release(self) -> None:
        """Give the GPU's memory back; weights and cache are lost. No sample may run."""
        with _blamed("failed to release memory"):
            self._engine.sleep(level=2)

    def resume(self) -> None:
        """Take the memory again; the weights must then be loaded again."""
        with _blamed("failed to take its memory again"):
            self._engine.wake_up()

    def close(self) -> None:
        """End vLLM's processes, if it has any, and free its memory."""
        self._engine.engine_core.shutdown()
        del self._engine


def _tokens(outputs: Sequence[Any]) -> list[Row]:
    rows: list[Row] = []
    for output in outputs:
        (only,) = output.outputs
        if only.finish_reason not in (None, "stop", "length"):
            raise WorkerFailed(f"engine vllm: a sample ended with {only.finish_reason!r}")
        if only.token_ids:
            logprobs = list(only.logprobs.logprobs)
            rows.append((output.request_id, list(only.token_ids), logprobs, only.finish_reason or ""))
    return rows


def _prompt_logprobs(output: Any) -> list[float]:
    """Log-probs of all prompt tokens but the first, which has none."""
    ids, logprobs = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
    return [float(at[token].logprob) for token, at in zip(ids, logprobs, strict=True)]


def _start(folder: str, args: Mapping[str, Any], further: Collection[str]) -> Any:
    with _blamed("cannot be imported"):
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in [name for name in args if name not in known]:
        if name in further:
            hint = did_you_mean(name, known).partition("allowed:")[0]
            raise UserError(
                f"engine_options.args: vLLM {vllm.__version__} has no argument {name} — {hint}see its EngineArgs"
            )
        raise UserError(
            f"engine vllm: vLLM {vllm.__version__} has no argument {name}, which distflow sets — install vLLM "
            f"{TESTED}, with which distflow is tested"
        )
    try:
        config = EngineArgs(model=folder, worker_extension_cls=EXTENSION, **args).create_engine_config()
    except (ValueError, TypeError) as error:
        raise UserError(f"engine vllm: vLLM {vllm.__version__} refuses its arguments: {error}") from error
    _check_heads(config)
    with _blamed("did not start"):
        engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    log.info("vLLM %s started in this process", vllm.__version__)
    return engine


def _check_heads(config: Any) -> None:
    """Raises UserError for head sizes without a kernel, which vLLM on a CPU would notice only at the first step."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    width, known = config.model_config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
    if current_platform.is_cpu() and width not in known:
        some = ", ".join(map(str, known))
        raise UserError(
            f"engine vllm: the model's attention heads are {width} wide; vLLM on a CPU has kernels for {some} — give "
            "the model other heads, or use engine torch"
        )


@contextmanager
def _folder() -> Iterator[str]:
    """A temporary folder for the start: for the model's config, and files by which vLLM's processes find each other."""
    with tempfile.TemporaryDirectory(prefix="distflow-vllm-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir, before = folder, tempfile.tempdir
        try:
            yield folder
        finally:
            tempfile.tempdir = before


@contextmanager
def _untouched() -> Iterator[None]:
    """Restore what vLLM's start changes: the state of all random generators and, on a CPU, a function of torch."""
    set_num_threads, state = torch.set_num_threads, random.getstate()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(state)


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    """Turn whatever vLLM raises into a WorkerFailed that names vLLM and what it was doing."""
    try:
        yield
    except Exception as error:
        raise WorkerFailed(f"engine vllm: vLLM {what}: {type(error).__name__}: {error}") from error
