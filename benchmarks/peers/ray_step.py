"""The exchange of one training step by systems that are built on Ray, with the bytes of benchmark `step`.

    python ray_step.py --workers 8 --samples 4096 --tokens 1024

Half of the workers have generated the samples, of three int64 and three float32 fields a token; the others train on
them, and read every byte once. Contestants:

- `verl`: verl's single controller. One call of the generating group and one of the training group a step; rows are
  collected, concatenated, cut and dispatched by the driver.
- `verl_whole_step`: the calls that verl's trainer makes in a step: generate, log-probs, reference log-probs, update.
  The fields come from different workers, and each call takes along what the driver has by then.
- `ray_pull`: each generating worker returns a piece for each training worker, and they pull from each other's object
  store; the driver moves references. Torch tensors, as these systems have them.
- `ray_pull_numpy`: the same with NumPy arrays, which Ray maps without a copy.
- `siirl`: siiRL's data coordinator: each sample is put by itself, and the coordinator knows all of them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import local_ray
from taking_turns import serve

os.environ["LOGURU_LEVEL"] = "ERROR"

import numpy as np
import ray
import torch

FIELDS = {
    "input_ids": "int64",
    "attention_mask": "int64",
    "position_ids": "int64",
    "old_log_probs": "float32",
    "ref_log_probs": "float32",
    "advantages": "float32",
}
STORE_BYTES = 2 << 30


def columns(rows: int, tokens: int) -> dict[str, Any]:
    """The fields of so many samples."""
    return {name: np.ones((rows, tokens), dtype=dtype) for name, dtype in FIELDS.items()}


def pieces(table: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The rows in `count` parts of equal size, as views."""
    rows = len(table["input_ids"]) // count
    return [{name: column[rows * n : rows * (n + 1)] for name, column in table.items()} for n in range(count)]


def timed(work: Callable[[], object]) -> Callable[[], dict[str, float]]:
    """A turn that tells its seconds."""

    def turn() -> dict[str, float]:
        began = time.perf_counter()
        work()
        return {"seconds": time.perf_counter() - began}

    return turn


