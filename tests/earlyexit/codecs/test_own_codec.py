from __future__ import annotations

from pathlib import Path

import pytest

from earlyexit.codecs import find_codec
from earlyexit.codecs.tensor import TensorCodec
from earlyexit.errors import ModelFolderError


def spectrum(bins: int) -> TensorCodec:
    return TensorCodec([{"name": "spectrum", "datatype": "FP32", "shape": [bins]}])


def nothing() -> None:
    return None


def test_ones_own_codec_is_named_by_module_and_function() -> None:
    [column] = find_codec({"name": f"{__name__}:spectrum", "bins": 40}, Path()).inputs
    assert column.shape == (40,)


def test_what_makes_no_codec_is_refused() -> None:
    with pytest.raises(ModelFolderError, match="gave NoneType; a Codec is needed"):
        find_codec({"name": f"{__name__}:nothing"}, Path())
    with pytest.raises(ModelFolderError, match="unknown codec 'sound'; known: text, text_pair, image, tensor, or your"):
        find_codec({"name": "sound"}, Path())
