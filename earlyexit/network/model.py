"""Networks that can be cut between any two blocks: one of torch modules, or a chain of several.

A network has blocks 0 to `num_blocks` - 1, a ramp after some of them, and the full model's exit after the last. Users
of a network need not know how blocks work, or which tensors pass between them. The values of an input never depend on
the other inputs of its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from earlyexit.engine.queue import Attention
from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Backbone
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Boundary, Budget, Encoded, Lengths, Segment, TensorSpec, WirePiece, mismatch
from earlyexit.network.chain import Chain, join_chains
from earlyexit.network.piece import Layout, Piece, Tensors, halved, to_device
from earlyexit.policies.base import ExitPolicy
from earlyexit.ramps import RampStyle
from earlyexit.ramps.heads import BridgeRamp, NormedRamp, Ramp, VocabularyHead
from earlyexit.ramps.pooling import Pooling
from earlyexit.tasks.base import Task


class SegmentRunner(Protocol):
    """Computes segments of a network: with its torch modules, with ONNX Runtime, or as CUDA graphs."""

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        """Returns the hidden state after the segment, and the outputs (B, *output_shape) of the exit at its end.

        If the last tensor of the piece is `importance`, the result has it too, with the segment's attention added.
        """
        ...

    def is_ready(self, segment: Segment) -> bool:
        """Whether `run` computes the segment without seconds of preparation. By default it does."""
        return True

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        """Prepares segments for batches within their budgets, while other segments run. By default does nothing.

        Segments that are neither in this call nor in the last one may be released.
        """
        return


def from_wire(network: Network, wire: WirePiece, policy: ExitPolicy) -> Piece:
    """Returns the piece on the network's device. Without a state it gets the policy's initial state.

    Hidden states in float16 are converted to the network's dtype.
    """
    if wire.state_BS is not None:
        state_BS = to_device(_tensor(wire.state_BS), network.device)
    elif policy.uses_positions:
        from earlyexit.sequences.kv import places_of  # imports tokenizers, which classifiers do not need

        state_BS = to_device(_tensor(places_of(wire)[:, None]), network.device)
    else:
        state_BS = policy.initial_state(len(wire.sample_ids), network.task.num_outputs, network.device)
    tensors = [to_device(_tensor(values), network.device) for values in wire.tensors]
    return Piece(
        sample_ids=wire.sample_ids,
        next_block=wire.next_block,
        lengths_B=wire.lengths_B,
        tensors=tuple(each.to(network.dtype) if each.dtype == torch.float16 else each for each in tensors),
        state_BS=state_BS,
    )


def check_inputs(network: Network, encoded: Encoded) -> None:
    """Raises ModelFolderError if a codec's output does not fit the network's inputs."""
    reason = mismatch(network.takes(0), encoded)
    if reason is not None:
        raise ModelFolderError(reason)


def arbitrary_tensors(network: Network, block: int, lengths_B: Lengths, rng: np.random.Generator) -> Tensors:
    """Returns random tensors for the boundary before `block`, for inputs of these lengths, on the network's device."""
    return tuple(_arbitrary(each, lengths_B, rng, network) for each in network.takes(block))


def _arbitrary(spec: TensorSpec, lengths_B: Lengths, rng: np.random.Generator, network: Network) -> Tensor:
    rows = int(lengths_B.sum()) if spec.per_token else len(lengths_B)
    if spec.dtype == "float":
        values = rng.standard_normal((rows, *spec.shape), dtype=np.float32)
        return torch.from_numpy(values).to(network.device, network.dtype)
    below = spec.below or 1 + np.iinfo(spec.dtype).max
    integers = rng.integers(0, below, size=(rows, *spec.shape), dtype=np.dtype(spec.dtype))
    return torch.from_numpy(integers).to(network.device)


def _tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    """Returns a tensor on the array's memory, or on a copy if it is read-only. uint16 holds the bits of bfloat16."""
    tensor = torch.from_numpy(np.require(array, requirements="W"))
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The description of a model, without its weights."""

    name: str
    family: str
    codec: NamedSpec
    """How its inputs are encoded: see `earlyexit.codecs`."""
    task: Task
    ramp_style: RampStyle
    pooling: Pooling
    head_style: RampStyle
    """The style of the full model's head. A head from a checkpoint has its own style."""
    head_pooling: Pooling
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """The origin of the weights, and how the ramps were trained."""


