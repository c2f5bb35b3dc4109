"""Independent policies: one score against one threshold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from earlyexit.errors import PlanError
from earlyexit.policies.base import ExitPolicy, Opinion, Verdict


class ThresholdPolicy(ExitPolicy):
    """Leave where the score is sure enough."""

    larger_is_surer: ClassVar[bool]

    def __init__(self, thresholds: float | Mapping[int, float]) -> None:
        """One number for all ramps, or one per ramp."""
        self.thresholds = thresholds

    @abstractmethod
    def score(self, opinion: Opinion) -> Tensor:
        """How sure a ramp is, (B,), in the policy's own unit."""

    def check_ramps(self, ramps: Sequence[int]) -> None:
        missing = [ramp for ramp in ramps if not self.can_decide(ramp)]
        if isinstance(self.thresholds, Mapping) and missing:
            raise PlanError(f"active ramps {missing} have no threshold; thresholds name {sorted(self.thresholds)}")

    def can_decide(self, ramp: int) -> bool:
        return not isinstance(self.thresholds, Mapping) or ramp in self.thresholds

    def can_look(self, ramp: int) -> bool:
        return True

    def look(self, ramp: int, opinion: Opinion, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        return self.score(opinion), opinion.value_B

    def is_sure(self, ramp: int, score_B: Tensor) -> Tensor:
        """Whether each score passes the ramp's threshold, bool (B,)."""
        threshold = self.thresholds[ramp] if isinstance(self.thresholds, Mapping) else self.thresholds
        return score_B >= threshold if self.larger_is_surer else score_B <= threshold

    def decide(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> Verdict:
        return opinion.verdict(self.is_sure(ramp, self.score(opinion)), state_BS)


class EntropyPolicy(ThresholdPolicy):
    """DeeBERT's rule and E3's default: leave when the entropy of the prediction is small. Thresholds in nats.

    E3 section 5 uses 0.4 unless it says otherwise.
    """

    name = "entropy"
    larger_is_surer = False
    labels_only = True

    def score(self, opinion: Opinion) -> Tensor:
        log_probability_BC = opinion.outputs_BC.log_softmax(-1)
        return -(log_probability_BC.exp() * log_probability_BC).sum(-1)


class ConfidencePolicy(ThresholdPolicy):
    """Leave when the exit is sure enough of its answer; for labels, when the likeliest is likely enough."""

    name = "confidence"
    larger_is_surer = True

    def score(self, opinion: Opinion) -> Tensor:
        return opinion.score_B
