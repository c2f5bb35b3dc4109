"""Sub-graphs of an ONNX graph, between tensors by name: what a block is.

What follows from the layout alone (masks, positions, sizes) and constants are computed anew in every piece. Everything
else that a piece needs must cross: `onnx.utils.Extractor` walks on to the graph's inputs where a tensor was forgotten,
and so computes earlier blocks again, silently.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earlyexit.errors import GraphError, ModelFolderError
from earlyexit.foreign.onnx_file import RANDOM, locations, read_onnx

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


SIZE_OPERATORS = ("Shape", "Size")
"""What reads of a tensor how large it is, and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a piece is made of."""

    nodes: tuple[Any, ...]
    """In the graph's order."""
    inputs: tuple[str, ...]
    """Of the tensors that were given, those that it reads."""
    sizes: tuple[str, ...]
    """Outputs of `Shape` and `Size` whose tensors it does not have: they are fed."""
    weights: tuple[str, ...]


class GraphParts:
    """A graph whose nodes are in the order of their computation, and what can be taken out of it."""

    def __init__(self, graph: Any) -> None:
        """`graph`: a GraphProto."""
        self._nodes = list(graph.node)
        self.weights = {each.name: each for each in graph.initializer} | {
            each.values.name: each for each in graph.sparse_initializer
        }
        self._maker = {name: index for index, node in enumerate(self._nodes) for name in node.output if name}

    def has(self, name: str) -> bool:
        """Whether a node gives it."""
        return name in self._maker

    def node_of(self, name: str) -> Any:
        """The node that gives a tensor; None for inputs and weights."""
        index = self._maker.get(name)
        return None if index is None else self._nodes[index]

    def part(self, given: Collection[str], free: Collection[str], wanted: Sequence[str]) -> Part:
        """What computes `wanted` of the tensors in `given`, and of the inputs in `free`, which may always be read.

        Raises GraphError naming what it needs besides.
        """
        known = self._known({*given, *free})
        nodes: set[int] = set()
        sizes: dict[str, None] = {}
        read: dict[str, None] = {}
        todo = [name for name in reversed(wanted) if name not in given]
        while todo:
            name = todo.pop()
            if name in read or name in sizes:
                continue
            if name in given or name in free or name in self.weights:
                read[name] = None
                continue
            index = self._maker.get(name)
            if index is None or not (name in known or self._depends(name, given)):
                raise UncutError(name)
            node = self._nodes[index]
            if node.op_type in SIZE_OPERATORS and node.input[0] not in known:
                sizes[name] = None
            elif index not in nodes:
                nodes.add(index)
                todo += [each for each in node.input if each]
        return Part(
            nodes=tuple(self._nodes[index] for index in sorted(nodes)),
            inputs=tuple(name for name in read if name not in self.weights),
            sizes=tuple(sizes),
            weights=tuple(name for name in read if name in self.weights),
        )

    def free(self, layout_inputs: Collection[str]) -> set[str]:
        """Every tensor that follows from the layout and from constants."""
        return self._known(set(layout_inputs))

    def _known(self, given: set[str]) -> set[str]:
        """All that can be computed of these, of weights, and of sizes."""
        known = given | set(self.weights)
        for node in self._nodes:
            repeats = node.op_type not in RANDOM and all(name in known for name in node.input if name)
            if repeats or node.op_type in SIZE_OPERATORS:
                known.update(node.output)
        return known

    def _depends(self, name: str, given: Collection[str]) -> bool:
        """Whether a tensor is computed, among others, of what was given."""
        seen: set[str] = set()
        todo = [name]
        while todo:
            name = todo.pop()
            if name in given:
                return True
            node = self.node_of(name)
            if node is None or name in seen or node.op_type in SIZE_OPERATORS:
                continue
            seen.add(name)
            todo += [each for each in node.input if each]
        return False


class UncutError(GraphError):
    """A cut does not part the graph: something else goes past it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the graph's tensor {name!r} goes past the cut")
        self.name = name


def check_cuts(parts: GraphParts, cuts: Sequence[Sequence[str]], codec: Sequence[str], layout: Collection[str]) -> None:
    """Raise GraphError unless every cut parts the graph, in this order, and the last is the graph's answer."""
    free = parts.free(layout)
    before: Sequence[str] = codec
    for block, cut in enumerate(cuts):
        for name in cut:
            if not parts.has(name) and name not in codec:
                raise GraphError(f"the graph has no tensor {name!r} to cut at")
            if name in free:
                raise GraphError(f"the graph's tensor {name!r} is the same for all inputs: nothing crosses in it")
        try:
            part = parts.part(before, layout, cut)
        except UncutError as error:
            where = "the graph's input" if block == 0 else f"a cut at {', '.join(before)}"
            raise GraphError(
                f"block {block} also needs the graph's tensor {error.name!r}, which does not cross in {where}; it has "
                "to cross as well, or the cut to be elsewhere"
            ) from error
        if not part.nodes:
            raise GraphError(f"block {block} computes nothing: its cuts are at the same tensors")
        before = cut


def sizes_needed(
    parts: GraphParts, cuts: Sequence[Sequence[str]], codec: Sequence[str], layout: Collection[str]
) -> list[str]:
    """Of all blocks, the sizes that are fed to them; pieces of several blocks need no others."""
    befores = [codec, *cuts[:-1]]
    found = (parts.part(before, layout, cut).sizes for before, cut in zip(befores, cuts, strict=True))
    return sorted({name for sizes in found for name in sizes})


def piece_model(model: Any, part: Part, parts: GraphParts, inputs: Iterable[Any], outputs: Iterable[Any]) -> Any:
    """A ModelProto of a part; `inputs` and `outputs` are ValueInfoProtos. Its weights lie where the graph's do."""
    from onnx import ModelProto

    piece = ModelProto(ir_version=model.ir_version)
    piece.opset_import.extend(model.opset_import)
    piece.graph.name = "piece"
    piece.graph.node.extend(part.nodes)
    for name in part.weights:
        weight = parts.weights[name]
        target = piece.graph.sparse_initializer if hasattr(weight, "values") else piece.graph.initializer
        target.append(weight)
    piece.graph.input.extend(inputs)
    piece.graph.output.extend(outputs)
    return piece
