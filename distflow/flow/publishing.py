"""Which training worker publishes weights for the engines of which host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def leaders_of(owners: Iterable[str], host_of: Mapping[str, int]) -> dict[int, str]:
    """The first training worker of each host that has one; workers that `host_of` does not name are on host 0."""
    leaders: dict[int, str] = {}
    for owner in owners:
        leaders.setdefault(host_of.get(owner, 0), owner)
    return leaders


def publisher_for(host: int, leaders: Mapping[int, str]) -> str:
    """Of its own host where there is one (shared memory), else one of the others in turn (over the network)."""
    if host in leaders:
        return leaders[host]
    numbers = sorted(leaders)
    return leaders[numbers[host % len(numbers)]]
