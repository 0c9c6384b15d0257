"""Forms are filled by several threads, also at their first use."""

from __future__ import annotations

import subprocess
import sys

THREADS, PROCESSES = 20, 6
CODE = f"""
import sys, threading
from distflow.data.decoding import read
from distflow.cluster.gossip import _Beat

sys.setswitchinterval(1e-6)
together = threading.Barrier({THREADS})

def fill():
    together.wait()
    read({{"from": 1, "seen": [], "reports": []}}, _Beat, "beat")

threads = [threading.Thread(target=fill) for _ in range({THREADS})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_a_form_may_be_used_first_by_several_threads_at_once() -> None:
    """Without a lock about every second of these processes ends with a segmentation fault."""
    started = [subprocess.Popen([sys.executable, "-c", CODE]) for _ in range(PROCESSES)]
    assert [process.wait(timeout=60.0) for process in started] == [0] * PROCESSES
