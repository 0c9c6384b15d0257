"""What the samples of a batch look like, under the field's usual metric names. A few numpy calls a batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distflow.algorithms.advantages import zero_spread_share
from distflow.data.batch import Batch
from distflow.runtime.metrics import MetricStore
from distflow.types import FINISH_REASONS, REWARD_PARTS

_NAMES = {"score": "critic/score", "reward": "critic/rewards"}


def describe(batch: Batch, metrics: MetricStore) -> None:
    """Lengths, scores, rewards and advantages of the rows handed to an update; fields that are absent are left out."""
    if not len(batch):
        return
    _spread(metrics, "response_length", batch.ragged("response_ids").lengths.numpy())
    _spread(metrics, "prompt_length", batch.ragged("prompt_ids").lengths.numpy())
    _spread(metrics, "critic/advantages", batch.ragged("advantage").values.numpy())
    if "finish_reason" in batch:
        cut = batch.dense("finish_reason").numpy() == FINISH_REASONS.index("length")
        metrics.mean("response_length/clip_ratio", float(cut.mean()), len(cut))
    for field, name in _NAMES.items():
        if field in batch:
            _spread(metrics, name, batch.dense(field).numpy())
    for field in batch.columns:
        if field.startswith(REWARD_PARTS):
            _spread(metrics, field, batch.dense(field).numpy())
    if "reward" in batch and "group" in batch:
        share, groups = zero_spread_share(batch.dense("reward"), batch.dense("group"))
        metrics.mean("group/zero_std_frac", share, groups)


def _spread(metrics: MetricStore, name: str, values: NDArray[np.float64]) -> None:
    # A part of the reward that a failed sample does not have is NaN.
    known = values[~np.isnan(values)]
    if known.size:
        metrics.mean(f"{name}/mean", float(known.mean(dtype=np.float64)), known.size)
        metrics.max(f"{name}/max", float(known.max()))
        metrics.min(f"{name}/min", float(known.min()))
