"""Small encoder-decoders with random weights whose answers differ from token to token."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)

from earlyexit.families import find_family
from earlyexit.network.model import EarlyExitModel
from tests.earlyexit.families.decoders import NUM_BLOCKS, VOCABULARY, model_of

KINDS = ("t5", "t5 gated", "marian")
PAD = {"t5": 0, "t5 gated": 0, "marian": VOCABULARY - 1}
"""The token that answers start with."""
SURER = {"t5": 0.5, "t5 gated": 0.2, "marian": 6.0}
"""Factors on ramps' weights with which some tokens leave at each: hidden states of T5 are large."""
SIZES = {"vocab_size": VOCABULARY, "d_model": 48, "d_ff": 64}


def hf_seq2seq(kind: str, **changes: Any) -> Any:
    """Two blocks of an encoder and five of a decoder; distances share buckets from few tokens on."""
    torch.manual_seed(3)
    model = _marian(changes) if kind == "marian" else _t5(kind, changes)
    return model.eval().requires_grad_(False)


def seq2seq(hf_model: Any, *, num_pages: int = 64) -> EarlyExitModel:
    """Ours of the same weights, with ramps after blocks 1 and 2 whose answers are anything."""
    torch.manual_seed(1)
    family, gated = hf_model.config.model_type, getattr(hf_model.config, "is_gated_act", False)
    pretrained = find_family(family).from_transformers(hf_model)
    model = model_of(pretrained, ramps=(1, 2), num_pages=num_pages, family=family)
    for ramp in (1, 2):
        classifier = model.exit_head(ramp).classifier
        assert isinstance(classifier, torch.nn.Linear)
        classifier.weight.mul_(SURER[f"{family} gated" if gated else family])
    return model


def answers_of(hf_model: Any, sources: tuple[list[int], ...], tokens: int) -> list[list[int]]:
    """Greedy, by `transformers`, one at a time, and nothing ends them."""
    return [
        hf_model.generate(
            torch.tensor([source]),
            attention_mask=torch.ones(1, len(source), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
            # The one it makes itself has as many layers as the encoder.
            past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()),
            eos_token_id=None,
        )[0].tolist()
        for source in sources
    ]


def _t5(kind: str, changes: dict[str, Any]) -> Any:
    kinds: dict[str, Any] = {"t5": {}, "t5 gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}}
    options = {
        "d_kv": 8,
        "num_heads": 6,
        "num_layers": 2,
        "num_decoder_layers": NUM_BLOCKS,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
        "decoder_start_token_id": PAD[kind],
    }
    model = T5ForConditionalGeneration(T5Config(**SIZES | options | kinds[kind] | changes))
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim == 1:
                weights.uniform_(0.5, 1.5)
            else:
                weights.mul_(0.3 if name == "shared.weight" else 3.0)
    return model


def _marian(changes: dict[str, Any]) -> Any:
    config = {
        "encoder_layers": 2,
        "decoder_layers": NUM_BLOCKS,
        "encoder_attention_heads": 6,
        "decoder_attention_heads": 6,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 128,
        "scale_embedding": True,
        "activation_function": "swish",
        "pad_token_id": PAD["marian"],
        "decoder_start_token_id": PAD["marian"],
        "eos_token_id": 0,
        "forced_eos_token_id": None,
    }
    sizes = {name: size for name, size in SIZES.items() if name != "d_ff"}
    model = MarianMTModel(MarianConfig(**sizes | config | changes))
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "layer_norm" in name and name.endswith("weight"):
                weights.uniform_(0.5, 1.5)
            elif weights.ndim == 1:
                weights.normal_(std=0.05)
            elif "embed_positions" not in name:
                weights.normal_(std=0.03 if "embed_tokens" in name else 0.3)
        model.final_logits_bias.normal_(std=0.03)
    model.generation_config.bad_words_ids = [[PAD["marian"]]]
    return model
