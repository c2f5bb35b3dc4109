from __future__ import annotations

import numpy as np
import pytest
import torch

from earlyexit.network.piece import Layout
from earlyexit.ramps.pooling import Pooling, pool


def layout_of(*lengths: int) -> Layout:
    return Layout(np.array(lengths, dtype=np.int32))


@pytest.mark.parametrize(("pooling", "expected"), [("mean", [[2.0], [5.0]]), ("first", [[1.0], [5.0]])])
def test_pooling_looks_at_an_inputs_own_tokens_only(pooling: Pooling, expected: list[list[float]]) -> None:
    layout = layout_of(2, 1)
    packed_ND = torch.tensor([[1.0], [3.0], [5.0]])
    assert pool(packed_ND, layout, pooling).tolist() == expected


def test_the_mean_of_many_bfloat16_tokens_is_their_mean() -> None:
    # Summed in bfloat16, which has 8 significant bits, 256 + 1 stays 256.
    mean_BD = pool(torch.ones(512, 1, dtype=torch.bfloat16), layout_of(512), "mean")
    assert mean_BD.dtype == torch.bfloat16
    assert mean_BD.tolist() == [[1.0]]
