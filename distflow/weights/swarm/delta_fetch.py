"""A version made on the host of a reader: of an older one there, and the deltas that lead from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from distflow.errors import ProtocolError
from distflow.log import logger
from distflow.types import Version
from distflow.weights.encodings.delta import apply_part, parts_of
from distflow.weights.manifest import CHUNK_BYTES, Manifest, coding_threads, digest
from distflow.weights.swarm.chunk_server import ChunkServer
from distflow.weights.swarm.client import FetchRules, SwarmClient
from distflow.weights.swarm.delta_memory import DeltaFile, DeltaMemory
from distflow.weights.swarm.held_version import HeldVersion
from distflow.weights.swarm.private_segments import NotServing

log = logger(__name__)


class DeltaFetch:
    """Fetches deltas and serves them to readers on other hosts, as long as new versions name them."""

    def __init__(self, server: ChunkServer | NotServing) -> None:
        self._server = server
        self._held: list[HeldVersion] = []

    def keep_for(self, manifest: Manifest) -> None:
        """Forget those that do not lead to this version."""
        named = {manifest.of_delta(delta).content for delta in manifest.deltas}
        for held in [held for held in self._held if held.manifest.content not in named]:
            self._server.forget(held)
            self._held.remove(held)

    def fetch(
        self,
        manifest: Manifest,
        base: Version,
        client: SwarmClient,
        came: Callable[[int], None],
        rules: FetchRules,
    ) -> list[memoryview]:
        """The bytes of the deltas that lead from version `base`; `came` is called with the size of each chunk.

        Raises what SwarmClient raises.
        """
        return [self._fetch_one(manifest.of_delta(delta), client, came, rules) for delta in manifest.chain_from(base)]

    def _fetch_one(
        self, manifest: Manifest, client: SwarmClient, came: Callable[[int], None], rules: FetchRules
    ) -> memoryview:
        with DeltaFile() as file:
            memory = DeltaMemory(manifest, file)

        def arrived(chunk: int) -> None:
            memory.held.add(chunk)
            came(manifest.size_of(chunk))
            self._server.notify()

        self._server.hold(memory.held)
        try:
            client.fetch(manifest, memory.data, arrived, partial(self._server.expect, memory.held), rules)
        except BaseException:
            self._server.forget(memory.held)
            raise
        memory.finish()
        self._held.append(memory.held)
        return memory.data


def make(manifest: Manifest, base: memoryview, deltas: Sequence[memoryview], into: memoryview) -> list[int]:
    """Make a version of an older one; returns the chunks that have the announced digests. On several threads.

    Raises ProtocolError for deltas that are none.
    """
    parts = [parts_of(delta, manifest.size) for delta in deltas]

    def made(chunk: int) -> bool:
        span = slice(chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES)
        target = into[span]
        # Unlike a slice assignment this releases the GIL.
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(base[span], np.uint8))
        try:
            for delta in parts:
                apply_part(delta[chunk], target)
        except ProtocolError as error:
            log.warning("%s, chunk %d: %s", manifest.title, chunk, error)
            return False
        return digest(target) == manifest.digest_of(chunk)

    with ThreadPoolExecutor(coding_threads()) as pool:
        return [chunk for chunk, right in enumerate(pool.map(made, range(manifest.chunks))) if right]
