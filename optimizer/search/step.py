"""Labels of a search: their memory, and which of them dominate others."""

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
