"""Where every recorded input leaves under some thresholds, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitOutcome:
    """One entry per input (N)."""

    num_blocks: int
    exits_N: IntArray
    """The block that each input leaves after."""
    losses_N: FloatArray
    """Against the full model's answer, in [0, 1]."""
    answers_N: npt.NDArray[Any] | None
    """Where answers were recorded."""
    true_losses_N: FloatArray | None
    """Against the truth, where it is known; the next one is the full model's."""
    full_true_losses_N: FloatArray | None
    tallies_N: IntArray | None = None
    """(N, K), where a task's figures are made of such numbers; the next ones are the full model's."""
    full_tallies_N: IntArray | None = None

    @property
    def total_loss(self) -> float:
        """Of all inputs; of labels, the number of inputs that are answered otherwise."""
        return float(self.losses_N.sum())

    @property
    def agreement(self) -> float:
        """1 - mean loss; of labels, the share of inputs answered as the full model would."""
        return 1 - float(self.losses_N.mean())

    @property
    def accuracy(self) -> float | None:
        """1 - mean loss against the truth, where that is known; of labels, the share answered right."""
        return None if self.true_losses_N is None else 1 - float(self.true_losses_N.mean())

    @property
    def full_accuracy(self) -> float | None:
        """The full model's."""
        return None if self.full_true_losses_N is None else 1 - float(self.full_true_losses_N.mean())

    @property
    def harm(self) -> float | None:
        """Mean loss against the truth beyond the full model's; of labels, the share wrong where the full one is right.

        None where the truth is not known.
        """
        if self.true_losses_N is None or self.full_true_losses_N is None:
            return None
        return float(np.clip(self.true_losses_N - self.full_true_losses_N, 0.0, 1.0).mean())

    @property
    def mean_blocks(self) -> float:
        """Blocks run per input."""
        return float(self.exits_N.mean()) + 1

    @property
    def survival(self) -> tuple[float, ...]:
        """Per block, the share of inputs that reach it."""
        return tuple(float((self.exits_N >= block).mean()) for block in range(self.num_blocks))

    def survival_by(self, weights_N: IntArray) -> tuple[float, ...]:
        """Per block, the share that inputs which reach it have of all weights, such as tokens."""
        total = float(weights_N.sum())
        return tuple(float(weights_N[self.exits_N >= block].sum()) / total for block in range(self.num_blocks))

    @property
    def exit_counts(self) -> dict[int, int]:
        """Inputs per exit, only exits that were taken."""
        blocks, counts = np.unique(self.exits_N, return_counts=True)
        return dict(zip(blocks.tolist(), counts.tolist(), strict=True))
