from __future__ import annotations

import numpy as np
import pytest

from earlyexit.errors import ModelFolderError
from earlyexit.network.boundary import TensorSpec, bytes_per_input
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.network import check_inputs
from earlyexit.network.wire import Encoded

HIDDEN = TensorSpec(name="hidden", shape=(8, 4), per_token=True)
TOKEN_IDS = TensorSpec(name="token_ids", shape=(), dtype="int32", per_token=True)
PICTURE = TensorSpec(name="picture", shape=(3, 2, 2))
PIXELS = TensorSpec(name="pixels", shape=(5, 5, 3), dtype="uint8")


@pytest.mark.parametrize(
    ("boundary", "length", "num_bytes"),
    [
        pytest.param((), 7, 0, id="nothing crosses"),
        pytest.param((HIDDEN,), 7, 7 * 32 * 4, id="a row per token"),
        pytest.param((HIDDEN,), 2.5, 2.5 * 32 * 4, id="a mean length"),
        pytest.param((TOKEN_IDS,), 7, 7 * 4, id="one number per token"),
        pytest.param((PICTURE,), 7, 12 * 4, id="a row per input, whatever its length"),
        pytest.param((PIXELS,), 1, 75, id="bytes"),
        pytest.param((HIDDEN, PICTURE, PIXELS), 2, 2 * 32 * 4 + 12 * 4 + 75, id="several tensors"),
    ],
)
def test_the_bytes_of_an_input_are_those_of_its_rows(
    boundary: tuple[TensorSpec, ...], length: float, num_bytes: float
) -> None:
    assert bytes_per_input(boundary, length) == num_bytes


def test_half_precision_halves_the_floats_and_nothing_else() -> None:
    assert bytes_per_input((HIDDEN, TOKEN_IDS, PIXELS), 3, float_bytes=2) == 3 * 32 * 2 + 3 * 4 + 75


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
