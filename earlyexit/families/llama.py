"""Llama (Touvron et al. 2023) and what has its structure: SmolLM2, TinyLlama, llama2.c's stories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Family, JsonDict, Pretrained, names_in_blocks, put_together
from earlyexit.families.decoder import DecoderBackbone, DecoderConfig, pretrained


class Llama(Family):
    """Decoders of `transformers`' type `llama`, with unscaled rotary positions."""

    name = "llama"

    def build(self, config: JsonDict, folder: Path | None = None) -> DecoderBackbone:
        return DecoderBackbone(DecoderConfig(**config))

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        """Raises ModelFolderError for variants that are not supported: scaled positions, biases."""
        backbone = DecoderBackbone(config_of(hf_model.config))
        return from_weights(backbone, hf_model.state_dict())


def config_of(hf_config: Any) -> DecoderConfig:
    """Returns the sizes in a `transformers` configuration."""
    rotary = hf_config.rope_parameters
    if rotary["rope_type"] != "default":
        raise ModelFolderError(f"rotary positions of type {rotary['rope_type']!r} are not served; only the default")
    if hf_config.hidden_act != "silu" or hf_config.attention_bias or hf_config.mlp_bias:
        raise ModelFolderError("a Llama with biases, or another activation than silu, is not served")
    return DecoderConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        num_blocks=hf_config.num_hidden_layers,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_size=hf_config.head_dim,
        intermediate_size=hf_config.intermediate_size,
        max_length=hf_config.max_position_embeddings,
        rotary_base=float(rotary["rope_theta"]),
        norm_eps=hf_config.rms_norm_eps,
        tied=hf_config.tie_word_embeddings,
    )


def from_weights(backbone: DecoderBackbone, weights: Mapping[str, Tensor]) -> Pretrained:
    """Returns a backbone filled with weights by their names in `transformers`, and its head."""
    whole = {"word.weight": ("model.embed_tokens.weight",), "norm.weight": ("model.norm.weight",)}
    names = names_in_blocks("blocks.{}", "model.layers.{}", backbone.num_blocks, PARTS) | whole
    vocabulary_VD = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return pretrained(backbone, put_together(weights, names), vocabulary_VD)


PARTS = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "feed_forward_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
