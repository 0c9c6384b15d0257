"""Finds run folders by name, by path, or as the newest."""

from __future__ import annotations

import difflib
from pathlib import Path

from distflow.errors import UserError
from distflow.launch.run.record import FILE_NAME, read_record


def find_run(run: str | None, runs_dir: Path) -> Path:
    """The folder of `run`: a name under `runs_dir`, a path, or None for the newest; absolute.

    Raises UserError, which names the nearest run, when there is none.
    """
    if run is None:
        return _newest(runs_dir)
    for candidate in (runs_dir / run, Path(run)):
        if (candidate / FILE_NAME).is_file():
            return candidate.resolve()
    if (Path(run) / "metrics").is_dir():
        # Workers that were started by hand leave what there is to read, but no record.
        return Path(run).resolve()
    raise UserError(_unknown(run, runs_dir))


def run_names(runs_dir: Path) -> list[str]:
    """Names of the runs in a folder, sorted."""
    if not runs_dir.is_dir():
        return []
    return sorted(path.name for path in runs_dir.iterdir() if (path / FILE_NAME).is_file())


def _newest(runs_dir: Path) -> Path:
    names = run_names(runs_dir)
    if not names:
        raise UserError(f"{runs_dir}: no run in this folder — start one with `distflow launch`, or give --runs-dir")
    return max((runs_dir / name for name in names), key=lambda path: read_record(path).started).resolve()


def _unknown(run: str, runs_dir: Path) -> str:
    names = run_names(runs_dir)
    if not names:
        return f"no run {run!r}: {runs_dir} holds no run — give the folder of your runs with --runs-dir"
    near = difflib.get_close_matches(run, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names[-10:])}"
    return f"no run {run!r} in {runs_dir} — {hint}"
