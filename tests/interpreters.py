"""A Python other than the one that runs the tests: a virtual environment of its own that borrows their packages."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

MAKE_S = 60.0


def make_interpreter(folder: Path, *, packages: bool = True) -> Path:
    """Its `bin/python`; without `packages` it has none at all, and in no case distflow."""
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True, timeout=MAKE_S)
    if packages:
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        # A folder named by such a file is searched, but its own such files are not read: so no checkout comes along.
        (folder / "lib" / version / "site-packages" / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"
