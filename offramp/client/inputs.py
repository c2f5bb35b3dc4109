"""Inputs of clients: texts and pairs of texts are sent as JSON, images and arrays as tensors of bytes."""

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
"""A text, a pair of texts, an image file or the path of one, an array, or several by the names of a model's inputs."""

DATATYPE_OF = {dtype: name for name, dtype in DATATYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBody:
    """The body of `POST /v2/models/{model}/infer`, with tensors as bytes behind the JSON."""

    model: str
    inputs: tuple[Mapping[str, object], ...]
    tail: bytes
    parameters: Mapping[str, object] = field(default_factory=dict)
    outputs: tuple[Mapping[str, object], ...] | None = None
    """The wanted outputs with their parameters; None for all outputs in JSON."""

    @property
    def path(self) -> str:
        return path_of("infer", model=self.model)

    def content(self, timeout_s: float | None) -> tuple[bytes, dict[str, str]]:
        """Returns bytes and headers, with the timeout, which Triton counts in microseconds."""
        timeout = {} if timeout_s is None else {"timeout": max(1, int(timeout_s * 1e6))}
        outputs = {} if self.outputs is None else {"outputs": self.outputs}
        head = json.dumps({"inputs": self.inputs, "parameters": {**self.parameters, **timeout}, **outputs}).encode()
        headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(len(head)),
        }
        return head + self.tail, headers


def travel_as_json(rows: Sequence[Input]) -> bool:
    """Returns whether the inputs are texts, or pairs of texts."""
    return all(
        isinstance(row, str) or (isinstance(row, tuple | list) and all(isinstance(each, str) for each in row))
        for row in rows
    )


def tensor_body(rows: Sequence[Input], metadata: Mapping[str, Any], parameters: Mapping[str, object]) -> TensorBody:
    """Returns the body for images or arrays, by the model's metadata; raises InputError for rows of several kinds."""
    columns = _columns(rows, metadata["inputs"])
    inputs, tails = [], []
    for name, (datatype, column) in columns.items():
        tail = pack_elements(datatype, column)
        sized = {"binary_data_size": len(tail)}
        inputs.append({"name": name, "shape": list(column.shape), "datatype": datatype, "parameters": sized})
        tails.append(tail)
    described = metadata.get("outputs", ())  # of which those of many numbers come as bytes
    wanted = tuple({"name": each["name"], "parameters": {"binary_data": _is_large(each)}} for each in described)
    return TensorBody(
        model=metadata["name"],
        inputs=tuple(inputs),
        tail=b"".join(tails),
        parameters=parameters,
        outputs=wanted if answers_are_large(metadata) else None,
    )


def files_as_json(rows: Sequence[Input]) -> list[str] | None:
    """Returns image files as `POST /predict` takes them; None for other inputs."""
    if not all(isinstance(row, bytes | Path) for row in rows):
        return None
    return [binascii.b2a_base64(_file(row), newline=False).decode() for row in rows]


def answers_are_large(metadata: Mapping[str, Any]) -> bool:
    """Returns whether a model's outputs have many numbers per input, as class maps and keypoints do."""
    return any(map(_is_large, metadata.get("outputs", ())))


def _is_large(described: Mapping[str, Any]) -> bool:
    return len(described.get("shape", ())) > 1


def inputs_of(columns: Mapping[str, Array]) -> Sequence[Input]:
    """Returns the rows of a data set's columns: texts, files, arrays, pairs of texts, or arrays by name."""
    rows = list(zip(*columns.values(), strict=True))
    if len(columns) == 1:
        return [row[0] for row in rows]
    if all(column.dtype == object for column in columns.values()):
        return rows
    return [dict(zip(columns, row, strict=True)) for row in rows]


def read_tensors(payload: Any) -> list[dict[str, Any]]:
    """Returns answers of v2 as one object per input, with many numbers as arrays.

    Raises what a payload of another form brings about.
    """
    columns = {each["name"]: _column(each) for each in payload["outputs"]}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def with_tail(head: Any, tail: memoryview) -> Any:
    """Puts tensors of a v2 answer that follow as bytes into its JSON, and returns it.

    Raises what an answer of another form brings about.
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
    wanted = {each["name"]: each["datatype"] for each in inputs}
    if all(isinstance(row, bytes | Path) for row in rows):
        files = np.empty(len(rows), dtype=object)
        files[:] = [_file(row) for row in rows]
        return {_only(wanted): ("BYTES", files)}
    if all(isinstance(row, Mapping) for row in rows):
        return {name: _stacked([row[name] for row in rows], kind) for name, kind in wanted.items()}  # type: ignore[index] # mappings, all of them
    if all(isinstance(row, np.ndarray | np.generic) for row in rows):
        name = _only(wanted)
        return {name: _stacked(rows, wanted[name])}
    raise InputError("the inputs of a request are of one kind: texts, pairs of texts, image files, arrays")


def _only(wanted: Mapping[str, str]) -> str:
    if len(wanted) > 1:
        raise InputError(f"the model takes {', '.join(wanted)}: give a mapping of arrays by these names")
    [name] = wanted
    return name


def _stacked(rows: Sequence[Any], datatype: str) -> tuple[str, Array]:
    """Returns rows as one array of the model's datatype; arrays keep theirs if that is BYTES."""
    shapes = {np.shape(row) for row in rows}
    if len(shapes) > 1:
        raise InputError(f"the arrays of a request are of one shape, not {sorted(shapes)}")
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
