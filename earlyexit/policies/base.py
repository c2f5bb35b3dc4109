"""The contract of an exit policy: the rule that lets an input leave at a ramp."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from earlyexit.errors import PlanError
from earlyexit.network.piece import to_device, to_host
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask

Foresight = Literal["classifier", "states"]
"""What gives a ramp's score before its outputs: its own small classifier, or the similarity of the states before and
after its block (Schuster et al. 2022, CALM, section 3.4)."""


class Opinion:
    """An exit's outputs for a set of inputs. Answers and scores are computed when they are first read."""

    def __init__(self, task: Task, outputs_BC: Tensor) -> None:
        self.task = task
        self._outputs_BC = outputs_BC

    @cached_property
    def outputs_BC(self) -> Tensor:
        """Temperature-scaled, float32, (B, *output_shape); in host memory, or where they were computed."""
        return self._outputs_BC

    @cached_property
    def score_B(self) -> Tensor:
        """The score of each answer, float32 (B,), larger is surer; in host memory."""
        if self.task.large and self.task.num_principal_values:
            return to_host(self.principal_values.mean(1))  # which a policy has asked for already
        return to_host(self.task.score(self.outputs_BC))

    @cached_property
    def value_B(self) -> Tensor:
        """All answers, (B, ...), in host memory."""
        return to_host(self.task.answer(self.outputs_BC))

    @cached_property
    def principal_values(self) -> Tensor:
        """The task's principal values (B, P), on the outputs' device; raises PlanError for tasks without any."""
        return self.task.principal_values(self.outputs_BC)

    def answers(self, rows: Sequence[int] | None = None) -> Tensor:
        """Returns the answers of the inputs at the given positions, (K, ...), or of all inputs; in host memory."""
        if rows is None or len(rows) == len(self.outputs_BC):
            return self.value_B
        if not self.task.large or "value_B" in self.__dict__:  # made already, where a ramp looks at every input
            return self.value_B[list(rows)]
        index_K = to_device(torch.tensor(rows), self.outputs_BC.device)
        return to_host(self.task.answer(self.outputs_BC.index_select(0, index_K)))

    def verdict(self, leave_B: Tensor, state_BS: Tensor) -> Verdict:
        """Returns the verdict by which inputs leave with the exit's own answer."""
        return Verdict(leave_B=leave_B, value_B=None, score_B=self.score_B, state_BS=state_BS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A policy's decision on a set of inputs at one ramp."""

    leave_B: Tensor
    """bool: whether each input leaves here."""
    value_B: Tensor | None
    """(B, ...): the answers of inputs that leave; None for the exit's own answers."""
    score_B: Tensor
    """float32: the score of that answer."""
    state_BS: Tensor
    """The new state of inputs that do not leave."""


class ExitPolicy(ABC):
    """A rule over an exit's outputs, row by row: an input's verdict depends on its own outputs and state only.

    Outputs, state and verdicts are in host memory, whatever device the model is on. The outputs of tasks with `large`
    outputs stay on the model's device, and a policy copies only one number per input to the host.

    *Independent* policies decide by the outputs of one ramp. *Dependent* policies carry a state from ramp to ramp,
    which travels with the input over cuts and hops (E3 section 3.4 makes the distinction).
    """

    name: ClassVar[str]
    foreknows: ClassVar[bool] = False
    """Whether it never reads the outputs, which then need not be computed yet."""
    foresees: ClassVar[Foresight | None] = None
    """What it decides by, if it decides before an exit's outputs are computed. The outputs are then computed only for
    inputs that leave, and the policy gets a `Foreseen`."""
    labels_only: ClassVar[bool] = False
    """Whether it applies to tasks with labels only."""
    state_dtype: ClassVar[torch.dtype] = torch.int32
    counts_places: bool = False
    """Whether its initial state, (B, 1), is the position of the next token in the answer, from 0."""

    def state_width(self, num_outputs: int) -> int:
        """Returns S, the length of an input's state; 0 for independent policies."""
        return 0

    def initial_state(self, num_inputs: int, num_outputs: int, device: torch.device) -> Tensor:
        """Returns the state (B, S) before the first ramp."""
        return torch.zeros(num_inputs, self.state_width(num_outputs), dtype=self.state_dtype, device=device)

    def check_ramps(self, ramps: Sequence[int]) -> None:  # noqa: B027 - policies without thresholds take any ramp
        """Raise PlanError if the policy lacks a setting for an active ramp."""

    def check_task(self, task: Task) -> None:
        """Raise PlanError if the policy cannot judge answers of this task."""
        if self.labels_only and not isinstance(task, LabelTask):
            raise PlanError(f"exit policy {self.name!r} is for labels; of task {task.name!r} 'confidence' can judge")

    def can_decide(self, ramp: int) -> bool:
        """Whether inputs can leave at `ramp`."""
        return True

    def can_look(self, ramp: int) -> bool:
        """Whether `look` has a score for `ramp`."""
        return False

    def warm_up_ids(self, num_inputs: int) -> tuple[str, ...]:
        """Returns sample ids that `decide` accepts in a warm-up."""
        return tuple(f"warm-up-{k}" for k in range(num_inputs))

    @abstractmethod
    def decide(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> Verdict:
        """Returns which inputs leave at `ramp`, their answers, and the new state."""

    def look(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Returns scores in the unit of the policy's thresholds, (B,), and answers, at a ramp that need not be active.

        Raises PlanError for policies that do not compare one score with one threshold.
        """
        raise PlanError(
            f"exit policy {self.name!r} cannot be probed, having no score for a ramp by itself; those that can be are "
            "entropy, confidence, share, foreseen, similar and recorded"
        )

    def conclude(self, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Returns answers and scores of inputs that ran the whole model, by the state that they carry."""
        return opinion.value_B, opinion.score_B

    def full_answers(self, opinion: Opinion, sample_ids: Sequence[str]) -> Tensor:
        """Returns the full model's own answers, against which losses are computed."""
        return opinion.value_B
