from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from earlyexit.network.boundary import Budget, Split, as_numbers, fitting


@pytest.mark.parametrize(
    ("ramps", "expected"),
    [
        pytest.param((), [(2, 6, None)], id="no ramps"),
        pytest.param((3,), [(2, 4, 3), (4, 6, None)], id="inside"),
        pytest.param((5,), [(2, 6, 5)], id="at the end"),
        pytest.param((2, 3, 5), [(2, 3, 2), (3, 4, 3), (4, 6, 5)], id="several"),
    ],
)
def test_segments_end_at_active_ramps(ramps: tuple[int, ...], expected: list[tuple[int, int, int | None]]) -> None:
    segments = Split(first=2, end=6, batch=1, ramps=ramps).segments()
    assert [(segment.first, segment.end, segment.ramp) for segment in segments] == expected


@pytest.mark.parametrize(
    ("tokens", "num_inputs", "num_tokens", "more", "expected"),
    [
        pytest.param(None, 3, 900, 900, True, id="inputs alone"),
        pytest.param(None, 4, 4, 1, False, id="as many inputs as it takes"),
        pytest.param(10, 2, 7, 3, True, id="exactly full"),
        pytest.param(10, 2, 7, 4, False, id="one token too many"),
        pytest.param(10, 0, 0, 11, True, id="a larger one, alone"),
    ],
)
def test_a_budget_has_room_while_inputs_and_tokens_fit(
    tokens: int | None, num_inputs: int, num_tokens: int, more: int, expected: bool
) -> None:
    budget = Split(first=0, end=2, batch=4, tokens=tokens).budget
    assert budget == Budget(inputs=4, tokens=tokens)
    assert budget.room_for(num_inputs, num_tokens, more) == expected


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
