"""The backbone of a traced torch module: blocks as graphs of ATen operators, which are data and not code.

A model's folder holds the graph of every block (`graph.json`) and the weights; neither the module's own code nor a
pickle is needed to serve it. A graph names tensors, and operators that compute tensors from tensors, so that anyone's
folder can be served. Nothing else that Python or torch can do has a name in it, such as reading a file.

Modules over tokens take padded tensors (B, T, ...); between blocks inputs stay packed.
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
"""Namespaces of torch's own operators in `torch.ops`."""
SCALARS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "getitem")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(torch, name) for name in ("sym_max", "sym_min", "sym_int", "sym_float", "sym_not")},
    **{name: getattr(math, name) for name in ("ceil", "floor", "trunc")},
}
"""Functions of sizes, and the one that takes a tensor out of a tuple."""
FACTORIES = frozenset(
    {
        *(f"aten.{name}.default" for name in ("arange", "zeros", "ones", "full", "eye", "linspace", "scalar_tensor")),
        *(f"aten.{name}.default" for name in ("tril_indices", "triu_indices")),
        *("aten.arange.start", "aten.arange.start_step", "aten.empty.memory_format", "aten.eye.m"),
    }
)
"""Operators that make a tensor from none. Others without tensors are refused, since one of them reads files."""
WORDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
"""Types of arguments that torch has names for."""


class Graph(BaseModel):
    """Calls in an order in which they can run."""

    model_config = ConfigDict(frozen=True)

    takes: tuple[str, ...]
    """Tensors and sizes that are given to every run."""
    weights: tuple[str, ...]
    """Constant tensors, given after those."""
    calls: tuple[tuple[str, str, Any, Any], ...]
    """For each: the name of its result, the operator, its arguments by position and by name."""
    gives: tuple[str, ...]


def call_of(node: fx.Node, renamed: Mapping[str, str]) -> tuple[str, str, Any, Any]:
    """Returns one node of a traced graph as data; raises ModelFolderError for an operator that `module_of` refuses.

    `renamed`: what arguments are called here, where that is not their nodes' name.
    """
    kwargs = {name: _to_json(value, renamed) for name, value in node.kwargs.items()}
    return node.name, _op_name(node), _to_json(node.args, renamed), kwargs


def module_of(graph: Graph, device: torch.device) -> fx.GraphModule:
    """Returns a graph as a module, a function of `takes` and then `weights` to a tuple, with constants on that device.

    Raises ModelFolderError for operators that do not compute tensors from tensors, for arguments that they do not have,
    and for names that stand for nothing.
    """
    built, nodes = fx.Graph(), dict[str, fx.Node]()
    for k, name in enumerate((*graph.takes, *graph.weights)):
        nodes[name] = built.placeholder(f"given_{k}")
    for name, op, args, kwargs in graph.calls:
        try:
            target = _operator(op)
            schema = target._schema.arguments if isinstance(target, torch._ops.OpOverload) else ()
            # These names become part of the code that runs.
            if strange := kwargs.keys() - {each.name for each in schema if not iskeyword(each.name)}:
                raise TypeError(f"it has no argument {sorted(strange)[0]!r}")
            by_name = {key: _from_json(value, nodes, device) for key, value in kwargs.items()}
            nodes[name] = built.call_function(target, tuple(_from_json(args, nodes, device)), by_name)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ModelFolderError(f"the graph's call {name!r} of {op!r} cannot be read: {error}") from error
    missing = [name for name in graph.gives if name not in nodes]
    if missing:
        raise ModelFolderError(f"the graph gives {missing[0]!r}, which nothing in it makes")
    built.output(tuple(nodes[name] for name in graph.gives))
    return fx.GraphModule(torch.nn.Module(), built)


def _op_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace in NAMESPACES and _only_computes(target):
        return str(target)
    name = getattr(target, "__name__", str(target))
    if SCALARS.get(name) is target:
        return name
    raise ModelFolderError(f"{node.name!r} calls {target}, which is no operator of torch's own on tensors")


def _operator(name: str) -> Callable[..., Any]:
    if name in SCALARS:
        return SCALARS[name]
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if namespace not in NAMESPACES:
        raise ModelFolderError(f"{name!r} is no operator of torch's own; {', '.join(NAMESPACES)} are")
    found = getattr(getattr(torch.ops, namespace), packet)
    found = getattr(found, overload) if isinstance(found, torch._ops.OpOverloadPacket) else None
    if not isinstance(found, torch._ops.OpOverload) or str(found) != name or not _only_computes(found):
        raise ModelFolderError(f"{name!r} is no operator that computes tensors from tensors")
    return found


def _only_computes(found: torch._ops.OpOverload[..., Any]) -> bool:
    """Whether an operator reads tensors, or makes one from sizes, and writes to none of its arguments."""
    takes_tensors = any("Tensor" in str(each.type) for each in found._schema.arguments)
    return (takes_tensors or str(found) in FACTORIES) and not found._schema.is_mutable


