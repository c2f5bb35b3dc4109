"""Policies that wrap another policy: an ensemble of a chain's networks, and decisions from exit records.

The ensemble is Tabi's (section 4.3, equation 6). With exit records, one model runs with the exits of another.
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
from earlyexit.policies.base import Decision, ExitOutput, ExitPolicy
from earlyexit.policies.threshold import ThresholdPolicy
from earlyexit.tasks.base import Task

TINY = torch.finfo(torch.float32).tiny
"""Lower bound of probabilities, because the logarithm of 0 is infinite."""
STATE_DTYPE = torch.float16
"""The type of an ensemble's state."""


class EnsemblePolicy(ExitPolicy):
    """Mixes the probabilities of earlier networks into later exits. Another policy, the judge, decides on the mixture.

    The state is the probabilities at the last active end of a network, times that end's weight. The current network
    has the rest of the weight. The state of an input that passed no such end is 0, for example if the plan skips the
    earlier networks. Its probabilities are not mixed. The state always has half precision, so that an answer does not
    depend on where a chain is cut. The rounding error of a probability is at most 2.5e-4.
    """

    name = "ensemble"
    labels_only = True
    state_dtype: ClassVar[torch.dtype] = STATE_DTYPE

    def __init__(self, judge: ExitPolicy, weights: Weights) -> None:
        """Raises PlanError for weights out of range, and for a judge that keeps a state or does not read outputs."""
        check_weights(weights)
        if isinstance(judge, RecordedPolicy) or judge.state_width(2):
            raise PlanError(
                f"weights: exit policy {judge.name!r} cannot be combined with an ensemble's weights, because it does "
                "not decide by the outputs of one exit"
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

    def can_observe(self, ramp: int) -> bool:
        return self._judge.can_observe(ramp)

    def decide(self, ramp: int, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]) -> Decision:
        mixture = mixed(output, state_BS)
        decision = self._judge.decide(ramp, mixture, state_BS[:, :0], sample_ids)
        if ramp in self._weights:
            state_BS = weighted_state(mixture.outputs_BC, self._weights[ramp])
        return Decision(
            leave_B=decision.leave_B,
            value_B=mixture.value_B if decision.value_B is None else decision.value_B,
            score_B=decision.score_B,
            state_BS=state_BS,
        )

    def observe(
        self, ramp: int, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]
    ) -> tuple[Tensor, Tensor]:
        return self._judge.observe(ramp, mixed(output, state_BS), state_BS[:, :0], sample_ids)

    def conclude(self, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        return self._judge.conclude(mixed(output, state_BS), state_BS[:, :0], sample_ids)


def weighted_state(outputs_BC: Tensor, weight: float) -> Tensor:
    """Returns the state for later exits, (B, C): the exit's probabilities times its weight."""
    return (weight * outputs_BC.softmax(-1)).to(STATE_DTYPE)


def mixed(output: ExitOutput, state_BS: Tensor) -> ExitOutput:
    """Returns the log-probabilities of the mixture with the state. Rows whose state is 0 stay unchanged."""
    weight_B1 = state_BS.float().sum(-1, keepdim=True)
    if not weight_B1.any():
        return output
    probabilities_BC = (1 - weight_B1) * output.outputs_BC.softmax(-1) + state_BS
    logarithms_BC = probabilities_BC.clamp_min(TINY).log()
    return ExitOutput(output.task, torch.where(weight_B1 > 0, logarithms_BC, output.outputs_BC))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswers:
    """Recorded scores and answers of all ramps and of the full model for N inputs."""

    row_of: Mapping[str, int]
    """Sample id -> row. The part of an id after its last `#` is ignored, so that inputs can share a record."""
    ramps: tuple[int, ...]
    scores_NR: npt.NDArray[np.float32]
    """Scores in the unit of the policy that judges them; one column per ramp."""
    answers_NE: npt.NDArray[Any]
    """(N, E, ...): one column per ramp; the last column has the full model's answers."""


class RecordedPolicy(ExitPolicy):
    """Looks up scores and answers in exit records by sample id. A threshold policy judges the scores."""

    name = "recorded"

    def __init__(self, answers: RecordedAnswers, judge: ThresholdPolicy) -> None:
        self._answers = answers
        self._judge = judge
        self._column_of = {ramp: column for column, ramp in enumerate(answers.ramps)}

    def check_ramps(self, ramps: Sequence[int]) -> None:
        if missing := [ramp for ramp in ramps if ramp not in self._column_of]:
            raise PlanError(f"the exit records hold no ramps {missing}; they hold {sorted(self._column_of)}")
        self._judge.check_ramps(ramps)

    def can_decide(self, ramp: int) -> bool:
        return self.can_observe(ramp) and self._judge.can_decide(ramp)

    def can_observe(self, ramp: int) -> bool:
        return ramp in self._column_of

    def warm_up_ids(self, num_inputs: int) -> tuple[str, ...]:
        known = next(iter(self._answers.row_of))
        return tuple(f"{known}#{k}" for k in range(num_inputs))

    def decide(self, ramp: int, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]) -> Decision:
        score_B, value_B = self.observe(ramp, output, state_BS, sample_ids)
        leave_B = self._judge.is_sure(ramp, score_B)
        return Decision(leave_B=leave_B, value_B=value_B, score_B=score_B, state_BS=state_BS)

    def observe(
        self, ramp: int, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]
    ) -> tuple[Tensor, Tensor]:
        rows, column = self._rows(sample_ids), self._column_of[ramp]
        score_B = torch.from_numpy(self._answers.scores_NR[rows, column])
        value_B = torch.from_numpy(self._answers.answers_NE[rows, column])
        return score_B, value_B

    def conclude(self, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        value_B = self.full_answers(output, sample_ids)
        return value_B, torch.ones(len(value_B))

    def full_answers(self, output: ExitOutput, sample_ids: Sequence[str]) -> Tensor:
        return torch.from_numpy(self._answers.answers_NE[self._rows(sample_ids), -1])

    def _rows(self, sample_ids: Sequence[str]) -> npt.NDArray[np.int64]:
        row_of, ids = self._answers.row_of, [each.rpartition("#")[0] or each for each in sample_ids]
        unknown = next((sample_id for sample_id in ids if sample_id not in row_of), None)
        if unknown is not None:
            raise UnprocessableInputError(f"no exit record for the id {unknown!r}; send the `ids` of recorded inputs")
        return np.array([row_of[sample_id] for sample_id in ids])
