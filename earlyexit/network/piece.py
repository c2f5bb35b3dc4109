"""The form in which inputs enter, cross and leave a cut: packed, as one row per token of all inputs.

Tensor legend of the whole folder: B inputs, N tokens of all inputs one after the other (packed, no padding), T tokens
of the longest input, R rows of attention, D hidden, H heads, C classes, E exits, S width of the exit policy's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from earlyexit.engine.queue import Attention, any_two_fit, first_fit_decreasing
from earlyexit.named import HopDtype
from earlyexit.network.boundary import Lengths, WirePiece

Tensors = tuple[Tensor, ...]
LARGEST_HALF = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A set of inputs inside the model, on a device.

    Tensors are packed: all tokens one after the other, without padding. So fusing is concatenation, an input costs only
    its own tokens, and no input's arithmetic contains another's padding. Masks and positions follow from the lengths.
    Inputs without tokens (images) have length 1. A tensor has a row per token or a row per input.
    """

    sample_ids: tuple[str, ...]
    next_block: int
    lengths_B: Lengths
    """Held on the host, so that layouts are made without waiting for the device."""
    tensors: Tensors
    """What crosses before `next_block`: tensors with a row per token of all inputs, or a row per input. If words may be
    pruned later there is one more: `importance` (N,), the attention that every token has received so far."""
    state_BS: Tensor
    """The exit policy's state (PABEE's counter, votes), one row per input, S = 0 for policies without."""

    def __len__(self) -> int:
        return len(self.sample_ids)

    def select(self, keep: Sequence[int]) -> Piece:
        """Returns the inputs at the given positions, in the given order."""
        index_K = to_device(torch.tensor(keep, dtype=torch.int64), self.state_BS.device)
        lengths_K = self.lengths_B[list(keep)]
        pick = self._select_rows(keep, lengths_K, index_K)
        return replace(
            self,
            sample_ids=tuple(self.sample_ids[k] for k in keep),
            lengths_B=lengths_K,
            tensors=tuple(pick(values) for values in self.tensors),
            state_BS=self.state_BS[index_K],
        )

    def singles(self) -> list[Piece]:
        """Returns one piece per input; views, no copies."""
        lengths = self.lengths_B.tolist()
        columns = [torch.split(values, 1 if len(values) == len(self) else lengths) for values in self.tensors]
        # Most policies have no state: all inputs then share one empty row.
        states = torch.split(self.state_BS, 1) if self.state_BS.shape[1] else [self.state_BS[:1]] * len(self)
        rows = zip(*columns, strict=True) if columns else [()] * len(self)
        return [
            Piece(
                sample_ids=(sample_id,),
                next_block=self.next_block,
                lengths_B=self.lengths_B[k : k + 1],
                tensors=values,
                state_BS=states[k],
            )
            for k, (sample_id, values) in enumerate(zip(self.sample_ids, rows, strict=True))
        ]

    def to_wire(self, hop_dtype: HopDtype = "same") -> WirePiece:
        """Returns a host copy for another process; `hop_dtype` is for `float` tensors, not for the policy's state."""
        crossing = self.tensors if hop_dtype == "same" else map(halved, self.tensors)
        *tensors, state_BS = all_to_host((*crossing, self.state_BS))
        return WirePiece(
            sample_ids=self.sample_ids,
            next_block=self.next_block,
            lengths_B=self.lengths_B,
            tensors=tuple(map(_array, tensors)),
            state_BS=state_BS.detach().numpy(),
        )

    def _select_rows(self, keep: Sequence[int], lengths_K: Lengths, index_K: Tensor) -> Callable[[Tensor], Tensor]:
        """Returns a function that takes the rows of some inputs from a tensor of either kind."""
        if self.lengths_B.min() == self.lengths_B.max():
            # With equal lengths an input can be one long row: few rows to copy, few numbers to send to the device.
            return lambda values: values.reshape(len(self), -1).index_select(0, index_K).view(-1, *values.shape[1:])
        starts_B = np.cumsum(self.lengths_B) - self.lengths_B
        shift_K = starts_B[list(keep)] - (np.cumsum(lengths_K) - lengths_K)
        rows_M = np.arange(int(lengths_K.sum())) + np.repeat(shift_K, lengths_K)
        rows = to_device(torch.from_numpy(rows_M), index_K.device)
        return lambda values: values[index_K if len(values) == len(self) else rows]


