"""Reads a torch module as a foreign model. It is traced with `torch.export`.

The user names a function `module:function`. It takes no arguments, and returns the module with its weights and example
inputs: a tuple of tensors, or a dict of tensors by the names of `forward`'s parameters. Every tensor has one row per
input, and at least two rows. For tokens, which are integers (B, T), the second axis is dynamic too, as in their mask.

    def my_network() -> tuple[nn.Module, tuple[Tensor, ...]]:
        return torchvision.models.resnet18(weights="DEFAULT"), (torch.randn(2, 3, 224, 224),)
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import StringIO
from itertools import chain, pairwise
from math import inf
from operator import attrgetter
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import torch
from torch import SymInt, Tensor, fx, nn
from torch.utils import _pytree as pytree

from earlyexit.data.rows import PAIR
from earlyexit.errors import GraphError, ModelFolderError, first_line
from earlyexit.families.base import Backbone
from earlyexit.families.own import check_alone
from earlyexit.foreign.dataflow import REPEATS, Dataflow, Operator, Site, check_operator, kind_of, with_shares
from earlyexit.foreign.model import SURE, TEXT_LENGTH, Divisible
from earlyexit.foreign.torch_backbone import (
    LAYOUT_INPUTS,
    PREFIX,
    TOKEN_TYPES,
    Blocks,
    ExportedBackbone,
    Graph,
    call_of,
    type_of,
)
from earlyexit.named import import_own
from earlyexit.network.boundary import Boundary, DType, Encoded, TensorSpec
from earlyexit.network.piece import Layout


def base_name(node: fx.Node) -> str:
    """Returns `conv2d` for a node that calls `aten.conv2d.default`."""
    if isinstance(node.target, str):
        return node.target
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def operators_of(module: fx.GraphModule, tensors: Collection[str]) -> Iterator[Operator]:
    """Yields the operators of a graph, without `getitem` on tuples. `tensors`: the nodes that return one tensor."""
    for node in module.graph.nodes:
        if not node.op.startswith("call_") or _selects_from_tuple(node, tensors):
            continue
        base, selected = base_name(node), [user for user in node.users if _selects_from_tuple(user, tensors)]
        yield Operator(
            name=node.name,
            op=str(node.target) if hasattr(node.target, "overloadpacket") else base,
            kind=kind_of(base),
            inputs=tuple(each.name for each in node.all_input_nodes),
            outputs=tuple(each.name for each in selected or (node,)),
        )


def _selects_from_tuple(node: fx.Node, tensors: Collection[str]) -> bool:
    """Whether a node selects a tensor of another node's tuple."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.name not in tensors


TOLERANCE = 1e-3
"""The allowed difference between an input alone and in a batch, absolute and relative. Rounding gives about 1e-6."""
NUM_INPUTS, LONGEST = "num_inputs", "longest"
SIZES = (NUM_INPUTS, LONGEST)
"""The sizes that every block takes: the inputs of the batch, and the tokens of the longest input. They cannot cross,
because a later block runs with another batch."""
UNBOUNDED = 2**31
"""If tracing gives a bound of at least this size, there is no bound."""
DTYPES: Mapping[torch.dtype, DType] = {
    torch.float32: "float",
    torch.int64: "int32",
    torch.int32: "int32",
    torch.uint8: "uint8",
    torch.bool: "uint8",
}
"""The types in which tensors cross, by their types in the graph."""
aten = torch.ops.aten
SOFTMAX = (aten.softmax.int, aten._softmax.default)
FED = "masks are 1 up to the last token, positions begin at 0, and token types are 0, except for pairs of texts"
"""The values of `LAYOUT_INPUTS`, for error messages."""


