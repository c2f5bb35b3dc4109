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
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from earlyexit.errors import GraphError
from earlyexit.foreign.dataflow import REPEATS, Dataflow, Operator, OperatorKind, Site, with_shares
from earlyexit.named import import_own

_BRANCHING = frozenset({"cond", "while_loop", "scan", "map_impl", "associative_scan"})
"""They run graphs of their own, by what the inputs hold."""
_SIZES = """sym_size sym_numel sym_stride size numel dim new_zeros new_ones new_full new_empty new_empty_strided
    zeros_like ones_like full_like empty_like eye getattr"""
_RANDOM = """rand randn randint normal bernoulli multinomial rand_like randn_like randint_like"""
_ACTIVATIONS = """relu relu6 leaky_relu prelu elu selu celu gelu silu mish sigmoid tanh softplus softsign hardtanh
    hardswish hardsigmoid log_sigmoid logsigmoid softmax log_softmax glu dropout dropout1d dropout2d alpha_dropout"""
_ARITHMETIC = """add sub rsub mul div pow sqrt rsqrt neg abs exp log log1p expm1 erf sin cos reciprocal floor ceil round
    sign clamp clip clamp_min clamp_max minimum maximum where masked_fill masked_fill_ eq ne gt ge lt le and or not xor
    logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not isnan isinf sum_to_size square lerp addcmul
    addcdiv truediv floordiv iadd imul"""
_NORMS = """batch_norm native_batch_norm native_batch_norm_legit_no_training layer_norm native_layer_norm group_norm
    native_group_norm instance_norm rms_norm normalize local_response_norm"""
_SHAPES = """view reshape flatten transpose permute t unsqueeze squeeze expand expand_as repeat repeat_interleave cat
    concat concatenate stack split split_with_sizes chunk unbind slice select index index_select gather narrow unfold
    pad constant_pad_nd contiguous clone detach alias to type_as _to_copy float half bool int long identity
    pixel_shuffle pixel_unshuffle channel_shuffle upsample interpolate upsample_nearest2d upsample_bilinear2d roll flip
    tril triu movedim swapaxes getitem lift_fresh_copy unsafe_view"""
_POOLING = """max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d mean sum amax amin max min argmax argmin topk cumsum var
    std var_mean any all norm vector_norm"""
_SIZES_OPS = frozenset(_SIZES.split())
_RANDOM_OPS = frozenset(_RANDOM.split())
_MODULES = """relu relu6 leakyrelu prelu elu selu celu gelu silu mish sigmoid tanh softplus softsign hardtanh hardswish
    hardsigmoid softmax logsoftmax glu dropout dropout1d dropout2d batchnorm1d batchnorm2d batchnorm3d layernorm
    groupnorm instancenorm2d rmsnorm localresponsenorm identity flatten unflatten maxpool1d maxpool2d avgpool1d
    avgpool2d adaptiveavgpool1d adaptiveavgpool2d adaptivemaxpool2d zeropad2d pixelshuffle upsample"""
"""Layers, as symbolic tracing leaves them whole, in small letters."""
_LIGHT_OPS = frozenset(" ".join((_ACTIVATIONS, _ARITHMETIC, _NORMS, _SHAPES, _POOLING, _MODULES)).split())


def kind_of(base: str) -> OperatorKind:
    """Of an operator's base name."""
    name = base.lower().strip("_")
    if name in _SIZES_OPS or base in _SIZES_OPS:
        return "sizes"
    if name in _RANDOM_OPS:
        return "random"
    return "light" if name in _LIGHT_OPS or base in _LIGHT_OPS else "work"


def base_name(node: fx.Node) -> str:
    """`conv2d` of the node that calls `aten.conv2d.default`, `ReLU` of the one that calls that layer."""
    if node.op == "call_module":
        assert node.graph.owning_module is not None
        return type(node.graph.owning_module.get_submodule(str(node.target))).__name__
    if isinstance(node.target, str):
        return node.target
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def check_operators(name: str, graph: fx.Graph) -> None:
    """Raise GraphError where a module branches by what its inputs hold."""
    for node in graph.nodes:
        if base_name(node) in _BRANCHING:
            raise GraphError(
                f"{name}: {base_name(node)} ({node.name}) runs a graph of its own, by what inputs hold: such models "
                "cannot be cut"
            )


