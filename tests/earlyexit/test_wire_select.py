"""Some of the inputs of a piece as it travels."""

from __future__ import annotations

import numpy as np

from earlyexit.network.wire import WirePiece


def test_inputs_take_their_own_rows_of_tensors_of_either_kind_along() -> None:
    piece = WirePiece(
        sample_ids=("a", "b", "c"),
        next_block=2,
        lengths_B=np.array([2, 1, 3], dtype=np.int32),
        tensors=(np.arange(6, dtype=np.float32)[:, None], np.array([[10], [20], [30]], dtype=np.int32)),
        state_BS=np.array([[1], [2], [3]], dtype=np.int32),
    )
    picked = piece.select((2, 0))
    assert (picked.sample_ids, picked.next_block, picked.lengths_B.tolist()) == (("c", "a"), 2, [3, 2])
    assert [values[:, 0].tolist() for values in picked.tensors] == [[3, 4, 5, 0, 1], [30, 10]]
    assert picked.state_BS is not None
    assert picked.state_BS.tolist() == [[3], [1]]