@dataclass(frozen=True, kw_only=True)
class TorchModel(Divisible):
    """A torch module that was traced and checked. Operators and tensors of `flow` have the names of `module`'s nodes.

    Every block computes by itself the tensors that follow from sizes and lengths (masks, positions), or from weights.
    """

    family: ClassVar[str] = "exported"
    module: fx.GraphModule
    """The whole network with its weights, in evaluation mode."""
    values: Mapping[str, Tensor]
    """The values (B, ...) of tensors by name, for the example inputs."""

    @property
    def examples(self) -> dict[str, Tensor]:
        """Example inputs by name, in the order of `module.graph`."""
        return {name: self.values[name] for name in self.flow.inputs}

    @property
    def inputs(self) -> Boundary:
        return tuple(map(self._input_spec, self.codec_inputs))

    @property
    def longest(self) -> int:
        if not self.inputs[0].per_token:
            return 1
        size = self._nodes[self.codec_inputs[0]].meta["val"].shape[1]
        upper = size.node.shape_env.bound_sympy(size.node.expr).upper  # the bound that tracing found
        return int(upper) if upper.is_finite and 0 < upper < UNBOUNDED else TEXT_LENGTH

    def timed(self, sites: Sequence[Site], *, repeats: int = REPEATS) -> tuple[Site, ...]:
        recorder, threads = _Recorder(self.module), torch.get_num_threads()
        inputs = [value[:1] for value in self.examples.values()]
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                for _ in range(repeats):
                    recorder.run(*inputs, enable_io_processing=False)
        finally:
            torch.set_num_threads(threads)
        return with_shares(sites, self.flow, self.flow.outputs, recorder.seconds)

    def specs(self, cut: Sequence[str]) -> list[TensorSpec]:
        return list(map(self.spec, cut))

    def compare(self, backbone: Backbone, rows: Sequence[Encoded]) -> None:
        """Also raises GraphError if the module needs other masks, positions or token types than those that are fed."""
        try:
            self._check_examples(backbone)
            check_alone(backbone, rows)
        except (RuntimeError, IndexError) as error:
            raise GraphError(f"{self.name} cannot be run in blocks: {first_line(error)}") from error

    @cached_property
    def codec_inputs(self) -> tuple[str, ...]:
        """The inputs from the codec, token types last. Raises GraphError if there are none."""
        names = [name for name in self.examples if name not in self._layout]
        if not names:
            raise GraphError(f"{self.name} takes only {', '.join(self._layout)}, which have no content of inputs")
        return tuple(sorted(names, key=lambda name: name == TOKEN_TYPES))

    @cached_property
    def answer(self) -> str:
        """The tensor with the answers as logits (B, C): the input of a softmax, or the logarithm of probabilities."""
        name = self.output
        node = next(each for each in self.module.graph.nodes if each.name == name)
        if node.target in SOFTMAX and node.args[1] in (1, -1):
            logits: Any = node.args[0]
            return str(logits.name)
        values = self.values[name]
        in_range = bool((values >= 0).all() and (values <= 1).all())
        sum_to_one = bool(((values.sum(1) - 1).abs() < SURE).all())
        return _add_logarithm(node) if in_range and (sum_to_one or node.target is aten.sigmoid.default) else name

    def spec(self, tensor: str) -> TensorSpec:
        """Returns the description of a tensor that crosses. Raises ModelFolderError if it cannot cross."""
        values = self._nodes[tensor].meta.get("val")
        if not isinstance(values, Tensor):
            raise ModelFolderError(f"{tensor!r} is no tensor")
        if values.dtype not in DTYPES:
            raise ModelFolderError(f"{tensor!r} is {values.dtype}, but must be {', '.join(map(str, DTYPES))} to cross")
        axes: list[Any] = [self._sizes.get(_symbol(size), size) for size in values.shape]
        per_token = axes[1:2] == [LONGEST]
        row = axes[2:] if per_token else axes[1:]
        if axes[:1] != [NUM_INPUTS] or not all(str(size).isdecimal() for size in row):  # a SymInt may be a fixed size
            described = " x ".join(str(size) for size in axes)
            raise ModelFolderError(f"{tensor!r} is {described}; to cross, it needs one row per input or per token")
        dtype = DTYPES[values.dtype]
        return TensorSpec(name=tensor, shape=tuple(map(int, row)), dtype=dtype, per_token=per_token)

    def blocks(self, cuts: Sequence[Sequence[str]]) -> ExportedBackbone:
        """Returns the backbone with its weights. It has one block more than there are cuts.

        Raises ModelFolderError for tensors that cannot cross, and if a block needs a tensor that is not in its cut.
        """
        bounds = [self.codec_inputs, *map(tuple, cuts), (self.answer,)]
        graphs = tuple(self._block(before, after) for before, after in pairwise(bounds))
        used = {name for graph in graphs for name in graph.weights}
        weights = {
            name: tensor for name, tensor in self._weights.items() if name == self._first_names[tensor] and name in used
        }
        blocks = Blocks(
            graphs=graphs,
            boundaries=tuple(tuple(map(self.spec, each)) for each in bounds[1:]),
            inputs=self.inputs,
            types={name: type_of(self._nodes[name].meta["val"]) for name in (*chain(*bounds), *self._layout)},
            weights={name: (type_of(tensor), tuple(tensor.shape)) for name, tensor in weights.items()},
        )
        backbone = ExportedBackbone(blocks)
        backbone.weights.load_state_dict({PREFIX + name: tensor.detach() for name, tensor in weights.items()})
        return backbone

    @cached_property
    def _layout(self) -> tuple[str, ...]:
        """The inputs that follow from the lengths of inputs alone."""
        from_codec = {TOKEN_TYPES} if PAIR in self.options.columns else set()
        derived = () if self.flow.arrays else LAYOUT_INPUTS.keys() - from_codec
        return tuple(name for name in self.examples if name in derived)

    @property
    def output(self) -> str:
        """The output that is a classifier's answer, (B, C): the one that the user named, or the only one."""
        asked = self if self.options.output is None else self.with_outputs(self.options.output)
        return self.answer_among({name: [self.values[name]] for name in asked.flow.outputs}, [self.flow.batch])

    @cached_property
    def _nodes(self) -> dict[str, fx.Node]:
        assert self.answer, "evaluating it may add nodes"
        return {node.name: node for node in self.module.graph.nodes}

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        """The weights by the names of their nodes."""
        nodes = {name: node for name, node in self._nodes.items() if node.op == "get_attr"}
        return {name: attrgetter(str(node.target))(self.module) for name, node in nodes.items()}

    @cached_property
    def _first_names(self) -> dict[Tensor, str]:
        """The first name of each weight; the module may have a weight under several names."""
        return {tensor: name for name, tensor in reversed(self._weights.items())}

    @cached_property
    def _sizes(self) -> dict[object, str]:
        """The name in `SIZES` of each symbolic size."""
        shapes = [self._nodes[name].meta["val"].shape for name in (*self.codec_inputs, *self._layout)]
        sizes = (pair for shape in shapes for pair in zip(shape, SIZES, strict=False))
        return {symbol: name for size, name in sizes if (symbol := _symbol(size)) is not None}

    def _input_spec(self, name: str) -> TensorSpec:
        """Returns the codec's tensor for an input. Raises as `spec` does."""
        if self._nodes[name].meta["val"].dtype not in (torch.int64, torch.int32, torch.bool):
            return self.spec(name)
        # The integers must be below the number of rows of the smallest table in which they are looked up; 2 if unknown.
        below = min((self._weights[table].shape[0] for table in self.flow.tables(name)), default=2)
        return replace(self.spec(name), below=below)

    def _block(self, before: Sequence[str], after: Sequence[str]) -> Graph:
        """Returns the graph that computes the tensors `after` from the tensors `before`."""
        renamed = {name: self._first_names[tensor] for name, tensor in self._weights.items()}
        given = {*before, *self._layout, *self._weights}
        needed: set[str] = set()
        waiting = [self._nodes[name] for name in after]
        while waiting:
            node = waiting.pop()
            size = self._sizes.get(_symbol(node.meta.get("val")))
            if size is not None:
                renamed[node.name] = size
            elif node.name not in needed:
                needed.add(node.name)
                if node.op == "placeholder" and node.name not in given:
                    raise ModelFolderError(f"the blocks after a cut at {', '.join(before)} also need {node.name!r}")
                waiting.extend(node.all_input_nodes if node.name not in given else ())
        return Graph(
            takes=(*before, *(name for name in self._layout if name in needed), *SIZES),
            weights=tuple(dict.fromkeys(renamed[name] for name in self._weights if name in needed)),
            calls=tuple(call_of(node, renamed) for name, node in self._nodes.items() if name in needed - given),
            gives=tuple(after),
        )

    @torch.inference_mode()
    def _check_examples(self, backbone: Backbone) -> None:
        """Raises GraphError if the backbone and the module return different answers for the module's examples."""
        expected = values_of(self.module, *self.examples.values())[self.answer]
        if expected.isnan().any():
            raise GraphError(f"{self.name} returns NaN for its example inputs")
        first, mask = self.examples[self.codec_inputs[0]], self.examples.get("attention_mask")
        per_token = backbone.inputs[0].per_token
        lengths = np.full(len(first), first.shape[1] if per_token else 1, dtype=np.int32)
        if per_token and mask is not None:
            lengths[:] = (mask != 0).sum(1).clamp_min(1).numpy()
        layout = Layout(lengths)
        inputs = tuple(
            layout.unpad(self.examples[name][:, : layout.longest]) if spec.per_token else self.examples[name]
            for name, spec in zip(self.codec_inputs, backbone.inputs, strict=True)
        )
        [result] = backbone.run_blocks(0, backbone.num_blocks, backbone.embed(inputs, layout), layout)
        if result.shape != expected.shape or not torch.allclose(result, expected, TOLERANCE, TOLERANCE, equal_nan=True):
            fed = f"; the blocks do not use its examples of {', '.join(self._layout)}: {FED}" if self._layout else ""
            raise GraphError(f"{self.name} returns other answers for its own examples in blocks than uncut{fed}")