def _to_json(value: Any, renamed: Mapping[str, str]) -> Any:
    match value:
        case fx.Node():
            return {"tensor": renamed.get(value.name, value.name)}
        case torch.device():
            return {"device": None}  # that of the run
        case float() if not math.isfinite(value):
            return {"float": str(value)}
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_to_json(each, renamed) for each in value]
    for word, kind in WORDS.items():
        if isinstance(value, kind):
            return {word: str(value).removeprefix("torch.")}
    raise ModelFolderError(f"an operator is given {value!r}, which a model's folder cannot hold")


def _from_json(value: Any, nodes: Mapping[str, fx.Node], device: torch.device) -> Any:
    if isinstance(value, list):
        return [_from_json(each, nodes, device) for each in value]
    if not isinstance(value, dict):
        return value
    [(kind, said)] = value.items()
    if kind == "tensor":
        return nodes[said]
    if kind == "device":
        return device
    if kind == "float":
        return float(said)
    found = getattr(torch, said)
    if not isinstance(found, WORDS[kind]):
        raise TypeError(f"{said!r} is no {kind}")
    return found


GRAPH_FILE = "graph.json"
TOKEN_TYPES = "token_type_ids"
PREFIX = "w_"
"""The prefix of weights' names, so that none is a module's own name."""
LAYOUT_INPUTS: Mapping[str, Callable[[Layout], Tensor]] = {
    "attention_mask": lambda layout: layout.mask_BT,
    "position_ids": lambda layout: torch.arange(layout.longest, device=layout.device).expand(layout.num_inputs, -1),
    TOKEN_TYPES: lambda layout: torch.zeros_like(layout.mask_BT, dtype=torch.int64),
}
"""Inputs (B, T) that follow from the lengths of inputs, by the names that exporters give them. Token types are those of
a first text, unless the codec gives them."""


class Blocks(BaseModel):
    """What `graph.json` holds."""

    model_config = ConfigDict(frozen=True)

    graphs: tuple[Graph, ...]
    boundaries: tuple[Boundary, ...]
    """What crosses after each block."""
    inputs: Boundary
    """What the codec gives."""
    types: Mapping[str, str]
    """Torch's names of the types of the module's own inputs."""
    weights: Mapping[str, tuple[str, tuple[int, ...]]]
    """Type and shape of each weight, by its name in the graphs."""


class ExportedBackbone(Backbone):
    """The blocks of a traced module, as graphs that share their weights."""

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
        """Between blocks without an exit tensors stay padded."""
        before = self.boundary(first - 1) if first else self.inputs
        padded = [layout.pad(each) if spec.per_token else each for spec, each in zip(before, hidden, strict=True)]
        for index in range(first, end):
            padded = self._run(index, padded, layout)
        after = self.boundary(end - 1)
        return tuple(layout.unpad(each) if spec.per_token else each for spec, each in zip(after, padded, strict=True))

    def to_config(self) -> JsonDict:
        return {"max_length": self.max_length, "graph": _sha256(self.blocks)}

    def write_files(self, folder: Path) -> None:
        (folder / GRAPH_FILE).write_text(_text(self.blocks), encoding="utf-8")

    def _run(self, index: int, padded: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        graph, types = self.blocks.graphs[index], self.blocks.types
        known = len(padded)
        if index == 0:
            names = graph.takes[:known]
            padded = [each.to(dtype_of(types[name])) for name, each in zip(names, padded, strict=True)]
        made = [LAYOUT_INPUTS[name](layout).to(dtype_of(types[name])) for name in graph.takes[known:-2]]
        module = self.module(index, padded[0].device)
        sizes = (len(padded[0]), layout.longest)
        return list(module(*padded, *made, *sizes, *self.weights.named(graph.weights)))

    def module(self, index: int, device: torch.device) -> fx.GraphModule:
        """Returns a block's graph as a module; raises ModelFolderError where it holds what must not be run."""
        if (index, device) not in self._modules_by_device:
            self._modules_by_device[index, device] = module_of(self.blocks.graphs[index], device)
        return self._modules_by_device[index, device]

    def __getstate__(self) -> JsonDict:
        return {**vars(self), "_modules_by_device": {}}


class Exported(Family):
    """Built from a model's folder alone; `TorchModel.take` makes one of a module."""

    name = "exported"

    def build(self, config: JsonDict, folder: Path | None = None) -> ExportedBackbone:
        if folder is None:
            raise ModelFolderError(f"the family {self.name} is built from a model's folder, which holds {GRAPH_FILE}")
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
    """Tensors by any name."""

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
    """Returns torch's name of a tensor's type."""
    return str(tensor.dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Returns the type of that name; raises ModelFolderError where torch has none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ModelFolderError(f"{GRAPH_FILE} has tensors of {name!r}, which torch has no type of")
    return found


def _text(blocks: Blocks) -> str:
    return json.dumps(blocks.model_dump(), separators=(",", ":")) + "\n"


def _sha256(blocks: Blocks) -> str:
    return hashlib.sha256(_text(blocks).encode()).hexdigest()
