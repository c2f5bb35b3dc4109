"""Kernels that the searches share: seconds of a batch in blocks, ramps and hops, and dominance of labels.

Legend: *rank* 0 stands for "no ramp yet", and rank r + 1 for the problem's r-th ramp. Indexed by rank (Q), `share_Q` is
the share of inputs that remain after the ramp, and `after_Q` is the first block after it. G are measured batch sizes.

`optimizer.cost.evaluate` scores the final plans with NumPy's `interp`. It interpolates equally but rounds differently.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from optimizer.search.compiled import compiled

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Labels(NamedTuple):
    """The labels of a search (L), followed by unused rows. Each search defines its own columns."""

    int_LI: IntArray
    float_LF: FloatArray


@compiled
def with_doubled_capacity(labels: Labels) -> Labels:
    """Returns a copy of the labels with room for twice as many."""
    int_LI, float_LF = labels
    return Labels(np.concatenate((int_LI, np.empty_like(int_LI))), np.concatenate((float_LF, np.empty_like(float_LF))))


@compiled
def undominated(
    order_L: IntArray, group_L: IntArray, figures_LF: FloatArray, first: int, end: int, rounding: float, most: int
) -> tuple[bool, IntArray]:
    """Returns whether all undominated labels were kept, and the labels that no earlier label of their group dominates.

    `order_L` holds labels, that is rows of `figures_LF`, and `group_L` their groups, in the same order. Columns `first`
    to `end` - 1 are compared. At most `most` labels of a group are kept.
    """
    kept_L = np.empty(order_L.size, dtype=np.int64)
    num_kept, first_kept, is_complete = 0, 0, True
    for place in range(order_L.size):
        if place > 0 and group_L[place] != group_L[place - 1]:
            first_kept = num_kept
        is_dominated = False
        for other in range(first_kept, num_kept):
            if dominates(figures_LF, kept_L[other], order_L[place], first, end, rounding):
                is_dominated = True
                break
        if is_dominated:
            continue
        if num_kept - first_kept >= most:
            is_complete = False
            continue
        kept_L[num_kept] = order_L[place]
        num_kept += 1
    return is_complete, kept_L[:num_kept]


@compiled
def dominates(figures_LF: FloatArray, one: int, other: int, first: int, end: int, rounding: float) -> bool:
    """Returns whether row `one` is at most row `other` in columns `first` to `end` - 1; equal rows dominate."""
    for column in range(first, end):  # noqa: SIM110 - kernels have no generators
        if figures_LF[one, column] > figures_LF[other, column] * (1 + rounding):
            return False
    return True


@compiled
def batch_inside(share_Q: FloatArray, entry: int, rank: int, batch: float) -> float:
    """Returns how many inputs of a batch, which was full at rank `entry`, remain after the ramp of `rank`."""
    inside: float = batch * share_Q[rank] / share_Q[entry]
    return inside


@compiled
def locate(batches_G: FloatArray, batch: float) -> tuple[int, float]:
    """Returns the index of the measured size below a batch, and the fraction of the interval above it, clamped."""
    if batch <= batches_G[0]:
        return 0, 0.0
    cell = 0
    while cell + 2 < batches_G.size and batches_G[cell + 1] <= batch:
        cell += 1
    if cell + 1 >= batches_G.size:
        return cell, 0.0
    part = (batch - batches_G[cell]) / (batches_G[cell + 1] - batches_G[cell])
    if part >= 1.0:
        return cell + 1, 0.0
    return cell, part


@compiled
def seconds_at(seconds_G: FloatArray, cell: int, part: float) -> float:
    """Returns the seconds of one block or ramp at a batch that `locate` found, by linear interpolation."""
    low: float = seconds_G[cell]
    return low + part * (seconds_G[cell + 1] - low) if part > 0.0 else low


@compiled
def run_s(sums_GK: FloatArray, cell: int, part: float, first: int, end: int) -> float:
    """Returns the seconds of blocks first..end-1, from prefix sums over the blocks before each boundary (K)."""
    low: float = sums_GK[cell, end] - sums_GK[cell, first]
    if part == 0.0:
        return low
    high: float = sums_GK[cell + 1, end] - sums_GK[cell + 1, first]
    return low + part * (high - low)


@compiled
def hop_s(delay_s: float, num_bytes: float, leaving: float, bandwidth: float) -> float:
    """Returns the transfer time (T_x in E3) of `leaving` inputs of `num_bytes` each."""
    return delay_s + num_bytes * leaving / bandwidth
