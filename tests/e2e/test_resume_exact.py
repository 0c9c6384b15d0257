"""Every process of a run is killed at a random moment; what is resumed equals an undisturbed run.

Bit for bit with backend torch; with others the losses may differ by 1e-5.
"""

import os
import random
import signal
import time
from typing import Any

import psutil
import pytest

from tests.e2e.runs import Launch, Run, titled_processes

STEPS = 40
# `tis` would bring the engine's own log-probs into the loss: their last bits depend on what it decodes side by side.
EXACT = [
    "run.deterministic=true",
    f"run.training_steps={STEPS}",
    "run.save_every=4",
    "flow.steps.update.with.tis=null",
    "models.policy.dtype=float64",
]


def kill_everything(run: Run) -> None:
    """The agents first: nobody shall see the others die."""
    by_title = sorted(titled_processes(run.name), key=lambda found: "agent/" not in found[1])
    processes = [process for process, _ in by_title]
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    psutil.wait_procs(processes, timeout=10.0)


def samples(run: Run) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """What was trained on: prompt, tokens and reward of every sample; each is there once."""
    lines = run.dumps()
    found = {
        (*line["uid"], line["sample"]): (line["step"], line["prompt"], tuple(line["response_ids"]), line["reward"])
        for line in lines
    }
    assert len(found) == len(lines), "a sample was trained on twice"
    return found


def figures(run: Run) -> dict[int, dict[str, float]]:
    """Losses, norms, scores and rewards of every training step."""
    return {
        line["step"]: {name: value for name, value in line.items() if name.startswith(("actor/", "critic/"))}
        for line in run.metrics()
    }


# DeepSpeed has no float64.
DIVIDED = ["models.policy.dtype=float32", "layout.pools.trainer.count=2"]
DEEPSPEED = ["layout.pools.trainer.backend=deepspeed"]
LAYOUTS = [
    pytest.param(["layout.pools.trainer.count=2"], id="2 rollouts, 2 trainers"),
    pytest.param([], id="2 rollouts, 1 trainer", marks=pytest.mark.long),
    pytest.param(["layout=colocated"], id="colocated", marks=pytest.mark.long),
    pytest.param([*DIVIDED, "layout.pools.trainer.backend=fsdp"], id="fsdp", marks=pytest.mark.long),
    pytest.param([*DIVIDED, *DEEPSPEED, "layout.pools.trainer.zero=2"], id="zero2", marks=pytest.mark.long),
    pytest.param([*DIVIDED, *DEEPSPEED, "layout.pools.trainer.zero=3"], id="zero3", marks=pytest.mark.long),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(launch: Launch, layout: list[str]) -> None:
    whole = launch("quickstart", *EXACT, *layout)
    assert whole.wait() == 0, whole.output
    first = launch("quickstart", *EXACT, *layout)
    first.until(lambda: list(first.folder.glob("checkpoints/step_*/COMMIT")), "the first checkpoint")
    delay = random.uniform(0.0, 1.0)
    time.sleep(delay)
    kill_everything(first)
    begin = max(int(path.parent.name.removeprefix("step_")) for path in first.folder.glob("checkpoints/step_*/COMMIT"))
    trained = first.steps_done()
    second = launch("quickstart", *EXACT, *layout, "--resume", name=first.name)
    assert second.wait() == 0, second.output
    print(f"killed {delay:.3f} s after the first checkpoint, {trained} lines of metrics; resumed after step {begin}")
    assert f"resumes after training step {begin}" in second.output
    assert samples(second) == samples(whole)
    assert {uid[2] for uid in samples(second)} == set(range(STEPS * 32))
    if layout[:2] == DIVIDED:
        for step, expected in figures(whole).items():
            assert figures(second)[step] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    else:
        assert figures(second) == figures(whole)
    assert second.leftovers() == []
