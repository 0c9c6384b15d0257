"""Activation checkpointing: layers compute their activations again in the backward pass."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def recompute_activations(model: PreTrainedModel) -> None:
    """Make all layers of a model in evaluation mode do so."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers recomputes only in layers in training mode; the dropout inside them stays off.
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
