"""The codec of arrays, which passes them to the network unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from earlyexit.codecs.base import Codec, Columns
from earlyexit.errors import InputError, UnprocessableInputError
from earlyexit.network.boundary import DATATYPES, Column, Encoded, parse_numbers

Arrays: TypeAlias = tuple[npt.NDArray[np.generic], ...]
"""A row: one array per column, in the order of the columns."""
LARGE_BYTES = 1_000_000
"""Size of a request's rows in bytes above which checking every number takes a millisecond."""


class TensorCodec(Codec[Arrays]):
    """Encodes rows of one or more columns. Each column is one input tensor of the network."""

    name = "tensor"
    needed = "at least one row"

    def __init__(self, columns: Sequence[Mapping[str, Any]]) -> None:
        """`columns`: mappings such as `{"name": "x", "datatype": "FP32", "shape": [3]}`. Raises ValueError."""
        self.inputs = tuple(_column(**column) for column in columns)
        if not columns or len({column.name for column in self.inputs}) < len(columns):
            raise ValueError("at least one column is needed, and all names must differ")
        schemas = {column.name: _schema(column.datatype, column.shape) for column in self.inputs}
        row = {"type": "object", "properties": schemas, "required": list(schemas), "additionalProperties": False}
        self.row_schema = row if len(schemas) > 1 else schemas[columns[0]["name"]]

    def spec(self) -> dict[str, Any]:
        columns = [{"name": each.name, "datatype": each.datatype, "shape": list(each.shape)} for each in self.inputs]
        return {"name": self.name, "columns": columns}

    def from_columns(self, columns: Columns) -> list[Arrays]:
        return list(zip(*(columns[column.name] for column in self.inputs), strict=True))

    def is_row(self, inputs: object) -> bool:
        """Returns whether a value is one row: a nested list for one column, an object of arrays for several columns."""
        depth = 0
        while isinstance(inputs, list):
            depth += 1
            inputs = inputs[0] if inputs else None
        return depth <= (len(self.inputs[0].shape) if len(self.inputs) == 1 else 0)

    def is_slow(self, rows: Sequence[Arrays]) -> bool:
        return sum(array.nbytes for row in rows for array in row) > LARGE_BYTES

    def surely_accepts(self, row: Arrays) -> bool:
        """Returns True, because codecs of this kind in a chain have the same columns."""
        return True

    def encode(self, rows: Sequence[Arrays], *, truncate: bool = False) -> list[Encoded]:
        """Returns each row's arrays as (1, *shape). Raises UnprocessableInputError for NaN and infinite numbers."""
        for k, row in enumerate(rows):
            for column, array in zip(self.inputs, row, strict=True):
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    raise UnprocessableInputError(f"input {k}: {column.name!r} holds NaN or infinite numbers")
        return [Encoded(length=1, tensors=tuple(np.asarray(array)[None] for array in row)) for row in rows]

    def row_from_json(self, value: object, where: str) -> Arrays:
        if len(self.inputs) == 1:
            return (_array(value, self.inputs[0], where),)
        names = {column.name for column in self.inputs}
        if not isinstance(value, dict) or set(value) != names:
            raise InputError(f"inputs: an object with {', '.join(sorted(names))}, or a list of them, is needed")
        return tuple(_array(value[column.name], column, f"{where}.{column.name}") for column in self.inputs)


def _column(*, name: str, datatype: str, shape: Sequence[int]) -> Column:
    if datatype not in DATATYPES or datatype == "BYTES":
        known = ", ".join(known for known in DATATYPES if known != "BYTES")
        raise ValueError(f"{name!r} has the datatype {datatype!r}; known: {known}")
    if any(not isinstance(size, int) or size < 1 for size in shape):
        raise ValueError(f"{name!r} has the shape {list(shape)}; sizes of at least 1 are needed")
    return Column(name=name, datatypes=(datatype,), shape=tuple(shape))


def _array(value: object, column: Column, where: str) -> npt.NDArray[np.generic]:
    """Returns the array of a JSON value. Raises InputError if the datatype or the shape is not the column's."""
    needed = f"{column.datatype} of the shape {list(column.shape)} is needed"
    try:
        array = parse_numbers(value, column.datatype)
    except ValueError as error:
        raise InputError(f"{where}: {needed}: {error}") from error
    if array.shape != column.shape:
        raise InputError(f"{where}: {needed}, not {list(array.shape)}")
    return array


def _schema(datatype: str, shape: Sequence[int]) -> Mapping[str, Any]:
    if shape:
        return {"type": "array", "items": _schema(datatype, shape[1:]), "minItems": shape[0], "maxItems": shape[0]}
    return {"type": {"b": "boolean", "f": "number"}.get(DATATYPES[datatype].kind, "integer")}
