"""Survivors on their way: the one form in which inputs enter, cross and leave a cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from earlyexit.wire import Lengths, WirePiece


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A set of inputs inside the model, on a device.

    Packed: all tokens one after the other, without padding, so that fusing is concatenation, an input costs what its
    own tokens cost, and no input's arithmetic contains another's padding. Masks and positions follow from the lengths.
    Inputs without tokens (images) have length 1.
    """

    sample_ids: tuple[str, ...]
    next_block: int
    lengths_B: Lengths
    """On the host, so that layouts are made without waiting for the device."""
    values: Tensor
    """Before block 0 token ids, int32 (N,); then the hidden state (N, D) in the model's dtype."""
    state_BS: Tensor
    """The exit policy's state (PABEE's counter, votes), one row per input, S = 0 for policies without."""

    def __len__(self) -> int:
        return len(self.sample_ids)

    def select(self, keep: Sequence[int]) -> Piece:
        """The inputs at the given positions, in the given order."""
        index_K = torch.tensor(keep).to(self.values.device, non_blocking=True)
        return replace(
            self,
            sample_ids=tuple(self.sample_ids[k] for k in keep),
            lengths_B=self.lengths_B[list(keep)],
            values=self._values_of(keep, index_K),
            state_BS=self.state_BS[index_K],
        )

    def _values_of(self, keep: Sequence[int], index_K: Tensor) -> Tensor:
        if self.lengths_B.min() < self.lengths_B.max():
            return self.values[self.rows_of_tokens(keep)]
        # Of equal lengths an input is one row: a copy of a few long rows, and a few numbers sent to the device.
        width = self.values.shape[1:]
        return self.values.reshape(len(self), -1).index_select(0, index_K).view(-1, *width)

    def rows_of_tokens(self, keep: Sequence[int]) -> Tensor:
        """Indices into `values` of the tokens of the inputs at the given positions."""
        starts_B = np.cumsum(self.lengths_B) - self.lengths_B
        lengths = self.lengths_B[list(keep)]
        ends = np.cumsum(lengths)
        rows = np.arange(int(lengths.sum())) + np.repeat(starts_B[list(keep)] - (ends - lengths), lengths)
        return torch.from_numpy(rows).to(self.values.device, non_blocking=True)

    def singles(self) -> list[Piece]:
        """One piece per input; views, no copies."""
        values = torch.split(self.values, self.lengths_B.tolist())
        # Most policies have no state: then one row of nothing does for all.
        states = torch.split(self.state_BS, 1) if self.state_BS.shape[1] else [self.state_BS[:1]] * len(self)
        return [
            Piece(
                sample_ids=(sample_id,),
                next_block=self.next_block,
                lengths_B=self.lengths_B[k : k + 1],
                values=values[k],
                state_BS=states[k],
            )
            for k, sample_id in enumerate(self.sample_ids)
        ]

    def to_wire(self) -> WirePiece:
        """Host copy for another process."""
        values = self.values.detach().cpu()
        if values.dtype == torch.bfloat16:
            values = values.view(torch.uint16)
        return WirePiece(
            sample_ids=self.sample_ids,
            next_block=self.next_block,
            lengths_B=self.lengths_B,
            values=values.numpy(),
            state_BS=self.state_BS.detach().cpu().numpy(),
        )


def fuse(pieces: Sequence[Piece]) -> Piece:
    """One piece out of several that wait for the same block; the order of the inputs is kept."""
    first = pieces[0]
    assert all(piece.next_block == first.next_block for piece in pieces)
    if len(pieces) == 1:
        return first
    sample_ids = tuple(sample_id for piece in pieces for sample_id in piece.sample_ids)
    return Piece(
        sample_ids=sample_ids,
        next_block=first.next_block,
        lengths_B=np.concatenate([piece.lengths_B for piece in pieces]),
        values=torch.cat([piece.values for piece in pieces]),
        state_BS=_cat_states([piece.state_BS for piece in pieces], len(sample_ids)),
    )


def _cat_states(states: list[Tensor], num_inputs: int) -> Tensor:
    return torch.cat(states) if states[0].shape[1] else states[0].new_empty(num_inputs, 0)
