"""Tokens a second of engines, beside `generate` of transformers.

    python -m benchmarks generation --params 5m 54m 135m --batch 16 64 --engines torch sglang

All sample at temperature 1 from the same weights, from prompts of the same length, with the same number of new
tokens. Rounds alternate between them; the medians and their ratios to transformers are printed. An engine is there only
if its package is installed for this Python; torch:deterministic is the torch engine under run.deterministic.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from distflow.config.plugins import ENGINES
from distflow.flow.resolve import resolve
from distflow.runtime.protocols import Engine, EngineSpec
from distflow.testing.engine_harness import WholeGroup, submit
from distflow.types import SamplingParams, Version
from distflow.workers.models import build_model

GROUP = 8
DETERMINISTIC = "torch:deterministic"
SHAPES = {
    # The model of the quickstart, and its few tokens.
    "tiny": (64, 256, 2, 4, 2, 16),
    "5m": (256, 768, 6, 4, 2, 4096),
    "54m": (512, 2048, 12, 8, 4, 16384),
    # As SmolLM2-135M.
    "135m": (576, 1536, 30, 9, 3, 49152),
}
"""Hidden and intermediate size, layers, heads of queries, heads of keys and values, vocabulary."""
TOKENS = {"tiny": (4, 4), "5m": (32, 64), "54m": (32, 64), "135m": (32, 32)}
"""Of a prompt, and new ones."""


def model_section(name: str, dtype: str) -> dict[str, object]:
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[name]
    init = {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }
    return {"path": None, "init": init, "tokenizer": None, "dtype": dtype}


def prompt(row: int, length: int, vocabulary: int) -> tuple[int, ...]:
    return tuple((31 * row + 7 * i) % (vocabulary - 2) + 2 for i in range(length))


class Subjects:
    """The ways to generate `batch` samples: in groups of 8 for engines, as equal rows for transformers."""

    def __init__(self, name: str, batch: int, device: str, dtype: str, engines: Sequence[str]) -> None:
        section = model_section(name, dtype)
        self.prompt_tokens, self.new_tokens = TOKENS[name]
        self.batch = batch
        self.model = build_model(section, device=device, seed=0, load_weights=True)
        self.vocabulary: int = self.model.config.vocab_size
        self.position = 0
        longest = self.prompt_tokens + self.new_tokens
        self.engines: dict[str, Engine] = {}
        for engine in engines:
            kind, _, deterministic = engine.partition(":")
            spec = EngineSpec(section, device, batch, longest, 0, {}, deterministic=bool(deterministic))
            self.engines[engine] = resolve(ENGINES[kind])(spec)
            self.engines[engine].begin_update(Version(0, 0))
            self.engines[engine].update((n, p.detach()) for n, p in self.model.named_parameters())
            self.engines[engine].end_update()

    def calls(self) -> dict[str, Callable[[], None]]:
        """One round of each, by name."""
        return {name: lambda engine=engine: self.ours(engine) for name, engine in self.engines.items()} | {
            "transformers": self.theirs
        }

    def ours(self, engine: Engine) -> None:
        params = SamplingParams(max_new_tokens=self.new_tokens)
        requests = []
        for row in range(self.batch // GROUP):
            self.position += 1
            tokens = prompt(row, self.prompt_tokens, self.vocabulary)
            requests.append(WholeGroup(self.position, tokens, GROUP, 0, params))
        submit(engine, requests)
        produced = 0
        while engine.progress():
            produced += sum(len(output.token_ids) for output in engine.poll())
        assert produced == self.batch * self.new_tokens, "all samples are of full length"

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()

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
    parser.add_argument("--params", choices=sorted(SHAPES), nargs="+", default=["5m"])
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--engines", choices=[*sorted(ENGINES), DETERMINISTIC], nargs="+", default=["torch"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for params in args.params:
        for batch in args.batch:
            subjects = Subjects(params, batch, args.device, args.dtype, args.engines)
            calls = subjects.calls()
            for call in calls.values():
                call()
            rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(args.rounds)]
            subjects.close()
            median = {name: statistics.median(took[name] for took in rounds) for name in calls}
            tokens = batch * subjects.new_tokens
            for name, took in median.items():
                print(
                    f"{params:>5} {args.dtype} batch {batch:4d}: {name:12s} {tokens / took:8.0f} tok/s, "
                    f"{1e3 * took / subjects.new_tokens:7.2f} ms a token of all, "
                    f"{median['transformers'] / took:.2f} x transformers",
                    flush=True,
                )
