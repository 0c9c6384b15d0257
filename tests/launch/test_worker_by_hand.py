"""`distflow worker`: one worker that no agent started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.comm.addresses import socket_dir, worker_address
from distflow.launch.cli import run
from tests.launch.conftest import WAIT_S, await_that, environment


# Python itself dies of the signal if the interrupt comes while libraries execute text.
@pytest.mark.parametrize(("number", "codes"), [(signal.SIGINT, (130, -2)), (signal.SIGTERM, (143,))])
def test_one_that_is_interrupted_while_it_waits_leaves_nothing(
    tmp_path: Path, number: int, codes: tuple[int, ...]
) -> None:
    assert run(["plan", "quickstart", "--write", str(tmp_path)]) == 0
    command = [sys.executable, "-m", "distflow.launch", "worker", str(tmp_path / "rollout-0.yaml")]
    worker = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        socket = Path(worker_address(tmp_path, "rollout/0").removeprefix("ipc://"))
        await_that(lambda: socket.exists() or worker.poll() is not None, "its socket")
        worker.send_signal(number)
        out, _ = worker.communicate(timeout=WAIT_S)
    finally:
        worker.kill()
    assert worker.returncode in codes, out
    assert not socket_dir(tmp_path).exists()
