"""The operators of a traced torch module, and what kind each is by its base name: `conv2d`, `layer_norm`, `ReLU`."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator

from torch import fx

from earlyexit.errors import GraphError
from earlyexit.graph.dataflow import Operator, OperatorKind

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
