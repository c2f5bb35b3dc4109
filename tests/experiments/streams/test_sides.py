from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.streams.sides import SIDES, Setting, Side
from experiments.streams.weights import float_gguf

gguf = pytest.importorskip("gguf")


def test_a_gguf_of_floats_says_what_the_quantised_one_says(tmp_path: Path) -> None:
    matrix = np.linspace(-1, 1, 4 * 32, dtype=np.float32).reshape(4, 32)
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("norm", matrix[0])
    writer.add_tensor(
        "matrix", gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = gguf.GGUFReader(float_gguf(tmp_path / "small.gguf", tmp_path / "float.gguf", "float32"))
    tensors = {each.name: each for each in found.tensors}
    assert {each.tensor_type for each in found.tensors} == {gguf.GGMLQuantizationType.F32}
    np.testing.assert_array_equal(tensors["norm"].data, matrix[0])
    np.testing.assert_allclose(tensors["matrix"].data, matrix, atol=0.01)
    assert found.fields["llama.block_count"].contents() == 2
    assert found.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]


@pytest.mark.parametrize("side", SIDES, ids=lambda side: side.name)
def test_every_side_is_told_the_model_the_port_and_the_length(tmp_path: Path, side: Side) -> None:
    setting = Setting(
        ours=tmp_path / "model",
        folder=tmp_path / "model",
        gguf=tmp_path / "model.gguf",
        dtype="float32",
        threads=1,
        most=8,
        context=512,
        port=8123,
        logs=tmp_path,
        llama_server=tmp_path / "llama-server",
    )
    told = " ".join(side.command(setting))
    assert str(tmp_path / "model") in told
    assert "8123" in told
    assert side.more(setting, 7)
