"""Policies for labels: two that count equal labels, and Tabi's randomized rule (EuroSys'23, equation 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from earlyexit.errors import PlanError
from earlyexit.policies.base import Decision, ExitOutput, ExitPolicy
from earlyexit.policies.reroute import check_rule, coin, reroute_probability

NO_LABEL = -1
"""Stands for the last label of an input before its first ramp."""


class PatiencePolicy(ExitPolicy):
    """Inputs leave after `patience` ramps in a row repeated the previous ramp's label (PABEE; E3 section 5.6).

    The state is the last label and the number of repetitions.
    """

    name = "patience"
    labels_only = True

    def __init__(self, patience: int) -> None:
        if patience < 1:
            raise PlanError(f"patience must be at least 1, not {patience}")
        self.patience = patience

    def state_width(self, num_outputs: int) -> int:
        return 2

    def initial_state(self, num_inputs: int, num_outputs: int, device: torch.device) -> Tensor:
        return torch.tensor([[NO_LABEL, 0]], dtype=self.state_dtype, device=device).repeat(num_inputs, 1)

    def decide(self, ramp: int, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]) -> Decision:
        label_B = output.value_B
        repeated_B = label_B == state_BS[:, 0]
        count_B = torch.where(repeated_B, state_BS[:, 1] + 1, 0)
        state = torch.stack([label_B, count_B], dim=1).to(self.state_dtype)
        return output.decision(count_B >= self.patience, state)


class VotingPolicy(ExitPolicy):
    """Inputs leave when `votes` ramps so far, not necessarily in a row, gave the same label (E3 section 6).

    The state is the number of votes for every label.
    """

    name = "voting"
    labels_only = True
    state_dtype = torch.int16  # not patience's: after a change of plan, its state of two labels is not taken for votes

    def __init__(self, votes: int) -> None:
        if votes < 1:
            raise PlanError(f"votes must be at least 1, not {votes}")
        self.votes = votes

    def state_width(self, num_outputs: int) -> int:
        return num_outputs

    def decide(self, ramp: int, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]) -> Decision:
        label_B = output.value_B
        one_B1 = torch.ones_like(label_B[:, None], dtype=self.state_dtype)
        votes_BC = state_BS.scatter_add(1, label_B[:, None], one_B1)
        leave_B = votes_BC.gather(1, label_B[:, None])[:, 0] >= self.votes
        return output.decision(leave_B, votes_BC)


class TabiPolicy(ExitPolicy):
    """Inputs continue if confidence is at most c, and else with a probability that falls with confidence (equation 4).

    The rule is meant for the last ramps of a chain's networks, but works at any ramp. It does not bound the loss.
    """

    name = "tabi"
    labels_only = True

    def __init__(self, c: float, k: float) -> None:
        """Raises PlanError if c is outside 0 to 1, or k is negative or infinite."""
        check_rule(c, k)
        self.c = c
        self.k = k

    def can_observe(self, ramp: int) -> bool:
        return True

    def decide(self, ramp: int, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]) -> Decision:
        probability_B = reroute_probability(output.score_B.numpy(), self.c, self.k)
        leave_B = np.array([coin(sample_id, ramp) for sample_id in sample_ids]) >= probability_B
        return output.decision(torch.from_numpy(leave_B), state_BS)
