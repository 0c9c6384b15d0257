"""Weights that come in parts, or are read at their publisher: where that can be had, and what a plan says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distflow.config.plugins import LIBRARIES, NIXL
from distflow.errors import RecipeError
from distflow.flow.digest import digest_parts
from distflow.flow.edges import SAMPLES
from distflow.flow.lanes import Whereabouts, lanes_of
from distflow.flow.plan import Plan
from distflow.flow.plan_text import library_ports, render_page
from distflow.flow.recipe_check import plan_recipe
from distflow.launch.deploy.host_checks import problems_here

NIXL_LINK = "weights.link=nixl"
LINK, TWO = "weights.link=collective", "layout.pools.trainer.count=2"


def planned(*overrides: str) -> Plan:
    return plan_recipe("quickstart", overrides)[1]


def test_the_plan_names_who_sends_to_whom_and_what_is_open() -> None:
    plan, before = planned(TWO, LINK), planned(TWO)
    assert lanes_of(plan, plan.edge("policy")) == ("shm", "gloo")
    assert lanes_of(before, before.edge("policy")) == ("shm",)
    assert lanes_of(plan, plan.edge(SAMPLES)) == lanes_of(before, before.edge(SAMPLES))
    said = "weights of policy: each of trainer/0 … trainer/1 sends its part to rollout in the clear"
    assert said in render_page(plan)
    assert said not in render_page(before)
    opened = {worker for library in library_ports(plan) for worker in library.workers}
    assert opened == {"trainer/0", "trainer/1", "rollout/0", "rollout/1"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("layout=colocated", "layout.pools.worker.count=2"), "needs engines in other processes .* or layout=split"),
        ((), "is for several training workers.* there is one — auto, or layout.pools.trainer.count=2 or more"),
        ((TWO, "weights.encoding=fp8"), "sends what was trained, and weights.encoding is fp8"),
        ((TWO, "weights.encoding=bf16"), "sends what was trained, and weights.encoding is bf16"),
        ((TWO, "security.encrypt=all"), "does not encrypt weights, .* or security.trusted_network=true"),
    ],
)
def test_where_it_cannot_be_had_it_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=f"weights.link — collective {message}"):
        planned(*overrides, LINK)


def test_over_a_network_that_is_trusted_it_needs_no_encryption() -> None:
    planned(TWO, "security.encrypt=all", "security.trusted_network=true", LINK)


HOSTS = Whereabouts({"trainer/0": 0, "rollout/0": 1, "rollout/1": 1})


def test_the_plan_says_what_other_hosts_read_and_what_is_open() -> None:
    plan, before = planned(NIXL_LINK), planned()
    assert lanes_of(plan, plan.edge("policy")) == ("shm",)
    assert lanes_of(plan, plan.edge("policy"), HOSTS) == ("tcp", "nixl")
    assert lanes_of(before, before.edge("policy"), HOSTS) == ("tcp",)
    said = "weights of policy: other hosts of rollout read them in the publisher's memory in the clear"
    assert said in render_page(plan)
    assert said not in render_page(before)
    opened = {worker for library in library_ports(plan) for worker in library.workers}
    assert opened == {"trainer/0", "rollout/0", "rollout/1"}
    assert digest_parts(before) == digest_parts(plan)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layout=colocated", "needs engines in other processes .* or layout=split"),
        ("security.encrypt=all", "does not encrypt weights, .* or security.trusted_network=true"),
    ],
)
def test_where_nothing_can_be_read_it_is_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=f"weights.link — nixl {message}"):
        planned(override, NIXL_LINK)


def test_what_is_rounded_can_be_read_and_so_can_all_over_a_trusted_network() -> None:
    planned(NIXL_LINK, "weights.encoding=fp8", "security.encrypt=all", "security.trusted_network=true")


def test_where_the_package_is_missing_that_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = replace(LIBRARIES[NIXL], module="no_such_package")
    monkeypatch.setitem(LIBRARIES, NIXL, lacking)  # type: ignore[arg-type]
    (problem,) = problems_here(planned(NIXL_LINK), lambda key: "here")
    assert problem.key == "weights.link"
    assert "needs the package 'no_such_package'" in str(problem)
    assert "pip install --no-deps 'nixl-cu12" in str(problem)
    assert problems_here(planned(), lambda key: "here") == []


def test_workers_need_not_agree_on_it() -> None:
    assert digest_parts(planned(TWO)) == digest_parts(planned(TWO, LINK))
