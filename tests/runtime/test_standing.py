"""What each worker of a run is to training: ledgers, gradients, weights, COMMIT and the term are separate things."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.flow.memory import MIB
from distflow.runtime.assembly import Setting, Standing
from distflow.runtime.owner_side import lease_settings
from tests.messages.receivers import WITH_CRITIC, setting_of


def standing(
    name: str, folder: Path, placement: dict[str, int], *overrides: str, left: list[str] | None = None
) -> Standing:
    setting = setting_of(name, folder, [*WITH_CRITIC, *overrides])
    document = setting.document.model_copy(update={"placement": placement, "members": left})
    return Setting(document, setting.recipe, setting.plan, setting.me, folder, None).standing


ALL = ("trainer/0", "trainer/1", "critic/0", "critic/1")
APART = {"trainer/1": 1, "critic/0": 2, "critic/1": 2}


def test_an_owner_has_ledgers_and_publishes_for_its_host(tmp_path: Path) -> None:
    found = standing("trainer/1", tmp_path, APART)
    assert found.ledgers == (1, 3, 5, 7)
    assert found.gradients == {"policy": ("trainer/0", "trainer/1")}
    assert (found.publishes, found.commits, found.members) == (("policy",), True, ALL)
    beside = standing("trainer/1", tmp_path, {})
    assert (beside.publishes, beside.commits) == ((), False), "trainer/0 does, on the same host"


@pytest.mark.parametrize(("name", "commits"), [("critic/0", True), ("critic/1", False)])
def test_a_host_with_critics_only_has_its_commit(tmp_path: Path, name: str, commits: bool) -> None:
    found = standing(name, tmp_path, APART)
    assert found.gradients == {"critic": ("critic/0", "critic/1")}
    assert (found.ledgers, found.publishes, found.commits, found.members) == ((), (), commits, ALL)


def test_a_term_without_some_of_them(tmp_path: Path) -> None:
    left = ["trainer/1", "critic/1"]
    assert standing("trainer/1", tmp_path, APART, left=left).ledgers == tuple(range(8))
    found = standing("critic/1", tmp_path, APART, left=left)
    assert (found.gradients, found.commits, found.members) == (
        {"critic": ("critic/1",)},
        True,
        ("trainer/1", "critic/1"),
    )


def test_who_generates_is_no_member(tmp_path: Path) -> None:
    assert standing("rollout/0", tmp_path, APART) == Standing((), {}, (), False, ())


def test_each_owner_reserves_what_it_is_given(tmp_path: Path) -> None:
    own = ["layout.pools.trainer.sample_memory_mb=300", "layout.pools.trainer.each.1.sample_memory_mb=500"]
    reserved = {
        name: lease_settings(setting_of(name, tmp_path, [*WITH_CRITIC, *own])).memory_bytes // MIB
        for name in ("trainer/0", "trainer/1", "rollout/0")
    }
    assert reserved == {"trainer/0": 300, "trainer/1": 500, "rollout/0": 300}
