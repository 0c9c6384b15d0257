"""An engine that takes its time: tokens at a set pace, each a function of its request alone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from distflow.runtime.protocols import EngineSpec
from distflow.testing.fakes import SHAPES, FakeEngine
from distflow.types import SampleOutput, SampleRequest

VOCABULARY = 13
TOLD_EVERY = 25


def told(tokens: int) -> str:
    """What an engine has in its worker's log once its first samples have so many tokens: a multiple of TOLD_EVERY."""
    return f"slow engine: token {tokens} of the first samples"


class SlowEngine(FakeEngine):
    """One token for every running sample in `engine_options.poll_s` seconds, whatever the model."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(slots=spec.slots, max_tokens=spec.max_tokens, vocabulary=VOCABULARY)
        self._poll_s = float(spec.options["poll_s"])
        self._polls = 0

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue samples; no token ends a sample before its time."""
        endless = [replace(r, params=replace(r.params, stop_token_ids=())) for r in requests]
        super().submit(endless)

    def poll(self) -> list[SampleOutput]:
        """Decode, slowly."""
        if self.progress():
            time.sleep(self._poll_s)
            self._polls += 1
            if self._polls % TOLD_EVERY == 0:
                print(told(self._polls), flush=True)
        return super().poll()

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Read the weights, and take them for a fake model's."""
        for _ in tensors:
            self._missing.clear()
        assert SHAPES, "a fake model has parameters"
