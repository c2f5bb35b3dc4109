from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earlyexit.codecs import find_codec
from earlyexit.codecs.tensor import TensorCodec
from earlyexit.network.boundary import DATATYPES, as_numbers, fitting

SPECTRUM = TensorCodec([{"name": "spectrum", "datatype": "FP32", "shape": [2, 3]}])
ROW = TensorCodec([{"name": "age", "datatype": "INT8", "shape": []}, {"name": "w", "datatype": "FP64", "shape": [2]}])
NUMBERS = [[1, 2.5, 3], [4, 5, 6]]


def test_columns_are_tensors_of_an_input_and_many_numbers_leave_the_event_loop() -> None:
    rows = ROW.from_columns({"w": np.array([[1.0, 2.0], [3.0, 4.0]]), "age": np.array([7, 8], np.int8)})
    assert [[array.tolist() for array in each.tensors] for each in ROW.encode(rows)] == [
        [[7], [[1.0, 2.0]]],
        [[8], [[3.0, 4.0]]],
    ]
    [row] = SPECTRUM.from_columns({"spectrum": np.array([NUMBERS], np.float32)})
    [encoded] = SPECTRUM.encode([row])
    assert encoded.length == 1
    assert [(array.dtype, array.tolist()) for array in encoded.tensors] == [(np.dtype(np.float32), [NUMBERS])]
    assert not SPECTRUM.is_slow([(np.zeros((2, 3), np.float32),)])
    assert SPECTRUM.is_slow([(np.zeros((500, 501), np.float32),)])


def test_json_is_nested_lists_or_objects() -> None:
    assert SPECTRUM.from_json(NUMBERS)[1] is False
    rows, many = SPECTRUM.from_json([NUMBERS, NUMBERS])
    assert (many, len(rows), rows[1][0].tolist()) == (True, 2, NUMBERS)
    [(age, w)], many = ROW.from_json({"w": [1, 2], "age": 3})
    assert not many
    assert (age.dtype.name, age.tolist(), w.dtype.name, w.tolist()) == ("int8", 3, "float64", [1.0, 2.0])
    assert ROW.from_json([{"w": [1, 2], "age": 3}])[1] is True


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
def test_every_datatype_is_taken(datatype: str) -> None:
    codec = TensorCodec([{"name": "x", "datatype": datatype, "shape": [2]}])
    [[array]], _ = codec.from_json([True, False] if datatype == "BOOL" else [1, 0])
    assert array.dtype == DATATYPES[datatype]
    [encoded] = codec.encode([(array,)])
    assert encoded.tensors[0].tolist() == [[1, 0]]


# Codecs of users


def spectrum(bins: int) -> TensorCodec:
    return TensorCodec([{"name": "spectrum", "datatype": "FP32", "shape": [bins]}])


def test_a_card_says_its_columns_or_names_ones_own_codec() -> None:
    [column] = find_codec({"name": f"{__name__}:spectrum", "bins": 40}, Path()).inputs
    assert column.shape == (40,)
    spec = SPECTRUM.spec()
    assert spec == {"name": "tensor", "columns": [{"name": "spectrum", "datatype": "FP32", "shape": [2, 3]}]}
    assert find_codec(spec, Path()).spec() == spec


def test_numbers_of_json_become_an_array_of_their_datatype() -> None:
    given = as_numbers([[1, 2.5], [3, 4]], "FP32")
    assert (given.dtype, given.tolist()) == (np.dtype(np.float32), [[1.0, 2.5], [3.0, 4.0]])
    assert as_numbers([2**64 - 1, 1], "UINT64").tolist() == [2**64 - 1, 1]
    assert as_numbers([[], []], "FP32").shape == (2, 0)


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
        pytest.param(np.array([0, 255], dtype=np.uint16), "UINT8", id="uint16"),
        pytest.param(np.array([-(2**31), 2**31 - 1]), "INT32", id="ends"),
        pytest.param(np.array([], dtype=np.int64), "UINT8", id="none"),
        pytest.param(np.array([1, 2]), "FP32", id="whole numbers as fractions"),
    ],
)
def test_numbers_that_fit_keep_their_values(column: Any, datatype: str) -> None:
    assert fitting(column, datatype).tolist() == column.tolist()
