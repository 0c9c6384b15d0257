"""Imports go one way, lazy ones included; and what must answer quickly never imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

GROUND = {"errors", "types", "log", "parts"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "log": set(),
    "parts": set(),
    "config": GROUND,
    "flow": GROUND | {"config"},
    "data": GROUND | {"config"},
}
ALLOWED["metrics"] = ALLOWED["data"] | {"data", "flow"}
ALLOWED["algorithms"] = ALLOWED["data"] | {"data", "flow"}
ALLOWED["comm"] = ALLOWED["algorithms"] | {"algorithms"}
ALLOWED["exchange"] = ALLOWED["comm"] | {"comm", "metrics"}
ALLOWED["weights"] = ALLOWED["comm"] | {"comm"}
ALLOWED["cluster"] = ALLOWED["comm"] | {"comm"}
ALLOWED["runtime"] = ALLOWED["exchange"] | {"exchange", "weights"}
ALLOWED["sim"] = ALLOWED["runtime"] | {"runtime"}
ALLOWED["workers"] = ALLOWED["runtime"] | {"runtime"}
ALLOWED["launch"] = ALLOWED["runtime"] | {"runtime", "sim", "cluster"}
ALLOWED["client"] = ALLOWED["launch"] | {"launch"}
ALLOWED["testing"] = ALLOWED["runtime"] | {"runtime", "sim", "workers"}
"""The roof (workers, launch) and the test kit beside it; nobody imports recipes."""

SEARCH = ALLOWED["sim"] | {"sim", "cluster"}
"""What the search for faults, which is none of ours, may import: the cores, and the simulation that it shares."""
ROOMS: dict[str, set[str]] = {"run": set(), "observe": {"run"}}
ROOMS["agent"] = ROOMS["observe"] | {"observe"}
ROOMS["deploy"] = ROOMS["agent"] | {"agent"}
ROOMS["commands"] = ROOMS["deploy"] | {"deploy"}
"""Of launch, and what each may import of the others."""
IN_WEIGHTS: dict[str, set[str]] = {"segments": set()}
IN_WEIGHTS |= {"encodings": {"segments"}, "one_sided": {"segments"}, "shards": {"segments"}}
IN_WEIGHTS["swarm"] = {"encodings", "one_sided", "segments"}
"""The rooms of weights, which know of the files beside them, and what each may import of the others."""
BARRED = {
    "distflow/cluster": {"os", "pathlib", "random", "socket", "subprocess", "threading", "time", "zmq"},
    "launch/observe": {"multiprocessing", "subprocess"},
}
"""What a room does without: `cluster` is pure, and `observe` starts nothing."""

TORCH_FREE = {*GROUND, "config", "flow"}


def layer_of(module: str) -> str | None:
    """`distflow.flow.plan` -> flow; None for modules that are not ours, and for `distflow` itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "distflow" and len(parts) > 1 else None


def files() -> Iterator[tuple[str, Path]]:
    for folder, layer in (("workers", "workers"), ("launch", "launch")):
        yield from ((layer, path) for path in (ROOT / folder).rglob("*.py"))
    for path in (ROOT / "distflow").rglob("*.py"):
        inside = path.relative_to(ROOT / "distflow").parts
        if inside[0] != "__init__.py":
            yield inside[0].removesuffix(".py"), path


@cache
def modules() -> dict[str, Path]:
    """All of ours by their names, as in distflow.launch.cli."""
    found = {}
    for _, path in files():
        parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"]
        found[".".join(parts if parts[0] == "distflow" else ["distflow", *parts])] = path
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """All imports of a file, wherever they stand, except those that only type checkers see."""
    tree, found = tree_of(path), []
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if node.module == "distflow" or name in modules() else node.module for name in full]
            found += [(node.lineno, name) for name in names]
    return found


def test_imports_go_one_way() -> None:
    wrong = []
    for layer, path in files():
        assert layer in ALLOWED, f"{path}: {layer!r} has no place in the table of layers"
        for line, module in imports(path):
            target = layer_of(module)
            known = target in ALLOWED or target == "recipes"
            if target is not None and known and target != layer and target not in ALLOWED[layer]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {layer} must not import {module}")
    assert not wrong, "\n".join(wrong)


def test_the_search_for_faults_knows_cores_alone() -> None:
    tools = [path for path in (ROOT / "tests/search").glob("*.py") if not path.name.startswith("test_")]
    used = {(path.name, layer_of(module)) for path in tools for _, module in imports(path)}
    assert {(name, layer) for name, layer in used if layer is not None and layer not in SEARCH} == set()
    assert {layer for _, layer in used} >= {"cluster", "exchange", "sim", "weights"}


def test_rooms_of_launch_are_entered_one_way() -> None:
    wrong = []
    for path in (ROOT / "launch").rglob("*.py"):
        room = path.relative_to(ROOT / "launch").parts[0]
        if room not in ROOMS:
            continue
        for line, module in imports(path):
            top, *inside = module.split(".")
            target = inside[1] if top == "distflow" and inside[:1] == ["launch"] and len(inside) > 1 else None
            if target is not None and target not in ROOMS[room] | {room}:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} must not import {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", BARRED)
def test_a_room_does_without_what_it_is_barred_from(room: str) -> None:
    used = {
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in (ROOT / room).rglob("*.py")
        for line, module in imports(path)
        if module.partition(".")[0] in BARRED[room]
    }
    assert (ROOT / room).is_dir()
    assert not used


def test_rooms_of_weights_are_entered_one_way() -> None:
    wrong = []
    folder = ROOT / "distflow" / "weights"
    for path in folder.rglob("*.py"):
        room = path.relative_to(folder).parts[0]
        allowed = IN_WEIGHTS.get(room, set()) | {room}
        for line, module in imports(path):
            parts = module.split(".")
            target = parts[2] if parts[:2] == ["distflow", "weights"] and len(parts) > 2 else None
            if room in IN_WEIGHTS and target in IN_WEIGHTS and target not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} must not import {module}")
            if path.parent == folder and target in IN_WEIGHTS:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {module} is behind it")
    assert {path.parent.name for path in folder.glob("*/__init__.py")} == set(IN_WEIGHTS)
    assert not wrong, "\n".join(wrong)


def test_layers_without_torch_never_import_it() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for layer, path in files()
        if layer in TORCH_FREE
        for line, module in imports(path)
        if module.split(".")[0] in ("torch", "transformers", "zmq")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_folders_at_the_top_have_one_name_only() -> None:
    for _, path in files():
        tops = {module.split(".")[0] for _, module in imports(path)}
        assert not tops & {"workers", "launch", "recipes"}, f"{path}: write distflow.workers, distflow.launch"
        assert not tops & {"tests", "benchmarks"}, f"{path}: imports what only developers have"


def test_no_module_imports_itself_by_way_of_others() -> None:
    found = {name: {module for _, module in imports(path) if module in modules()} for name, path in modules().items()}
    list(TopologicalSorter(found).static_order())  # raises CycleError, which names a circle


def test_no_two_public_classes_share_a_name() -> None:
    found: dict[str, list[str]] = {}
    for _, path in files():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


@pytest.mark.parametrize("command", ["validate", "plan"])
def test_reading_commands_never_import_torch(command: str, tmp_path: Path) -> None:
    (tmp_path / "models" / "smollm2-135m").mkdir(parents=True)
    recipes = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from distflow.launch.cli import run\n"
        f"for recipe in {recipes}:\n"
        f"    code = run([{command!r}, recipe])\n"
        "    heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "    assert not heavy and code == 0, (recipe, code, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
