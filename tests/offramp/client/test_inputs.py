from __future__ import annotations

import numpy as np
import pytest

from earlyexit.errors import InputError
from offramp.client.inputs import tensor_body

COUNTS = {"name": "m", "inputs": [{"name": "counts", "datatype": "UINT8", "shape": [-1, 2]}]}


def test_whole_numbers_are_sent_as_the_model_takes_them() -> None:
    body = tensor_body([np.array([0, 255]), np.array([7, 8])], COUNTS, {})
    assert body.tail == bytes([0, 255, 7, 8])


def test_whole_numbers_that_the_model_cannot_take_are_not_sent_as_others() -> None:
    with pytest.raises(InputError, match="the model takes UINT8, not uint16: UINT8 holds 0 to 255, not 256"):
        tensor_body([np.array([0, 256], dtype=np.uint16)], COUNTS, {})
