"""Reads a torch module as a dataflow: traced by `torch.export`, or by `torch.fx` where that cannot.

The module is named `module:function`. The function takes no arguments and returns the module, with its weights, and
example inputs: a tuple of tensors, or a dict of them by the names of `forward`'s parameters. Every tensor has a row per
input, two rows or more; of tokens, which are whole numbers (B, T), the second axis is open too.

    def my_network() -> tuple[nn.Module, tuple[Tensor, ...]]:
        return torchvision.models.resnet18(weights="DEFAULT"), (torch.randn(2, 3, 224, 224),)
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import SymInt, Tensor, fx, nn
from torch.utils import _pytree as pytree

from earlyexit.data.rows import PAIR
from earlyexit.errors import GraphError, ModelFolderError, first_line
from earlyexit.families.base import Pretrained
from earlyexit.families.own import check_own, layout_of
from earlyexit.foreign.dataflow import REPEATS, Dataflow, Operator, Site, check_operator, kind_of, with_shares
from earlyexit.foreign.model import SURE, TEXT_LENGTH, ForeignModel, given_head, longest_taken, or_why, the_answer
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
from earlyexit.named import NamedSpec, import_own
from earlyexit.network.boundary import Boundary, DType, Encoded, TensorSpec
from earlyexit.network.piece import Layout


def base_name(node: fx.Node) -> str:
    """Returns `conv2d` for a node that calls `aten.conv2d.default`, and `ReLU` for one that calls that layer."""
    if node.op == "call_module":
        assert node.graph.owning_module is not None
        return type(node.graph.owning_module.get_submodule(str(node.target))).__name__
    if isinstance(node.target, str):
        return node.target
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def operators_of(module: fx.GraphModule, tensors: Collection[str]) -> Iterator[Operator]:
    """Yields a graph's nodes as operators; taking a tensor out of a tuple is none.

    `tensors`: the names of nodes that give one tensor.
    """
    for node in module.graph.nodes:
        if not node.op.startswith("call_") or _takes_part(node, tensors):
            continue
        base, parts = base_name(node), [user for user in node.users if _takes_part(user, tensors)]
        yield Operator(
            name=node.name,
            op=str(node.target) if hasattr(node.target, "overloadpacket") else base,
            kind=kind_of(base),
            inputs=tuple(each.name for each in node.all_input_nodes),
            outputs=tuple(each.name for each in parts or (node,)),
        )


def _takes_part(node: fx.Node, tensors: Collection[str]) -> bool:
    """Whether a node takes a tensor out of another node's tuple."""
    whole = node.args[0] if node.target is operator.getitem else None
    return isinstance(whole, fx.Node) and whole.name not in tensors


TOLERANCE = 1e-3
"""Allowed between an input's outputs alone and in a batch, absolute and relative; the order of sums gives 1e-6."""
NUM_INPUTS, LONGEST = "num_inputs", "longest"
SIZES = (NUM_INPUTS, LONGEST)
"""Sizes that every block is given: inputs of the batch, and tokens of the longest. They do not cross, since the batch
of a later block is another one."""
UNBOUNDED = 2**31
"""From this size on, tracing means any size."""
DTYPES: Mapping[torch.dtype, DType] = {torch.float32: "float", torch.int32: "int32", torch.uint8: "uint8"}
"""Types of what crosses."""
aten = torch.ops.aten
LOOKUPS: Mapping[Any, int] = {aten.embedding.default: 1, aten.index.Tensor: 1, aten.index_select.default: 2}
"""Operators that take rows of a table, and which of their arguments says what rows."""
SOFTMAX = (aten.softmax.int, aten._softmax.default)
FED = {
    "attention_mask": "a mask is 1 for every token, and 0 behind the last",
    "position_ids": "positions begin at 0",
    TOKEN_TYPES: "types of tokens are 0, but of pairs",
}


