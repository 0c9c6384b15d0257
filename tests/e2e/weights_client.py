"""A program that takes each version of a run's policy, prints its number, and hangs at the third.

Waits for the run to be launched.
"""

import sys
import time
from pathlib import Path

import distflow
import distflow.client

print("ready", flush=True)
deadline = time.monotonic() + 60
while not Path(sys.argv[1], "run.json").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
with distflow.Client(sys.argv[1]) as client:
    for count, weights in enumerate(client.subscribe_weights("policy"), 1):
        print(weights.version, flush=True)
        if count == 3:
            time.sleep(600)
