"""Algorithms as pure functions over tensors: advantages, losses, KL estimates, corrections and aggregation."""

from distflow.algorithms.losses import TokenTerms

__all__ = ["TokenTerms"]
