"""Files that a command writes at its end: whether it can, before the work."""

from __future__ import annotations

from pathlib import Path

from distflow.errors import UserError


def check_writable(option: str, path: Path) -> None:
    """Raise UserError for a file that cannot be written. Its content stays, and one that was not there is not left."""
    new = not path.exists()
    try:
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise cannot_write(option, path, error) from error


def cannot_write(option: str, path: Path, error: OSError) -> UserError:
    """The error for it."""
    hint = "give a file in a folder that exists, and that you can write to"
    return UserError(f"{option} {path}: cannot be written ({error.strerror}) — {hint}")
