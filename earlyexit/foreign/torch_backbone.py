"""The backbone of a traced torch module. Its blocks are graphs of ATen operators, which are stored as data.

A model's folder has the graph of every block (`graph.json`) and the weights. Serving it needs neither the module's code
nor a pickle. A graph can only name tensors, and operators that compute tensors from tensors. It cannot read a file or
run other code, so that an untrusted graph can be served.

Modules for tokens take padded tensors (B, T, ...), but inputs are packed between blocks.
Tensor legend: B inputs, T tokens of the longest.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, fx, nn

from earlyexit.errors import ModelFolderError, first_line
from earlyexit.families.base import Backbone, Family, JsonDict
from earlyexit.network.boundary import Boundary
from earlyexit.network.piece import Layout, Tensors

NAMESPACES = ("aten", "prims")
"""The namespaces of allowed operators in `torch.ops`."""
SCALARS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "getitem")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(torch, name) for name in ("sym_max", "sym_min", "sym_int", "sym_float", "sym_not")},
    **{name: getattr(math, name) for name in ("ceil", "floor", "trunc")},
}
"""Allowed functions of sizes, and `getitem`, which selects a tensor of a tuple."""
FACTORIES = frozenset(
    {
        *(f"aten.{name}.default" for name in ("arange", "zeros", "ones", "full", "eye", "linspace", "scalar_tensor")),
        *(f"aten.{name}.default" for name in ("tril_indices", "triu_indices")),
        *("aten.arange.start", "aten.arange.start_step", "aten.empty.memory_format", "aten.eye.m"),
    }
)
"""Allowed operators without tensor arguments. Others are refused, because one of them reads files."""
CONSTANTS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
"""The types of arguments that are stored by their name in `torch`."""


class Graph(BaseModel):
    """The calls of a block, in an order in which they can run."""

    model_config = ConfigDict(frozen=True)

    takes: tuple[str, ...]
    """The names of the tensors and sizes that are its arguments."""
    weights: tuple[str, ...]
    """The names of its weights, which are passed after the other arguments."""
    calls: tuple[tuple[str, str, Any, Any], ...]
    """For each call: the name of the result, the operator, positional arguments, and keyword arguments."""
    gives: tuple[str, ...]
    """The names of the tensors that it returns."""


def call_of(node: fx.Node, renamed: Mapping[str, str]) -> tuple[str, str, Any, Any]:
    """Returns a node of a traced graph as data. Raises ModelFolderError for an operator that `module_of` refuses.

    `renamed`: the names of arguments that differ from the names of their nodes.
    """
    kwargs = {name: _to_json(value, renamed) for name, value in node.kwargs.items()}
    return node.name, _op_name(node), _to_json(node.args, renamed), kwargs


def module_of(graph: Graph, device: torch.device) -> fx.GraphModule:
    """Returns a graph as a module that maps the arguments `takes` and `weights` to a tuple.

    `device`: for constants. Raises ModelFolderError for operators that are not allowed, and unknown names.
    """
    fx_graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for k, name in enumerate((*graph.takes, *graph.weights)):
        nodes[name] = fx_graph.placeholder(f"given_{k}")
    for name, op, args, kwargs in graph.calls:
        try:
            target = _operator(op)
            schema = target._schema.arguments if isinstance(target, torch._ops.OpOverload) else ()
            # The names of keyword arguments become part of the code that torch.fx generates.
            if unknown := kwargs.keys() - {each.name for each in schema if not iskeyword(each.name)}:
                raise TypeError(f"it has no argument {sorted(unknown)[0]!r}")
            by_name = {key: _from_json(value, nodes, device) for key, value in kwargs.items()}
            nodes[name] = fx_graph.call_function(target, tuple(_from_json(args, nodes, device)), by_name)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ModelFolderError(f"the graph's call {name!r} of {op!r} cannot be read: {error}") from error
    if missing := [name for name in graph.gives if name not in nodes]:
        raise ModelFolderError(f"the graph returns {missing[0]!r}, which it does not compute")
    fx_graph.output(tuple(nodes[name] for name in graph.gives))
    return fx.GraphModule(torch.nn.Module(), fx_graph)


def _op_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace in NAMESPACES and _only_computes(target):
        return str(target)
    name = getattr(target, "__name__", str(target))
    if SCALARS.get(name) is target:
        return name
    raise ModelFolderError(f"{node.name!r} calls {target}, which is not an operator of torch itself on tensors")


def _operator(name: str) -> Callable[..., Any]:
    if name in SCALARS:
        return SCALARS[name]
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if namespace not in NAMESPACES:
        raise ModelFolderError(f"{name!r} is not an operator of torch itself; allowed are {', '.join(NAMESPACES)}")
    target = getattr(getattr(torch.ops, namespace), packet)
    target = getattr(target, overload) if isinstance(target, torch._ops.OpOverloadPacket) else None
    if not isinstance(target, torch._ops.OpOverload) or str(target) != name or not _only_computes(target):
        raise ModelFolderError(f"{name!r} is not an operator that computes tensors from tensors")
    return target


def _only_computes(target: torch._ops.OpOverload[..., Any]) -> bool:
    """Whether an operator takes tensors or is in `FACTORIES`, and does not write to its arguments."""
    takes_tensors = any("Tensor" in str(each.type) for each in target._schema.arguments)
    return (takes_tensors or str(target) in FACTORIES) and not target._schema.is_mutable


def _to_json(value: Any, renamed: Mapping[str, str]) -> Any:
    match value:
        case fx.Node():
            return {"tensor": renamed.get(value.name, value.name)}
        case torch.device():
            return {"device": None}  # the device on which the graph runs
        case float() if not math.isfinite(value):
            return {"float": str(value)}
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_to_json(each, renamed) for each in value]
    for key, kind in CONSTANTS.items():
        if isinstance(value, kind):
            return {key: str(value).removeprefix("torch.")}
    raise ModelFolderError(f"an operator has the argument {value!r}, which cannot be stored in a model folder")


def _from_json(value: Any, nodes: Mapping[str, fx.Node], device: torch.device) -> Any:
    if isinstance(value, list):
        return [_from_json(each, nodes, device) for each in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "tensor":
        return nodes[content]
    if kind == "device":
        return device
    if kind == "float":
        return float(content)
    constant = getattr(torch, content)
    if not isinstance(constant, CONSTANTS[kind]):
        raise TypeError(f"{content!r} is no {kind}")
    return constant


GRAPH_FILE = "graph.json"
TOKEN_TYPES = "token_type_ids"
PREFIX = "w_"
"""The prefix of the attributes for weights, which avoids conflicts with attributes of nn.Module."""
LAYOUT_INPUTS: Mapping[str, Callable[[Layout], Tensor]] = {
    "attention_mask": lambda layout: layout.mask_BT,
    "position_ids": lambda layout: torch.arange(layout.longest, device=layout.device).expand(layout.num_inputs, -1),
    TOKEN_TYPES: lambda layout: torch.zeros_like(layout.mask_BT, dtype=torch.int64),
}
"""The inputs (B, T) that follow from the lengths, by their usual names. Token types are 0 unless the codec returns
them."""


class Blocks(BaseModel):
    """The content of `graph.json`."""

    model_config = ConfigDict(frozen=True)

    graphs: tuple[Graph, ...]
    boundaries: tuple[Boundary, ...]
    """The tensors after each block."""
    inputs: Boundary
    """The tensors of the codec."""
    types: Mapping[str, str]
    """The names of the torch dtypes of the module's inputs, and of the tensors between blocks."""
    weights: Mapping[str, tuple[str, tuple[int, ...]]]
    """The dtype and shape of each weight, by its name in the graphs."""


