"""A network with exits: a chain of blocks, a ramp after any of them but the last, and the full model's head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from earlyexit.cut import Cut, SegmentRunner
from earlyexit.errors import PlanError
from earlyexit.families.base import Backbone
from earlyexit.layout import Layout
from earlyexit.piece import Piece
from earlyexit.policies import ExitPolicy
from earlyexit.ramps import Pooling, Ramp, RampStyle
from earlyexit.wire import WirePiece


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a model is, apart from its weights."""

    name: str
    family: str
    label_names: tuple[str, ...]
    ramp_style: RampStyle
    pooling: Pooling
    head_style: RampStyle
    """The full model's head: the ramps' style, or the one that a fine-tuned checkpoint brought."""
    head_pooling: Pooling
    max_length: int
    """The longest input served, in tokens, special tokens included."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Where the weights came from and how the ramps were trained."""


class EarlyExitModel(nn.Module):
    """Blocks, ramps and head, in inference or training."""

    def __init__(self, info: ModelInfo, backbone: Backbone, ramps: Mapping[int, Ramp], head: Ramp) -> None:
        super().__init__()
        self.info = info
        self.backbone = backbone
        self.ramps = nn.ModuleDict({str(index): ramp for index, ramp in ramps.items()})
        self.head = head
        self.register_buffer("temperatures_E", torch.ones(backbone.num_blocks))
        self.temperatures_E: Tensor
        """Divides the logits of the exit after block k; 1 until calibrated."""

    @property
    def num_blocks(self) -> int:
        return self.backbone.num_blocks

    @property
    def num_classes(self) -> int:
        return len(self.info.label_names)

    @property
    def ramp_indices(self) -> tuple[int, ...]:
        """The blocks that have a ramp, ascending."""
        return tuple(sorted(int(index) for index in self.ramps))

    @property
    def device(self) -> torch.device:
        return self.temperatures_E.device

    @property
    def dtype(self) -> torch.dtype:
        """The hidden state's dtype."""
        return next(self.backbone.parameters()).dtype

    def exit_head(self, block: int) -> Ramp:
        """The ramp after `block`, or the full model's head after the last one."""
        head = self.head if block == self.num_blocks - 1 else self.ramps[str(block)]
        assert isinstance(head, Ramp)
        return head

    def exit_logits(self, block: int, hidden_ND: Tensor, layout: Layout) -> Tensor:
        """Temperature-scaled logits of the exit after `block`, float32 (B, C)."""
        logits_BC: Tensor = self.exit_head(block)(hidden_ND, layout)
        return logits_BC.float() / self.temperatures_E[block]

    def run_blocks(self, first: int, end: int, values: Tensor, layout: Layout) -> Tensor:
        """Blocks first to end - 1 on a packed hidden state (token ids if first is 0), to (N, D)."""
        hidden_ND = self.backbone.embed(values, layout) if first == 0 else values
        for index in range(first, end):
            hidden_ND = self.backbone.run_block(index, hidden_ND, layout)
        return hidden_ND

    def cut(
        self,
        first: int,
        end: int,
        ramps: tuple[int, ...],
        policy: ExitPolicy,
        segments: SegmentRunner | None = None,
    ) -> Cut:
        """A runnable piece of the model: blocks first to end - 1, with the given ramps active.

        `segments` computes it; None for the model's own modules.

        Raises PlanError for blocks or ramps that the model does not have.
        """
        if not 0 <= first < end <= self.num_blocks:
            raise PlanError(
                f"blocks {first} to {end - 1} are not in the model, whose blocks are 0 to {self.num_blocks - 1}"
            )
        unknown = sorted(set(ramps) - set(self.ramp_indices))
        if unknown:
            raise PlanError(f"the model has no ramps {unknown}; its ramps are {list(self.ramp_indices)}")
        policy.check_ramps(ramps)
        return Cut(self, first, end, ramps, policy, segments)

    def from_wire(self, wire: WirePiece, policy: ExitPolicy) -> Piece:
        """A piece on this model's device; before block 0 with the policy's initial state."""
        values = torch.from_numpy(np.require(wire.values, requirements="W"))
        if values.dtype == torch.uint16:
            values = values.view(torch.bfloat16)
        if wire.state_BS is None:
            state_BS = policy.initial_state(len(wire.sample_ids), self.num_classes, self.device)
        else:
            state_BS = torch.from_numpy(np.require(wire.state_BS, requirements="W")).to(self.device)
        return Piece(
            sample_ids=wire.sample_ids,
            next_block=wire.next_block,
            lengths_B=wire.lengths_B,
            values=values.to(self.device),
            state_BS=state_BS,
        )