def ray_pull(half: int, samples: int, tokens: int, as_torch: bool) -> Callable[[], object]:
    """References through the driver, bytes between the workers."""

    class Pulling:
        def make(self) -> None:
            torch.set_num_threads(1)
            made = columns(samples // half, tokens)
            self.table = {name: torch.from_numpy(column) for name, column in made.items()} if as_torch else made

        def parts(self) -> Any:
            cut = pieces(self.table, half)
            # A slice of a tensor would take its whole storage along.
            sent = [{n: c.clone() for n, c in part.items()} for part in cut] if as_torch else cut
            return tuple(sent) if half > 1 else sent[0]

        def read(self, *parts: Mapping[str, Any]) -> float:
            return float(sum(column.sum() for part in parts for column in part.values()))

    actor: Any = ray.remote(num_cpus=0)(Pulling)
    generating, training = ([actor.remote() for _ in range(half)] for _ in range(2))
    ray.get([worker.make.remote() for worker in generating])

    def step() -> None:
        made = [worker.parts.options(num_returns=half).remote() for worker in generating]
        made = made if half > 1 else [[one] for one in made]
        ray.get([worker.read.remote(*[parts[n] for parts in made]) for n, worker in enumerate(training)])

    return step


def verl(half: int, samples: int, tokens: int) -> dict[str, Callable[[], object]]:
    """verl's worker groups, as its trainer drives them."""
    from verl import DataProto
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    @ray.remote
    class Dispatched(Worker):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.set_num_threads(1)
            rows = columns(samples // half, tokens)
            self.table = {name: torch.from_numpy(column) for name, column in rows.items()}

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def generate(self, prompts: Any) -> Any:
            return DataProto.from_dict(tensors={name: self.table[name] for name in prompts.meta_info["fields"]})

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def field(self, batch: Any) -> Any:
            name = batch.meta_info["field"]
            return DataProto.from_dict(tensors={name: self.table[name]})

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def update(self, batch: Any) -> Any:
            return DataProto(meta_info={"metrics": {"sum": float(sum(c.sum() for c in batch.batch.values()))}})

    def group() -> Any:
        pool = RayResourcePool([half], use_gpu=False, max_colocate_count=1)
        return RayWorkerGroup(pool, RayClassWithInitArgs(Dispatched), device_name="cpu")

    rollout, actor = group(), group()

    def prompts(fields: list[str]) -> Any:
        return DataProto.from_dict(tensors={"idx": torch.arange(samples)}, meta_info={"fields": fields})

    def one_hop() -> None:
        actor.update(rollout.generate(prompts(list(FIELDS))))

    def whole_step() -> None:
        batch = prompts(["input_ids", "attention_mask", "position_ids"])
        batch = batch.union(rollout.generate(batch))
        for name in ("old_log_probs", "ref_log_probs"):
            batch.meta_info["field"] = name
            batch = batch.union(actor.field(batch))
        batch.batch["advantages"] = torch.ones(samples, tokens)
        actor.update(batch)

    return {"verl": one_hop, "verl_whole_step": whole_step}


def siirl(half: int, samples: int, tokens: int) -> Callable[[], object]:
    """One put a sample, and its metadata through one actor."""
    from siirl.data_coordinator.data_buffer import DataCoordinator
    from siirl.data_coordinator.sample import Sample, SampleInfo

    named = {**{name: name for name in FIELDS}, "ref_log_probs": "ref_log_prob"}

    class Coordinated:
        def __init__(self, number: int, coordinator: Any) -> None:
            self.number, self.coordinator = number, coordinator
            self.node = ray.get_runtime_context().get_node_id()
            self.table = columns(samples // half, tokens)
            self.kept: list[Any] = []

        def put(self, step: int) -> None:
            infos = []
            self.kept = []
            for row in range(samples // half):
                made = Sample(**{named[name]: column[row] for name, column in self.table.items()})
                self.kept.append(ray.put(made))
                uid = f"{step}-{self.number}-{row}"
                infos.append(SampleInfo(sum_tokens=tokens, uid=uid, dict_info={"key": "a"}))
            ray.get(self.coordinator.put_batch.remote(infos, self.kept, self.node))

        def read(self) -> int:
            # As its data loader asks for a batch that is balanced over the training workers.
            share = samples // half
            refs = ray.get(
                self.coordinator.get_batch.remote(
                    share, self.number, filter_plugin=lambda info: True, balance_partitions=half
                )
            )
            found = ray.get(refs)
            stacked = [np.stack([getattr(one, name) for one in found]) for name in named.values()]
            sum(column.sum() for column in stacked)
            return len(found)

    coordinator = DataCoordinator.remote(nnodes=1, ppo_mini_batch_size=samples, world_size=half)
    actor: Any = ray.remote(num_cpus=0)(Coordinated)
    generating, training = ([actor.remote(n, coordinator) for n in range(half)] for _ in range(2))
    steps = iter(range(1 << 30))

    def step() -> None:
        number = next(steps)
        ray.get([worker.put.remote(number) for worker in generating])
        rows = sum(ray.get([worker.read.remote() for worker in training]))
        assert rows == samples, f"{rows} of {samples} samples came back"
        ray.get(coordinator.reset_cache.remote())

    return step


def main() -> None:
    """Start what is installed, and take turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    sizes = (options.workers // 2, options.samples, options.tokens)
    local_ray.start(2 * options.workers, STORE_BYTES)
    turns: dict[str, Callable[[], object]] = {}
    left_out: dict[str, str] = {}
    makers: dict[str, Callable[[], Mapping[str, Callable[[], object]]]] = {
        "ray_pull": lambda: {"ray_pull": ray_pull(*sizes, as_torch=True)},
        "ray_pull_numpy": lambda: {"ray_pull_numpy": ray_pull(*sizes, as_torch=False)},
        "verl": lambda: verl(*sizes),
        "siirl": lambda: {"siirl": siirl(*sizes)},
    }
    for name, make in makers.items():
        try:
            turns.update(make())
        except ImportError as error:
            left_out[name] = str(error)
    serve({name: timed(work) for name, work in turns.items()}, left_out)
    ray.shutdown()


if __name__ == "__main__":
    main()
