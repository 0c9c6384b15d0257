"""Versions rounded for readers on other hosts, in shared segments of their own beside those that this host reads."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from distflow.errors import Overtaken
from distflow.weights.encodings.rounding import Rounding, rounded
from distflow.weights.manifest import FP8, Manifest, TensorEntry
from distflow.weights.segments.shm import HEADER_BYTES, AnnouncedSegment, ShmPublisher, tensor_views


class RoundedPublisher:
    """`tag` as in ShmPublisher, `to`: what to round to. Used by one thread."""

    def __init__(self, tag: str, to: Rounding) -> None:
        self._tag = tag
        self._to = to
        self._publisher: ShmPublisher | None = None

    def publish(self, manifest: Manifest, pinned: Callable[[], str | None]) -> Manifest:
        """Round a version that ShmPublisher has published; `pinned` as there.

        Raises Overtaken if it is overwritten meanwhile, UserError if shared memory is too small.
        """
        version = manifest.version
        segment = AnnouncedSegment(manifest)
        if self._publisher is None:
            self._publisher = ShmPublisher(self._tag, f"{manifest.model}.{self._to}", version.term, pinned)
        tensors = tensor_views(segment.memory, manifest.entries, HEADER_BYTES)
        made = self._publisher.publish(version, rounded(tensors, self._to))
        if not segment.holds(manifest):
            raise Overtaken(f"{manifest.title}: overwritten by a newer version before it was rounded")
        entries = tuple(
            TensorEntry(own.name, FP8, own.shape, new.start, new.size) if new.dtype == "torch.uint8" else new
            for own, new in zip(manifest.entries, made.entries, strict=True)
        )
        return structs.replace(made, model=manifest.model, entries=entries, canary=manifest.canary)

    def close(self) -> None:
        """Remove the segments."""
        if self._publisher is not None:
            self._publisher.close()
