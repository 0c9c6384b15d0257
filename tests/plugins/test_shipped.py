"""Everything shipped passes the suites that `distflow test-plugin` runs: what is asked of users holds here too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distflow.flow.recipe_check import plan_recipe
from distflow.flow.step_declaration import read_declaration
from distflow.testing.plugins.child import run_suite
from distflow.testing.plugins.subjects import Subject, kind_of, subjects_of

ROOT = Path(__file__).resolve().parents[2]
TWO_TURNS = f"{ROOT}/recipes/two_turns.py"
STEPS = {
    "distflow.workers.supervised:demonstration": {},
    "distflow.workers.supervised:sft": {},
    "distflow.workers.trainer:baseline": {},
    "distflow.workers.trainer:update": {"kl_coef": 0.1, "aggregate": "seq-mean-token-mean"},
    "distflow.workers.critic:values": {},
    "distflow.workers.critic:gae": {},
    "distflow.workers.critic:critic_update": {},
    "distflow.workers.critic:whiten": {},
    "distflow.workers.reference:ref_logprobs": {},
    "distflow.workers.reference:old_logprobs": {},
    "distflow.workers.reward:verify": {"function": {"right": {"function": "exact_match"}, "format": 0.1}},
    "distflow.workers.reward_model:judge": {},
    "distflow.workers.rollout:sample": {},
    "distflow.workers.rollout:sample_with_baseline": {},
    "distflow.workers.self_play:propose": {},
    "distflow.workers.self_play:within_reach": {},
    "distflow.workers.shaping:dynamic_sampling": {},
    "distflow.workers.shaping:token_rewards": {"kl_coef": 0.1, "overlong_share": 0.5, "max_new_tokens": 6},
    f"{TWO_TURNS}:copy_twice": {},
    f"{TWO_TURNS}:written": {},
}
REWARDS = {
    "exact_match": {},
    "regex": {"pattern": r"\d+"},
    "format": {},
    "length_penalty": {"max_tokens": 8, "buffer": 4},
    "digits_copied": {},
    "math": {},
}


class Told:
    """A report that keeps everything."""

    def __init__(self) -> None:
        self.findings: list[tuple[str, str]] = []

    def begin(self, what: str) -> None:
        """Nothing to keep."""

    def add(self, level: str, text: str) -> None:
        self.findings.append((level, text))

    def of(self, *levels: str) -> list[str]:
        return [text for level, text in self.findings if level in levels]


def told_of(call: str, settings: dict[str, Any] | None = None, **more: Any) -> Told:
    report = Told()
    run_suite(Subject(call, call, more.pop("kind", None) or kind_of(call), settings or {}, **more), report)
    return report


def chosen(call: str, setting: str) -> list[str]:
    """The functions among which a shipped step chooses."""
    return list(read_declaration(call).spec.choices[setting])


@pytest.mark.parametrize("call", STEPS)
def test_steps(call: str) -> None:
    report = told_of(call, STEPS[call])
    assert report.of("wrong", "note") == []
    assert report.of("ok")


def test_all_steps_of_shipped_recipes_are_among_them() -> None:
    flows = sorted(path.stem for path in (ROOT / "recipes" / "flow").glob("*.yaml"))
    plans = [
        plan_recipe("quickstart", [f"flow={flow}", "layout=colocated"])[1] for flow in flows if flow != "self_play"
    ]
    used = {step.call for plan in plans for step in plan.steps}
    assert used - STEPS.keys() <= {"distflow.workers.trainer:advantage", "distflow.workers.trainer:batch_advantage"}


@pytest.mark.parametrize("call", chosen("distflow.workers.trainer:batch_advantage", "function"))
def test_advantages(call: str) -> None:
    report = told_of(call)
    assert report.of("wrong") == []
    assert len(report.of("ok")) >= 3


@pytest.mark.parametrize(
    "call", [*chosen("distflow.workers.trainer:update", "loss"), *chosen("distflow.workers.trainer:update", "kl")]
)
def test_losses_and_estimators(call: str) -> None:
    report = told_of(call)
    assert report.of("wrong") == []
    assert len(report.of("ok")) >= 4


@pytest.mark.parametrize("name", REWARDS)
def test_rewards(name: str) -> None:
    report = told_of(f"distflow.workers.reward_functions:{name}", REWARDS[name])
    assert report.of("wrong") == []
    assert len(report.of("ok")) == 2


def test_sources() -> None:
    assert told_of("distflow.data.arithmetic:copy_digits").of("wrong", "note") == []
    report = told_of("distflow.data.sources:reasoning_gym", {"dataset": "chain_sum", "size": 40})
    assert report.of("wrong") == []
    real = {"data": "distflow.data.sources:reasoning_gym", "data_settings": {"dataset": "chain_sum", "size": 8}}
    report = told_of("distflow.workers.reward_functions:reasoning_gym", **real)
    assert report.of("wrong") == []
    assert "gold answers get a score of up to 1" in " ".join(report.of("ok"))


def test_recipes_name_their_plug_ins_with_their_settings() -> None:
    found = subjects_of(plan_recipe("custom_step")[1])
    kinds = {Path(subject.call).name.rpartition(":")[2]: subject.kind for subject in found}
    assert kinds == {"my_reward": "reward", "my_advantage": "step"}
    for subject in found:
        report = Told()
        run_suite(subject, report)
        assert report.of("wrong", "note") == []


@pytest.mark.long
@pytest.mark.parametrize(
    "call",
    ["distflow.workers.engines.torch_engine:TorchEngine", "distflow.workers.backends.torch_backend:TorchBackend"],
)
def test_engines_and_backends(call: str) -> None:
    from distflow.testing.plugins.process import examine

    found = examine(Subject(call, call, kind_of(call)), 120.0)
    assert found.passed, found.lines()
    assert "tests of its contract" in found.findings[-1].text
