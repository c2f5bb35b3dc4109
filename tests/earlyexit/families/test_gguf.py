"""Decoders' files of llama.cpp: what is read of one, and how others are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from earlyexit.errors import ModelFolderError
from earlyexit.network.checkpoint import load_pretrained

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")


def written(path: Path, architecture: str, kind: str = "F32", tensor: str = "token_embd.weight") -> str:
    """A file that says it is of an architecture, with one tensor of numbers of a kind."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, number in (("block_count", 1), ("context_length", 64), ("embedding_length", 32)):
        writer.add_uint32(f"{architecture}.{name}", number)
    for name, number in (("feed_forward_length", 32), ("attention.head_count", 2), ("attention.head_count_kv", 2)):
        writer.add_uint32(f"{architecture}.{name}", number)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    quantised = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantised]
    row = np.zeros((8, 256 // block * size), dtype=np.uint8)
    writer.add_tensor(tensor, row, raw_shape=row.shape, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize(
    ("architecture", "kind", "tensor", "said"),
    [
        ("bert", "F32", "x", "that can be read: GGUF model with architecture bert is not supported"),
        ("gpt2", "F32", "x", "unknown model family 'gpt2'; known: bert, camembert, distilbert, exported,"),
        ("llama", "F32", "rope_freqs.weight", "model.gguf has rope_freqs.weight: scaled positions and biases are not"),
        ("llama", "F32", "blk.0.attn_q.bias", "model.gguf has blk.0.attn_q.bias: scaled positions and biases are not"),
        (
            "llama",
            "Q8_K",
            "token_embd.weight",
            "cannot be loaded: NotImplementedError: Dequantization for Q8_K is not yet implemented",
        ),
    ],
    ids=["an unknown architecture", "one that is none of ours", "scaled positions", "biases", "a quantisation"],
)
def test_a_file_of_another_make_is_refused_by_its_name(
    architecture: str, kind: str, tensor: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFolderError, match=said):
        load_pretrained(written(tmp_path / "model.gguf", architecture, kind, tensor))


def test_a_broken_or_truncated_file_is_refused(tmp_path: Path) -> None:
    whole = Path(written(tmp_path / "model.gguf", "llama")).read_bytes()
    for content in (b"hello", whole[:40], whole[:200]):
        (tmp_path / "model.gguf").write_bytes(content)
        with pytest.raises(ModelFolderError, match="is not a checkpoint that can be read: "):
            load_pretrained(str(tmp_path / "model.gguf"))
    with pytest.raises(ModelFolderError, match=r"does not appear to have a file named gone\.gguf"):
        load_pretrained(str(tmp_path / "gone.gguf"))