def operators_of(module: fx.GraphModule, tensors: Collection[str]) -> Iterator[Operator]:
    """Of a graph's nodes, what they read and give by their names; taking a tensor out of a tuple is no operator.

    `tensors`: the nodes that give one tensor.
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
    """Whether a node takes a tensor out of a tuple that another gave."""
    whole = node.args[0] if node.target is operator.getitem else None
    return isinstance(whole, fx.Node) and whole.name not in tensors


TOLERANCE = 1e-3
"""Between an input's outputs alone and among others, absolute and relative; the order of sums alone gives some 1e-6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchGraph:
    """A torch module that was traced and checked."""

    name: str
    """`module:function`"""
    module: fx.GraphModule
    """The whole network, its weights included, in evaluation mode: run it by `run`, or cut it."""
    examples: Mapping[str, Tensor]
    """Inputs by name, in the order in which `module.graph` takes them; each (B, ...)."""
    flow: Dataflow
    """Operators and tensors are named as the nodes of `module.graph`."""

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs for any batch of inputs, in the order of `flow.outputs`."""
        return _tensors(fx.Interpreter(self.module).run(*inputs, enable_io_processing=False))

    @torch.no_grad()
    def value_of(self, tensor: str) -> Tensor:
        """What a node of `module.graph` gives for the examples."""
        interpreter = fx.Interpreter(self.module, garbage_collect_values=False)
        interpreter.run(*self.examples.values(), enable_io_processing=False)
        [value] = [value for node, value in interpreter.env.items() if node.name == tensor]
        assert isinstance(value, Tensor)
        return value


def read_torch(name: str) -> TorchGraph:
    """Trace the module that `module:function` gives.

    Raises ModelFolderError where it cannot be imported; GraphError where it gives something else, cannot be traced with
    an open batch, or branches by what inputs hold.
    """
    network, arguments = _given_by(name)
    with torch.no_grad():
        module = _traced(name, network, arguments)
        check_operators(name, module.graph)
        examples = _examples(name, module, arguments)
        flow = _dataflow(module, examples)
        graph = TorchGraph(name=name, module=module, examples=examples, flow=flow)
        _check_batch(graph)
    return graph


_Arguments = tuple[Tensor, ...] | dict[str, Tensor]


def _given_by(name: str) -> tuple[nn.Module, _Arguments]:
    """What the function returns, checked."""
    make = import_own(name, called="network")
    wanted = "a function without arguments that returns (module, example inputs) is needed"
    try:
        network, given = make()
    except Exception as error:  # whatever somebody's function raises
        raise GraphError(f"{name}: {first_line(error)}; {wanted}") from error
    if not isinstance(given, Mapping | Tensor | tuple | list):
        raise GraphError(f"{name} gives {type(given).__name__} for example inputs; {wanted}")
    arguments = dict(given) if isinstance(given, Mapping) else (given,) if isinstance(given, Tensor) else tuple(given)
    tensors = _values(arguments)
    if not isinstance(network, nn.Module) or not tensors or not all(isinstance(each, Tensor) for each in tensors):
        raise GraphError(f"{name} gives {type(network).__name__}; a torch module and example tensors are needed")
    rows = {each.shape[0] if each.dim() else 0 for each in tensors}
    if len(rows) > 1 or min(rows) < 2:  # an example of one would be traced as always one
        shapes = ", ".join(str(list(each.shape)) for each in tensors)
        raise GraphError(f"{name} gives examples {shapes}; each needs a row per input, of the same two or more inputs")
    return network.eval(), arguments


def _values(arguments: _Arguments) -> tuple[Tensor, ...]:
    return tuple(arguments.values()) if isinstance(arguments, dict) else arguments


def _traced(name: str, network: nn.Module, arguments: _Arguments) -> fx.GraphModule:
    """Exported, or symbolically traced where that fails; without the operators that only check inputs."""
    try:
        module = _exported(network, arguments)
    except Exception as of_export:  # whatever tracing somebody's module raises
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
    """With an open batch, and open lengths of tokens where the module lets them be; no operator writes in place."""
    positional, named = ((), arguments) if isinstance(arguments, dict) else (arguments, None)
    axes = pytree.tree_map(_open_axes, arguments)
    with _quiet():
        program = torch.export.export(network, positional, named, dynamic_shapes=axes)
        module = program.run_decompositions({}).module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    return module


def _open_axes(example: Tensor) -> dict[int, Any]:
    axes: dict[int, Any] = {0: torch.export.Dim.DYNAMIC}
    if example.dim() == 2 and not example.is_floating_point():
        axes[1] = torch.export.Dim.AUTO
    return axes


def first_line(error: Exception) -> str:
    """What it says first, or its name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """No word of what torch's tracing itself is built on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
        yield


def _examples(name: str, module: fx.GraphModule, arguments: _Arguments) -> dict[str, Tensor]:
    """The example inputs by the graph's names for them, in its order; inputs that nothing reads are gone."""
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
    """Runs a module and keeps what every node gave, as shapes and bytes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.num_bytes: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        given = super().run_node(n)
        if isinstance(given, Tensor) and n.op != "get_attr":
            self.shapes[n.name] = tuple(given.shape)
            self.num_bytes[n.name] = given.numel() * given.element_size()
        return given


def _dataflow(module: fx.GraphModule, examples: Mapping[str, Tensor]) -> Dataflow:
    recorder = _Recorder(module)
    recorder.run(*examples.values(), enable_io_processing=False)
    batch = len(next(iter(examples.values())))
    nodes = list(module.graph.nodes)
    return Dataflow(
        operators=tuple(operators_of(module, recorder.shapes)),
        inputs=tuple(examples),
        outputs=tuple(each.name for each in _nodes(nodes[-1].args)),
        weights=frozenset(node.name for node in nodes if node.op == "get_attr"),
        shapes=recorder.shapes,
        bytes_per_input={name: num_bytes // batch for name, num_bytes in recorder.num_bytes.items()},
        batch=batch,
    )


def _nodes(values: Any) -> list[fx.Node]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, fx.Node)]


def _tensors(values: Any) -> tuple[Tensor, ...]:
    return tuple(each for each in pytree.tree_leaves(values) if isinstance(each, Tensor))


def _check_batch(graph: TorchGraph) -> None:
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


class _Stopwatch(fx.Interpreter):
    """Runs a module and notes how long every node took, of all runs the shortest."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        begin = perf_counter()
        given = super().run_node(n)
        self.seconds[n.name] = min(self.seconds.get(n.name, inf), perf_counter() - begin)
        return given


def time_torch(graph: TorchGraph, sites: Sequence[Site], *, repeats: int = REPEATS) -> tuple[Site, ...]:
    """The sites with shares of seconds: one input alone, on one thread of this CPU."""
    watch, threads = _Stopwatch(graph.module), torch.get_num_threads()
    inputs = [value[:1] for value in graph.examples.values()]
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            for _ in range(repeats):
                watch.run(*inputs, enable_io_processing=False)
    finally:
        torch.set_num_threads(threads)
    return with_shares(sites, graph.flow, graph.flow.outputs, watch.seconds)