@dataclass(frozen=True, kw_only=True)
class TorchModel(ForeignModel):
    """A torch module that was traced and checked. Operators and tensors of `flow` are named as the nodes of `module`.

    Every block makes anew what follows from sizes and lengths alone (masks, positions), or from weights alone.
    """

    family: ClassVar[str] = "exported"
    module: fx.GraphModule
    """The whole network with its weights, in evaluation mode."""
    examples: Mapping[str, Tensor]
    """Inputs by name, in the order in which `module.graph` takes them; each (B, ...)."""

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Returns outputs for any batch of inputs, in the order of `flow.outputs`."""
        given = fx.Interpreter(self.module).run(*inputs, enable_io_processing=False)
        return tuple(each for each in pytree.tree_leaves(given) if isinstance(each, Tensor))

    @property
    def inputs(self) -> Boundary:
        return tuple(map(self._input_spec, self.carried))

    @property
    def longest(self) -> int:
        if not self.inputs[0].per_token:
            return 1
        size = self._nodes[self.carried[0]].meta["val"].shape[1]
        upper = size.node.shape_env.bound_sympy(size.node.expr).upper  # as far as tracing found out
        return int(upper) if upper.is_finite and 0 < upper < UNBOUNDED else TEXT_LENGTH

    def with_answer(self, codec: NamedSpec) -> Self:
        return self.with_outputs(self._output)

    def timed(self, sites: Sequence[Site], *, repeats: int = REPEATS) -> tuple[Site, ...]:
        """Returns sites with shares of seconds: one input alone, on one thread of this CPU."""
        watch, threads = _Recorder(self.module), torch.get_num_threads()
        inputs = [value[:1] for value in self.examples.values()]
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                for _ in range(repeats):
                    watch.run(*inputs, enable_io_processing=False)
        finally:
            torch.set_num_threads(threads)
        return with_shares(sites, self.flow, self.flow.outputs, watch.seconds)

    def specs(self, cuts: Sequence[Sequence[str]], codec: NamedSpec) -> list[list[TensorSpec] | str]:
        return [or_why(list, map(self.spec, cut)) for cut in cuts]

    def take(
        self, cuts: Sequence[Sequence[str]], codec: NamedSpec, folder: Path, rows: Sequence[Encoded] = ()
    ) -> Pretrained:
        """Also raises GraphError where masks, positions or token types are to be others than follow from lengths."""
        backbone, asked = self.cut(cuts), codec.get("max_length")
        if backbone.inputs[0].per_token:
            most, must = asked or min(self.longest, TEXT_LENGTH), asked is not None
            backbone.max_length = longest_taken(self.name, most, lambda tokens: _runs(backbone, tokens), must=must)
        self._check_examples(backbone)
        try:
            check_own(backbone, rows)
        except (RuntimeError, IndexError) as error:
            raise GraphError(f"{self.name} does not take inputs of any numbers: {first_line(error)}") from error
        return Pretrained(backbone=backbone, head=given_head(backbone), label_names=None)

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """Inputs that a codec gives, token types last. Raises GraphError for a module whose shapes are not known."""
        if any("val" not in node.meta for node in self.module.graph.nodes if node.op == "placeholder"):
            raise GraphError(f"{self.name}: torch.export cannot trace it, and without its shapes it cannot be cut")
        carried = [name for name in self.examples if name not in self._layout]
        if not carried:
            said = ", ".join(self._layout)
            raise GraphError(f"{self.name} takes {said} alone, which say nothing of what inputs hold")
        return tuple(sorted(carried, key=lambda name: name == TOKEN_TYPES))

    @cached_property
    def answer(self) -> str:
        """The tensor that holds the answers as logits, (B, C); where they end in probabilities, their logarithms.

        Logarithms are new nodes of the graph; a softmax needs none, since its input are logits.
        """
        name = self._output
        node = next(each for each in self.module.graph.nodes if each.name == name)
        if node.target in SOFTMAX and node.args[1] in (1, -1):
            logits: Any = node.args[0]
            return str(logits.name)
        values = self._outputs[name]
        inside = bool((values >= 0).all() and (values <= 1).all())
        whole = bool(((values.sum(1) - 1).abs() < SURE).all())
        return _logarithm(node) if inside and (whole or node.target is aten.sigmoid.default) else name

    def spec(self, tensor: str) -> TensorSpec:
        """Returns what crosses with a tensor; raises ModelFolderError for one that cannot cross."""
        values = self._nodes[tensor].meta.get("val")
        if not isinstance(values, Tensor):
            raise ModelFolderError(f"{tensor!r} is no tensor")
        if values.dtype not in DTYPES:
            raise ModelFolderError(f"{tensor!r} is {values.dtype}; what crosses is {', '.join(map(str, DTYPES))}")
        return self._spec(tensor, DTYPES[values.dtype])

    def cut(self, cuts: Sequence[Sequence[str]]) -> ExportedBackbone:
        """Returns the backbone, with its weights, of one block more than there are cuts.

        Raises ModelFolderError for tensors that cannot cross, naming one where a block needs another besides.
        """
        bounds = [self.carried, *map(tuple, cuts), (self.answer,)]
        graphs = tuple(self._block(before, after) for before, after in pairwise(bounds))
        used = {name for graph in graphs for name in graph.weights}
        weights = {
            name: tensor for name, tensor in self._tables.items() if name == self._first_names[tensor] and name in used
        }
        blocks = Blocks(
            graphs=graphs,
            boundaries=tuple(tuple(map(self.spec, each)) for each in bounds[1:]),
            inputs=self.inputs,
            types={name: type_of(self._nodes[name].meta["val"]) for name in (*self.carried, *self._layout)},
            weights={name: (type_of(tensor), tuple(tensor.shape)) for name, tensor in weights.items()},
        )
        backbone = ExportedBackbone(blocks)
        backbone.weights.load_state_dict({PREFIX + name: tensor.detach() for name, tensor in weights.items()})
        return backbone

    @cached_property
    def _layout(self) -> tuple[str, ...]:
        """Inputs that follow from how long each input is, and from nothing else."""
        of_codec = {TOKEN_TYPES} if PAIR in self.asked.columns else set()
        return tuple(name for name in self.examples if name in LAYOUT_INPUTS.keys() - of_codec)

    @cached_property
    def _outputs(self) -> dict[str, Tensor]:
        """The module's outputs for its examples."""
        with torch.no_grad():
            return dict(zip(self.flow.outputs, self.run(*self.examples.values()), strict=True))

    @cached_property
    def _output(self) -> str:
        """The output that is a classifier's answer, (B, C): the one that is asked for, or the only one."""
        asked, outputs, batch = self.asked.output, self._outputs, self.flow.batch
        if asked is not None:
            self.with_outputs(asked)

        def can_be(name: str) -> bool:
            values = outputs[name]
            fits = values.is_floating_point() and values.ndim == 2 and len(values) == batch and values.shape[1] >= 2
            return fits and asked in (None, name)

        return the_answer(self.name, {name: each.shape for name, each in outputs.items()}, can_be, batch)

    @cached_property
    def _nodes(self) -> dict[str, fx.Node]:
        assert self.answer, "it may add nodes"
        return {node.name: node for node in self.module.graph.nodes}

    @cached_property
    def _tables(self) -> dict[str, Tensor]:
        """Weights, by their nodes' names."""
        nodes = {name: node for name, node in self._nodes.items() if node.op == "get_attr"}
        return {name: attrgetter(str(node.target))(self.module) for name, node in nodes.items()}

    @cached_property
    def _first_names(self) -> dict[Tensor, str]:
        """One name for each weight that a module has under several."""
        return {tensor: name for name, tensor in reversed(self._tables.items())}

    @cached_property
    def _sizes(self) -> dict[object, str]:
        """Which of `SIZES` an open size is."""
        shapes = [self._nodes[name].meta["val"].shape for name in (*self.carried, *self._layout)]
        sizes = (pair for shape in shapes for pair in zip(shape, SIZES, strict=False))
        return {symbol: name for size, name in sizes if (symbol := _symbol(size)) is not None}

    def _input_spec(self, name: str) -> TensorSpec:
        """Returns what a codec gives for an input, whole numbers as int32; raises ModelFolderError."""
        node = self._nodes[name]
        if node.meta["val"].dtype not in (torch.int64, torch.int32):
            return self.spec(name)
        # The number of rows of the smallest table in which the numbers are looked up.
        tables = [user.all_input_nodes[0].name for user in _lookups(node)]
        below = min((self._tables[table].shape[0] for table in tables if table in self._tables), default=None)
        return replace(self._spec(name, "int32"), below=below)

    def _spec(self, tensor: str, dtype: DType) -> TensorSpec:
        shape = self._nodes[tensor].meta["val"].shape
        axes: list[Any] = [self._sizes.get(_symbol(size), size) for size in shape]
        per_token = axes[1:2] == [LONGEST]
        row = axes[2:] if per_token else axes[1:]
        if axes[:1] != [NUM_INPUTS] or not all(isinstance(size, int) for size in row):
            described = " x ".join(str(size) for size in axes)
            raise ModelFolderError(f"{tensor!r} is {described}; what crosses has a row per input, or one per token")
        return TensorSpec(name=tensor, shape=tuple(row), dtype=dtype, per_token=per_token)

    def _block(self, before: Sequence[str], after: Sequence[str]) -> Graph:
        renamed = {name: self._first_names[tensor] for name, tensor in self._tables.items()}
        given = {*before, *self._layout, *self._tables}
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
                    said = ", ".join(before)
                    raise ModelFolderError(f"{said} is not all that the blocks after it need: {node.name!r} too")
                waiting.extend(node.all_input_nodes if node.name not in given else ())
        return Graph(
            takes=(*before, *(name for name in self._layout if name in needed), *SIZES),
            weights=tuple(dict.fromkeys(renamed[name] for name in self._tables if name in needed)),
            calls=tuple(call_of(node, renamed) for name, node in self._nodes.items() if name in needed - given),
            gives=tuple(after),
        )

    @torch.inference_mode()
    def _check_examples(self, backbone: ExportedBackbone) -> None:
        """Raise GraphError where the backbone answers the module's own examples otherwise than the module."""
        interpreter = fx.Interpreter(self.module, garbage_collect_values=False)
        interpreter.run(*self.examples.values(), enable_io_processing=False)
        [wanted] = [value for node, value in interpreter.env.items() if node.name == self.answer]
        # As long as their mask says, or as they are padded.
        first, mask = self.examples[self.carried[0]], self.examples.get("attention_mask")
        per_token = backbone.inputs[0].per_token
        lengths = np.full(len(first), first.shape[1] if per_token else 1, dtype=np.int32)
        if per_token and mask is not None:
            lengths[:] = (mask != 0).sum(1).clamp_min(1).numpy()
        layout = Layout(lengths)
        given = tuple(
            layout.unpad(self.examples[name][:, : layout.longest]) if spec.per_token else self.examples[name]
            for name, spec in zip(self.carried, backbone.inputs, strict=True)
        )
        try:
            [found] = backbone.run_blocks(0, backbone.num_blocks, backbone.embed(given, layout), layout)
        except (RuntimeError, IndexError) as error:
            said = first_line(error)
            raise GraphError(f"{self.name} cannot be run on its own examples in blocks: {said}") from error
        if found.shape == wanted.shape and torch.allclose(found, wanted, TOLERANCE, TOLERANCE, equal_nan=True):
            return
        other = next((name for name in self._layout if not _follows(self.examples[name], name, layout)), None)
        if other is None:
            raise GraphError(f"{self.name} answers its own examples otherwise in blocks than uncut")
        raise GraphError(
            f"{self.name}: its example of {other!r} is not what it is fed, and its answers are others; {FED[other]}"
        )


