"""A program that reads a run's samples as consumer `all`, and prints the positions of those it has used.

With --hang it prints the first that it has claimed, and does nothing more. Waits for the run to be launched.
"""

import json
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
    while (samples := client.get(["uid"], rows=16, consumer="all", lossless=True)) is not None:
        print(json.dumps(sorted(set(samples.batch["uid"][:, 2].tolist()))), flush=True)
        if "--hang" in sys.argv:
            time.sleep(600)
        samples.acknowledge()
