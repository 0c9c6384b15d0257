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


@pytest.mark.parametrize("path", sorted(recipes_folder().rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_files_name_their_schema(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    kind = "recipe" if path.parent == recipes_folder() else path.parent.name
    # A head is what a section of `models` says of its last layer alone.
    kind = "model" if kind == "head" else kind
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve() == recipes_folder() / "schema" / f"{kind}.json"
