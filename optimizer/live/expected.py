"""How long a batch should take, by the latency profile and the survival expected."""

from __future__ import annotations

from collections.abc import Sequence

from earlyexit.split import Split
from optimizer.evaluate import split_seconds
from profiles.table import LatencyTable


def batch_seconds(
    table: LatencyTable, ramps: Sequence[int], split: Split, size: int, survival_N: Sequence[float]
) -> float:
    """Seconds of a batch that enters the split with `size` inputs, by the cost model.

    `ramps` are all of the model, in the order of the table's rows; `survival_N` is the share of inputs that reaches
    each block under the plan's active ramps.
    """
    return split_seconds(table, ramps, split, survival_N, size)
