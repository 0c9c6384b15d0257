"""The parts of `python -m benchmarks on_gpu`: each measures what is, and returns it as plain data.

`rehearsed` settings are a tiny model on a CPU: what is then measured means nothing, but every line has run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.qwen2 import modeling_qwen2

from distflow.config.schema import OptimizerConfig
from distflow.data.batch import Batch, Ragged
from distflow.flow.estimate import estimate
from distflow.flow.plan import Plan
from distflow.flow.recipe_check import plan_recipe
from distflow.runtime.protocols import BackendSpec
from distflow.sim.fitting import fit_decode, fit_training
from distflow.sim.profiling import measure
from distflow.types import Version
from distflow.weights.segments.shm import ShmPublisher, ShmReader
from distflow.workers.backends.torch_backend import TorchBackend

GIB = 1 << 30
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}
"""Dense bfloat16, from the data sheets."""
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes per second of the memory, likewise."""
QWEN_1_5B = {
    **{"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
    **{"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "max_position_embeddings": 32768,
}
QWEN_7B = {
    **{"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "max_position_embeddings": 32768,
}
TINY = {
    **{"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64, "tie_word_embeddings": True},
    "max_position_embeddings": 128,
}
ROOT = Path(__file__).resolve().parents[2]
LOADED = (modeling_qwen2,)
"""Loaded before parts are forked, so that no part waits for it."""
CHARACTERS = "0123456789+-*/=?() ABCDEFGHIJKLMNOP"
"""That prompts of the quickstart have, and some more."""
LORA = {"rank": 16, "alpha": 32.0, "targets": "all-linear"}
SMALL_CARD = 24 * GIB


@dataclass(frozen=True)
class Setting:
    """How large everything is, and where."""

    device: str = "cuda:0"
    dtype: str = "bfloat16"
    model: dict[str, Any] = field(default_factory=lambda: dict(QWEN_1_5B))
    large: dict[str, Any] = field(default_factory=lambda: dict(QWEN_7B))
    slots: int = 64
    prompt: int = 512
    response: int = 500
    longest: int = 2048
    samples: int = 16
    budget: int = 8704
    copied: int = 3 * GIB
    steps: int = 3

    @classmethod
    def rehearsed(cls) -> Setting:
        """Tiny, on a CPU."""
        tiny = {"model": dict(TINY), "large": dict(TINY), "copied": 1 << 20, "steps": 1}
        return cls("cpu", "float32", slots=2, prompt=8, response=6, longest=24, samples=2, budget=64, **tiny)

    @property
    def on_gpu(self) -> bool:
        """Whether it is no rehearsal."""
        return self.device != "cpu"

    def name(self) -> str:
        """The card, or cpu."""
        return torch.cuda.get_device_name() if self.on_gpu else "cpu"

    def of_card(self, figures: dict[str, float]) -> float | None:
        """What a table says of the card, if anything."""
        return next((figure for name, figure in figures.items() if name in self.name()), None)


def decode(setting: Setting) -> dict[str, Any]:
    """A decode step of the torch engine, sampling included, as `distflow profile` measures it, beside reading weights.

    The engine computes eagerly; there is no other way yet.
    """
    with drawn(setting, setting.model) as folder:
        plan = planned(setting, folder, "layout=split", f"layout.pools.rollout.slots={setting.slots}")
        found = measure(plan, lambda what: print(what, flush=True))
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    bandwidth = setting.of_card(BANDWIDTH)
    decoded, off_decode = fit_decode(found.decode, found.prefill)
    trained, off_train = fit_training(found.train, found.apply_s)
    return {
        "mode": "eager",
        "measured": asdict(found),
        "decode": {**asdict(decoded), "error": str(off_decode)},
        "train": {**asdict(trained), "error": str(off_train)},
        "times_the_memory_bound": bandwidth
        and {f"{one.samples} x {one.context:.0f}": one.seconds * bandwidth / size for one in found.decode},
    }


def update(setting: Setting) -> dict[str, Any]:
    """Forward and backward of a group, and an optimizer step: packed or padded, recomputed or not, with entropy or not.

    Beside the peak stands what the plan expects.
    """
    rows = []
    with drawn(setting, setting.model) as folder:
        for packed, recomputed in product((True, False), (True, False)):
            rows += [{"packed": packed, "recomputed": recomputed, **row} for row in _updates(
                setting, folder, packed=packed, recomputed=recomputed
            )]  # fmt: skip
    return {"rows": rows}


def _updates(setting: Setting, folder: Path, *, packed: bool, recomputed: bool) -> Iterator[dict[str, Any]]:
    section = section_of(setting, {"path": str(folder), "gradient_checkpointing": recomputed})
    backend = TorchBackend(BackendSpec(section, setting.device, True, 0, 10, {"packed": packed}))
    count = sum(tensor.numel() for _, tensor in backend.named_shards())
    whole = group(setting, setting.samples)
    half = group(setting, max(1, setting.samples // 2))
    # Padded, half of the rows fill the budget.
    parts = [whole] if packed else [half, half]
    tokens = setting.samples * (setting.prompt + setting.response)
    expected = _expected(setting, folder, packed=packed, recomputed=recomputed)
    for entropy in (True, False):
        train = _training(setting, backend, parts, entropy=entropy)
        try:
            peak = _peak_of(setting, train)
            seconds = statistics.median(_seconds(setting, train) for _ in range(3))
            apply_s = _seconds(setting, lambda: backend.apply(1.0))
        except torch.OutOfMemoryError as error:
            yield {"entropy": entropy, "out_of_memory": str(error)}
            return
        flops, limit = 6.0 * count * tokens, setting.of_card(PEAK_FLOPS)
        yield {
            **{"entropy": entropy, "seconds": seconds, "tokens_s": tokens / seconds, "apply_s": apply_s},
            **{"mfu": limit and flops / seconds / limit, "peak_gib": peak / GIB, "planned_gib": expected / GIB},
        }
    backend.close()


def run(setting: Setting) -> dict[str, Any]:
    """Training steps of a colocated worker that offloads, by `distflow launch`, and its own figures of them."""
    with drawn(setting, setting.model) as folder, tempfile.TemporaryDirectory() as runs:
        words = [*overrides(setting, folder), "layout=colocated", f"run.training_steps={setting.steps}"]
        words += ["layout.pools.worker.offload=true", f"layout.pools.worker.slots={setting.slots}"]
        command = [sys.executable, "-m", "distflow.launch", "launch", "quickstart", *words]
        done = subprocess.run(
            [*command, "--run", "measured", "--runs-dir", runs], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"exit {done.returncode}: {(done.stdout + done.stderr)[-4000:]}")
        lines = [
            json.loads(line)
            for path in Path(runs, "measured", "metrics").glob("*.jsonl")
            for line in path.read_text().splitlines()
        ]
    shown = ("timing_s/", "perf/", "memory/", "actor/")
    return {"steps": [{k: v for k, v in line.items() if k == "step" or k.startswith(shown)} for line in lines]}


def copies(setting: Setting) -> dict[str, Any]:
    """Weights between the device and shared memory: publishing and loading, beside one copy of all bytes.

    `pinned` is the limit, to or from page-locked memory; `pageable` the same with memory that is not.
    """
    tensors, dtype = 300, torch.bfloat16
    count = setting.copied // tensors // dtype.itemsize
    named = [(f"w{n}", torch.randn(count, device=setting.device).to(dtype)) for n in range(tensors)]
    size = sum(tensor.nbytes for _, tensor in named)
    whole = torch.empty(size, dtype=torch.uint8, device=setting.device)
    hosts = {"pageable": torch.zeros(size, dtype=torch.uint8)}
    if setting.on_gpu:
        hosts["pinned"] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    publisher = ShmPublisher(f"bench-{os.getpid()}", "policy", 0)
    reader, target = ShmReader(device=setting.device), [torch.empty_like(tensor) for _, tensor in named]
    times: dict[str, list[float]] = {"publish": [], "load": []}

    def version(number: int) -> None:
        manifests = []
        times["publish"].append(
            _seconds(setting, lambda: manifests.append(publisher.publish(Version(0, number), named)))
        )
        views = reader.fetch(publisher.summed(manifests[0]))
        pairs = list(zip(target, views, strict=True))
        times["load"].append(_seconds(setting, lambda: [to.copy_(view) for to, (_, view) in pairs]))

    try:
        for number in range(9):
            version(number)
            for name, host in hosts.items():
                times.setdefault(f"{name} down", []).append(_seconds(setting, lambda host=host: host.copy_(whole)))
                times.setdefault(f"{name} up", []).append(_seconds(setting, lambda host=host: whole.copy_(host)))
        same = all(to.equal(tensor) for to, (_, tensor) in zip(target, named, strict=True))
    finally:
        publisher.close()
    # Each segment is mapped, and locked, when it is first used.
    rates = {name: size / statistics.median(found[-5:]) / 1e9 for name, found in times.items()}
    return {"gb_s": rates, "bytes": size, "first_publish_s": times["publish"][0], "equal": same}


def lora(setting: Setting) -> dict[str, Any]:
    """A step of adapters on a 4-bit base of 7 billion parameters within the memory of a card of 24 GiB."""
    share = 1.0
    if setting.on_gpu:
        share = SMALL_CARD / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share)
    with drawn(setting, setting.large) as folder:
        changes = {"path": str(folder), "gradient_checkpointing": True, "lora": LORA, "quantize": "nf4"}
        begin = time.perf_counter()
        backend = TorchBackend(BackendSpec(section_of(setting, changes), setting.device, True, 0, 10, {}))
        built_s = time.perf_counter() - begin
    train = _training(setting, backend, [group(setting, max(1, setting.samples // 4))], entropy=True)
    peak = _peak_of(setting, train)
    seconds = statistics.median(_seconds(setting, train) for _ in range(3))
    apply_s = _seconds(setting, lambda: backend.apply(1.0))
    backend.close()
    rows = max(1, setting.samples // 4)
    tokens = rows * (setting.prompt + setting.response)
    figures = {"built_s": built_s, "seconds": seconds, "apply_s": apply_s, "tokens_s": tokens / seconds}
    return {**figures, "share": share, "peak_gib": peak / GIB}


def out_of_memory(setting: Setting) -> dict[str, Any]:
    """What a micro-batch that does not fit ends as, and whether one that fits is computed afterwards."""
    with drawn(setting, setting.model) as folder:
        section = section_of(setting, {"path": str(folder)})
        backend = TorchBackend(BackendSpec(section, setting.device, True, 0, 10, {"packed": False}))
    small = _training(setting, backend, [group(setting, 1)], entropy=True)
    peak = _peak_of(setting, small)
    if setting.on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (peak + GIB) / total))
    try:
        _training(setting, backend, [group(setting, 8 * setting.samples)], entropy=True)()
        ended = "it fits"
    except torch.OutOfMemoryError as error:
        ended = f"{type(error).__name__}: {error}"
    if setting.on_gpu:
        torch.cuda.empty_cache()
    small()
    norm = backend.apply(1.0)
    return {"large": ended, "small_again": "computed", "norm": norm, "peak_gib": peak / GIB}


class Outcomes:
    """What pytest says of each test."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """All that will run."""
        self.found = dict.fromkeys((item.nodeid for item in session.items), "chosen")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test is over."""
        if report.when == "call" or report.outcome != "passed":
            self.found[report.nodeid] = report.outcome


def tests(setting: Setting) -> dict[str, Any]:
    """`pytest -m gpu`; in a rehearsal what it would run of one file."""
    chosen = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    rehearsed = ["--collect-only", str(ROOT / "tests/weights/test_page_lock.py")]
    where = [str(ROOT / "tests")] if setting.on_gpu else rehearsed
    outcomes = Outcomes()
    code = pytest.main([*chosen, *where], plugins=[outcomes])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code}")
    counts = Counter(outcomes.found.values())
    return {"counts": counts, "failed": [name for name, said in outcomes.found.items() if said == "failed"]}


# -- what parts share


@contextmanager
def drawn(setting: Setting, model: dict[str, Any]) -> Iterator[Path]:
    """A folder in shared memory with a model whose weights were drawn on the device, which is quicker than on a CPU.

    Its tokenizer has a token for each character, and as many others as the model's vocabulary.
    """
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        config = AutoConfig.for_model(**model)
        with torch.device(setting.device):
            built = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setting.dtype))
        config.architectures, config.dtype = [type(built).__name__], setting.dtype
        config.save_pretrained(folder)
        save_model(built, str(Path(folder, "model.safetensors")), {"format": "pt"})
        del built
        words = ["<pad>", "<eos>", *CHARACTERS]
        words += [f"w{n}" for n in range(len(words), model["vocab_size"])]
        tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token=words[-1]))
        tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
        special = {"pad_token": words[0], "eos_token": words[1], "unk_token": words[-1]}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
        if setting.on_gpu:
            torch.cuda.empty_cache()
        yield Path(folder)


def overrides(setting: Setting, folder: Path) -> list[str]:
    """Of the quickstart, for the model in a folder."""
    words = [f"models.policy.path={folder}", f"models.policy.tokenizer={folder}"]
    words += [f"models.policy.dtype={setting.dtype}", f"batch.tokens_per_microbatch={setting.budget}"]
    words += [f"data.max_prompt_tokens={setting.longest // 4}", f"batch.samples_per_prompt={setting.samples}"]
    new = setting.longest - setting.longest // 4
    return [*words, "batch.prompts=8", "batch.ledgers=4", f"flow.steps.sample.with.max_new_tokens={new}"]


def planned(setting: Setting, folder: Path, *words: str) -> Plan:
    """The quickstart's plan for the model in a folder."""
    return plan_recipe("quickstart", [*overrides(setting, folder), *words])[1]


def section_of(setting: Setting, changes: dict[str, Any]) -> dict[str, Any]:
    """A `models.NAME` section."""
    optimizer = OptimizerConfig().model_dump()
    plain = {"path": None, "init": None, "tokenizer": None, "dtype": setting.dtype, "optimizer": optimizer}
    return {**plain, "gradient_checkpointing": False, **changes}


def group(setting: Setting, rows: int) -> Batch:
    """Samples of one prompt."""
    prompt = [3 + n % 7 for n in range(setting.prompt)]
    response = [4 + n % 5 for n in range(setting.response)]
    return Batch(
        {
            "prompt_ids": Ragged.from_rows([prompt] * rows, torch.int64),
            "response_ids": Ragged.from_rows([response] * rows, torch.int64),
        }
    )


def _training(setting: Setting, backend: TorchBackend, parts: list[Batch], *, entropy: bool) -> Callable[[], None]:
    def train() -> None:
        for part in parts:
            scores = backend.score(part, temperature=1.0, grad=True, entropy=entropy)
            backend.accumulate(-(scores.logprobs_BT * scores.mask_BT).sum())

    return train


def _expected(setting: Setting, folder: Path, *, packed: bool, recomputed: bool) -> int:
    """Bytes of a worker that trains, as the plan has them."""
    words = ["layout=split", f"layout.pools.trainer.backend_options={{packed: {str(packed).lower()}}}"]
    plan = planned(setting, folder, *words, f"models.policy.gradient_checkpointing={str(recomputed).lower()}")
    trainer = next(worker for worker in plan.workers if worker.models)
    return estimate(plan, trainer, on_gpu=True).training


def _peak_of(setting: Setting, do: Callable[[], None]) -> int:
    """Bytes of the device's memory at most, with what was there before; 0 in a rehearsal. Warms up."""
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    do()
    return torch.cuda.max_memory_allocated() if setting.on_gpu else 0


def _seconds(setting: Setting, do: Callable[[], object]) -> float:
    if setting.on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    do()
    if setting.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begin
