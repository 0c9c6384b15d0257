"""The last layer of a model: it gives tokens, values or scores, as the section's `head` says.

Importing this module is cheap: it needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

TOKENS, VALUE, SCORE = "tokens", "value", "score"
CLASSES = {
    TOKENS: "AutoModelForCausalLM",
    VALUE: "AutoModelForTokenClassification",
    SCORE: "AutoModelForSequenceClassification",
}
"""The class of transformers for each `head`."""


def head_of(model: Mapping[str, Any]) -> str:
    """The section's `head`."""
    return str(model.get("head") or TOKENS)


def has_value_head(model: PreTrainedModel) -> bool:
    """Whether the model gives one value for each token instead of logits."""
    return bool(model.config.architectures == [CLASSES[VALUE]])


def output_layer(model: PreTrainedModel) -> torch.nn.Module:
    """The module that turns the last hidden states into logits, values or scores."""
    if model.config.architectures == [CLASSES[SCORE]]:
        layer: torch.nn.Module = model.score if hasattr(model, "score") else model.classifier
    else:
        layer = model.score if has_value_head(model) else model.get_output_embeddings()
    return layer