def _logarithm(node: fx.Node) -> str:
    """Insert the logarithm behind a node; returns its name."""
    graph = node.graph
    with graph.inserting_after(node):
        least = graph.call_function(aten.clamp_min.default, (node, torch.finfo(torch.float32).tiny))
    with graph.inserting_after(least):
        logarithm = graph.call_function(aten.log.default, (least,))
    for each in (least, logarithm):
        each.meta["val"] = node.meta.get("val")
    return logarithm.name


def _follows(example: Tensor, name: str, layout: Layout) -> bool:
    """Whether an example holds, where tokens are, what inputs of these lengths are fed with."""
    fed = LAYOUT_INPUTS[name](layout)
    seen = example[:, : layout.longest]
    return fed.shape == seen.shape and bool((fed == seen.to(fed.dtype))[layout.mask_BT].all())


@torch.inference_mode()
def _runs(backbone: ExportedBackbone, tokens: int) -> bool:
    """Whether one input of so many tokens can be run."""
    layout = layout_of([tokens])
    dtypes = {dtype: each for each, dtype in DTYPES.items()}
    zeros = tuple(
        torch.zeros(tokens if each.per_token else 1, *each.shape, dtype=dtypes[each.dtype]) for each in backbone.inputs
    )
    try:
        backbone.run_blocks(0, backbone.num_blocks, backbone.embed(zeros, layout), layout)
    except (RuntimeError, IndexError):
        return False
    return True


