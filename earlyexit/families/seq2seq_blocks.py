"""Blocks of encoder-decoders (Vaswani et al. 2017), as T5 and Marian have them.

They differ in where the norm is, and which; in biases; and in the feed-forward. A decoder's block attends to its
sequence's source as well. Legend beside `layout.py` and `kv.py`: M of the N rows are a decoder's own, the others
a source's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.decoder import DecoderConfig, RmsNorm
from earlyexit.families.decoder_rows import Block
from earlyexit.kv import KvStore
from earlyexit.kv_places import Places
from earlyexit.layout import Layout, Masks
from earlyexit.linear import ACTIVATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqConfig(DecoderConfig):
    """Sizes of an encoder-decoder; the defaults are T5-small's. Heads and feed-forward are of one size in both."""

    vocab_size: int = 32128
    hidden_size: int = 512
    num_blocks: int = 6
    """Of the decoder."""
    num_encoder_blocks: int = 6
    num_heads: int = 8
    num_kv_heads: int = 8
    head_size: int = 64
    intermediate_size: int = 2048
    max_length: int = 1024
    """Of source and answer together."""
    norm_eps: float = 1e-6
    norm_first: bool = True
    """Whether a norm is in front of each part of a block, and one behind the last; else behind each part."""
    bias: bool = False
    """Whether linear layers have biases, and norms take out the mean."""
    activation: str = "relu"
    gated: bool = False
    embedding_scale: float = 1.0
    distance_buckets: int = 32
    """Of the bias by distance; 0 for sinusoidal positions."""
    max_distance: int = 128

    def __post_init__(self) -> None:
        # Named, for a dataclass with slots is another class than the one that `super()` knows.
        DecoderConfig.__post_init__(self)
        if self.activation not in ACTIVATIONS:
            raise ModelFolderError(f"unknown activation {self.activation!r}; known: {', '.join(ACTIVATIONS)}")
        if self.num_kv_heads != self.num_heads:
            raise ModelFolderError(f"{self.num_heads} heads must have a key each, not {self.num_kv_heads}")


def new_norm(config: Seq2SeqConfig) -> nn.Module:
    """Over hidden states."""
    kind = nn.LayerNorm if config.bias else RmsNorm
    return kind(config.hidden_size, config.norm_eps)


class Residual(nn.Module):
    """What a block adds to its states, and the norm in front of it or behind the sum."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.norm = new_norm(config)
        self.norm_first = config.norm_first

    def before(self, hidden_ND: Tensor) -> Tensor:
        """What it looks at."""
        return self.norm(hidden_ND) if self.norm_first else hidden_ND

    def after(self, hidden_ND: Tensor, change_ND: Tensor) -> Tensor:
        """States with its own added."""
        return hidden_ND + change_ND if self.norm_first else self.norm(hidden_ND + change_ND)


class SelfAttention(Residual):
    """Of the tokens of a text to each other."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        self.shape = 3 * config.num_heads, config.head_size
        width = config.num_heads * config.head_size
        self.qkv = nn.Linear(config.hidden_size, 3 * width, bias=config.bias)
        self.out = nn.Linear(width, config.hidden_size, bias=config.bias)

    def queries_keys_values(self, hidden_ND: Tensor) -> tuple[Tensor, ...]:
        """Each (N, H, d)."""
        parts: tuple[Tensor, ...] = self.qkv(self.before(hidden_ND)).unflatten(-1, self.shape).chunk(3, dim=1)
        return parts


class CrossAttention(Residual):
    """Of an answer's tokens to their source."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        self.heads = config.num_heads
        width = config.num_heads * config.head_size
        self.query = nn.Linear(config.hidden_size, width, bias=config.bias)
        self.keys_values = nn.Linear(config.hidden_size, 2 * width, bias=config.bias)
        self.out = nn.Linear(width, config.hidden_size, bias=config.bias)

    def queries(self, hidden_MD: Tensor) -> Tensor:
        """(M, H, d)."""
        queries_MHd: Tensor = self.query(self.before(hidden_MD)).unflatten(-1, (self.heads, -1))
        return queries_MHd

    def kept(self, source_ND: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of source tokens as the encoder left them, each (N, H, d)."""
        parts: tuple[Tensor, ...] = self.keys_values(source_ND).unflatten(-1, (2 * self.heads, -1)).chunk(2, dim=1)
        return parts


