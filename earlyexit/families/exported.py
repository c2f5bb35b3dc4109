"""Torch modules that nobody prepared: traced by `torch.export`, cut at some tensors, kept as data.

A model's folder holds the graph of every block (`graph.json`) and the weights; neither the module's own code nor a
pickle is needed to serve it. Modules over tokens take padded tensors (B, T, ...); between blocks inputs stay packed.

Tensor legend: B inputs, T tokens of the longest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from earlyexit.boundary import Boundary, TensorSpec
from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Backbone, Family, JsonDict, Pretrained
from earlyexit.graph.aten import Graph, module_of
from earlyexit.graph.pieces import Traced
from earlyexit.layout import Layout
from earlyexit.piece import Tensors

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
