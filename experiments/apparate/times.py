"""How early answers were, and how often they were the full model's, of a stream that was served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiles.scores import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """What became of every input (N), in order."""

    answer_s_N: FloatArray
    losses_N: FloatArray
    """Against the full model."""
    whole_s: float
    """What the model without ramps takes."""

    @property
    def agreement(self) -> float:
        """Share answered as the full model does."""
        return 1 - float(self.losses_N.mean())

    @property
    def worst_agreement(self) -> float:
        """Of the tenths of the stream, the one that is answered worst."""
        return min(1 - float(part.mean()) for part in np.array_split(self.losses_N, 10))

    def saved(self, percentile: float) -> float:
        """Share of the whole model's seconds that this percentile of the latencies saves; below 0: it costs."""
        return 1 - float(np.percentile(self.answer_s_N, percentile)) / self.whole_s

    @property
    def mean_saved(self) -> float:
        """The same of the mean."""
        return 1 - float(self.answer_s_N.mean()) / self.whole_s

    @staticmethod
    def join(parts: Sequence[Answered]) -> Answered:
        """One after the other."""
        return Answered(
            answer_s_N=np.concatenate([part.answer_s_N for part in parts]),
            losses_N=np.concatenate([part.losses_N for part in parts]),
            whole_s=parts[0].whole_s,
        )

    def since(self, first: int) -> Answered:
        """Without the first inputs."""
        return Answered(answer_s_N=self.answer_s_N[first:], losses_N=self.losses_N[first:], whole_s=self.whole_s)
