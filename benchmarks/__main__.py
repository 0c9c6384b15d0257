"""The benchmark program: `python -m benchmarks NAME [OPTIONS]`, with `--list` for the names and `NAME --help`."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from distflow.errors import did_you_mean

FOLDER = Path(__file__).parent


def names() -> Mapping[str, str]:
    """Map each benchmark, a file of this folder, to the first line of its docstring. Imports none of them."""
    files = sorted(path for path in FOLDER.glob("*.py") if not path.stem.startswith("__"))
    return {path.stem: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0] for path in files}


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark and return its exit code: 0 done, 1 an aim was missed, 2 an error in the arguments."""
    known = names()
    if not arguments or arguments[0] in ("--list", "-h", "--help"):
        print(f"{__doc__}\n")
        print("\n".join(f"{name:18} {about}" for name, about in known.items()))
        return 0
    name, *options = arguments
    if name not in known:
        print(f"there is no benchmark {name!r} — {did_you_mean(name, known)}", file=sys.stderr)
        return 2
    sys.argv = [f"python -m benchmarks {name}", *options]
    code = importlib.import_module(f"benchmarks.{name}").main()
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
