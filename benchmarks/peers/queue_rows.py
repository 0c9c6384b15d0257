"""Rows through TransferQueue, with the rows of benchmark `rows`.

    python queue_rows.py --rows 1024 --row-bytes 65536 --exchange 1
    python queue_rows.py --rows 1 --row-bytes 4096 --latency 1

This process is the client; the controller and two storage units are Ray actors, as in any of its deployments.
`exchange`: `kv_batch_put` returns when the rows are stored, `kv_batch_get` when they are here. `latency`: one row put,
announced, and fetched, one cycle after another.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import local_ray
from taking_turns import serve

os.environ["TQ_LOGGING_LEVEL"] = "ERROR"

import psutil
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

UNITS = 2
CYCLES = 60
STORE_BYTES = 160 << 20
ACTORS = ("ray::SimpleStorageUnit", "ray::TransferQueueController")


def cpu_clock() -> Callable[[], float]:
    """Seconds of this process and of the queue's actors."""
    mine = [one for one in psutil.process_iter() if one.uids().real == os.getuid() and _is_actor(one)]
    return lambda: time.process_time() + sum(sum(one.cpu_times()[:2]) for one in mine)


def _is_actor(process: Any) -> bool:
    # Of this Ray alone: its workers are children of the raylet, which was started from this folder.
    try:
        line = " ".join(process.cmdline())
        parents = " ".join(word for parent in process.parents() for word in parent.cmdline())
    except psutil.Error:
        return False
    return any(name in line for name in ACTORS) and str(Path.cwd()) in parents


def exchange(rows: int, row_bytes: int) -> Callable[[], dict[str, float]]:
    """All rows put, got and read."""
    table = torch.ones((rows, row_bytes), dtype=torch.uint8)
    fields = TensorDict({"x": table}, batch_size=rows)
    keys = [f"row{number}" for number in range(rows)]
    clock = cpu_clock()
    gb = table.nbytes / 1e9

    def turn() -> dict[str, float]:
        began, cpu = time.perf_counter(), clock()
        transfer_queue.kv_batch_put(keys=keys, partition_id="bench", fields=fields)
        put = time.perf_counter()
        got = transfer_queue.kv_batch_get(keys=keys, partition_id="bench")["x"]
        found = got.unbind() if got.is_nested else list(got)
        fetched, cpu = time.perf_counter(), clock() - cpu
        for row in found:
            (row.view(torch.int64) if row_bytes % 8 == 0 else row).sum()
        ended = time.perf_counter()
        assert len(found) == rows, f"{len(found)} of {rows} rows came back"
        transfer_queue.kv_clear(keys=keys, partition_id="bench")
        return {
            "put_gb_s": gb / (put - began),
            "get_ms": 1e3 * (fetched - put),
            "touch_gb_s": gb / (ended - put),
            "cpu_s_per_gb": cpu / gb,
        }

    return turn


def latency(row_bytes: int) -> Callable[[], dict[str, float]]:
    """One row after another."""
    client = transfer_queue.get_client()
    fields = TensorDict({"x": torch.zeros(1, row_bytes, dtype=torch.uint8)}, batch_size=1)

    def turn() -> dict[str, float]:
        began = time.perf_counter()
        for _ in range(CYCLES):
            client.put(data=fields, partition_id="bench")
            found = client.get_meta(data_fields=["x"], batch_size=1, partition_id="bench", task_name="consumer")
            client.get_data(found)
        seconds = time.perf_counter() - began
        client.clear_partition("bench")
        return {"cycles_per_s": CYCLES / seconds}

    return turn


def main() -> None:
    """Start the queue and take turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--row-bytes", type=int, default=1 << 16)
    parser.add_argument("--exchange", type=int, default=0)
    parser.add_argument("--latency", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    local_ray.start(8 + UNITS, STORE_BYTES)
    backend = {"SimpleStorage": {"num_data_storage_units": UNITS}}
    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend}))
    turn = exchange(options.rows, options.row_bytes) if options.exchange else latency(options.row_bytes)
    serve({"transferqueue": turn}, {})
    transfer_queue.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
