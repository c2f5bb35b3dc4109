"""A request's tensors, however they came, held against a model's inputs: the one place where both are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from deployments.ingress.api.tensors import unpacked
from earlyexit.codecs.base import Columns
from earlyexit.errors import InputError
from earlyexit.signature import Column, as_numbers

Elements: TypeAlias = npt.NDArray[Any] | list[Any]
"""One after the other, row by row; a list where they are of BYTES."""


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """An input of a request."""

    name: str
    datatype: str
    shape: Sequence[int]
    content: list[Any] | bytes | memoryview
    """Values, nested by the shape or not at all; or bytes as Triton writes them."""


def read_columns(given: Sequence[GivenTensor], inputs: Sequence[Column]) -> Columns:
    """The columns by name, as many rows in each, at least one; raises InputError that says what is allowed."""
    columns: dict[str, Elements] = {}
    for k, tensor in enumerate(given):
        where = f"inputs.{k}"
        column = _column(tensor, inputs, where)
        if tensor.name in columns:
            raise InputError(f"{where}.name: {tensor.name!r} is there twice")
        columns[tensor.name] = _rows(tensor, column, where)
    missing = [column.name for column in inputs if column.name not in columns]
    if missing:
        raise InputError(f"inputs: {', '.join(map(repr, missing))} missing; the model takes {_names(inputs)}")
    if len({len(column) for column in columns.values()}) > 1:
        sizes = {name: len(column) for name, column in columns.items()}
        raise InputError(f"inputs: {sizes} rows; as many of each are needed")
    return columns


def _column(tensor: GivenTensor, inputs: Sequence[Column], where: str) -> Column:
    forms = [column for column in inputs if column.name == tensor.name]
    if not forms:
        raise InputError(f"{where}.name: unknown input {tensor.name!r}; the model takes {_names(inputs)}")
    for column in forms:
        if tensor.datatype in column.datatypes:
            return column
    taken = ", ".join(datatype for column in forms for datatype in column.datatypes)
    raise InputError(f"{where}.datatype: {tensor.datatype!r}; {tensor.name!r} is {taken}")


def _rows(tensor: GivenTensor, column: Column, where: str) -> Elements:
    elements = _elements(tensor, where)
    if not len(elements):
        raise InputError(f"{where}: no elements; at least one row is needed")
    if not column.shape:
        _check_shape(tensor, column, len(elements), where)
        return elements
    _check_row_shape(tensor, column, where)
    _check_shape(tensor, column, len(elements), where)
    array = np.array(elements, dtype=object) if isinstance(elements, list) else elements
    return array.reshape(tensor.shape)


def _check_row_shape(tensor: GivenTensor, column: Column, where: str) -> None:
    row = tensor.shape[1:]
    fits = len(row) == len(column.shape) and all(
        wanted in (size, -1) for size, wanted in zip(row, column.shape, strict=True)
    )
    if not fits or min(tensor.shape) < 0:
        needed = ", ".join(["rows", *map(str, column.shape)])
        raise InputError(f"{where}.shape: {list(tensor.shape)}; {tensor.name!r} is [{needed}] in {tensor.datatype}")


def _check_shape(tensor: GivenTensor, column: Column, count: int, where: str) -> None:
    shape = list(tensor.shape)
    if not column.shape and shape not in ([count], [count, 1], [1, count]):
        raise InputError(f"{where}.shape: {shape} does not fit {count} elements; [{count}] or [{count}, 1] would")
    if math.prod(shape) != count:
        raise InputError(f"{where}.shape: {shape} holds {math.prod(shape)} elements, {count} were sent")


def _elements(tensor: GivenTensor, where: str) -> Elements:
    if not isinstance(tensor.content, list):
        return unpacked(tensor.datatype, tensor.content, where)
    if tensor.datatype == "BYTES":
        return _strings(tensor.content, tensor.shape, where)
    try:
        array = as_numbers(tensor.content, tensor.datatype)
    except ValueError as error:
        raise InputError(f"{where}.data: {error}") from error
    if array.ndim > 1 and list(array.shape) != list(tensor.shape):
        raise _nesting(tensor.shape, where)
    return array.reshape(-1)


def _strings(data: list[Any], shape: Sequence[int], where: str) -> list[Any]:
    """Strings of JSON, or bytes of gRPC, taken out of their nesting."""
    nested = [isinstance(each, list) for each in data]
    if any(nested):
        widths = {len(each) if isinstance(each, list) else None for each in data}
        if [len(data), *widths] != list(shape[:2]):
            raise _nesting(shape, where)
        return _strings([item for each in data for item in each], [len(data) * shape[1], *shape[2:]], where)
    for index, item in enumerate(data):
        if not isinstance(item, str | bytes):
            raise InputError(f"{where}.data.{index}: a string is needed, not {type(item).__name__}")
    return data


def _nesting(shape: Sequence[int], where: str) -> InputError:
    return InputError(f"{where}.data: its nesting does not fit the shape {list(shape)}")


def _names(inputs: Sequence[Column]) -> str:
    return ", ".join(dict.fromkeys(repr(column.name) for column in inputs))
