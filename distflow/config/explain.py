"""The schema for humans and editors: one key explained, and JSON Schema for whole recipes and for their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from distflow.config.check import first_sentence, key_of, known_key, section_at
from distflow.config.data_schema import DataConfig
from distflow.config.schema import FlowConfig, LayoutConfig, ModelConfig, Recipe
from distflow.config.yamlfile import KeyPath, dotted
from distflow.errors import Problem, RecipeError

SCHEMAS: Mapping[str, type[BaseModel]] = {
    "recipe": Recipe,
    "flow": FlowConfig,
    "layout": LayoutConfig,
    "model": ModelConfig,
    "data": DataConfig,
}
"""Schema of each kind of YAML file: recipes/NAME.yaml, and the groups recipes/KIND/NAME.yaml."""


def json_schema(kind: str) -> dict[str, Any]:
    """JSON Schema of one kind of file, for editors.

    Nothing is required in it and `defaults` is allowed, because a file is only one layer of the composed recipe.
    """
    schema = SCHEMAS[kind].model_json_schema(by_alias=True)
    for part in [schema, *schema.get("$defs", {}).values()]:
        part.pop("required", None)
        for key in part.get("properties", {}).values():
            if key.get("default") in ([], {}) and "type" in key:
                key["type"] = [key["type"], "null"]
    schema["properties"]["defaults"] = {
        "type": "array",
        "description": "What this file is laid over: other files of its folder, and choices of groups.",
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def explain(key: str) -> str:
    """Documentation, type and default of a key (with dots), and of the keys below it; raises RecipeError."""
    path = tuple(key.split("."))
    parent = section_at(path[:-1])
    if parent is None:
        return _free(path, key)
    fields = {key_of(parent, name): info for name, info in parent.model_fields.items()}
    if path[-1] in fields:
        lines = _described(key, fields[path[-1]])
        section = section_at(path) or section_at((*path, "NAME"))
        return "\n".join(lines + (_keys_below(section) if section is not None else []))
    raise RecipeError([Problem("command line", key, "there is no such key", known_key(path))])


def _free(path: KeyPath, key: str) -> str:
    """A name of the user's (a step, a pool, a model): explain what stands below it."""
    section = section_at(path)
    if section is not None:
        return "\n".join([f"{key}: {(section.__doc__ or '').strip()}", *_keys_below(section)])
    if section_at(path[:1]) is None:
        raise RecipeError([Problem("command line", key, "there is no such key", known_key(path[:1]))])
    above = dotted(path[:-1])
    message = f"the keys below {above!r} are not part of the schema"
    raise RecipeError([Problem("command line", key, message, f"see `distflow config explain {above}`")])


def _described(key: str, field: FieldInfo) -> list[str]:
    lines = [key, *(f"  {line.strip()}" for line in (field.description or "").splitlines())]
    lines.append(f"  type: {_type_text(field)}")
    if isinstance(field.json_schema_extra, dict):
        lines.append(f"  unit: {field.json_schema_extra['unit']}")
    if field.is_required():
        return [*lines, "  required"]
    return [*lines, f"  default: {_default_text(field)}"]


def _keys_below(section: type[BaseModel]) -> list[str]:
    lines = ["  keys:"]
    for name, field in section.model_fields.items():
        summary = first_sentence(field.description or "")
        lines.append(f"    {key_of(section, name)}: {_type_text(field)} — {summary}")
    return lines


def _type_text(field: FieldInfo) -> str:
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    text = (
        annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    )
    for module in ("typing.", "distflow.config.schema.", "distflow.config.data_schema."):
        text = text.replace(module, "")
    return text.replace("NoneType", "null").replace("None", "null")


def _default_text(field: FieldInfo) -> str:
    assert field.default is not PydanticUndefined, "defaults are values, not factories"
    if isinstance(field.default, BaseModel):
        return "the defaults of its keys"
    return "null" if field.default is None else str(field.default)
