"""Training over two sites that a slow link joins, beside the same hosts at one site.

    python -m benchmarks two_sites --rounds 3 --steps 16

Four hosts (network namespaces): one trains, three generate, two of them far away. The two ways take turns; needs root,
sshd and /dev/net/tun. All bytes of each version cross (`weights.encoding=full`), so that they can be counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.emulated import BASE, ROOT, WARMUP, device, options
from tests.hosts.netns import NetHosts
from tests.hosts.slow_link import SiteLink

LINK = SiteLink(50e6, 0.05)
FAR = (2, 3)
LIMIT_S = 600.0


def overrides(steps: int, megabytes: float) -> list[str]:
    """Of the run: steps of about 4 s in which training and generation take about as long."""
    return [
        *BASE,
        "layout=async",
        "layout.pools.trainer.hosts=[h0]",
        "layout.pools.rollout.hosts=[h1, h2, h3]",
        "layout.pools.rollout.count=3",
        f"run.training_steps={steps}",
        "weights.encoding=full",
        options("layout.pools.rollout.engine_options", device=device(step_s=0.03), median=80, sigma=0.8),
        options("layout.pools.trainer.backend_options", device=device(token_s=1.4e-4), size=int(megabytes * 1e6 / 4)),
    ]


def run(folder: Path, net: NetHosts, steps: int, megabytes: float, *, apart: bool) -> tuple[float, tuple[int, int]]:
    """Mean seconds of a training step, start-up excluded, and the bytes that crossed each way."""
    hosts, runs = folder / "hosts", folder / "runs"
    lines = [f"h{n} slots=1 python={sys.executable}{' site=far' if apart and n in FAR else ''}\n" for n in range(4)]
    hosts.write_text("".join(lines))
    before = net.crossed() if apart else (0, 0)
    command = [sys.executable, "-m", "distflow.launch", "launch", "quickstart", "--run", "bench", "--hosts", str(hosts)]
    given = ["--ssh-config", str(net.ssh_config), "--runs-dir", str(runs), *overrides(steps, megabytes)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        net.command(0, *command, *given), env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the run ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    read = [sys.executable, "-m", "distflow.launch", "metrics", "bench", "--json", "--runs-dir", str(runs)]
    shown = subprocess.run(read, capture_output=True, text=True, cwd=ROOT, check=True)
    rows: list[dict[str, Any]] = json.loads(shown.stdout)[WARMUP:-2]
    after = net.crossed() if apart else (0, 0)
    return statistics.mean(row["timing_s/step"] for row in rows), (after[0] - before[0], after[1] - before[1])


def main() -> None:
    """Take turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--megabytes", type=float, default=8.0, help="of a version of the weights")
    given = parser.parse_args()
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(given.rounds):
        for apart in (False, True):
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                far = FAR if apart else ()
                with NetHosts(4, folder, far=far, link=LINK) as net:
                    seconds, (there, back) = run(folder, net, given.steps, given.megabytes, apart=apart)
            found[apart].append(seconds)
            versions = there / given.megabytes / 1e6 / given.steps
            crossed = f", {versions:.2f} × the model a step there, {back / 1e6:.1f} MB back" if apart else ""
            what = "two sites" if apart else "one site"
            print(f"round {number + 1}: {what}: {seconds:.2f} s a step{crossed}", flush=True)
    one, two = (statistics.median(found[apart]) for apart in (False, True))
    print(f"one site {one:.2f} s a step, two sites {two:.2f}: {one / two:.2f} of its throughput")
