"""A program that takes each version of a run's policy and prints its number and a sum of its values.

With --hang it hangs at the third. Waits for the run to be launched.
"""

import sys
import time
from pathlib import Path

import distflow
import distflow.client

print("ready", flush=True)
deadline = time.monotonic() + 180
while not Path(sys.argv[1], "run.json").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
with distflow.Client(sys.argv[1]) as client:
    for count, weights in enumerate(client.subscribe_weights("policy"), 1):
        total = sum(float(tensor.double().sum()) for tensor in weights.tensors.values())
        print(weights.version, total, flush=True)
        if count == 3 and "--hang" in sys.argv:
            time.sleep(600)
