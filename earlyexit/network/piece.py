"""Pieces: the packed form of inputs between the parts of a network, and the layout that attention needs.

Tensor legend of the whole folder: B inputs, N tokens of all inputs one after the other (packed, no padding), T tokens
of the longest input, R rows of attention, D hidden, H heads, C classes, E exits, S width of the exit policy's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

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

    Tensors are packed: they hold the tokens of all inputs one after the other, without padding. So fusing is
    concatenation, and an input costs only its own tokens. Masks and positions follow from the lengths. Inputs without
    tokens, such as images, have length 1. A tensor has a row per token or a row per input.
    """

    sample_ids: tuple[str, ...]
    next_block: int
    lengths_B: Lengths
    """On the host, so that layouts are made without waiting for the device."""
    tensors: Tensors
    """The hidden state before `next_block`. If words may be pruned later, the last tensor is `importance` (N,): the
    attention that every token has received so far."""
    state_BS: Tensor
    """The exit policy's state, such as PABEE's counter, one row per input; S = 0 for policies without state."""
    layouts: dict[Attention, Layout] = field(default_factory=dict, repr=False, compare=False)
    """Layouts by scheme, which later segments with the same inputs use again."""

    def __len__(self) -> int:
        return len(self.sample_ids)

    def layout(self, attention: Attention) -> Layout:
        """Returns the layout of the inputs."""
        known = self.layouts.get(attention)
        if known is None or known.lengths_B is not self.lengths_B:  # `replace` keeps the layouts of other lengths
            known = self.layouts[attention] = Layout(self.lengths_B, self.state_BS.device, attention)
        return known

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
            state_BS=self.state_BS[index_K] if self.state_BS.shape[1] else self.state_BS[: len(keep)],
        )

    def singles(self) -> list[Piece]:
        """Returns one piece per input. The tensors are views."""
        lengths = self.lengths_B.tolist()
        columns = [torch.split(values, 1 if len(values) == len(self) else lengths) for values in self.tensors]
        # Most policies have no state. Then all inputs share one empty row.
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
        """Returns a host copy for another process. `hop_dtype` applies to `float` tensors but not to `state_BS`."""
        converted = self.tensors if hop_dtype == "same" else map(halved, self.tensors)
        *tensors, state_BS = all_to_host((*converted, self.state_BS))
        return WirePiece(
            sample_ids=self.sample_ids,
            next_block=self.next_block,
            lengths_B=self.lengths_B,
            tensors=tuple(map(_array, tensors)),
            state_BS=state_BS.detach().numpy(),
        )

    def _select_rows(self, keep: Sequence[int], lengths_K: Lengths, index_K: Tensor) -> Callable[[Tensor], Tensor]:
        """Returns a function that selects the rows of the inputs `keep` from a tensor with either kind of rows."""
        if self.lengths_B.min() == self.lengths_B.max():
            # If lengths are equal, each input is viewed as one long row. The index on the device is then short.
            return lambda values: values.reshape(len(self), -1).index_select(0, index_K).view(-1, *values.shape[1:])
        starts_B = np.cumsum(self.lengths_B) - self.lengths_B
        shift_K = starts_B[list(keep)] - (np.cumsum(lengths_K) - lengths_K)
        rows_M = np.arange(int(lengths_K.sum())) + np.repeat(shift_K, lengths_K)
        rows = to_device(torch.from_numpy(rows_M), index_K.device)
        return lambda values: values[index_K if len(values) == len(self) else rows]


def fuse(pieces: Sequence[Piece]) -> Piece:
    """Returns pieces that wait for the same block as one. If only some have `importance`, it is NaN for others."""
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
        tensors=tuple(map(torch.cat, zip(*_with_importance(pieces), strict=True))),
        # Most policies have no state, so that nothing is concatenated.
        state_BS=torch.cat(states) if states[0].shape[1] else states[0].new_empty(len(sample_ids), 0),
    )


def _with_importance(pieces: Sequence[Piece]) -> list[Tensors]:
    """Returns the tensors of each piece, with NaN as `importance` where only other pieces have it."""
    most = max([len(piece.tensors) for piece in pieces])
    return [
        piece.tensors
        if len(piece.tensors) == most
        else (*piece.tensors, torch.full((int(piece.lengths_B.sum()),), torch.nan, device=piece.state_BS.device))
        for piece in pieces
    ]


