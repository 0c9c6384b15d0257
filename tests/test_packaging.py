"""setup.cfg names every package; no folder is forgotten and none is named in vain."""

from __future__ import annotations

import configparser
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
    data = {path for path in (ROOT / "recipes").rglob("*") if path.suffix in (".yaml", ".json")}
    assert data == carried