def _add_logarithm(node: fx.Node) -> str:
    """Inserts the logarithm of a node after it. Returns the name of the new node."""
    graph = node.graph
    with graph.inserting_after(node):
        clamped = graph.call_function(aten.clamp_min.default, (node, torch.finfo(torch.float32).tiny))
    with graph.inserting_after(clamped):
        logarithm = graph.call_function(aten.log.default, (clamped,))
    for each in (clamped, logarithm):
        each.meta["val"] = node.meta.get("val")
    return logarithm.name


def _symbol(size: object) -> object:
    """Returns the symbol of a symbolic size; None for other objects."""
    return size.node.expr if isinstance(size, SymInt) and size.node.expr.is_Symbol else None


def read_torch(name: str, *, tokens: bool = True) -> TorchModel:
    """Traces the module that `module:function` returns. `tokens`: whether integers (B, T) are tokens of any number.

    Raises ModelFolderError if the function cannot be imported. Raises GraphError if it returns something else, and if
    the module cannot be traced with a dynamic batch size or has control flow that depends on inputs.
    """
    network, arguments = _call_user_function(name)
    with torch.no_grad():
        module = _traced(name, network, arguments, tokens=tokens)
        for node in module.graph.nodes:
            check_operator(name, base_name(node), node.name)
        examples = _examples(name, module, arguments)
        tensors = values_of(module, *examples.values())
        nodes = list(module.graph.nodes)
        weights = frozenset(node.name for node in nodes if node.op == "get_attr")
        flow = Dataflow(
            operators=tuple(operators_of(module, tensors)),
            inputs=tuple(examples),
            outputs=tuple(each.name for each in pytree.tree_leaves(nodes[-1].args) if isinstance(each, fx.Node)),
            weights=weights,
            arrays=not tokens,
        ).measured({name: each for name, each in tensors.items() if name not in weights})
    return TorchModel(name=name, module=module, values=tensors, flow=flow)


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _call_user_function(name: str) -> tuple[nn.Module, _Arguments]:
    """Returns the checked results of the user's function."""
    function = import_own(name, called="network")
    try:
        network, given = function()
    except Exception as error:  # the user's function may raise any error
        raise GraphError(f"{name}: {first_line(error)}; it must return (module, example inputs)") from error
    positional = tuple(given) if isinstance(given, list | tuple) else (given,)
    arguments: _Arguments = ((), dict(given)) if isinstance(given, Mapping) else (positional, {})
    tensors = pytree.tree_leaves(arguments)
    if not isinstance(network, nn.Module) or not tensors or not all(isinstance(each, Tensor) for each in tensors):
        found = f"{type(network).__name__} and {type(given).__name__}"
        raise GraphError(f"{name} returns {found}; a torch module and example tensors are needed")
    rows = {each.shape[0] if each.dim() else 0 for each in tensors}
    if len(rows) > 1 or min(rows) < 2:  # torch.export would treat a batch size of 1 as a constant
        shapes = ", ".join(str(list(each.shape)) for each in tensors)
        raise GraphError(f"{name} returns examples {shapes}; all need a row per input, for the same two or more inputs")
    return network.eval(), arguments


