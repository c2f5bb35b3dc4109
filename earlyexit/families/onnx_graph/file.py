"""Files of ONNX graphs: one from anywhere, which is checked, and that in a model's folder, its weights beside it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from earlyexit.errors import GraphError, ModelFolderError
from earlyexit.graph.onnx_file import locations, read_onnx

WEIGHTS_SUFFIX = ".data"
"""Of the file with the weights, after the graph's own name."""
INLINE_BYTES = 1024
"""Tensors below this stay in the graph: shapes and the like, which ONNX Runtime reads while it opens a session."""
UNKNOWN = (
    re.compile(r"(?P<name>[\w.]+:\w+)\(-?\d+\) is not a registered function/op"),
    re.compile(r"No Op registered for (?P<name>\w+) "),
    re.compile(r"Could not find an implementation for (?P<name>\w+)\("),
    re.compile(r"No opset import for domain '(?P<name>[\w.]+)'"),
)
"""What ONNX Runtime says of operators that it does not have."""

FileState = tuple[tuple[int, int, int], ...]
"""Of files: which they are, how large, and when they were written; as long as it is the same, so are they."""


def read_source(path: Path) -> Any:
    """The ModelProto of a file from anywhere, its weights in memory; raises GraphError where there is none to cut."""
    import onnx

    model = read_onnx(path).proto
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
    except (OSError, ValueError, RuntimeError, onnx.checker.ValidationError) as error:
        raise GraphError(f"the weights beside {path} cannot be read: {_one_line(error)}") from error
    return model


def write_graph(model: Any, folder: Path, file: str) -> None:
    """Put a graph, whose weights are in memory, into an empty folder; the proto is of no use afterwards."""
    import onnx

    _weights_from_constants(model.graph)
    beside = file + WEIGHTS_SUFFIX
    onnx.save_model(model, folder / file, save_as_external_data=True, location=beside, size_threshold=INLINE_BYTES)
    (folder / beside).touch()  # a graph without weights has the file as well


def read_graph(folder: Path, file: str) -> Any:
    """The ModelProto of a model's folder, without its weights; raises ModelFolderError."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(folder / file, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise ModelFolderError(f"{folder / file} is no ONNX file: {_one_line(error)}") from error
    strange = {location for _, location in locations(model)} - {file + WEIGHTS_SUFFIX}
    if strange:
        raise ModelFolderError(f"{folder / file} has weights in {sorted(strange)[0]!r}, which is not its own file")
    return model


def fingerprint(folder: Path, file: str) -> str:
    """SHA-256 of a graph's file and of the weights beside it; raises ModelFolderError where one is missing."""
    digest = hashlib.sha256()
    for name in (file, file + WEIGHTS_SUFFIX):
        if not (folder / name).is_file():
            raise ModelFolderError(f"{folder} has no {name}, which its network consists of")
        with (folder / name).open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def state_of(folder: Path, file: str) -> FileState:
    """Of a graph's file and of the weights beside it; raises ModelFolderError where one is missing."""
    try:
        found = [(folder / name).stat() for name in (file, file + WEIGHTS_SUFFIX)]
    except OSError as error:
        lost = Path(error.filename).name
        raise ModelFolderError(f"{folder} has no {lost}, which its network consists of") from error
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)


def in_plain_words(error: Exception) -> str:
    """What ONNX Runtime could not do, in one line; operators that it does not have are named."""
    said = str(error)
    unknown = sorted({found["name"] for pattern in UNKNOWN for found in pattern.finditer(said)})
    if unknown:
        return f"ONNX Runtime has no operator {', '.join(unknown)}"
    return f"ONNX Runtime refuses it: {_one_line(error)}"


def _weights_from_constants(graph: Any) -> None:
    """Large constants become weights, which may lie in another file, and so do numbers that are held one by one."""
    from onnx import numpy_helper

    for tensor in graph.initializer:
        if not tensor.HasField("raw_data") and tensor.data_type != tensor.STRING:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    kept = []
    for node in graph.node:
        value = next((each.t for each in node.attribute if each.name == "value"), None)
        if node.op_type == "Constant" and value is not None and len(value.raw_data) >= INLINE_BYTES:
            weight = graph.initializer.add()
            weight.CopyFrom(value)
            weight.name = node.output[0]
        else:
            kept.append(node)
    if len(kept) < len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
