from __future__ import annotations

import numpy as np
import pytest
import torch

from earlyexit.piece import Piece, fuse


def piece_of(num_inputs: int, length: int, *, width: int, state: int) -> Piece:
    """Values and states count up."""
    values = torch.arange(num_inputs * length * width, dtype=torch.float32)
    return Piece(
        sample_ids=tuple(f"i{k}" for k in range(num_inputs)),
        next_block=1,
        lengths_B=np.full(num_inputs, length, dtype=np.int32),
        tensors=(values.view(-1, width) if width > 1 else values,),
        state_BS=torch.arange(num_inputs * state, dtype=torch.int32).view(num_inputs, state),
    )


@pytest.mark.parametrize("width", [1, 3], ids=["token ids", "hidden states"])
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("state", [0, 2])
def test_inputs_of_equal_lengths_are_selected_as_any_others(width: int, length: int, state: int) -> None:
    piece = piece_of(4, length, width=width, state=state)
    keep = [3, 0, 2]
    chosen = piece.select(keep)
    assert chosen.sample_ids == ("i3", "i0", "i2")
    assert chosen.lengths_B.tolist() == [length] * 3
    assert chosen.tensors[0].equal(torch.cat([torch.split(piece.tensors[0], length)[k] for k in keep]))
    assert chosen.state_BS.equal(piece.state_BS[keep])


@pytest.mark.parametrize("state", [0, 2])
def test_singles_keep_their_states_and_are_fused_with_them(state: int) -> None:
    piece = piece_of(3, 2, width=1, state=state)
    singles = piece.singles()
    assert [one.state_BS.shape for one in singles] == [(1, state)] * 3
    fused = fuse(singles)
    assert fused.state_BS.equal(piece.state_BS)
    assert fused.tensors[0].equal(piece.tensors[0])
