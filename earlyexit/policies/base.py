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
from earlyexit.network.transfer import to_device, to_host
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask

Foresight = Literal["classifier", "states"]
"""What tells how sure a ramp is before its outputs: a small classifier of its own, or how alike the states before and
after its block are (Schuster et al. 2022, CALM, section 3.4)."""


class Opinion:
    """What an exit says of a set of inputs; what the task makes of its outputs is computed when first asked for."""

    def __init__(self, task: Task, outputs_BC: Tensor) -> None:
        self.task = task
        self._outputs_BC = outputs_BC

    @property
    def outputs_BC(self) -> Tensor:
        """Temperature-scaled, float32, (B, *output_shape); in host memory, or where they were computed."""
        return self._outputs_BC

    @cached_property
    def score_B(self) -> Tensor:
        """How sure the exit is of each answer, float32 (B,), larger is surer; in host memory."""
        if self.task.large and self.task.num_principal_values:
            return to_host(self.principal_values.mean(1))  # which a policy has asked for already
        return to_host(self.task.score(self.outputs_BC))

    @cached_property
    def value_B(self) -> Tensor:
        """All answers, (B, ...), in host memory."""
        return to_host(self.task.answer(self.outputs_BC))

    @cached_property
    def principal_values(self) -> Tensor:
        """(B, P), where the outputs are; raises PlanError for tasks that have none."""
        return self.task.principal_values(self.outputs_BC)

    def answers(self, rows: Sequence[int] | None = None) -> Tensor:
        """The answers of the inputs at some positions, (K, ...), of None all; in host memory."""
        if rows is None or len(rows) == len(self.outputs_BC):
            return self.value_B
        if not self.task.large or "value_B" in self.__dict__:  # made already, where a ramp looks at every input
            return self.value_B[list(rows)]
        index_K = to_device(torch.tensor(rows), self.outputs_BC.device)
        return to_host(self.task.answer(self.outputs_BC.index_select(0, index_K)))

    def verdict(self, leave_B: Tensor, state_BS: Tensor) -> Verdict:
        """Who leaves does so with the exit's own answer."""
        return Verdict(leave_B=leave_B, value_B=None, score_B=self.score_B, state_BS=state_BS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a policy says of a set of inputs at one ramp."""

    leave_B: Tensor
    """bool: who leaves here."""
    value_B: Tensor | None
    """(B, ...): the answer of those who leave; None for the exit's own."""
    score_B: Tensor
    """float32: how sure the exit is of that answer."""
    state_BS: Tensor
    """The state that the inputs which stay carry on."""


class ExitPolicy(ABC):
    """A rule over an exit's outputs, row by row: an input's verdict depends on its own outputs and state only.

    Outputs and state come in host memory, whatever device the model is on, and verdicts are read there. Those of tasks
    with `large` outputs come on the model's device, and what a policy takes of them to the host is a number per input.

    *Independent* policies decide by the outputs of one ramp. *Dependent* ones carry a state from ramp to ramp, which
    travels with the input over cuts and hops (E3 section 3.4 tells the two apart).
    """

    name: ClassVar[str]
    foreknows: ClassVar[bool] = False
    """Whether it never reads the outputs. They may then be on the model's device, and not computed yet."""
    foresees: ClassVar[Foresight | None] = None
    """By what it decides before an exit's outputs are known, which are then computed of those who leave alone. What it
    is given is a `Foreseen`."""
    labels_only: ClassVar[bool] = False
    """Whether it is about labels, and means nothing where answers are something else."""
    state_dtype: ClassVar[torch.dtype] = torch.int32

    @property
    def counts_places(self) -> bool:
        """Whether its state, (B, 1), begins as the place in its answer of the token that an input asks for, from 0."""
        return False

    def state_width(self, num_outputs: int) -> int:
        """S, the numbers an input carries; 0 for independent policies."""
        return 0

    def initial_state(self, num_inputs: int, num_outputs: int, device: torch.device) -> Tensor:
        """The state (B, S) before the first ramp."""
        return torch.zeros(num_inputs, self.state_width(num_outputs), dtype=self.state_dtype, device=device)

    def check_ramps(self, ramps: Sequence[int]) -> None:  # noqa: B027 - policies without thresholds take any ramp
        """Raise PlanError where an active ramp lacks what the policy needs."""

    def check_task(self, task: Task) -> None:
        """Raise PlanError where the policy cannot judge such answers."""
        if self.labels_only and not isinstance(task, LabelTask):
            raise PlanError(f"exit policy {self.name!r} is for labels; of task {task.name!r} 'confidence' can judge")

    def can_decide(self, ramp: int) -> bool:
        """Whether it has what it needs to let inputs leave at `ramp`."""
        return True

    def can_look(self, ramp: int) -> bool:
        """Whether `look` has a score for `ramp`."""
        return False

    def warm_up_ids(self, num_inputs: int) -> tuple[str, ...]:
        """Sample ids that `decide` takes before any request has come."""
        return tuple(f"warm-up-{k}" for k in range(num_inputs))

    @abstractmethod
    def decide(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> Verdict:
        """Who leaves at `ramp`, and with what."""

    def look(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Score in the unit of the policy's thresholds, (B,), and answers, at a ramp that need not be active.

        Raises PlanError for policies that do not compare one score with one threshold: nothing to record.
        """
        raise PlanError(
            f"exit policy {self.name!r} cannot be probed, having no score for a ramp by itself; those that can be are "
            "entropy, confidence, share, foreseen, similar and recorded"
        )

    def conclude(self, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Answers and scores of inputs that ran the whole model, with the state that they brought."""
        return opinion.value_B, opinion.score_B

    def full_answers(self, opinion: Opinion, sample_ids: Sequence[str]) -> Tensor:
        """What the full model says by itself, whatever is made of it: losses are against these answers."""
        return opinion.value_B
