"""MPNet (Song et al., NeurIPS 2020): BERT's blocks, with a bias on attention by the distance of two tokens.

Distances fall into buckets, as in T5 (Raffel et al. 2020, section 2.1): one for each small distance, then ever wider
ones. Keys before the query and keys behind it have buckets of their own. One table with a bias per bucket and head
serves all blocks. Tensor legend as in `layout.py`; D distances, E edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import JsonDict
from earlyexit.families.bert import PARTS, Bert, sizes_of
from earlyexit.families.encoder import EncoderBackbone, EncoderConfig
from earlyexit.network.layout import Layout

MAX_DISTANCE = 128
"""From it on all distances share a bucket, unless a configuration names another; MPNet's does not."""


def by_distance(table: nn.Embedding, length: int, max_distance: int = MAX_DISTANCE) -> Tensor:
    """Returns the bias on the scores of `length` tokens that all see each other, queries before keys, (H, T, T).

    `table` holds a bias per bucket and head; its second half is for keys behind the query.
    """
    device = table.weight.device
    place_T = torch.arange(length, device=device)
    # One lookup per distance: picking T * T of them is cheaper than sorting T * T into buckets.
    offset_D = torch.arange(1 - length, length, device=device)
    bias_DH: Tensor = table(bucket(offset_D, table.num_embeddings, max_distance))
    return bias_DH[place_T[None, :] - place_T[:, None] + (length - 1)].permute(2, 0, 1)


def before(table: nn.Embedding, longest: int, max_distance: int) -> Tensor:
    """Returns the bias on the score of a key 0 to `longest` - 1 tokens before its query, (D, H)."""
    distance_D = torch.arange(longest, device=table.weight.device)
    bias_DH: Tensor = table(_bucket(distance_D, table.num_embeddings, max_distance))
    return bias_DH


def bucket(offset: Tensor, num_buckets: int, max_distance: int = MAX_DISTANCE) -> Tensor:
    """Returns the bucket, int64, of a key `offset` tokens behind its query (negative: before it)."""
    half = num_buckets // 2
    return _bucket(offset.abs(), half, max_distance) + (offset > 0).long() * half


def _bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Returns the buckets of distances to one side.

    The first half of the buckets hold one distance each. The edges of the others grow evenly in the logarithm up to
    `max_distance`. Edges are whole numbers; `transformers` rounds a logarithm instead, which depends on the library.
    """
    exact = num_buckets // 2
    # The smallest distance of every wide bucket but the first, computed on the device: a CUDA graph cannot capture
    # numbers from the host. The small subtraction keeps whole powers whole before they are rounded up.
    step_E = torch.arange(1, num_buckets - exact, dtype=torch.float64, device=distance.device)
    edges_E = (exact * (max_distance / exact) ** (step_E / (num_buckets - exact)) - 1e-6).ceil()
    return torch.where(distance < exact, distance, exact + (distance[..., None] >= edges_E).sum(-1))


BUCKETS = "encoder.relative_attention_bias.weight"
"""Where `transformers` keeps the table."""
POSITION_OFFSET = 2
"""Behind the padding index, which is 1 whatever the configuration names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MPNetConfig(EncoderConfig):
    """Sizes of an MPNet; the defaults are mpnet-base's."""

    vocab_size: int = 30527
    position_offset: int = POSITION_OFFSET
    norm_eps: float = 1e-5
    num_buckets: int = 32
    """Of distances; half of them for keys behind the query."""


class MPNetBackbone(EncoderBackbone):
    """An encoder whose attention has a bias by the distance of two tokens."""

    config: MPNetConfig

    def __init__(self, config: MPNetConfig) -> None:
        super().__init__(config)
        if config.num_buckets < 4 or config.num_buckets % 4:
            raise ModelFolderError(f"num_buckets must be a multiple of 4, not {config.num_buckets}")
        self.distance_bias = nn.Embedding(config.num_buckets, config.num_heads)

    def attention_bias(self, layout: Layout) -> Tensor:
        return by_distance(self.distance_bias, layout.longest)


class MPNet(Bert):
    """MPNet: no token types, positions that start behind the padding index as RoBERTa's do."""

    name = "mpnet"
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **PARTS,
        "qkv": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        "attention_out": ("attention.attn.o",),
        "attention_norm": ("attention.LayerNorm",),
    }
    has_token_types = False

    def build(self, config: JsonDict, folder: Path | None = None) -> MPNetBackbone:
        return MPNetBackbone(MPNetConfig(**config))

    def copy_weights(self, backbone: EncoderBackbone, weights: Mapping[str, Tensor]) -> None:
        super().copy_weights(backbone, weights)
        assert isinstance(backbone, MPNetBackbone)
        backbone.distance_bias.load_state_dict({"weight": weights[BUCKETS]})

    def encoder_config(self, hf_config: Any, *, pairs: bool) -> MPNetConfig:
        config = sizes_of(hf_config, position_offset=POSITION_OFFSET)
        return MPNetConfig(**asdict(config), num_buckets=hf_config.relative_attention_num_buckets)

    def head_layers(self, hf_model: Any) -> tuple[nn.Linear, nn.Linear]:
        return hf_model.classifier.dense, hf_model.classifier.out_proj
