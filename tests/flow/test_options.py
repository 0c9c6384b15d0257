"""Options of the engines and backends here are checked by the plan: no worker is started for a mistake in them."""

from __future__ import annotations

import pytest

from distflow.config.plugins import BACKENDS, ENGINES, OPTIONS
from distflow.errors import RecipeError
from distflow.flow.check import plan_recipe
from distflow.flow.resolve import resolve

ROLLOUT, TRAINER = "layout.pools.rollout", "layout.pools.trainer"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [f"{ROLLOUT}.engine=sglang", f"{ROLLOUT}.engine_options={{stream_intervall: 4}}"],
            f"command line: {ROLLOUT}.engine_options — engine_options.stream_intervall 4: engine sglang has no such "
            "option — did you mean 'stream_interval'?",
        ),
        ([f"{ROLLOUT}.engine_options={{prefill_tokens: 0}}"], "prefill_tokens 0: expected a positive integer"),
        (
            [f"{ROLLOUT}.each={{1: {{engine_options: {{colour: red}}}}}}"],
            f"{ROLLOUT}.each.1.engine_options — engine_options.colour 'red': engine torch has no such option",
        ),
        ([f"{TRAINER}.backend=fsdp", f"{TRAINER}.backend_options={{zero: 7}}"], "zero 7: backend fsdp has no such"),
        (
            [f"{TRAINER}.backend=deepspeed", f"{TRAINER}.backend_options={{zero: 7}}"],
            f"{TRAINER}.backend_options — backend_options.zero 7: expected a ZeRO stage, 0, 1, 2 or 3",
        ),
    ],
)
def test_wrong_options_of_our_own_plug_ins(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        plan_recipe("quickstart", ["layout=split", *overrides])
    assert message in str(refused.value)


def test_options_of_others_are_left_to_them() -> None:
    engine = "distflow.testing.fakes:FakeEngine"
    plan = plan_recipe("quickstart", [f"{ROLLOUT}.engine={engine}", f"{ROLLOUT}.engine_options={{colour: red}}"])[1]
    assert plan.workers[0].engine_options == {"colour": "red"}


def test_all_of_ours_have_a_check() -> None:
    assert OPTIONS.keys() == {*ENGINES.values(), *BACKENDS.values()}
    for call in OPTIONS.values():
        assert resolve(call).parse({}) == resolve(call)()
