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


class SlowEngine(FakeEngine):
    """One token for every running sample in `engine_options.poll_s` seconds, whatever the model."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(slots=spec.slots, max_tokens=spec.max_tokens, vocabulary=VOCABULARY)
        self._poll_s = float(spec.options["poll_s"])

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue samples; no token ends a sample before its time."""
        endless = [replace(r, params=replace(r.params, stop_token_ids=())) for r in requests]
        super().submit(endless)

    def poll(self) -> list[SampleOutput]:
        """Decode, slowly."""
        if self.progress():
            time.sleep(self._poll_s)
        return super().poll()

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Read the weights, and take them for a fake model's."""
        for _ in tensors:
            self._missing.clear()
        assert SHAPES, "a fake model has parameters"
