"""What an agent lets others read of its run folder: logs, metrics, dumps, traces, prompts, checkpoints.

`files.list {"folder", "after"}` answers {"files": [[path, bytes, head bytes, head digest], …], "more"}; paths are
relative to the run folder, in order, and only those written on this host: a copy of another host's file is not ours to
tell of. `files.read {"path", "offset", "size"}` answers {"data"}.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from distflow.data.decoding import MOST, Form, decoder, read, shown
from distflow.errors import ProtocolError
from distflow.types import WorkerName

SERVED = ("logs", "metrics", "rollouts", "trace", "prompts", "checkpoints")
WHOLE = "checkpoints"
"""Its files are named by part, not by worker."""
LIST_FILES = 500
READ_BYTES = 1 << 20
HEAD_BYTES = 1024
"""Begin of a file that is compared before somebody who has a part of it goes on behind that."""


class _List(Form, frozen=True):
    folder: str
    after: str


class _Read(Form, frozen=True):
    path: str
    offset: int
    size: int


class FileData(Form, frozen=True):
    """The answer to `files.read`; no bytes: the file ends here."""

    data: bytes


class FileServer:
    """Answers for one run folder; `names` gives the processes of this host."""

    def __init__(self, run_dir: Path, names: Callable[[], Iterable[str]]) -> None:
        self._root = run_dir.resolve()
        self._names = names
        self.asked_at = -math.inf
        """When somebody asked last (monotonic clock)."""

    def list(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One page of a folder, after path `after`; raises ProtocolError for a folder that is not served."""
        self.asked_at = time.monotonic()
        request = read(body, _List, "files.list")
        folder, after = request.folder, request.after
        if folder not in SERVED:
            raise ProtocolError(
                f"files.list: folder {shown(folder)} is not served; expected one of {', '.join(SERVED)}"
            )
        stems = None if folder == WHOLE else [f"{WorkerName.parse(name).file_stem}." for name in self._names()]
        paths = sorted(path for path in self._paths(folder) if path > after and _is_of(path, stems))
        files = [[path, *head(self._root / path)] for path in paths[:LIST_FILES]]
        return {"files": files, "more": len(paths) > LIST_FILES}

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """At most `READ_BYTES` of a file from `offset` on; raises ProtocolError for anything that is not served."""
        self.asked_at = time.monotonic()
        request = read(body, _Read, "files.read")
        path, offset, size = inside(self._root, request.path), request.offset, request.size
        if not 0 <= offset < MOST or not 0 < size <= READ_BYTES:
            raise ProtocolError(f"files.read: offset {offset}, size {size}; expected 0 or more, and 1 to {READ_BYTES}")
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return {"data": file.read(size)}
        except OSError as error:
            raise ProtocolError(f"files.read: {shown(request.path)}: {error.strerror}") from error

    def _paths(self, folder: str) -> Iterator[str]:
        for parent, _, names in os.walk(self._root / folder):
            for name in names:
                yield str(PurePosixPath(Path(parent).relative_to(self._root)) / name)


def _is_of(path: str, stems: list[str] | None) -> bool:
    name = PurePosixPath(path).name
    if stems is None:
        return not name.endswith(".draft")
    return any(name.startswith(stem) for stem in stems)


def head(path: Path, at_most: int = HEAD_BYTES) -> tuple[int, int, str]:
    """Size of a file, length of its head, and the head's digest."""
    try:
        with path.open("rb") as file:
            data = file.read(at_most)
            return os.fstat(file.fileno()).st_size, len(data), xxhash.xxh3_64_hexdigest(data)
    except FileNotFoundError:
        # Removed since it was listed.
        return 0, 0, xxhash.xxh3_64_hexdigest(b"")


@decoder
def inside(root: Path, path: str) -> Path:
    """The file that `path` means in a run folder; raises ProtocolError if it is not below a folder that is served."""
    parts = PurePosixPath(path).parts
    if parts and parts[0] in SERVED and ".." not in parts:
        # The folder itself may be a link to a larger disk; what is in it may not lead out of it.
        folder = (root / parts[0]).resolve()
        found = folder.joinpath(*parts[1:]).resolve()
        if found != folder and found.is_relative_to(folder):
            return found
    raise ProtocolError(f"{shown(path)} is not a file below {', '.join(SERVED)} of the run folder")
