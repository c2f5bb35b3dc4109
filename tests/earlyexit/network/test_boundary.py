from __future__ import annotations

import numpy as np
import pytest

from earlyexit.errors import ModelFolderError
from earlyexit.network.boundary import Encoded
from earlyexit.network.model import EarlyExitModel, check_inputs

# What a codec must give


def test_what_the_network_takes_is_let_through(small_model: EarlyExitModel) -> None:
    check_inputs(small_model, Encoded(3, (np.zeros(3, dtype=np.int32),)))


@pytest.mark.parametrize(
    ("encoded", "said"),
    [
        pytest.param(Encoded(3, (np.zeros(3, np.int32),) * 2), "gives 2 tensors; the network takes 1", id="tensors"),
        pytest.param(Encoded(3, (np.zeros(3, np.int64),)), r"as int32 \[3\]; the codec gives int64 \[3\]", id="dtype"),
        pytest.param(Encoded(3, (np.zeros(2, np.int32),)), r"as int32 \[3\]; the codec gives int32 \[2\]", id="rows"),
    ],
)
def test_a_codec_of_another_network_is_refused(small_model: EarlyExitModel, encoded: Encoded, said: str) -> None:
    with pytest.raises(ModelFolderError, match=said):
        check_inputs(small_model, encoded)
