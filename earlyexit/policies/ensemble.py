"""Policies by which another policy judges: the mixed answers of a chain's networks, and exit records.

An ensemble is that of Tabi (section 4.3, equation 6). Records are the real exits of one model at the cost of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from earlyexit.errors import PlanError, UnprocessableInputError
from earlyexit.network.chain import Weights, check_weights
from earlyexit.policies.base import ExitPolicy, Opinion, Verdict
from earlyexit.policies.threshold import ThresholdPolicy
from earlyexit.tasks.base import Task

TINY = torch.finfo(torch.float32).tiny
"""A probability of 0 has no logarithm."""
CARRIED = torch.float16
"""The type in which probabilities travel."""


class EnsemblePolicy(ExitPolicy):
    """Mixes the answers of earlier networks into those of every later exit; another policy judges the mixture.

    The state is the probabilities at the last active end of a network, times their weight; the current network has the
    rest of the weight. The state is 0 for inputs that passed no such end, as under a plan that skips the earlier
    networks, and nothing is mixed then. It always has half precision, so that an answer does not depend on where a
    chain is cut: probabilities keep 3 digits, and their error is at most 2.5e-4.
    """

    name = "ensemble"
    labels_only = True
    state_dtype: ClassVar[torch.dtype] = CARRIED

    def __init__(self, judge: ExitPolicy, weights: Weights) -> None:
        """Raises PlanError for weights out of range, and for a judge that carries a state of its own."""
        check_weights(weights)
        if judge.foreknows or judge.state_width(2):
            raise PlanError(
                f"weights: exit policy {judge.name!r} decides by what it carries itself; an ensemble's weights go with "
                "policies that judge one exit's outputs"
            )
        self._judge = judge
        self._weights = weights

    def state_width(self, num_outputs: int) -> int:
        return num_outputs

    def check_ramps(self, ramps: Sequence[int]) -> None:
        self._judge.check_ramps(ramps)

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        self._judge.check_task(task)

    def can_decide(self, ramp: int) -> bool:
        return self._judge.can_decide(ramp)

    def can_look(self, ramp: int) -> bool:
        return self._judge.can_look(ramp)

    def warm_up_ids(self, num_inputs: int) -> tuple[str, ...]:
        return self._judge.warm_up_ids(num_inputs)

    def decide(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> Verdict:
        together = mixed(opinion, state_BS)
        verdict = self._judge.decide(ramp, together, state_BS[:, :0], sample_ids)
        if ramp in self._weights:
            state_BS = carried(together.outputs_BC, self._weights[ramp])
        return Verdict(
            leave_B=verdict.leave_B,
            value_B=together.value_B if verdict.value_B is None else verdict.value_B,
            score_B=verdict.score_B,
            state_BS=state_BS,
        )

    def look(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        return self._judge.look(ramp, mixed(opinion, state_BS), state_BS[:, :0], sample_ids)

    def conclude(self, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        return self._judge.conclude(mixed(opinion, state_BS), state_BS[:, :0], sample_ids)

    def full_answers(self, opinion: Opinion, sample_ids: Sequence[str]) -> Tensor:
        """Returns the answers of the last network alone."""
        return self._judge.full_answers(opinion, sample_ids)


def carried(outputs_BC: Tensor, weight: float) -> Tensor:
    """Returns the state that an exit's outputs leave for later exits, (B, C)."""
    return (weight * outputs_BC.softmax(-1)).to(CARRIED)


def mixed(opinion: Opinion, state_BS: Tensor) -> Opinion:
    """Returns the opinion mixed with the state, as logarithms of probabilities; unchanged where the state is 0."""
    carried_B1 = state_BS.float().sum(-1, keepdim=True)
    if not carried_B1.any():
        return opinion
    together_BC = (1 - carried_B1) * opinion.outputs_BC.softmax(-1) + state_BS
    logarithms_BC = together_BC.clamp_min(TINY).log()
    return Opinion(opinion.task, torch.where(carried_B1 > 0, logarithms_BC, opinion.outputs_BC))


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
        row_of, ids = self._answers.row_of, [each.rpartition("#")[0] or each for each in sample_ids]
        unknown = next((each for each in ids if each not in row_of), None)
        if unknown is not None:
            raise UnprocessableInputError(f"no exit records of the id {unknown!r}; send the `ids` of recorded inputs")
        return np.array([row_of[each] for each in ids])
