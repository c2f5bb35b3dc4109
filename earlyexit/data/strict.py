"""Base classes of what is read from files. This module imports neither a YAML parser nor numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, ValidationInfo
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from earlyexit.errors import InputError

REFUSED = "refused"
"""Type of pydantic's errors that come from an InputError, which is in their context as `error`."""


class FromFile:
    """Base class of dataclasses that are read from files, as mappings of their fields.

    Unknown fields, implicit conversions of types, and NaN are refused. If a check of the class raises InputError, its
    path `at` follows the path of the object. A field with `Field(exclude=True)` is not part of files.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns pydantic's schema of the class, with the checks around it."""
        schema = handler(source)
        # The definition itself is changed, because later uses of the class refer to it.
        definition: Any = handler.resolve_ref_schema(schema)
        inner: Any = dict(definition)
        ref = inner.pop("ref", None)
        if issubclass(cls, BaseModel):
            known = list(cls.model_fields)
        else:
            inner["strict"] = False  # accepts a mapping; its values are still strict
            fields = [field for field in inner["schema"]["fields"] if not field.get("serialization_exclude")]
            known = [field.get("validation_alias") or field["name"] for field in fields]
        definition.clear()
        definition.update(core_schema.no_info_wrap_validator_function(partial(_read, cls, known), inner, ref=ref))
        return schema


class StrictDocument(FromFile, BaseModel):
    """Base class of documents from files, with the rules of `FromFile`. Its validators may raise InputError."""

    model_config = ConfigDict(**FromFile.__pydantic_config__, defer_build=True)


def _read(cls: type, known: Sequence[str], value: Any, read: core_schema.ValidatorFunctionWrapHandler) -> Any:
    """Validates a value, with messages that list the known fields."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        fields = f"{', '.join(known[:-1])} and {known[-1]}".removeprefix(" and ")
        raise PydanticCustomError("mapping_type", f"Input should be a mapping with {fields}")
    for name, field_value in value.items():
        texts = field_value if isinstance(field_value, list) else [field_value]
        if name not in known:
            kind, message = "unknown_field", f"unknown field; known are {', '.join(known)}"
        elif any(isinstance(text, str) and "\0" in text for text in texts):
            kind, message = "null_character", "text must not contain a null character"
        elif name == "schema_version" and isinstance(field_value, bool):  # True equals 1, which Literal[1] would accept
            kind, message = "int_type", "Input should be a valid integer"
        else:
            continue
        raise mistake_at((str(name),), PydanticCustomError(kind, message), field_value)
    try:
        return read(value)
    except InputError as error:
        raise _refused(error, value) from error


def checked(check: Callable[[Any, ValidationInfo], Any]) -> AfterValidator:
    """Returns a validator for an annotated type that calls `check`, which may raise InputError."""

    def checking(value: Any, info: ValidationInfo) -> Any:
        try:
            return check(value, info)
        except InputError as error:
            raise _refused(error, value) from error

    return AfterValidator(checking)


def _refused(error: InputError, value: Any) -> ValidationError:
    for part in error.at:
        value = value.get(part) if isinstance(value, Mapping) else value
    return mistake_at(error.at, PydanticCustomError(REFUSED, "{error}", {"error": error}), value)


def mistake_at(at: tuple[str | int, ...], error: PydanticCustomError, value: Any) -> ValidationError:
    """Returns the error for a validator to raise, at a path inside its value. pydantic adds the path of the value."""
    return ValidationError.from_exception_data("", [InitErrorDetails(type=error, loc=at, input=value)])
