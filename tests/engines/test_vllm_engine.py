"""vLLM under the contract suite of engines that draw one token per poll, started as rarely as possible."""

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

import pytest
import torch

from distflow.errors import UserError, WorkerFailed
from distflow.runtime.protocols import BackendSpec, Engine, EngineSpec
from distflow.runtime.weight_publisher import Canaries
from distflow.testing.backend_contract import tiny_model
from distflow.testing.engine_contract import SECOND, EngineContract
from distflow.testing.engine_harness import WholeGroup, by_sample, reference_model, run_until_done, submit
from distflow.types import SamplingParams, Version
from distflow.weights.canary import canary_rows
from distflow.workers.backends.torch_backend import TorchBackend
from distflow.workers.engines.adapter import ModelOutline
from distflow.workers.engines.staged_weights import StagedWeights
from distflow.workers.engines.vllm_core import VLLMCore
from distflow.workers.engines.vllm_engine import VLLMEngine
from distflow.workers.engines.vllm_options import VLLMOptions

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="no vLLM here: `make vllm-venv`, then .venv-vllm/bin/python -m pytest tests/engines/test_vllm_engine.py",
)
ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 23
LONGEST = 300
INIT = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    # Heads of 32: vLLM has no smaller ones on a CPU.
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    # Wide weights make the distributions uneven: near-uniform ones would hide mistakes.
    "initializer_range": 0.25,
    "eos_token_id": 2,
}
MODEL = {"path": None, "init": INIT, "tokenizer": None, "dtype": "float32"}
TRAINED = {"optimizer": tiny_model()["optimizer"], "gradient_checkpointing": False}


@cache
def reference(number: int) -> torch.nn.Module:
    return reference_model(MODEL, number)


class SharedEngine(VLLMEngine):
    """Each test has engines of its own, each with its own vLLM; later tests reuse these."""

    idle: ClassVar[list[tuple[VLLMCore, StagedWeights]]] = []

    def _make(self, spec: EngineSpec, options: VLLMOptions, model: ModelOutline) -> Any:
        if self.idle:
            return self.idle.pop()
        largest = replace(spec, slots=64, max_tokens=LONGEST)
        return super()._make(largest, replace(options, max_model_len=LONGEST), model)

    def close(self) -> None:
        self.abort(list(self.progress()))
        if (self.inner, self.staged) not in self.idle:
            self.idle.append((self.inner, self.staged))


@pytest.fixture(scope="module", autouse=True)
def _few_starts() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    while SharedEngine.idle:
        core, staged = SharedEngine.idle.pop()
        core.close()
        staged.close()


class TestVLLM(EngineContract):
    vocabulary = VOCABULARY
    exact = False
    tolerance = 1e-4
    tells_unfiltered = False
    tells_unshifted = False
    bias_first = True
    engines: ClassVar[list[Engine]] = []

    def make_engine(self, *, slots: int = 16, max_tokens: int = 64) -> Engine:
        self.engines.append(SharedEngine(EngineSpec(MODEL, "cpu", slots, max_tokens, 0, {})))
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

    def test_a_sample_has_random_numbers_of_its_own(self) -> None:
        """The same tokens in other batches, in other slots, and alone."""
        requests = [self.request(p, max_new_tokens=8) for p in range(8)]
        runs = []
        for slots, order in ((40, requests), (5, requests[::-1]), (40, requests[3:4])):
            engine = self.ready(slots=slots)
            submit(engine, order)
            runs.append(by_sample(run_until_done(engine)))
        assert runs[0].keys() == runs[1].keys()
        for run in runs[1:]:
            for key, output in run.items():
                assert output.token_ids == runs[0][key].token_ids

    def test_the_end_token_of_the_model_ends_nothing(self) -> None:
        """Only the stop tokens of a request do."""
        engine = self.ready()
        submit(engine, [WholeGroup(0, (1, 2), 16, 0, SamplingParams(temperature=2.0, max_new_tokens=30))])
        outputs = run_until_done(engine)
        assert any(INIT["eos_token_id"] in output.token_ids for output in outputs)
        assert {(len(output.token_ids), output.finish_reason) for output in outputs} == {(30, "length")}

    def test_nothing_of_older_weights_is_found_in_the_cache(self) -> None:
        """A prompt of more than one cache block is read again under each version, and shared within it."""
        prompt = tuple(i % VOCABULARY for i in range(270))
        engine = self.ready(max_tokens=LONGEST)
        for number, version in ((0, None), (1, SECOND)):
            if version is not None:
                self.load(engine, number, version)
            for _ in range(2):
                request = WholeGroup(3, prompt, 2, 5, SamplingParams(max_new_tokens=4))
                submit(engine, [request])
                for output in run_until_done(engine):
                    self.check(request, output, number=number)

    def test_a_sample_that_fills_its_slot(self) -> None:
        """Prompt and response are as long as the model allows."""
        engine = self.ready(max_tokens=LONGEST)
        request = WholeGroup(3, (1, 2, 3), 1, 5, SamplingParams(max_new_tokens=LONGEST - 3))
        submit(engine, [request])
        (output,) = run_until_done(engine)
        assert (len(output.token_ids), output.finish_reason) == (LONGEST - 3, "length")
        self.check(request, output)

    def test_temperatures_that_vllm_would_change_are_refused(self) -> None:
        """vLLM would sample from another distribution than requested."""
        engine = self.ready()
        with pytest.raises(ValueError, match=r"position 1: temperature 0.005; vLLM takes 0, or 0.01 and more"):
            submit(engine, [self.request(1, temperature=0.005)])
        assert engine.progress() == {}

    def test_what_vllm_raises_is_named(self) -> None:
        engine = self.make_engine()
        assert isinstance(engine, VLLMEngine)
        with pytest.raises(WorkerFailed, match="engine vllm: vLLM failed to load weights: FileNotFoundError"):
            engine.inner.load(json.dumps({"place": "/none", "dtype": "float32", "tensors": [], "tied": {}}))


