"""A run that outlives all hosts that it began on: each is replaced by one that joins, and is then taken away.

    python -m benchmarks outliving --hosts 4 --steps 2000
    python -m benchmarks outliving --hosts 4 --minutes 30 --every 300

Hosts are network namespaces with run folders of their own; half of those that the run begins on train, the others
generate. Before a host is killed, with its agent and whatever else runs there, `distflow scale --leave` moves its
workers to the new one. The host of `launch` goes last, and after it those that came first. Told: how long training was
held up, and steps that were trained again; it fails if a position was trained on twice or never. Needs root and sshd.

With `--minutes` devices are emulated (a step takes about 7.5 s), a host is replaced each `--every` seconds, and the
time of the whole run is compared with that of its training steps while nothing was replaced.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.emulated import BASE, ROOT, device, options
from distflow.launch.run.record import RunRecord, read_record
from tests.e2e.runs import PACED, PROMPTS, check_positions
from tests.hosts.netns import NetHosts

LIMIT_S = 300.0
RUN = "bench"
SILENCE_S = 6.0
SECONDS = "recovery/seconds/max"
STEP_S = 7.5
"""About what a training step takes with the emulated devices."""
EMULATED = (
    *BASE,
    f"batch.prompts={PROMPTS}",
    "run.dump_rollouts=1",
    options("layout.pools.rollout.engine_options", device=device(step_s=0.03), median=80, sigma=0.8),
    options("layout.pools.trainer.backend_options", device=device(token_s=7e-4), size=100_000),
)


@dataclass(frozen=True)
class Machines:
    """Twice as many hosts as a run has at a time, each with a folder of its own."""

    net: NetHosts
    folder: Path

    def runs(self, host: int) -> Path:
        """The folder of runs of a host."""
        return self.folder / f"h{host}"

    def record(self, host: int) -> RunRecord:
        """What a host knows of the run."""
        return read_record(self.runs(host) / RUN)

    def at_work(self, host: int) -> set[str]:
        """The names of the hosts that have workers, as a host knows it: it numbers them as they have come."""
        record = self.record(host)
        return {record.hosts[entry.host].name for entry in record.workers}

    def silent(self, host: int) -> set[str]:
        """The names of those that it does not hear any more."""
        record = self.record(host)
        return {record.hosts[number].name for number in record.silent}

    def file(self, hosts: range) -> Path:
        """A hosts file."""
        path = self.folder / f"hosts-{hosts.start}"
        lines = [f"h{n} slots=1 python={sys.executable} dir={self.runs(n)}\n" for n in hosts]
        path.write_text("".join(lines))
        return path

    def command(self, host: int, *words: str) -> list[str]:
        """A distflow command on a host."""
        ssh = ["--ssh-config", str(self.net.ssh_config), "--runs-dir", str(self.runs(host))]
        return self.net.command(host, sys.executable, "-m", "distflow.launch", *words, *ssh)

    def rows(self) -> list[dict[str, Any]]:
        """What training workers of all hosts have measured: lines of their metrics."""
        files = self.files("metrics/trainer-*.jsonl")
        return [json.loads(line) for path in files for line in path.read_text().splitlines()]

    def files(self, pattern: str) -> Collection[Path]:
        """Those of all hosts: what was collected at the end is the same."""
        hosts = self.folder.glob(f"h*/{RUN}")
        return {path.relative_to(host): path for host in hosts for path in host.glob(pattern)}.values()

    def steps(self) -> int:
        """The last training step that is done."""
        return max((int(row["step"]) for row in self.rows()), default=0)

    def kill(self, host: int) -> None:
        """Take its cable out, and end all that runs there."""
        self.net.unplug(host)
        for pid in self.net.pids(self.net.hosts[host]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def until(ready: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait for something."""
    deadline = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not happen within {limit_s:g} s")
        time.sleep(0.1)


def replace_host(machines: Machines, old: int, new: int, asked: int) -> None:
    """Move the worker of a host to one that joins, and kill the host."""
    began, last = time.monotonic(), machines.steps()
    hosts = str(machines.file(range(new, new + 1)))
    command = machines.command(asked, "scale", RUN, "--leave", f"h{old}", "--hosts", hosts)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    joined = time.monotonic() - began
    until(lambda: f"h{old}" not in machines.at_work(new), f"the end of the worker of h{old}")
    reached = machines.steps()
    until(lambda: machines.steps() >= reached + 2, f"training steps without h{old}")
    gone = time.monotonic() - began
    machines.kill(old)
    until(lambda: f"h{old}" in machines.silent(new), f"the silence of h{old}")
    print(
        f"h{old} → h{new} at step {last}: h{new} joined after {joined:.1f} s, h{old} was free after {gone:.1f} s, "
        f"{machines.steps() - last} training steps meanwhile",
        flush=True,
    )


