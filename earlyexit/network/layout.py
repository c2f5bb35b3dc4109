"""Where every token of a packed set of inputs is.

Tensor legend, used in the whole folder: B inputs, N tokens of all inputs one after the other (packed, no padding),
T tokens of the longest input, R rows of attention, D hidden, H heads, C classes, E exits, S width of the exit policy's
state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from earlyexit.engine.order import Attention, any_two_fit, first_fit_decreasing
from earlyexit.network.transfer import to_device
from earlyexit.network.wire import Lengths

Masks = Sequence[Tensor | None]
"""Of every operation of attention: which keys a query sees (True), or what is added to its score; None where it sees
all of its row. Each extends to (R, H, T, T), queries before keys."""
Attend = Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]
"""Rows (R, T, ...) that attend, each to itself, under a mask, to rows, of one kind or several."""


SCORES_PER_CALL = 500
"""What an attention of its own costs, beside its work, in scores of a token for another by twelve heads: some 25 us."""
FEW_TOKENS = 6
"""Up to so many of the longest input, padding and its mask cost less than calls: 64 inputs of up to 5 tokens attend in
0.8 of the time that `apart` takes, of up to 3 in 0.5; of up to 8 it is 1.2 (MiniLM, processor time)."""
TOGETHER = 40
"""Tokens of short inputs that attend in one call where `apart`: a call costs what the scores of a thousand pairs of
tokens do, so that three or four questions of 11 tokens take half the time together
(`experiments.tokens.attention_slots@654e280`)."""


class Layout:
    """Index tensors derived from the lengths of a packed set of inputs; each is computed once, when first used."""

    def __init__(
        self,
        lengths_B: Lengths,
        device: torch.device | str = "cpu",
        attention: Attention = "auto",
        *,
        together: int = TOGETHER,
    ) -> None:
        """`together`: tokens of short inputs that attend in one call where `apart`; 0: each alone, to the last bit."""
        self.lengths_B = lengths_B
        self.device = torch.device(device)
        self._attention = attention
        self._together = together
        self.num_inputs = len(lengths_B)
        self.num_tokens = int(lengths_B.sum())
        self.longest = int(lengths_B.max(initial=0))

    @property
    def uniform(self) -> bool:
        """Whether all inputs have the same length, so that packed and padded are the same."""
        return self.num_tokens == self.num_inputs * self.longest

    def per_input(self, values: Tensor) -> bool:
        """Whether values have a row per input; where every input is one token, that is also one per token."""
        return len(values) == self.num_inputs

    @cached_property
    def first_token_B(self) -> Tensor:
        """Index of every input's first token, int64."""
        return self._tensor(np.cumsum(self.lengths_B) - self.lengths_B)

    @cached_property
    def last_token_B(self) -> Tensor:
        """Index of every input's last token, int64."""
        return self._tensor(np.cumsum(self.lengths_B) - 1)

    @cached_property
    def position_N(self) -> Tensor:
        """The place of every token within its input, int64."""
        return self._tensor(self._positions())

    @cached_property
    def scheme(self) -> Attention:
        """How inputs attend; never `auto`.

        Of equal lengths the padded form holds neither padding nor mask, and is one operation. On a CPU by one thread
        `apart` is as fast or faster (`experiments.tokens.attention_slots@654e280`) but for inputs of a few tokens; by
        more threads it is taken where what it saves of them is more than what calling torch for every input costs the
        one that calls.
        """
        if self.uniform:
            return "padded"
        if self._attention != "auto":
            return self._attention
        if self.device.type != "cpu":
            return "padded"
        threads = torch.get_num_threads()
        spared = (self.num_inputs * self.longest**2 - int((self.lengths_B.astype(np.int64) ** 2).sum())) / threads
        alone = threads == 1 and self.longest > FEW_TOKENS
        return "apart" if alone or spared > SCORES_PER_CALL * self.num_inputs else "padded"

    @cached_property
    def place_N(self) -> Tensor:
        """The place of every token in the padded form flattened to B * T, int64."""
        return self._tensor(self._samples() * self.longest + self._positions())

    @cached_property
    def mask_BT(self) -> Tensor:
        """True where the padded form holds a token."""
        return self._tensor(np.arange(self.longest)[None, :] < self.lengths_B[:, None])

    @cached_property
    def lengths_B1(self) -> Tensor:
        """Lengths as float32, to divide sums by."""
        return self._tensor(self.lengths_B.astype(np.float32)[:, None])

    @cached_property
    def row_place_N(self) -> Tensor:
        """The place of every token in the slots flattened to R * T, int64; an input's tokens stay side by side."""
        return self._tensor(self._row_places)

    @cached_property
    def owner_RT(self) -> Tensor:
        """Which input every place of the slots is of, int32; -1 where it is nobody's."""
        owner = np.full(len(self.slots) * self.longest, -1, dtype=np.int32)
        owner[self._row_places] = self._samples()
        return self._tensor(owner.reshape(len(self.slots), self.longest))

    @cached_property
    def slots(self) -> list[list[int]]:
        """The inputs of every row of attention, as long as the longest: more than one where `slotted`."""
        lengths = self.lengths_B.tolist()
        if self.scheme == "slotted" and any_two_fit(lengths, self.longest):
            return first_fit_decreasing(lengths, self.longest)
        return [[index] for index in range(self.num_inputs)]

    @cached_property
    def same_R1TT(self) -> Tensor:
        """True where two places of a slot are of one input; what is nobody's sees its like, so that no row is empty."""
        return self.owner_RT[:, None, :, None] == self.owner_RT[:, None, None, :]

    @cached_property
    def groups(self) -> list[list[int]]:
        """The lengths of the inputs that attend in one call where `apart`: of neighbours."""
        groups: list[list[int]] = []
        tokens = self._together
        for length in self.lengths_B.tolist():
            tokens += length
            if not groups or tokens > self._together:
                groups.append([])
                tokens = length
            groups[-1].append(length)
        return groups

    def masks(self, bias_HTT: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Masks:
        """What `attend` takes, the same for all blocks; with a bias by distance for rows as long as the longest.

        `dtype`: of the values that attend; torch takes no other than theirs, and bool only at a detour in every call.
        """
        if self.scheme == "apart":
            return [_mask_of(group, bias_HTT, dtype, self.device) for group in self.groups]
        if self._shares_rows:
            return [self._masked(self.same_R1TT, bias_HTT)]
        return [bias_HTT if self.uniform else self._masked(self.mask_BT[:, None, None, :], bias_HTT)]

    @cached_property
    def counted_RT(self) -> Tensor | None:
        """1 where a row's place is a token, 0 where it is padding that looks at tokens; None where none does so."""
        lone = self.uniform or self.scheme == "apart" or self._shares_rows
        return None if lone else self.mask_BT.float()

    def attend(self, values_ND: Tensor, masks: Masks, attend: Attend) -> tuple[Tensor, ...]:
        """What `attend` makes of every input's own tokens, packed (N, ...), by this layout's `masks`.

        In every scheme an input's tokens lie side by side in their row, so that what depends on the distance of two is
        the same for all rows.
        """
        if self.scheme == "apart":
            groups = torch.split(values_ND, [sum(group) for group in self.groups])
            attended = [attend(each[None], mask) for each, mask in zip(groups, masks, strict=True)]
            return tuple(torch.cat([rows[0] for rows in kind]) for kind in zip(*attended, strict=True))
        (mask,) = masks
        if self._shares_rows:
            return self._attend_in_slots(values_ND, mask, attend)
        return tuple(map(self.unpad, attend(self.pad(values_ND), mask)))

    @cached_property
    def _shares_rows(self) -> bool:
        return self.scheme == "slotted" and len(self.slots) < self.num_inputs

    def _masked(self, seen: Tensor, bias_HTT: Tensor | None) -> Tensor:
        return seen if bias_HTT is None else bias_HTT.masked_fill(~seen, -torch.inf)

    def _attend_in_slots(self, values_ND: Tensor, mask: Tensor | None, attend: Attend) -> tuple[Tensor, ...]:
        rows, length = self.owner_RT.shape
        slots = values_ND.new_zeros(rows * length, *values_ND.shape[1:])
        slots[self.row_place_N] = values_ND
        attended = attend(slots.view(rows, length, *values_ND.shape[1:]), mask)
        return tuple(each.reshape(rows * length, *each.shape[2:])[self.row_place_N] for each in attended)

    def pad(self, values_ND: Tensor) -> Tensor:
        """Packed to padded, (B, T, D), zeros behind every input's last token."""
        width = values_ND.shape[1:]
        if self.uniform:
            return values_ND.reshape(self.num_inputs, self.longest, *width)
        padded = values_ND.new_zeros(self.num_inputs * self.longest, *width)
        padded[self.place_N] = values_ND
        return padded.view(self.num_inputs, self.longest, *width)

    def unpad(self, values_BTD: Tensor) -> Tensor:
        """Padded to packed, (N, D)."""
        flat = values_BTD.reshape(self.num_inputs * self.longest, *values_BTD.shape[2:])
        return flat if self.uniform else flat[self.place_N]

    @cached_property
    def _row_places(self) -> npt.NDArray[np.int64]:
        order = np.concatenate(self.slots)
        sizes_R = np.array([len(slot) for slot in self.slots])
        before = np.cumsum(self.lengths_B[order]) - self.lengths_B[order]
        filled = np.repeat(before[np.cumsum(sizes_R) - sizes_R], sizes_R)
        starts_B = np.empty(self.num_inputs, dtype=np.int64)
        starts_B[order] = np.repeat(np.arange(len(sizes_R)), sizes_R) * self.longest + before - filled
        return np.repeat(starts_B, self.lengths_B) + self._positions()

    def _samples(self) -> npt.NDArray[np.int64]:
        return np.repeat(np.arange(self.num_inputs), self.lengths_B)

    def _positions(self) -> npt.NDArray[np.int64]:
        starts = np.cumsum(self.lengths_B) - self.lengths_B
        return np.arange(self.num_tokens) - np.repeat(starts, self.lengths_B)

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(array)), self.device)


def _mask_of(
    lengths: Sequence[int], bias_HTT: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """What keeps inputs apart that attend side by side, (T, T) or with a bias by distance (H, T, T); None for one."""
    if len(lengths) == 1:
        return None if bias_HTT is None else bias_HTT[:, : lengths[0], : lengths[0]]
    tokens = sum(lengths)
    if bias_HTT is None:
        owner_T = np.repeat(np.arange(len(lengths)), lengths)
        apart_TT = np.where(owner_T[:, None] == owner_T, np.float32(0), np.float32(-np.inf))
        return to_device(torch.from_numpy(apart_TT), device).to(dtype)
    mask_HTT = bias_HTT.new_full((len(bias_HTT), tokens, tokens), -torch.inf)
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        mask_HTT[:, own, own] = bias_HTT[:, :length, :length]
        start += length
    return mask_HTT
