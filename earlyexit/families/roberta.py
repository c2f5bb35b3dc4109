"""RoBERTa: BERT's blocks, positions that start behind the padding index, another head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from earlyexit.families.base import Family, JsonDict, Pretrained
from earlyexit.families.bert import BLOCK_NAMES, encoder_config
from earlyexit.families.encoder import (
    EncoderBackbone,
    EncoderConfig,
    copy_blocks,
    copy_embeddings,
    final_head,
    label_names,
)


class Roberta(Family):
    """RoBERTa."""

    name = "roberta"

    def build(self, config: JsonDict) -> EncoderBackbone:
        return EncoderBackbone(EncoderConfig(**config))

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        classifies = hasattr(hf_model, "classifier")
        encoder = hf_model.roberta if classifies else hf_model
        weights: dict[str, Tensor] = encoder.state_dict()
        backbone = EncoderBackbone(encoder_config(hf_model.config, position_offset=hf_model.config.pad_token_id + 1))
        copy_embeddings(backbone, weights, token_type=True)
        copy_blocks(backbone, weights, "encoder.layer.{}.", BLOCK_NAMES)
        if not classifies:
            return Pretrained(backbone=backbone, head=None, label_names=None)
        head = final_head("pooler", hf_model.classifier.dense, hf_model.classifier.out_proj)
        return Pretrained(backbone=backbone, head=head, label_names=label_names(hf_model.config))
