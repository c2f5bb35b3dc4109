"""MPNet (Song et al., NeurIPS 2020): BERT's blocks, with a bias on attention by how far apart two tokens are.

Distances fall into buckets, as in T5 (Raffel et al. 2020, section 2.1): one for each small distance, then ever wider
ones, before the query and behind it apart. One table of a bias per bucket and head serves all blocks.

A bias on attention by how far apart two tokens are, in buckets (Raffel et al. 2020, T5, section 2.1).

One bucket for each small distance, then ever wider ones. Letters as in `layout.py`; D distances, E edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import JsonDict
from earlyexit.families.bert import Bert, sizes_of
from earlyexit.families.encoder import BlockNames, EncoderBackbone, EncoderConfig
from earlyexit.network.layout import Layout

MAX_DISTANCE = 128
"""From it on all distances share a bucket, unless a configuration names another; MPNet's does not."""


def by_distance(table: nn.Embedding, length: int, max_distance: int = MAX_DISTANCE) -> Tensor:
    """What is added to the scores of `length` tokens in a row that all see each other, queries before keys, (H, T, T).

    `table`: a bias per bucket and head; the second half of the buckets is for keys behind the query.
    """
    device = table.weight.device
    place_T = torch.arange(length, device=device)
    # Of every distance once; picking T * T of them is cheaper than sorting T * T into buckets.
    offset_D = torch.arange(1 - length, length, device=device)
    bias_DH: Tensor = table(bucket(offset_D, table.num_embeddings, max_distance))
    return bias_DH[place_T[None, :] - place_T[:, None] + (length - 1)].permute(2, 0, 1)


def before(table: nn.Embedding, longest: int, max_distance: int) -> Tensor:
    """What is added to the score of a key so many tokens before its query, (D, H), of distances 0 to `longest` - 1."""
    distance_D = torch.arange(longest, device=table.weight.device)
    bias_DH: Tensor = table(_bucket(distance_D, table.num_embeddings, max_distance))
    return bias_DH


def bucket(offset: Tensor, num_buckets: int, max_distance: int = MAX_DISTANCE) -> Tensor:
    """The bucket of how far a key is behind its query (negative: before it), int64; half are for those behind."""
    half = num_buckets // 2
    return _bucket(offset.abs(), half, max_distance) + (offset > 0).long() * half


def _bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Of distances to one side.

    Half of the buckets is for the distances below that half, one each; the edges of the others grow evenly in the
    logarithm up to `max_distance`. By comparison with whole edges, where `transformers` rounds a logarithm down: that
    depends on who computes the logarithm.
    """
    exact = num_buckets // 2
    wide = exact + (distance[..., None] >= _edges(exact, num_buckets - exact, max_distance, distance.device)).sum(-1)
    return torch.where(distance < exact, distance, wide)


def _edges(exact: int, num_wide: int, max_distance: int, device: torch.device) -> Tensor:
    """The smallest distance of every wide bucket but the first.

    Computed where it is needed: numbers from the host could not be captured. What is meant to be whole is so before it
    is rounded up, whoever computes the powers.
    """
    step_E = torch.arange(1, num_wide, dtype=torch.float64, device=device)
    return (exact * (max_distance / exact) ** (step_E / num_wide) - 1e-6).ceil()


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
    """An encoder whose attention hears how far apart two tokens of an input are."""

    config: MPNetConfig

    def __init__(self, config: MPNetConfig) -> None:
        super().__init__(config)
        if config.num_buckets < 4 or config.num_buckets % 4:
            raise ModelFolderError(f"num_buckets must be a multiple of 4, not {config.num_buckets}")
        self.distance_bias = nn.Embedding(config.num_buckets, config.num_heads)

    def attention_bias(self, layout: Layout) -> Tensor:
        """The bias by distance."""
        return self.bias_HTT(layout.longest)

    def bias_HTT(self, length: int) -> Tensor:
        """What is added to the scores of `length` tokens in a row, queries before keys."""
        return by_distance(self.distance_bias, length)


class MPNet(Bert):
    """MPNet: no token types, positions that start behind the padding index as RoBERTa's do."""

    name = "mpnet"
    block_names = BlockNames(
        query="attention.attn.q",
        key="attention.attn.k",
        value="attention.attn.v",
        attention_out="attention.attn.o",
        attention_norm="attention.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        feed_forward_norm="output.LayerNorm",
    )
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