def begin(machines: Machines, count: int, hosts: int, steps: int, work: Sequence[str]) -> None:
    """Start a run on the first hosts: half of them train."""
    half = count // 2
    pools = [f"layout.pools.trainer.count={half}", f"layout.pools.rollout.count={count - half}"]
    train = ",".join(str(n) for n in range(hosts) if n % count < half)
    given = [*work, "layout=async", *pools, f"layout.pools.trainer.hosts=['h[{train}]']"]
    given += [f"limits.host_silence_s={SILENCE_S:g}", f"run.training_steps={steps}"]
    words = ["launch", "quickstart", "--run", RUN, "--hosts", str(machines.file(range(count))), *given]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (machines.folder / "launch.log").open("w") as output:
        subprocess.Popen(machines.command(0, *words), env=environment, stdout=output, stderr=output)
    until(lambda: machines.steps() >= 3, "the third training step")


def tell(machines: Machines, steps: int, hosts: range) -> None:
    """The end of the run, and what it has cost."""
    until(lambda: all(machines.record(host).over for host in hosts), "the end of the run", 10 * LIMIT_S)
    states = {machines.record(host).state for host in hosts}
    rows = [row for row in machines.rows() if "timing_s/step" in row]
    held = sorted(row[SECONDS] for row in rows if SECONDS in row)
    terms: dict[int, set[int]] = {}
    for row in rows:
        terms.setdefault(int(row["step"]), set()).add(int(row["term"]))
    again = sum(len(numbers) > 1 for numbers in terms.values())
    dumps = machines.files("rollouts/step_*/*.jsonl")
    check_positions([json.loads(line) for path in dumps for line in path.read_text().splitlines()], steps, PROMPTS)
    count, where = max(map(max, terms.values())) + 1, ", ".join(f"h{n}" for n in hosts)
    print(
        f"{' and '.join(sorted(states))} on {where}: {len(terms)} of {steps} training steps in {count} terms; trained "
        f"again: {again}; every position once; training was held up for {held[0]:.1f} to {held[-1]:.1f} s each time"
    )


def ended(machines: Machines) -> dict[int, float]:
    """When the samples of each training step were written down; what is collected in the end is written once more."""
    written: dict[tuple[str, str], float] = {}
    for path in machines.folder.glob(f"h*/{RUN}/rollouts/step_*/*.jsonl"):
        key = (path.parent.name, path.name)
        written[key] = min(path.stat().st_mtime, written.get(key, math.inf))
    at: dict[int, float] = {}
    for (folder, _), when in written.items():
        step = int(folder.removeprefix("step_"))
        at[step] = max(when, at.get(step, 0.0))
    return at


def compare(machines: Machines, replaced: Sequence[tuple[float, float]]) -> None:
    """The throughput of the run beside that of its steps in which nothing was `replaced` (seconds from, to)."""
    at = ended(machines)
    first, last = min(at), max(at)
    spans = [(at[step] - at[step - 1], at[step - 1], at[step]) for step in range(first + 1, last + 1)]
    calm = [s for s, begun, over in spans if not any(begun < to and over > since for since, to in replaced)]
    whole = (at[last] - at[first]) / (last - first)
    print(
        f"{last - first} training steps in {(at[last] - at[first]) / 60:.1f} minutes, {len(replaced)} hosts replaced: "
        f"{whole:.3f} s a step, {statistics.mean(calm):.3f} s in the {len(calm)} in which nothing was: "
        f"{statistics.mean(calm) / whole:.1%} of their throughput"
    )


def main() -> None:
    """Replace all hosts of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--minutes", type=float, help="of a run on emulated devices, in place of --steps")
    parser.add_argument("--every", type=float, default=300.0, help="seconds from one host to the next, with --minutes")
    given = parser.parse_args()
    count, paced = given.hosts, given.minutes is not None
    steps = round(60 * given.minutes / STEP_S) if paced else given.steps
    # One is replaced in the middle of each period.
    times = round(60 * given.minutes / given.every) if paced else count
    if times < count:
        parser.error(f"{times} of {count} hosts would be replaced")
    with tempfile.TemporaryDirectory() as place, NetHosts(count + times, Path(place)) as net:
        machines = Machines(net, Path(place))
        begin(machines, count, count + times, steps, EMULATED if paced else PACED)
        began, replaced = time.monotonic(), []
        # The host of `launch` is the last of the first ones; a new host n takes the place of n - count.
        order = [*reversed(range(count)), *range(count, times)]
        newest = 0
        for number, old in enumerate(order):
            if paced:
                time.sleep(max(0.0, began + (number + 0.5) * given.every - time.monotonic()))
            since = time.time()
            replace_host(machines, old, old + count, asked=newest if newest != old else old + 1)
            replaced.append((since, time.time()))
            newest = old + count
        last = range(times, times + count)
        tell(machines, steps, last)
        if paced:
            compare(machines, replaced)
