from __future__ import annotations

import numpy as np
import torch

from earlyexit.network.piece import Layout
from earlyexit.ramps.pooling import pool


def layout_of(*lengths: int) -> Layout:
    return Layout(np.array(lengths, dtype=np.int32))


def test_the_mean_of_many_bfloat16_tokens_is_their_mean() -> None:
    # Summed in bfloat16, which has 8 significant bits, 256 + 1 stays 256.
    mean_BD = pool(torch.ones(512, 1, dtype=torch.bfloat16), layout_of(512), "mean")
    assert mean_BD.dtype == torch.bfloat16
    assert mean_BD.tolist() == [[1.0]]
