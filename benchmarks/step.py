"""The samples of one training step from the workers that made them to the trainers, beside verl, siiRL and Ray.

    make peers-venv                    # the other systems in a virtual environment of their own
    python -m benchmarks step [--peers PYTHON]
    python -m benchmarks step --links 200mbit --hosts 4

Half of the workers have generated the samples, the others train on them (read every byte once). A step begins with
the leases and ends when all training workers have read all that is theirs. The other systems move the same number of
samples, tokens and fields of the same types.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.parts import step_workers
from benchmarks.parts.other_systems import USUAL, OtherSystems
from benchmarks.parts.step_workers import TOKEN_BYTES, StepSetting, generate, train
from benchmarks.parts.team import Team
from benchmarks.parts.turns import Figures, Measurement, Series, Turn, take_turns, turn_options
from distflow.comm.keys import NetworkListener, make_keys
from distflow.errors import UserError
from tests.hosts.bridged import BridgedHosts, NetHost, bits_per_second, why_no_hosts

OTHERS = ("verl", "verl_whole_step", "ray_pull", "ray_pull_numpy", "siirl")
WARM_UPS = 2


class StepTeam:
    """The workers of one machine, or of hosts of which half generate and half train."""

    def __init__(
        self, team: Team, folder: Path, sizes: Mapping[str, int], steps: int, hosts: Sequence[NetHost] = ()
    ) -> None:
        half = sizes["workers"] // 2
        self._sizes = sizes
        self._owners = tuple(f"trainer/{number}" for number in range(half))
        self._holders = tuple(f"rollout/{number}" for number in range(half))
        self._names = (*self._owners, *self._holders)
        self._team = team
        places = self._places(hosts)
        members = {**dict.fromkeys(self._owners, train), **dict.fromkeys(self._holders, generate)}
        keys = make_keys()
        for name in self._names:
            host = places[name]
            near = [other for other in self._names if places[other] == host]
            roster = {
                other: f"ipc://{folder}/{other.replace('/', '-')}" if other in near else "" for other in self._names
            }
            listener = None if host is None else NetworkListener(host.address, keys)
            setting = StepSetting(
                self._owners, self._holders, roster, sizes["samples"], sizes["tokens"], steps, listener
            )
            team.start(name, members[name], setting, None if host is None else host.network)
        addresses = team.answers(self._names)
        for name in self._names:
            team.tell([name], {other: addresses[other] for other in self._names if places[other] != places[name]})
        self._used = self._usage()

    def turn(self) -> Figures:
        """One step, by leases."""
        began = time.perf_counter()
        self._team.tell(self._owners, "step")
        self._team.answers(self._owners)
        seconds = time.perf_counter() - began
        before, self._used = self._used, self._usage()
        moved = {name: used["bytes"] - before[name]["bytes"] for name, used in self._used.items()}
        cpu_s = sum(used["cpu_s"] - before[name]["cpu_s"] for name, used in self._used.items())
        everything = sum(moved.values())
        gb = self._sizes["samples"] * self._sizes["tokens"] * TOKEN_BYTES / 1e9
        return {
            "seconds": seconds,
            "busiest_share": max(moved.values()) / everything,
            "cpu_s_per_gb": cpu_s / gb,
            "gb_s": gb / seconds,
            "moved_of_batch": everything / 2 / 1e9 / gb,
        }

    def _places(self, hosts: Sequence[NetHost]) -> dict[str, NetHost | None]:
        """Which host each worker is on."""
        if not hosts:
            return dict.fromkeys(self._names)
        half = len(hosts) // 2
        sides = ((self._holders, hosts[:half]), (self._owners, hosts[half:]))
        return {name: side[n * half // len(names)] for names, side in sides for n, name in enumerate(names)}

    def _usage(self) -> Mapping[str, Mapping[str, float]]:
        self._team.tell(self._names, "usage")
        return self._team.answers(self._names)


def measure(sizes: Mapping[str, int], repetitions: int, peers: str | None) -> Measurement:
    """Ours beside the other systems that are installed. `sizes`: workers, samples, tokens."""
    outcome = Measurement("step", repetitions)
    with ExitStack() as stack:
        others = stack.enter_context(OtherSystems("ray_step", peers, OTHERS, sizes))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="df-")))
        team = stack.enter_context(Team(step_workers.__name__))
        ours = StepTeam(team, folder, sizes, WARM_UPS + repetitions)
        turns: dict[str, Turn] = {"distflow": ours.turn, **others.turns}
        found = take_turns(turns, repetitions, WARM_UPS)
        outcome.left_out = others.left_out
    _tell(outcome, found, sizes["workers"])
    return outcome


def _tell(outcome: Measurement, found: Mapping[str, Series], workers: int) -> None:
    ours = found["distflow"]
    for name in ("seconds", "gb_s", "cpu_s_per_gb", "busiest_share", "moved_of_batch"):
        outcome.tell(name, ours)
    outcome.figures["busiest_share_of_even"] = outcome.figures["busiest_share"] * workers
    for system, series in found.items():
        if series is not ours:
            outcome.tell(f"{system}_seconds", series, of="seconds")
            outcome.figures[f"{system}_ratio"] = outcome.figures[f"{system}_seconds"] / outcome.figures["seconds"]


def measure_links(sizes: Mapping[str, int], repetitions: int, hosts: int, rate: str) -> Measurement:
    """Ours, on hosts whose links carry so much in each direction."""
    measurement = Measurement("step", repetitions)
    if (why := why_no_hosts()) is not None:
        raise UserError(f"step --links: {why}")
    bytes_per_s = bits_per_second(rate) / 8
    with ExitStack() as stack:
        bridged = stack.enter_context(BridgedHosts(hosts, rate))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="df-")))
        team = stack.enter_context(Team(step_workers.__name__))
        ours = StepTeam(team, folder, sizes, 1 + repetitions, bridged.hosts)
        found = take_turns({"distflow": ours.turn}, repetitions)
    _tell(measurement, found, sizes["workers"])
    # Each host that trains gets its share over one link, and nothing else goes over it that way.
    nbytes = sizes["samples"] * sizes["tokens"] * TOKEN_BYTES / (hosts // 2)
    measurement.figures["limit_seconds"] = nbytes / bytes_per_s
    measurement.figures["link_share"] = nbytes / bytes_per_s / measurement.figures["seconds"]
    return measurement


def main() -> None:
    """Beside other systems, or over links between hosts."""
    parser = turn_options(__doc__)
    parser.add_argument("--peers", metavar="PYTHON", help=f"Python that has the other systems [{USUAL}]")
    parser.add_argument("--workers", type=int, default=8, help="half generate, half train")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024, help="of each sample")
    parser.add_argument("--links", metavar="RATE", help="on hosts (network namespaces) whose links carry this")
    parser.add_argument("--hosts", type=int, default=4, help="of --links; half generate")
    chosen = parser.parse_args()
    sizes = {"workers": chosen.workers, "samples": chosen.samples, "tokens": chosen.tokens}
    if chosen.links is None:
        found = measure(sizes, chosen.repetitions, chosen.peers)
    else:
        found = measure_links(sizes, chosen.repetitions, chosen.hosts, chosen.links)
    print(found.show(chosen.json))
