"""PABEE: leave when enough ramps in a row agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from earlyexit.errors import PlanError
from earlyexit.policies.base import ExitPolicy, Opinion, Verdict

UNSEEN = -1
"""The last label of an input that has met no ramp yet."""


class PatiencePolicy(ExitPolicy):
    """Leave when `patience` ramps in a row repeated the label of the one before them (PABEE; E3 section 5.6).

    The state is the last label and the number of repetitions.
    """

    name = "patience"
    dependent = True
    labels_only = True

    def __init__(self, patience: int) -> None:
        if patience < 1:
            raise PlanError(f"patience must be at least 1, not {patience}")
        self.patience = patience

    def state_width(self, num_outputs: int) -> int:
        return 2

    def initial_state(self, num_inputs: int, num_outputs: int, device: torch.device) -> Tensor:
        return torch.tensor([[UNSEEN, 0]], dtype=self.state_dtype, device=device).repeat(num_inputs, 1)

    def decide(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> Verdict:
        label_B = opinion.value_B
        repeated_B = label_B == state_BS[:, 0]
        count_B = torch.where(repeated_B, state_BS[:, 1] + 1, 0)
        state = torch.stack([label_B, count_B], dim=1).to(self.state_dtype)
        return Verdict(leave_B=count_B >= self.patience, value_B=label_B, score_B=opinion.score_B, state_BS=state)
