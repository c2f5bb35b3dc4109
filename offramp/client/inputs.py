"""Encodes the inputs of clients: texts and pairs of texts as JSON, images and arrays as binary tensors."""

from __future__ import annotations

import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from deployments.api.operations import path_of
from deployments.api.parsing import pack_elements, unpack_elements
from earlyexit.errors import InputError
from earlyexit.network.boundary import DATATYPES, cast_column

Array: TypeAlias = npt.NDArray[Any]
Input: TypeAlias = str | tuple[str, str] | bytes | Path | Array | Mapping[str, Array]
"""A text, a pair of texts, an image file or its path, an array, or arrays by the names of the model's inputs."""

DATATYPE_OF = {dtype: name for name, dtype in DATATYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBody:
    """The body of `POST /v2/models/{model}/infer`: JSON, followed by the tensors as bytes."""

    model: str
    inputs: tuple[Mapping[str, object], ...]
    tail: bytes
    parameters: Mapping[str, object] = field(default_factory=dict)
    outputs: tuple[Mapping[str, object], ...] | None = None
    """The requested outputs with their parameters; None for all outputs as JSON."""

    @property
    def path(self) -> str:
        return path_of("infer", model=self.model)

    def content(self, timeout_s: float | None) -> tuple[bytes, dict[str, str]]:
        """Returns the bytes and the headers, with the timeout in microseconds, as in Triton."""
        timeout = {} if timeout_s is None else {"timeout": max(1, int(timeout_s * 1e6))}
        outputs = {} if self.outputs is None else {"outputs": self.outputs}
        head = json.dumps({"inputs": self.inputs, "parameters": {**self.parameters, **timeout}, **outputs}).encode()
        headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(len(head)),
        }
        return head + self.tail, headers


def are_texts(rows: Sequence[Input]) -> bool:
    """Returns whether the inputs are texts or pairs of texts."""
    return all(
        isinstance(row, str) or (isinstance(row, tuple | list) and all(isinstance(each, str) for each in row))
        for row in rows
    )


def tensor_body(rows: Sequence[Input], metadata: Mapping[str, Any], parameters: Mapping[str, object]) -> TensorBody:
    """Returns the request body for images or arrays; raises InputError for inputs of several kinds."""
    columns = _columns(rows, metadata["inputs"])
    inputs, tails = [], []
    for name, (datatype, column) in columns.items():
        tail = pack_elements(datatype, column)
        sized = {"binary_data_size": len(tail)}
        inputs.append({"name": name, "shape": list(column.shape), "datatype": datatype, "parameters": sized})
        tails.append(tail)
    outputs = metadata.get("outputs", ())
    requested = tuple({"name": each["name"], "parameters": {"binary_data": _is_large(each)}} for each in outputs)
    return TensorBody(
        model=metadata["name"],
        inputs=tuple(inputs),
        tail=b"".join(tails),
        parameters=parameters,
        outputs=requested if answers_are_large(metadata) else None,
    )


def encode_files(rows: Sequence[Input]) -> list[str] | None:
    """Returns image files in base64, as `POST /predict` expects them; None for other inputs."""
    if not all(isinstance(row, bytes | Path) for row in rows):
        return None
    return [binascii.b2a_base64(_file(row), newline=False).decode() for row in rows]


def answers_are_large(metadata: Mapping[str, Any]) -> bool:
    """Returns whether a model has outputs with many numbers per input, such as class maps and keypoints."""
    return any(map(_is_large, metadata.get("outputs", ())))


def _is_large(output: Mapping[str, Any]) -> bool:
    return len(output.get("shape", ())) > 1


def inputs_of(columns: Mapping[str, Array]) -> Sequence[Input]:
    """Returns the rows of a data set as inputs."""
    rows = list(zip(*columns.values(), strict=True))
    if len(columns) == 1:
        return [row[0] for row in rows]
    if all(column.dtype == object for column in columns.values()):
        return rows
    return [dict(zip(columns, row, strict=True)) for row in rows]


def read_tensors(payload: Any) -> list[dict[str, Any]]:
    """Returns the answers in a v2 payload, one dict per input, with large values as arrays.

    An invalid payload raises KeyError, TypeError or ValueError.
    """
    columns = {each["name"]: _column(each) for each in payload["outputs"]}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def attach_tensors(head: Any, tail: memoryview) -> Any:
    """Adds the binary tensors of a v2 answer to its JSON `head`, and returns it.

    An invalid answer raises InputError, KeyError, TypeError or ValueError.
    """
    at = 0
    for output in head["outputs"]:
        if "data" not in output:
            size = output["parameters"]["binary_data_size"]
            output["data"] = unpack_elements(output["datatype"], tail[at : at + size], output["name"])
            at += size
    return head


def _column(output: Mapping[str, Any]) -> Sequence[Any]:
    data, shape, datatype = output["data"], output["shape"], output["datatype"]
    if datatype == "BYTES":
        data = [each.decode() if isinstance(each, bytes) else each for each in data]
    column = np.array(data, dtype=DATATYPES[datatype] if len(shape) > 1 else None).reshape(shape)
    return list(column) if column.ndim > 1 else column.tolist()


def _columns(rows: Sequence[Input], inputs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, Array]]:
    datatypes = {each["name"]: each["datatype"] for each in inputs}
    if all(isinstance(row, bytes | Path) for row in rows):
        files = np.empty(len(rows), dtype=object)
        files[:] = [_file(row) for row in rows]
        return {_only(datatypes): ("BYTES", files)}
    if all(isinstance(row, Mapping) for row in rows):
        return {name: _stacked([row[name] for row in rows], kind) for name, kind in datatypes.items()}  # type: ignore[index] # mappings, all of them
    if all(isinstance(row, np.ndarray | np.generic) for row in rows):
        name = _only(datatypes)
        return {name: _stacked(rows, datatypes[name])}
    raise InputError("the inputs of a request must be of one kind: texts, pairs of texts, image files or arrays")


def _only(datatypes: Mapping[str, str]) -> str:
    if len(datatypes) > 1:
        raise InputError(f"the model takes {', '.join(datatypes)}: give a mapping from these names to arrays")
    [name] = datatypes
    return name


def _stacked(rows: Sequence[Any], datatype: str) -> tuple[str, Array]:
    """Returns rows as one array, converted to the model's datatype unless that is BYTES."""
    shapes = {np.shape(row) for row in rows}
    if len(shapes) > 1:
        raise InputError(f"the arrays of a request must have the same shape, not {sorted(shapes)}")
    column = np.stack([np.asarray(row) for row in rows])
    if datatype == "BYTES":
        column = column.astype(np.float32) if column.dtype == np.float64 else column
        if column.dtype not in DATATYPE_OF or column.dtype == object:
            raise InputError(f"an array of {column.dtype.name} cannot be sent")
        return DATATYPE_OF[column.dtype], column
    try:
        return datatype, cast_column(column, datatype)
    except ValueError as error:
        raise InputError(f"the model takes {datatype}, not {column.dtype.name}: {error}") from error


def _file(row: Input) -> bytes:
    if isinstance(row, bytes):
        return row
    assert isinstance(row, Path)
    try:
        return row.read_bytes()
    except OSError as error:
        raise InputError(f"{row}: {error.strerror}") from error
