"""The post-norm transformer encoder of BERT, MiniLM, RoBERTa, DistilBERT and MPNet.

It does not use `transformers` modules, so that inputs can be packed, and a replica does not need `transformers`. Tests
verify that weights and results equal those of `transformers`. Tensor legend as in `piece.py`; d the size of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Backbone, Family, FinalHead, JsonDict, Pretrained, names_in_blocks, renamed
from earlyexit.network.boundary import Boundary, TensorSpec
from earlyexit.network.layers import ACTIVATIONS, ActivatedLinear, SummedLinear, pad_rows, padded_num_rows
from earlyexit.network.piece import Layout, Masks, Tensors
from earlyexit.ramps import RampStyle

SCORES_AT_ONCE = 2**18
"""Approximate number of attention weights in the buffer, rounded to whole heads: 1 MiB in float32."""


def attend_and_measure(
    query_RHTd: Tensor, key_RHTd: Tensor, value_RHTd: Tensor, mask: Tensor | None, counted_RT: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the result of attention, (R, H, T, d), and the attention that every token receives, float32 (R, T).

    A token's received attention is the sum over heads and queries, Tabi's importance of a token (section 4.2).
    `scaled_dot_product_attention` does not return the weights, so this function computes them, for a few heads at a
    time in a buffer that fits into a core's cache. `mask`: as for `scaled_dot_product_attention`. `counted_RT`: 1 for
    queries that count, else 0; None if all count. For inference only.
    """
    rows, heads, length, size = query_RHTd.shape
    # On a CPU, products of small matrices are slower in bfloat16.
    dtype = torch.float32 if query_RHTd.device.type == "cpu" else query_RHTd.dtype
    query, key, value = (
        tensor.reshape(rows * heads, length, size).to(dtype) for tensor in (query_RHTd, key_RHTd, value_RHTd)
    )
    full = None if mask is None else mask.expand(rows, heads, length, length)
    counted = query.new_ones(1, length).expand(rows, length) if counted_RT is None else counted_RT.to(query.dtype)
    step = max(1, min(rows * heads, SCORES_AT_ONCE // max(1, length**2)))
    buffer = query.new_empty(step, length, length)
    context, received = query.new_empty(rows * heads, length, size), query.new_empty(rows * heads, 1, length)
    for first in range(0, rows * heads, step):
        part = slice(first, min(first + step, rows * heads))
        group = torch.arange(part.start, part.stop, device=query.device)
        row, head = group // heads, group % heads
        scores = buffer[: len(group)]
        torch.baddbmm(scores, query[part], key[part].transpose(1, 2), beta=0, alpha=size**-0.5, out=scores)
        if full is not None and full.dtype == torch.bool:
            scores.masked_fill_(~full[row, head], -torch.inf)
        elif full is not None:
            scores.add_(full[row, head])
        weights = torch.softmax(scores, dim=-1, out=scores if scores.device.type == "cpu" else None)
        torch.bmm(weights, value[part], out=context[part])
        torch.bmm(counted[row][:, None], weights, out=received[part])
    by_head = received.view(rows, heads, length)
    return context.view(rows, heads, length, size).to(query_RHTd.dtype), by_head.sum(1, dtype=torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Sizes of an encoder; the defaults are BERT-base's."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_blocks: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_length: int = 512
    position_offset: int = 0
    """Position of the first token. RoBERTa's is its padding index + 1."""
    activation: str = "gelu"
    norm_eps: float = 1e-12
    token_types: int = 0
    """Number of token types, such as 2 for the first and second text of a pair. 0 if inputs have no token types; the
    embedding of the first type is then added to the positions."""
    num_buckets: int = 0
    """Buckets of relative positions, half of them for keys after the query, by which attention scores have a bias; a
    multiple of 4. 0: there is no bias."""

    def __post_init__(self) -> None:
        if self.num_buckets % 4:
            raise ModelFolderError(f"num_buckets must be a multiple of 4, not {self.num_buckets}")


class Embeddings(nn.Module):
    """Token, position and type embeddings, summed and normalised."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.position_offset = config.position_offset
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_length + config.position_offset, config.hidden_size)
        self.token_type = nn.Embedding(config.token_types, config.hidden_size) if config.token_types else None
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, inputs: Tensors, position_N: Tensor) -> Tensor:
        """Returns the embeddings, (N, D). `inputs`: token ids and, if the network has them, token types, (N,) each."""
        hidden_ND = self.word(inputs[0]) + self.position(position_N + self.position_offset)
        if self.token_type is not None:
            hidden_ND = hidden_ND + self.token_type(inputs[1])
        normed_ND: Tensor = self.norm(hidden_ND)
        return normed_ND


class EncoderBlock(nn.Module):
    """Attention and feed-forward, each followed by its residual and norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(size, 3 * size)
        self.attention_out = SummedLinear(size, size)
        self.attention_norm = nn.LayerNorm(size, eps=config.norm_eps)
        if config.activation not in ACTIVATIONS:
            raise ModelFolderError(f"unknown activation {config.activation!r}; known: {', '.join(ACTIVATIONS)}")
        self.up = ActivatedLinear(size, config.intermediate_size, config.activation)
        self.down = SummedLinear(config.intermediate_size, size)
        self.feed_forward_norm = nn.LayerNorm(size, eps=config.norm_eps)

    def forward(
        self, hidden_ND: Tensor, layout: Layout, masks: Masks, rows: int | None = None, *, measures: bool = False
    ) -> Tensors:
        """Returns the packed hidden state after the block, (N, D). Only attention needs the layout.

        `rows`: the number of rows of the layout, if more rows follow as padding; None if there is no padding. With
        `measures`, it also returns the attention that every token receives, (N,).
        """

        def attend(qkv_RTD: Tensor, mask: Tensor | None) -> Tensors:
            qkv_3RHTd = qkv_RTD.view(*qkv_RTD.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            query, key, value = qkv_3RHTd[0], qkv_3RHTd[1], qkv_3RHTd[2]
            if measures:
                context_RHTd, received_RT = attend_and_measure(query, key, value, mask, layout.counted_RT)
                return context_RHTd.transpose(1, 2).flatten(-2), received_RT
            context_RHTd = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            return (context_RHTd.transpose(1, 2).flatten(-2),)

        qkv_ND = self.qkv(hidden_ND)
        context_ND, *received_N = layout.attend(qkv_ND if rows is None else qkv_ND[:rows], masks, attend)
        if rows is not None:
            context_ND = torch.cat((context_ND, hidden_ND[rows:]))
        hidden_ND = self.attention_norm(self.attention_out(context_ND, hidden_ND))
        return self.feed_forward_norm(self.down(self.up(hidden_ND), hidden_ND)), *received_N


class EncoderBackbone(Backbone):
    """Embeddings and encoder blocks."""

    config: EncoderConfig
    measures_importance = True
    fills_rows = False
    """Whether `run_blocks` pads the rows once, rather than each linear layer (see `earlyexit.network.layers`)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.num_blocks = config.num_blocks
        self.max_length = config.max_length
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_blocks))
        self.distance_bias = nn.Embedding(config.num_buckets, config.num_heads) if config.num_buckets else None
        counts = {"token_ids": config.vocab_size, "token_types": config.token_types}
        self.inputs = tuple(
            TensorSpec(name=name, shape=(), dtype="int32", per_token=True, below=count)
            for name, count in counts.items()
            if count
        )

    def boundary(self, block: int) -> Boundary:
        return (TensorSpec(name="hidden", shape=(self.config.hidden_size,), per_token=True),)

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        return (self.embeddings(inputs, layout.position_N),)

    def run_blocks(self, first: int, end: int, hidden: Tensors, layout: Layout) -> Tensors:
        hidden_ND, *measured = hidden
        # The bias depends only on the distance of two tokens, because an input may begin anywhere in a row.
        bias_HTT = None if self.distance_bias is None else relative_bias(self.distance_bias, layout.longest)
        masks = layout.masks(bias_HTT, hidden_ND.dtype)
        fills = self.fills_rows and not measured and padded_num_rows(len(hidden_ND)) > len(hidden_ND)
        rows = len(hidden_ND) if fills else None
        hidden_ND = hidden_ND if rows is None else pad_rows(hidden_ND)
        for index in range(first, end):
            hidden_ND, *received = self.blocks[index](hidden_ND, layout, masks, rows, measures=bool(measured))
            measured = [sum_N + received_N for sum_N, received_N in zip(measured, received, strict=True)]
        return hidden_ND if rows is None else hidden_ND[:rows], *measured

    def to_config(self) -> JsonDict:
        return {name: value for name, value in asdict(self.config).items() if value or name != "num_buckets"}


EMBEDDINGS = {
    "word.weight": ("embeddings.word_embeddings.weight",),
    "position.weight": ("embeddings.position_embeddings.weight",),
    "norm.weight": ("embeddings.LayerNorm.weight",),
    "norm.bias": ("embeddings.LayerNorm.bias",),
}
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
PARTS = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention_out": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "up": ("intermediate.dense",),
    "down": ("output.dense",),
    "feed_forward_norm": ("output.LayerNorm",),
}
"""Our name of a block's layer -> the layers of `transformers` that are concatenated."""
DISTIL_PARTS = {
    "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention_out": ("attention.out_lin",),
    "attention_norm": ("sa_layer_norm",),
    "up": ("ffn.lin1",),
    "down": ("ffn.lin2",),
    "feed_forward_norm": ("output_layer_norm",),
}


class Bert(Family):
    """BERT and other encoders with its structure, such as MiniLM. Subclasses define the differences."""

    name = "bert"
    sizes: ClassVar[Callable[..., Any]] = EncoderConfig
    backbone: ClassVar[Callable[..., EncoderBackbone]] = EncoderBackbone
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = PARTS
    block_prefix: ClassVar[str] = "encoder.layer.{}"
    has_token_types: ClassVar[bool] = True
    """Whether checkpoints have embeddings of token types."""
    head_style: ClassVar[RampStyle] = "pooler"
    head_parts: ClassVar[tuple[str, str]] = ("bert.pooler.dense", "classifier")
    """Names of the dense layer and the classifier in a fine-tuned checkpoint."""

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        positions = getattr(hf_model.config, "position_embedding_type", "absolute")
        if getattr(hf_model.config, "is_decoder", False) or positions != "absolute":
            raise ModelFolderError(f"{self.name} models with is_decoder or relative positions are not supported")
        has_head = hasattr(hf_model, "classifier")
        encoder = getattr(hf_model, self.name) if has_head else hf_model
        weights: dict[str, Tensor] = encoder.state_dict()
        backbone = type(self).backbone(self.encoder_config(hf_model.config, pairs=pairs))
        self.copy_weights(backbone, weights)
        if not has_head:
            return Pretrained(backbone=backbone, head=None, label_names=None)
        head: dict[str, Tensor] = {}
        for ours, theirs in zip(("dense", "classifier"), self.head_parts, strict=True):
            layer = hf_model.get_submodule(theirs)
            head |= {f"{ours}.{kind}": tensor for kind, tensor in layer.state_dict().items()}
        num_outputs, names = len(head["classifier.bias"]), getattr(hf_model.config, "id2label", None)
        return Pretrained(
            backbone=backbone,
            head=FinalHead(style=self.head_style, pooling="first", num_outputs=num_outputs, weights=head),
            label_names=tuple(str(names[k]) for k in sorted(names)) if names else None,
        )

    def copy_weights(self, backbone: EncoderBackbone, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights of the `transformers` encoder without its head into the backbone."""
        embeddings = renamed(weights, EMBEDDINGS)
        if backbone.config.token_types:
            embeddings["token_type.weight"] = weights[TOKEN_TYPES]
        elif self.has_token_types:  # inputs have no types, so the first type's embedding is added to the positions
            embeddings["position.weight"] += weights[TOKEN_TYPES][0]
        backbone.embeddings.load_state_dict(embeddings)
        names = names_in_blocks("{}", self.block_prefix, backbone.num_blocks, self.parts, ("weight", "bias"))
        backbone.blocks.load_state_dict(renamed(weights, names))
        if backbone.distance_bias is not None:
            backbone.distance_bias.load_state_dict({"weight": weights["encoder.relative_attention_bias.weight"]})

    def encoder_config(self, hf_config: Any, *, pairs: bool) -> EncoderConfig:
        """Returns the sizes of a `transformers` configuration. `pairs`: see `from_transformers`."""
        num_types = hf_config.type_vocab_size
        return sizes_of(hf_config, token_types=num_types if pairs and num_types > 1 else 0)


class Roberta(Bert):
    """RoBERTa, XLM-RoBERTa and CamemBERT. Positions start after the padding index; separators part a pair's texts."""

    name = "roberta"
    head_parts = ("classifier.dense", "classifier.out_proj")

    def encoder_config(self, hf_config: Any, *, pairs: bool) -> EncoderConfig:
        if (pad := hf_config.pad_token_id) in (None, hf_config.bos_token_id, hf_config.eos_token_id):
            raise ModelFolderError(f"pad_token_id is {pad}; RoBERTa's positions need a token that only pads, such as 1")
        return sizes_of(hf_config, position_offset=hf_config.pad_token_id + 1)


class DistilBert(Bert):
    """DistilBERT: half of BERT's blocks, no token types, and a ReLU in the head."""

    name = "distilbert"
    parts = DISTIL_PARTS
    block_prefix = "transformer.layer.{}"
    has_token_types = False
    sizes = partial(EncoderConfig, num_blocks=6)
    head_style = "pooler-relu"
    head_parts = ("pre_classifier", "classifier")

    def encoder_config(self, hf_config: Any, *, pairs: bool) -> EncoderConfig:
        size, activation = hf_config.hidden_dim, hf_config.activation
        # The epsilon is a constant in DistilBERT's code.
        return sizes_of(hf_config, intermediate_size=size, activation=activation, norm_eps=1e-12)


SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_blocks": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "activation": "hidden_act",
    "norm_eps": "layer_norm_eps",
}
"""Our name of a size -> the name in a `transformers` configuration."""


def sizes_of(hf_config: Any, *, position_offset: int = 0, **others: Any) -> EncoderConfig:
    """Returns the sizes of a `transformers` configuration. `others`: sizes that it does not have by BERT's names."""
    sizes = {ours: getattr(hf_config, theirs) for ours, theirs in SIZES.items() if ours not in others}
    max_length = hf_config.max_position_embeddings - position_offset
    return EncoderConfig(max_length=max_length, position_offset=position_offset, **sizes, **others)


MAX_DISTANCE = 128
"""Distance from which all distances share a bucket. MPNet's configuration does not name it."""


def relative_bias(table: nn.Embedding, length: int, max_distance: int = MAX_DISTANCE) -> Tensor:
    """Returns the bias on the attention scores of `length` tokens, (H, queries T, keys T), by relative position.

    `table`: a bias per bucket and head. The second half of the buckets is for keys after the query.
    """
    device = table.weight.device
    position_T = torch.arange(length, device=device)
    # The buckets are computed once per distance, because computing them for all T * T pairs is slower.
    offset_D = torch.arange(1 - length, length, device=device)
    bias_DH: Tensor = table(bucket(offset_D, table.num_embeddings, max_distance))
    return bias_DH[position_T[None, :] - position_T[:, None] + (length - 1)].permute(2, 0, 1)


def causal_bias(table: nn.Embedding, longest: int, max_distance: int) -> Tensor:
    """Returns the bias on the scores of keys that are 0 to `longest` - 1 tokens before their query, (D, H)."""
    distance_D = torch.arange(longest, device=table.weight.device)
    bias_DH: Tensor = table(_bucket(distance_D, table.num_embeddings, max_distance))
    return bias_DH


def bucket(offset: Tensor, num_buckets: int, max_distance: int = MAX_DISTANCE) -> Tensor:
    """Returns the buckets, int64, of keys `offset` tokens after their query (negative: before it)."""
    half = num_buckets // 2
    return _bucket(offset.abs(), half, max_distance) + (offset > 0).long() * half


def _bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Returns the buckets of distances in one direction.

    Each of the first half of the buckets has one distance. The other buckets grow logarithmically up to `max_distance`.
    Their edges are whole numbers, whereas `transformers` rounds a logarithm, which depends on the math library.
    """
    exact = num_buckets // 2
    # The smallest distance of every wide bucket but the first. They are computed on the device, because a CUDA graph
    # cannot capture numbers from the host. The subtraction corrects rounding errors above whole numbers before `ceil`.
    step_E = torch.arange(1, num_buckets - exact, dtype=torch.float64, device=distance.device)
    edges_E = (exact * (max_distance / exact) ** (step_E / (num_buckets - exact)) - 1e-6).ceil()
    return torch.where(distance < exact, distance, exact + (distance[..., None] >= edges_E).sum(-1))


POSITION_OFFSET = 2
"""Position of the first token: MPNet's padding index is 1, regardless of its configuration."""


class MPNet(Bert):
    """MPNet: no token types, and positions that start after the padding index, as in RoBERTa."""

    name = "mpnet"
    sizes = partial(EncoderConfig, vocab_size=30527, position_offset=POSITION_OFFSET, norm_eps=1e-5, num_buckets=32)
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **PARTS,
        "qkv": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        "attention_out": ("attention.attn.o",),
        "attention_norm": ("attention.LayerNorm",),
    }
    has_token_types = False
    head_parts = ("classifier.dense", "classifier.out_proj")

    def encoder_config(self, hf_config: Any, *, pairs: bool) -> EncoderConfig:
        buckets = hf_config.relative_attention_num_buckets
        return sizes_of(hf_config, position_offset=POSITION_OFFSET, num_buckets=buckets)
