"""Independent policies, which compare one score with one threshold.

Two of them are CALM's (Schuster et al. 2022, section 3.4) and decide before an exit's outputs are computed. The output
layer of a large vocabulary costs as much as several blocks, so it is computed only for inputs that leave.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from earlyexit.errors import PlanError
from earlyexit.network.piece import to_host
from earlyexit.policies.base import Decision, ExitOutput, ExitPolicy
from earlyexit.tasks.base import Task
from earlyexit.tasks.token import TokenTask

ADDED = 0.1
"""CALM's constant: how much the threshold of an answer's first token is raised."""


class ThresholdPolicy(ExitPolicy):
    """Base of policies under which an input leaves if its score passes the ramp's threshold."""

    larger_is_surer: ClassVar[bool] = True

    def __init__(self, thresholds: float | Mapping[int, float], *, decay: float | None = None) -> None:
        """`thresholds`: one for all ramps, or one per ramp. `decay`: see `decayed`; None for constant thresholds."""
        self.thresholds = thresholds
        self.decay = decay
        self.uses_positions = decay is not None

    @abstractmethod
    def score(self, ramp: int, output: ExitOutput) -> Tensor:
        """Returns the ramp's scores, (B,), in the policy's own unit; in host memory."""

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        if self.decay is not None and not isinstance(task, TokenTask):
            raise PlanError(f"decay: thresholds decay along the tokens of an answer; task {task.name!r} has no tokens")

    def check_ramps(self, ramps: Sequence[int]) -> None:
        check_numbers(self.thresholds, ramps, "threshold")

    def can_decide(self, ramp: int) -> bool:
        return not isinstance(self.thresholds, Mapping) or ramp in self.thresholds

    def can_observe(self, ramp: int) -> bool:
        return True

    def observe(
        self, ramp: int, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]
    ) -> tuple[Tensor, Tensor]:
        return self._at_places(self.score(ramp, output), state_BS), output.value_B

    def is_sure(self, ramp: int, score_B: Tensor) -> Tensor:
        """Returns whether each score passes the ramp's threshold, bool (B,)."""
        threshold = of_ramp(self.thresholds, ramp)
        return score_B >= threshold if self.larger_is_surer else score_B <= threshold

    def decide(self, ramp: int, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]) -> Decision:
        score_B = self._at_places(self.score(ramp, output), state_BS)
        return output.decision(self.is_sure(ramp, score_B), state_BS)

    def _at_places(self, score_B: Tensor, state_BS: Tensor) -> Tensor:
        return score_B if self.decay is None else decayed(score_B, state_BS[:, 0], self.decay)


def decayed(score_B: Tensor, place_B: Tensor, decay: float) -> Tensor:
    """Returns scores (B,) that pass a constant threshold if the raw scores pass CALM's threshold for their position.

    CALM's threshold for token t of at most N is `(1 - ADDED) l + ADDED exp(-tau t / N)`, with l in [0, 1] (Schuster et
    al. 2022, equation 5). It is stricter for the first tokens, on which all others depend. `decay` is N / tau, the
    number of tokens after which the extra part has fallen to 1/e. It does not depend on the length of an answer. The
    returned score is the equation solved for l, at most 1, so that thresholds stay one number per ramp.
    """
    added_B = ADDED * torch.exp(place_B / -decay)
    return ((score_B - added_B) / (1 - ADDED)).clamp(max=1)


def of_ramp(numbers: float | Mapping[int, float], ramp: int) -> float:
    """Returns the number of a ramp; `numbers` has one per ramp, or is one number for all ramps."""
    return numbers[ramp] if isinstance(numbers, Mapping) else numbers


def check_numbers(numbers: float | Mapping[int, float], ramps: Sequence[int], name: str) -> None:
    """Raises PlanError if there is one number per ramp, and an active ramp has none."""
    if isinstance(numbers, Mapping) and (missing := [ramp for ramp in ramps if ramp not in numbers]):
        raise PlanError(f"active ramps {missing} have no {name}; {name}s name {sorted(numbers)}")


