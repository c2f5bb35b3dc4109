"""Graphs of ATen operators as plain data, and as modules that run.

A traced module's graph is data, not code: tensors by their names, and by theirs operators that compute tensors from
tensors, so that a model's folder may come from anybody. Nothing else that Python or torch can do has a name here, such
as reading a file. Weights stand outside.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from keyword import iskeyword
from typing import Any

import torch
from torch import fx

from earlyexit.errors import ModelFolderError

JsonDict = dict[str, Any]

NAMESPACES = ("aten", "prims")
"""Of `torch.ops`: torch's own operators."""
SCALARS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "getitem")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(torch, name) for name in ("sym_max", "sym_min", "sym_int", "sym_float", "sym_not")},
    **{name: getattr(math, name) for name in ("ceil", "floor", "trunc")},
}
"""What is computed of sizes, and what takes one tensor out of several."""
FACTORIES = frozenset(
    {
        *(f"aten.{name}.default" for name in ("arange", "zeros", "ones", "full", "eye", "linspace", "scalar_tensor")),
        *(f"aten.{name}.default" for name in ("tril_indices", "triu_indices")),
        *("aten.arange.start", "aten.arange.start_step", "aten.empty.memory_format", "aten.eye.m"),
    }
)
"""Operators that make a tensor of none. Others that are given no tensor are refused: one of them reads files."""
WORDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
"""Arguments that torch has names for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Calls in an order in which they can run; JSON but for being a class."""

    takes: tuple[str, ...]
    """Tensors and sizes that are given to every run."""
    weights: tuple[str, ...]
    """Tensors that are always the same, given after those."""
    calls: tuple[tuple[str, str, Any, Any], ...]
    """Of each: the name of what it gives, the operator, its arguments by position and by name."""
    gives: tuple[str, ...]

    def to_json(self) -> JsonDict:
        return asdict(self)

    @classmethod
    def from_json(cls, data: JsonDict) -> Graph:
        """Raises KeyError and TypeError for what is none."""
        return cls(
            takes=tuple(data["takes"]),
            weights=tuple(data["weights"]),
            calls=tuple((name, op, args, kwargs) for name, op, args, kwargs in data["calls"]),
            gives=tuple(data["gives"]),
        )


def call_of(node: fx.Node, renamed: Mapping[str, str]) -> tuple[str, str, Any, Any]:
    """One node of a traced graph as data; raises ModelFolderError for an operator that `module_of` refuses.

    `renamed`: what arguments are called here, where that is not their nodes' name.
    """
    kwargs = {name: _to_json(value, renamed) for name, value in node.kwargs.items()}
    return node.name, _op_name(node), _to_json(node.args, renamed), kwargs


def module_of(graph: Graph, device: torch.device) -> fx.GraphModule:
    """What runs it, a function of `takes` and then `weights` to a tuple; constants are made on that device.

    Raises ModelFolderError for operators that do not compute tensors from tensors, for arguments that they do not have,
    and for names that stand for nothing.
    """
    built, nodes = fx.Graph(), dict[str, fx.Node]()
    for k, name in enumerate((*graph.takes, *graph.weights)):
        nodes[name] = built.placeholder(f"given_{k}")
    for name, op, args, kwargs in graph.calls:
        try:
            target = _operator(op)
            _check_names(target, kwargs)
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
    """Whether an operator reads tensors, or makes one of sizes, and writes to nothing that it is given."""
    takes_tensors = any("Tensor" in str(each.type) for each in found._schema.arguments)
    return (takes_tensors or str(found) in FACTORIES) and not found._schema.is_mutable


def _check_names(target: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that an operator does not have: these names become part of the code that runs."""
    schema = target._schema.arguments if isinstance(target, torch._ops.OpOverload) else ()
    strange = kwargs.keys() - {each.name for each in schema if not iskeyword(each.name)}
    if strange:
        raise TypeError(f"it has no argument {sorted(strange)[0]!r}")


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
