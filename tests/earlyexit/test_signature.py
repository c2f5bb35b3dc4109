from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from earlyexit.signature import as_numbers


def test_numbers_of_json_become_an_array_of_their_datatype() -> None:
    given = as_numbers([[1, 2.5], [3, 4]], "FP32")
    assert (given.dtype, given.tolist()) == (np.dtype(np.float32), [[1.0, 2.5], [3.0, 4.0]])
    assert as_numbers(7, "INT8").tolist() == 7
    assert as_numbers([2**64 - 1, 1], "UINT64").tolist() == [2**64 - 1, 1]
    assert as_numbers([[True], [False]], "BOOL").tolist() == [[True], [False]]
    assert as_numbers([[], []], "FP32").shape == (2, 0)


@pytest.mark.parametrize(
    ("value", "datatype"),
    [
        ([True, 2.5], "FP32"),
        ([True, 2], "INT32"),
        ([1, 0], "BOOL"),
        ([1.0], "INT32"),
        ([1, None], "FP32"),
        ([1, {}], "FP32"),
        ("1", "FP32"),
        ([-1, 2**63], "UINT64"),
    ],
)
def test_what_is_no_such_number_in_json_is_refused(value: object, datatype: str) -> None:
    with pytest.raises(ValueError, match=f"not all {datatype}"):
        as_numbers(value, datatype)


@pytest.mark.parametrize("value", [[1, [2]], [[1, 2], [3]], [[[1]], [2]]])
def test_lists_of_different_depths_or_lengths_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not an array of numbers"):
        as_numbers(value, "FP32")


def test_a_long_text_among_numbers_is_refused_before_it_costs_memory() -> None:
    value = [1.5] * 20_000 + ["x" * 100_000]  # as strings of one length: 8 GB
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="not all FP32"):
            as_numbers(value, "FP32")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000