class ExportedBackbone(Backbone):
    """The blocks of a traced module, as graphs that share weights."""

    reorders_linears: ClassVar[bool] = False
    float32_only: ClassVar[bool] = True

    def __init__(self, blocks: Blocks, max_length: int = 1) -> None:
        super().__init__()
        self.blocks = blocks
        self.num_blocks = len(blocks.graphs)
        self.inputs = blocks.inputs
        self.max_length = max_length
        self.weights = Weights(blocks.weights)
        self._modules_by_device: dict[tuple[int, torch.device], fx.GraphModule] = {}

    def boundary(self, block: int) -> Boundary:
        return self.blocks.boundaries[block]

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        return inputs

    def run_blocks(self, first: int, end: int, hidden: Tensors, layout: Layout) -> Tensors:
        """Runs blocks. Tensors stay padded between them."""
        before = self.boundary(first - 1) if first else self.inputs
        padded = [layout.pad(each) if spec.per_token else each for spec, each in zip(before, hidden, strict=True)]
        for index in range(first, end):
            padded = self._run(index, padded, layout)
        after = self.boundary(end - 1)
        rows = (layout.unpad(each) if spec.per_token else each for spec, each in zip(after, padded, strict=True))
        return tuple(each.to(getattr(torch, spec.dtype)) for spec, each in zip(after, rows, strict=True))

    def to_config(self) -> JsonDict:
        return {"max_length": self.max_length, "graph": _sha256(self.blocks)}

    def write_files(self, folder: Path) -> None:
        (folder / GRAPH_FILE).write_text(_text(self.blocks), encoding="utf-8")

    def _run(self, index: int, padded: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        graph, types = self.blocks.graphs[index], self.blocks.types
        *names, _, _ = graph.takes
        tensors = (*padded, *(LAYOUT_INPUTS[name](layout) for name in names[len(padded) :]))
        # Folders of earlier versions have no types of tensors between blocks, which cross as they are.
        pairs = zip(names, tensors, strict=True)
        given = [each.to(dtype_of(types[name])) if name in types else each for name, each in pairs]
        module, sizes = self.module(index, padded[0].device), (layout.num_inputs, layout.longest)
        return list(module(*given, *sizes, *self.weights.named(graph.weights)))

    def module(self, index: int, device: torch.device) -> fx.GraphModule:
        """Returns the graph of a block as a module. Raises ModelFolderError for a graph that is not allowed."""
        if (index, device) not in self._modules_by_device:
            self._modules_by_device[index, device] = module_of(self.blocks.graphs[index], device)
        return self._modules_by_device[index, device]

    def __getstate__(self) -> JsonDict:
        return {**vars(self), "_modules_by_device": {}}


class Exported(Family):
    """The family of traced torch modules, built from a model folder; `TorchModel.build` builds one from a module."""

    name = "exported"

    def build(self, config: JsonDict, folder: Path | None = None) -> ExportedBackbone:
        if folder is None:
            raise ModelFolderError(f"the family {self.name} can only be built from a model folder with {GRAPH_FILE}")
        path = folder / GRAPH_FILE
        try:
            blocks = Blocks.model_validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ModelFolderError(f"{path} cannot be read: {first_line(error)}") from error
        if _sha256(blocks) != config["graph"]:
            raise ModelFolderError(f"{path} is not the graph that the model's card was written for")
        backbone = ExportedBackbone(blocks, config["max_length"])
        for dtype in blocks.types.values():
            dtype_of(dtype)
        for index in range(backbone.num_blocks):
            backbone.module(index, torch.device("cpu"))
        return backbone


class Weights(nn.Module):
    """The weights of a traced module, by arbitrary names."""

    def __init__(self, weights: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        super().__init__()
        for name, (dtype, shape) in weights.items():
            empty = torch.empty(shape, dtype=dtype_of(dtype))
            if empty.is_floating_point():
                self.register_parameter(PREFIX + name, nn.Parameter(empty, requires_grad=False))
            else:
                self.register_buffer(PREFIX + name, empty)

    def named(self, names: Sequence[str]) -> list[Tensor]:
        return [getattr(self, PREFIX + name) for name in names]


def type_of(tensor: Tensor) -> str:
    """Returns the name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Returns the torch dtype of a name. Raises ModelFolderError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ModelFolderError(f"{GRAPH_FILE} has tensors of {name!r}, which is no torch dtype")
    return dtype


def _text(blocks: Blocks) -> str:
    return json.dumps(blocks.model_dump(), separators=(",", ":")) + "\n"


def _sha256(blocks: Blocks) -> str:
    return hashlib.sha256(_text(blocks).encode()).hexdigest()
