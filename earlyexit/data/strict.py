"""The base class of documents that are read from files. This module imports neither a YAML parser nor numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


class StrictDocument(BaseModel):
    """Base class of documents from files. Unknown fields, implicit conversions of types, and NaN are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _is_a_mapping(cls, value: Any) -> Any:
        """Refuses values that are not mappings, and unknown fields, with messages that list the known fields."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            fields = {"fields": fields_of(cls)}
            raise PydanticCustomError("mapping_type", "Input should be a mapping with {fields}", fields)
        for name, field_value in value.items():
            if name not in cls.model_fields:
                known = {"known": ", ".join(cls.model_fields)}
                error = PydanticCustomError("unknown_field", "unknown field; known are {known}", known)
                details = InitErrorDetails(type=error, loc=(str(name),), input=field_value)
                raise ValidationError.from_exception_data(cls.__name__, [details])
        return value

    @field_validator("schema_version", mode="before", check_fields=False)
    @classmethod
    def _schema_is_a_number(cls, value: Any) -> Any:
        if isinstance(value, bool):  # True equals 1, so that Literal[1] would accept it
            raise PydanticCustomError("int_type", "Input should be a valid integer")
        return value


def fields_of(shape: type[BaseModel]) -> str:
    """Returns the names of a document's fields, as text such as "a, b and c"."""
    *most, last = shape.model_fields
    return f"{', '.join(most)} and {last}" if most else last
