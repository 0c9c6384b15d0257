"""What a step with a `prefix` sees of a batch: the samples of a further model, by the names of those of the policy.

Example, prefix solver: fields group, reward, solver/reward → the step sees group, and solver/reward as reward; what it
writes as score is solver/score in the batch.
"""

from __future__ import annotations

from distflow.data.batch import Batch
from distflow.types import IDENTITY, prefixed


def own_fields(batch: Batch, prefix: str) -> Batch:
    """The batch as a step with this prefix sees it; the batch itself without one."""
    if not prefix:
        return batch
    lead = f"{prefix}/"
    known = {name: column for name, column in batch.columns.items() if name in IDENTITY}
    return Batch(known | {n.removeprefix(lead): column for n, column in batch.columns.items() if n.startswith(lead)})


def with_own(batch: Batch, seen: Batch, written: Batch, prefix: str) -> Batch:
    """The batch with what a step has written; `seen`: what it was given, `written`: that with its new columns."""
    if not prefix:
        return written
    new = {name: column for name, column in written.columns.items() if column is not seen.columns.get(name)}
    return batch.with_columns(**{prefixed(name, prefix): column for name, column in new.items()}) if new else batch
