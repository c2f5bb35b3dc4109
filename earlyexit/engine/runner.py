"""The runner that computes a device's batches with a network's blocks and ramps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from earlyexit.engine.device import warm_up_length
from earlyexit.engine.engine import Batch
from earlyexit.engine.release import Step
from earlyexit.network.boundary import Segment, Split, WirePiece
from earlyexit.network.cut import Cut, cut_out
from earlyexit.network.network import Network, PreparedSegments, SegmentRunner, arbitrary_tensors, from_wire
from earlyexit.network.piece import Piece, Tensors, fuse
from earlyexit.policies.base import ExitPolicy
from earlyexit.sequences.memory import Memory

logger = logging.getLogger(__name__)


class TorchRunner:
    """A `Runner` of pieces: any split of the model, under one exit policy at a time.

    Inputs may come from replaced plans. No input leaves at an active ramp for which the policy has no threshold, and an
    input with another policy's state gets the initial state.
    """

    def __init__(
        self,
        network: Network,
        policy: ExitPolicy,
        segments: SegmentRunner | None = None,
        memory: Memory[Piece] | None = None,
    ) -> None:
        """`segments` computes all inputs but probes, once it is prepared; None for the network itself.

        `memory`: what the network keeps of sequences.
        """
        self.memory = memory
        self._network = network
        self._slow = segments if isinstance(segments, PreparedSegments) else None
        self._segments = segments if self._slow is None else _OnceReady(network, self._slow)
        self._regime = _Regime(policy)

    def from_wire(self, wire: WirePiece) -> Piece:
        return from_wire(self._network, wire, self._regime.policy)

    def run(self, batch: Batch[Piece]) -> Iterator[Step[Piece]]:
        regime = self._regime  # one policy decides a batch, even if another comes while it runs
        pieces = [self._in_state(member.payload, regime.policy) for member in batch.members]
        return self._cut(regime, batch.split, probe=batch.probe).run(fuse(pieces))

    def follow(self, policy: ExitPolicy) -> None:
        self._regime = _Regime(policy)

    def prepare(self, splits: Sequence[Split]) -> None:
        if self._slow is not None:
            self._slow.prepare({segment: split.budget for split in splits for segment in split.segments()})

    def warm_up_pieces(self, split: Split, size: int) -> Piece:
        network, policy = self._network, self._regime.policy
        lengths_B = np.full(size, min(warm_up_length(split, size), network.max_length), dtype=np.int32)
        return Piece(
            sample_ids=policy.warm_up_ids(size),
            next_block=split.first,
            lengths_B=lengths_B,
            tensors=arbitrary_tensors(network, split.first, lengths_B, np.random.default_rng(0)),
            state_BS=policy.initial_state(size, network.task.num_outputs, network.device),
        )

    def _cut(self, regime: _Regime, split: Split, *, probe: bool) -> Cut:
        """Returns the split's cut; raises PlanError for blocks or ramps that the model does not have."""
        if (split, probe) not in regime.cuts:
            ramps = tuple(ramp for ramp in split.ramps if regime.policy.can_decide(ramp))
            cut = cut_out(self._network, split.first, split.end, ramps, regime.policy, self._segments)
            # A probe that no ramp can look at runs as any other input.
            if probe and any(map(regime.policy.can_look, self._network.ramp_indices)):
                cut = cut.for_probes()
            elif split.stays:
                cut = cut.staying()
            regime.cuts[split, probe] = cut
        return regime.cuts[split, probe]

    def _in_state(self, piece: Piece, policy: ExitPolicy) -> Piece:
        num_outputs, device = self._network.task.num_outputs, self._network.device
        width = policy.state_width(num_outputs)
        if piece.state_BS.shape[1] == width and (width == 0 or piece.state_BS.dtype == policy.state_dtype):
            return piece
        return replace(piece, state_BS=policy.initial_state(len(piece), num_outputs, device))


@dataclass(frozen=True, slots=True)
class _Regime:
    """A policy and the cuts that decide by it: one object, because it is replaced while the device runs."""

    policy: ExitPolicy
    cuts: dict[tuple[Split, bool], Cut] = field(default_factory=dict)
    """By split and whether the cut is for probes."""


class _OnceReady:
    """Runs segments by another runner as soon as it is ready for them; until then by the network itself."""

    def __init__(self, network: Network, segments: PreparedSegments) -> None:
        self._network = network
        self._segments = segments

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        if self._segments.is_ready(segment):
            return self._segments.run(segment, piece)
        logger.debug("blocks %d to %d are not prepared: the network itself runs them", segment.first, segment.end - 1)
        return self._network.run(segment, piece)
