"""Classification: one label of several per input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from earlyexit.errors import DataError
from earlyexit.network.boundary import Column, Value
from earlyexit.tasks.base import FloatArray, Task, ValueArray

if TYPE_CHECKING:
    from torch import Tensor


def label_loss(early: ValueArray, full: ValueArray) -> FloatArray:
    """Returns 1 where labels differ, and 0 where they are equal."""
    return np.asarray(early != full, dtype=np.float64)


def distillation_loss(outputs_BC: Tensor, full_BC: Tensor, softness: float) -> Tensor:
    """Returns cross-entropy to the full model's probabilities (Hinton et al. 2015, section 2); axis 1 is C.

    Both outputs are divided by `softness`. The loss is scaled so that gradients keep their size.
    """
    from torch.nn.functional import cross_entropy

    soft_BC = (full_BC.float() / softness).softmax(1)
    return cross_entropy(outputs_BC.float() / softness, soft_BC) * softness**2


LEAST_TEMPERATURE = 0.05
"""Lower bound of the fit. A fit that ends here is discarded: the labels are (almost) the model's own answers."""


class LabelTask(Task):
    """An answer is the index of a label, and outputs are logits, (B, C)."""

    name = "label"
    zero_one = True
    num_principal_values = 1
    columns = (Column(name="label", datatypes=("BYTES",)), Column(name="score", datatypes=("FP32",)))

    def __init__(self, label_names: Sequence[str]) -> None:
        """Raises ValueError for fewer than two names and for repeated names."""
        if len(label_names) < 2 or len(set(label_names)) < len(label_names):
            raise ValueError(f"at least two different labels are needed, not {list(label_names)}")
        self.label_names = tuple(label_names)
        self.num_outputs = len(label_names)

    def answer(self, outputs_BC: Tensor) -> Tensor:
        """Returns the most probable label, int64 (B,)."""
        return outputs_BC.argmax(-1)

    def score(self, outputs_BC: Tensor) -> Tensor:
        """Returns the probability of the most probable label."""
        return outputs_BC.softmax(-1).amax(-1)

    def principal_values(self, outputs_BC: Tensor) -> Tensor:
        """Returns the score as the only principal value: P is 1."""
        return self.score(outputs_BC)[:, None]

    def loss(self, early: ValueArray, full: ValueArray) -> FloatArray:
        return label_loss(early, full)

    def plain(self, value: Value) -> str:
        """Returns the name of a label."""
        assert isinstance(value, int)
        return self.label_names[value]

    @property
    def json_schema(self) -> Mapping[str, Any]:
        return {
            "label": {"type": "string", "enum": list(self.label_names)},
            "score": {"type": "number", "description": "Probability of the label."},
        }

    def targets(self, labels: Sequence[str]) -> ValueArray:
        index = {name: k for k, name in enumerate(self.label_names)}
        if unknown := sorted(set(labels) - set(index)):
            has = ", ".join(self.label_names[:5]) + (", ..." if self.num_outputs > 5 else "")
            raise DataError(f"the model has no label {unknown[0]!r} (unknown labels: {len(unknown)}); it has {has}")
        return np.array([index[label] for label in labels], dtype=np.int64)

    def training_loss(self, outputs_BC: Tensor, targets_B: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs_BC.float(), targets_B)

    def imitation_loss(self, outputs_BC: Tensor, full_BC: Tensor, softness: float) -> Tensor:
        """Returns cross-entropy to the full model's softened probabilities."""
        return distillation_loss(outputs_BC, full_BC, softness)

    def fit_temperature(self, outputs_NC: Tensor, targets_N: ValueArray) -> float:
        """Returns the temperature with the smallest negative log likelihood (temperature scaling).

        It is 1 if all outputs are right, because then the likelihood grows with ever lower temperatures.
        """
        import torch
        from scipy.optimize import minimize_scalar
        from torch.nn.functional import cross_entropy

        right_N = torch.from_numpy(targets_N)
        if bool((outputs_NC.argmax(1) == right_N).all()):
            return 1.0

        def loss(log_temperature: float) -> float:
            return float(cross_entropy(outputs_NC / float(np.exp(log_temperature)), right_N))

        best = minimize_scalar(loss, bounds=(np.log(LEAST_TEMPERATURE), np.log(20.0)), method="bounded")
        temperature = float(np.exp(best.x))
        return 1.0 if temperature < 1.01 * LEAST_TEMPERATURE else temperature
