"""A search for faults: random scenarios through the code that decides in a run, and each seed that breaks a promise.

    python -m tests.search --count 10000                                  # all cores in turn, layouts of all kinds
    python -m tests.search leases calls --seed 4000000 --count 20000      # these in turn
    python -m tests.search --count 1000 --recipe quickstart layout=services flow=grpo_kl

With a recipe, leases and half of the other scenarios have its layout. A scenario follows from its seed (and the recipe)
and takes 0.05 to 0.3 s of one core: run long searches with `nice`. What breaks a promise is told at once, with the
command that repeats it alone; every 500 scenarios it says how far it is. The exit code is 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from distflow.cluster.processes import STOPPED
from distflow.flow.recipe_check import plan_recipe
from distflow.sim.notes import counted
from tests.search.fault_layouts import FaultLayouts, layouts_of, shown_layouts
from tests.search.fault_queue import Fault
from tests.search.fault_search import CORES, SearchedCores, search_cores
from tests.search.lease_faults import BrokenPromise

TELL_EVERY, COLLECT_EVERY = 500, 100
"""Scenarios."""


def main(words: Sequence[str] | None = None) -> int:
    """Search; returns the exit code: 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        "python -m tests.search", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cores", nargs="*", metavar="CORES", help=f"some of {', '.join(CORES)} (all)")
    parser.add_argument("--seed", type=int, default=0, help="the first (0)")
    parser.add_argument("--count", type=int, default=1000, help="scenarios (1,000)")
    parser.add_argument("--recipe", nargs="+", metavar="WORD", help="a recipe's name, and changes of its keys")
    given = parser.parse_args(words)
    cores, recipe = list(dict.fromkeys(given.cores)), given.recipe or []
    layouts = layouts_of(plan_recipe(recipe[0], recipe[1:], need_files=False)[1]) if recipe else None
    lacking = {} if layouts is None else layouts.lacking
    for name in cores:
        if name not in CORES:
            parser.error(f"{name}: expected some of {', '.join(CORES)}")
        if name in lacking:
            parser.error(f"{name}: {lacking[name]} — leave it out, or name another layout")
    searched = {name: SearchedCores() for name in cores or CORES if name not in lacking}
    interrupted = _search(layouts, searched, range(given.seed, given.seed + given.count), recipe)
    print("\n".join(page(searched, layouts)))
    if not cores:
        print("".join(f"{name}: not searched, for {why}\n" for name, why in lacking.items()), end="")
    print(last_line(searched, given.seed))
    return STOPPED if interrupted else 1 if any(one.broken for one in searched.values()) else 0


def _search(
    layouts: FaultLayouts | None, searched: Mapping[str, SearchedCores], seeds: range, recipe: Sequence[str]
) -> bool:
    """Judge the scenarios of all seeds, telling what they break; returns whether it was interrupted."""
    began, collects = time.monotonic(), gc.isenabled()
    # Looking for cycles again and again costs more than the cycles do.
    gc.disable()
    try:
        for number, one in enumerate(search_cores(layouts, list(searched), seeds), start=1):
            searched[one.cores].add(one)
            if one.broken is not None:
                print(found_line(one.cores, one.broken, recipe), flush=True)
            if number % COLLECT_EVERY == 0:
                gc.collect()
            if number % TELL_EVERY == 0 and number < len(seeds):
                broken = sum(len(each.broken) for each in searched.values())
                cpu_s, wall_s = time.process_time(), time.monotonic() - began
                told = f"{number} scenarios, {broken} broke a promise; {cpu_s:.0f} s of a core, {wall_s:.0f} s"
                print(told, flush=True)
    except KeyboardInterrupt:
        return True
    finally:
        if collects:
            gc.enable()
    return False


def found_line(cores: str, broken: BrokenPromise, recipe: Sequence[str]) -> str:
    """Say which promise was broken, and by which command the scenario is repeated alone."""
    words = ["python", "-m", "tests.search", cores, "--seed", str(broken.seed), "--count", "1"]
    again = shlex.join([*words, *(["--recipe", *recipe] if recipe else [])])
    return f"{cores}, seed {broken.seed}: {broken.what}\n  repeat it with: {again}"


def page(searched: Mapping[str, SearchedCores], layouts: FaultLayouts | None) -> list[str]:
    """Say what came of each kind of cores."""
    lines, small = [], {} if layouts is None else shown_layouts(layouts)
    for name, one in searched.items():
        own = _own(name, one) if name in small else ""
        lines.append(f"{name}: {counted(one.scenarios, 'scenario')}{own}; {_kept(one)}")
        if name in small:
            lines.append(f"  the recipe's layout: {small[name]}")
        if one.injected:
            lines.append(f"  injected: {shown_faults(one.injected)}")
    return lines


def shown_faults(injected: Counter[Fault]) -> str:
    """List them as in `crashes 3, cuts 1`, always in the same order."""
    return ", ".join(f"{what.replace('_', ' ')} {injected[what]:,}" for what in get_args(Fault) if injected[what])


def last_line(searched: Mapping[str, SearchedCores], first: int) -> str:
    """Say what came of all; `first`: the first seed."""
    scenarios = sum(one.scenarios for one in searched.values())
    if not scenarios:
        return "interrupted before the first scenario was over"
    broken = sum(len(one.broken) for one in searched.values())
    each = ", ".join(f"{one.scenarios} of {name}" for name, one in searched.items())
    kept = f"{broken} broke a promise" if broken else "all promises were kept"
    return f"{counted(scenarios, 'scenario')} ({each}), seeds {first} to {first + scenarios - 1}: {kept}"


def _own(name: str, one: SearchedCores) -> str:
    if name == "leases":
        return " with the recipe's layout"
    return f", {one.own} with the recipe's layout and {one.others} with random ones"


def _kept(one: SearchedCores) -> str:
    if not one.broken:
        return "all promises were kept"
    return f"{len(one.broken)} broke a promise, seeds {', '.join(str(broken.seed) for broken in one.broken)}"


if __name__ == "__main__":
    raise SystemExit(main())
