"""Seconds that an engine stands still while new weights are put into it, beside a plain copy.

    python -m benchmarks updates --params 135m

The torch engine, and SGLang whose processes map the weights or are sent them, as one process and as two. One engine
after another, as an idle SGLang takes time from others; its rounds alternate with the copy. Medians and their ratios
are printed.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch

from benchmarks.generation import SHAPES, model_section, seconds
from distflow.config.plugins import ENGINES
from distflow.flow.resolve import resolve
from distflow.runtime.protocols import Engine, EngineSpec
from distflow.types import Version
from distflow.workers.models import build_model

SUBJECTS: dict[str, tuple[str, dict[str, object]]] = {
    "torch": ("torch", {}),
    "sglang, memory": ("sglang", {}),
    "sglang, group": ("sglang", {"update_by": "group"}),
    "sglang in 2, memory": ("sglang", {"tensor_parallel": 2}),
    "sglang in 2, group": ("sglang", {"tensor_parallel": 2, "update_by": "group"}),
}
LONGEST = 64
SLOTS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    section = model_section(args.params, "float32")
    heads, kv_heads = SHAPES[args.params][3:5]
    model = build_model(section, device="cpu", seed=0, load_weights=True)
    parameters = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    copies = [parameter.clone() for _, parameter in parameters]
    size = sum(parameter.nbytes for _, parameter in parameters)

    def copy() -> None:
        for target, (_, parameter) in zip(copies, parameters, strict=True):
            target.copy_(parameter)

    def update(engine: Engine, number: int) -> None:
        engine.begin_update(Version(0, number))
        engine.update(parameters)
        engine.end_update()

    for name, (kind, options) in SUBJECTS.items():
        if "tensor_parallel" in options and (heads % 2 or kv_heads % 2):
            print(f"{args.params:>5} {name}: not with {heads} and {kv_heads} heads")
            continue
        engine: Engine = resolve(ENGINES[kind])(EngineSpec(section, "cpu", SLOTS, LONGEST, 0, options))
        update(engine, 0)
        copied, updated = [], []
        for number in range(1, args.rounds + 1):
            copied.append(seconds(copy))
            updated.append(seconds(partial(update, engine, number)))
        engine.close()
        took, ratio = statistics.median(updated), statistics.median(updated) / statistics.median(copied)
        print(f"{args.params:>5} {size / 1e6:.0f} MB: {name:20s} {1e3 * took:8.1f} ms, {ratio:.1f} x copy", flush=True)
