"""The seed of an engine that draws by random numbers of its own."""

from __future__ import annotations

import zlib

from setproctitle import getproctitle

from distflow.runtime.protocols import EngineSpec


def engine_seed(spec: EngineSpec) -> int:
    """Of 32 bits. Another one for each worker of a pool, told by its title, and for each life of a worker."""
    return zlib.crc32(f"{spec.seed} {getproctitle()} {spec.life}".encode())
