"""A disk of a few hundred kilobytes, to be filled: a tmpfs of its own, which only root may mount."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Self

import pytest


class SmallDisk:
    """Mounted while entered; skips the test where that is not permitted."""

    def __init__(self, folder: Path, size_kb: int = 512) -> None:
        self.folder = folder
        self._size_kb = size_kb
        self._ballast = folder / ".ballast"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={self._size_kb}k", "tmpfs", str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
        return self

    def __exit__(self, *raised: object) -> None:
        # Lazily: whoever still has a file open there keeps it.
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)

    def fill(self) -> None:
        """Leave no room, to the last byte."""
        with pytest.raises(OSError, match="No space left"):
            self._fill()

    def _fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)

    def free(self) -> None:
        """Make room again."""
        os.unlink(self._ballast)