def _traced(name: str, network: nn.Module, arguments: _Arguments, *, tokens: bool) -> fx.GraphModule:
    """Returns the exported module with dynamic batch size and, if possible, lengths.

    It has no in-place writes, and no operators that only check inputs.
    """
    tensors = pytree.tree_leaves(arguments)
    shapes = {each.shape for each in tensors if tokens and each.dim() == 2 and not each.is_floating_point()}
    axes: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call] # by tensor, for `forward(*args)`
    for each in tensors:
        axes[each] = {0: torch.export.Dim.DYNAMIC} | ({1: torch.export.Dim.AUTO} if each.shape in shapes else {})
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):  # torch prints the graph of a failed export
            warnings.simplefilter("ignore")  # about torch's own code, such as LSTM's
            program = torch.export.export(network, *arguments, dynamic_shapes=axes)
            module = program.run_decompositions({}).module(check_guards=False)
    except Exception as error:  # tracing a user's module may raise any error
        advice = "return a module that takes and returns tensors only, and does not branch on their values"
        raise GraphError(f"{name} cannot be traced for any number of inputs: {first_line(error)}; {advice}") from error
    assert isinstance(module, fx.GraphModule)
    for node in reversed(module.graph.nodes):
        if node.target is aten.view.default:  # the strides of its input depend on the device's kernels
            node.target = aten.reshape.default
        if not node.users and base_name(node).startswith(("_guards", "_assert", "copy_")):  # copy_ writes to a buffer
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    _check_trace(name, network, module, arguments, shapes)
    return module


