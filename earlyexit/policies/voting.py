"""Voting: leave when enough ramps agree, in a row or not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from earlyexit.errors import PlanError
from earlyexit.policies.base import ExitPolicy, Opinion, Verdict


class VotingPolicy(ExitPolicy):
    """Leave when `votes` of the ramps so far gave the same label (E3 section 6, voting-based criterion).

    The state is the number of votes for every class.
    """

    name = "voting"
    dependent = True
    labels_only = True

    def __init__(self, votes: int) -> None:
        if votes < 1:
            raise PlanError(f"votes must be at least 1, not {votes}")
        self.votes = votes

    def state_width(self, num_outputs: int) -> int:
        return num_outputs

    def decide(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> Verdict:
        label_B = opinion.value_B
        one_B1 = torch.ones_like(label_B[:, None], dtype=self.state_dtype)
        votes_BC = state_BS.scatter_add(1, label_B[:, None], one_B1)
        leave_B = votes_BC.gather(1, label_B[:, None])[:, 0] >= self.votes
        return Verdict(leave_B=leave_B, value_B=label_B, score_B=opinion.score_B, state_BS=votes_BC)
