"""The contract of a network, blocks that can be cut between any two and left at ramps; and a network of torch modules.

The code above a network does not know what a block is, or what crosses between two blocks. A network of torch modules
has a backbone's chain of blocks, a ramp after any of them but the last, and a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from earlyexit.engine.queue import Attention
from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Backbone
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Boundary, Budget, Encoded, Lengths, Segment, TensorSpec, WirePiece, mismatch
from earlyexit.network.chain import Chain
from earlyexit.network.piece import Layout, Piece, Tensors, to_device
from earlyexit.policies.base import ExitPolicy
from earlyexit.ramps import RampStyle
from earlyexit.ramps.heads import BridgeRamp, NormedRamp, Ramp, VocabularyHead
from earlyexit.ramps.pooling import Pooling
from earlyexit.tasks.base import Task


class SegmentRunner(Protocol):
    """Computes segments of a network: its own modules, ONNX Runtime, CUDA graphs."""

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        """Returns what crosses after the segment, and the outputs (B, *output_shape) of the exit at its end, if any.

        If the piece carries `importance` as its last tensor, so does the result, with the segment's share added.
        """
        ...

    def is_ready(self, segment: Segment) -> bool:
        """Whether `run` computes it at once, without seconds of preparation; by default always."""
        return True

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        """Prepare segments for batches within their budgets, while other segments run; by default there is no need.

        Segments that are neither among these nor among those of the last call may be given up.
        """
        return


class Network(SegmentRunner, Protocol):
    """Blocks 0 to `num_blocks` - 1, a ramp after some of them, and the full model's exit after the last.

    In a chain of several networks (`ChainNetwork`), no segment and no cut runs over the end of one.

    An input's values may depend on its own rows only, never on its batch-mates.
    """

    num_blocks: int
    ramp_indices: tuple[int, ...]
    """The blocks that have a ramp, ascending."""

    @property
    def task(self) -> Task:
        """What an exit's outputs mean."""
        ...

    @property
    def max_length(self) -> int:
        """The longest input in tokens; 1 where inputs have none."""
        ...

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype:
        """Of the boundaries' `float` tensors."""
        ...

    def boundary(self, block: int) -> Boundary:
        """Returns what crosses after a block; for -1 what the network takes."""
        ...

    def takes(self, block: int) -> Boundary:
        """Returns what a piece holds before a block: what crosses, or inputs where they are encoded anew."""
        ...


def from_wire(network: Network, wire: WirePiece, policy: ExitPolicy) -> Piece:
    """Returns the piece on the network's device; before block 0 with the policy's initial state.

    Hidden states that travelled in another float type get the network's own type again.
    """
    if wire.state_BS is not None:
        state_BS = to_device(_tensor(wire.state_BS), network.device)
    elif policy.counts_places:
        from earlyexit.sequences.kv_memory import places_of  # classifiers need no tokenizers for it

        state_BS = to_device(_tensor(places_of(wire)[:, None]), network.device)
    else:
        state_BS = policy.initial_state(len(wire.sample_ids), network.task.num_outputs, network.device)
    arrived = [to_device(_tensor(values), network.device) for values in wire.tensors]
    return Piece(
        sample_ids=wire.sample_ids,
        next_block=wire.next_block,
        lengths_B=wire.lengths_B,
        tensors=tuple(each.to(network.dtype) if each.dtype == torch.float16 else each for each in arrived),
        state_BS=state_BS,
    )


def check_inputs(network: Network, encoded: Encoded) -> None:
    """Raise ModelFolderError where a codec's output is not what the network takes."""
    said = mismatch(network.takes(0), encoded)
    if said is not None:
        raise ModelFolderError(said)


def arbitrary_tensors(network: Network, block: int, lengths_B: Lengths, rng: np.random.Generator) -> Tensors:
    """Returns random values that could cross before `block`, for inputs of these lengths, on the network's device."""
    return tuple(_arbitrary(each, lengths_B, rng, network) for each in network.takes(block))


