"""The stories of llama2.c: 260,032 weights that tell of little girls, and the tokenizer that goes with them."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from earlyexit.families.base import Pretrained
from earlyexit.families.decoder import DecoderBackbone, DecoderConfig, from_llama_weights

ROTARY_BASE = 10_000.0
LAST_BYTE = 258
"""The tokens up to it are marks and single bytes."""


def read_stories(path: Path) -> Pretrained:
    """A checkpoint of llama2.c."""
    config, weights = read_weights(path)
    return from_llama_weights(DecoderBackbone(config), weights)


def read_weights(path: Path) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Its sizes, and its weights by their names in `transformers`.

    Its rotary pairs are neighbours, those of `transformers` are a head's halves.
    """
    dim, hidden, blocks, heads, kv_heads, vocabulary, length = np.fromfile(path, "<i4", 7).tolist()
    size = dim // heads
    config = DecoderConfig(
        vocab_size=vocabulary,
        hidden_size=dim,
        num_blocks=blocks,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        intermediate_size=hidden,
        max_length=length,
        rotary_base=ROTARY_BASE,
    )
    floats = torch.from_numpy(np.fromfile(path, "<f4", offset=28))
    shapes = {
        "embed_tokens": (vocabulary, dim),
        "input_layernorm": (blocks, dim),
        "self_attn.q_proj": (blocks, dim, dim),
        "self_attn.k_proj": (blocks, kv_heads * size, dim),
        "self_attn.v_proj": (blocks, kv_heads * size, dim),
        "self_attn.o_proj": (blocks, dim, dim),
        "post_attention_layernorm": (blocks, dim),
        "mlp.gate_proj": (blocks, hidden, dim),
        "mlp.down_proj": (blocks, dim, hidden),
        "mlp.up_proj": (blocks, hidden, dim),
        "norm": (dim,),
    }
    weights: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        values, floats = floats[: np.prod(shape)].view(shape), floats[np.prod(shape) :]
        if name in ("self_attn.q_proj", "self_attn.k_proj"):
            values = values.view(blocks, -1, size // 2, 2, dim).transpose(2, 3).reshape(shape)
        per_block = len(shape) > 1 and shape[0] == blocks
        weights |= (
            {f"model.layers.{k}.{name}.weight": values[k] for k in range(blocks)}
            if per_block
            else {f"model.{name}.weight": values}
        )
    return config, weights


def read_pieces(path: Path) -> list[tuple[bytes, float]]:
    """Every token's bytes and score."""
    raw, at, found = path.read_bytes(), 4, []
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        found.append((raw[at + 8 : at + 8 + length], score))
        at += 8 + length
    return found


def encode(pieces: list[tuple[bytes, float]], text: str) -> list[int]:
    """The first token, then a space and the characters; the best of pairs that are a token is merged, over and over."""
    index = {piece: k for k, (piece, _) in enumerate(pieces) if k > LAST_BYTE}
    tokens = [index[each.encode()] for each in f" {text}"]
    while True:
        merged = [(index.get(pieces[one][0] + pieces[two][0]), at) for at, (one, two) in enumerate(pairwise(tokens))]
        found = [(pieces[token][1], token, at) for token, at in merged if token is not None]
        if not found:
            return [1, *tokens]
        _, token, at = max(found)
        tokens[at : at + 2] = [token]
