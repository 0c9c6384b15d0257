"""Files that may be compressed, opened so that any place in them can be read. Imports no torch."""

from __future__ import annotations

import gzip
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import zstandard

from distflow.config.yamlfile import shown
from distflow.errors import UserError

_CHUNK = 1 << 20
_LARGEST_WINDOW = 1 << 31
"""Bytes that a decompressor may look back: as many as `zstd --long=31` lets it."""


def unpacked(path: Path) -> IO[bytes]:
    """The content of a file, which `os.pread` can read: a compressed one is written into a temporary file.

    Raises UserError for what cannot be decompressed, and where there is no room for it.
    """
    unpack = _UNPACK.get(path.suffix)
    if unpack is None:
        return path.open("rb")
    into = _temporary()
    try:
        for chunk in _checked(path, unpack):
            into.write(chunk)
        into.flush()
    except OSError as error:
        raise UserError(
            f"{shown(path)} cannot be unpacked into a temporary file in {tempfile.gettempdir()}: {error.strerror} — "
            "make room there, name a larger folder in TMPDIR, or unpack the file yourself"
        ) from error
    into.seek(0)
    return into


def _temporary() -> IO[bytes]:
    """A file without a name, which is gone with this process."""
    return tempfile.TemporaryFile()


def _checked(path: Path, unpack: Callable[[Path], Iterator[bytes]]) -> Iterator[bytes]:
    try:
        yield from unpack(path)
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{shown(path)} cannot be decompressed: {error} — copy or compress it again") from error


def _gzip(path: Path) -> Iterator[bytes]:
    with gzip.open(path) as opened:
        while chunk := opened.read(_CHUNK):
            yield chunk


def _zstandard(path: Path) -> Iterator[bytes]:
    """Frame by frame: the reader of the package takes a file that is cut off for a whole one."""
    frame = None
    with path.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            while chunk:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the file ends within a frame")


_UNPACK: Mapping[str, Callable[[Path], Iterator[bytes]]] = {".gz": _gzip, ".zst": _zstandard}