def test_the_process_is_left_as_it_was() -> None:
    """A start changes neither torch nor the random numbers of others, and leaves no file."""
    program = ADAPTER + (
        "import glob, random, torch\n"
        "before = torch.set_num_threads, random.getstate(), torch.random.get_rng_state().tolist()\n"
        "engine = VLLMEngine(EngineSpec(model, 'cpu', 4, 64, 0, {}))\n"
        "assert before == (torch.set_num_threads, random.getstate(), torch.random.get_rng_state().tolist())\n"
        "assert not glob.glob('/tmp/distflow-vllm-*'), glob.glob('/tmp/distflow-vllm-*')\n"
        "engine.close()\n"
    )
    done = run_alone(program, MODEL)
    assert done.returncode == 0, done.stderr


def test_vllm_refuses_what_it_does_not_know() -> None:
    with pytest.raises(
        UserError, match=r"engine_options.args: vLLM .* has no argument max_loras_ — did you mean 'max_loras'"
    ):
        VLLMEngine(EngineSpec(MODEL, "cpu", 4, 64, 0, {"args": {"max_loras_": 1}}))


ADAPTER = """
import json, sys
from distflow.runtime.protocols import EngineSpec
from distflow.workers.engines.vllm_engine import VLLMEngine
model = json.loads(sys.argv[1])
"""


def test_a_vllm_of_another_age_is_told_apart_from_a_slip_of_the_pen() -> None:
    with pytest.raises(
        UserError, match=r"engine vllm: vLLM .* has no argument from_tomorrow, which distflow sets — install"
    ):
        VLLMCore("{}", {"enforce_eager": True, "from_tomorrow": 1})


def run_alone(program: str, model: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """In a process of its own: there is at most one vLLM in each."""
    command = [sys.executable, "-c", program, json.dumps(model)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=250)


def test_a_model_that_vllm_has_no_kernel_for_is_refused_at_the_start() -> None:
    small = {**MODEL, "init": {**INIT, "num_attention_heads": 4, "num_key_value_heads": 2}}
    done = run_alone(ADAPTER + "VLLMEngine(EngineSpec(model, 'cpu', 4, 64, 0, {}))", small)
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert "UserError: engine vllm: the model's attention heads are 16 wide; vLLM on a CPU has kernels for 32" in said


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False}
FAMILIES = {
    "qwen3_moe": {**EXPERTS, "head_dim": 32},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 48},
}


def check_experts(family: str) -> None:
    """Version by version, in a process in which vLLM had no other model."""
    model = {**MODEL, "init": {**INIT, "model_type": family, **FAMILIES[family]}}
    engine = VLLMEngine(EngineSpec(model, "cpu", 4, 64, 0, {}))
    rows = canary_rows(VOCABULARY, 20)
    for number in range(3):
        trainer = TorchBackend(BackendSpec({**model, **TRAINED}, "cpu", True, number, 1, {}))
        engine.begin_update(Version(0, number))
        engine.update(trainer.named_shards())
        engine.end_update()
        found = engine.logprobs(rows)
        assert found is not None
        assert Canaries(rows, "float32").compute(trainer).difference(found) < 1e-4
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_arrive_where_vllm_computes_with_them(family: str) -> None:
    """On a CPU, vLLM packs experts only when it makes their kernel."""
    program = f"from tests.engines.test_vllm_engine import check_experts; check_experts({family!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
