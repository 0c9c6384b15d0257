"""SGLang under the contract suite of engines that decode by themselves, started once for all tests."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch

from distflow.comm.collective import LOOPBACK
from distflow.errors import UserError, WorkerFailed
from distflow.runtime.protocols import Engine, EngineSpec
from distflow.testing.engine_free_running import ENDLESS, FreeRunningContract
from distflow.testing.engine_harness import WholeGroup, by_sample, reference_model, run_until_done, submit
from distflow.types import SamplingParams
from distflow.workers.engines.adapter import ModelOutline
from distflow.workers.engines.sglang_engine import SGLangEngine
from distflow.workers.engines.sglang_options import SGLangOptions
from distflow.workers.engines.sglang_process import EngineProcess
from distflow.workers.engines.staged_weights import StagedWeights
from tests.e2e.sockets import listening

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="SGLang is not installed here; `make test-venv` or requirements/install_sglang_cpu.sh does it",
)
ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 23
LONGEST = ENDLESS + 8
INIT = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    # Wide weights make the distributions uneven: near-uniform ones would hide mistakes.
    "initializer_range": 0.3,
    "eos_token_id": 2,
}
MODEL = {"path": None, "init": INIT, "tokenizer": None, "dtype": "float32"}


@cache
def reference(number: int) -> torch.nn.Module:
    return reference_model(MODEL, number)


class SharedEngine(SGLangEngine):
    """Each test has an engine of its own; those with the same options share one process."""

    shared: ClassVar[dict[str, tuple[EngineProcess, StagedWeights]]] = {}

    def _make(self, spec: EngineSpec, options: SGLangOptions, model: ModelOutline) -> Any:
        name = str(options)
        if name not in self.shared:
            self.end_all()
            largest = replace(spec, slots=64, max_tokens=LONGEST)
            self.shared[name] = super()._make(largest, replace(options, context_length=LONGEST), model)
        return self.shared[name]

    @classmethod
    def end_all(cls) -> None:
        for process, staged in cls.shared.values():
            process.close()
            staged.close()
        cls.shared.clear()

    def close(self) -> None:
        self.abort(list(self.progress()))


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    SharedEngine.end_all()


class TestSGLang(FreeRunningContract):
    vocabulary = VOCABULARY
    exact = False
    joint_filters = True
    tells_filtered = True
    tells_unshifted = False
    refuses = ("repetition_penalty", "min_new_tokens")
    tolerance = 1e-4
    engines: ClassVar[list[Engine]] = []
    options: ClassVar[dict[str, Any]] = {}

    def make_engine(self, *, slots: int = 16, max_tokens: int = 64) -> Engine:
        spec = EngineSpec(MODEL, "cpu", slots, max_tokens, 0, self.options, filtered_logprobs=True)
        self.engines.append(SharedEngine(spec))
        return self.engines[-1]

    def reference(self, number: int) -> Any:
        return reference(number)

    @pytest.fixture(autouse=True)
    def _leave_nothing_running(self) -> Iterator[None]:
        yield
        while self.engines:
            self.engines.pop().close()

    def test_is_an_engine(self) -> None:
        assert isinstance(self.make_engine(), Engine)

    def test_many_groups_in_flight(self) -> None:
        """64 groups at once, submitted while others run."""
        engine = self.ready(slots=64)
        requests = [self.request(p, samples=4, max_new_tokens=12, stop_token_ids=(1,)) for p in range(64)]
        submit(engine, requests[:40])
        first = engine.poll()
        submit(engine, requests[40:])
        outputs = by_sample(first + run_until_done(engine))
        assert len(outputs) == 256
        for key, output in outputs.items():
            self.check(requests[key[0]], output)

    def test_the_end_token_of_the_model_ends_nothing(self) -> None:
        """Only the stop tokens of a request do."""
        engine = self.ready()
        submit(engine, [WholeGroup(0, (1, 2), 16, 0, SamplingParams(temperature=2.0, max_new_tokens=30))])
        outputs = run_until_done(engine)
        assert any(INIT["eos_token_id"] in output.token_ids for output in outputs)
        assert {(len(output.token_ids), output.finish_reason) for output in outputs} == {(30, "length")}


@pytest.mark.long
class TestSGLangInTwoProcesses(TestSGLang):
    """Each of them holds half of every layer."""

    options: ClassVar[dict[str, Any]] = {"tensor_parallel": 2}


@pytest.mark.long
class TestSGLangByGroup(TestSGLang):
    options: ClassVar[dict[str, Any]] = {"update_by": "group"}


class InTwoByGroup(TestSGLang):
    """Two processes, each of which holds half of every layer and is sent all weights."""

    __test__ = False
    options: ClassVar[dict[str, Any]] = {"tensor_parallel": 2, "update_by": "group"}


@pytest.mark.long
def test_weights_sent_to_two_processes() -> None:
    """The contract's tests of new weights, in mid-sample and between groups, with weights sent over a group."""
    contract = InTwoByGroup()
    contract.test_weights_swapped_in_mid_sample()
    contract.test_new_weights_between_groups()
    # torch's store and Gloo's sockets, those of the group that brings weights among them.
    found = list(listening(psutil.Process().children(recursive=True)))
    assert {one.address for one in found} == {LOOPBACK}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"args": {"no_such_thing": 1}}, r"engine_options.args: SGLang .* has no argument no_such_thing"),
        pytest.param(
            {"attention_backend": "torch_nativ"},
            r"engine_options.attention_backend 'torch_nativ': SGLang .* has no such backend — did you mean "
            r"'torch_native'\? allowed: .*triton",
            marks=pytest.mark.long,
        ),
    ],
)
def test_sglang_refuses_what_it_does_not_know(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SGLangEngine(EngineSpec(MODEL, "cpu", 4, 64, 0, options))


@pytest.mark.long
def test_a_process_that_cannot_start_says_why() -> None:
    with pytest.raises(WorkerFailed, match=r"its process \d+ ended with exit code -9(.|\n)*no_such_backend"):
        SGLangEngine(EngineSpec(MODEL, "cpu", 4, 64, 0, {"attention_backend": "no_such_backend"}))


def test_a_start_has_a_limit() -> None:
    with pytest.raises(WorkerFailed, match=r"did not start within engine_options.start_s=0.5 s"):
        SGLangEngine(EngineSpec(MODEL, "cpu", 4, 64, 0, {"start_s": 0.5}))


@pytest.mark.parametrize("victim", ["itself", pytest.param("scheduler", marks=pytest.mark.long)])
def test_a_killed_sglang_is_started_again_but_not_in_vain(victim: str) -> None:
    """SGLang kills its process tree when one process dies; the adapter's own process is not part of it.

    A signal to all processes of a job ends none of them: that is for the worker to decide. One that dies before it gave
    a token is not started again.
    """
    contract = TestSGLang()
    engine = contract.ready(max_tokens=LONGEST)
    assert isinstance(engine, SGLangEngine)
    submit(engine, [contract.request(3, max_new_tokens=ENDLESS)])
    contract.run_a_while(engine, 3)
    host = psutil.Process(engine.inner.process.pid)
    assert host.cmdline()[0].endswith(" sglang"), host.cmdline()
    family = [host, *host.children(recursive=True)]
    (scheduler,) = (process for process in family if "scheduler" in " ".join(process.cmdline()))
    for process in family:
        process.terminate()
    begun = contract.run_a_while(engine, max(len(output.token_ids) for output in engine.partials()) + 20)
    SharedEngine.shared.clear()
    (scheduler if victim == "scheduler" else host).kill()
    contract.poll_until(engine, lambda: engine.inner.process.pid != host.pid)
    assert psutil.wait_procs(family, timeout=30)[1] == []
    if victim == "scheduler":
        contract.poll_until(engine, lambda: len(engine.partials()) == len(begun))
        going_on = by_sample(engine.partials())
        for name, sample in begun.items():
            assert going_on[name].token_ids[: len(sample.token_ids)] == sample.token_ids
    else:
        again = psutil.Process(engine.inner.process.pid)
        again.kill()
        with pytest.raises(WorkerFailed, match=f"engine sglang: its process {again.pid} ended with exit code -9"):
            contract.poll_until(engine, lambda: False)
    engine.inner.close()
    engine.staged.close()


ADAPTER = """
import json, sys, time
from distflow.runtime.protocols import EngineSpec
from distflow.workers.engines.sglang_engine import SGLangEngine
engine = SGLangEngine(EngineSpec(json.loads(sys.argv[1]), "cpu", 4, 64, 0, {}))
print(engine.inner.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_nothing_outlives_a_killed_adapter() -> None:
    """No process, no file, no shared memory."""
    before = _traces()
    arguments = [sys.executable, "-c", ADAPTER, json.dumps(MODEL)]
    adapter = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert adapter.stdout is not None
        host = psutil.Process(int(adapter.stdout.readline()))
        family = [host, *host.children(recursive=True)]
        assert len(family) >= 3
    finally:
        adapter.kill()
        adapter.wait()
    assert psutil.wait_procs(family, timeout=30)[1] == []
    assert _traces() <= before


def _traces() -> set[str]:
    """Files of SGLang's and ours that a start might leave."""
    return {str(path) for path in (*Path("/tmp").glob("distflow-sglang-*"), *Path("/dev/shm").glob("*sglang*"))}
