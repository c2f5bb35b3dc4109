"""BERT and its relatives: MiniLM (a BERT by structure), RoBERTa, DistilBERT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from earlyexit.families.base import Family, JsonDict, Pretrained, names_in_blocks, put_together
from earlyexit.families.encoder import EncoderBackbone, EncoderConfig, copy_embeddings, final_head, label_names
from earlyexit.ramps import RampStyle

PARTS = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention_out": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "up": ("intermediate.dense",),
    "down": ("output.dense",),
    "feed_forward_norm": ("output.LayerNorm",),
}
"""Our names of a block's layers, and the layers of `transformers` that each consists of; below too."""
DISTIL_PARTS = {
    "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention_out": ("attention.out_lin",),
    "attention_norm": ("sa_layer_norm",),
    "up": ("ffn.lin1",),
    "down": ("ffn.lin2",),
    "feed_forward_norm": ("output_layer_norm",),
}


class Bert(Family):
    """BERT and whatever has its structure; relatives say where they differ."""

    name = "bert"
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = PARTS
    block_prefix: ClassVar[str] = "encoder.layer.{}"
    has_token_types: ClassVar[bool] = True
    """Whether its checkpoints embed them; inputs without token types then get the first type's in their positions."""
    head_style: ClassVar[RampStyle] = "pooler"

    def build(self, config: JsonDict, folder: Path | None = None) -> EncoderBackbone:
        return EncoderBackbone(EncoderConfig(**config))

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        classifies = hasattr(hf_model, "classifier")
        encoder = getattr(hf_model, self.name) if classifies else hf_model
        weights: dict[str, Tensor] = encoder.state_dict()
        backbone = self.build(asdict(self.encoder_config(hf_model.config, pairs=pairs)))
        self.copy_weights(backbone, weights)
        if not classifies:
            return Pretrained(backbone=backbone, head=None, label_names=None)
        head = final_head(self.head_style, *self.head_layers(hf_model))
        return Pretrained(backbone=backbone, head=head, label_names=label_names(hf_model.config))

    def copy_weights(self, backbone: EncoderBackbone, weights: Mapping[str, Tensor]) -> None:
        """Fill the backbone with the weights of the bare `transformers` encoder, by their names there."""
        copy_embeddings(backbone, weights, token_type=self.has_token_types)
        kinds = ("weight", "bias")
        names = names_in_blocks("{}", self.block_prefix, backbone.num_blocks, self.parts, kinds)
        backbone.blocks.load_state_dict(put_together(weights, names))

    def encoder_config(self, hf_config: Any, *, pairs: bool) -> EncoderConfig:
        """Returns the sizes in a `transformers` configuration; `pairs` as in `from_transformers`."""
        return sizes_of(
            hf_config, token_types=hf_config.type_vocab_size if pairs and hf_config.type_vocab_size > 1 else 0
        )

    def head_layers(self, hf_model: Any) -> tuple[nn.Linear, nn.Linear]:
        """Returns the dense layer and the classifier of a fine-tuned checkpoint."""
        return hf_model.bert.pooler.dense, hf_model.classifier


class Roberta(Bert):
    """RoBERTa: its positions start behind the padding index, and it tells the texts of a pair apart by separators."""

    name = "roberta"

    def encoder_config(self, hf_config: Any, *, pairs: bool) -> EncoderConfig:
        return sizes_of(hf_config, position_offset=hf_config.pad_token_id + 1)

    def head_layers(self, hf_model: Any) -> tuple[nn.Linear, nn.Linear]:
        return hf_model.classifier.dense, hf_model.classifier.out_proj


class DistilBert(Bert):
    """DistilBERT: half of BERT's blocks, no token types, a ReLU in its head."""

    name = "distilbert"
    parts = DISTIL_PARTS
    block_prefix = "transformer.layer.{}"
    has_token_types = False
    head_style = "pooler-relu"

    def build(self, config: JsonDict, folder: Path | None = None) -> EncoderBackbone:
        return super().build({"num_blocks": 6, **config})

    def encoder_config(self, hf_config: Any, *, pairs: bool) -> EncoderConfig:
        return EncoderConfig(
            vocab_size=hf_config.vocab_size,
            hidden_size=hf_config.dim,
            num_blocks=hf_config.n_layers,
            num_heads=hf_config.n_heads,
            intermediate_size=hf_config.hidden_dim,
            max_length=hf_config.max_position_embeddings,
            activation=hf_config.activation,
            norm_eps=1e-12,  # the configuration does not name it; DistilBERT's code has this constant
        )

    def head_layers(self, hf_model: Any) -> tuple[nn.Linear, nn.Linear]:
        return hf_model.pre_classifier, hf_model.classifier


def sizes_of(hf_config: Any, *, position_offset: int = 0, token_types: int = 0) -> EncoderConfig:
    """Returns the sizes in a `transformers` configuration that uses BERT's names."""
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
        token_types=token_types,
    )