def _lookups(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that look a node's numbers, of whatever type, up in a table of weights."""
    for user in node.users:
        if user.target is torch.ops.aten._to_copy.default:
            yield from _lookups(user)
        elif user.target in LOOKUPS:
            taken = user.args[LOOKUPS[user.target]]
            if node is (taken[0] if isinstance(taken, list | tuple) else taken):
                yield user


def _symbol(size: object) -> object:
    """Returns the symbol of an open size; None for anything else."""
    return size.node.expr if isinstance(size, SymInt) and size.node.expr.is_Symbol else None


def read_torch(name: str) -> TorchModel:
    """Trace the module that `module:function` gives.

    Raises ModelFolderError where it cannot be imported; GraphError where it gives something else, cannot be traced with
    an open batch, or branches by what inputs hold.
    """
    network, arguments = _given_by(name)
    with torch.no_grad():
        module = _traced(name, network, arguments)
        for node in module.graph.nodes:
            check_operator(name, base_name(node), node.name)
        examples = _examples(name, module, arguments)
        recorder = _Recorder(module)
        recorder.run(*examples.values(), enable_io_processing=False)
        batch, nodes = len(next(iter(examples.values()))), list(module.graph.nodes)
        flow = Dataflow(
            operators=tuple(operators_of(module, recorder.shapes)),
            inputs=tuple(examples),
            outputs=tuple(each.name for each in pytree.tree_leaves(nodes[-1].args) if isinstance(each, fx.Node)),
            weights=frozenset(node.name for node in nodes if node.op == "get_attr"),
            shapes=recorder.shapes,
            bytes_per_input={name: num_bytes // batch for name, num_bytes in recorder.num_bytes.items()},
            batch=batch,
        )
        graph = TorchModel(name=name, module=module, examples=examples, flow=flow)
        _check_batch(graph)
    return graph


_Arguments = tuple[Tensor, ...] | dict[str, Tensor]


def _given_by(name: str) -> tuple[nn.Module, _Arguments]:
    """Returns what the user's function returns, checked."""
    make = import_own(name, called="network")
    wanted = "a function without arguments that returns (module, example inputs) is needed"
    try:
        network, given = make()
    except Exception as error:  # whatever the user's function raises
        raise GraphError(f"{name}: {first_line(error)}; {wanted}") from error
    if not isinstance(given, Mapping | Tensor | tuple | list):
        raise GraphError(f"{name} gives {type(given).__name__} for example inputs; {wanted}")
    arguments = dict(given) if isinstance(given, Mapping) else (given,) if isinstance(given, Tensor) else tuple(given)
    tensors = tuple(arguments.values()) if isinstance(arguments, dict) else arguments
    if not isinstance(network, nn.Module) or not tensors or not all(isinstance(each, Tensor) for each in tensors):
        raise GraphError(f"{name} gives {type(network).__name__}; a torch module and example tensors are needed")
    rows = {each.shape[0] if each.dim() else 0 for each in tensors}
    if len(rows) > 1 or min(rows) < 2:  # an example of one would be traced as always one
        shapes = ", ".join(str(list(each.shape)) for each in tensors)
        raise GraphError(f"{name} gives examples {shapes}; each needs a row per input, of the same two or more inputs")
    return network.eval(), arguments


def _traced(name: str, network: nn.Module, arguments: _Arguments) -> fx.GraphModule:
    """Returns the exported module, or the symbolically traced one, without operators that only check inputs."""
    try:
        module = _exported(network, arguments)
    except Exception as of_export:  # whatever tracing the user's module raises
        try:
            module = fx.symbolic_trace(network)
        except Exception as of_tracing:
            why = f"torch.export: {first_line(of_export)}; torch.fx: {first_line(of_tracing)}"
            raise GraphError(f"{name} cannot be traced with an open batch: {why}") from of_export
    for node in reversed(module.graph.nodes):
        if not node.users and base_name(node).startswith(("_guards", "_assert")):
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _exported(network: nn.Module, arguments: _Arguments) -> fx.GraphModule:
    """Returns the module with open batch and, where possible, open lengths; no operator writes in place."""
    positional, named = ((), arguments) if isinstance(arguments, dict) else (arguments, None)
    axes = pytree.tree_map(_open_axes, arguments)
    with warnings.catch_warnings():
        # Of torch's own tracing.
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
        program = torch.export.export(network, positional, named, dynamic_shapes=axes)
        module = program.run_decompositions({}).module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    return module


def _open_axes(example: Tensor) -> dict[int, Any]:
    axes: dict[int, Any] = {0: torch.export.Dim.DYNAMIC}
    if example.dim() == 2 and not example.is_floating_point():
        axes[1] = torch.export.Dim.AUTO
    return axes


def _examples(name: str, module: fx.GraphModule, arguments: _Arguments) -> dict[str, Tensor]:
    """Returns the example inputs by the graph's names, in its order; inputs that nothing reads are removed."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    if isinstance(arguments, dict):
        found = {node.name: arguments[node.target] for node in inputs if node.target in arguments}
    else:
        found = {node.name: value for node, value in zip(inputs, arguments, strict=False)}
    for node in inputs:
        if node.name in found:
            continue
        if node.users:
            raise GraphError(f"{name} needs {node.name!r}, which its example inputs do not have")
        module.graph.erase_node(node)
    module.recompile()
    return found


class _Recorder(fx.Interpreter):
    """Runs a module and keeps shape and bytes of what every node gave, and the shortest of its times, in seconds."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.num_bytes: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        begin = perf_counter()
        given = super().run_node(n)
        self.seconds[n.name] = min(self.seconds.get(n.name, inf), perf_counter() - begin)
        if isinstance(given, Tensor) and n.op != "get_attr":
            self.shapes[n.name] = tuple(given.shape)
            self.num_bytes[n.name] = given.numel() * given.element_size()
        return given


def _check_batch(graph: TorchModel) -> None:
    """Raise GraphError where an input comes out otherwise alone, or in a larger batch, than among the examples."""
    inputs = tuple(graph.examples.values())
    wanted = graph.run(*inputs)
    for batch in (1, len(inputs[0]) + 1):
        rows = torch.arange(batch) % len(inputs[0])
        try:
            given = graph.run(*(each[rows] for each in inputs))
            same = all(
                torch.allclose(a, b[rows], rtol=TOLERANCE, atol=TOLERANCE) for a, b in zip(given, wanted, strict=True)
            )
        except (RuntimeError, IndexError, ValueError) as error:
            raise GraphError(
                f"{graph.name} takes batches of {len(inputs[0])} only, not of {batch}: {first_line(error)}"
            ) from error
        if not same:
            raise GraphError(f"{graph.name} gives an input other outputs in a batch of {batch} than among the examples")
