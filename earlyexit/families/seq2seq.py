"""Encoder-decoders (Vaswani et al. 2017): T5 and Marian.

A sequence consists of the source, the decoder's start token, and the answer. Its first input has the whole source.
`embed` runs the encoder, whose outputs become the rows of the source's tokens. Decoder blocks pass these rows on
unchanged, and store their keys and values in the sequence's pages, like those of other tokens. Thus code outside the
network treats the rows of a source like those of any decoder.

Families differ in place and kind of the norm, in biases, and in the feed-forward. Tensor legend as in `piece.py` and
`kv.py`; of N rows, M belong to the decoder, and the others to sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.errors import InputError, ModelFolderError
from earlyexit.families.base import Family, Pretrained, names_in_blocks, renamed
from earlyexit.families.decoder import Block, DecoderBackbone, DecoderConfig, pretrained
from earlyexit.families.encoder import causal_bias, relative_bias
from earlyexit.network.layers import ACTIVATIONS
from earlyexit.network.piece import Layout, Masks, Tensors
from earlyexit.sequences.kv import TRIAL, KvIndex, KvStore, Run
from earlyexit.sequences.sequence import PAGE_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqConfig(DecoderConfig):
    """Sizes of an encoder-decoder. Both sides have the same heads and feed-forward. The defaults are T5-small's."""

    vocab_size: int = 32128
    hidden_size: int = 512
    num_blocks: int = 6
    """Blocks of the decoder."""
    num_encoder_blocks: int = 6
    num_heads: int = 8
    num_kv_heads: int = 8
    head_size: int = 64
    intermediate_size: int = 2048
    max_length: int = 1024
    """Maximum tokens of source and answer together."""
    norm_eps: float = 1e-6
    norm_first: bool = True
    """Whether norms are before a block's parts and after the last block (pre-norm), or after each part (post-norm)."""
    bias: bool = False
    """Whether linear layers have biases, and norms subtract the mean."""
    activation: str = "relu"
    gated: bool = False
    embedding_scale: float = 1.0
    distance_buckets: int = 32
    """Buckets of the bias by relative position; 0 for sinusoidal positions."""
    max_distance: int = 128

    def __post_init__(self) -> None:
        # Not `super()`, because `dataclass` with slots creates a new class, to which `super()` does not refer.
        DecoderConfig.__post_init__(self)
        if self.activation not in ACTIVATIONS:
            raise ModelFolderError(f"unknown activation {self.activation!r}; known: {', '.join(ACTIVATIONS)}")
        if self.num_kv_heads != self.num_heads:
            raise ModelFolderError(f"num_kv_heads must equal num_heads ({self.num_heads}), not {self.num_kv_heads}")


def new_norm(config: Seq2SeqConfig) -> nn.Module:
    """Returns a norm over hidden states."""
    return (nn.LayerNorm if config.bias else nn.RMSNorm)(config.hidden_size, config.norm_eps)


class Residual(nn.Module):
    """A residual part of a block, with the norm before the part or after the sum."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.norm = new_norm(config)
        self.norm_first = config.norm_first

    def before(self, hidden_ND: Tensor) -> Tensor:
        """Returns the input of the part."""
        return self.norm(hidden_ND) if self.norm_first else hidden_ND

    def after(self, hidden_ND: Tensor, change_ND: Tensor) -> Tensor:
        """Returns the states with the part's output added."""
        return hidden_ND + change_ND if self.norm_first else self.norm(hidden_ND + change_ND)


