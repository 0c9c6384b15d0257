"""The base of all sections of a recipe."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not converted between types and never change.

    Numbers with a meaning here are finite; plug-ins get theirs as they are written, so inf stays inf.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )
