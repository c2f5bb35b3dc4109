"""The form in which inputs enter, cross and leave a cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from earlyexit.named import HopDtype
from earlyexit.network.transfer import all_to_host, to_device
from earlyexit.network.wire import Lengths, WirePiece

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
        rows = to_device(self._rows_of_tokens(keep, lengths_K), index_K.device)
        return lambda values: values[index_K if len(values) == len(self) else rows]

    def _rows_of_tokens(self, keep: Sequence[int], lengths_K: Lengths) -> Tensor:
        starts_B = np.cumsum(self.lengths_B) - self.lengths_B
        ends_K = np.cumsum(lengths_K)
        shift_K = starts_B[list(keep)] - (ends_K - lengths_K)
        return torch.from_numpy(np.arange(int(lengths_K.sum())) + np.repeat(shift_K, lengths_K))


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
    return [piece.tensors if len(piece.tensors) == most else (*piece.tensors, _unknown(piece)) for piece in pieces]


def _unknown(piece: Piece) -> Tensor:
    return torch.full((int(piece.lengths_B.sum()),), torch.nan, device=piece.state_BS.device)


def halved(values: Tensor) -> Tensor:
    """Returns a float32 tensor in half precision, with values beyond its range clamped; other types unchanged.

    Infinite values are clamped too: an infinite value would make others of its input infinite, or NaN, where the value
    that it stands for may not. NaN stays.
    """
    return values.half().clamp_(-LARGEST_HALF, LARGEST_HALF) if values.dtype == torch.float32 else values


def _array(values: Tensor) -> npt.NDArray[np.generic]:
    host = values.detach()
    return (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()