class Attention(Residual):
    """Attention among the tokens of a source or of an answer, or of an answer's tokens to their source."""

    def __init__(self, config: Seq2SeqConfig, **projections: int) -> None:
        """`projections`: by the name of each layer before attention, what it returns per head: 3 for q, k and v."""
        super().__init__(config)
        self.head_size = config.head_size
        width = config.num_heads * config.head_size
        for name, number in projections.items():
            self.add_module(name, nn.Linear(config.hidden_size, number * width, bias=config.bias))
        self.out = nn.Linear(width, config.hidden_size, bias=config.bias)

    def by_head(self, name: str, hidden_ND: Tensor) -> Tensor:
        """Returns the queries, keys and values of a layer before attention, one after the other, (N, A, d)."""
        by_head_NAd: Tensor = getattr(self, name)(hidden_ND).unflatten(-1, (-1, self.head_size))
        return by_head_NAd

    def added(self, hidden_ND: Tensor, context_NHd: Tensor) -> Tensor:
        """Returns the states with the result of attention added."""
        return self.after(hidden_ND, self.out(context_NHd.flatten(1)))


class FeedForward(Residual):
    """Two layers; the first may be gated (Shazeer 2020)."""

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
    """One block of the encoder."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.attention = Attention(config, qkv=3)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden_ND: Tensor, layout: Layout, masks: Masks) -> Tensor:
        """Returns the packed hidden state after the block, (N, D)."""
        qkv_NAd = self.attention.by_head("qkv", self.attention.before(hidden_ND))
        (context_NHd,) = layout.attend(qkv_NAd, masks, self._attend)
        result: Tensor = self.feed_forward(self.attention.added(hidden_ND, context_NHd))
        return result

    def _attend(self, qkv_RTAd: Tensor, mask: Tensor | None) -> tuple[Tensor]:
        query_RHTd, key_RHTd, value_RHTd = qkv_RTAd.transpose(1, 2).chunk(3, dim=1)
        context_RHTd = F.scaled_dot_product_attention(query_RHTd, key_RHTd, value_RHTd, attn_mask=mask)
        return (context_RHTd.transpose(1, 2),)


@dataclass(frozen=True, slots=True)
class SidedPlaces:
    """The indices of the decoder's rows and of sources' rows, and their places in the store."""

    own: KvIndex
    """Places of the decoder's rows."""
    crossing: KvIndex
    """Places of the sources to which the decoder's rows attend."""
    answer_rows: Tensor | slice
    """Indices of the decoder's rows."""
    sources: tuple[Tensor, Tensor] | None
    """Indices of the sources' rows, and the places of their keys and values; None if there are none."""


class AnswerBlock(Block):
    """One block of the decoder.

    The states of a source are part of its sequence's first input. Thus every block computes its own keys and values of
    the source, on any replica, even if the first token left before the block.
    """

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.attention = Attention(config, qkv=3)
        self.crossing = Attention(config, query=1, keys_values=2)
        self.feed_forward = FeedForward(config)

    def write(self, index: int, hidden_ND: Tensor, where: SidedPlaces, kv: KvStore) -> Tensor:
        if where.sources is not None:
            rows, places = where.sources
            kv.write(index, places, *self.crossing.by_head("keys_values", hidden_ND[rows]).chunk(2, dim=1))
        before_MD = self.attention.before(hidden_ND[where.answer_rows])
        queries_MHd, keys_MHd, values_MHd = self.attention.by_head("qkv", before_MD).chunk(3, dim=1)
        kv.write(index, where.own.write_N, keys_MHd, values_MHd)
        return queries_MHd

    def attended(self, index: int, hidden_ND: Tensor, queries_MHd: Tensor, where: SidedPlaces, kv: KvStore) -> Tensor:
        rows = where.answer_rows
        hidden_MD = self.attention.added(hidden_ND[rows], kv.attend(index, where.own, queries_MHd))
        crossing_MHd = self.crossing.by_head("query", self.crossing.before(hidden_MD))
        hidden_MD = self.crossing.added(hidden_MD, kv.attend(index, where.crossing, crossing_MHd))
        after_MD: Tensor = self.feed_forward(hidden_MD)
        return after_MD if isinstance(rows, slice) else hidden_ND.index_copy(0, rows, after_MD)


WAVE_LENGTH = 10_000.0
"""Wavelength of the slowest sinusoid, divided by 2 pi."""


