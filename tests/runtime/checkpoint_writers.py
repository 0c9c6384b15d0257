"""A process that writes checkpoints without end, made anew for every line that it is sent: to be killed while it does.

python -m tests.runtime.checkpoint_writers RUN_DIR     a line in: a new writer; a line out: its process id
"""

import os
import sys
import time
from pathlib import Path

import torch

from distflow.runtime.checkpoint.commit import Keeping, checkpoints_of, commits
from distflow.runtime.checkpoint.format import whole
from distflow.runtime.checkpoint.parts import CheckpointWriter
from distflow.types import Version

DEADLINE_S = 60.0


def write_on(run_dir: Path, term: int) -> None:
    """From the newest checkpoint on; every element of the state is the number of the training step."""
    newest = max((commit.step for _, commit in commits(checkpoints_of(run_dir))), default=0)
    writer = CheckpointWriter(run_dir, "trainer-0", "digest", Keeping(2))
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        newest += 1
        version = Version(term, newest)
        shards = [whole(f"weight{n}", torch.full((1 << 18,), float(newest))) for n in range(4)]
        parts = writer.write_parts(
            version, {"policy": shards}, {"home": "trainer", "ledger": {"version": newest}, "steps": {}}
        )
        writer.commit(version, parts)


def main() -> None:
    """Fork a writer for every line of the input."""
    torch.set_num_threads(1)
    for term, _ in enumerate(sys.stdin):
        child = os.fork()
        if child == 0:
            write_on(Path(sys.argv[1]), term)
            os._exit(0)
        print(child, flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
