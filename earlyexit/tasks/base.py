"""The contract of a task: answers, their scores, and the loss of an early answer.

Tensor legend: B inputs, C numbers (or C maps of H x W numbers) that an exit computes for an input, P principal values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from earlyexit.errors import PlanError
from earlyexit.named import Named
from earlyexit.network.boundary import Column, PackedArray, Value, stack_values

if TYPE_CHECKING:  # an ingress formats answers without torch
    from torch import Tensor

    from earlyexit.training.augmentation import Moves

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
ValueArray = npt.NDArray[Any]


class Task(Named, ABC):
    """Converts an exit's outputs to answers, and compares answers."""

    zero_one: ClassVar[bool]
    """Whether every loss is 0 or 1. Budgets are then tested with exact binomial tests."""
    large: ClassVar[bool] = False
    """Whether outputs are too large to copy them all to the host. Only scores, and the answers of inputs that leave,
    are then copied. If such a task has principal values, its score is their mean."""
    content_types: ClassVar[tuple[str, ...]] = ()
    """Content types of `POST /predict` answers besides JSON, which `to_content` writes."""
    num_outputs: int
    """C, the numbers or maps that an exit computes for an input."""
    num_principal_values: int = 0
    """P; 0 if outputs are not probabilities."""
    image_sides: tuple[int, int] | None = None
    """Height and width of the images that answers refer to; None if answers do not refer to images."""
    columns: tuple[Column, ...]
    """The columns of an answer in v2 responses, without the exit."""

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of an exit's outputs for one input: (C,), or (C, H, W) for dense tasks."""
        return (self.num_outputs,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and self.spec() == other.spec()

    def __hash__(self) -> int:
        return hash(self.name)

    def compares(self, other: Task) -> bool:
        """Whether `loss` may compare answers of the two tasks, such as those of two versions of a model."""
        return self == other

    @abstractmethod
    def answer(self, outputs_BC: Tensor) -> Tensor:
        """Returns the answers, (B, ...). Each depends on its own outputs only."""

    def score(self, outputs_BC: Tensor) -> Tensor:
        """Returns the score of each answer, float32 (B,); larger is surer. By default, the mean principal value."""
        return self.principal_values(outputs_BC).mean(1)

    def principal_values(self, outputs_BC: Tensor) -> Tensor:
        """Returns the outputs that express confidence, from 0 to 1, float32 (B, P) (PAME section 5.3).

        Raises PlanError for tasks whose outputs are not probabilities.
        """
        raise PlanError(f"task {self.name!r} has no principal values, which exit policy 'share' needs")

    @abstractmethod
    def loss(self, early: ValueArray, full: ValueArray) -> FloatArray:
        """Returns the cost of answering `early` if `full` is right, float64 (B,), in [0, 1]; 0 if the answers agree."""

    def tallies(self, early: ValueArray, right: ValueArray) -> IntArray:
        """Returns counts (B, K), whose sums over inputs `figures` evaluates. By default, there are none."""
        return np.zeros((len(early), 0), dtype=np.int64)

    def figures(self, tallies_K: IntArray) -> dict[str, float]:
        """Returns metrics that are not means over inputs, by name, from sums of `tallies`. By default, none."""
        return {}

    def to_columns(self, values: Sequence[Value], scores: Sequence[float]) -> dict[str, list[Any] | ValueArray]:
        """Returns the columns of several answers, by name: by default, the plain answers, and their scores."""
        plain = [self.plain(value) for value in values]
        are_arrays = isinstance(plain[0], PackedArray)
        return {self.columns[0].name: stack_values(plain) if are_arrays else plain, "score": list(scores)}

    def plain(self, value: Value) -> Any:
        """Returns an answer in the form of `to_columns` and `to_json`. By default, it is unchanged."""
        return value

    def to_json(self, value: Value, score: float) -> dict[str, Any]:
        """Returns an answer in `POST /predict` JSON, without its exit: by default, the plain answer, and its score."""
        plain = self.plain(value)
        rounded = round(plain, 6) if isinstance(plain, float) else plain
        return {self.columns[0].name: rounded, "score": round(score, 6)}

    def to_content(self, content_type: str, value: Value) -> bytes:
        """Returns an answer in one of `content_types`, without its score and exit."""
        raise NotImplementedError(f"answers of {self.name!r} are JSON, not {content_type}")

    @property
    @abstractmethod
    def json_schema(self) -> Mapping[str, Any]:
        """The JSON schemas of the fields of `to_json`."""

    @abstractmethod
    def targets(self, labels: Sequence[Any]) -> ValueArray:
        """Returns the right answers for the labels of a data file; raises DataError that names an invalid label."""

    def check_coverage(self, targets_N: ValueArray) -> None:
        """Raises DataError if training data has no example of something that the model must learn, such as a class."""

    @abstractmethod
    def training_loss(self, outputs_BC: Tensor, targets_B: Tensor) -> Tensor:
        """Returns the training loss, a mean over the inputs, float32 ()."""

    def moved(self, targets_B: Tensor, moves: Moves) -> Tensor:
        """Returns the right answers of images after `moves`. By default, they do not change."""
        return targets_B

    def imitation_loss(self, outputs_BC: Tensor, full_BC: Tensor, softness: float) -> Tensor:
        """Returns the distillation loss of an exit against the full model's outputs, float32 ().

        `softness`: the temperature of the probabilities of labels, which raises small ones. Other tasks ignore it.
        """
        return self.training_loss(outputs_BC, self.answer(full_BC))

    def fit_temperature(self, outputs_NC: Tensor, targets_N: ValueArray) -> float:
        """Returns the divisor of outputs that calibrates scores. By default, 1, for tasks without a temperature."""
        return 1.0
