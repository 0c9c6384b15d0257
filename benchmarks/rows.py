"""Rows from one process to another, many at once and one at a time, beside memory, ZeroMQ and TransferQueue.

    make peers-venv                    # TransferQueue in a virtual environment of its own
    python -m benchmarks rows [exchange | latency] [--peers PYTHON]

`exchange`: `put` lasts from the rows in memory of one process until the other has them; `get` is what the other then
needs to have a view of each row, `touch` the same and reading every byte. `latency`: from one row until a consumer that
waits for it has it; a cycle lasts until the writer knows.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.parts import rows_workers
from benchmarks.parts.other_systems import USUAL, OtherSystems
from benchmarks.parts.rows_workers import READER, WRITER, RowsSetting
from benchmarks.parts.team import Team
from benchmarks.parts.turns import Figures, Measurement, Turn, take_turns, turn_options

PLAIN_SIZES = {"64k": 1 << 16, "256k": 1 << 18, "1m": 1 << 20, "4m": 1 << 22}
"""Messages of plain pyzmq; the best of them counts."""
TRANSFER_QUEUE = "transferqueue"


class Pair:
    """The two processes."""

    def __init__(self, team: Team, setting: RowsSetting) -> None:
        self._team = team
        self.setting = setting
        team.start(WRITER, rows_workers.write, setting)
        team.start(READER, rows_workers.read, setting)
        team.answers([WRITER, READER])
        team.tell([WRITER, READER], {})

    def both(self, order: str, number: int) -> Any:
        """An order to both; the writer's answer."""
        self._team.tell([READER, WRITER], (order, number))
        return self._team.answers([WRITER, READER])[WRITER]

    def one(self, name: str, order: str, number: int = 0) -> Any:
        """An order to one of them, and its answer."""
        self._team.tell([name], (order, number))
        return self._team.answers([name])[name]

    def exchange(self) -> Figures:
        """All rows put, got and read."""
        self.one(READER, "begin")
        put, got = self.one(WRITER, "put"), self.one(READER, "get")
        gb = self.setting.nbytes / 1e9
        return {
            "put_gb_s": gb / put["seconds"],
            "get_ms": got["get_s"] * 1e3,
            "touch_gb_s": gb / got["touch_s"],
            "cpu_s_per_gb": (put["cpu_s"] + got["cpu_s"]) / gb,
        }

    def limits(self) -> Figures:
        """What memory does on this machine now."""
        found, gb = self.one(WRITER, "copy"), self.setting.nbytes / 1e9
        return {
            "shm_copy_gb_s": gb / found["shm_s"],
            "memcpy_gb_s": gb / found["memcpy_s"],
        }

    def lane(self) -> Figures:
        """Bytes over the sockets of an endpoint, as to another host."""
        return {"gb_s": self.setting.nbytes / 1e9 / self.one(WRITER, "raw")["seconds"]}

    def plain(self, size: int) -> Figures:
        """The same over plain pyzmq."""
        return {"gb_s": self.setting.nbytes / 1e9 / self.both("plain", size)["seconds"]}

    def latency(self, count: int) -> Figures:
        """One row at a time."""
        found: Mapping[str, list[float]] = self.both("row", count)
        hundredths = statistics.quantiles(found["visible_s"], n=100)
        return {
            "visible_p50_ms": hundredths[49] * 1e3,
            "visible_p99_ms": hundredths[98] * 1e3,
            "cycles_per_s": count / sum(found["cycle_s"]),
        }

    def echo(self, count: int) -> Figures:
        """Round trips over plain pyzmq."""
        return {"zmq_rtt_ms": statistics.median(self.both("echo", count)["seconds"]) * 1e3}


