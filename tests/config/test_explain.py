"""The schema for humans and editors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from distflow.config.explain import SCHEMAS, explain, json_schema
from distflow.config.paths import recipes_folder
from distflow.config.schema import Recipe
from distflow.errors import RecipeError
from distflow.launch.cli import run


def test_a_key_is_explained() -> None:
    text = explain("batch.ledgers")
    assert "Divides `prompts`" in text
    assert "type: int" in text
    assert "unit: ledgers" in text
    assert "default: 8" in text


def test_a_key_that_stands_elsewhere_is_found() -> None:
    with pytest.raises(RecipeError, match=r"lr — there is no such key — did you mean models\.policy\.optimizer\.lr\?"):
        explain("lr")


def test_sections_and_named_things_list_their_keys() -> None:
    assert "samples_per_prompt: int" in explain("batch")
    assert "threads: int" in explain("layout.pools.rollout")
    assert "lr: float" in explain("models.policy.optimizer")


@pytest.mark.parametrize(
    ("step", "setting", "names"), [("reward", "function", "exact_match, regex, math"), ("update", "kl", "k1, k2, k3")]
)
def test_choices_are_named_as_recipes_name_them(
    step: str, setting: str, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "explain", f"flow.steps.{step}.with.{setting}"]) == 0
    assert f"one of: {names}" in capsys.readouterr().out


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"batch\.ledges — there is no such key — did you mean 'ledgers'"):
        explain("batch.ledges")
    with pytest.raises(RecipeError, match="there is no such key — allowed: batch"):
        explain("nothing")
    with pytest.raises(RecipeError, match="not part of the schema"):
        explain("flow.steps.sample.with.temperature")


def test_every_field_is_documented() -> None:
    def sections(schema: type[BaseModel]) -> set[type[BaseModel]]:
        below = {
            part
            for field in schema.model_fields.values()
            for part in (field.annotation, *getattr(field.annotation, "__args__", ()))
            if isinstance(part, type) and issubclass(part, BaseModel)
        }
        return {schema, *(found for part in below for found in sections(part))}

    for section in sections(Recipe):
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


@pytest.mark.parametrize("kind", SCHEMAS)
def test_shipped_schemas_are_up_to_date(kind: str) -> None:
    shipped = json.loads((recipes_folder() / "schema" / f"{kind}.json").read_text())
    assert shipped == json.loads(json.dumps(json_schema(kind))), (
        "run: distflow config schema KIND > recipes/schema/KIND.json"
    )


@pytest.mark.parametrize(
    "path", sorted({*recipes_folder().glob("*.yaml"), *recipes_folder().glob("*/*.yaml")}), ids=lambda path: path.stem
)
def test_shipped_files_name_their_schema(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    kind = "recipe" if path.parent == recipes_folder() else path.parent.name
    # A head is what a section of `models` says of its last layer alone.
    kind = "model" if kind == "head" else kind
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve() == recipes_folder() / "schema" / f"{kind}.json"


def test_settings_of_steps_are_explained_for_each_function_of_that_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "explain", "flow.steps.update.with.loss"]) == 0
    text = capsys.readouterr().out
    assert "flow.steps.update.with.loss, of distflow.workers.trainer:update" in text
    assert "  one of: sigmoid, ipo\n  default: sigmoid" in text.partition("of distflow.workers.preference:dpo")[2]
    assert run(["config", "explain", "flow.steps.reward.with.timeout_s"]) == 0
    assert "  type: float | None\n  range: > 0\n  default: None" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("reward.with.tiemout_s", "there is no such setting — did you mean 'timeout_s'"),
        ("sampel.with.top_p", "no shipped flow has a step 'sampel' — did you mean 'sample'"),
    ],
)
def test_settings_that_no_step_has_are_refused(key: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "explain", f"flow.steps.{key}"]) == 2
    assert message in capsys.readouterr().err
