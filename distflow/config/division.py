"""The division of GPUs that another tool lets generate and train in turns, into pools as they are here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Division:
    """A layout with the counts of its pools."""

    layout: str
    counts: Mapping[str, int]
    """Workers by pool."""
    width: int
    """GPUs of one engine."""
    told: tuple[str, ...]
    """How it differs from what the other tool does, and why."""


def divide(engine: str, width: int, hosts: tuple[int, int], *, most: int, apart: int = 0) -> Division:
    """Divide the GPUs of `hosts` (how many, GPUs of each) where an engine cannot share them with training.

    That is vLLM where several workers train, and an engine over several GPUs. `width`: GPUs of an engine; `most`:
    workers that can train; `apart`: further GPUs that only generate.
    """
    gpus = hosts[0] * hosts[1]
    if apart:
        return _apart(width, gpus, most, apart)
    if gpus == 1 or (width == 1 and engine != "vllm"):
        told = [f"the engine has 1 GPU, not {width}: there is only one"] if width > 1 else []
        workers = _trainers(gpus, most, told)
        return Division("colocated", {"worker": workers}, 1, tuple(told))
    told = []
    fitting = _fitting(width, hosts, told)
    engines = max(1, min(gpus // 2 // fitting, hosts[1] // fitting * hosts[0]))
    left = gpus - engines * fitting
    each = f" of {fitting} GPUs each" if fitting > 1 else ""
    why = "an engine over several GPUs shares none" if width > 1 else "vLLM shares none where several workers train"
    told.insert(
        0,
        f"check how the {gpus} GPUs are divided: {engines} {engine} worker{'s' * (engines > 1)}{each} generate, and "
        f"{left} train. No GPU does both, as in a hybrid engine: {why} (docs/engines.md). Half for each suits "
        "where both take as long; layout.max_staleness=1 lets both work at a time",
    )
    return Division("split", {"rollout": engines, "trainer": _trainers(left, most, told)}, fitting, tuple(told))


def _apart(width: int, gpus: int, most: int, apart: int) -> Division:
    told: list[str] = []
    fitting = min(width, apart)
    return Division(
        "split", {"rollout": apart // fitting, "trainer": _trainers(gpus, most, told)}, fitting, tuple(told)
    )


def _fitting(width: int, hosts: tuple[int, int], told: list[str]) -> int:
    """GPUs of an engine that stays on its host and leaves one to train on."""
    fitting = width
    while fitting > 1 and (fitting > hosts[1] or fitting >= hosts[0] * hosts[1]):
        fitting //= 2
    if fitting < width:
        told.append(
            f"engines have {fitting} GPUs each, not {width}: an engine stays on one host, and one GPU at least has to "
            "train. If the model does not fit, add GPUs, and raise the counts of both pools"
        )
    return fitting


def _trainers(gpus: int, most: int, told: list[str]) -> int:
    if gpus > most:
        told.append(f"{most} of {gpus} GPUs train: of each mini-batch every training worker has a prompt at least")
    return min(gpus, most)
