"""The compute that all peers share: the full model without ramps, on one batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from earlyexit.errors import ModelFolderError
from earlyexit.families.bert import BLOCK_NAMES
from earlyexit.families.encoder import BlockNames, EncoderBackbone, EncoderConfig
from earlyexit.families.mpnet import BUCKETS, MPNet, MPNetBackbone
from earlyexit.model import EarlyExitModel
from earlyexit.onnx_backend import onnx_segments
from earlyexit.piece import Piece
from earlyexit.ramps.pooling import Pooling
from earlyexit.reordered import reorder_linears
from earlyexit.signature import Encoded
from earlyexit.split import Budget, Segment
from earlyexit.store import load_model
from earlyexit.tasks.label import LabelTask
from earlyexit.tokenizer import TextTokenizer
from earlyexit.train import pack
from earlyexit.wire import entering
from experiments.peers.bodies import Prediction
from experiments.peers.options import ServerOptions

Logits = Callable[[Sequence[Encoded]], Tensor]
"""Logits (B, C), float32, of a batch."""


class StockModel:
    """A model and its tokenizer. Texts beyond the model's length are cut."""

    def __init__(self, tokenizer: TextTokenizer, logits: Logits, label_names: Sequence[str], last: int) -> None:
        self._tokenizer = tokenizer
        self._logits = logits
        self._label_names = label_names
        self._last = last

    @classmethod
    def load(cls, options: ServerOptions) -> StockModel:
        """Read the model folder; sets this process' threads. Raises ModelFolderError for what is not to be served."""
        torch.set_num_threads(options.threads)
        model = load_model(options.model, dtype=getattr(torch, options.dtype))
        if options.kernel == "packed":
            reorder_linears(model)
            logits = packed_logits(model)
        elif options.kernel == "onnx":
            logits = onnx_logits(model, options.model, options.threads)
        else:
            logits = transformers_logits(model)
        tokenizer = TextTokenizer.load(options.model, model.max_length)
        return cls(tokenizer, logits, label_task(model).label_names, model.num_blocks - 1)

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """One prediction per text, all computed as one batch."""
        return self.predict_encoded(self.encode(texts))

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """What the model takes of every text, for `predict_encoded`."""
        return self._tokenizer.encode(texts, truncate=True)

    @torch.inference_mode()
    def predict_encoded(self, encoded: Sequence[Encoded]) -> list[Prediction]:
        """`predict` of texts that were encoded before."""
        score_B, label_B = self._logits(encoded).softmax(-1).max(-1)
        return [
            Prediction(label=self._label_names[label], score=score, exit=self._last)
            for label, score in zip(label_B.tolist(), score_B.tolist(), strict=True)
        ]


def label_task(model: EarlyExitModel) -> LabelTask:
    """The model's task; raises ModelFolderError for one that answers no labels."""
    if not isinstance(model.task, LabelTask):
        raise ModelFolderError(f"{model.info.name} answers no labels")
    return model.task


def packed_logits(model: EarlyExitModel) -> Logits:
    """Offramp's own modules, without an engine: nothing is spent on padding, nor on laying out weights."""
    last = model.num_blocks

    def logits(encoded: Sequence[Encoded]) -> Tensor:
        values, layout = pack(encoded, model.device)
        return model.exit_outputs(last - 1, model.run_blocks(0, last, values, layout), layout)

    return logits


def onnx_logits(model: EarlyExitModel, folder: Path, num_threads: int) -> Logits:
    """The same modules as one graph, with which ONNX Runtime spends nothing on padding either but in attention."""
    segments = onnx_segments(model, folder, num_threads)
    whole = Segment(first=0, end=model.num_blocks, ramp=None)
    segments.prepare({whole: Budget(inputs=1)})

    def logits(encoded: Sequence[Encoded]) -> Tensor:
        wire = entering([""] * len(encoded), encoded)
        piece = Piece(
            sample_ids=wire.sample_ids,
            next_block=0,
            lengths_B=wire.lengths_B,
            tensors=tuple(map(torch.from_numpy, wire.tensors)),
            state_BS=torch.empty(len(encoded), 0),
        )
        _, logits_BC = segments.run(whole, piece)
        assert logits_BC is not None, "the last block has an exit"
        return logits_BC

    return logits


def transformers_logits(model: EarlyExitModel) -> Logits:
    """The same weights in `transformers`' padded modules; raises ModelFolderError for families not known here."""
    encoder = to_transformers(model)
    head, temperature = model.head, model.temperatures_E[model.num_blocks - 1]
    offset = model.backbone.to_config()["position_offset"]

    def logits(encoded: Sequence[Encoded]) -> Tensor:
        ids_BT, mask_BT = pad(encoded)
        place_1T = torch.arange(offset, offset + ids_BT.shape[1])[None]
        hidden_BTD = encoder(input_ids=ids_BT, attention_mask=mask_BT, position_ids=place_1T).last_hidden_state
        return head.classify(pool_padded(hidden_BTD, mask_BT, head.pooling)).float() / temperature

    return logits


