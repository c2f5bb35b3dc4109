"""What one step of a batch costs, its blocks' seconds, a ramp's, a hop's: the kernels that every search sums.

Legend: *rank* 0 stands for "no ramp yet", rank r + 1 for the problem's r-th ramp. `share_Q` holds, per rank, the share
of inputs inside the model after it; `after_Q` the first block after it; G are the measured batch sizes.

`optimizer.evaluate` scores every plan that is found by NumPy's `interp`: the same lines, rounded otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from optimizer.compiled import compiled

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Labels(NamedTuple):
    """The labels of a search (L), those in use first; each search has columns of its own."""

    int_LI: IntArray
    float_LF: FloatArray


@compiled
def with_doubled_capacity(labels: Labels) -> Labels:
    """The same labels in twice the room."""
    int_LI, float_LF = labels
    return Labels(np.concatenate((int_LI, np.empty_like(int_LI))), np.concatenate((float_LF, np.empty_like(float_LF))))


@compiled
def linked_labels(head: int, int_LI: IntArray, column: int) -> IntArray:
    """The labels of a linked list, from its head on; a column holds the label behind each, and -1 ends the list."""
    count, label = 0, head
    while label != -1:
        count, label = count + 1, int_LI[label, column]
    found_L, label = np.empty(count, dtype=np.int64), head
    for place in range(count):
        found_L[place], label = label, int_LI[label, column]
    return found_L


@compiled
def undominated(
    order_L: IntArray, group_L: IntArray, figures_LF: FloatArray, first: int, end: int, rounding: float, most: int
) -> tuple[bool, IntArray]:
    """Whether none was left out, and the labels that no earlier one of their group is as good as in everything.

    `order_L` are labels, that is rows of the figures, of which columns `first` to `end` - 1 are compared; `group_L` has
    the group of each, in the same order. Of a group only the first `most` are kept.
    """
    kept_L = np.empty(order_L.size, dtype=np.int64)
    num_kept, first_kept, is_complete = 0, 0, True
    for place in range(order_L.size):
        if place > 0 and group_L[place] != group_L[place - 1]:
            first_kept = num_kept
        is_beaten = False
        for other in range(first_kept, num_kept):
            if dominates(figures_LF, kept_L[other], order_L[place], first, end, rounding):
                is_beaten = True
                break
        if is_beaten:
            continue
        if num_kept - first_kept >= most:
            is_complete = False
            continue
        kept_L[num_kept] = order_L[place]
        num_kept += 1
    return is_complete, kept_L[:num_kept]


@compiled
def dominates(figures_LF: FloatArray, one: int, other: int, first: int, end: int, rounding: float) -> bool:
    """Whether one row of figures is as good as another in columns `first` to `end` - 1; equal ones are."""
    for column in range(first, end):  # noqa: SIM110 - kernels have no generators
        if figures_LF[one, column] > figures_LF[other, column] * (1 + rounding):
            return False
    return True


@compiled
def batch_inside(share_Q: FloatArray, entry: int, rank: int, batch: float) -> float:
    """Inputs left, after the ramp of a rank, of a batch that was full when it entered at another."""
    inside: float = batch * share_Q[rank] / share_Q[entry]
    return inside


@compiled
def locate(batches_G: FloatArray, batch: float) -> tuple[int, float]:
    """The measured size below a batch, and the part of the way to the next; constant below the smallest."""
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
    """One block's or ramp's, at a batch that `locate` has found: linear between measured sizes."""
    low: float = seconds_G[cell]
    return low + part * (seconds_G[cell + 1] - low) if part > 0.0 else low


@compiled
def run_s(sums_GK: FloatArray, cell: int, part: float, first: int, end: int) -> float:
    """The same of blocks first..end-1, from sums over the blocks before each boundary (K)."""
    low: float = sums_GK[cell, end] - sums_GK[cell, first]
    if part == 0.0:
        return low
    high: float = sums_GK[cell + 1, end] - sums_GK[cell + 1, first]
    return low + part * (high - low)


@compiled
def hop_s(delay_s: float, num_bytes: float, leaving: float, bandwidth: float) -> float:
    """E3's T_x, of so many inputs of `num_bytes` each."""
    return delay_s + num_bytes * leaving / bandwidth
