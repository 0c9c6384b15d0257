"""Decentralised, multi-controller runtime for reinforcement-learning post-training of language models.

The names most users need are re-exported lazily, so that `import distflow` costs nothing and never imports torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

_HERE = Path(__file__).resolve().parent
# The folder itself, where Python has come here by a link.
__path__[:] = [str(_HERE)]
# In a checkout, workers/, launch/ and recipes/ lie beside this folder: make them distflow.workers and so on,
# as setup.cfg does for an installed package.
if (_HERE.parent / "setup.cfg").is_file() and (_HERE.parent / "workers").is_dir():
    __path__.append(str(_HERE.parent))

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Client",
    "Completion",
    "ContextFull",
    "Episode",
    "Generate",
    "Ragged",
    "Run",
    "SamplingParams",
    "StepContext",
    "launch",
    "load_run",
    "step",
]

_LAZY = {
    "Batch": "distflow.data.batch",
    "Client": "distflow.client",
    "Completion": "distflow.types",
    "ContextFull": "distflow.runtime.attempt",
    "Episode": "distflow.types",
    "Generate": "distflow.runtime.generate_step",
    "Ragged": "distflow.data.batch",
    "Run": "distflow.launch.python",
    "SamplingParams": "distflow.types",
    "StepContext": "distflow.runtime.steps",
    "load_run": "distflow.launch.python",
    "step": "distflow.flow.step",
}

if TYPE_CHECKING:
    from distflow.client import Client
    from distflow.data.batch import Batch, Ragged
    from distflow.flow.step import step
    from distflow.launch.python import Run, launch, load_run
    from distflow.runtime.attempt import ContextFull
    from distflow.runtime.generate_step import Generate
    from distflow.runtime.steps import StepContext
    from distflow.types import Completion, Episode, SamplingParams


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> object:
    if name == "launch":
        # The package, which can be called.
        return importlib.import_module("distflow.launch")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'distflow' has no attribute {name!r}")
