"""Whoever writes checkpoints is killed ten times, at random moments: there is always a whole one to go on from."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from distflow.launch.run.resume import find_checkpoint, forget_abandoned
from distflow.runtime.checkpoint.parts import CheckpointReader

KILLS = 10
DEADLINE_S = 60.0


def newest_step(run_dir: Path) -> int:
    names = [path.parent.name for path in run_dir.glob("checkpoints/step_*/COMMIT")]
    return max((int(name.removeprefix("step_")) for name in names), default=0)


def test_killed_at_any_moment_there_is_a_whole_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.runtime.checkpoint_writers", str(tmp_path)]
    pipe = subprocess.PIPE
    ignored = []
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for _ in range(KILLS):
            before = newest_step(tmp_path)
            server.stdin.write("\n")
            server.stdin.flush()
            writer = int(server.stdout.readline())
            deadline = time.monotonic() + DEADLINE_S
            while newest_step(tmp_path) == before:
                assert time.monotonic() < deadline, "the writer writes nothing"
                time.sleep(0.001)
            time.sleep(random.uniform(0.0, 0.05))
            os.kill(writer, signal.SIGKILL)
            # Whatever it was doing: the newest one that has its name is whole.
            time.sleep(0.05)
            found = find_checkpoint(tmp_path)
            assert found.checkpoint is not None
            assert found.step == newest_step(tmp_path) > before
            assert all(line.startswith("draft_") for line in found.ignored)
            ignored += found.ignored
            state = CheckpointReader(found.checkpoint, "trainer-0").model("policy")
            assert all(torch.equal(state[name], torch.full((1 << 18,), float(found.step))) for name in state)
            forget_abandoned(tmp_path, found.step)
        server.stdin.close()
        server.wait(timeout=DEADLINE_S)
    print(f"{len(ignored)} of {KILLS} kills left something half written")