class Seq2SeqBackbone(DecoderBackbone):
    """An encoder-decoder. Its blocks are the decoder's, and `embed` runs the encoder."""

    config: Seq2SeqConfig

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        heads, buckets = config.num_heads, config.distance_buckets
        self.encoder = nn.ModuleList(SourceBlock(config) for _ in range(config.num_encoder_blocks))
        self.encoder_norm = self.new_norm()
        self.encoder_distances = nn.Embedding(buckets, heads) if buckets else None
        self.distances = nn.Embedding(buckets, heads) if buckets else None

    def new_block(self) -> Block:
        return AnswerBlock(self.config)

    def new_norm(self) -> nn.Module:
        return new_norm(self.config) if self.config.norm_first else nn.Identity()

    def run_of(self, sequence: int, start: int, length: int, limit: int, prompt: int) -> Run:
        """Returns a run whose source is the prompt without the decoder's start token.

        Without a sequence, as in warm-ups, several rows are a first input, and one row is a step after a source.
        """
        if sequence != TRIAL:
            return Run(sequence=sequence, start=start, length=length, limit=limit, source=max(prompt - 1, 0))
        if length > 1:
            return Run(sequence=TRIAL, start=0, length=length, source=length - 1)
        return Run(sequence=TRIAL, start=PAGE_TOKENS, length=1, source=PAGE_TOKENS)

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        """Embeds inputs, and encodes sources. Raises InputError for a source in parts, and for an empty source."""
        token_ids_N, run_B5 = inputs
        runs = self.runs(run_B5, [0] * len(run_B5), layout)
        first_inputs = [run for run in runs if run.start < run.source]
        if any(run.start or run.end <= run.source for run in first_inputs):
            raise InputError("the first input of a sequence must have the whole source")
        if not all(run.source for run in runs):
            raise InputError("a source needs at least one token")
        hidden_ND = self.word(token_ids_N) * self.config.embedding_scale
        if self.distances is None:
            hidden_ND = hidden_ND + self._sinusoids(runs)
        if first_inputs:
            rows = self._index(np.flatnonzero(_are_sources(runs)))
            hidden_ND = hidden_ND.index_copy(0, rows, self._encode(hidden_ND[rows], first_inputs))
        return hidden_ND, run_B5, run_B5.new_zeros(len(run_B5))

    def where(self, runs: Sequence[Run]) -> SidedPlaces:
        kv, bias_DH = self.memory.kv, None
        first_inputs = [run for run in runs if run.start < run.source]
        answers = [
            replace(run, start=run.source, length=run.end - run.source) if run.start < run.source else run
            for run in runs
        ]
        if self.distances is not None:
            longest = max(run.end - run.source for run in answers)
            bias_DH = causal_bias(self.distances, longest, self.config.max_distance)
        own, crossing = kv.places(answers, bias_DH=bias_DH), kv.places(answers, source=True)
        if not first_inputs:
            return SidedPlaces(own, crossing, slice(None), None)
        places = np.concatenate([kv.place_of(run.sequence, run.source) for run in first_inputs])
        is_source_N = _are_sources(runs)
        sources = self._index(np.flatnonzero(is_source_N)), self._index(places)
        return SidedPlaces(own, crossing, self._index(np.flatnonzero(~is_source_N)), sources)

    def _sinusoids(self, runs: Sequence[Run]) -> Tensor:
        """Returns sinusoidal positions within source or answer, (N, D) (Vaswani et al. 2017, section 3.5).

        As in Marian, sines come before cosines.
        """
        token_N = np.concatenate([np.arange(run.start, run.end) for run in runs])
        source_N = np.repeat([run.source for run in runs], [run.length for run in runs])
        position_N = self._index(np.where(token_N < source_N, token_N, token_N - source_N))
        size = self.config.hidden_size
        exponent = torch.arange(0, size, 2, dtype=torch.float64, device=position_N.device) / size
        angle_Nh = position_N[:, None] * WAVE_LENGTH**-exponent
        return torch.cat([angle_Nh.sin(), angle_Nh.cos()], dim=-1).to(self.word.weight.dtype)

    def _encode(self, hidden_ND: Tensor, first_inputs: Sequence[Run]) -> Tensor:
        """Returns the encoder's outputs for embedded sources, packed."""
        # Attention runs separately for each source, so that its values do not depend on other sources of the batch.
        layout = Layout(np.array([run.source for run in first_inputs], dtype=np.int32), hidden_ND.device, together=0)
        table = self.encoder_distances
        masks = layout.masks(None if table is None else relative_bias(table, layout.longest, self.config.max_distance))
        for block in self.encoder:
            hidden_ND = block(hidden_ND, layout, masks)
        normed_ND: Tensor = self.encoder_norm(hidden_ND)
        return normed_ND

    def _index(self, rows: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(rows).to(self.word.weight.device, non_blocking=True)


def _are_sources(runs: Sequence[Run]) -> npt.NDArray[np.bool_]:
    """Returns for every row whether it belongs to a source, (N,)."""
    return np.concatenate([np.arange(run.start, run.end) < run.source for run in runs])


T5_ATTENTION = {
    "attention.norm": ("layer.0.layer_norm",),
    "attention.qkv": tuple(f"layer.0.SelfAttention.{part}" for part in "qkv"),
    "attention.out": ("layer.0.SelfAttention.o",),
}
T5_CROSSING = {
    "crossing.norm": ("layer.1.layer_norm",),
    "crossing.query": ("layer.1.EncDecAttention.q",),
    "crossing.keys_values": ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"),
    "crossing.out": ("layer.1.EncDecAttention.o",),
}


class T5(Family):
    """Encoder-decoders of the `transformers` type `t5`."""

    name = "t5"
    sizes, backbone = Seq2SeqConfig, Seq2SeqBackbone

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        """Raises ModelFolderError for a model without a head over its vocabulary, and for unknown activations."""
        if not hasattr(hf_model, "lm_head"):
            raise ModelFolderError("a T5 without a head over its vocabulary cannot generate")
        config, weights = hf_model.config, hf_model.state_dict()
        words_VD, head_VD = weights["shared.weight"], weights["lm_head.weight"]
        # T5 scales states down before the head. This code scales the head's weights, and if tied, embedded tokens up.
        scale = config.d_model**-0.5 if config.scale_decoder_outputs else 1.0
        tied = words_VD.equal(head_VD)
        sizes = Seq2SeqConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            num_blocks=config.num_decoder_layers,
            num_encoder_blocks=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_size=config.d_kv,
            intermediate_size=config.d_ff,
            max_length=getattr(config, "n_positions", None) or Seq2SeqConfig().max_length,
            norm_eps=config.layer_norm_epsilon,
            activation=config.dense_act_fn,
            gated=config.is_gated_act,
            embedding_scale=1 / scale if tied else 1.0,
            distance_buckets=config.relative_attention_num_buckets,
            max_distance=config.relative_attention_max_distance,
            tied=tied,
        )
        state = renamed(weights, _t5_names(sizes))
        for k in range(sizes.num_blocks):  # T5 does not divide attention scores by the root of the head size
            state[f"blocks.{k}.crossing.query.weight"] *= config.d_kv**0.5
        width = config.num_heads * config.d_kv
        for name, values in state.items():
            if name.endswith("qkv.weight"):
                values[:width] *= config.d_kv**0.5
        if tied:
            state["word.weight"] = words_VD * scale
        return pretrained(Seq2SeqBackbone(sizes), state, hf_model, head_VD * scale)


