"""Sorting by several keys inside kernels: numba's own argsort takes one, and long to compile."""

from __future__ import annotations

import numpy as np

from optimizer.compiled import compiled
from optimizer.split_times import FloatArray, IntArray


@compiled
def ordered(item_L: IntArray, group_I: IntArray, first_I: FloatArray, second_I: FloatArray) -> IntArray:
    """The items (L) by group, then by the first key, then by the second; keys are looked up by item (merge sort)."""
    count = item_L.size
    here_L, there_L = item_L.copy(), np.empty(count, dtype=np.int64)
    width = 1
    while width < count:
        for begin in range(0, count, 2 * width):
            left, right = begin, min(begin + width, count)
            middle, end = right, min(begin + 2 * width, count)
            for position in range(begin, end):
                take_left = left < middle
                if take_left and right < end:
                    one, other = here_L[left], here_L[right]
                    if group_I[one] != group_I[other]:
                        take_left = group_I[one] < group_I[other]
                    elif first_I[one] != first_I[other]:
                        take_left = first_I[one] < first_I[other]
                    else:
                        take_left = second_I[one] <= second_I[other]
                if take_left:
                    there_L[position] = here_L[left]
                    left += 1
                else:
                    there_L[position] = here_L[right]
                    right += 1
        here_L, there_L = there_L, here_L
        width *= 2
    return here_L