def to_transformers(model: EarlyExitModel) -> Any:
    """The backbone as a `transformers` model, its weights shared; the inverse of `Family.from_transformers`."""
    import transformers

    backbone = model.backbone
    if not isinstance(backbone, EncoderBackbone) or model.info.family not in ("bert", "mpnet"):
        raise ModelFolderError(
            f"the transformers kernel serves bert and mpnet, {model.info.name!r} is {model.info.family}; use packed"
        )
    with torch.device("meta"):  # no time spent on random weights
        if isinstance(backbone, MPNetBackbone):
            config = _mpnet_config(transformers.MPNetConfig, backbone)
            encoder = transformers.MPNetModel(config, add_pooling_layer=False)
        else:
            config = _bert_config(transformers.BertConfig, backbone.config)
            encoder = transformers.BertModel(config, add_pooling_layer=False)
    encoder.load_state_dict(_weights(backbone), strict=False, assign=True)
    for name, buffer in list(encoder.embeddings.named_buffers()):  # they are no weights: they are made anew
        fresh = torch.arange(buffer.shape[1])[None] if name == "position_ids" else torch.zeros(buffer.shape).long()
        setattr(encoder.embeddings, name, fresh)
    left = sorted(name for name, parameter in encoder.named_parameters() if parameter.is_meta)
    assert not left, left
    return encoder.eval()


def pad(encoded: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, int64 (B, T)."""
    ids_BT = torch.zeros(len(encoded), max(each.length for each in encoded), dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    for row, each in enumerate(encoded):
        ids_BT[row, : each.length] = torch.from_numpy(each.tensors[0])
        mask_BT[row, : each.length] = 1
    return ids_BT, mask_BT


def pool_padded(hidden_BTD: Tensor, mask_BT: Tensor, pooling: Pooling) -> Tensor:
    """`earlyexit.ramps.pooling.pool` of a padded hidden state; (B, D)."""
    if pooling == "first":
        return hidden_BTD[:, 0]
    weight_BT1 = mask_BT[:, :, None].float()
    means_BD = (hidden_BTD.float() * weight_BT1).sum(1) / weight_BT1.sum(1)
    return means_BD.to(hidden_BTD.dtype)


def _bert_config(config_class: Any, ours: EncoderConfig) -> Any:
    return config_class(**_sizes(ours), type_vocab_size=1, attn_implementation="sdpa")


def _mpnet_config(config_class: Any, backbone: MPNetBackbone) -> Any:
    return config_class(**_sizes(backbone.config), relative_attention_num_buckets=backbone.config.num_buckets)


def _sizes(ours: EncoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.hidden_size,
        "num_hidden_layers": ours.num_blocks,
        "num_attention_heads": ours.num_heads,
        "intermediate_size": ours.intermediate_size,
        "max_position_embeddings": ours.max_length + ours.position_offset,
        "hidden_act": ours.activation,
        "layer_norm_eps": ours.norm_eps,
    }


def _weights(backbone: EncoderBackbone) -> dict[str, Tensor]:
    if isinstance(backbone, MPNetBackbone):
        buckets = {BUCKETS: backbone.distance_bias.weight}
        return _embeddings(backbone) | _blocks(backbone, MPNet.block_names) | buckets
    # The token type was folded into the positions when the model was made: here it adds nothing.
    types = {"embeddings.token_type_embeddings.weight": torch.zeros_like(backbone.embeddings.position.weight[:1])}
    return _embeddings(backbone) | _blocks(backbone, BLOCK_NAMES) | types


def _embeddings(backbone: EncoderBackbone) -> dict[str, Tensor]:
    ours = backbone.embeddings
    return {
        "embeddings.word_embeddings.weight": ours.word.weight,
        "embeddings.position_embeddings.weight": ours.position.weight,
        "embeddings.LayerNorm.weight": ours.norm.weight,
        "embeddings.LayerNorm.bias": ours.norm.bias,
    }


def _blocks(backbone: EncoderBackbone, names: BlockNames) -> dict[str, Tensor]:
    weights = {}
    for index, block in enumerate(backbone.blocks):
        ours = block.state_dict()
        at = f"encoder.layer.{index}."
        for kind in ("weight", "bias"):
            thirds = ours[f"qkv.{kind}"].chunk(3)
            for name, third in zip((names.query, names.key, names.value), thirds, strict=True):
                weights[f"{at}{name}.{kind}"] = third
            for part in ("attention_out", "attention_norm", "up", "down", "feed_forward_norm"):
                weights[f"{at}{getattr(names, part)}.{kind}"] = ours[f"{part}.{kind}"]
    return weights