def measure_exchange(rows: int, row_bytes: int, repetitions: int, peers: str | None) -> Measurement:
    """Many rows at once."""
    sizes = {"rows": rows, "row-bytes": row_bytes}

    def contestants(pair: Pair) -> dict[str, Turn]:
        plain: dict[str, Turn] = {f"plain {n}": partial(pair.plain, size) for n, size in PLAIN_SIZES.items()}
        return {"distflow": pair.exchange, "limits": pair.limits, "lane": pair.lane, **plain}

    measurement, found = _measured("exchange", sizes, contestants, repetitions, peers)
    for name in ("put_gb_s", "get_ms", "touch_gb_s", "cpu_s_per_gb"):
        measurement.tell(name, found["distflow"])
    for name in ("shm_copy_gb_s", "memcpy_gb_s"):
        measurement.tell(name, found["limits"])
    figures = measurement.figures
    figures["put_of_shm_copy"] = figures["put_gb_s"] / figures["shm_copy_gb_s"]
    figures["touch_of_memcpy"] = figures["touch_gb_s"] / figures["memcpy_gb_s"]
    measurement.tell("lane_gb_s", found["lane"], of="gb_s")
    best = max(PLAIN_SIZES, key=lambda n: found[f"plain {n}"].median("gb_s"))
    measurement.tell("plain_zmq_gb_s", found[f"plain {best}"], of="gb_s")
    figures["lane_of_plain_zmq"] = figures["lane_gb_s"] / figures["plain_zmq_gb_s"]
    if TRANSFER_QUEUE in found:
        theirs = found[TRANSFER_QUEUE]
        for name in ("put_gb_s", "touch_gb_s", "cpu_s_per_gb"):
            measurement.tell(f"{TRANSFER_QUEUE}_{name}", theirs, of=name)
        figures[f"{TRANSFER_QUEUE}_put_ratio"] = figures["put_gb_s"] / theirs.median("put_gb_s")
        figures[f"{TRANSFER_QUEUE}_get_ratio"] = figures["touch_gb_s"] / theirs.median("touch_gb_s")
        figures[f"{TRANSFER_QUEUE}_cpu_ratio"] = figures["cpu_s_per_gb"] / theirs.median("cpu_s_per_gb")
    return measurement


def measure_latency(row_bytes: int, count: int, repetitions: int, peers: str | None) -> Measurement:
    """One row at a time."""

    def contestants(pair: Pair) -> dict[str, Turn]:
        return {"distflow": lambda: pair.latency(count), "echo": lambda: pair.echo(count)}

    sizes = {"rows": 1, "row-bytes": row_bytes}
    measurement, found = _measured("latency", sizes, contestants, repetitions, peers)
    for name in ("visible_p50_ms", "visible_p99_ms", "cycles_per_s"):
        measurement.tell(name, found["distflow"])
    measurement.tell("zmq_rtt_ms", found["echo"])
    figures = measurement.figures
    figures["visible_of_zmq_rtt"] = figures["visible_p50_ms"] / figures["zmq_rtt_ms"]
    if TRANSFER_QUEUE in found:
        measurement.tell(f"{TRANSFER_QUEUE}_cycles_per_s", found[TRANSFER_QUEUE], of="cycles_per_s")
        figures[f"{TRANSFER_QUEUE}_ratio"] = figures["cycles_per_s"] / figures[f"{TRANSFER_QUEUE}_cycles_per_s"]
    return measurement


def _measured(
    name: str,
    sizes: Mapping[str, int],
    contestants: Callable[[Pair], dict[str, Turn]],
    repetitions: int,
    peers: str | None,
) -> tuple[Measurement, Mapping[str, Any]]:
    measurement = Measurement(name, repetitions)
    with ExitStack() as stack:
        others = stack.enter_context(OtherSystems("queue_rows", peers, [TRANSFER_QUEUE], {**sizes, name: 1}))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="df-"))
        team = stack.enter_context(Team(rows_workers.__name__))
        pair = Pair(team, RowsSetting(folder, sizes["rows"], sizes["row-bytes"]))
        found = take_turns({**contestants(pair), **others.turns}, repetitions)
        measurement.left_out = others.left_out
    return measurement, found


def main() -> None:
    """Both measurements, or the one that is named."""
    parser = turn_options(__doc__)
    parser.add_argument("what", nargs="?", choices=["exchange", "latency"], help="default: both")
    parser.add_argument("--peers", metavar="PYTHON", help=f"Python that has the other system [{USUAL}]")
    parser.add_argument("--rows", type=int, default=1024, help="of exchange")
    parser.add_argument("--row-bytes", type=int, help="default: 65,536 of exchange, 4,096 of latency")
    parser.add_argument("--count", type=int, default=300, help="rows a repetition, of latency")
    chosen = parser.parse_args()
    if chosen.what in (None, "exchange"):
        found = measure_exchange(chosen.rows, chosen.row_bytes or 64 << 10, chosen.repetitions, chosen.peers)
        print(found.show(chosen.json))
    if chosen.what in (None, "latency"):
        found = measure_latency(chosen.row_bytes or 4 << 10, chosen.count, chosen.repetitions, chosen.peers)
        print(found.show(chosen.json))