def halved(values: Tensor) -> Tensor:
    """Returns a float32 tensor in float16. Other types are unchanged.

    Values beyond the range of float16, including infinity, are clamped, because an infinite value could make other
    values of its input infinite or NaN. NaN stays NaN.
    """
    return values.half().clamp_(-LARGEST_HALF, LARGEST_HALF) if values.dtype == torch.float32 else values


def _array(values: Tensor) -> npt.NDArray[np.generic]:
    host = values.detach()
    return (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()


Masks = Sequence[Tensor | None]
"""One attention mask per call: bool (True: the query sees the key) or float (added to the scores); None: the query sees
its whole row. Each mask broadcasts to (R, H, T, T), queries before keys."""
Attend = Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]
"""Computes attention within each row: takes rows (R, T, ...) and a mask, and returns one or several tensors of rows."""


SCORES_PER_CALL = 500
"""The cost of one more attention call, about 25 us, as a number of token pairs with twelve heads."""
FEW_TOKENS = 6
"""Up to this length of the longest input, padding costs less than separate calls (MiniLM, processor time)."""
TOGETHER = 40
"""The most tokens of short inputs that share a call in `apart` (`experiments.tokens.attention_slots@654e280`)."""


class Layout:
    """Index tensors of a packed set of inputs. They follow from the lengths, and each is computed at its first use."""

    def __init__(
        self,
        lengths_B: Lengths,
        device: torch.device | str = "cpu",
        attention: Attention = "auto",
        *,
        together: int = TOGETHER,
    ) -> None:
        """`together`: see `TOGETHER`. 0: each input has its own call, so that results do not depend on other inputs."""
        self.lengths_B = lengths_B
        self.device = torch.device(device)
        self._attention = attention
        self._together = together
        self.num_inputs = len(lengths_B)
        self.num_tokens = int(lengths_B.sum())
        self.longest = int(lengths_B.max(initial=0))

    @cached_property
    def uniform(self) -> bool:
        """Whether all inputs have the same length, so that the packed and the padded form are equal."""
        return self.num_tokens == self.num_inputs * self.longest

    def per_input(self, values: Tensor) -> bool:
        """Whether values have a row per input, rather than a row per token."""
        return len(values) == self.num_inputs

    @cached_property
    def first_token_B(self) -> Tensor:
        """The index of every input's first token, int64."""
        return self._tensor(np.cumsum(self.lengths_B) - self.lengths_B)

    @cached_property
    def last_token_B(self) -> Tensor:
        """The index of every input's last token, int64."""
        return self._tensor(np.cumsum(self.lengths_B) - 1)

    @cached_property
    def position_N(self) -> Tensor:
        """The position of every token within its input, int64."""
        return self._tensor(self._positions())

    @cached_property
    def scheme(self) -> Attention:
        """The scheme of attention, after `auto` is resolved.

        With equal lengths the padded form needs neither padding nor a mask, and one call. On a CPU with one thread
        `apart` is at least as fast, except for inputs of a few tokens (`experiments.tokens.attention_slots@654e280`).
        With more threads it is chosen if it saves more than its calls cost.
        """
        if self.uniform:
            return "padded"
        if self._attention != "auto":
            return self._attention
        if self.device.type != "cpu":
            return "padded"
        threads = torch.get_num_threads()
        saved = (self.num_inputs * self.longest**2 - int((self.lengths_B.astype(np.int64) ** 2).sum())) / threads
        is_faster = threads == 1 and self.longest > FEW_TOKENS
        return "apart" if is_faster or saved > SCORES_PER_CALL * self.num_inputs else "padded"

    @cached_property
    def place_N(self) -> Tensor:
        """The index of every token in the padded form flattened to B * T, int64."""
        return self._tensor(self._places)

    @cached_property
    def mask_BT(self) -> Tensor:
        """True where the padded form has a token."""
        return self._tensor(np.arange(self.longest)[None, :] < self.lengths_B[:, None])

    @cached_property
    def lengths_B1(self) -> Tensor:
        """The lengths as float32, as divisors of sums."""
        return self._tensor(self.lengths_B.astype(np.float32)[:, None])

    @cached_property
    def row_place_N(self) -> Tensor:
        """The index of every token in the slots flattened to R * T, int64. The tokens of an input are adjacent."""
        return self._tensor(self._row_places)

    @cached_property
    def owner_RT(self) -> Tensor:
        """The input to which each position of the slots belongs, int32; -1 for positions without a token."""
        owner = np.full(len(self.slots) * self.longest, -1, dtype=np.int32)
        owner[self._row_places] = self._samples()
        return self._tensor(owner.reshape(len(self.slots), self.longest))

    @cached_property
    def slots(self) -> list[list[int]]:
        """The inputs of every row of attention. A row is as long as the longest input; `slotted` rows hold several."""
        lengths = self.lengths_B.tolist()
        if self.scheme == "slotted" and any_two_fit(lengths, self.longest):
            return first_fit_decreasing(lengths, self.longest)
        return [[index] for index in range(self.num_inputs)]

    @cached_property
    def same_R1TT(self) -> Tensor:
        """True where two positions of a slot belong to the same input, or both to none."""
        return self.owner_RT[:, None, :, None] == self.owner_RT[:, None, None, :]

    @cached_property
    def groups(self) -> list[list[int]]:
        """For the scheme `apart`, the lengths of the adjacent inputs that share each call."""
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
        """Returns the masks for `attend`, which all blocks share.

        `bias_HTT`: a relative position bias for the longest row. `dtype`: the type of queries and keys; masks in this
        type are faster than bool masks, which torch would convert in each call.
        """
        if self.scheme == "apart":
            return [_mask_of(group, bias_HTT, dtype, self.device) for group in self.groups]
        if self._shares_rows:
            return [self._masked(self.same_R1TT, bias_HTT)]
        return [bias_HTT if self.uniform else self._masked(self.mask_BT[:, None, None, :], bias_HTT)]

    @cached_property
    def counted_RT(self) -> Tensor | None:
        """1 for tokens and 0 for padding that attends to tokens; None if there is no such padding."""
        has_none = self.uniform or self.scheme == "apart" or self._shares_rows
        return None if has_none else self.mask_BT.float()

    def attend(self, values_ND: Tensor, masks: Masks, attend: Attend) -> tuple[Tensor, ...]:
        """Applies `attend` to the tokens of every input with this layout's `masks`. Returns packed tensors (N, ...).

        In every scheme the tokens of an input are adjacent in their row, so that one position bias fits all rows.
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
        """Returns packed values in the padded form (B, T, D), with zeros after every input's last token."""
        width = values_ND.shape[1:]
        if self.uniform:
            return values_ND.reshape(self.num_inputs, self.longest, *width)
        padded = values_ND.new_zeros(self.num_inputs * self.longest, *width)
        padded[self.place_N] = values_ND
        return padded.view(self.num_inputs, self.longest, *width)

    def unpad(self, values_BTD: Tensor) -> Tensor:
        """Returns padded values in the packed form (N, D)."""
        flat = values_BTD.reshape(self.num_inputs * self.longest, *values_BTD.shape[2:])
        return flat if self.uniform else flat[self.place_N]

    @cached_property
    def _places(self) -> npt.NDArray[np.int64]:
        return self._samples() * self.longest + self._positions()

    @cached_property
    def _row_places(self) -> npt.NDArray[np.int64]:
        if not self._shares_rows:
            return self._places
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
    """Returns the mask that keeps inputs in one row apart, (T, T), or (H, T, T) with a bias; None for one input."""
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


