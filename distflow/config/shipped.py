"""The recipes that come with distflow, and what a recipe's name on the command line means."""

from __future__ import annotations

from pathlib import Path

import distflow
from distflow.config.suggest import did_you_mean
from distflow.config.yamlfile import shown
from distflow.errors import Problem, RecipeError


def recipes_folder() -> Path:
    """The folder of the shipped recipes, in a checkout or an installation."""
    for root in distflow.__path__:
        folder = Path(root, "recipes")
        if folder.is_dir():
            return folder.resolve()
    raise AssertionError(f"the recipes folder is missing beside {list(distflow.__path__)}: install distflow again")


def shipped_recipes() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def find_recipe(name_or_path: str) -> Path:
    """The file of a shipped recipe's name or of a path; raises RecipeError."""
    if name_or_path in shipped_recipes():
        return recipes_folder() / f"{name_or_path}.yaml"
    path = Path(name_or_path).expanduser().resolve()
    if path.is_dir():
        raise RecipeError([Problem("command line", name_or_path, "this is a folder, not a recipe", _inside(path))])
    looks_like_path = "/" in name_or_path or path.suffix in (".yaml", ".yml")
    if not looks_like_path:
        cure = did_you_mean(name_or_path, shipped_recipes()) + "; or give the path of a .yaml file"
        raise RecipeError([Problem("command line", name_or_path, "there is no recipe of this name", cure)])
    if not path.is_file():
        cure = f"give the path of a .yaml file or one of: {', '.join(shipped_recipes())}"
        raise RecipeError([Problem("command line", name_or_path, f"there is no file {shown(path)}", cure)])
    if path.suffix != ".yaml":
        raise RecipeError([Problem("command line", name_or_path, "a recipe's file name ends in .yaml", "rename it")])
    return path


def _inside(folder: Path) -> str:
    """What to give instead of a folder."""
    if (folder / "run.json").is_file():
        return f"it is a run: go on with it by --run {folder.name} --resume, or give the file recipe.yaml in it"
    files = sorted(path.name for path in folder.glob("*.yaml"))
    some = f"one of its files: {', '.join(files[:9])}" if files else "the path of a .yaml file"
    return f"give {some}, or a shipped recipe: {', '.join(shipped_recipes())}"
