"""The parts of the vLLM adapter that need no vLLM: options, and the adapter's own bookkeeping."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.errors import UserError
from distflow.runtime.protocols import EngineSpec
from distflow.testing.engine_harness import WholeGroup, submit
from distflow.types import VALIDATION, BegunSample, SamplingParams, Span, Version
from distflow.workers.engines.adapter import outline_model, use_of
from distflow.workers.engines.staged_weights import StagedWeights, staged_tensors
from distflow.workers.engines.vllm_core import CoreSample, Row, VLLMCore
from distflow.workers.engines.vllm_engine import VLLMEngine
from distflow.workers.engines.vllm_options import CPU_BLOCK, PLAIN_BYTES, SPARE_BLOCKS, VLLMOptions

INIT = {"model_type": "qwen2", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
INIT |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True}
MODEL = {"path": None, "init": INIT, "tokenizer": None, "dtype": "float32"}


def spec(device: str = "cpu", slots: int = 4, **options: object) -> EngineSpec:
    return EngineSpec(MODEL, device, slots, 32, 0, options)


def arguments(given: EngineSpec) -> dict[str, Any]:
    config = outline_model(MODEL, "float32").config
    options, use = VLLMOptions.parse(given.options), use_of(given, given.max_tokens, config)
    options.check(use)
    return options.engine_args(use, config, 7)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"tensor_parallel": 2},
            "tensor_parallel 2: engine vllm has no such option — did you mean 'tensor_parallel_s",
        ),
        ({"frobnicate": 2}, "frobnicate 2: engine vllm has no such option — allowed: args, dtype"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size 0: expected 1 or more"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2 needs GPUs"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization 1.5: expected a number between 0 and 1"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization is a fraction of a GPU's memory"),
        ({"kv_cache_memory_bytes": "1G"}, "kv_cache_memory_bytes '1G': expected 1 or more"),
        ({"max_model_len": 31}, "max_model_len 31 is less than the longest sample of 32 tokens"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens 0: expected 1 or more"),
        ({"dtype": "float64"}, "dtype 'float64': expected float32, bfloat16, float16"),
        ({"quantization": "int4"}, "quantization 'int4': expected fp8"),
        ({"quantization": "fp8"}, "quantization fp8 needs a GPU"),
        ({"enforce_eager": 1}, "enforce_eager 1: expected true or false"),
        ({"seeded": None}, "seeded None: expected true or false"),
        ({"args": ["x"]}, r"args \['x'\]: expected a mapping"),
        (
            {"args": {"max_num_seqs": 3, "gpu_memory_utilization": 0.5}},
            "args: gpu_memory_utilization, max_num_seqs is set",
        ),
        ({"args": {"model": "x"}}, "args: model is set by distflow"),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=f"engine_options.*{message}"):
        arguments(spec(**options))


def test_the_page_lists_every_option() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text()
    (table,) = re.findall(r"## vLLM.*?\n\| option .*?\n\n", page, re.S)
    listed = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", table, re.M))
    assert list(listed) == [field.name for field in fields(VLLMOptions)]
    assert listed == {name: json.dumps(getattr(VLLMOptions(), name)) for name in listed}


def test_a_type_that_vllm_lacks() -> None:
    wide = replace(spec(), model={**MODEL, "dtype": "float64"})
    with pytest.raises(UserError, match=r"models.NAME.dtype — float64, which vLLM cannot compute in; use float32"):
        VLLMEngine(wide)
    assert VLLMOptions.parse({"dtype": "bfloat16"}).dtype_for(wide.model) == "bfloat16"


def test_what_vllm_is_told() -> None:
    cpu = arguments(spec(max_model_len=40, args={"max_loras": 2}))
    assert (cpu["max_num_seqs"], cpu["max_model_len"], cpu["max_loras"]) == (5, 40, 2)
    assert (cpu["enforce_eager"], cpu["enable_sleep_mode"], cpu["distributed_executor_backend"]) == (True, False, "uni")
    assert "device_ids" not in cpu
    assert "gpu_memory_utilization" not in cpu
    # Two blocks a slot, of one layer with one head of width 4 in float32.
    assert cpu["kv_cache_memory_bytes"] == (5 * 2 + SPARE_BLOCKS) * CPU_BLOCK * 2 * 4 * 4
    assert arguments(spec(kv_cache_memory_bytes=5, enforce_eager=False))["kv_cache_memory_bytes"] == 5
    options = {"tensor_parallel_size": 2, "quantization": "fp8", "gpu_memory_utilization": 0.4}
    gpu = arguments(spec("cuda:3", **options, enable_prefix_caching=False))
    assert (gpu["device_ids"], gpu["tensor_parallel_size"], gpu["distributed_executor_backend"]) == ([3, 4], 2, "mp")
    assert (gpu["quantization"], gpu["gpu_memory_utilization"], gpu["enforce_eager"]) == ("fp8", 0.4, False)
    assert (gpu["enable_prefix_caching"], gpu["enable_sleep_mode"]) == (False, True)
    assert "kv_cache_memory_bytes" not in gpu


def test_a_model_that_does_not_tell_its_heads() -> None:
    class Config:
        def get_text_config(self) -> object:
            return object()

    told = VLLMOptions.parse({}).engine_args(use_of(spec(), 32, Config()), Config(), 7)
    assert told["kv_cache_memory_bytes"] == PLAIN_BYTES


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_message_says_how_to_get_it() -> None:
    with pytest.raises(UserError, match="vLLM is not installed for this Python; `make vllm-venv`"):
        VLLMEngine(spec())


def test_wrong_settings_are_found_before_anything_starts() -> None:
    with pytest.raises(UserError, match=r"slots of 65 tokens .* longer than the model's 64 positions"):
        VLLMEngine(EngineSpec(MODEL, "cpu", 4, 65, 0, {}))
    with pytest.raises(UserError, match="0 slots; expected at least 1"):
        VLLMEngine(spec(slots=0))
    with pytest.raises(UserError, match="tensor_parallel_size 3: the model has 2 attention heads"):
        VLLMEngine(spec("cuda:0", tensor_parallel_size=3))
    with pytest.raises(UserError, match=r"layout.pools.worker.offload — engine 'vllm' gives memory back on GPUs only"):
        VLLMEngine(replace(spec(), offload=True, pool="worker"))


def test_tied_parameters_are_sent_under_each_of_their_names() -> None:
    staged = StagedWeights({"a": (2, 3), "b": (4,)}, torch.float32, {"c": "a"})
    staged.tensors["a"].copy_(torch.arange(6).view(2, 3))
    description = staged.described(os.getpid(), staged.descriptor)
    assert [name for name, _ in staged_tensors(description)] == ["a", "b"]
    sent = dict(staged_tensors(description, all_names=True))
    assert list(sent) == ["a", "b", "c"]
    assert torch.equal(sent["c"], staged.tensors["a"])
    staged.close()


class Tape(VLLMCore):
    """Draws token 3 for every sample in each step, and records its calls."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.running: dict[str, int] = {}

    def add(self, samples: Any) -> None:
        self.told += [("add", sample) for sample in samples]
        self.running |= {sample.name: sample.max_tokens for sample in samples}

    def step(self) -> list[Row]:
        rows: list[Row] = []
        for name in list(self.running):
            self.running[name] -= 1
            rows.append((name, [3], [-0.5], "" if self.running[name] else "length"))
            if not self.running[name]:
                del self.running[name]
        return rows

    def abort(self, names: Any) -> None:
        self.told += [("abort", name) for name in names]
        for name in names:
            del self.running[name]

    def load(self, description: str) -> None:
        self.told.append(("load", description))

    def release(self) -> None:
        assert not self.running, "vLLM must be idle"
        self.told.append(("release", None))

    def resume(self) -> None:
        self.told.append(("resume", None))


