"""Exit policies of the bench: the records decide, at the price of a policy that reads its logits, or at none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import Tensor

from earlyexit.policies.base import ExitPolicy, Opinion, Verdict
from earlyexit.policies.recorded import RecordedAnswers, RecordedPolicy
from earlyexit.policies.threshold import EntropyPolicy

Decisions = Literal["waited", "known"]
"""Waited: the host waits for the logits of every active ramp and judges them, as any policy that decides by them must;
then the records answer. Known: the records answer without waiting, so that the device never idles for a decision. No
served policy can do that; the two bound what a faster decision could gain."""

NEVER = -1.0
"""An entropy that no prediction has."""


class WaitedPolicy(RecordedPolicy):
    """Records that answer only after the logits were read and judged by entropy."""

    name = "recorded"
    foreknows: ClassVar[bool] = False

    def __init__(self, answers: RecordedAnswers, judge: EntropyPolicy) -> None:
        super().__init__(answers, judge)
        self._reader = judge

    def decide(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> Verdict:
        self._reader.decide(ramp, opinion, state_BS, sample_ids)
        return super().decide(ramp, opinion, state_BS, sample_ids)

    def conclude(self, opinion: Opinion, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        self._reader.conclude(opinion, sample_ids)
        return super().conclude(opinion, sample_ids)


def policy_of(answers: RecordedAnswers, threshold: float, decisions: Decisions) -> ExitPolicy:
    """Decides by the records at this entropy; nobody leaves early at NEVER."""
    judge = EntropyPolicy(threshold)
    return WaitedPolicy(answers, judge) if decisions == "waited" else RecordedPolicy(answers, judge)
