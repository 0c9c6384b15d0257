"""How a model is trained: its optimizer and the schedule of the learning rate.

As in `schema`, the text under each field is its documentation.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from distflow.config.section import Section


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        wrong = {"text": repr(text), "error": str(error)}
        raise PydanticCustomError("distflow", "{text} is not a regular expression: {error}", wrong) from error
    return text


_Decay = Annotated[float, Field(ge=0, lt=1)]


class ParameterGroup(Section):
    """Parameters with a learning rate or weight decay of their own."""

    match: Annotated[str, AfterValidator(_pattern)] = Field(min_length=1)
    """Regular expression, searched for in the names of parameters: `norm|bias` is what most leave without decay. A
    parameter belongs to the first group that matches, and one that matches none is an error."""
    lr: float | None = Field(default=None, ge=0)
    """Their peak learning rate; null: the optimizer's."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Their weight decay; null: the optimizer's."""


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw (arXiv 1711.05101); adamw_8bit, with moments of 8 bits (arXiv 2110.02861); or muon (arXiv 2502.16982) for
    the matrices within the layers, with AdamW for all else. The last two only with backend torch."""
    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate. Muon's steps are scaled to the size of AdamW's, so that one rate suits both."""
    betas: tuple[_Decay, _Decay] = Field(default=(0.9, 0.999), strict=False)
    """Decay rates of the two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""
    momentum: _Decay = 0.95
    """Decay rate of muon's momentum."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    groups: list[ParameterGroup] = Field(default=[])
    """Parameters with settings of their own: `[{match: norm, weight_decay: 0}]`."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are clipped to this norm; null: never."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """How the learning rate decays after warm-up, to `min_lr` at the end of the run; constant: not at all; wsd: only
    in the last `decay_steps`, linearly (warm-up, stable, decay; arXiv 2404.06395)."""
    warmup_steps: int = Field(default=0, ge=0, json_schema_extra={"unit": "training steps"})
    """Training steps during which the learning rate rises from 0."""
    decay_steps: int | None = Field(default=None, ge=1, json_schema_extra={"unit": "training steps"})
    """Training steps of the decay of schedule wsd; null: a tenth of the run."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay; for a group with an own peak, as much lower or higher as that."""
