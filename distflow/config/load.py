"""Loads a recipe: from a name and overrides to checked values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distflow.config.check import Where, check
from distflow.config.layers import COMMAND_LINE
from distflow.config.paths import absolute_paths, find_recipe, recipes_folder
from distflow.config.schema import Recipe
from distflow.config.yamlfile import KeyPath, shown
from distflow.errors import Problem, RecipeError


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A recipe that passed the schema."""

    recipe: Recipe
    source: Path
    """The recipe's file."""
    resolved: dict[str, Any]
    """The whole recipe as plain data, with defaults, absolute files and resolved values."""
    overrides: tuple[str, ...]
    origin: Callable[[str], str]
    """Key with dots -> `file:line`, or `command line`."""


Giver = Literal["command line", "file", ""]
"""Who gives a value: an override, a file of the user's, or nobody but the shipped files and the defaults."""


@dataclass(frozen=True, slots=True)
class Examined:
    """A recipe that may be wrong."""

    loaded: LoadedRecipe | None
    problems: list[Problem]
    values: dict[str, Any]
    """The composed values with absolute files, not checked."""
    where: Where
    given_by: Callable[[str], Giver]
    """Who wrote the value under a key, or part of it."""


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Compose, resolve and check; raises RecipeError with all problems."""
    examined = examine_recipe(name_or_path, overrides)
    if examined.loaded is None:
        raise RecipeError(examined.problems)
    return examined.loaded


def examine_recipe(name_or_path: str, overrides: Sequence[str] = (), *, resolved: bool = False) -> Examined:
    """Like `load_recipe`, but returns the problems. Raises RecipeError if there is nothing to examine.

    `resolved`: the file is a whole recipe already, as kept in a run folder.
    """
    from distflow.config.compose import (
        compose,  # Hydra is not for workers: they read their own YAML
        resolve_interpolations,
    )

    source = find_recipe(name_or_path)
    problems: list[Problem] = []
    layers = compose(source, overrides, problems, resolved=resolved)

    where = layers.places(f"{shown(source)}:1")

    def folder_of(key: KeyPath) -> Path:
        origin = layers.origin(key)
        return origin.folder if origin is not None else source.parent

    def given_by(key: str) -> Giver:
        origins = layers.given(tuple(key.split(".")))
        if any(origin.where == COMMAND_LINE for origin in origins):
            return "command line"
        own = not resolved and any(not origin.folder.is_relative_to(recipes_folder()) for origin in origins)
        return "file" if own else ""

    values = resolve_interpolations(layers, problems)
    model_folder = Path.cwd() if source.parent == recipes_folder() else source.parent
    values = absolute_paths(values, folder_of, model_folder)
    recipe, found = check(values, where)
    # A value that could not be resolved is left out; do not report it again as missing.
    told = {problem.key for problem in problems}
    problems += [problem for problem in found if problem.key not in told]
    if recipe is None or problems:
        return Examined(None, problems, values, where, given_by)
    recipe = _named(recipe, source.stem)
    loaded = LoadedRecipe(recipe, source, recipe_to_mapping(recipe), tuple(overrides), where)
    return Examined(loaded, [], values, where, given_by)


def recipe_from_mapping(resolved: Mapping[str, Any], where: Where) -> Recipe:
    """A recipe from its resolved mapping, as workers keep it; needs no Hydra. Raises RecipeError."""
    recipe, problems = check(resolved, where)
    if recipe is None or problems:
        raise RecipeError(problems)
    return recipe


def recipe_to_mapping(recipe: Recipe) -> dict[str, Any]:
    """The inverse of `recipe_from_mapping`: plain data, with the keys of the YAML, defaults included.

    What a model inherits is left out, so that it inherits it again.
    """
    inherited = {name: set(model.inherited) for name, model in recipe.models.items()}
    return recipe.model_dump(mode="json", by_alias=True, exclude={"models": inherited})


def _named(recipe: Recipe, name: str) -> Recipe:
    if recipe.run.name is not None:
        return recipe
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": name})})
