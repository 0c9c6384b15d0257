"""The trainer's half of a canary: the log-probs of fixed tokens, computed with each version that is published."""

from __future__ import annotations

import torch

from distflow.config.plugins import VOCABULARY
from distflow.data.batch import Batch, Ragged
from distflow.flow.resolve import resolve
from distflow.runtime.assembly import Setting
from distflow.runtime.lockstep import LockstepModel
from distflow.runtime.protocols import Backend
from distflow.weights.canary import Canary, Rows, canary_rows


class Canaries:
    """Of one model: the same rows with every version. `precision` is the type that the model computes in."""

    def __init__(self, rows: Rows, precision: str) -> None:
        self._rows = tuple(map(tuple, rows))
        self._precision = precision
        self._batch = Batch(
            {
                "prompt_ids": Ragged.from_rows([row[:1] for row in rows], torch.int64),
                "response_ids": Ragged.from_rows([row[1:] for row in rows], torch.int64),
            }
        )

    def compute(self, model: Backend | LockstepModel) -> Canary:
        """With the weights as they are now; of a divided model all replicas call it at the same point."""
        if isinstance(model, LockstepModel):
            scores = model.score_together(self._batch)
        else:
            scores = model.score(self._batch, temperature=1.0, grad=False, entropy=False)
        found = scores.logprobs_BT.double().tolist()
        logprobs = tuple(tuple(line[: len(row) - 1]) for line, row in zip(found, self._rows, strict=True))
        return Canary(self._rows, logprobs, self._precision)


def build_canaries(setting: Setting) -> Canaries:
    """For the primary model; rows are no longer than a sample, which every engine has room for."""
    plan, recipe = setting.plan, setting.recipe
    section = plan.recipe.models[plan.primary]
    vocabulary = int(resolve(VOCABULARY)(section.model_dump()))
    longest = recipe.data.max_prompt_tokens + int(setting.generate_step.settings["max_new_tokens"])
    return Canaries(canary_rows(vocabulary, longest), section.dtype)
