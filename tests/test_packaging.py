"""setup.cfg names every package; no folder is forgotten and none is named in vain. The Makefile does without SGLang."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def listed() -> set[str]:
    return set(settings()["options"]["packages"].split())


def found() -> set[str]:
    packages = {"distflow.recipes"}
    for folder, name in (("distflow", "distflow"), ("workers", "distflow.workers"), ("launch", "distflow.launch")):
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.parent.relative_to(ROOT / folder).parts
            packages.add(".".join([name, *inside]))
    return packages


def test_packages_are_the_folders() -> None:
    assert listed() == found()


def test_every_package_has_an_init_file() -> None:
    for name in found() - {"distflow.recipes"}:
        parts = name.split(".")[1:]
        top = ROOT if parts and parts[0] in ("workers", "launch") else ROOT / "distflow"
        assert top.joinpath(*parts, "__init__.py").is_file(), name


def test_recipes_travel_with_the_package() -> None:
    patterns = settings()["options.package_data"]["distflow.recipes"].split(", ")
    carried = {path for pattern in patterns for path in (ROOT / "recipes").glob(pattern)}
    files = {path for path in (ROOT / "recipes").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert carried == {path for path in files if path.suffix in (".yaml", ".json") or "starts" in path.parts}


def test_where_sglang_cannot_be_installed_the_tests_are_made_without_it(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    # A pip that has no SGLang for this system, and a user who installs no packages of the system.
    for name, text in (("python", 'case "$*" in *sglang*) exit 1; esac'), ("id", "echo 1000")):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / ".demo").touch()
    command = ["make", f"VENV={tmp_path}", str(tmp_path / ".test")]
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    made = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    assert "no SGLang: its tests will be skipped" in made.stdout
    assert (tmp_path / ".test").is_file()


def test_the_public_names_are_listed_without_loading_them() -> None:
    program = "import sys, distflow; print([n for n in dir(distflow) if n[0] != '_'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (
        done.stdout.strip()
        == "['Batch', 'Client', 'Completion', 'ContextFull', 'Episode', 'Generate', 'Ragged', 'Run', 'SamplingParams', "
        "'StepContext', 'launch', 'load_run', 'step'] False"
    )
