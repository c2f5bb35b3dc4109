"""From a torch module that was traced to a backbone in blocks, with the classifier that the module brings."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from earlyexit.errors import GraphError
from earlyexit.families.base import FinalHead, Pretrained
from earlyexit.families.exported import LAYOUT_INPUTS, ExportedBackbone, exported_backbone
from earlyexit.families.own import check_alone
from earlyexit.graph.pieces import Traced
from earlyexit.graph.torch_module import TOLERANCE, TorchGraph, first_line
from earlyexit.layout import Layout

LONGEST_TRIED = 512
"""Tokens, where a module does not say how long its inputs may be."""
TOKEN_TYPES = "token_type_ids"
SURE = 1e-3
"""How far from 1 the sum of probabilities may be."""
FED = {
    "attention_mask": "a mask is 1 for every token, and 0 behind the last",
    "position_ids": "positions begin at 0",
    TOKEN_TYPES: "types of tokens are 0, but of pairs",
}
aten = torch.ops.aten
SOFTMAX = (aten.softmax.int, aten._softmax.default)


def traced_inputs(graph: TorchGraph, *, token_types: bool = False) -> Traced:
    """The module with its inputs told apart; with `token_types` the codec gives those, after the tokens.

    Raises GraphError for a module that only `torch.fx` could trace, whose shapes are not known.
    """
    if any("val" not in node.meta for node in graph.module.graph.nodes if node.op == "placeholder"):
        raise GraphError(f"{graph.name}: torch.export cannot trace it, and without its shapes it cannot be cut")
    of_codec = {TOKEN_TYPES} if token_types else set()
    layout = tuple(name for name in graph.examples if name in LAYOUT_INPUTS.keys() - of_codec)
    carried = tuple(
        sorted((name for name in graph.examples if name not in layout), key=lambda name: name == TOKEN_TYPES)
    )
    if not carried:
        raise GraphError(f"{graph.name} takes {', '.join(layout)} alone, which say nothing of what inputs hold")
    return Traced(module=graph.module, carried=carried, layout=layout)


def output_of(graph: TorchGraph, asked: str | None = None) -> str:
    """The module's output that is a classifier's answer, (B, C): the one that is asked for, or the only one.

    Raises GraphError where that is none.
    """
    if asked is not None and asked not in graph.flow.outputs:
        raise GraphError(f"{graph.name} has no output {asked!r}; it has {', '.join(graph.flow.outputs)}")
    outputs = _outputs(graph)
    found = [
        name
        for name, values in outputs.items()
        if asked in (None, name) and _can_be_the_answer(values, graph.flow.batch)
    ]
    if len(found) == 1:
        return found[0]
    described = ", ".join(f"{name!r} {list(values.shape)}" for name, values in outputs.items())
    wanted = "one output of two or more numbers for each input is needed"
    hint = "; --output names it" if found else ""
    raise GraphError(
        f"{graph.name} is no classifier: of {graph.flow.batch} inputs it gives {described}; {wanted}{hint}"
    )


def answer_of(graph: TorchGraph, asked: str | None = None) -> str:
    """The tensor that holds the module's answers as logits, (B, C); where it ends in probabilities, their logarithms.

    Those are new nodes of the graph, but for a softmax, whose input are logits. Raises GraphError as `output_of`.
    """
    name = output_of(graph, asked)
    node = next(each for each in graph.module.graph.nodes if each.name == name)
    if node.target in SOFTMAX and node.args[1] in (1, -1):
        logits: Any = node.args[0]
        return str(logits.name)
    values = _outputs(graph)[name]
    inside = bool((values >= 0).all() and (values <= 1).all())
    whole = bool(((values.sum(1) - 1).abs() < SURE).all())
    return _logarithm(node) if inside and (whole or node.target is aten.sigmoid.default) else name


def take_module(
    graph: TorchGraph, traced: Traced, cuts: Sequence[Sequence[str]], answer: str, *, max_length: int | None = None
) -> Pretrained:
    """A backbone of the module's blocks between some cuts, tried, and the classifier that it brings as its head.

    `max_length`: None for the longest that the module takes, or 512 tokens. Raises ModelFolderError for what cannot
    cross, and for inputs that change with their batch-mates; GraphError for lengths that the module does not take, and
    where it is to be given other masks, positions or token types than follow from how long inputs are.
    """
    backbone = exported_backbone(traced, cuts, answer)
    known = traced.most_tokens if backbone.inputs[0].per_token else None
    backbone.max_length = _longest(graph, backbone, known, max_length)
    _check_examples(graph, traced, backbone, answer)
    try:
        check_alone(backbone)
    except (RuntimeError, IndexError) as error:
        raise GraphError(f"{graph.name} does not take inputs of any numbers: {first_line(error)}") from error
    [last] = backbone.boundary(backbone.num_blocks - 1)
    head = FinalHead(style="given", pooling="mean", num_outputs=last.shape[0], weights={})
    return Pretrained(backbone=backbone, head=head, label_names=None)


def _outputs(graph: TorchGraph) -> dict[str, Tensor]:
    """Of the examples."""
    with torch.no_grad():
        return dict(zip(graph.flow.outputs, graph.run(*graph.examples.values()), strict=True))


def _can_be_the_answer(values: Tensor, batch: int) -> bool:
    return values.is_floating_point() and values.ndim == 2 and len(values) == batch and values.shape[1] >= 2


def _logarithm(node: fx.Node) -> str:
    """New nodes behind one; its name."""
    graph = node.graph
    with graph.inserting_after(node):
        least = graph.call_function(aten.clamp_min.default, (node, torch.finfo(torch.float32).tiny))
    with graph.inserting_after(least):
        logarithm = graph.call_function(aten.log.default, (least,))
    for each in (least, logarithm):
        each.meta["val"] = node.meta.get("val")
    return logarithm.name


@torch.inference_mode()
def _check_examples(graph: TorchGraph, traced: Traced, backbone: ExportedBackbone, answer: str) -> None:
    """Raise GraphError where the backbone answers the module's own examples otherwise than the module."""
    wanted = graph.value_of(answer)
    layout = _layout_of(graph, graph.examples[traced.carried[0]], per_token=backbone.inputs[0].per_token)
    given = tuple(
        layout.unpad(graph.examples[name][:, : layout.longest]) if spec.per_token else graph.examples[name]
        for name, spec in zip(traced.carried, backbone.inputs, strict=True)
    )
    try:
        [found] = backbone.run_blocks(0, backbone.num_blocks, backbone.embed(given, layout), layout)
    except (RuntimeError, IndexError) as error:
        raise GraphError(f"{graph.name} cannot be run on its own examples in blocks: {first_line(error)}") from error
    if found.shape == wanted.shape and torch.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
        return
    other = next((name for name in traced.layout if not _follows(graph.examples[name], name, layout)), None)
    if other is None:
        raise GraphError(f"{graph.name} answers its own examples otherwise in blocks than uncut")
    raise GraphError(
        f"{graph.name}: its example of {other!r} is not what it is fed, and its answers are others; {FED[other]}"
    )