def _arbitrary(spec: TensorSpec, lengths_B: Lengths, rng: np.random.Generator, network: Network) -> Tensor:
    rows = int(lengths_B.sum()) if spec.per_token else len(lengths_B)
    if spec.dtype == "float":
        values = rng.standard_normal((rows, *spec.shape), dtype=np.float32)
        return torch.from_numpy(values).to(network.device, network.dtype)
    most = spec.below or 1 + np.iinfo(spec.dtype).max
    whole = rng.integers(0, most, size=(rows, *spec.shape), dtype=np.dtype(spec.dtype))
    return torch.from_numpy(whole).to(network.device)


def _tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    """Returns a tensor over writable memory; the bits of bfloat16 travel as uint16."""
    tensor = torch.from_numpy(np.require(array, requirements="W"))
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a model is, apart from its weights."""

    name: str
    family: str
    codec: NamedSpec
    """How its inputs are encoded; `find_codec` reads it."""
    task: Task
    ramp_style: RampStyle
    pooling: Pooling
    head_style: RampStyle
    """The full model's head: the ramps' style, or the one that a fine-tuned checkpoint brought."""
    head_pooling: Pooling
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Where the weights came from and how the ramps were trained."""


class EarlyExitModel(nn.Module):
    """Blocks, ramps and head, in inference or training; as a `Network` it computes segments."""

    def __init__(self, info: ModelInfo, backbone: Backbone, ramps: Mapping[int, Ramp], head: Ramp) -> None:
        super().__init__()
        self.info = info
        self.backbone = backbone
        self.num_blocks = backbone.num_blocks
        self.ramp_indices = tuple(sorted(ramps))
        self.ramps = nn.ModuleDict({str(index): ramp for index, ramp in ramps.items()})
        self.head = head
        self.register_buffer("temperatures_E", torch.ones(backbone.num_blocks))
        self.temperatures_E: Tensor
        """Divides the outputs of the exit after block k; 1 until calibrated."""
        self.attention: Attention = "auto"
        """How packed inputs attend; the service may choose."""
        self.is_last = True
        """Whether its end is the model's; else another network of a chain follows, and its end is a ramp."""

    @property
    def chain(self) -> Chain:
        """The chain of this one network."""
        return Chain(names=(self.info.name,), lengths=(self.num_blocks,), ramps=self.ramp_indices)

    @property
    def task(self) -> Task:
        return self.info.task

    @property
    def max_length(self) -> int:
        """The longest input in tokens: what its codec lets in."""
        return int(self.info.codec.get("max_length", self.backbone.max_length))

    @property
    def device(self) -> torch.device:
        return self.temperatures_E.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.backbone.float32_only else next(self.backbone.parameters()).dtype

    def boundary(self, block: int) -> Boundary:
        """Returns what crosses after a block; for -1 what the network takes."""
        return self.backbone.inputs if block < 0 else self.backbone.boundary(block)

    def takes(self, block: int) -> Boundary:
        """Returns what a piece holds before a block."""
        return self.boundary(block - 1)

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        return self.compute(segment, piece.tensors, self.layout(piece.lengths_B))

    def layout(self, lengths_B: Lengths) -> Layout:
        """Returns the layout of packed inputs of these lengths."""
        return Layout(lengths_B, self.device, self.attention)

    def is_ready(self, segment: Segment) -> bool:
        return self.backbone.is_ready(segment.first, segment.end, self.device.type)

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        self.backbone.prepare({(each.first, each.end) for each in segments}, self.device.type)

    def compute(self, segment: Segment, values: Tensors, layout: Layout) -> tuple[Tensors, Tensor | None]:
        """Returns the result of `run` for tensors whose layout is known."""
        hidden = self.run_blocks(segment.first, segment.end, values, layout)
        if not self.has_exit(segment):
            return hidden, None
        return hidden, self.exit_outputs(segment.end - 1, hidden, layout)

    def has_exit(self, segment: Segment) -> bool:
        """Whether a segment ends at an exit that is evaluated."""
        return segment.ramp is not None or (self.is_last and segment.end == self.num_blocks)

    def exit_head(self, block: int) -> Ramp:
        """The ramp after `block`, or the full model's head after the last one."""
        head = self.head if block == self.num_blocks - 1 else self.ramps[str(block)]
        assert isinstance(head, Ramp)
        return head

    def exit_outputs(self, block: int, hidden: Tensors, layout: Layout) -> Tensor:
        """Returns temperature-scaled outputs of the exit after `block`, float32 (B, C), from the first tensor."""
        return self.outputs_of(block, self.exit_head(block).gather(hidden[0], layout))

    # The following four let a policy decide before an exit's outputs are computed.

    def gathered(self, ramp: int, tensors: Tensors, lengths_B: Lengths) -> Tensor:
        """Returns what the ramp's head looks at, (B, ...), from what crosses before or after its block."""
        return self.exit_head(ramp).gather(tensors[0], self.layout(lengths_B))

    def outputs_of(self, exit_block: int, gathered: Tensor) -> Tensor:
        """Returns the exit's outputs as `run` gives them, (B, *output_shape)."""
        outputs_BC: Tensor = self.exit_head(exit_block).classify(gathered)
        return outputs_BC.float() / self.temperatures_E[exit_block]

    def before_head(self, exit_block: int, gathered: Tensor) -> Tensor | None:
        """Returns what the shared head looks at, (B, D); None for an exit with a head of its own."""
        head = self.exit_head(exit_block)
        if head is self.head:
            return gathered
        return head.prepared(gathered) if isinstance(head, NormedRamp) else None

    def outputs_together(self, rows: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """Returns the outputs of exits that share a head, by their blocks and what it looks at; one computation."""
        outputs_KC: Tensor = self.head.classify(torch.cat([each for _, each in rows]))
        parts = torch.split(outputs_KC, [len(each) for _, each in rows])
        return [part.float() / self.temperatures_E[block] for part, (block, _) in zip(parts, rows, strict=True)]

    @property
    def tied(self) -> Mapping[str, str]:
        """Names of weights that equal others and are kept once, in memory and in the file."""
        tied = self.backbone.vocabulary is not None and isinstance(self.head, VocabularyHead)
        return {"head.classifier.weight": f"backbone.{self.backbone.vocabulary}"} if tied else {}

    def tie(self) -> None:
        """Share the head's weights with the embedding where they are tied, and the head with ramps."""
        for name, other in self.tied.items():
            module, _, last = name.rpartition(".")
            setattr(self.get_submodule(module), last, self.get_parameter(other))
        for ramp in self.ramps.values():
            if isinstance(ramp, NormedRamp) and isinstance(self.head, VocabularyHead):
                ramp.share(self.head)

    def run_blocks(self, first: int, end: int, values: Tensors, layout: Layout) -> Tensors:
        """Blocks first to end - 1 on what crosses before the first of them (the model's inputs if that is 0)."""
        if not first:
            num_inputs = len(self.backbone.inputs)
            # Codecs give float32. What came beside the inputs crosses as it is.
            inputs = tuple(each.to(self.dtype) if each.is_floating_point() else each for each in values[:num_inputs])
            values = (*self.backbone.embed(inputs, layout), *values[num_inputs:])
        return self.backbone.run_blocks(first, end, values, layout)


def bridge_of(backbone: Backbone, block: int) -> nn.Module:
    """Returns the bridge behind a block; raises ModelFolderError for a family without bridges."""
    bridge = backbone.bridge(block)
    if bridge is None:
        raise ModelFolderError(
            f"{type(backbone).__name__} has no bridges: its blocks all give the same shape, or do not say which "
            "of them begin a region; take the ramp style of the full model's head"
        )
    return bridge


def init_bridges(model: EarlyExitModel) -> None:
    """Give every ramp with a bridge the weights of the backbone's blocks and of the full model's head."""
    for block in model.ramp_indices:
        ramp = model.exit_head(block)
        if isinstance(ramp, BridgeRamp):
            ramp.transfer(bridge_of(model.backbone, block), model.head)
