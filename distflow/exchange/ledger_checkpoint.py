"""The ledgers' part of a checkpoint: one frontier and its exceptions a ledger, as plain JSON values.

A snapshot belongs to weights of version v. All positions below a ledger's frontier are terminal (trained by a step
< v, or dropped), and so are the listed exceptions (dropped, or trained in free order); everything else is leased again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distflow.errors import UserError
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.ledger import Ledger


def write_snapshot(version: int, settings: LeaseSettings, ledgers: Iterable[Ledger]) -> dict[str, object]:
    """Where these ledgers stand."""
    return {
        "version": version,
        "batch_ledgers": settings.ledgers,
        "groups_per_ledger": settings.groups_per_ledger,
        "ledgers": [ledger.snapshot() for ledger in ledgers],
    }


def read_snapshot(snapshot: Mapping[str, Any], settings: LeaseSettings, ledgers: Iterable[Ledger]) -> int:
    """Bring fresh ledgers to where a snapshot stood; it may hold more ledgers than these. Returns its version.

    Raises UserError for a snapshot of another batch arithmetic, or one that lacks a ledger.
    """
    for key, ours in (("batch_ledgers", settings.ledgers), ("groups_per_ledger", settings.groups_per_ledger)):
        if snapshot[key] != ours:
            raise UserError(
                f"checkpoint of training step {snapshot['version']}: {key} was {snapshot[key]}, the recipe now gives "
                f"{ours}: resume with the batch.prompts and batch.ledgers the run began with"
            )
    version = int(snapshot["version"])
    saved: Mapping[int, Mapping[str, Any]] = {int(part["ledger"]): part for part in snapshot["ledgers"]}
    for ledger in ledgers:
        if ledger.index not in saved:
            raise UserError(
                f"checkpoint of training step {version}: ledger {ledger.index} is missing, has {sorted(saved)}"
            )
        part = saved[ledger.index]
        ledger.restore(version, int(part["frontier"]), _exceptions(part["dropped"]), map(int, part["trained"]))
    return version


def merge_snapshots(parts: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """One snapshot of all owners' ledgers, so that any number of owners can begin from it."""
    assert parts, "nothing to merge"
    first = parts[0]
    for part in parts:
        assert part["version"] == first["version"], f"versions {part['version']} and {first['version']} do not mix"
    merged = sorted((ledger for part in parts for ledger in part["ledgers"]), key=lambda ledger: int(ledger["ledger"]))
    return {**first, "ledgers": merged}


def _exceptions(listed: Iterable[Sequence[Any]]) -> list[tuple[int, str]]:
    return [(int(k), str(reason)) for k, reason in listed]
