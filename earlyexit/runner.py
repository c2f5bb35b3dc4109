"""What computes a device's batches with a model's own blocks and ramps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from earlyexit.cut import Cut, PreparedSegments, SegmentRunner, TorchSegments
from earlyexit.engine import Batch
from earlyexit.model import EarlyExitModel
from earlyexit.piece import Piece, fuse
from earlyexit.policies import ExitPolicy
from earlyexit.release import Step
from earlyexit.split import Segment, Split
from earlyexit.wire import WirePiece

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 16
"""Length of the inputs of nothing: that of a short text."""


class TorchRunner:
    """A `Runner` of pieces: any split of the model, under one exit policy at a time.

    Inputs may come from plans that this one replaced. An active ramp that the policy has no threshold for lets nobody
    leave, and the state that another policy gave an input begins anew.
    """

    def __init__(self, model: EarlyExitModel, policy: ExitPolicy, segments: SegmentRunner | None = None) -> None:
        """`segments` computes what is not a probe, where it needs preparation as soon as it is; None for torch."""
        self._model = model
        self._slow = segments if isinstance(segments, PreparedSegments) else None
        self._segments = segments if self._slow is None else _OnceReady(TorchSegments(model), self._slow)
        self._regime = _Regime(policy)

    def from_wire(self, wire: WirePiece) -> Piece:
        return self._model.from_wire(wire, self._regime.policy)

    def run(self, batch: Batch[Piece]) -> Iterator[Step[Piece]]:
        regime = self._regime  # a batch is decided by one policy, even if another comes while it runs
        pieces = [self._in_state(member.payload, regime.policy) for member in batch.members]
        return self._cut(regime, batch.split, probe=batch.probe).run(fuse(pieces))

    def follow(self, policy: ExitPolicy) -> None:
        self._regime = _Regime(policy)

    def prepare(self, splits: Sequence[Split]) -> None:
        if self._slow is not None:
            self._slow.prepare({segment for split in splits for segment in split.segments()})

    def warm_up_pieces(self, split: Split, size: int) -> Piece:
        model, policy = self._model, self._regime.policy
        length = min(WARM_UP_TOKENS, model.info.max_length)
        if split.first == 0:
            values: npt.NDArray[np.generic] = np.zeros(size * length, dtype=np.int32)
        else:
            dtype = np.uint16 if model.dtype == torch.bfloat16 else np.float32
            values = np.zeros((size * length, model.backbone.hidden_size), dtype=dtype)
        wire = WirePiece(
            sample_ids=policy.warm_up_ids(size),
            next_block=split.first,
            lengths_B=np.full(size, length, dtype=np.int32),
            values=values,
            state_BS=None,
        )
        return model.from_wire(wire, policy)

    def _cut(self, regime: _Regime, split: Split, *, probe: bool) -> Cut:
        """The split's; raises PlanError for blocks or ramps that the model does not have."""
        if (split, probe) not in regime.cuts:
            ramps = tuple(ramp for ramp in split.ramps if regime.policy.can_decide(ramp))
            cut = self._model.cut(split.first, split.end, ramps, regime.policy, self._segments)
            # With nothing to record, a probe is run as any other input.
            looks = probe and any(map(regime.policy.can_look, self._model.ramp_indices))
            regime.cuts[split, probe] = cut.for_probes() if looks else cut
        return regime.cuts[split, probe]

    def _in_state(self, piece: Piece, policy: ExitPolicy) -> Piece:
        width = policy.state_width(self._model.num_classes)
        if piece.state_BS.shape[1] == width and (width == 0 or piece.state_BS.dtype == policy.state_dtype):
            return piece
        return replace(piece, state_BS=policy.initial_state(len(piece), self._model.num_classes, self._model.device))


@dataclass(frozen=True, slots=True)
class _Regime:
    """A policy and the cuts that decide by it: one object, since it is replaced while the device runs."""

    policy: ExitPolicy
    cuts: dict[tuple[Split, bool], Cut] = field(default_factory=dict)
    """By split, and whether it is for probes."""


class _OnceReady:
    """Segments by another runner, as soon as it is ready for them; until then by torch."""

    def __init__(self, torch_segments: TorchSegments, segments: PreparedSegments) -> None:
        self._torch = torch_segments
        self._segments = segments

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensor, Tensor | None]:
        if self._segments.is_ready(segment):
            return self._segments.run(segment, piece)
        logger.debug("blocks %d to %d are not prepared: torch runs them", segment.first, segment.end - 1)
        return self._torch.run(segment, piece)
