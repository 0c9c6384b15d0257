"""Versions of a model to readers on the publisher's host and on others, by each link.

    python -m benchmarks weights [--megabytes 64]

Within the host three readers at once check a version and copy it into parameters of their own; the limit is one copy
of the model in memory. To other hosts (processes that share no memory with the publisher, over loopback) a version
goes by the swarm, plain and encrypted; the limit is one bare socket into the same kind of buffer. `uplink_ratio_N` is
what the publisher itself sends to N hosts that fetch at the same time, in models. By the collective link SENDERS
trainers send their parts to TAKERS readers, each of which wants other parts, over Gloo; the model crosses once. Where
NIXL is installed, another host reads the version in the publisher's memory (without RDMA cards UCX takes TCP). What
an optimizer step has changed is measured by `weight_delta`.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from benchmarks.parts import weights_parts, weights_workers
from benchmarks.parts.team import Team
from benchmarks.parts.turns import Figures, Measurement, Turn, take_turns, turn_options
from benchmarks.parts.weights_parts import PartSetting
from benchmarks.parts.weights_workers import WeightsSetting
from distflow.weights.segments.segment_file import SEGMENTS
from distflow.weights.segments.shm import segment_prefix

PUBLISHER = "publisher"
READERS = ("reader-0", "reader-1", "reader-2")
UPLINKS = (1, 4, 12)
SENDERS, TAKERS = 2, 3
WARM_UPS = 3
"""Publishers and readers keep several segments, whose memory is touched in the first turns."""


class Links:
    """The processes, and one turn of each link."""

    def __init__(self, team: Team, setting: WeightsSetting, hosts: int) -> None:
        self._team, self._setting = team, setting
        self.hosts = [f"host-{number}" for number in range(hosts)]
        self._numbers = count()
        team.start(PUBLISHER, weights_workers.publish, setting)
        for name in READERS:
            team.start(name, weights_workers.read_here, setting)
        for name in self.hosts:
            team.start(name, weights_workers.read_afar, setting)
        team.answers([PUBLISHER, *READERS, *self.hosts])

    def with_parts(self, store: Path) -> Self:
        """And the processes of the collective link, which meet at file `store`."""
        self._ranks = [f"rank-{number}" for number in range(SENDERS + TAKERS)]
        for rank, name in enumerate(self._ranks):
            part = PartSetting(store, rank, SENDERS, TAKERS, self._setting.nbytes)
            self._team.start(name, weights_parts.move_parts, part)
        self._team.answers(self._ranks)
        return self

    def memcpy(self) -> Figures:
        """One copy of the model."""
        (found,) = self._all(READERS[:1], "memcpy", 0)
        return {"seconds": found["seconds"], "cpu_s_per_gb": found["cpu_s"] * 1e9 / self._setting.nbytes}

    def shm(self) -> Figures:
        """Three readers of the publisher's host at once; the slowest counts, and the CPU time of all."""
        found = self._all(READERS, "shm", self._publish()["local"])
        cpu_s = sum(one["cpu_s"] for one in found) / len(READERS)
        return {
            "seconds": max(one["seconds"] for one in found),
            "cpu_s_per_gb": cpu_s * 1e9 / self._setting.nbytes,
        }

    def publish(self) -> Figures:
        """What a trainer waits for: a version in shared memory. Sums and announcements are made while it trains on."""
        return {"seconds": self._publish()["publish_s"]}

    def first(self) -> Figures:
        """The first version of a publisher, until it can be announced on its host."""
        return {"seconds": self._all([PUBLISHER], "first", None)[0]}

    def raw(self) -> Figures:
        """One bare socket."""
        port = self._publish()["port"]
        self._team.tell([PUBLISHER], ("raw", None))
        (seconds,) = self._all(self.hosts[:1], "raw", port)
        self._team.answers([PUBLISHER])
        return {"gb_s": self._setting.nbytes / 1e9 / seconds}

    def swarm(self, kind: str, hosts: int) -> Figures:
        """So many hosts at once; the slowest counts."""
        wire = self._publish()[kind]
        before = self._all([PUBLISHER], "sent", kind)[0]
        found = self._all(self.hosts[:hosts], "fetch", (kind, wire))
        after = self._all([PUBLISHER], "sent", kind)[0]
        gb = self._setting.nbytes / 1e9
        cpu_s = after["cpu_s"] - before["cpu_s"] + sum(one["cpu_s"] for one in found)
        return {
            "gb_s": gb / max(one["seconds"] for one in found),
            "uplink": (after["bytes"] - before["bytes"]) / self._setting.nbytes,
            "cpu_s_per_gb": cpu_s / gb / hosts,
        }

    def collective(self) -> Figures:
        """The parts of a version to all that want them; the slowest counts."""
        found = self._all(self._ranks, "move", None)
        gb = self._setting.nbytes / 1e9
        return {
            "gb_s": gb / max(one["seconds"] for one in found),
            "cpu_s_per_gb": sum(one["cpu_s"] for one in found) / gb,
            "uplink": sum(one["bytes"] for one in found) / self._setting.nbytes,
        }

    def _publish(self) -> Any:
        return self._all([PUBLISHER], "publish", next(self._numbers))[0]

    def _all(self, names: Sequence[str], order: str, setting: object) -> list[Any]:
        self._team.tell(names, (order, setting))
        found = self._team.answers(names)
        return [found[name] for name in names]


