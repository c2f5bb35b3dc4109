"""Batching schemes of TCB's evaluation, really computed: padded rows and rows of several inputs, by one encoder.

Here linear layers see padding too, as they do where a batch is a rectangle. Ours see tokens alone (`Layout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from earlyexit.layout import Attend, Layout, Masks
from earlyexit.model import EarlyExitModel
from earlyexit.slots import first_fit_decreasing
from simulator.decisions import IntArray


class Rows(Layout):
    """Slots of one length as the whole of a batch: what is nobody's is computed like a token, and thrown away."""

    def __init__(self, lengths_B: IntArray, slots: list[list[int]], slot_length: int) -> None:
        super().__init__(lengths_B.astype(np.int32))
        self.longest = slot_length
        vars(self).update(slots=slots, scheme="slotted", _shares_rows=True)  # in the place of what Layout would choose

    @property
    def uniform(self) -> bool:
        """Whether there is no padding, and nobody beside another."""
        return self.num_tokens == self.num_inputs * self.longest

    @cached_property
    def position_N(self) -> Tensor:
        """Of every place; 0 where it is nobody's."""
        return self.spread(torch.from_numpy(self._positions()))

    def spread(self, values_N: Tensor) -> Tensor:
        """What belongs to tokens, at their places."""
        places = values_N.new_zeros(len(self.slots) * self.longest)
        places[self.row_place_N] = values_N
        return places

    def masks(self, bias_HTT: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Masks:
        """None where there is nothing to hide; where no two inputs share a slot, the padding alone."""
        if self.uniform:
            return [bias_HTT]
        alone = len(self.slots) == self.num_inputs
        return [self._masked((self.owner_RT >= 0)[:, None, None, :] if alone else self.same_R1TT, bias_HTT)]

    def attend(self, values_ND: Tensor, masks: Masks, attend: Attend) -> tuple[Tensor, ...]:
        """Of rows that are already there."""
        (mask,) = masks
        attended = attend(values_ND.view(len(self.slots), self.longest, -1), mask)
        return tuple(each.flatten(0, 1) for each in attended)


def padded_rows(lengths: Sequence[int]) -> Rows:
    """A row per input, as long as the longest (the paper's TNB)."""
    return Rows(np.array(lengths), [[index] for index in range(len(lengths))], max(lengths))


def concatenated_rows(lengths: Sequence[int], row: int, slots_per_row: int = 1) -> Rows:
    """Rows of so many tokens with several inputs each (TCB's pure ConcatBatching), attention by slots of a row.

    Rows are divided evenly; what is left over of one, and empty slots of the last, are not computed. Raises ValueError
    for an input longer than a slot.
    """
    slot_length = row // slots_per_row
    return Rows(np.array(lengths), first_fit_decreasing(lengths, slot_length), slot_length)


@torch.inference_mode()
def outputs_of(model: EarlyExitModel, tokens_N: Tensor, layout: Layout) -> Tensor:
    """The full model's outputs for inputs laid out so."""
    packed = Layout(layout.lengths_B)
    rows = isinstance(layout, Rows)
    values = (layout.spread(tokens_N),) if isinstance(layout, Rows) else (tokens_N,)
    (hidden,) = model.run_blocks(0, model.num_blocks, values, layout)
    hidden_ND = hidden[layout.row_place_N] if rows else hidden
    return model.exit_outputs(model.num_blocks - 1, (hidden_ND,), packed)