def fuse(pieces: Sequence[Piece]) -> Piece:
    """Returns one piece of several that wait for the same block; the order of the inputs is kept.

    If only some carry `importance`, that of the others is unknown: NaN.
    """
    first = pieces[0]
    assert all(piece.next_block == first.next_block for piece in pieces)
    if len(pieces) == 1:
        return first
    sample_ids = tuple(sample_id for piece in pieces for sample_id in piece.sample_ids)
    states = [piece.state_BS for piece in pieces]
    return Piece(
        sample_ids=sample_ids,
        next_block=first.next_block,
        lengths_B=np.concatenate([piece.lengths_B for piece in pieces]),
        tensors=tuple(map(torch.cat, zip(*_alike(pieces), strict=True))),
        # Most policies have no state, and there is nothing to concatenate.
        state_BS=torch.cat(states) if states[0].shape[1] else states[0].new_empty(len(sample_ids), 0),
    )


def _alike(pieces: Sequence[Piece]) -> list[Tensors]:
    """Returns the pieces' tensors, the same number for each piece."""
    most = max([len(piece.tensors) for piece in pieces])
    return [
        piece.tensors
        if len(piece.tensors) == most
        else (*piece.tensors, torch.full((int(piece.lengths_B.sum()),), torch.nan, device=piece.state_BS.device))
        for piece in pieces
    ]


def halved(values: Tensor) -> Tensor:
    """Returns a float32 tensor in half precision, with values beyond its range clamped; other types unchanged.

    Infinite values are clamped too: an infinite value would make others of its input infinite, or NaN, where the value
    that it stands for may not. NaN stays.
    """
    return values.half().clamp_(-LARGEST_HALF, LARGEST_HALF) if values.dtype == torch.float32 else values


def _array(values: Tensor) -> npt.NDArray[np.generic]:
    host = values.detach()
    return (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()


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
        if not self._shares_rows:
            return tuple(map(self.unpad, attend(self.pad(values_ND), mask)))
        rows, length = self.owner_RT.shape
        slots = values_ND.new_zeros(rows * length, *values_ND.shape[1:])
        slots[self.row_place_N] = values_ND
        attended_R = attend(slots.view(rows, length, *values_ND.shape[1:]), mask)
        return tuple(each.reshape(rows * length, *each.shape[2:])[self.row_place_N] for each in attended_R)

    @cached_property
    def _shares_rows(self) -> bool:
        return self.scheme == "slotted" and len(self.slots) < self.num_inputs

    def _masked(self, seen: Tensor, bias_HTT: Tensor | None) -> Tensor:
        return seen if bias_HTT is None else bias_HTT.masked_fill(~seen, -torch.inf)

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


T = TypeVar("T")
Wait = Callable[[], None]
"""Returns when the device has done its earlier work."""


def to_host(tensor: Tensor) -> Tensor:
    """Returns the tensor in host memory: itself on the CPU; from a GPU a copy through pinned memory, after waiting."""
    return tensor if tensor.device.type != "cuda" else all_to_host((tensor,))[0]


def all_to_host(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns tensors of one device in host memory, as `to_host`; all copies are started before a single wait."""
    device = tensors[0].device
    if device.type != "cuda":
        return tuple(tensors)
    # Not `.cpu()`: a copy to pageable memory goes through a buffer of the driver's and waits each time.
    copies = tuple(torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors)
    for copy, each in zip(copies, tensors, strict=True):
        copy.copy_(each, non_blocking=True)
    wait_for(device)
    return copies


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device: itself if it is there; else a copy, to a GPU through pinned memory without a wait.

    Torch keeps pinned memory in slots, and does not reuse a slot before the copy from it is over.
    """
    if device.type != "cuda" or tensor.is_cuda or not tensor.numel():
        return tensor.to(device)
    if torch.cuda.is_current_stream_capturing():  # a graph would read the slot after its reuse
        raise RuntimeError("a copy from host memory cannot be captured")
    return tensor.pin_memory().to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done the work of the current stream; returns at once on the CPU."""
    if device.type == "cuda":
        mark_cuda(device)()


def mark_cuda(device: torch.device) -> Wait:
    """Mark the end of the current stream's work so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch ships no type for it
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def when_computed(items: Iterable[T], mark: Callable[[], Wait]) -> Iterator[T]:
    """Yields each item when the device has computed it; by then the next item's work has been started too.

    Taking an item from `items` starts its work on the device, without waiting.
    """
    waiting: tuple[T, Wait] | None = None
    for item in items:
        told = item, mark()
        if waiting is not None:
            waiting[1]()
            yield waiting[0]
        waiting = told
    if waiting is not None:
        waiting[1]()
        yield waiting[0]
