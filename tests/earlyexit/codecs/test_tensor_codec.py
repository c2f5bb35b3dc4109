from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from earlyexit.codecs import find_codec
from earlyexit.codecs.tensor import TensorCodec
from earlyexit.network.boundary import DATATYPES

SPECTRUM = TensorCodec([{"name": "spectrum", "datatype": "FP32", "shape": [2, 3]}])
ROW = TensorCodec([{"name": "age", "datatype": "INT8", "shape": []}, {"name": "w", "datatype": "FP64", "shape": [2]}])
NUMBERS = [[1, 2.5, 3], [4, 5, 6]]


def test_several_columns_are_several_tensors() -> None:
    rows = ROW.from_columns({"w": np.array([[1.0, 2.0], [3.0, 4.0]]), "age": np.array([7, 8], np.int8)})
    assert [[array.tolist() for array in each.tensors] for each in ROW.encode(rows)] == [
        [[7], [[1.0, 2.0]]],
        [[8], [[3.0, 4.0]]],
    ]


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


def test_many_numbers_leave_the_event_loop() -> None:
    assert not SPECTRUM.is_slow([(np.zeros((2, 3), np.float32),)])
    assert SPECTRUM.is_slow([(np.zeros((500, 501), np.float32),)])


# Codecs of users


def spectrum(bins: int) -> TensorCodec:
    return TensorCodec([{"name": "spectrum", "datatype": "FP32", "shape": [bins]}])


def test_ones_own_codec_is_named_by_module_and_function() -> None:
    [column] = find_codec({"name": f"{__name__}:spectrum", "bins": 40}, Path()).inputs
    assert column.shape == (40,)


def test_one_column_is_one_tensor_per_input() -> None:
    [row] = SPECTRUM.from_columns({"spectrum": np.array([NUMBERS], np.float32)})
    [encoded] = SPECTRUM.encode([row])
    assert encoded.length == 1
    assert [(array.dtype, array.tolist()) for array in encoded.tensors] == [(np.dtype(np.float32), [NUMBERS])]


def test_a_card_says_its_columns() -> None:
    spec = SPECTRUM.spec()
    assert spec == {"name": "tensor", "columns": [{"name": "spectrum", "datatype": "FP32", "shape": [2, 3]}]}
    assert find_codec(spec, Path()).spec() == spec
