"""Marian's transformers (Junczys-Dowmunt et al. 2018), which translate: Helsinki-NLP's opus-mt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Family, JsonDict, Pretrained, names_in_blocks, put_together
from earlyexit.families.decoder import pretrained
from earlyexit.families.seq2seq import Seq2SeqBackbone, Seq2SeqConfig

NORM_EPS = 1e-5
"""Torch's default; configurations do not name it."""
PARTS = {
    "attention.norm": ("self_attn_layer_norm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.out_proj",),
    "feed_forward.norm": ("final_layer_norm",),
    "feed_forward.up": ("fc1",),
    "feed_forward.down": ("fc2",),
}
CROSSING = {
    "crossing.norm": ("encoder_attn_layer_norm",),
    "crossing.query": ("encoder_attn.q_proj",),
    "crossing.keys_values": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "crossing.out": ("encoder_attn.out_proj",),
}


class Marian(Family):
    """Encoder-decoders of `transformers`' type `marian` whose two sides share vocabulary, heads and sizes."""

    name = "marian"

    def build(self, config: JsonDict, folder: Path | None = None) -> Seq2SeqBackbone:
        return Seq2SeqBackbone(Seq2SeqConfig(**config))

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        """Raises ModelFolderError for a model without a head for its vocabulary, and for sides that differ in size."""
        if not hasattr(hf_model, "lm_head"):
            raise ModelFolderError("a Marian without a head for its vocabulary generates nothing")
        weights = hf_model.state_dict()
        words_VD, head_VD = weights["model.decoder.embed_tokens.weight"], weights["lm_head.weight"]
        if not words_VD.equal(weights["model.encoder.embed_tokens.weight"]):
            raise ModelFolderError("a Marian whose encoder has a vocabulary of its own is not served")
        backbone = Seq2SeqBackbone(sizes_of(hf_model.config, tied=words_VD.equal(head_VD)))
        state = put_together(weights, _names(backbone.config))
        bias_V = weights["final_logits_bias"][0].clone()
        never = hf_model.generation_config.bad_words_ids or ()
        bias_V[[words[0] for words in never if len(words) == 1]] = -torch.inf  # padding, which is never an answer
        return pretrained(backbone, state, head_VD, bias_V)


def sizes_of(hf_config: Any, *, tied: bool) -> Seq2SeqConfig:
    """Returns the sizes in a `transformers` configuration."""
    for what in ("attention_heads", "ffn_dim"):
        sides = getattr(hf_config, f"encoder_{what}"), getattr(hf_config, f"decoder_{what}")
        if sides[0] != sides[1]:
            raise ModelFolderError(f"{what} must be the same on both sides, not {sides[0]} and {sides[1]}")
    return Seq2SeqConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.d_model,
        num_blocks=hf_config.decoder_layers,
        num_encoder_blocks=hf_config.encoder_layers,
        num_heads=hf_config.decoder_attention_heads,
        num_kv_heads=hf_config.decoder_attention_heads,
        head_size=hf_config.d_model // hf_config.decoder_attention_heads,
        intermediate_size=hf_config.decoder_ffn_dim,
        max_length=hf_config.max_position_embeddings,
        norm_eps=NORM_EPS,
        norm_first=False,
        bias=True,
        activation={"swish": "silu"}.get(hf_config.activation_function, hf_config.activation_function),
        embedding_scale=hf_config.d_model**0.5 if hf_config.scale_embedding else 1.0,
        distance_buckets=0,
        tied=tied,
    )


def _names(config: Seq2SeqConfig) -> dict[str, tuple[str, ...]]:
    """Returns our weights' names, and the weights of `transformers` that each consists of."""
    kinds = ("weight", "bias")
    names = names_in_blocks("encoder.{}", "model.encoder.layers.{}", config.num_encoder_blocks, PARTS, kinds)
    names["word.weight"] = ("model.decoder.embed_tokens.weight",)
    return names | names_in_blocks("blocks.{}", "model.decoder.layers.{}", config.num_blocks, PARTS | CROSSING, kinds)
