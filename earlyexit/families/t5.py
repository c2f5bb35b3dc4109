"""T5 (Raffel et al. 2020), its version 1.1, and what has their structure: CALM's, Flan's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Family, JsonDict, Pretrained, names_in_blocks, put_together
from earlyexit.families.decoder import pretrained
from earlyexit.families.seq2seq import Seq2SeqBackbone, Seq2SeqConfig

ATTENTION = {
    "attention.norm": ("layer.0.layer_norm",),
    "attention.qkv": tuple(f"layer.0.SelfAttention.{part}" for part in "qkv"),
    "attention.out": ("layer.0.SelfAttention.o",),
}
CROSSING = {
    "crossing.norm": ("layer.1.layer_norm",),
    "crossing.query": ("layer.1.EncDecAttention.q",),
    "crossing.keys_values": ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"),
    "crossing.out": ("layer.1.EncDecAttention.o",),
}


class T5(Family):
    """Encoder-decoders of `transformers`' type `t5`."""

    name = "t5"

    def build(self, config: JsonDict, folder: Path | None = None) -> Seq2SeqBackbone:
        return Seq2SeqBackbone(Seq2SeqConfig(**config))

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        """Raises ModelFolderError for a model without a head for its vocabulary, and for activations unknown here."""
        if not hasattr(hf_model, "lm_head"):
            raise ModelFolderError("a T5 without a head for its vocabulary generates nothing")
        config, weights = hf_model.config, hf_model.state_dict()
        words_VD, head_VD = weights["shared.weight"], weights["lm_head.weight"]
        # T5 scales states down in front of the head; here the head's weights are scaled down. Where they are the
        # embedding's, embedded words are scaled up by as much.
        scale = config.d_model**-0.5 if config.scale_decoder_outputs else 1.0
        tied = words_VD.equal(head_VD)
        backbone = Seq2SeqBackbone(sizes_of(config, tied=tied, embedding_scale=1 / scale if tied else 1.0))
        state = put_together(weights, _names(backbone.config))
        for k in range(backbone.num_blocks):  # T5 does not divide scores by the root of a head's size
            state[f"blocks.{k}.crossing.query.weight"] *= config.d_kv**0.5
        width = config.num_heads * config.d_kv
        for name, values in state.items():
            if name.endswith("qkv.weight"):
                values[:width] *= config.d_kv**0.5
        if tied:
            state["word.weight"] = words_VD * scale
        return pretrained(backbone, state, head_VD * scale)


def sizes_of(hf_config: Any, *, tied: bool, embedding_scale: float) -> Seq2SeqConfig:
    """Returns the sizes in a `transformers` configuration."""
    return Seq2SeqConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.d_model,
        num_blocks=hf_config.num_decoder_layers,
        num_encoder_blocks=hf_config.num_layers,
        num_heads=hf_config.num_heads,
        num_kv_heads=hf_config.num_heads,
        head_size=hf_config.d_kv,
        intermediate_size=hf_config.d_ff,
        max_length=getattr(hf_config, "n_positions", None) or Seq2SeqConfig().max_length,
        norm_eps=hf_config.layer_norm_epsilon,
        activation=hf_config.dense_act_fn,
        gated=hf_config.is_gated_act,
        embedding_scale=embedding_scale,
        distance_buckets=hf_config.relative_attention_num_buckets,
        max_distance=hf_config.relative_attention_max_distance,
        tied=tied,
    )


def _names(config: Seq2SeqConfig) -> dict[str, tuple[str, ...]]:
    """Returns our weights' names, and the weights of `transformers` that each consists of."""
    names: dict[str, tuple[str, ...]] = {"word.weight": ("shared.weight",)}
    for ours, theirs in (("encoder_", "encoder"), ("", "decoder")):
        names[f"{ours}norm.weight"] = (f"{theirs}.final_layer_norm.weight",)
        distances = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        names[f"{ours}distances.weight"] = (distances,)
    encoder, decoder = ATTENTION | _feed_forward(config, 1), ATTENTION | CROSSING | _feed_forward(config, 2)
    names |= names_in_blocks("encoder.{}", "encoder.block.{}", config.num_encoder_blocks, encoder)
    return names | names_in_blocks("blocks.{}", "decoder.block.{}", config.num_blocks, decoder)


def _feed_forward(config: Seq2SeqConfig, layer: int) -> dict[str, tuple[str, ...]]:
    at = f"layer.{layer}.DenseReluDense"
    return {
        "feed_forward.norm": (f"layer.{layer}.layer_norm",),
        "feed_forward.up": (f"{at}.wi_0", f"{at}.wi_1") if config.gated else (f"{at}.wi",),
        "feed_forward.down": (f"{at}.wo",),
    }
