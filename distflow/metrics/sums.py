"""What stands beside a metric in a metrics file, so that those of several workers merge exactly."""

from __future__ import annotations

WEIGHT_SUFFIX = ".weight"
"""Of a mean."""
SUM_SUFFIX = ".summed"
"""Marks a sum."""
EXPLAINED = (".count", ".sum", ".squares", ".error_sum", ".squared_errors")
"""Of an explained variance: the number of values, their sum, that of their squares, and both of the errors."""


def explained_variance(count: float, total: float, squares: float, errors: float, squared_errors: float) -> float:
    """1 − Var(error) / Var(value), of the sums `EXPLAINED`; NaN if the values do not differ."""
    varied = squares - total * total / count if count else 0.0
    # Rounding leaves about this much of values that are all the same.
    if varied <= 1e-12 * squares:
        return float("nan")
    return 1.0 - (squared_errors - errors * errors / count) / varied