def _t5_names(config: Seq2SeqConfig) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {"word.weight": ("shared.weight",)}
    for ours, theirs in (("encoder_", "encoder"), ("", "decoder")):
        names[f"{ours}norm.weight"] = (f"{theirs}.final_layer_norm.weight",)
        distances = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        names[f"{ours}distances.weight"] = (distances,)
    encoder, decoder = _t5_feed_forward(config, 1), T5_CROSSING | _t5_feed_forward(config, 2)
    names |= names_in_blocks("encoder.{}", "encoder.block.{}", config.num_encoder_blocks, T5_ATTENTION | encoder)
    return names | names_in_blocks("blocks.{}", "decoder.block.{}", config.num_blocks, T5_ATTENTION | decoder)


def _t5_feed_forward(config: Seq2SeqConfig, layer: int) -> dict[str, tuple[str, ...]]:
    at = f"layer.{layer}.DenseReluDense"
    return {
        "feed_forward.norm": (f"layer.{layer}.layer_norm",),
        "feed_forward.up": (f"{at}.wi_0", f"{at}.wi_1") if config.gated else (f"{at}.wi",),
        "feed_forward.down": (f"{at}.wo",),
    }


MARIAN_EPS = 1e-5
"""Torch's default. Marian's configurations do not name it."""
MARIAN_PARTS = {
    "attention.norm": ("self_attn_layer_norm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.out_proj",),
    "feed_forward.norm": ("final_layer_norm",),
    "feed_forward.up": ("fc1",),
    "feed_forward.down": ("fc2",),
}
MARIAN_CROSSING = {
    "crossing.norm": ("encoder_attn_layer_norm",),
    "crossing.query": ("encoder_attn.q_proj",),
    "crossing.keys_values": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "crossing.out": ("encoder_attn.out_proj",),
}


