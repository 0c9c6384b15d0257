"""A long search for faults: scenarios by the thousand, of all kinds of layouts, and each seed that breaks a promise.

    python -m benchmarks.faults leases --seed 0 --count 10000       # leases, stealing, dealing, terms, weights
    python -m benchmarks.faults calls --seed 0 --count 10000        # calls of other pools
    python -m benchmarks.faults agents --seed 0 --count 10000       # host agents: reports, silence, terms of training
    python -m benchmarks.faults weights --seed 0 --count 10000      # fetches of versions of weights

`distflow simulate RECIPE --faults N` has the layout of one recipe in leases, and in half of the others. A scenario
follows from its seed. It takes 0.05 to 0.3 s of one core, so run it with `nice` and in the background. Every 500
scenarios it says how far it is, and what was injected.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from dataclasses import replace
from typing import get_args

from distflow.config.schema import Schedule
from distflow.sim import fault_search
from distflow.sim.event_queue import Fault
from distflow.sim.fault_layouts import FaultLayouts
from distflow.sim.fault_report import shown_faults
from distflow.sim.faults import Arithmetic, BrokenPromise, judge, scenario_of, variants

EVERY, COLLECT = 500, 100


def kinds() -> list[Arithmetic]:
    """All layouts, under all schedules of leases that they allow."""
    return [
        replace(kind, schedule=schedule)
        for schedule in get_args(Schedule)
        for kind in variants()
        if schedule == "fifo" or kind.staleness is not None
    ]


def judge_leases(seed: int, _layouts: FaultLayouts | None, injected: Counter[Fault]) -> BrokenPromise | None:
    """The scenario of a seed, of one kind after the other."""
    every = kinds()
    return judge(seed, scenario_of(every[seed % len(every)], seed), injected)


JUDGES = {**fault_search.JUDGES, "leases": judge_leases}


def main() -> int:
    """Search; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=JUDGES)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--count", type=int, default=10_000)
    args = parser.parse_args()
    judged, broken, injected, began = JUDGES[args.what], 0, Counter[Fault](), time.monotonic()
    # Looking for cycles again and again costs more than the cycles do.
    gc.disable()
    for number, seed in enumerate(range(args.seed, args.seed + args.count), start=1):
        found = judged(seed, None, injected)
        if found is not None:
            broken += 1
            print(f"seed {seed}: {found.what}", flush=True)
        if number % COLLECT == 0:
            gc.collect()
        if number % EVERY == 0 or number == args.count:
            cpu, wall = time.process_time(), time.monotonic() - began
            print(f"{number} scenarios, {broken} broke a promise; {cpu:.0f} s of a core, {wall:.0f} s")
            print(f"  injected: {shown_faults(injected)}", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
