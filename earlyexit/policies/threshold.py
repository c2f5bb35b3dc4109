"""Independent policies: one score against one threshold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from earlyexit.errors import PlanError
from earlyexit.policies.base import ExitPolicy, Opinion, Verdict
from earlyexit.tasks.base import Task
from earlyexit.transfer import to_host


class ThresholdPolicy(ExitPolicy):
    """Leave where the score is sure enough."""

    larger_is_surer: ClassVar[bool]

    def __init__(self, thresholds: float | Mapping[int, float]) -> None:
        """One number for all ramps, or one per ramp."""
        self.thresholds = thresholds

    @abstractmethod
    def score(self, ramp: int, opinion: Opinion) -> Tensor:
        """How sure a ramp is, (B,), in the policy's own unit; in host memory."""

    def check_ramps(self, ramps: Sequence[int]) -> None:
        missing = [ramp for ramp in ramps if not self.can_decide(ramp)]
        if isinstance(self.thresholds, Mapping) and missing:
            raise PlanError(f"active ramps {missing} have no threshold; thresholds name {sorted(self.thresholds)}")

    def can_decide(self, ramp: int) -> bool:
        return not isinstance(self.thresholds, Mapping) or ramp in self.thresholds

    def can_look(self, ramp: int) -> bool:
        return True

    def look(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        return self.score(ramp, opinion), opinion.value_B

    def is_sure(self, ramp: int, score_B: Tensor) -> Tensor:
        """Whether each score passes the ramp's threshold, bool (B,)."""
        threshold = of_ramp(self.thresholds, ramp)
        return score_B >= threshold if self.larger_is_surer else score_B <= threshold

    def decide(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> Verdict:
        return opinion.verdict(self.is_sure(ramp, self.score(ramp, opinion)), state_BS)


def of_ramp(numbers: float | Mapping[int, float], ramp: int) -> float:
    """A ramp's number, of one for all or one per ramp."""
    return numbers[ramp] if isinstance(numbers, Mapping) else numbers


class EntropyPolicy(ThresholdPolicy):
    """DeeBERT's rule and E3's default: leave when the entropy of the prediction is small. Thresholds in nats.

    E3 section 5 uses 0.4 unless it says otherwise.
    """

    name = "entropy"
    larger_is_surer = False
    labels_only = True

    def score(self, ramp: int, opinion: Opinion) -> Tensor:
        log_probability_BC = opinion.outputs_BC.log_softmax(-1)
        return -(log_probability_BC.exp() * log_probability_BC).sum(-1)


class ConfidencePolicy(ThresholdPolicy):
    """Leave when the exit is sure enough of its answer; for labels, when the likeliest is likely enough."""

    name = "confidence"
    larger_is_surer = True

    def score(self, ramp: int, opinion: Opinion) -> Tensor:
        return opinion.score_B


class SharePolicy(ThresholdPolicy):
    """PAME's rule (section 5.3): leave when enough of the exit's principal values lie above a confidence.

    Its count threshold is here a share of them, so that it is a score like others; confidences are settings.
    """

    name = "share"
    larger_is_surer = True

    def __init__(self, thresholds: float | Mapping[int, float], confidences: float | Mapping[int, float]) -> None:
        """One number for all ramps, or one per ramp, of both."""
        super().__init__(thresholds)
        self.confidences = confidences

    def check_ramps(self, ramps: Sequence[int]) -> None:
        super().check_ramps(ramps)
        missing = [ramp for ramp in ramps if not self.can_look(ramp)]
        if isinstance(self.confidences, Mapping) and missing:
            raise PlanError(f"active ramps {missing} have no confidence; confidences name {sorted(self.confidences)}")

    def check_task(self, task: Task) -> None:
        if not task.num_principal_values:
            raise PlanError(f"exit policy 'share' counts principal values, and task {task.name!r} has none")

    def can_decide(self, ramp: int) -> bool:
        return super().can_decide(ramp) and self.can_look(ramp)

    def can_look(self, ramp: int) -> bool:
        return not isinstance(self.confidences, Mapping) or ramp in self.confidences

    def score(self, ramp: int, opinion: Opinion) -> Tensor:
        return to_host(share_above(opinion.principal_values, of_ramp(self.confidences, ramp)))


def share_above(principal_BP: Tensor, confidence: float) -> Tensor:
    """The share of each input's principal values that exceed a confidence, float32 (B,)."""
    return (principal_BP > confidence).sum(1) / principal_BP.shape[1]


def shares_above(principal_BP: Tensor, confidences_L: Tensor) -> Tensor:
    """`share_above` for several confidences, ascending, at once, (B, L); what is no number exceeds none."""
    below_BP = torch.bucketize(principal_BP.nan_to_num(-torch.inf), confidences_L.to(principal_BP.device))
    counts = below_BP.new_zeros(len(below_BP), len(confidences_L) + 1)
    counts.scatter_add_(1, below_BP, torch.ones_like(below_BP))
    return counts.flip(1).cumsum(1).flip(1)[:, 1:] / principal_BP.shape[1]
