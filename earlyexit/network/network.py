"""The contract of a network: a chain of blocks that can be cut between any two of them and left at its ramps.

The code above it does not know what a block is, or what crosses between two blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from earlyexit.errors import ModelFolderError
from earlyexit.network.boundary import Boundary, Budget, Encoded, Lengths, Segment, TensorSpec, WirePiece, misfit
from earlyexit.network.piece import Piece, Tensors, to_device
from earlyexit.policies.base import ExitPolicy
from earlyexit.tasks.base import Task


class SegmentRunner(Protocol):
    """Computes segments of a network: its own modules, ONNX Runtime, CUDA graphs."""

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        """Returns what crosses after the segment, and the outputs (B, *output_shape) of the exit at its end, if any.

        If the piece carries `importance` as its last tensor, so does the result, with the segment's share added.
        """
        ...


@runtime_checkable
class PreparedSegments(SegmentRunner, Protocol):
    """Segments that take seconds of preparation each."""

    def is_ready(self, segment: Segment) -> bool:
        """Whether `run` computes it at once."""
        ...

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        """Prepare segments for batches within their budgets, while other segments run.

        Segments that are neither among these nor among those of the last call may be given up.
        """
        ...


class Network(SegmentRunner, Protocol):
    """Blocks 0 to `num_blocks` - 1, a ramp after some of them, and the full model's exit after the last.

    In a chain of several networks (`ChainNetwork`), no segment and no cut runs over the end of one.

    An input's values may depend on its own rows only, never on its batch-mates.
    """

    @property
    def num_blocks(self) -> int: ...
    @property
    def ramp_indices(self) -> tuple[int, ...]:
        """The blocks that have a ramp, ascending."""
        ...

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
    return Piece(
        sample_ids=wire.sample_ids,
        next_block=wire.next_block,
        lengths_B=wire.lengths_B,
        tensors=tuple(_arrived(values, network) for values in wire.tensors),
        state_BS=state_BS,
    )


def check_inputs(network: Network, encoded: Encoded) -> None:
    """Raise ModelFolderError where a codec's output is not what the network takes."""
    said = misfit(network.takes(0), encoded)
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


def _arrived(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], network: Network) -> Tensor:
    values = to_device(_tensor(array), network.device)  # first: half as many bytes go to the device
    return values.to(network.dtype) if values.dtype == torch.float16 else values


def _tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    """Returns a tensor over writable memory; the bits of bfloat16 travel as uint16."""
    tensor = torch.from_numpy(np.require(array, requirements="W"))
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
