"""A program that rewards a run's samples as a labeller would, and prints the positions of those that it has rewarded.

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
    while (samples := client.get(["uid", "response_text"], rows=16, consumer="reward")) is not None:
        positions = json.dumps(sorted(set(samples.batch["uid"][:, 2].tolist())))
        if "--hang" in sys.argv:
            print(positions, flush=True)
            time.sleep(600)
        try:
            samples.put(reward=[len(text) / 4 for text in samples.batch.texts("response_text")])
        except distflow.client.StaleRows:
            continue
        print(positions, flush=True)
