"""Published adapters: an engine's change of log-probs beside the trainer's, and the bytes of a version.

    make smollm2
    python -m benchmarks lora_publishing

Two replicas train adapters of the real SmolLM2-135M on the answers to a reasoning-gym task, with optimizer and
gradients divided by ZeRO 2. The first one publishes every version into shared memory; the engine in this process loads
it with the checks of a run. Both sides score the same chats, which are not trained on, with every version. Printed are,
in nats a token, mean (largest): how much log-probs have changed since the first version, by how much the two sides'
changes differ, and by how much their log-probs do; then the bytes of a version beside those of the whole model. Exit
code 1 if a change differs by more than `--within`, or a version has more than `--share` of the model's bytes.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec import structs
from transformers.utils.logging import disable_progress_bar

from distflow.comm.collective import LOOPBACK, Collective, Rendezvous
from distflow.config.plugins import BACKENDS, ENGINES
from distflow.config.schema import ModelConfig
from distflow.data.batch import Batch, Ragged
from distflow.data.sources import reasoning_gym
from distflow.flow.resolve import resolve
from distflow.runtime.protocols import Backend, BackendSpec, EngineSpec
from distflow.runtime.weight_publisher import Canaries
from distflow.types import Version
from distflow.weights.canary import canary_rows
from distflow.weights.in_place import InPlace
from distflow.weights.manifest import Manifest
from distflow.weights.receiver import WeightInbox
from distflow.weights.segments.segment_file import SEGMENTS
from distflow.weights.segments.shm import ShmPublisher, ShmReader, segment_prefix
from distflow.workers.models import outline, torch_dtype
from distflow.workers.tokenizers import build_tokenizer
from tests.learning.processes import Members

RUN = "lora-benchmark"
REPLICAS = 2
TASK = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}
SCORED = 10
"""Chats that are scored with every version."""
TRAINED = 8
"""Chats that each replica trains on in a step."""
LONGEST, SLOTS = 128, 4
LIMIT_S = 600.0


class Chat(NamedTuple):
    """Token ids of a question and of its answer."""

    prompt: Sequence[int]
    answer: Sequence[int]


def chats(model: ModelConfig, count: int, seed: int) -> list[Chat]:
    """Questions as the model's chat template writes them, and the right answers."""
    tokenizer = build_tokenizer(model.model_dump())
    assert tokenizer.eos_token_id is not None
    tasks = reasoning_gym(**TASK, size=count, seed=seed)
    return [
        Chat(
            tokenizer.encode(tokenizer.chat_text(tasks[index].text)),
            [*tokenizer.encode(tasks[index].task["answer"]), tokenizer.eos_token_id],
        )
        for index in range(count)
    ]


def replica(
    rank: int, meeting: str, out: Connection, args: argparse.Namespace, model: ModelConfig, rows: list[list[int]]
) -> None:
    """Publishes, then trains, in turn. The first replica sends the announcements and waits until each is loaded."""
    torch.set_num_threads(1)
    disable_progress_bar()
    group = Collective(Rendezvous(rank, REPLICAS, LOOPBACK, LIMIT_S), dist.FileStore(meeting, REPLICAS), nccl=False)
    members = Members(rank, REPLICAS)
    backend: Backend = resolve(BACKENDS["deepspeed"])(
        BackendSpec(model.model_dump(), "cpu", True, 0, args.steps, {"zero": 2}, replicas=members)
    )
    backend.join()
    vocabulary = outline(model.model_dump()).config.vocab_size
    canaries, chosen = Canaries(canary_rows(vocabulary, LONGEST), model.dtype), Canaries(rows, model.dtype)
    lessons = chats(model, args.steps * REPLICAS * TRAINED, seed=0)
    publisher = ShmPublisher(RUN, "policy", 0) if rank == 0 else None
    try:
        for step in range(args.steps + 1):
            canary, scored = canaries.compute(backend), chosen.compute(backend)
            if publisher is None:
                deque(backend.named_shards(), maxlen=0)
            else:
                manifest = publisher.summed(publisher.publish(Version(0, step), backend.named_shards()))
                out.send((structs.replace(manifest, canary=canary).to_wire(), scored.logprobs))
                out.recv()
            if step < args.steps:
                of_all, lessons = lessons[: REPLICAS * TRAINED], lessons[REPLICAS * TRAINED :]
                learn(backend, of_all[rank::REPLICAS], sum(len(chat.answer) for chat in of_all))
    finally:
        if publisher is not None:
            publisher.close()
        group.close()


