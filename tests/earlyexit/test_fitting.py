from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from earlyexit.signature import fitting


@pytest.mark.parametrize(
    ("column", "datatype"),
    [
        pytest.param(np.array([0, 255]), "UINT8", id="int64"),
        pytest.param(np.array([0, 255], dtype=np.uint16), "UINT8", id="uint16"),
        pytest.param(np.array([-(2**31), 2**31 - 1]), "INT32", id="ends"),
        pytest.param(np.array([], dtype=np.int64), "UINT8", id="none"),
        pytest.param(np.array([0.5, -1.0]), "FP32", id="float64"),
        pytest.param(np.array([1, 2]), "FP32", id="whole numbers as fractions"),
    ],
)
def test_numbers_that_fit_keep_their_values(column: Any, datatype: str) -> None:
    assert fitting(column, datatype).tolist() == column.tolist()


@pytest.mark.parametrize(
    ("column", "datatype", "message"),
    [
        pytest.param(np.array([3, 256], dtype=np.uint16), "UINT8", "UINT8 holds 0 to 255, not 256", id="uint16"),
        pytest.param(np.array([2**31]), "INT32", "not 2147483648", id="int64"),
        pytest.param(np.array([-1, 5], dtype=np.int8), "UINT64", "not -1", id="sign"),
        pytest.param(np.array([2**64 - 1], dtype=np.uint64), "INT64", "not 18446744073709551615", id="uint64"),
        pytest.param(np.array([0.5]), "INT32", "float64 is no INT32", id="fractions"),
        pytest.param(np.array(["a"]), "FP32", "str32 is no FP32", id="text"),
    ],
)
def test_numbers_that_would_become_others_are_refused(column: Any, datatype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitting(column, datatype)
