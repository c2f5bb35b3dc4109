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
"""The source of a ramp's score before its outputs are computed: the ramp's small classifier, or the similarity of the
hidden states before and after its block (Schuster et al. 2022, CALM, section 3.4)."""


class ExitOutput:
    """An exit's outputs for a batch of inputs. Answers and scores are computed on first use."""

    def __init__(self, task: Task, outputs_BC: Tensor) -> None:
        self.task = task
        self._outputs_BC = outputs_BC

    @cached_property
    def outputs_BC(self) -> Tensor:
        """Temperature-scaled outputs, float32, (B, *output_shape), in host memory or on the model's device."""
        return self._outputs_BC

    @cached_property
    def score_B(self) -> Tensor:
        """The score of each answer, float32 (B,), in host memory. A larger score is surer."""
        if self.task.large and self.task.num_principal_values:
            return to_host(self.principal_values.mean(1))  # cached, because policies read the same values
        return to_host(self.task.score(self.outputs_BC))

    @cached_property
    def value_B(self) -> Tensor:
        """The answers of all inputs, (B, ...), in host memory."""
        return to_host(self.task.answer(self.outputs_BC))

    @cached_property
    def principal_values(self) -> Tensor:
        """The task's principal values, (B, P), on the outputs' device. Raises PlanError for tasks without any."""
        return self.task.principal_values(self.outputs_BC)

    def answers(self, rows: Sequence[int] | None = None) -> Tensor:
        """Returns the answers at the given positions, (K, ...), or of all inputs if `rows` is None; in host memory."""
        if rows is None or len(rows) == len(self.outputs_BC):
            return self.value_B
        if not self.task.large or "value_B" in self.__dict__:  # already computed, if the ramp observes every input
            return self.value_B[list(rows)]
        index_K = to_device(torch.tensor(rows), self.outputs_BC.device)
        return to_host(self.task.answer(self.outputs_BC.index_select(0, index_K)))

    def decision(self, leave_B: Tensor, state_BS: Tensor) -> Decision:
        """Returns a decision in which inputs leave with this exit's answer and score."""
        return Decision(leave_B=leave_B, value_B=None, score_B=self.score_B, state_BS=state_BS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A policy's decision on a batch of inputs at one ramp."""

    leave_B: Tensor
    """bool: whether each input leaves at this ramp."""
    value_B: Tensor | None
    """(B, ...): the answers of inputs that leave; None if these are the exit's own answers."""
    score_B: Tensor
    """float32: the scores of the answers."""
    state_BS: Tensor
    """The new policy state of inputs that do not leave."""


class ExitPolicy(ABC):
    """Base class of exit policies. An input's decision depends only on its own outputs and state.

    Outputs, state and decisions are in host memory on any device, with one exception: the outputs of tasks that are
    `large` stay on the model's device, and the policy copies one number per input to the host.

    *Independent* policies decide by the outputs of one ramp. *Dependent* policies keep a state from ramp to ramp, which
    travels with the input between splits and replicas (the terms are E3's, section 3.4).
    """

    name: ClassVar[str]
    foresees: ClassVar[Foresight | None] = None
    """The source of scores of a policy that decides before an exit's outputs are computed. The policy then gets a
    `Foreseen`, and outputs are computed only for inputs that leave."""
    labels_only: ClassVar[bool] = False
    """Whether the policy works only if answers are labels."""
    state_dtype: ClassVar[torch.dtype] = torch.int32
    uses_positions: bool = False
    """Whether the initial state, (B, 1), is the position of the next token in the answer, from 0."""

    def state_width(self, num_outputs: int) -> int:
        """Returns S, the number of state values per input; for independent policies, at most the position."""
        return int(self.uses_positions)

    def initial_state(self, num_inputs: int, num_outputs: int, device: torch.device) -> Tensor:
        """Returns the state (B, S) before the first ramp."""
        return torch.zeros(num_inputs, self.state_width(num_outputs), dtype=self.state_dtype, device=device)

    def check_ramps(self, ramps: Sequence[int]) -> None:  # noqa: B027 - policies without thresholds accept any ramp
        """Raises PlanError if the policy lacks a setting for an active ramp."""

    def check_task(self, task: Task) -> None:
        """Raises PlanError if the policy cannot judge answers of this task."""
        if self.labels_only and not isinstance(task, LabelTask):
            raise PlanError(f"exit policy {self.name!r} is for labels; for task {task.name!r} use 'confidence'")

    def can_decide(self, ramp: int) -> bool:
        """Whether inputs can leave at `ramp`."""
        return True

    def can_observe(self, ramp: int) -> bool:
        """Whether `observe` can return scores for `ramp`."""
        return False

    def warm_up_ids(self, num_inputs: int) -> tuple[str, ...]:
        """Returns sample ids that `decide` accepts during warm-up."""
        return tuple(f"warm-up-{k}" for k in range(num_inputs))

    @abstractmethod
    def decide(self, ramp: int, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]) -> Decision:
        """Returns which inputs leave at `ramp`, their answers, and the new state."""

    def observe(
        self, ramp: int, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]
    ) -> tuple[Tensor, Tensor]:
        """Returns scores in the unit of the policy's thresholds, (B,), and answers, at an active or inactive ramp.

        Only for ramps that `can_observe` accepts. By default, the exit's own scores and answers.
        """
        return output.score_B, output.value_B

    def conclude(self, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Returns answers and scores of inputs that ran the whole model, given their state."""
        return output.value_B, output.score_B

    def full_answers(self, output: ExitOutput, sample_ids: Sequence[str]) -> Tensor:
        """Returns the full model's own answers, with which losses are computed."""
        return output.value_B