def _remove_segments(tag: str) -> None:
    for path in SEGMENTS.glob(f"{segment_prefix(tag)}*"):
        path.unlink(missing_ok=True)


def measure(megabytes: int, repetitions: int) -> Measurement:
    """All links in turn."""
    measurement = Measurement("weights", repetitions)
    setting = WeightsSetting(f"bench-{uuid.uuid4().hex[:8]}", megabytes << 20)
    with ExitStack() as stack:
        # Killed processes leave theirs, of the size of several models.
        stack.callback(_remove_segments, setting.tag)
        team = stack.enter_context(Team(weights_parts.__name__))
        folder = stack.enter_context(TemporaryDirectory())
        links = Links(team, setting, max(UPLINKS)).with_parts(Path(folder, "store"))
        contestants: dict[str, Turn] = {
            "memcpy": links.memcpy,
            "publish": links.publish,
            "first": links.first,
            "shm": links.shm,
            "raw": links.raw,
        }
        contestants |= {kind: partial(links.swarm, kind, 1) for kind in ("plain", "encrypted")}
        if weights_workers.ONE_SIDED in weights_workers.kinds():
            contestants["nixl"] = partial(links.swarm, weights_workers.ONE_SIDED, 1)
        contestants["collective"] = links.collective
        contestants |= {f"crowd {hosts}": partial(links.swarm, "crowd", hosts) for hosts in UPLINKS}
        found = take_turns(contestants, repetitions, WARM_UPS)
    figures = measurement.figures
    measurement.tell("shm_s", found["shm"], of="seconds")
    measurement.tell("memcpy_s", found["memcpy"], of="seconds")
    figures["shm_memcpy_ratio"] = figures["shm_s"] / figures["memcpy_s"]
    for name in ("publish", "first"):
        measurement.tell(f"{name}_s", found[name], of="seconds")
    figures["publish_stall_ratio"] = figures["publish_s"] / figures["memcpy_s"]
    figures["first_memcpy_ratio"] = figures["first_s"] / figures["memcpy_s"]
    measurement.tell("shm_cpu_s_per_gb", found["shm"], of="cpu_s_per_gb")
    measurement.tell("memcpy_cpu_s_per_gb", found["memcpy"], of="cpu_s_per_gb")
    measurement.tell("raw_tcp_gb_s", found["raw"], of="gb_s")
    measurement.tell("swarm_gb_s", found["plain"], of="gb_s")
    measurement.tell("encrypted_gb_s", found["encrypted"], of="gb_s")
    measurement.tell("cpu_s_per_gb", found["plain"])
    figures["swarm_of_raw_tcp"] = figures["swarm_gb_s"] / figures["raw_tcp_gb_s"]
    figures["encrypted_of_raw_tcp"] = figures["encrypted_gb_s"] / figures["raw_tcp_gb_s"]
    for hosts in UPLINKS:
        measurement.tell(f"uplink_ratio_{hosts}", found[f"crowd {hosts}"], of="uplink")
    measurement.tell("one_among_12_gb_s", found["crowd 1"], of="gb_s")
    if "nixl" in found:
        measurement.tell("nixl_gb_s", found["nixl"], of="gb_s")
        figures["nixl_of_raw_tcp"] = figures["nixl_gb_s"] / figures["raw_tcp_gb_s"]
        # What did not come by reads.
        measurement.tell("nixl_by_swarm_ratio", found["nixl"], of="uplink")
    measurement.tell("collective_gb_s", found["collective"], of="gb_s")
    figures["collective_of_raw_tcp"] = figures["collective_gb_s"] / figures["raw_tcp_gb_s"]
    measurement.tell("collective_cpu_s_per_gb", found["collective"], of="cpu_s_per_gb")
    measurement.tell("collective_uplink_ratio", found["collective"], of="uplink")
    return measurement


def main() -> None:
    """All links in turn."""
    parser = turn_options(__doc__)
    parser.add_argument("--megabytes", type=int, default=64, help="of the model")
    chosen = parser.parse_args()
    print(measure(chosen.megabytes, chosen.repetitions).show(chosen.json))