class TapedEngine(VLLMEngine):
    def _make(self, spec: EngineSpec, options: Any, model: Any) -> Any:
        return Tape(), StagedWeights(model.shapes, torch.float32, model.tied)

    @property
    def tape(self) -> Tape:
        assert isinstance(self.inner, Tape)
        return self.inner

    def added(self) -> list[CoreSample]:
        return [what for kind, what in self.tape.told if kind == "add"]

    def swap(self, version: Version) -> None:
        self.begin_update(version)
        self.update((name, torch.zeros_like(tensor)) for name, tensor in list(self.staged.tensors.items()))
        self.end_update()


def engine(device: str = "cpu", **options: object) -> TapedEngine:
    made = TapedEngine(spec(device, **options))
    made.swap(Version(0, 0))
    return made


def request(position: int, samples: int = 1, **params: Any) -> WholeGroup:
    return WholeGroup(position, (1, 2), samples, 5, SamplingParams(**params))


def test_each_sample_has_a_seed_of_its_own_and_a_salt_of_its_version() -> None:
    one = engine()
    submit(one, [request(7, samples=2), request(8, samples=1)])
    one.poll()
    first = one.added()
    assert len({sample.seed for sample in first}) == 3
    assert all(0 <= sample.seed < 1 << 63 for sample in first)
    assert {sample.cache_salt for sample in first} == {"0.0"}
    again = engine()
    submit(again, [request(8), request(7, samples=2)])
    again.poll()
    assert {sample.seed for sample in again.added()} == {sample.seed for sample in first}
    plain = engine(seeded=False)
    submit(plain, [request(7)])
    plain.poll()
    assert [sample.seed for sample in plain.added()] == [None]