class EntropyPolicy(ThresholdPolicy):
    """Inputs leave if the entropy of the prediction, in nats, is at most the threshold.

    This is DeeBERT's rule and E3's default, with 0.4 in most of E3 section 5.
    """

    name = "entropy"
    larger_is_surer = False
    labels_only = True

    def score(self, ramp: int, output: ExitOutput) -> Tensor:
        lowest = torch.finfo(torch.float32).min  # instead of -inf, whose product with a probability of 0 is NaN
        log_probability_BC = output.outputs_BC.log_softmax(-1).clamp_min_(lowest)
        return log_probability_BC.exp().mul_(log_probability_BC).sum(-1).neg_()


class ConfidencePolicy(ThresholdPolicy):
    """Inputs leave if the exit's score is high enough. For labels, it is the probability of the most probable label."""

    name = "confidence"

    def score(self, ramp: int, output: ExitOutput) -> Tensor:
        return output.score_B


class ForeseenPolicy(ConfidencePolicy):
    """Inputs leave if the ramp's classifier predicts agreement with the full model with enough probability."""

    name = "foreseen"
    foresees = "classifier"


class SimilarPolicy(ConfidencePolicy):
    """Inputs leave if the block before the ramp hardly changed the hidden state (CALM's hidden-state saturation)."""

    name = "similar"
    foresees = "states"

    def check_ramps(self, ramps: Sequence[int]) -> None:
        super().check_ramps(ramps)
        if 0 in ramps:
            raise PlanError("exit policy 'similar' compares the states of two blocks; the ramp after block 0 has one")

    def can_observe(self, ramp: int) -> bool:
        return ramp > 0


class SharePolicy(ThresholdPolicy):
    """Inputs leave if enough of the exit's principal values are above a confidence: PAME's rule (section 5.3).

    PAME's threshold is a count. This one is a share, so that scores are comparable to those of other policies.
    """

    name = "share"

    def __init__(self, thresholds: float | Mapping[int, float], confidences: float | Mapping[int, float]) -> None:
        """Each argument is one number for all ramps, or one number per ramp."""
        super().__init__(thresholds)
        self.confidences = confidences

    def check_ramps(self, ramps: Sequence[int]) -> None:
        super().check_ramps(ramps)
        check_numbers(self.confidences, ramps, "confidence")

    def check_task(self, task: Task) -> None:
        if not task.num_principal_values:
            raise PlanError(f"exit policy 'share' counts principal values, and task {task.name!r} has none")

    def can_decide(self, ramp: int) -> bool:
        return super().can_decide(ramp) and self.can_observe(ramp)

    def can_observe(self, ramp: int) -> bool:
        return not isinstance(self.confidences, Mapping) or ramp in self.confidences

    def score(self, ramp: int, output: ExitOutput) -> Tensor:
        return to_host(share_above(output.principal_values, of_ramp(self.confidences, ramp)))


def share_above(principal_BP: Tensor, confidence: float) -> Tensor:
    """Returns the share of each input's principal values that exceed a confidence, float32 (B,)."""
    return (principal_BP > confidence).sum(1) / principal_BP.shape[1]


def shares_above(principal_BP: Tensor, confidences_L: Tensor) -> Tensor:
    """Returns `share_above` for L ascending confidences, (B, L). NaN exceeds no confidence."""
    below_BP = torch.bucketize(principal_BP.nan_to_num(-torch.inf), confidences_L.to(principal_BP.device))
    counts = below_BP.new_zeros(len(below_BP), len(confidences_L) + 1)
    counts.scatter_add_(1, below_BP, torch.ones_like(below_BP))
    return counts.flip(1).cumsum(1).flip(1)[:, 1:] / principal_BP.shape[1]
