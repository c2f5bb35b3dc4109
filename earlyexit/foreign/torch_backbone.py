"""From a torch module that was traced to a backbone in blocks, with the classifier that the module brings.

Torch modules that nobody prepared: traced by `torch.export`, cut at some tensors, kept as data.

A model's folder holds the graph of every block (`graph.json`) and the weights; neither the module's own code nor a
pickle is needed to serve it. Modules over tokens take padded tensors (B, T, ...); between blocks inputs stay packed.

Tensor legend: B inputs, T tokens of the longest.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, fx, nn

from earlyexit.errors import GraphError, ModelFolderError
from earlyexit.families.base import Backbone, Family, FinalHead, JsonDict, Pretrained
from earlyexit.families.own import check_own
from earlyexit.foreign.torch_module import TOLERANCE, TorchGraph, first_line
from earlyexit.foreign.torch_pieces import Graph, Traced, module_of
from earlyexit.network.boundary import Boundary, TensorSpec
from earlyexit.network.layout import Layout
from earlyexit.network.piece import Tensors
from earlyexit.network.wire import Encoded

GRAPH_FILE = "graph.json"
PREFIX = "w_"
"""Of weights' names, none of which is then one of a module's own."""


def _mask(layout: Layout) -> Tensor:
    return layout.mask_BT


def _zeros(layout: Layout) -> Tensor:
    return torch.zeros_like(layout.mask_BT, dtype=torch.int64)


def _positions(layout: Layout) -> Tensor:
    return torch.arange(layout.longest, device=layout.device).expand(layout.num_inputs, -1)


LAYOUT_INPUTS: Mapping[str, Callable[[Layout], Tensor]] = {
    "attention_mask": _mask,
    "position_ids": _positions,
    "token_type_ids": _zeros,
}
"""Inputs (B, T) that follow from how long each input is, by the names that exporters give them. Token types are all
those of a first text, unless the codec gives them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What `graph.json` holds."""

    graphs: tuple[Graph, ...]
    boundaries: tuple[Boundary, ...]
    """What crosses after each block."""
    inputs: Boundary
    """What the codec gives."""
    types: Mapping[str, str]
    """Of the module's own inputs: torch's names of their types."""
    weights: Mapping[str, tuple[str, tuple[int, ...]]]
    """Type and shape of each, by the name that the graphs give it."""

    def to_json(self) -> JsonDict:
        return asdict(self)

    @classmethod
    def from_json(cls, data: JsonDict) -> Blocks:
        """Raises KeyError and TypeError for what is none."""
        return cls(
            graphs=tuple(Graph.from_json(each) for each in data["graphs"]),
            boundaries=tuple(_boundary(each) for each in data["boundaries"]),
            inputs=_boundary(data["inputs"]),
            types=dict(data["types"]),
            weights={name: (dtype, tuple(shape)) for name, (dtype, shape) in data["weights"].items()},
        )


class ExportedBackbone(Backbone):
    """The blocks of a traced module, as graphs over weights that are shared by all of them."""

    reorders_linears: ClassVar[bool] = False
    float32_only: ClassVar[bool] = True

    def __init__(self, blocks: Blocks, max_length: int = 1) -> None:
        super().__init__()
        self.blocks = blocks
        self.num_blocks = len(blocks.graphs)
        self.max_length = max_length
        self.weights = _Weights(blocks.weights)
        self._modules_by_device: dict[tuple[int, torch.device], fx.GraphModule] = {}

    @property
    def inputs(self) -> Boundary:
        return self.blocks.inputs

    def boundary(self, block: int) -> Boundary:
        return self.blocks.boundaries[block]

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        return inputs

    def run_block(self, index: int, hidden: Tensors, layout: Layout) -> Tensors:
        return self.run_blocks(index, index + 1, hidden, layout)

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

    def check_graphs(self) -> None:
        """Raise ModelFolderError where a block's graph holds what cannot, or must not, be run."""
        for dtype in self.blocks.types.values():
            _dtype(dtype)
        for index in range(self.num_blocks):
            self._module(index, torch.device("cpu"))

    def _run(self, index: int, padded: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        graph, types = self.blocks.graphs[index], self.blocks.types
        known = len(padded)
        if index == 0:
            names = graph.takes[:known]
            padded = [each.to(_dtype(types[name])) for name, each in zip(names, padded, strict=True)]
        made = [LAYOUT_INPUTS[name](layout).to(_dtype(types[name])) for name in graph.takes[known:-2]]
        module = self._module(index, padded[0].device)
        sizes = (len(padded[0]), layout.longest)
        return list(module(*padded, *made, *sizes, *self.weights.named(graph.weights)))

    def _module(self, index: int, device: torch.device) -> fx.GraphModule:
        if (index, device) not in self._modules_by_device:
            self._modules_by_device[index, device] = module_of(self.blocks.graphs[index], device)
        return self._modules_by_device[index, device]

    def __getstate__(self) -> JsonDict:
        return {**vars(self), "_modules_by_device": {}}


class Exported(Family):
    """Built from a model's folder alone; `exported_backbone` makes one of a module."""

    name = "exported"

    def build(self, config: JsonDict, folder: Path | None = None) -> ExportedBackbone:
        if folder is None:
            raise ModelFolderError(f"the family {self.name} is built from a model's folder, which holds {GRAPH_FILE}")
        path = folder / GRAPH_FILE
        try:
            blocks = Blocks.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelFolderError(f"{path} cannot be read: {error}") from error
        if _sha256(blocks) != config["graph"]:
            raise ModelFolderError(f"{path} is not the graph that the model's card was written for")
        backbone = ExportedBackbone(blocks, config["max_length"])
        backbone.check_graphs()
        return backbone

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        raise ModelFolderError("torch modules become models by: offramp inject module:function")


class _Weights(nn.Module):
    """Tensors by any name."""

    def __init__(self, weights: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        super().__init__()
        for name, (dtype, shape) in weights.items():
            empty = torch.empty(shape, dtype=_dtype(dtype))
            if empty.is_floating_point():
                self.register_parameter(PREFIX + name, nn.Parameter(empty, requires_grad=False))
            else:
                self.register_buffer(PREFIX + name, empty)

    def named(self, names: Sequence[str]) -> list[Tensor]:
        return [getattr(self, PREFIX + name) for name in names]


def exported_backbone(traced: Traced, cuts: Sequence[Sequence[str]], output: str) -> ExportedBackbone:
    """The module's backbone, with its weights, of a block more than there are cuts.

    Raises ModelFolderError for tensors that cannot cross, or are not all that crosses.
    """
    graphs = traced.cut(cuts, output)
    used = {name for graph in graphs for name in graph.weights}
    weights = {name: tensor for name, tensor in traced.weights.items() if name in used}
    blocks = Blocks(
        graphs=tuple(graphs),
        boundaries=tuple(tuple(map(traced.spec, each)) for each in (*cuts, (output,))),
        inputs=tuple(map(traced.input_spec, traced.carried)),
        types={name: _type(traced.nodes[name].meta["val"]) for name in (*traced.carried, *traced.layout)},
        weights={name: (_type(tensor), tuple(tensor.shape)) for name, tensor in weights.items()},
    )
    backbone = ExportedBackbone(blocks)
    backbone.weights.load_state_dict({PREFIX + name: tensor.detach() for name, tensor in weights.items()})
    return backbone


def _boundary(specs: Sequence[JsonDict]) -> Boundary:
    return tuple(TensorSpec(**{**each, "shape": tuple(each["shape"])}) for each in specs)


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ModelFolderError(f"{GRAPH_FILE} has tensors of {name!r}, which torch has no type of")
    return found


def _text(blocks: Blocks) -> str:
    return json.dumps(blocks.to_json(), separators=(",", ":")) + "\n"


def _sha256(blocks: Blocks) -> str:
    return hashlib.sha256(_text(blocks).encode()).hexdigest()


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
    graph: TorchGraph,
    traced: Traced,
    cuts: Sequence[Sequence[str]],
    answer: str,
    *,
    max_length: int | None = None,
    rows: Sequence[Encoded] = (),
) -> Pretrained:
    """A backbone of the module's blocks between some cuts, tried, and the classifier that it brings as its head.

    `max_length`: None for the longest that the module takes, or 512 tokens. `rows`: inputs of the user, which are tried
    where the module rounds. Raises ModelFolderError for what cannot
    cross, and for inputs that change with their batch-mates; GraphError for lengths that the module does not take, and
    where it is to be given other masks, positions or token types than follow from how long inputs are.
    """
    backbone = exported_backbone(traced, cuts, answer)
    known = traced.most_tokens if backbone.inputs[0].per_token else None
    backbone.max_length = _longest(graph, backbone, known, max_length)
    _check_examples(graph, traced, backbone, answer)
    try:
        check_own(backbone, rows)
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
