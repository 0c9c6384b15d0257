"""Command line, host agent, fork server, and the readers of run folders. Nothing in here trains or generates.

The package can be called: `distflow.launch(…)` starts a run from Python. It is the same name as that of the package,
and whoever imports something of it puts it under this name.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from distflow.errors import UserError


class _Callable(ModuleType):
    def __call__(self, *given: Any, **options: Any) -> Any:
        """Start a run: see `distflow.launch.python.launch`."""
        try:
            return importlib.import_module("distflow.launch.python").launch(*given, **options)
        except UserError as error:  # it is the caller's: no frame of this package says more
            raise error.with_traceback(None) from None


sys.modules[__name__].__class__ = _Callable
