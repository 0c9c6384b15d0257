"""Which environment variables the agents and workers on other hosts get from the launching machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from distflow.errors import UserError

FORWARDED = (
    "PYTHONPATH",
    "CUDA_*",
    "NCCL_*",
    "GLOO_*",
    "HF_HOME",
    "TORCH_*",
    "OMP_*",
    "DISTFLOW_*",
)
"""Names and patterns; not PATH, HOME and the like, which belong to their host."""
SECRET = "DISTFLOW_RUN_KEY"


def forwarded(environment: Mapping[str, str], more: Sequence[str], settings: Sequence[str]) -> dict[str, str]:
    """Variables of `environment` that go along, with those named in `more` and set by `settings` (NAME=VALUE).

    Raises UserError for a name that is not set, or a setting without `=`.
    """
    names = [name for text in more for name in text.split(",") if name]
    unset = [name for name in names if "*" not in name and name not in environment]
    if unset:
        raise UserError(
            f"--forward {','.join(unset)}: not set here — set it, or give it a value: --set {unset[0]}=VALUE"
        )
    patterns = (*FORWARDED, *names)
    found = {n: v for n, v in environment.items() if n != SECRET and any(fnmatchcase(n, p) for p in patterns)}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise UserError(f"--set {setting}: expected NAME=VALUE")
        found[name] = value
    return found