class Marian(Family):
    """Encoder-decoders of the `transformers` type `marian` whose two sides share vocabulary, heads and sizes."""

    name = "marian"
    sizes, backbone = Seq2SeqConfig, Seq2SeqBackbone

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        """Raises ModelFolderError for a model without a head over its vocabulary, and for sides that differ in size."""
        if not hasattr(hf_model, "lm_head"):
            raise ModelFolderError("a Marian without a head over its vocabulary cannot generate")
        weights = hf_model.state_dict()
        words_VD, head_VD = weights["model.decoder.embed_tokens.weight"], weights["lm_head.weight"]
        if not words_VD.equal(weights["model.encoder.embed_tokens.weight"]):
            raise ModelFolderError("a Marian whose encoder and decoder have different vocabularies is not supported")
        config = hf_model.config
        for name in ("attention_heads", "ffn_dim"):
            encoder, decoder = getattr(config, f"encoder_{name}"), getattr(config, f"decoder_{name}")
            if encoder != decoder:
                raise ModelFolderError(f"{name} must be the same on both sides, not {encoder} and {decoder}")
        sizes = Seq2SeqConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            num_blocks=config.decoder_layers,
            num_encoder_blocks=config.encoder_layers,
            num_heads=config.decoder_attention_heads,
            num_kv_heads=config.decoder_attention_heads,
            head_size=config.d_model // config.decoder_attention_heads,
            intermediate_size=config.decoder_ffn_dim,
            max_length=config.max_position_embeddings,
            norm_eps=MARIAN_EPS,
            norm_first=False,
            bias=True,
            activation=config.activation_function,
            embedding_scale=config.d_model**0.5 if config.scale_embedding else 1.0,
            distance_buckets=0,
            tied=words_VD.equal(head_VD),
        )
        parts, kinds = MARIAN_PARTS | MARIAN_CROSSING, ("weight", "bias")
        names = names_in_blocks("blocks.{}", "model.decoder.layers.{}", sizes.num_blocks, parts, kinds)
        names |= names_in_blocks("encoder.{}", "model.encoder.layers.{}", sizes.num_encoder_blocks, MARIAN_PARTS, kinds)
        names["word.weight"] = ("model.decoder.embed_tokens.weight",)
        bias_V = weights["final_logits_bias"][0].clone()
        return pretrained(Seq2SeqBackbone(sizes), renamed(weights, names), hf_model, head_VD, bias_V)
