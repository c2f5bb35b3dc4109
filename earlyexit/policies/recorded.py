"""Decisions from exit records: the real exits of one model at the real cost of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from earlyexit.errors import PlanError, UnprocessableInputError
from earlyexit.policies.base import ExitPolicy, Opinion, Verdict
from earlyexit.policies.threshold import ThresholdPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswers:
    """Recorded scores and answers of every ramp and of the full model for N known inputs."""

    row_of: Mapping[str, int]
    """Sample id -> row. Ids are looked up without their last `#` and what follows, so a record can be used often."""
    ramps: tuple[int, ...]
    scores_NR: npt.NDArray[np.float32]
    """Scores in the unit of the policy that judges them; one column per ramp."""
    answers_NE: npt.NDArray[Any]
    """(N, E, ...); the full model's answers are last."""


class RecordedPolicy(ExitPolicy):
    """Takes scores and answers from records, by sample id; a threshold policy judges the scores."""

    name = "recorded"
    foreknows = True

    def __init__(self, answers: RecordedAnswers, judge: ThresholdPolicy) -> None:
        self._answers = answers
        self._judge = judge
        self._column_of = {ramp: column for column, ramp in enumerate(answers.ramps)}

    def check_ramps(self, ramps: Sequence[int]) -> None:
        missing = [ramp for ramp in ramps if ramp not in self._column_of]
        if missing:
            raise PlanError(f"the exit records hold no ramps {missing}; they hold {sorted(self._column_of)}")
        self._judge.check_ramps(ramps)

    def can_decide(self, ramp: int) -> bool:
        return self.can_look(ramp) and self._judge.can_decide(ramp)

    def can_look(self, ramp: int) -> bool:
        return ramp in self._column_of

    def warm_up_ids(self, num_inputs: int) -> tuple[str, ...]:
        known = next(iter(self._answers.row_of))
        return tuple(f"{known}#{k}" for k in range(num_inputs))

    def decide(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> Verdict:
        score_B, value_B = self.look(ramp, opinion, state_BS, sample_ids)
        leave_B = self._judge.is_sure(ramp, score_B)
        return Verdict(leave_B=leave_B, value_B=value_B, score_B=score_B, state_BS=state_BS)

    def look(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        rows, column = self._rows(sample_ids), self._column_of[ramp]
        score_B = torch.from_numpy(self._answers.scores_NR[rows, column])
        value_B = torch.from_numpy(self._answers.answers_NE[rows, column])
        return score_B, value_B

    def conclude(self, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        value_B = self.full_answers(opinion, sample_ids)
        return value_B, torch.ones(len(value_B))

    def full_answers(self, opinion: Opinion, sample_ids: Sequence[str]) -> Tensor:
        return torch.from_numpy(self._answers.answers_NE[self._rows(sample_ids), -1])

    def _rows(self, sample_ids: Sequence[str]) -> npt.NDArray[np.int64]:
        return np.array([self._row(sample_id) for sample_id in sample_ids])

    def _row(self, sample_id: str) -> int:
        known = sample_id.rpartition("#")[0] or sample_id
        if known not in self._answers.row_of:
            raise UnprocessableInputError(f"no exit records of the id {known!r}; send the `ids` of recorded inputs")
        return self._answers.row_of[known]