def to_host(tensor: Tensor) -> Tensor:
    """Returns the tensor in host memory: a CPU tensor itself, a GPU tensor as a copy in pinned memory, after a wait."""
    return tensor if tensor.device.type != "cuda" else all_to_host((tensor,))[0]


def all_to_host(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns tensors of one device in host memory: see `to_host`. It waits once for all copies."""
    device = tensors[0].device
    if device.type != "cuda":
        return tuple(tensors)
    # Not `.cpu()`: a copy to pageable memory goes through a buffer of the driver and waits each time.
    copies = tuple(torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors)
    for copy, each in zip(copies, tensors, strict=True):
        copy.copy_(each, non_blocking=True)
    wait_for(device)
    return copies


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on a device. A copy to a GPU goes through pinned memory, without a wait.

    Torch does not reuse the pinned memory before the copy is over.
    """
    if device.type != "cuda" or tensor.is_cuda or not tensor.numel():
        return tensor.to(device)
    if torch.cuda.is_current_stream_capturing():  # a replay would read the pinned memory after its reuse
        raise RuntimeError("a copy from host memory cannot be captured")
    return tensor.pin_memory().to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Waits until a GPU has done the work of the current stream. Does nothing for a CPU."""
    if device.type == "cuda":
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch ships no type for it
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
