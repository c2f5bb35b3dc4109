"""Tabi's dispatch rule as an exit policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from earlyexit.policies.base import ExitPolicy, Opinion, Verdict
from earlyexit.policies.reroute import check_rule, reroutes


class TabiPolicy(ExitPolicy):
    """Inputs go on up to confidence c, and above it by a coin whose probability falls with confidence (equation 4).

    It is meant for the ends of networks. An inner ramp is judged alike, by a coin of its own. It has no guarantee.
    """

    name = "tabi"
    labels_only = True

    def __init__(self, c: float, k: float) -> None:
        """Raises PlanError for a c outside 0 to 1, and for a negative or infinite k."""
        check_rule(c, k)
        self.c = c
        self.k = k

    def can_look(self, ramp: int) -> bool:
        return True

    def decide(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> Verdict:
        goes_on_B = reroutes(opinion.score_B.numpy(), sample_ids, ramp, self.c, self.k)
        return opinion.verdict(torch.from_numpy(~goes_on_B), state_BS)

    def look(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Returns the calibrated confidence and the answers."""
        return opinion.score_B, opinion.value_B
