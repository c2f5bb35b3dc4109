"""The place of every token of a packed set of inputs.

Tensor legend of the whole folder: B inputs, N tokens of all inputs one after the other (packed, no padding), T tokens
of the longest input, R rows of attention, D hidden, H heads, C classes, E exits, S width of the exit policy's state.
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
"""One per operation of attention: which keys a query sees (True), or what is added to its score; None where it sees its
whole row. Each extends to (R, H, T, T), queries before keys."""
Attend = Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]
"""From rows (R, T, ...) and a mask to rows of one kind or several; each row attends to itself."""


SCORES_PER_CALL = 500
"""The cost of a separate call of attention, in scores of one token for another by twelve heads: about 25 us."""
FEW_TOKENS = 6
"""Up to this length of the longest input, padding and its mask cost less than calls (MiniLM, processor time)."""
TOGETHER = 40
"""Tokens of short inputs that attend in one call in the scheme `apart`: a call costs as much as a thousand scores
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
        """`together`: tokens of short inputs that attend in one call in `apart`; 0: each alone, bit by bit."""
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

        With equal lengths the padded form has no padding and no mask, and is one operation. On a CPU with one thread
        `apart` is at least as fast, except for inputs of a few tokens (`experiments.tokens.attention_slots@654e280`).
        With more threads it is taken where it saves more scores than its calls cost.
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
        """The input that has each place of the slots, int32; -1 for places without a token."""
        owner = np.full(len(self.slots) * self.longest, -1, dtype=np.int32)
        owner[self._row_places] = self._samples()
        return self._tensor(owner.reshape(len(self.slots), self.longest))

    @cached_property
    def slots(self) -> list[list[int]]:
        """The inputs of every row of attention, each as long as the longest input: several per row where `slotted`."""
        lengths = self.lengths_B.tolist()
        if self.scheme == "slotted" and any_two_fit(lengths, self.longest):
            return first_fit_decreasing(lengths, self.longest)
        return [[index] for index in range(self.num_inputs)]

    @cached_property
    def same_R1TT(self) -> Tensor:
        """True where two places of a slot are of one input; places without a token see each other."""
        return self.owner_RT[:, None, :, None] == self.owner_RT[:, None, None, :]

    @cached_property
    def groups(self) -> list[list[int]]:
        """The lengths of the neighbouring inputs that attend in one call in the scheme `apart`."""
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
        """Returns the masks for `attend`, equal in all blocks; `bias_HTT`: a bias by distance for the longest row.

        `dtype`: the type of the values that attend; torch takes masks of this type, and bool only by a conversion.
        """
        if self.scheme == "apart":
            return [_mask_of(group, bias_HTT, dtype, self.device) for group in self.groups]
        if self._shares_rows:
            return [self._masked(self.same_R1TT, bias_HTT)]
        return [bias_HTT if self.uniform else self._masked(self.mask_BT[:, None, None, :], bias_HTT)]

    @cached_property
    def counted_RT(self) -> Tensor | None:
        """1 where a row's place is a token, 0 where it is padding that looks at tokens; None without such padding."""
        lone = self.uniform or self.scheme == "apart" or self._shares_rows
        return None if lone else self.mask_BT.float()

    def attend(self, values_ND: Tensor, masks: Masks, attend: Attend) -> tuple[Tensor, ...]:
        """Returns `attend` of every input's own tokens, packed (N, ...), under this layout's `masks`.

        In every scheme an input's tokens lie side by side in their row, so that a bias by distance is the same for all
        rows.
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
        """Returns packed values padded, (B, T, D), with zeros behind every input's last token."""
        width = values_ND.shape[1:]
        if self.uniform:
            return values_ND.reshape(self.num_inputs, self.longest, *width)
        padded = values_ND.new_zeros(self.num_inputs * self.longest, *width)
        padded[self.place_N] = values_ND
        return padded.view(self.num_inputs, self.longest, *width)

    def unpad(self, values_BTD: Tensor) -> Tensor:
        """Returns padded values packed, (N, D)."""
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
    """Returns the mask between inputs that attend side by side, (T, T) or with a bias (H, T, T); None for one input."""
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