@pytest.mark.parametrize("filters", [{"top_p": 0.8}, {"top_k": 5}], ids=str)
def test_filters_are_refused_where_their_log_probs_would_be_weights(filters: dict[str, Any]) -> None:
    """Also those of a step that names them in its source; samples of validation are not trained on."""
    weighed = TapedEngine(replace(spec(), weighed=True))
    with pytest.raises(
        ValueError, match=r"sample 0 of position 7: top_p .* top_k .*vLLM tells .* engine torch or sglang"
    ):
        submit(weighed, [request(7, **filters)])
    submit(weighed, [request(7), request(VALIDATION, **filters), request(8, **filters, temperature=0.0)])
    submit(engine(), [request(7, **filters)])


@pytest.mark.parametrize(
    "given", [{"min_p": 0.1}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}, {"min_new_tokens": 2}], ids=str
)
def test_so_is_whatever_else_shifts_what_is_drawn_from(given: dict[str, Any]) -> None:
    weighed = TapedEngine(replace(spec(), weighed=True))
    name = next(iter(given))
    with pytest.raises(ValueError, match=rf"sample 0 of position 7: {name} .*vLLM tells .* engine torch"):
        submit(weighed, [request(7, **given)])
    submit(weighed, [request(VALIDATION, **given), request(8, **given, temperature=0.0)])


def test_vllm_has_names_of_its_own_for_what_few_samples_ask_for() -> None:
    """Tokens that a sample had before are a part of its prompt: they count among the least number."""
    one = engine()
    begun = BegunSample(0, (5, 6), (-1.0, -1.0), (Span(0, 0, 0, 2),))
    wanted = {"min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": {7: 1.0, 3: -2.0}, "min_new_tokens": 3}
    submit(one, [request(7), request(8, **wanted), replace(request(9, **wanted), begun=(begun,))])
    one.poll()
    plain, whole, rest = one.added()
    assert plain.further == {}
    expected = {"min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": {3: -2.0, 7: 1.0}}
    assert whole.further == {**expected, "min_tokens": 3}
    assert rest.further == {**expected, "min_tokens": 1}


def test_versions_change_between_two_steps() -> None:
    """Running samples go on; those that start later come from the new version alone."""
    one = engine()
    submit(one, [request(p, max_new_tokens=4) for p in range(5)])
    one.poll()
    one.swap(Version(0, 1))
    outputs = [output for _ in range(8) for output in one.poll()]
    spans = {output.position: output.spans for output in outputs}
    assert spans == {
        **dict.fromkeys(range(4), (Span(0, 0, 0, 1), Span(0, 1, 1, 4))),
        4: (Span(0, 1, 0, 4),),
    }
    assert [sample.cache_salt for sample in one.added()] == ["0.0"] * 4 + ["0.1"]


def test_a_gpu_is_given_back_and_samples_go_on_behind_their_tokens() -> None:
    one = engine("cuda:0")
    submit(one, [request(3, max_new_tokens=6)])
    one.poll()
    one.poll()
    one.offload()
    one.onload()
    kinds = [kind for kind, _ in one.tape.told]
    assert kinds == ["load", "add", "abort", "release", "resume", "load"]
    outputs = [output for _ in range(6) for output in one.poll()]
    first, second = one.added()
    assert (second.token_ids, second.max_tokens) == ([1, 2, 3, 3], 4)
    assert first.seed != second.seed
    assert [(output.token_ids, output.spans) for output in outputs] == [((3,) * 6, (Span(0, 0, 0, 6),))]


def test_weights_that_were_wrong_are_replaced_under_samples_that_wait() -> None:
    """They continue after the tokens of the last poll; one that was aborted meanwhile does not."""
    one = engine()
    submit(one, [request(3, max_new_tokens=4), request(4, max_new_tokens=4)])
    one.poll()
    one.begin_update(Version(0, 0))
    assert [kind for kind, _ in one.tape.told] == ["load", "add", "add", "abort", "abort"]
    assert one.poll() == []
    assert one.abort([4]) == []
    one.swap(Version(0, 0))
    outputs = [output for _ in range(4) for output in one.poll()]
    assert [(out.position, out.token_ids, out.spans) for out in outputs] == [(3, (3,) * 4, (Span(0, 0, 0, 4),))]
    assert one.progress() == {}
