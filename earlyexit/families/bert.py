"""BERT and MiniLM (a BERT by structure)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from earlyexit.families.base import Family, JsonDict, Pretrained
from earlyexit.families.encoder import (
    BlockNames,
    EncoderBackbone,
    EncoderConfig,
    copy_blocks,
    copy_embeddings,
    final_head,
    label_names,
)

BLOCK_NAMES = BlockNames(
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    feed_forward_norm="output.LayerNorm",
)


def encoder_config(hf_config: Any, *, position_offset: int = 0, pairs: bool = False) -> EncoderConfig:
    """Sizes of a BERT-like `transformers` configuration."""
    return EncoderConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        num_blocks=hf_config.num_hidden_layers,
        num_heads=hf_config.num_attention_heads,
        intermediate_size=hf_config.intermediate_size,
        max_length=hf_config.max_position_embeddings - position_offset,
        position_offset=position_offset,
        activation=hf_config.hidden_act,
        norm_eps=hf_config.layer_norm_eps,
        token_types=hf_config.type_vocab_size if pairs and hf_config.type_vocab_size > 1 else 0,
    )


class Bert(Family):
    """BERT and whatever has its structure."""

    name = "bert"

    def build(self, config: JsonDict) -> EncoderBackbone:
        return EncoderBackbone(EncoderConfig(**config))

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        classifies = hasattr(hf_model, "classifier")
        encoder = hf_model.bert if classifies else hf_model
        weights: dict[str, Tensor] = encoder.state_dict()
        backbone = EncoderBackbone(encoder_config(hf_model.config, pairs=pairs))
        copy_embeddings(backbone, weights, token_type=True)
        copy_blocks(backbone, weights, "encoder.layer.{}.", BLOCK_NAMES)
        if not classifies:
            return Pretrained(backbone=backbone, head=None, label_names=None)
        head = final_head("pooler", encoder.pooler.dense, hf_model.classifier)
        return Pretrained(backbone=backbone, head=head, label_names=label_names(hf_model.config))