class EarlyExitModel(nn.Module):
    """A backbone's blocks, ramps after any of them but the last, and a head. It is also the module that is trained."""

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
        """The divisor of the outputs of the exit after each block; 1 until it is calibrated."""
        self.attention: Attention = "auto"
        """How attention is computed for packed inputs."""
        self.is_last = True
        """False if another network of a chain follows. The end of this network is then a ramp."""

    @property
    def members(self) -> tuple[EarlyExitModel, ...]:
        """The networks of the chain that consists of this network alone. Only such a network can keep sequences."""
        return (self,)

    @property
    def chain(self) -> Chain:
        """The chain that consists of this network alone."""
        return Chain(names=(self.info.name,), lengths=(self.num_blocks,), ramps=self.ramp_indices)

    @property
    def task(self) -> Task:
        return self.info.task

    @property
    def max_length(self) -> int:
        """The longest input that its codec accepts, in tokens."""
        return int(self.info.codec.get("max_length", self.backbone.max_length))

    @property
    def device(self) -> torch.device:
        return self.temperatures_E.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.backbone.float32_only else next(self.backbone.parameters()).dtype

    def boundary(self, block: int) -> Boundary:
        """Returns the tensors that pass from a block to the next one; for -1 the inputs of the network."""
        return self.backbone.inputs if block < 0 else self.backbone.boundary(block)

    def takes(self, block: int) -> Boundary:
        """Returns the tensors of a piece before a block. At the start of a chain's network these are encoded inputs."""
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
        """Computes a segment like `run`, for tensors with a known layout."""
        hidden = self.run_blocks(segment.first, segment.end, values, layout)
        if not self.has_exit(segment):
            return hidden, None
        return hidden, self.exit_outputs(segment.end - 1, hidden, layout)

    def has_exit(self, segment: Segment) -> bool:
        """Whether an exit is evaluated at the end of a segment."""
        return segment.ramp is not None or (self.is_last and segment.end == self.num_blocks)

    def exit_head(self, block: int) -> Ramp:
        """Returns the ramp after `block`, or the full model's head after the last block."""
        head = self.head if block == self.num_blocks - 1 else self.ramps[str(block)]
        assert isinstance(head, Ramp)
        return head

    def exit_outputs(self, block: int, hidden: Tensors, layout: Layout) -> Tensor:
        """Returns the outputs of the exit after `block`, divided by its temperature, in float32 (B, C)."""
        return self.outputs_of(block, self.exit_head(block).gather(hidden[0], layout))

    # The next four methods let a policy decide before an exit's outputs are computed.

    def gathered(self, ramp: int, tensors: Tensors, lengths_B: Lengths) -> Tensor:
        """Returns the features (B, ...) that the ramp's head reads, for a hidden state before or after its block."""
        return self.exit_head(ramp).gather(tensors[0], self.layout(lengths_B))

    def outputs_of(self, exit_block: int, gathered: Tensor) -> Tensor:
        """Returns the exit's outputs (B, *output_shape) for the result of `gathered`."""
        outputs_BC: Tensor = self.exit_head(exit_block).classify(gathered)
        return outputs_BC.float() / self.temperatures_E[exit_block]

    def before_head(self, exit_block: int, gathered: Tensor) -> Tensor | None:
        """Returns the inputs (B, D) of the shared head; None for an exit that has its own head."""
        head = self.exit_head(exit_block)
        if head is self.head:
            return gathered
        return head.prepared(gathered) if isinstance(head, NormedRamp) else None

    def outputs_together(self, rows: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """Runs the shared head once for several exits; `rows`: for each exit its block and result of `before_head`."""
        outputs_KC: Tensor = self.head.classify(torch.cat([each for _, each in rows]))
        parts = torch.split(outputs_KC, [len(each) for _, each in rows])
        return [part.float() / self.temperatures_E[block] for part, (block, _) in zip(parts, rows, strict=True)]

    @property
    def tied(self) -> Mapping[str, str]:
        """Names of tied weights, and the weights to which they are tied. Tied weights are stored once."""
        tied = self.backbone.vocabulary is not None and isinstance(self.head, VocabularyHead)
        return {"head.classifier.weight": f"backbone.{self.backbone.vocabulary}"} if tied else {}

    def tie(self) -> None:
        """Shares the embedding's weights with the head if they are tied, and the head with the ramps that use it."""
        for name, other in self.tied.items():
            module, _, last = name.rpartition(".")
            setattr(self.get_submodule(module), last, self.get_parameter(other))
        for ramp in self.ramps.values():
            if isinstance(ramp, NormedRamp) and isinstance(self.head, VocabularyHead):
                ramp.share(self.head)

    def run_blocks(self, first: int, end: int, values: Tensors, layout: Layout) -> Tensors:
        """Runs blocks `first` to `end` - 1 on the hidden state before them; for `first` 0, on the model's inputs."""
        if not first:
            num_inputs = len(self.backbone.inputs)
            # Codecs return float32. Tensors beside the inputs, such as `importance`, are not converted.
            inputs = tuple(each.to(self.dtype) if each.is_floating_point() else each for each in values[:num_inputs])
            values = (*self.backbone.embed(inputs, layout), *values[num_inputs:])
        return self.backbone.run_blocks(first, end, values, layout)


def bridge_of(backbone: Backbone, block: int) -> nn.Module:
    """Returns the bridge after a block. Raises ModelFolderError for a family without bridges."""
    bridge = backbone.bridge(block)
    if bridge is None:
        raise ModelFolderError(
            f"{type(backbone).__name__} has no bridges: its blocks all return the same shape, or do not define which "
            "of them begin a region; use the ramp style of the full model's head"
        )
    return bridge


def init_bridges(model: EarlyExitModel) -> None:
    """Initializes every ramp with a bridge from the backbone's blocks and the full model's head."""
    for block in model.ramp_indices:
        ramp = model.exit_head(block)
        if isinstance(ramp, BridgeRamp):
            ramp.transfer(bridge_of(model.backbone, block), model.head)


class ChainNetwork(SegmentRunner):
    """Several networks, with consecutively numbered blocks and ramps. Each segment and each cut is within one of them.

    The end of every network but the last is a ramp. Its head is computed if that ramp is active or observed. No hidden
    state passes such an end, only `importance` does, in float16. A survivor there returns to the ingress, which encodes
    the original input again for the next network.
    """

    def __init__(self, members: Sequence[EarlyExitModel], runners: Sequence[SegmentRunner] | None = None) -> None:
        """Raises ModelFolderError unless the networks have the same device, float type and task.

        All networks but the last are marked as parts of a chain, whose ends are ramps. `runners`: what computes the
        segments of each network; None for the networks themselves.
        """
        first, last = members[0], members[-1]
        for member in members:
            if member.backbone.kept_bytes:
                raise ModelFolderError(f"{member.info.name} keeps memory of sequences, so it cannot be part of a chain")
            if member.task.spec() != last.task.spec():
                raise ModelFolderError(f"{member.info.name} and {last.info.name} have different tasks: no chain")
            if (member.dtype, member.device) != (first.dtype, first.device):
                raise ModelFolderError(f"{member.info.name} and {first.info.name} differ in float type or device")
            member.is_last = member is last
        self.members = tuple(members)
        self.runners: tuple[SegmentRunner, ...] = tuple(members if runners is None else runners)
        self.chain = join_chains([member.chain for member in members])
        self.num_blocks = self.chain.num_blocks
        self.ramp_indices = self.chain.ramps
        self.task = last.task
        self.max_length = min(member.max_length for member in members)
        """The longest input that all networks accept, in tokens."""
        self.device, self.dtype = first.device, first.dtype

    def boundary(self, block: int) -> Boundary:
        if block in self.chain.end_ramps:
            return ()
        network, local = self.chain.locate(max(0, block))
        return self.members[network].boundary(local if block >= 0 else -1)

    def takes(self, block: int) -> Boundary:
        network, local = self.chain.locate(block)
        return self.members[network].takes(local)

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        network, own = locate(self.chain, segment)
        member, (tensors, outputs_BC) = self.members[network], self.runners[network].run(own, piece)
        if own.end == member.num_blocks and network < len(self.members) - 1:
            tensors = tuple(map(halved, tensors[len(member.boundary(own.end - 1)) :]))
        return tensors, outputs_BC

    def is_ready(self, segment: Segment) -> bool:
        network, own = locate(self.chain, segment)
        return self.runners[network].is_ready(own)

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        located = [(*locate(self.chain, segment), budget) for segment, budget in segments.items()]
        for index, runner in enumerate(self.runners):
            runner.prepare({own: budget for network, own, budget in located if network == index})


Network = EarlyExitModel | ChainNetwork


def locate(chain: Chain, segment: Segment) -> tuple[int, Segment]:
    """Returns the index of a segment's network, and the segment in that network's numbering."""
    network, first = chain.locate(segment.first)
    start = segment.first - first
    assert segment.end - start <= chain.lengths[network], f"{segment} is in two networks"
    ramp = None if segment.ramp is None else segment.ramp - start
    return network, replace(segment, first=first, end=segment.end - start, ramp=ramp)
