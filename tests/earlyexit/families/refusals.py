"""Checkpoints, state dicts and sizes of networks that are refused, each read into a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from earlyexit.families import find_family
from earlyexit.families.decoder import DecoderConfig, Llama
from earlyexit.families.resnet import cifar_layout
from earlyexit.families.seq2seq import Seq2SeqConfig
from earlyexit.network.checkpoint import RampOptions, add_ramps, copy_tokenizer, load_pretrained, random_model
from earlyexit.sequences.sequence import run_of
from earlyexit.tasks.label import LabelTask
from tests.earlyexit.families.checkpoints import hf_config, hf_model
from tests.earlyexit.families.decoders import backbone_of, hf_decoder
from tests.earlyexit.families.encoder_decoders import hf_seq2seq, seq2seq
from tests.earlyexit.families.published import PublishedResNet, PublishedVgg
from tests.earlyexit.network.models import SMALL
from tests.earlyexit.network.tokens import layout_of

Read = Callable[[Path], object]
STRETCHED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


def weights(content: object) -> Read:
    def read(folder: Path) -> object:
        torch.save(content, folder / "x.pth")
        return load_pretrained(str(folder / "x.pth"))

    return read


def changed(make: Callable[[], torch.nn.Module], name: str, tensor: Tensor | None) -> Read:
    """A published network with another tensor of this name, or without it."""

    def read(folder: Path) -> object:
        state = make().state_dict() | {name: tensor}
        return weights({each: found for each, found in state.items() if found is not None})(folder)

    return read


def resnet(name: str, tensor: Tensor | None) -> Read:
    return changed(lambda: PublishedResNet(18, width=8, classes=5), name, tensor)


def vgg(name: str, tensor: Tensor | None) -> Read:
    return changed(lambda: PublishedVgg(11, norms=False, shrunk=16, hidden=24, classes=5), name, tensor)


def llama(**changes: Any) -> Read:
    return lambda _: Llama().from_transformers(hf_decoder(**changes))


def marian(**changes: Any) -> Read:
    return lambda _: find_family("marian").from_transformers(hf_seq2seq("marian", **changes))


def ramps_at(*at: int) -> Read:
    return lambda _: random_model(SMALL, ramps=RampOptions(at=at))


def longer_than_its_positions(_: Path) -> object:
    pretrained = find_family("bert").from_transformers(hf_model("bert", classifies=False))
    codec = {"name": "text", "max_length": 33}
    return add_ramps(pretrained, name="m", family="bert", codec=codec, task=LabelTask(("a", "b")), ramps=RampOptions())


def source(tokens: int, start: int, prompt: int) -> Read:
    """A step of an encoder-decoder of some tokens of a prompt."""

    def read(_: Path) -> object:
        run_15 = torch.tensor([run_of(1, start, 9, prompt)], dtype=torch.int32)
        given = torch.ones(tokens, dtype=torch.int32), run_15
        return backbone_of(seq2seq(hf_seq2seq("t5"))).embed(given, layout_of(tokens))

    return read


def no_store(_: Path) -> object:
    backbone, run_15 = Llama().from_transformers(hf_decoder()).backbone, torch.zeros(1, 5, dtype=torch.int32)
    return backbone.run_blocks(0, 1, (torch.zeros(1, 48), run_15, run_15[:, 0]), layout_of(1))


def broken(name: str, content: str) -> Read:
    """A checkpoint with another content of a file."""

    def read(folder: Path) -> object:
        hf_config("bert").save_pretrained(folder)
        (folder / name).write_text(content)
        return load_pretrained(str(folder))

    return read


def lacking(name: str, make: Callable[[], Any], prefix: str = "") -> Read:
    """A checkpoint without one of its weights, or with a prefix before all their names."""

    def read(folder: Path) -> object:
        model = make()
        model.save_pretrained(folder, state_dict={prefix + k: v for k, v in model.state_dict().items() if k != name})
        return load_pretrained(str(folder))

    return read


def padded_by(token: int | None) -> Callable[[Path], object]:
    return lambda _: find_family("roberta").from_transformers(hf_model("roberta", pad_token_id=token))


def misfit(noise: float = 0.1, **config: Any) -> Read:
    """A checkpoint whose weights are of another configuration, or no numbers."""

    def read(folder: Path) -> object:
        hf_model("bert", classifies=False, noise=noise).save_pretrained(folder)
        hf_config("bert", **config).save_pretrained(folder)
        return load_pretrained(str(folder))

    return read


def no_tokenizer(folder: Path) -> None:
    hf_model("bert", classifies=False).save_pretrained(folder)
    copy_tokenizer(str(folder), folder / "model")


REFUSED: dict[str, Read] = {
    "checkpoint: broken weights": broken("model.safetensors", "no tensors"),
    "checkpoint: code of its own": broken("config.json", '{"model_type": "x", "auto_map": {"AutoConfig": "x.X"}}'),
    "checkpoint: no tokenizer": no_tokenizer,
    "checkpoint: no head": misfit(architectures=["BertForSequenceClassification"]),
    "checkpoint: no weights of a block": misfit(num_hidden_layers=4),
    "checkpoint: no weights of a decoder's block": lacking("model.layers.3.mlp.up_proj.weight", hf_decoder),
    "checkpoint: wrapped weights": lacking("", lambda: hf_model("bert"), "module."),
    "checkpoint: other sizes": misfit(intermediate_size=50),
    "checkpoint: an unknown activation": misfit(hidden_act="swoosh"),
    "checkpoint: no numbers": misfit(noise=float("nan")),
    "checkpoint: a decoder": misfit(is_decoder=True),
    "checkpoint: relative positions": misfit(position_embedding_type="relative_key"),
    "checkpoint: no padding": padded_by(None),
    "checkpoint: padding that begins texts": padded_by(0),
    "weights: no bias": resnet("fc.bias", None),
    "weights: a region's first": resnet("layer2.0.conv1.weight", None),
    "weights: a number": resnet("conv1.weight", torch.tensor(1.0)),
    "weights: one side": resnet("layer1.0.conv1.weight", torch.ones(8)),
    "weights: two numbers": resnet("fc.bias", torch.ones(2)),
    "weights: a norm's bias too short": resnet("layer2.1.bn2.bias", torch.ones(7)),
    "weights: no bias of a norm": resnet("layer2.1.bn2.bias", None),
    "weights: grouped convolutions": resnet("layer1.0.conv2.weight", torch.ones(8, 1, 3, 3)),
    "weights: no last bias": vgg("classifier.6.bias", None),
    "weights: no first": vgg("features.0.weight", None),
    "weights: a layer's number": vgg("classifier.0.weight", torch.tensor(1.0)),
    "weights: tensors without names": weights({1: torch.ones(1)}),
    "weights: a list": weights([1]),
    "weights: numbers": weights({"state_dict": {"w": 3}}),
    "weights: MobileNet's": weights({"features.0.0.weight": torch.zeros(3), "classifier.1.weight": torch.zeros(3)}),
    "resnet: depth": lambda _: cifar_layout(18),
    "family: unknown": lambda _: find_family("gpt2"),
    "family: a ramp before the first block": ramps_at(-1),
    "family: a ramp after the last block": ramps_at(1, 3),
    "family: beyond its positions": longer_than_its_positions,
    "llama: stretched positions": llama(rope_parameters=STRETCHED),
    "llama: biases": llama(attention_bias=True),
    "llama: no head": lambda _: Llama().from_transformers(hf_decoder().model),
    "llama: gelu": llama(hidden_act="gelu"),
    "marian: feed-forwards of two sizes": marian(encoder_ffn_dim=32),
    "marian: heads of two sizes": marian(encoder_attention_heads=3),
    "seq2seq: fewer keys": lambda _: Seq2SeqConfig(num_kv_heads=2),
    "seq2seq: more keys": lambda _: Seq2SeqConfig(num_heads=6),
    "seq2seq: activation": lambda _: Seq2SeqConfig(activation="tanh"),
    "seq2seq: the beginning of a source": source(3, 0, 5),
    "seq2seq: the end of a source": source(3, 2, 5),
    "seq2seq: no source": source(1, 0, 1),
    "mpnet: buckets": lambda _: find_family("mpnet").build({"num_buckets": 30}),
    "decoder: no store": no_store,
    "decoder: heads that cannot share": lambda _: DecoderConfig(num_heads=4, num_kv_heads=3),
    "decoder: half of a number": lambda _: DecoderConfig(head_size=7),
}
