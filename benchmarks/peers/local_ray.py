"""A Ray of this script alone, on the loopback interface. Import it before Ray and torch: it sets their environment."""

from __future__ import annotations

import os
from pathlib import Path

# The second keeps every socket on the loopback interface.
os.environ.update(
    OMP_NUM_THREADS="1", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0"
)

import ray


def start(cpus: int, store_bytes: int) -> None:
    """Start it in the working directory, with so many logical CPUs and so much of an object store."""
    ray.init(
        num_cpus=cpus,
        object_store_memory=store_bytes,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(Path.cwd()),
    )
