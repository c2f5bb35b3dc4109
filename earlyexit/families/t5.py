"""T5 (Raffel et al. 2020), its version 1.1, and what has their structure: CALM's, Flan's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Family, JsonDict, Pretrained
from earlyexit.families.seq2seq import Seq2SeqBackbone, Seq2SeqConfig, copied, pretrained

DISTANCES = "block.0.layer.0.SelfAttention.relative_attention_bias"


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
        # States are made smaller in front of the head; here its weights are, and, where these are the embedding's,
        # words are made larger by as much.
        scale = config.d_model**-0.5 if config.scale_decoder_outputs else 1.0
        tied = words_VD.equal(head_VD)
        backbone = Seq2SeqBackbone(sizes_of(config, tied=tied, embedding_scale=1 / scale if tied else 1.0))
        state = copied(weights, dict(_names(backbone.config)))
        for k in range(backbone.num_blocks):  # its scores are not divided by the root of a head's size
            state[f"blocks.{k}.crossing.query.weight"] *= config.d_kv**0.5
        width = config.num_heads * config.d_kv
        for name, values in state.items():
            if name.endswith("qkv.weight"):
                values[:width] *= config.d_kv**0.5
        if tied:
            state["word.weight"] = words_VD * scale
        return pretrained(backbone, state, head_VD * scale)


def sizes_of(hf_config: Any, *, tied: bool, embedding_scale: float) -> Seq2SeqConfig:
    """Of a `transformers` configuration."""
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


def _names(config: Seq2SeqConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Our weights, and those of `transformers` that each consists of."""
    yield "word.weight", ("shared.weight",)
    for ours, theirs in (("encoder_", "encoder"), ("", "decoder")):
        yield f"{ours}norm.weight", (f"{theirs}.final_layer_norm.weight",)
        yield f"{ours}distances.weight", (f"{theirs}.{DISTANCES}.weight",)
    for k in range(config.num_encoder_blocks):
        yield from _names_of_block(config, f"encoder.{k}", f"encoder.block.{k}", crosses=False)
    for k in range(config.num_blocks):
        yield from _names_of_block(config, f"blocks.{k}", f"decoder.block.{k}", crosses=True)


def _names_of_block(
    config: Seq2SeqConfig, ours: str, theirs: str, *, crosses: bool
) -> Iterator[tuple[str, tuple[str, ...]]]:
    def of(layer: int, *names: str) -> tuple[str, ...]:
        return tuple(f"{theirs}.layer.{layer}.{name}.weight" for name in names)

    def attention(*names: str) -> tuple[str, ...]:
        return tuple(f"SelfAttention.{name}" for name in names)

    def crossing(*names: str) -> tuple[str, ...]:
        return tuple(f"EncDecAttention.{name}" for name in names)

    yield f"{ours}.attention.norm.weight", of(0, "layer_norm")
    yield f"{ours}.attention.qkv.weight", of(0, *attention("q", "k", "v"))
    yield f"{ours}.attention.out.weight", of(0, *attention("o"))
    if crosses:
        yield f"{ours}.crossing.norm.weight", of(1, "layer_norm")
        yield f"{ours}.crossing.query.weight", of(1, *crossing("q"))
        yield f"{ours}.crossing.keys_values.weight", of(1, *crossing("k", "v"))
        yield f"{ours}.crossing.out.weight", of(1, *crossing("o"))
    last = 2 if crosses else 1
    up = ("DenseReluDense.wi_0", "DenseReluDense.wi_1") if config.gated else ("DenseReluDense.wi",)
    yield f"{ours}.feed_forward.norm.weight", of(last, "layer_norm")
    yield f"{ours}.feed_forward.up.weight", of(last, *up)
    yield f"{ours}.feed_forward.down.weight", of(last, "DenseReluDense.wo")
