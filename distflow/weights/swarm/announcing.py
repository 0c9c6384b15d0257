"""What a version needs before it can be announced is computed on a thread: the trainer trains on meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from distflow.errors import Overtaken
from distflow.log import logger
from distflow.types import Version
from distflow.weights.manifest import Manifest

CLOSE_S = 5.0

log = logger(__name__)


class Announcing:
    """Calls `prepare` for each version that is offered, in turn, and announces what it returns; on thread `name`.

    A version that is overwritten meanwhile (Overtaken) is passed over, and with `only_newest` each one that a newer one
    was offered after. `on_fault` is called on the thread with whatever else ends it.
    """

    def __init__(
        self,
        name: str,
        prepare: Callable[[Manifest], Manifest],
        on_fault: Callable[[BaseException], None],
        *,
        only_newest: bool = False,
    ) -> None:
        self._prepare = prepare
        self._on_fault = on_fault
        self._only_newest = only_newest
        self._offered: Version | None = None
        self._offers: queue.SimpleQueue[tuple[Manifest, Callable[[Manifest], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def offer(self, manifest: Manifest, announce: Callable[[Manifest], None]) -> None:
        """Prepare this version, unless it was offered last, and call `announce` with it on the thread."""
        if manifest.version != self._offered:
            self._offered = manifest.version
            self._offers.put((manifest, announce))

    def close(self) -> bool:
        """End the thread after what it is at; whether it has ended in time."""
        self._offers.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("%s did not stop within %g s", self._thread.name, CLOSE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (offer := self._offers.get()) is not None:
            if self._only_newest and not self._offers.empty():
                continue
            manifest, announce = offer
            try:
                announce(self._prepare(manifest))
            except Overtaken as error:
                log.info("%s", error)
            except Exception as error:
                # Readers would wait for ever, and never know why.
                self._on_fault(error)
                return
