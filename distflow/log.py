"""Logs plain lines to standard error, which the launcher writes to the worker's log file."""

from __future__ import annotations

import logging
import sys


def configure(worker: str) -> None:
    """Send the `distflow` loggers of this process to standard error, each line with time, level and worker."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s [{worker}] %(message)s", "%H:%M:%S"))
    root = logging.getLogger("distflow")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False


def logger(name: str) -> logging.Logger:
    """The logger of one module, below `distflow`."""
    return logging.getLogger(name if name.startswith("distflow") else f"distflow.{name}")