class FeedForward(Residual):
    """Two layers, of which the first may be gated (Shazeer 2020)."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        self.activation = ACTIVATIONS[config.activation]
        self.gated = config.gated
        wide = config.intermediate_size
        self.up = nn.Linear(config.hidden_size, 2 * wide if config.gated else wide, bias=config.bias)
        self.down = nn.Linear(wide, config.hidden_size, bias=config.bias)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        up_NF = self.up(self.before(hidden_ND))
        if self.gated:
            gate_NF, up_NF = up_NF.chunk(2, dim=-1)
            return self.after(hidden_ND, self.down(self.activation(gate_NF) * up_NF))
        return self.after(hidden_ND, self.down(self.activation(up_NF)))


class SourceBlock(nn.Module):
    """One of the encoder."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden_ND: Tensor, layout: Layout, masks: Masks) -> Tensor:
        """Packed (N, D) to (N, D)."""
        (context_ND,) = layout.attend(self.attention.qkv(self.attention.before(hidden_ND)), masks, self._attend)
        hidden_ND = self.attention.after(hidden_ND, self.attention.out(context_ND))
        result: Tensor = self.feed_forward(hidden_ND)
        return result

    def _attend(self, qkv_RTD: Tensor, mask: Tensor | None) -> tuple[Tensor]:
        by_head_RTHd = qkv_RTD.view(*qkv_RTD.shape[:-1], *self.attention.shape)
        query_RHTd, key_RHTd, value_RHTd = (each.transpose(1, 2) for each in by_head_RTHd.chunk(3, dim=2))
        context_RHTd = F.scaled_dot_product_attention(query_RHTd, key_RHTd, value_RHTd, attn_mask=mask)
        return (context_RHTd.transpose(1, 2).flatten(-2),)


@dataclass(frozen=True, slots=True)
class SidedPlaces:
    """Of rows, which are of sources and which the decoder's own, and their places in the store."""

    own: Places | None
    """None where all rows are of sources."""
    crossing: Places | None
    """What the own rows read of their sources."""
    own_M: Tensor | None
    """Which of the rows these are; None where all are."""
    source: Tensor | None
    """Which of them are of sources, ..."""
    source_places: Tensor | None
    """... and where their keys and values go."""


class AnswerBlock(Block):
    """One of the decoder, which is the chain.

    A source's states ride along in its sequence's first input, so that every block makes its own keys and values
    of them, wherever it is, and whenever: also where the first token left before it.
    """

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.crossing = CrossAttention(config)
        self.feed_forward = FeedForward(config)

    def forward(self, index: int, hidden_ND: Tensor, where: SidedPlaces, kv: KvStore) -> Tensor:
        self._keep_source(index, hidden_ND, where, kv)
        if where.own is None or where.crossing is None:
            return hidden_ND
        if where.own_M is None:
            return self._answered(index, hidden_ND, where.own, where.crossing, kv)
        answered_MD = self._answered(index, hidden_ND[where.own_M], where.own, where.crossing, kv)
        return hidden_ND.index_copy(0, where.own_M, answered_MD)

    def keep(self, index: int, hidden_ND: Tensor, where: SidedPlaces, kv: KvStore) -> None:
        self._keep_source(index, hidden_ND, where, kv)
        if where.own is not None:
            own_MD = hidden_ND if where.own_M is None else hidden_ND[where.own_M]
            _, keys_MHd, values_MHd = self.attention.queries_keys_values(own_MD)
            kv.write(index, where.own.write_N, keys_MHd, values_MHd)

    def _keep_source(self, index: int, hidden_ND: Tensor, where: SidedPlaces, kv: KvStore) -> None:
        if where.source is not None and where.source_places is not None:
            kv.write(index, where.source_places, *self.crossing.kept(hidden_ND[where.source]))

    def _answered(self, index: int, hidden_MD: Tensor, own: Places, crossing: Places, kv: KvStore) -> Tensor:
        queries_MHd, keys_MHd, values_MHd = self.attention.queries_keys_values(hidden_MD)
        kv.write(index, own.write_N, keys_MHd, values_MHd)
        context_MHd = kv.attend(index, own, queries_MHd)
        hidden_MD = self.attention.after(hidden_MD, self.attention.out(context_MHd.flatten(1)))
        context_MHd = kv.attend(index, crossing, self.crossing.queries(hidden_MD))
        hidden_MD = self.crossing.after(hidden_MD, self.crossing.out(context_MHd.flatten(1)))
        result: Tensor = self.feed_forward(hidden_MD)
        return result
