"""The contract of a task: what an answer is, how sure an exit is of it, and what a different answer costs.

Tensor legend: B inputs, C numbers that an exit gives for an input (its outputs), or C maps of H x W numbers; P
principal values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from earlyexit.errors import PlanError
from earlyexit.named import Named
from earlyexit.network.boundary import Column, Value, stack_values

if TYPE_CHECKING:  # an ingress reads answers without torch
    from torch import Tensor

    from earlyexit.training.augmentation import Moves

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
ValueArray = npt.NDArray[Any]


class Task(Named, ABC):
    """Turns an exit's outputs into answers, and says when two answers agree."""

    zero_one: ClassVar[bool]
    """Whether a loss is always 0 or 1: budgets are then tested exactly."""
    large: ClassVar[bool] = False
    """Whether outputs are so large that they are judged on the device: only scores, and the answers of inputs that
    leave, are copied to the host. If such a task has principal values, their mean is its score."""
    content_types: ClassVar[tuple[str, ...]] = ()
    """Content types of answers of `POST /predict` besides JSON; `to_content` writes them."""
    num_outputs: int
    """C, the numbers or maps that an exit gives for an input."""
    num_principal_values: int = 0
    """P; 0 where outputs are no probabilities."""
    image_sides: tuple[int, int] | None = None
    """Height and width of the images that answers refer to; None for other answers."""
    columns: tuple[Column, ...]
    """The columns of an answer for callers, beside its exit."""

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of what an exit gives for an input: (C,), for dense tasks maps (C, H, W)."""
        return (self.num_outputs,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and self.spec() == other.spec()

    def __hash__(self) -> int:
        return hash(self.name)

    def compares(self, other: Task) -> bool:
        """Whether `loss` may compare answers of another version's task with ours: they mean the same."""
        return self == other

    @abstractmethod
    def answer(self, outputs_BC: Tensor) -> Tensor:
        """Returns the answers, (B, ...); each follows from its own outputs alone."""

    def score(self, outputs_BC: Tensor) -> Tensor:
        """Returns how sure the exit is of each answer, float32 (B,), larger is surer; here the mean principal value."""
        return self.principal_values(outputs_BC).mean(1)

    def principal_values(self, outputs_BC: Tensor) -> Tensor:
        """Returns the few outputs that say how sure an exit is, from 0 to 1, float32 (B, P) (PAME section 5.3).

        Raises PlanError for tasks whose outputs are no probabilities.
        """
        raise PlanError(f"task {self.name!r} has no principal values, which exit policy 'share' counts")

    @abstractmethod
    def loss(self, early: ValueArray, full: ValueArray) -> FloatArray:
        """Returns the cost of answering `early` where `full` is right, float64 (B,), in [0, 1], 0 where they agree."""

    def tallies(self, early: ValueArray, right: ValueArray) -> IntArray:
        """Returns numbers (B, K) whose sums over many inputs make figures; here none."""
        return np.zeros((len(early), 0), dtype=np.int64)

    def figures(self, tallies_K: IntArray) -> dict[str, float]:
        """Returns figures that are not means over inputs, by name, from the sums of `tallies`; here none."""
        return {}

    def to_columns(self, values: Sequence[Value], scores: Sequence[float]) -> dict[str, list[Any] | ValueArray]:
        """Returns the columns of several answers, by name; here the answers as they are, and their scores."""
        return {self.columns[0].name: stack_values(values), "score": list(scores)}

    @abstractmethod
    def to_json(self, value: Value, score: float) -> dict[str, Any]:
        """Returns an answer of `POST /predict`, without its exit."""

    def to_content(self, content_type: str, value: Value) -> bytes:
        """Returns an answer as one of `content_types`, without its score and exit."""
        raise NotImplementedError(f"answers of {self.name!r} are JSON, not {content_type}")

    @property
    @abstractmethod
    def json_schema(self) -> Mapping[str, Any]:
        """JSON schemas of the fields of `to_json`."""

    @abstractmethod
    def targets(self, labels: Sequence[Any]) -> ValueArray:
        """Returns the right answers from the labels of a data file; raises DataError that names an unknown label."""

    def check_taught(self, targets_N: ValueArray) -> None:
        """Raise DataError where right answers miss something that a model must learn from them."""

    def mirrored(self, targets_B: ValueArray) -> ValueArray:
        """Returns the right answers of mirrored inputs, left and right swapped: here the same."""
        return targets_B

    @abstractmethod
    def training_loss(self, outputs_BC: Tensor, targets_B: Tensor) -> Tensor:
        """Returns the training loss: a mean over the inputs, float32 ()."""

    def moved(self, targets_B: Tensor, moves: Moves) -> Tensor:
        """Returns the right answers of moved images: here the same."""
        return targets_B

    def imitation_loss(self, outputs_BC: Tensor, full_BC: Tensor, *, keep_scale: bool = False) -> Tensor:
        """Returns the loss where ramps learn from the full model's outputs, not from right answers; float32 ().

        `keep_scale`: it is least where outputs equal those of the full model, rather than a multiple of them.
        """
        return self.training_loss(outputs_BC, self.answer(full_BC))

    def fit_temperature(self, outputs_NC: Tensor, targets_N: ValueArray) -> float:
        """Returns the number that outputs must be divided by for calibrated scores; 1 where that means nothing."""
        return 1.0