def learn(backend: Backend, own: Sequence[Chat], tokens: int) -> None:
    """A step on the answers; `tokens`: in those of all replicas."""
    batch = Batch(
        {
            "prompt_ids": Ragged.from_rows([chat.prompt for chat in own], torch.int64),
            "response_ids": Ragged.from_rows([chat.answer for chat in own], torch.int64),
        }
    )
    scores = backend.score(batch, temperature=1.0, grad=True, entropy=False)
    backend.accumulate(-scores.logprobs_BT[scores.mask_BT].sum())
    backend.apply(tokens)


def watch(
    args: argparse.Namespace,
    model: ModelConfig,
    announced: Connection,
    rows: Sequence[Sequence[int]],
    check: Callable[[], None],
) -> tuple[float, int]:
    """Load and score what the replicas publish. Returns by how much changes differed at most, and a version's bytes."""
    spec = EngineSpec(model.model_dump(), "cpu", SLOTS, LONGEST, 0, {})
    engine = resolve(ENGINES[args.engine])(spec)
    inbox = WeightInbox(InPlace(ShmReader()))
    first: list[torch.Tensor] = []
    worst, size = 0.0, 0
    try:
        for step in range(args.steps + 1):
            while not announced.poll(1.0):
                check()
            body, told = announced.recv()
            manifest = Manifest.from_wire(body)
            inbox.announce(manifest)
            inbox.load(engine)
            # One by one: an engine on a busy machine gives up after some seconds.
            found = [(engine.logprobs([row]) or engine.logprobs([row]))[0] for row in rows]
            announced.send(step)
            sides = [torch.tensor([value for row in side for value in row]) for side in (told, found)]
            first = first or sides
            trained, generated = (side - start for side, start in zip(sides, first, strict=True))
            print(
                f"version {step:2}: changed by {shown(trained)}; changes differ by {shown(trained - generated)}; "
                f"log-probs by {shown(sides[0] - sides[1])}",
                flush=True,
            )
            worst = max(worst, float((trained - generated).abs().max()))
            size = sum(entry.size for entry in manifest.entries)
    finally:
        inbox.close()
        engine.close()
    print(f"{len(sides[0])} tokens")
    return worst, size


def shown(nats: torch.Tensor) -> str:
    """Mean and largest size."""
    return f"{nats.abs().mean():.1e} ({nats.abs().max():.1e})"


def main() -> int:
    """1 if engine and trainer change differently, or too much is published."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="sglang")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--within", type=float, default=1e-4)
    parser.add_argument("--share", type=float, default=0.03)
    args = parser.parse_args()
    given: dict[str, Any] = {"lora": {"rank": args.rank, "alpha": 2.0 * args.rank}, "optimizer": {"lr": args.lr}}
    model = ModelConfig.model_validate({"path": args.model, "dtype": args.dtype, **given})
    disable_progress_bar()
    rows = [[*chat.prompt, *chat.answer] for chat in chats(model, SCORED, seed=1_000_000)]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder, "group"))
        replicas = [
            context.Process(target=replica, args=(rank, meeting, theirs, args, model, rows)) for rank in range(REPLICAS)
        ]

        def check() -> None:
            if any(process.exitcode for process in replicas):
                raise SystemExit("a replica has failed; its error is above")

        for process in replicas:
            process.start()
        try:
            worst, size = watch(args, model, ours, rows, check)
            for process in replicas:
                process.join(LIMIT_S)
        finally:
            for process in replicas:
                process.kill()
            for segment in SEGMENTS.glob(f"{segment_prefix(RUN)}*"):
                segment.unlink()
    whole = (
        sum(math.prod(p.shape) for p in outline(model.model_dump()).parameters())
        * torch_dtype(model.model_dump()).itemsize
    )
    print(f"{size / 1e6:.2f} MB a version; the whole model has {whole / 1e6:.2f} MB: {size / whole:.2%}")
    return int(not worst <= args.within or not size <= args.share * whole)