def _check_trace(name: str, network: Any, module: fx.GraphModule, arguments: _Arguments, texts: set[Any]) -> None:
    """Raises GraphError if a module and its trace differ for other sizes. `texts`: the shapes (B, T) of tokens."""
    shapes = [node.meta["val"].shape for node in module.graph.nodes if node.op == "placeholder"]
    has_lengths = any(_symbol(size) is not None for shape in shapes for size in shape[1:2])

    def resized(example: Tensor, *, count: int, length: int) -> Tensor:
        rows = example[torch.arange(count) % len(example)]
        return rows[:, torch.arange(length) % rows.shape[1]] if has_lengths and example.shape in texts else rows

    for count, length in ((3, 1), (5, 4), (7, 8)):
        positional, named = pytree.tree_map(partial(resized, count=count, length=length), arguments)
        try:
            expected = pytree.tree_leaves(network(*positional, **named))
        except Exception:  # it may need more tokens
            continue
        try:
            result = pytree.tree_leaves(module(*positional, **named))
            torch.testing.assert_close(result, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        except (AssertionError, RuntimeError) as error:
            reason = f"forward must not branch on sizes, draw random numbers or change buffers ({first_line(error)})"
            raise GraphError(f"{name} and its traced graph differ for {count} inputs: {reason}") from error


def _examples(name: str, module: fx.GraphModule, arguments: _Arguments) -> dict[str, Tensor]:
    """Returns the example inputs by the names of the graph's inputs, in their order. Removes unused inputs."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    positional, named = arguments
    examples = {node.name: value for node, value in zip(inputs, pytree.tree_leaves(positional), strict=False)}
    examples |= {node.name: named[node.target] for node in inputs if node.target in named}
    for node in (each for each in inputs if each.name not in examples):
        if node.users:
            raise GraphError(f"{name} needs {node.name!r}, which its example inputs do not have")
        module.graph.erase_node(node)
    module.recompile()
    return examples


def values_of(module: fx.GraphModule, *inputs: Tensor) -> dict[str, Tensor]:
    """Runs a module. Returns the values of all its nodes that return one tensor, by name."""
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    interpreter.run(*inputs, enable_io_processing=False)
    return {node.name: each for node, each in interpreter.env.items() if isinstance(each, Tensor)}


class _Recorder(fx.Interpreter):
    """Runs a module. Records the shortest time of every node in seconds."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        begin = perf_counter()
        result = super().run_node(n)
        self.seconds[n.name] = min(self.seconds.get(n.name, inf), perf_counter() - begin)
        return result
