"""What exits save of a model's seconds, where a batch is always full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiles.table import LatencyTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """Shares of the whole model's seconds for an input."""

    compute: float
    """Of the blocks, as if ramps took nothing."""
    latency: float
    """Less what the ramps take; below 0 where that is more than they save."""

    @property
    def most_times(self) -> float:
        """How many times the stock model's rate they allow, at the same batch and with all ramps active."""
        return 1 / (1 - self.latency)


def savings(survival_N: Sequence[float], table: LatencyTable, ramps: Sequence[int], batch: int = 1) -> Savings:
    """With all ramps active: a block, and the ramp after it, costs whoever reaches it its part of a full batch."""
    size = np.array(float(batch))
    block_s_N, ramp_s_E = table.blocks_at(size), table.ramps_at(size)
    whole_s = float(block_s_N.sum())
    blocks_s = float(np.dot(survival_N, block_s_N))
    ramps_s = sum(survival_N[ramp] * float(seconds) for ramp, seconds in zip(ramps, ramp_s_E, strict=True))
    return Savings(compute=1 - blocks_s / whole_s, latency=1 - (blocks_s + ramps_s) / whole_s)
