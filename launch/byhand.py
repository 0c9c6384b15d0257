"""One worker in this process, from its document, until its part in the run is done: `distflow worker` and its like.

`python -m distflow.launch.byhand DOCUMENT INCARNATION` is how another Python is asked to do it: it needs nothing of
what only the command line imports.
"""

from __future__ import annotations

import sys
from pathlib import Path

from distflow.comm.addresses import leave_socket_dir
from distflow.flow.document import read_worker_document
from distflow.runtime.main import run_worker


def run_by_hand(document: Path, incarnation: int) -> int:
    """Run the worker; returns its exit code."""
    run_dir = Path(read_worker_document(document).run_dir)
    code = run_worker(document, incarnation)
    leave_socket_dir(run_dir)
    return code


if __name__ == "__main__":
    sys.exit(run_by_hand(Path(sys.argv[1]), int(sys.argv[2])))
