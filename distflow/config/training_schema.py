"""How a model is trained: its optimizer, the schedule of the learning rate, and adapters.

As in `schema`, the text under each field is its documentation.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from distflow.config.section import Section


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        wrong = {"text": repr(text), "error": str(error)}
        raise PydanticCustomError("distflow", "{text} is not a regular expression: {error}", wrong) from error
    return text


def _targets(value: object) -> object:
    """Give one message for what is neither, for which pydantic would give two."""
    if value == "all-linear" or (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        return value
    raise PydanticCustomError("distflow", "expected all-linear or a list of names, got {given}", {"given": repr(value)})


LARGEST_LR = 1000.0
"""Of learning rates; what is larger was hardly meant."""
_Decay = Annotated[float, Field(ge=0, lt=1)]


class ParameterGroup(Section):
    """Parameters with a learning rate or weight decay of their own."""

    match: Annotated[str, AfterValidator(_pattern)] = Field(min_length=1)
    """Regular expression, searched for in the names of parameters: `norm|bias` is what most leave without decay. A
    parameter belongs to the first group that matches, and one that matches none is an error."""
    lr: float | None = Field(default=None, ge=0, le=LARGEST_LR)
    """Their peak learning rate; null: the optimizer's."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Their weight decay; null: the optimizer's."""


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw (arXiv 1711.05101); adamw_8bit, with moments of 8 bits (arXiv 2110.02861); or muon (arXiv 2502.16982) for
    the matrices within the layers, with AdamW for all else. The last two only with backend torch."""
    lr: float = Field(default=1e-6, ge=0, le=LARGEST_LR)
    """Peak learning rate. Muon's steps are scaled to the size of AdamW's, so that one rate suits both."""
    betas: tuple[_Decay, _Decay] = Field(default=(0.9, 0.999), strict=False)
    """Decay rates of the two moments."""
    eps: float = Field(default=1e-8, gt=0, le=1)
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
    min_lr: float = Field(default=0.0, ge=0, le=LARGEST_LR)
    """Learning rate at the end of the decay; for a group with an own peak, as much lower or higher as that."""


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685): beside a frozen matrix W, B · A · alpha / rank is trained instead of W."""

    rank: int = Field(default=16, ge=1, le=1 << 16)
    """Rows of A, and columns of B."""
    alpha: float = Field(default=32.0, gt=0)
    """The product of B and A counts alpha / rank times."""
    targets: Annotated[Literal["all-linear"] | list[str], BeforeValidator(_targets)] = "all-linear"
    """The layers that get them, by the ends of their names, such as `[q_proj, v_proj]`; all-linear: all linear ones but
    the output layer."""
