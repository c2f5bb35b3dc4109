"""DistilBERT: half of BERT's blocks, no token types, a ReLU in its head."""

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
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    feed_forward_norm="output_layer_norm",
)


class DistilBert(Family):
    """DistilBERT."""

    name = "distilbert"

    def build(self, config: JsonDict) -> EncoderBackbone:
        return EncoderBackbone(EncoderConfig(**{"num_blocks": 6, **config}))

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        classifies = hasattr(hf_model, "classifier")
        encoder = hf_model.distilbert if classifies else hf_model
        weights: dict[str, Tensor] = encoder.state_dict()
        sizes = hf_model.config
        backbone = EncoderBackbone(
            EncoderConfig(
                vocab_size=sizes.vocab_size,
                hidden_size=sizes.dim,
                num_blocks=sizes.n_layers,
                num_heads=sizes.n_heads,
                intermediate_size=sizes.hidden_dim,
                max_length=sizes.max_position_embeddings,
                activation=sizes.activation,
                norm_eps=1e-12,  # DistilBERT's configuration does not name it; its code has this constant
            )
        )
        copy_embeddings(backbone, weights, token_type=False)
        copy_blocks(backbone, weights, "transformer.layer.{}.", BLOCK_NAMES)
        if not classifies:
            return Pretrained(backbone=backbone, head=None, label_names=None)
        head = final_head("pooler-relu", hf_model.pre_classifier, hf_model.classifier)
        return Pretrained(backbone=backbone, head=head, label_names=label_names(hf_model.config))
