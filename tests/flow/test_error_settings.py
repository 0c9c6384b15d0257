"""Settings of every generate step that say what becomes of samples on which it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.errors import PluginError, RecipeError
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.step_declaration import read_declaration
from tests.flow.conftest import STEPS, Folder

WITH = "flow.steps.sample.with"


def settings_of(recipe: str, *overrides: str) -> dict[str, object]:
    step = plan_recipe(recipe, overrides)[1].generate_step
    return {name: step.settings[name] for name in ("on_error", "max_attempts", "max_error_rate")}


def test_they_are_there_for_shipped_steps_and_for_those_of_users(folder: Folder) -> None:
    usual = {"on_error": "retry", "max_attempts": 3, "max_error_rate": None}
    assert settings_of("quickstart") == settings_of(folder.recipe) == usual
    given = (f"{WITH}.on_error=zero", f"{WITH}.max_error_rate=0.5")
    assert settings_of(folder.recipe, *given) == usual | {"on_error": "zero", "max_error_rate": 0.5}


@pytest.mark.parametrize(
    "override, message",
    [
        (
            f"{WITH}.on_error=again",
            r"sample\.with\.on_error — there is no 'again' — .*drop, leave_out, retry, stop, zero",
        ),
        (f"{WITH}.max_attempts=0", r"sample\.with\.max_attempts — 0 is not allowed — expected a number >= 1"),
        (f"{WITH}.max_error_rate=2", r"sample\.with\.max_error_rate — 2 is not allowed"),
        (f"{WITH}.max_sample_tokens=0", r"sample\.with\.max_sample_tokens — 0 is not allowed — expected a number >= 1"),
        (f"{WITH}.max_attempts=often", r"sample\.with\.max_attempts — expected a whole number, got"),
    ],
)
def test_other_values_are_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        plan_recipe("quickstart", [override])


@pytest.mark.parametrize(
    "given, idle",
    [
        ([f"{WITH}.on_error=drop", f"{WITH}.max_attempts=5"], "max_attempts"),
        ([f"{WITH}.on_error=stop", f"{WITH}.max_error_rate=0.5"], "max_error_rate"),
        ([f"{WITH}.max_attempts=5", f"{WITH}.max_error_rate=0.5"], None),
        ([f"{WITH}.max_sample_tokens=99"], "max_sample_tokens"),
    ],
)
def test_what_has_no_effect_is_told(given: list[str], idle: str | None) -> None:
    notes = [note for note in plan_recipe("quickstart", given)[1].notes if WITH in note]
    assert len(notes) == (idle is not None)
    assert all(f"{WITH}.{idle}" in note for note in notes)


def test_a_step_with_such_a_setting_of_its_own_is_refused(folder: Folder) -> None:
    file = Path(folder.recipe).parent / "own.py"
    file.write_text(STEPS.replace("max_new_tokens: int = 4", "max_attempts: int = 4"))
    with pytest.raises(
        PluginError, match=r"own\.py:\d+: 'sample' has a setting 'max_attempts' of its own, .* rename it"
    ):
        read_declaration(f"{file}:sample")
