"""The base of documents that are read from files. It imports neither a YAML parser nor numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


class StrictDocument(BaseModel):
    """Base of documents from files: no unknown keys, no silent conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _is_a_mapping(cls, value: Any) -> Any:
        """Refuses other values than mappings, and unknown fields, in words that name the fields, not Python's class."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            fields = {"fields": fields_of(cls)}
            raise PydanticCustomError("mapping_type", "Input should be a mapping with {fields}", fields)
        for name, given in value.items():
            if name not in cls.model_fields:
                known = {"known": ", ".join(cls.model_fields)}
                error = PydanticCustomError("unknown_field", "unknown field; known are {known}", known)
                details = InitErrorDetails(type=error, loc=(str(name),), input=given)
                raise ValidationError.from_exception_data(cls.__name__, [details])
        return value

    @field_validator("schema_version", mode="before", check_fields=False)
    @classmethod
    def _schema_is_a_number(cls, value: Any) -> Any:
        if isinstance(value, bool):  # True is 1 to a Literal
            raise PydanticCustomError("int_type", "Input should be a valid integer")
        return value


def fields_of(shape: type[BaseModel]) -> str:
    """Returns the names of a mapping's fields, as a list in words."""
    *most, last = shape.model_fields
    return f"{', '.join(most)} and {last}" if most else last
