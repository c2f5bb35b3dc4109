"""Reads a torch module as a dataflow: traced by `torch.export`, or by `torch.fx` where that cannot.

The module is named `module:function`. The function takes no arguments and returns the module, with its weights, and
example inputs: a tuple of tensors, or a dict of them by the names of `forward`'s parameters. Every tensor has a row per
input, two rows or more; of tokens, which are whole numbers (B, T), the second axis is open too.

    def my_network() -> tuple[nn.Module, tuple[Tensor, ...]]:
        return torchvision.models.resnet18(weights="DEFAULT"), (torch.randn(2, 3, 224, 224),)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from earlyexit.errors import GraphError
from earlyexit.graph.dataflow import Dataflow
from earlyexit.graph.torch_operators import base_name, check_operators, operators_of
from earlyexit.named import import_own

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
