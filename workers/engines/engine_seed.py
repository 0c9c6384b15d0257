"""The seeds of an engine that draws by random numbers of its own."""

from __future__ import annotations

import zlib

import xxhash
from setproctitle import getproctitle

from distflow.runtime.protocols import EngineSpec
from distflow.workers.engines.samples import Sample


def engine_seed(spec: EngineSpec) -> int:
    """Of 32 bits. Another one for each worker of a pool, told by its title, and for each life of a worker."""
    return zlib.crc32(f"{spec.seed} {getproctitle()} {spec.life}".encode())


def sample_seed(sample: Sample) -> int:
    """Of 63 bits, which is what a torch generator takes: of this sample, from where it starts here."""
    request, begun = sample.group.request, len(sample.before.token_ids)
    drawn = f"{request.seed} sample {request.position} {sample.before.sample} {begun}"
    return xxhash.xxh3_64_intdigest(drawn.encode()) >> 1
