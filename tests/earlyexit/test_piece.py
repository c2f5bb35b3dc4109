from __future__ import annotations

import numpy as np
import pytest
import torch

from earlyexit.piece import Piece, fuse


def piece_of(lengths: dict[str, int], *, next_block: int = 1) -> Piece:
    """Input k's tokens hold 10 * k, 10 * k + 1, ...; its state holds k."""
    values = [[10.0 * k + token] for k, length in enumerate(lengths.values()) for token in range(length)]
    return Piece(
        sample_ids=tuple(lengths),
        next_block=next_block,
        lengths_B=np.array(list(lengths.values()), dtype=np.int32),
        tensors=(torch.tensor(values),),
        state_BS=torch.arange(len(lengths), dtype=torch.int32)[:, None],
    )


def as_dict(piece: Piece) -> dict[str, tuple[list[float], list[int]]]:
    """Every input's tokens and state."""
    tokens = torch.split(piece.tensors[0][:, 0], piece.lengths_B.tolist())
    return {
        name: (own.tolist(), state)
        for name, own, state in zip(piece.sample_ids, tokens, piece.state_BS.tolist(), strict=True)
    }


def test_select_takes_inputs_with_their_tokens_and_states_in_the_given_order() -> None:
    piece = piece_of({"a": 2, "b": 3, "c": 1})
    assert as_dict(piece.select([2, 0])) == {"c": ([20.0], [2]), "a": ([0.0, 1.0], [0])}


def test_singles_hold_one_input_each_and_share_the_memory() -> None:
    piece = piece_of({"a": 2, "b": 3})
    first, second = piece.singles()
    assert as_dict(first) == {"a": ([0.0, 1.0], [0])}
    assert as_dict(second) == {"b": ([10.0, 11.0, 12.0], [1])}
    assert second.tensors[0].data_ptr() == piece.tensors[0][2:].data_ptr()


def test_fusing_singles_gives_the_piece_back() -> None:
    piece = piece_of({"a": 2, "b": 3, "c": 1})
    fused = fuse(piece.singles())
    assert as_dict(fused) == as_dict(piece)
    assert fused.next_block == 1
    assert len(fused) == 3


def test_fusing_one_piece_copies_nothing() -> None:
    piece = piece_of({"a": 2})
    assert fuse([piece]) is piece


def test_pieces_that_wait_for_different_blocks_cannot_be_fused() -> None:
    with pytest.raises(AssertionError):
        fuse([piece_of({"a": 1}, next_block=1), piece_of({"b": 1}, next_block=2)])
