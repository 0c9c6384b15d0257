"""The base of all sections of a recipe."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not converted between types and never change.

    Numbers with a meaning here are finite; plug-ins get theirs as they are written, so inf stays inf. Null is an empty
    list or mapping where that is the default: of several layers, an empty mapping would leave what the others say.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_none(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        empty = {field.alias or name for name, field in cls.model_fields.items() if is_empty_unless_given(field)}
        return {key: value for key, value in values.items() if value is not None or key not in empty}


def is_empty_unless_given(field: FieldInfo) -> bool:
    """Tell whether a key is a list or a mapping that is empty by default, so that null says the same."""
    return isinstance(field.default, list | dict) and not field.default
