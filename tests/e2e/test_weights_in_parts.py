"""Two trainers send each its part of the weights to three engines, and the run is the one that it would be without."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

from distflow.comm.collective import LOOPBACK
from distflow.flow.plan import Plan
from distflow.flow.plan_text import library_ports
from distflow.flow.recipe_check import plan_recipe
from tests.e2e.runs import PROMPTS, SAMPLES, SMALL, Launch, Run, check_positions, cli
from tests.e2e.sockets import listening, unknown

ENGINES = ("rollout-0", "rollout-1", "rollout-2")
SETTINGS = (
    *SMALL,
    "layout=split",
    "layout.pools.trainer.count=2",
    "layout.pools.trainer.backend=fsdp",
    "layout.pools.rollout.count=3",
    "layout.max_staleness=0",
    "run.training_steps=2000",
)


def taken(run: Run) -> list[int]:
    """How many versions came to each engine in parts."""
    logs = [run.folder / "logs" / f"{name}.log" for name in ENGINES]
    return [log.read_text().count("came in parts") if log.exists() else 0 for log in logs]


def the_plan() -> Plan:
    return plan_recipe("quickstart", [*SETTINGS, "weights.link=collective"])[1]


def stop(run: Run) -> None:
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.output
    assert run.leftovers() == []


def lines(run: Run, steps: int) -> list[Any]:
    """What was sampled for the first training steps, and with which versions."""
    found = [line for line in run.dumps() if line["uid"][2] < steps * PROMPTS]
    assert len(found) == steps * PROMPTS * SAMPLES
    for line in found:
        del line["worker"]
    return sorted(found, key=lambda line: (line["uid"], line["sample"]))


def test_samples_and_gradients_are_those_of_a_run_in_which_engines_map_what_is_published(launch: Launch) -> None:
    settings = (*SETTINGS, "run.deterministic=true")
    run = launch("quickstart", *settings, "weights.link=collective")
    run.until(lambda: min(taken(run)) >= 5, "weights in parts, at each engine")
    shown = cli("status", run.name, "--runs-dir", str(run.folder.parent)).stdout
    assert "weights of policy in parts: " in shown
    assert "; a group of 5 workers" in shown
    opened = {worker: LOOPBACK for library in library_ports(the_plan()) for worker in library.workers}
    assert len(opened) == 5
    assert unknown(list(listening(run.processes())), opened) == []
    stop(run)
    steps = run.metrics()[-1]["step"]
    plain = launch("quickstart", *settings, f"run.stop_after={steps}")
    assert plain.wait() == 0, plain.output
    assert taken(plain) == [0, 0, 0]
    assert lines(run, steps) == lines(plain, steps)
    norms = [[line["actor/grad_norm"] for line in one.metrics()][:steps] for one in (run, plain)]
    assert norms[0] == norms[1]


def test_an_engine_that_is_killed_in_the_middle_costs_the_others_nothing(launch: Launch, tmp_path: Path) -> None:
    reward = shutil.copy(Path(__file__).with_name("dying_reader.py"), tmp_path / "dying_reader.py")
    function = f"flow.steps.reward.with.function={reward}:even"
    run = launch("quickstart", *SETTINGS, function, "weights.link=collective")
    run.until((tmp_path / "dying_reader.killed").exists, "an engine that is killed")
    before, done = taken(run), run.steps_done()
    run.until(lambda: run.steps_done() > done + 4, "two more training steps")
    run.until(lambda: all(now > then + 1 for now, then in zip(taken(run), before, strict=True)), "a group of all again")
    stop(run)
    steps = run.metrics()[-1]["step"]
    check_positions(run.dumps(), steps, PROMPTS)
