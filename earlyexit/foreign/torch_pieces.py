"""A traced torch module, cut at given tensors into blocks.

What follows from sizes and lengths alone (attention masks, positions) is made anew in every block, and so is what
follows from weights alone. Sizes do not cross: of fused inputs they would be wrong, since a batch's size is that of the
batch at hand.

Graphs of ATen operators as plain data, and as modules that run.

A traced module's graph is data, not code: tensors by their names, and by theirs operators that compute tensors from
tensors, so that a model's folder may come from anybody. Nothing else that Python or torch can do has a name here, such
as reading a file. Weights stand outside.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from keyword import iskeyword
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from earlyexit.errors import ModelFolderError
from earlyexit.network.boundary import DType, TensorSpec

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


NUM_INPUTS, LONGEST = "num_inputs", "longest"
"""Sizes that every block is given: inputs of the batch, and tokens of the longest."""
SIZES = (NUM_INPUTS, LONGEST)
UNBOUNDED = 2**31
"""Sizes from here on are tracing's word for any."""
DTYPES: Mapping[torch.dtype, DType] = {torch.float32: "float", torch.int32: "int32", torch.uint8: "uint8"}
"""Of what crosses."""
LOOKUPS: Mapping[Any, int] = {
    torch.ops.aten.embedding.default: 1,
    torch.ops.aten.index.Tensor: 1,
    torch.ops.aten.index_select.default: 2,
}
"""Operators that take rows of a table, and which of their arguments says what rows."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A module that torch.export traced with open sizes, and what its inputs are."""

    module: fx.GraphModule
    carried: tuple[str, ...]
    """Inputs that a codec gives."""
    layout: tuple[str, ...]
    """Inputs that follow from how long each input is, and from nothing else."""

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.module.graph.nodes}

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """By the tensor's name in the graph; one that a module has under two names has the first."""
        return {name: tensor for name, tensor in self._attributes.items() if name == self._first_names[tensor]}

    @cached_property
    def sizes(self) -> dict[object, str]:
        """Which of `SIZES` an open size is."""
        shapes = [self.nodes[name].meta["val"].shape for name in (*self.carried, *self.layout)]
        return {symbol: name for shape in shapes for symbol, name in _symbols(shape)}

    @property
    def most_tokens(self) -> int | None:
        """How long an input may be, as far as tracing found out; of inputs that have tokens."""
        size = self.nodes[self.carried[0]].meta["val"].shape[1]
        upper = size.node.shape_env.bound_sympy(size.node.expr).upper
        return int(upper) if upper.is_finite and upper < UNBOUNDED else None

    def spec(self, tensor: str) -> TensorSpec:
        """What crosses with a tensor; raises ModelFolderError for one that cannot cross."""
        values = self.nodes[tensor].meta.get("val")
        if not isinstance(values, Tensor):
            raise ModelFolderError(f"{tensor!r} is no tensor")
        if values.dtype not in DTYPES:
            raise ModelFolderError(f"{tensor!r} is {values.dtype}; what crosses is {', '.join(map(str, DTYPES))}")
        return self._spec(tensor, DTYPES[values.dtype])

    def input_spec(self, name: str) -> TensorSpec:
        """What a codec gives for an input: whole numbers as int32; raises ModelFolderError."""
        node = self.nodes[name]
        values = node.meta["val"]
        if values.dtype not in (torch.int64, torch.int32):
            return self.spec(name)
        return replace(self._spec(name, "int32"), below=self._rows_of_tables(node))

    def cut(self, cuts: Sequence[Sequence[str]], output: str) -> list[Graph]:
        """The blocks between the module's inputs, each cut's tensors, and `output`.

        Raises ModelFolderError, naming a tensor, where a block needs something that does not cross.
        """
        bounds = [self.carried, *map(tuple, cuts), (output,)]
        return [self._block(before, after) for before, after in pairwise(bounds)]

    def _spec(self, tensor: str, dtype: DType) -> TensorSpec:
        shape = self.nodes[tensor].meta["val"].shape
        axes: list[Any] = [self.sizes.get(_symbol(size), size) for size in shape]
        per_token = axes[1:2] == [LONGEST]
        row = axes[2:] if per_token else axes[1:]
        if axes[:1] != [NUM_INPUTS] or not all(isinstance(size, int) for size in row):
            named = " x ".join(str(size) for size in axes)
            raise ModelFolderError(f"{tensor!r} is {named}; what crosses has a row per input, or one per token")
        return TensorSpec(name=tensor, shape=tuple(row), dtype=dtype, per_token=per_token)

    def _rows_of_tables(self, node: fx.Node) -> int | None:
        """Of the smallest table that whole numbers are looked up in."""
        tables = [user.all_input_nodes[0].name for user in _lookups(node)]
        return min((self._attributes[name].shape[0] for name in tables if name in self._attributes), default=None)

    @cached_property
    def _attributes(self) -> dict[str, Tensor]:
        return {name: _attribute(self.module, node) for name, node in self.nodes.items() if node.op == "get_attr"}

    @cached_property
    def _first_names(self) -> dict[Tensor, str]:
        return {tensor: name for name, tensor in reversed(self._attributes.items())}

    def _block(self, before: Sequence[str], after: Sequence[str]) -> Graph:
        renamed = {name: self._first_names[tensor] for name, tensor in self._attributes.items()}
        given = {*before, *self.layout, *self._attributes}
        needed: set[str] = set()
        waiting = [self.nodes[name] for name in after]
        while waiting:
            node = waiting.pop()
            size = self.sizes.get(_symbol(node.meta.get("val")))
            if size is not None:
                renamed[node.name] = size
            elif node.name not in needed:
                needed.add(node.name)
                waiting.extend(self._inputs(node, before) if node.name not in given else ())
        return Graph(
            takes=(*before, *(name for name in self.layout if name in needed), *SIZES),
            weights=tuple(dict.fromkeys(renamed[name] for name in self._attributes if name in needed)),
            calls=tuple(call_of(node, renamed) for name, node in self.nodes.items() if name in needed - given),
            gives=tuple(after),
        )

    def _inputs(self, node: fx.Node, before: Sequence[str]) -> Sequence[fx.Node]:
        if node.op == "placeholder":
            raise ModelFolderError(f"{', '.join(before)} is not all that the blocks after it need: {node.name!r} too")
        return node.all_input_nodes


def _lookups(node: fx.Node) -> Iterator[fx.Node]:
    """Where its numbers, of whatever type, are looked up in a table of weights."""
    for user in node.users:
        if user.target is torch.ops.aten._to_copy.default:
            yield from _lookups(user)
        elif user.target in LOOKUPS and node in _first_indices(user):
            yield user


def _first_indices(lookup: fx.Node) -> Sequence[object]:
    """What says which rows of its table are taken."""
    taken = lookup.args[LOOKUPS[lookup.target]]
    return taken[:1] if isinstance(taken, list | tuple) else (taken,)


def _attribute(module: fx.GraphModule, node: fx.Node) -> Tensor:
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value


def _symbols(shape: Sequence[object]) -> Iterator[tuple[object, str]]:
    for size, name in zip(shape, SIZES, strict=False):
        if (symbol := _symbol(size)) is not None:
            yield symbol, name


def _symbol(size: object) -> object:
    """The symbol that an open size is; None for whatever else."""
    return size.node.expr if isinstance(size, SymInt) and size.node.expr.is_Symbol else None
