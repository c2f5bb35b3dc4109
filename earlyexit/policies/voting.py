"""Voting: leave when enough ramps agree, in a row or not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from earlyexit.errors import PlanError
from earlyexit.policies.base import ExitPolicy, Verdict, predict


class VotingPolicy(ExitPolicy):
    """Leave when `votes` of the ramps so far gave the same label (E3 section 6, voting-based criterion).

    The state is the number of votes for every class.
    """

    name = "voting"
    dependent = True

    def __init__(self, votes: int) -> None:
        if votes < 1:
            raise PlanError(f"votes must be at least 1, not {votes}")
        self.votes = votes

    def state_width(self, num_classes: int) -> int:
        return num_classes

    def decide(self, ramp: int, logits_BC: Tensor, state_BS: Tensor, sample_ids: Sequence[str]) -> Verdict:
        label_B, score_B = predict(logits_BC)
        one_B1 = torch.ones_like(label_B[:, None], dtype=self.state_dtype)
        votes_BC = state_BS.scatter_add(1, label_B[:, None], one_B1)
        leave_B = votes_BC.gather(1, label_B[:, None])[:, 0] >= self.votes
        return Verdict(leave_B=leave_B, label_B=label_B, score_B=score_B, state_BS=votes_BC)
