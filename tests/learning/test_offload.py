"""Device memory that backends and engines hold, before and after they are offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from distflow.errors import UserError
from distflow.runtime.generating import OffloadTurns
from distflow.runtime.protocols import BackendSpec, EngineSpec, Measured
from distflow.testing.backend_contract import ragged_batch, taken, tiny_model
from distflow.testing.engine_harness import WholeGroup, submit
from distflow.types import SamplingParams, Version
from distflow.workers.backends.torch_backend import TorchBackend
from distflow.workers.engines.torch_engine import TorchEngine
from distflow.workers.offload import Offloader, bytes_on

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 1024}
SLOTS, TOKENS = 16, 512


def make_engine(device: str) -> TorchEngine:
    return TorchEngine(EngineSpec(tiny_model(dtype="float32", init=WIDE), device, SLOTS, TOKENS, 0, {}))


def load(engine: TorchEngine, backend: TorchBackend, number: int) -> None:
    engine.begin_update(Version(0, number))
    engine.update(backend.named_shards())
    engine.end_update()


def start(engine: TorchEngine) -> None:
    submit(engine, [WholeGroup(1, (3, 4, 5), 4, 0, SamplingParams(max_new_tokens=400))])
    for _ in range(8):
        assert engine.poll() == []


def make_backend(device: str, dtype: str = "float32") -> TorchBackend:
    return TorchBackend(BackendSpec(tiny_model(dtype=dtype, init=WIDE), device, True, 0, 10, {}))


def step(backend: TorchBackend) -> float:
    backend.accumulate(-backend.score(ragged_batch(), temperature=1.0, grad=True, entropy=False).logprobs_BT.sum())
    return backend.apply(35.0)


@pytest.mark.parametrize(("dtype", "width", "moments"), [("float32", 4, 8), ("float64", 8, 16), ("bfloat16", 2, 12)])
def test_a_backend_counts_weights_gradients_and_optimizer(dtype: str, width: int, moments: int) -> None:
    """Half precision has float32 masters, which count as optimizer state like the moments."""
    backend = make_backend("cpu", dtype)
    assert isinstance(backend, Measured)
    parameters = sum(tensor.numel() for _, tensor in backend.named_shards())
    counters = 4 * len(dict(backend.named_shards()))
    expected = {"weights": parameters * width, "gradients": 0, "optimizer": parameters * moments + counters}
    assert backend.device_bytes() == expected
    backend.accumulate(-backend.score(ragged_batch(), temperature=1.0, grad=True, entropy=False).logprobs_BT.sum())
    assert backend.device_bytes()["gradients"] == parameters * max(4, width)


def test_memory_that_tensors_share_counts_once() -> None:
    whole = torch.zeros(10, dtype=torch.float64)
    assert bytes_on(torch.device("cpu"), [whole, whole[3:], None, whole.view(2, 5)]) == 80
    assert bytes_on(torch.device("meta"), [whole]) == 0


def test_on_a_cpu_models_stay_and_the_engine_gives_back_what_comes_anew() -> None:
    engine, backend = make_engine("cpu"), make_backend("cpu")
    load(engine, backend, 0)
    start(engine)
    there = engine.device_bytes()
    assert there["weights"] == sum(tensor.nbytes for _, tensor in backend.named_shards())
    engine.offload()
    # Four samples of eleven tokens, of sixteen slots of 403.
    kept = engine.device_bytes()["kv"]
    assert 0 < kept < there["kv"] / 100
    assert engine.device_bytes()["weights"] == there["weights"], "whole weights are kept"
    engine.onload()
    assert engine.device_bytes() == there
    engine.begin_update(Version(0, 1))
    engine.offload()
    assert engine.device_bytes() == {"weights": 0, "kv": kept}
    engine.onload()
    load(engine, backend, 1)
    assert engine.device_bytes() == there
    held = backend.device_bytes()
    backend.offload()
    assert backend.device_bytes() == held


def test_an_engine_that_is_away_is_not_polled() -> None:
    engine, backend = make_engine("cpu"), make_backend("cpu")
    load(engine, backend, 0)
    engine.offload()
    with pytest.raises(AssertionError, match="an offloaded engine was polled"):
        engine.poll()


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Bytes of tensors on the GPU beyond those before the test, during which sums repeat to the last bit."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)

    def there() -> int:
        torch.cuda.synchronize()
        # What matrix products take for themselves, up to 64 MiB of a GPU, is kept until the next ones.
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()

    before = there()
    yield lambda: there() - before
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@on_gpu
def test_parked_tensors_come_back_as_they_were(allocated: Callable[[], int]) -> None:
    offloader, kept = Offloader(torch.device("cuda:0")), torch.zeros(1 << 20, device="cuda:0")
    parameter = torch.nn.Parameter(torch.arange(1 << 22, dtype=torch.float32, device="cuda:0"))
    values = parameter.detach().cpu()
    there = allocated()
    for _ in range(2):
        offloader.put([parameter, kept])
        offloader.wait()
        assert parameter.device.type == "cpu"
        assert parameter.is_pinned()
        assert parameter.detach().equal(values)
        assert allocated() < there / 100
        offloader.fetch()
        assert parameter.detach().cpu().equal(values)
        assert allocated() == there


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_backend_leaves_the_gpu_and_trains_on_as_if_it_had_not(dtype: str, allocated: Callable[[], int]) -> None:
    still = make_backend("cuda:0", dtype)
    norms = [step(still) for _ in range(3)]
    del still
    backend = make_backend("cuda:0", dtype)
    found = []
    for _ in range(3):
        there = allocated()
        backend.offload()
        assert sum(backend.device_bytes().values()) == 0
        assert allocated() < there / 10
        assert all(tensor.device.type == "cpu" for tensor in taken(backend).values())
        with pytest.raises(UserError, match="with offload: true models are in the host's memory"):
            step(backend)
        backend.onload()
        found.append(step(backend))
    assert found == norms


@pytest.mark.gpu
@on_gpu
def test_both_sides_take_turns_on_a_gpu(allocated: Callable[[], int]) -> None:
    """As in the runtime: new weights go from device to device, and only then are the trainer's offloaded."""
    from distflow.runtime.metrics import MetricStore
    from distflow.weights.in_place import InPlace
    from distflow.weights.receiver import WeightInbox
    from distflow.weights.transport import InprocLink

    engine, backend = make_engine("cuda:0"), make_backend("cuda:0")
    link = InprocLink("policy")
    inbox = WeightInbox(InPlace(link))
    turns = OffloadTurns(engine, {"policy": backend}, link, inbox, MetricStore(), renewed=True)
    for number in range(3):
        inbox.announce(link.publish(Version(0, number), backend.named_shards()))
        turns.generate()
        inbox.load(engine)
        turns.taken(Version(0, number))
        held = turns.held()
        assert held["policy/weights"] == held["policy/optimizer"] == 0
        if number == 0:
            start(engine)
        engine.poll()
        # Nothing but the engine: its weights, the cache, and small buffers.
        assert allocated() < 1.3 * (held["engine/weights"] + turns.held()["engine/kv"])
        turns.train()
        held = turns.held()
        assert held["engine/weights"] == held["engine/kv"] == 0
        assert allocated() < 1.3 * (held["policy/weights"] + held["policy/optimizer"])
        step(backend)
