"""Size of the code: lines, files and functions, and those that one training step calls.

    python -m benchmarks house

*Lines of code* are those of `distflow/`, `workers/` and `launch/` without comments, docstrings and blank lines. *One
training step* of `quickstart layout=colocated`, run in one process from its worker's document: the files and functions
of ours that are called in it, on any thread. What else happens meanwhile (a heartbeat, a dump) differs from step to
step; medians over eight of them.
"""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"distflow": "distflow", "workers": "distflow.workers", "launch": "distflow.launch"}
STEPS, FIRST = 10, 2
RUN_S = 300.0
TRACER = """
import json, sys, threading
from pathlib import Path

root, document, out = sys.argv[1:]
seen = [set()]

def note(frame, event, argument):
    if event == "call":
        seen[-1].add((frame.f_code.co_filename, frame.f_code.co_qualname))

def count():
    seen.append(set())

threading.setprofile(note)
sys.setprofile(note)
from distflow.launch.cli import run
import builtins
builtins.count_step = count
code = run(["worker", document])
sys.setprofile(None)
ours = [sorted(pair for pair in one if pair[0].startswith(root) and "/.venv/" not in pair[0]) for one in seen]
Path(out).write_text(json.dumps(ours))
sys.exit(code)
"""


def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


def code_lines(path: Path) -> int:
    """Lines with something on them besides comments and docstrings."""
    text = path.read_text()
    silent: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            silent.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in nothing:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - silent)


def steps() -> list[list[tuple[str, str]]]:
    """(file, function) of all of ours that are called in each training step."""
    with tempfile.TemporaryDirectory(prefix="distflow-house-") as folder:
        plan = ["plan", "quickstart", "layout=colocated", f"run.training_steps={STEPS}", "--write", folder]
        subprocess.run([sys.executable, "-m", "distflow.launch", *plan], check=True, stdout=subprocess.DEVNULL)
        script = Path(folder, "worker-0.py")
        script.write_text(script.read_text().replace("w.save(t + 1)", "w.save(t + 1)\n        count_step()"))
        out = Path(folder, "called.json")
        command = [sys.executable, "-c", TRACER, str(ROOT), f"{folder}/worker-0.yaml", str(out)]
        subprocess.run(command, check=True, timeout=RUN_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return [[(file, function) for file, function in one] for one in json.loads(out.read_text())[FIRST:STEPS]]


def main() -> None:
    """Print the figures."""
    known = modules()
    print(f"lines of code                  {sum(code_lines(path) for path in known.values()):6}")
    for prefix in ("distflow.launch", "distflow.runtime"):
        inside = [name for name in known if name == prefix or name.startswith(prefix + ".")]
        print(f"modules of {prefix:20}{len(inside):6}")
    called = steps()
    print(f"files of one training step     {median(len({file for file, _ in one}) for one in called):6.0f}")
    print(f"functions of one training step {median(map(len, called)):6.0f}")
