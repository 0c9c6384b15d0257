"""PPO with a critic on workers of its own, as whole runs in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from distflow import StepContext
from distflow.launch.run.resume import find_checkpoint
from tests.polling import eventually
from tests.runtime import late_round
from tests.runtime.whole_runs import WholeRun, in_memory

STEPS, STOP_AT = 5, 2
CRITIC = (
    "flow=ppo",
    "layout=critic",
    "layout.pools.trainer.count=2",
    "batch.prompts=4",
    "batch.ledgers=2",
    "batch.minibatches=2",
    f"run.training_steps={STEPS}",
)


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    with in_memory():
        yield


def test_a_stop_while_owners_deal_is_followed_by_all_homes_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One owner has told the critics to train; another one is asked to stop, and has a round to compute before."""
    call = "flow.steps.old_logprobs.call=tests.runtime.late_round:old_logprobs"
    run = WholeRun(tmp_path, [*CRITIC, call], divided=["trainer"])

    def stop(ctx: StepContext) -> None:
        if ctx.training_step == STOP_AT:
            (rows,) = run.sessions["trainer/0"]._rows_out.values()
            eventually(lambda: rows._core.step == STOP_AT + 1, "the first owner to close the step")
            for name in run.sessions:
                run.stop(name)

    monkeypatch.setattr(late_round, "BEFORE", [stop])
    run.go()
    assert set(run.ended.values()) == {"stopped"}
    found = find_checkpoint(tmp_path)
    assert found.step == STOP_AT + 1, "the step that was begun, at both homes"
    assert not found.ignored
