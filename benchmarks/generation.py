"""Tokens per second of the torch engine against `generate` of transformers, side by side in one run.

    python benchmarks/generation.py --params 5m --batch 16 64

Both sample at temperature 1 from the same weights, from prompts of the same length, with the same number of new
tokens. Rounds alternate between the two; the medians and their ratio are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from distflow.runtime.protocols import EngineSpec
from distflow.types import GroupRequest, SamplingParams, Version
from distflow.workers.engines.torch_engine import TorchEngine
from distflow.workers.models import build_model

GROUP = 8
SHAPES = {
    # The model of the quickstart, and its few tokens.
    "tiny": {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 16},
    "5m": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 4096},
}
TOKENS = {"tiny": (4, 4), "5m": (32, 64)}


def model_section(name: str) -> dict[str, object]:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    init = {"model_type": "qwen2", "tie_word_embeddings": True, **heads, **SHAPES[name]}
    return {"path": None, "init": init, "tokenizer": None, "dtype": "float32"}


def prompt(row: int, length: int, vocabulary: int) -> tuple[int, ...]:
    return tuple((31 * row + 7 * i) % (vocabulary - 2) + 2 for i in range(length))


class Subjects:
    """The two ways to generate `batch` samples: in groups of 8 for the engine, as equal rows for transformers."""

    def __init__(self, name: str, batch: int, device: str) -> None:
        section = model_section(name)
        self.prompt_tokens, self.new_tokens = TOKENS[name]
        self.batch = batch
        self.model = build_model(section, device=device, seed=0, load_weights=True)
        self.engine = TorchEngine(EngineSpec(section, device, batch, 0, 0, {}))
        self.engine.begin_update(Version(0, 0))
        self.engine.update((n, p.detach()) for n, p in self.model.named_parameters())
        self.engine.end_update()
        self.vocabulary: int = self.model.config.vocab_size
        self.position = 0

    def ours(self) -> None:
        params = SamplingParams(max_new_tokens=self.new_tokens)
        requests = []
        for row in range(self.batch // GROUP):
            self.position += 1
            tokens = prompt(row, self.prompt_tokens, self.vocabulary)
            requests.append(GroupRequest(self.position, tokens, GROUP, 0, params))
        self.engine.submit(requests)
        while self.engine.progress():
            self.engine.poll()

    @torch.inference_mode()
    def theirs(self) -> None:
        rows = [prompt(row // GROUP, self.prompt_tokens, self.vocabulary) for row in range(self.batch)]
        ids = torch.tensor(rows, device=self.model.device)
        limits = {"max_new_tokens": self.new_tokens, "min_new_tokens": self.new_tokens}
        settings = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": None}
        self.model.generate(ids, attention_mask=torch.ones_like(ids), **limits, **settings)


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", choices=sorted(SHAPES), default="5m")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for batch in args.batch:
        subjects = Subjects(args.params, batch, args.device)
        subjects.ours()
        subjects.theirs()
        pairs = [(seconds(subjects.ours), seconds(subjects.theirs)) for _ in range(args.rounds)]
        tokens = batch * subjects.new_tokens
        ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(
            f"{args.params} batch {batch:4d}: engine {tokens / ours:8.0f} tok/s "
            f"({1e3 * ours / subjects.new_tokens:.2f} ms a step), transformers {tokens / theirs:8.0f} tok/s, "
            f"ratio {theirs / ours:.2f}"
        )


if __name__ == "__main__":
    main()
