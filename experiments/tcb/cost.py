"""What a batch of a transformer takes, from what its layout has the accelerator compute.

A layer computes its linear parts once per token that it is given, padding included, and attention once per cell of the
score matrices, padding included. So seconds = fixed + token_s * tokens + cell_s * cells, whatever the scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from earlyexit.errors import DataError
from profiles.catalogue import published_profile
from profiles.latency import LatencyProfile


@dataclass(frozen=True, slots=True)
class Work:
    """What one run of the model is given."""

    tokens: int
    """Rows of its linear layers, padding included."""
    cells: int
    """Of one head's score matrices, padding included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """An accelerator and a model."""

    fixed_s: float
    token_s: float
    cell_s: float
    worst: float = 0.0
    """Of what it was fitted to, the largest error, as a share."""

    def seconds(self, work: Work) -> float:
        """Of one run."""
        return self.fixed_s + self.token_s * work.tokens + self.cell_s * work.cells

    def stretched(self, times: float) -> Cost:
        """So many times slower."""
        return Cost(
            fixed_s=self.fixed_s * times, token_s=self.token_s * times, cell_s=self.cell_s * times, worst=self.worst
        )


def fit(seconds: Mapping[Work, float]) -> Cost:
    """The cost nearest to measured runs, by relative errors; no part of it is negative."""
    if len(seconds) < 3:
        raise DataError(f"three runs are needed to tell a cost by, not {len(seconds)}")
    took_s = np.array(list(seconds.values()))
    parts = np.array([(1.0, work.tokens, work.cells) for work in seconds]) / took_s[:, None]
    scale = parts.max(0)  # the parts are of very different sizes
    found = nnls(parts / scale, np.ones(len(took_s)))[0] / scale
    fixed_s, token_s, cell_s = found.tolist()
    return Cost(fixed_s=fixed_s, token_s=token_s, cell_s=cell_s, worst=float(np.abs(parts @ found - 1).max()))


def uniform_runs(profile: LatencyProfile) -> dict[Work, float]:
    """Every measured batch of a profile: all of its inputs have one length, so none is padded."""
    return {
        Work(size * length, size * length * length): float(seconds)
        for length, table in profile.tables.items()
        for size, seconds in zip(table.batches, table.block_s_NB.sum(0), strict=True)
    }


def published_v100() -> Cost:
    """BERT-base on a V100 in TensorRT, from its published batches of 1 to 128 inputs of 128 and 384 tokens."""
    return fit(uniform_runs(published_profile("bert-base", "V100")))


def saved(of: Iterable[Work], against: Iterable[Work], cost: Cost) -> float:
    """How many times longer the second takes."""
    return sum(map(cost.seconds, against)) / sum(map(cost.seconds, of))
