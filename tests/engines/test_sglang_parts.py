"""The parts of the SGLang adapter that need no SGLang: options, samples, frames, staged weights, stand-ins."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

from distflow.errors import ProtocolError, UserError
from distflow.runtime.protocols import EngineSpec
from distflow.testing.engine_harness import WholeGroup
from distflow.types import BegunSample, SampleRequest, SamplingParams, Span, Version
from distflow.workers.engines import sglang_cpu, sglang_engine, sglang_host
from distflow.workers.engines.adapter import engine_seed, outline_model, use_of
from distflow.workers.engines.samples import NamedSamples
from distflow.workers.engines.sglang_engine import SGLangEngine, sampling_params
from distflow.workers.engines.sglang_options import SGLangOptions
from distflow.workers.engines.sglang_wire import Frames, frame
from distflow.workers.engines.staged_weights import StagedWeights, load_into_sglang

INIT = {"model_type": "qwen2", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
INIT |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True}
VERSION = Version(0, 0)
MODEL = {"path": None, "init": INIT, "tokenizer": None, "dtype": "float32"}


def spec(device: str = "cpu", slots: int = 4, **options: object) -> EngineSpec:
    return EngineSpec(MODEL, device, slots, 32, 0, options)


def arguments(given: EngineSpec) -> dict[str, object]:
    options, use = (
        SGLangOptions.parse(given.options),
        use_of(given, given.max_tokens, outline_model(MODEL, "float32").config),
    )
    options.check(use)
    return options.server_args(use, 11, 7)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tp": 2}, "tp 2: engine sglang has no such option — allowed: args, attention_backend, con"),
        ({"tensor_parallel": 0}, "tensor_parallel 0: expected 1 or more"),
        ({"update_by": "disk"}, "update_by 'disk': expected memory or group"),
        ({"update_by": None}, "update_by None: expected memory or group"),
        ({"dtype": ["float32"]}, r"dtype \['float32'\]: expected float32, bfloat16, float16"),
        ({"memory_fraction": 1.5}, "memory_fraction 1.5: expected a number between 0 and 1"),
        ({"memory_fraction": 0.5}, "memory_fraction is a fraction of a GPU's memory"),
        ({"dtype": "float64"}, "dtype 'float64': expected float32, bfloat16, float16"),
        ({"quantization": "int4"}, "quantization 'int4': expected fp8"),
        ({"quantization": "fp8"}, "quantization fp8 needs a GPU"),
        ({"max_running": -1}, "max_running -1: expected 1 or more"),
        ({"context_length": 31}, r"context_length 31 is less than the longest sample of 32 tokens"),
        ({"stream_interval": 0}, "stream_interval 0: expected 1 or more"),
        ({"start_s": 0}, "start_s 0: expected a number of seconds above 0"),
        ({"args": ["x"]}, r"args \['x'\]: expected a mapping"),
        ({"args": {"dtype": "float32", "tp_size": 1}}, "args: dtype, tp_size is set by distflow"),
        (
            {"args": {"quantization": "fp8", "mem_fraction_static": 0.5}},
            "mem_fraction_static, quantization needs a GPU",
        ),
        ({"args": {"model_path": "x"}}, "args: model_path is set by distflow"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=f"engine_options.*{message}"):
        arguments(spec(**options))


def test_a_type_that_sglang_lacks() -> None:
    wide = replace(spec(), model={**MODEL, "dtype": "float64"})
    with pytest.raises(UserError, match=r"models.NAME.dtype — float64, which SGLang cannot compute in; use float32"):
        SGLangEngine(wide)
    assert SGLangOptions.parse({"dtype": "bfloat16"}).dtype_for(wide.model) == "bfloat16"


def test_what_sglang_is_told() -> None:
    cpu = arguments(spec(max_running=2, args={"log_level": "info", "schedule_policy": "fcfs"}))
    assert cpu["device"] == "cpu"
    assert cpu["max_running_requests"] == 3, "one for the log-probs that versions are checked by"
    assert (cpu["log_level"], cpu["schedule_policy"]) == ("info", "fcfs")
    assert cpu["max_total_tokens"] == 5 * cpu["context_length"]
    gpu = arguments(spec("cuda:3", tensor_parallel=2, quantization="fp8", memory_fraction=0.4, context_length=100))
    assert (gpu["device"], gpu["base_gpu_id"], gpu["tp_size"]) == ("cuda", 3, 2)
    assert (gpu["quantization"], gpu["mem_fraction_static"]) == ("fp8", 0.4)
    assert gpu["context_length"] >= 100
    assert "max_total_tokens" not in gpu
    beside = replace(spec("cuda:3", context_length=100), shares_device=True)
    assert arguments(beside)["max_total_tokens"] == 5 * arguments(beside)["context_length"]
    named = replace(spec("cuda:3", args={"max_total_tokens": 77}), shares_device=True)
    assert arguments(named)["max_total_tokens"] == 77
    assert "attention_backend" not in gpu


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_without_sglang_the_message_says_how_to_get_it() -> None:
    with pytest.raises(UserError, match="SGLang is not installed for this Python; `make test-venv`"):
        SGLangEngine(spec())


def test_wrong_settings_are_found_before_anything_starts() -> None:
    with pytest.raises(UserError, match="tensor_parallel 3: the model has 2 attention heads"):
        SGLangEngine(spec(tensor_parallel=3))
    with pytest.raises(UserError, match=r"slots of 65 tokens .* longer than the model's 64 positions"):
        SGLangEngine(EngineSpec(MODEL, "cpu", 4, 65, 0, {}))
    with pytest.raises(UserError, match="0 slots; expected at least 1"):
        SGLangEngine(spec(slots=0))


def test_memory_that_cannot_be_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"layout.pools.worker.offload — engine 'sglang' gives memory back on GPUs"):
        SGLangEngine(replace(spec(), offload=True, pool="worker"))
    monkeypatch.setattr(sglang_engine, "memory_saver", lambda device: False)
    with pytest.raises(UserError, match=r"layout.pools.worker.offload — engine 'sglang' needs .* torch_memory_saver"):
        SGLangEngine(replace(spec("cuda:0"), offload=True, pool="worker"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"seed": 1, "page": 2}, "engine_options.args: SGLang 9 has no argument page, seed"),
        ({"attention_backend": "fa33"}, "engine_options.attention_backend 'fa33': SGLang 9 has no such backend — did"),
        ({"prefill_attention_backend": "x"}, "engine_options.args.prefill_attention_backend 'x': SGLang 9 has no such"),
        ({"attention_backend": "fa3", "prefill_attention_backend": None}, None),
    ],
)
def test_what_sglang_would_fail_with_after_its_start(args: dict[str, object], message: str | None) -> None:
    told = sglang_host.refusal("SGLang 9", args, sglang_host.ATTENTION, ("triton", "fa3"))
    assert told is None if message is None else str(told).startswith(message)


def test_the_outline_of_a_model() -> None:
    outline = outline_model({**MODEL, "init": {**INIT, "eos_token_id": 3}}, "bfloat16")
    assert outline.shapes["model.embed_tokens.weight"] == (11, 8)
    assert outline.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert '"eos_token_id": null' in outline.text
    assert '"architectures": ["Qwen2ForCausalLM"]' in outline.text


def test_frames_arrive_whole_however_they_are_cut() -> None:
    messages = [{"tokens": [["1.", [3, 4], [-0.5, -1.25], [[0, 2, 0]], ""]]}, {"done": 7}]
    data = b"".join(map(frame, messages))
    frames = Frames()
    assert [message for i in range(len(data)) for message in frames.feed(data[i : i + 1])] == messages
    assert list(Frames().feed(data)) == messages


def test_a_frame_of_impossible_length_is_refused() -> None:
    with pytest.raises(ProtocolError, match="message of 4294967295 bytes announced"):
        list(Frames().feed(b"\xff" * 8))


def test_weights_are_loaded_from_where_they_are_staged() -> None:
    class Model(torch.nn.Module):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            self.loaded = {name: tensor.clone() for name, tensor in weights}

    staged = StagedWeights({"a": (3, 5), "empty": (0, 2), "b": (7,)}, torch.bfloat16, {"tied": "a"})
    staged.tensors["a"].copy_(torch.arange(15).view(3, 5))
    staged.tensors["b"].copy_(torch.full((7,), 2.5))
    assert staged.tensors["tied"] is staged.tensors["a"]
    model = Model()
    load_into_sglang(model, [(staged.described(os.getpid(), staged.descriptor), torch.empty(0))])
    assert list(model.loaded) == ["a", "empty", "b"]
    for name, tensor in model.loaded.items():
        assert torch.equal(tensor, staged.tensors[name])
    staged.close()


def requests(
    position: int, samples: int = 2, begun: tuple[BegunSample, ...] = (), **params: object
) -> list[SampleRequest]:
    settings = SamplingParams(**params)  # type: ignore[arg-type]
    return WholeGroup(position, (1, 2), samples, 0, settings, begun).requests()


def test_samples_put_back_keep_what_they_have() -> None:
    """Spans of new tokens follow those of earlier ones; adjacent spans of one version are merged."""
    samples = NamedSamples(slots=2)
    samples.add(requests(5, max_new_tokens=9))
    first, second = samples.admit(VERSION)
    samples.take(first, [7, 8, 9], [-1.0, -2.0, -3.0], "", [[0, 1, 0], [0, 2, 2]])
    assert samples.put_back(begun=False) == [second]
    assert samples.put_back(begun=True) == [first]
    assert samples.progress() == {5: 3}
    assert samples.outputs() == []
    started = samples.admit(VERSION)
    assert not {first, second} & started.keys()
    again_name, again = next((name, sample) for name, sample in started.items() if sample.request.sample == 0)
    assert again.input_ids == [1, 2, 7, 8, 9]
    assert sampling_params(again, 11)["max_new_tokens"] == 6
    assert samples.take(first, [1], [-9.0], "stop", [[0, 1, 0]]) == []
    (output,) = samples.take(again_name, [4], [-4.0], "stop", [[0, 2, 0]])
    assert output.token_ids == (7, 8, 9, 4)
    assert output.logprobs == (-1.0, -2.0, -3.0, -4.0)
    assert output.spans == (Span(0, 1, 0, 2), Span(0, 2, 2, 4))


@pytest.mark.parametrize(
    "params, expected",
    [
        ({}, {"temperature": 1.0}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"top_k": 1}, {"temperature": 1.0, "top_k": 11, "top_p": 1e-6}),
        ({"top_k": 5}, {"temperature": 1.0, "top_k": 5, "top_p": 1.0}),
        ({"top_k": 500}, {"temperature": 1.0, "top_k": 11, "top_p": 1.0}),
        ({"top_p": 0.5}, {"temperature": 1.0, "top_k": 11, "top_p": 0.5}),
        ({"min_p": 0.2}, {"temperature": 1.0, "top_k": 11, "top_p": 1.0, "min_p": 0.2}),
        ({"min_p": 0.2, "temperature": 0.0}, {"temperature": 0.0}),
        (
            {"logit_bias": {7: 1.5, 3: -2.0}},
            {"temperature": 1.0, "top_k": 11, "top_p": 1.0, "logit_bias": {"3": -2.0, "7": 1.5}},
        ),
    ],
    ids=str,
)
def test_filters_always_have_a_bound(params: dict[str, object], expected: dict[str, object]) -> None:
    samples = NamedSamples(slots=1)
    samples.add(requests(0, samples=1, **params))
    (sample,) = samples.admit(VERSION).values()
    wanted = {"max_new_tokens": 16, "stop_token_ids": [], **expected}
    assert sampling_params(sample, 11) == wanted


def test_a_sample_that_has_to_repeat_starts_again_with_its_adapter() -> None:
    """Under run.deterministic: a sample begun elsewhere would otherwise continue with other random numbers."""
    begun = BegunSample(0, (7,), (-1.0,), (Span(0, 0, 0, 1),))
    seeds = []
    for given in ((), (begun,)):
        samples = NamedSamples(slots=3, continues=False)
        samples.add(requests(5, samples=3, begun=given))
        running = samples.admit(VERSION)
        started = list(running.values())
        assert [sample.input_ids for sample in started] == [[1, 2]] * 3
        seeds.append({s.request.sample: sampling_params(s, 11, seeded=True)["sampling_seed"] for s in started})
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 3
    assert "sampling_seed" not in sampling_params(started[0], 11)
    samples.take(next(iter(running)), [7], [-1.0], "")
    samples.put_back(begun=True)
    assert [sample.input_ids for sample in samples.waiting] == [[1, 2]] * 3


def test_no_life_of_a_worker_draws_the_numbers_of_another() -> None:
    drawn = itertools.product(("rollout/0", "rollout/1"), range(2), range(3))
    seeds = [engine_seed(replace(spec(), worker=worker, seed=seed, life=life)) for worker, seed, life in drawn]
    assert len(set(seeds)) == len(seeds)
    assert engine_seed(spec()) == engine_seed(spec())


def test_greedy_samples_have_no_doubt() -> None:
    samples = NamedSamples(slots=1)
    samples.add(requests(0, samples=1, temperature=0.0))
    (name,) = samples.admit(VERSION)
    (output,) = samples.take(name, [4, 5], [-0.7, -0.1], "length")
    assert output.logprobs == (0.0, 0.0)


def test_whatever_ends_a_task_of_the_serving_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the worker would wait forever for a sample, or for weights to be loaded."""
    for name in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.io_struct", "sglang.srt.utils"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    modules = [f"distflow.workers.engines.sglang_{name}" for name in ("updates", "serving")]
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)
    serving = importlib.import_module(modules[1])
    for name in modules:
        del sys.modules[name]

    class Manager:
        async def generate_request(self, request: object, _: None) -> AsyncIterator[dict[str, object]]:
            raise KeyError("meta")
            yield {}

        async def pause_generation(self, request: object) -> None:
            raise RuntimeError("no such thing")

    async def talk() -> list[dict[str, object]]:
        manager = Manager()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            served = asyncio.create_task(
                serving.Serving(manager, serving.MappedUpdates(manager, 1), theirs, Frames()).serve()
            )
            sample = {"rid": "1.", "ids": [1], "params": {}, "filtered": False, "cache_salt": ""}
            ours.sendall(frame({"do": "generate", "samples": [sample]}))
            ours.sendall(frame({"do": "load", "ask": 7, "version": [0, 1]}))
            ours.settimeout(10.0)
            frames, answers = Frames(), []
            while len(answers) < 2:
                answers += frames.feed(await asyncio.to_thread(ours.recv, 1 << 16))
            ours.shutdown(socket.SHUT_WR)
            await asyncio.wait_for(served, 10.0)
        return answers

    answers = asyncio.run(talk())
    assert {"lost": "1.", "text": "KeyError('meta')"} in answers
    assert {"failed": 7, "text": "RuntimeError('no such thing')"} in answers


def test_stand_ins_are_there_only_for_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, sglang_cpu.StandIns()])
    for name in sglang_cpu.STAND_INS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    kernels = importlib.import_module("sgl_kernel")
    with pytest.raises(NotImplementedError, match=r"sgl_kernel.topk_softmax is not installed on this machine"):
        kernels.topk_softmax(1, 2)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("sgl_kernel.scalar_type")
    table = torch.zeros(3, 6, dtype=torch.int32)
    starts, ends = torch.tensor([1, 0]), torch.tensor([3, 1])
    kernels.assign_req_to_token_pool_cpu(torch.tensor([2, 0]), table, starts, ends, torch.tensor([7, 8, 9]), 6)
    assert table.tolist() == [[9, 0, 0, 0, 0, 0], [0] * 6, [0, 7, 8, 0, 0, 0]]
    for name in sglang_cpu.STAND_INS:
        sys.modules.pop(name, None)