def _layout_of(graph: TorchGraph, first: Tensor, *, per_token: bool) -> Layout:
    """Of the examples, whose first input is this: as long as their mask says, or as they are padded."""
    lengths = np.full(len(first), first.shape[1] if per_token else 1, dtype=np.int32)
    mask = graph.examples.get("attention_mask")
    if per_token and mask is not None:
        lengths[:] = (mask != 0).sum(1).clamp_min(1).numpy()
    return Layout(lengths)


def _follows(example: Tensor, name: str, layout: Layout) -> bool:
    """Whether, where there are tokens, it is what inputs of these lengths are fed with."""
    fed = LAYOUT_INPUTS[name](layout)
    seen = example[:, : layout.longest]
    return fed.shape == seen.shape and bool((fed == seen.to(fed.dtype))[layout.mask_BT].all())


def _longest(graph: TorchGraph, backbone: ExportedBackbone, known: int | None, asked: int | None) -> int:
    """In tokens: what is asked for, else the longest that the module takes, up to 512; 1 where inputs have none."""
    if not backbone.inputs[0].per_token:
        return 1
    most = asked or min(known or LONGEST_TRIED, LONGEST_TRIED)
    if _runs(backbone, most):
        return most
    # Positions are looked up in a table: what is too long for it fails, and whatever is longer.
    longest = bisect_left(range(1, most + 1), True, key=lambda tokens: not _runs(backbone, tokens))
    if asked is not None or not longest:
        raise GraphError(
            f"{graph.name} takes inputs of at most {longest} tokens, not {asked or 1}: --max-length {longest}"
        )
    return longest


@torch.inference_mode()
def _runs(backbone: ExportedBackbone, tokens: int) -> bool:
    """Whether one input of so many tokens can be run."""
    layout = Layout(np.array([tokens], dtype=np.int32))
    dtypes = {"float": torch.float32, "int32": torch.int32, "uint8": torch.uint8}
    zeros = tuple(
        torch.zeros(tokens if each.per_token else 1, *each.shape, dtype=dtypes[each.dtype]) for each in backbone.inputs
    )
    try:
        backbone.run_blocks(0, backbone.num_blocks, backbone.embed(zeros, layout), layout)
    except (RuntimeError, IndexError):
        return False
    return True
