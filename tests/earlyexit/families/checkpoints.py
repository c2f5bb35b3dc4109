"""Checkpoints of random weights, as `transformers` makes them or named as published ones name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from earlyexit.network.boundary import Encoded

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
DISTILBERT_SIZES = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}
FAMILIES: dict[str, tuple[Any, dict[str, int]]] = {
    "bert": (transformers.BertConfig, {**SIZES, "max_position_embeddings": 32}),
    "roberta": (transformers.RobertaConfig, {**SIZES, "max_position_embeddings": 34, "pad_token_id": 1}),
    "xlm-roberta": (transformers.XLMRobertaConfig, {**SIZES, "max_position_embeddings": 34, "pad_token_id": 1}),
    "camembert": (transformers.CamembertConfig, {**SIZES, "max_position_embeddings": 34, "pad_token_id": 1}),
    "mpnet": (transformers.MPNetConfig, {**SIZES, "max_position_embeddings": 34}),
    "distilbert": (transformers.DistilBertConfig, {**DISTILBERT_SIZES, "max_position_embeddings": 32}),
}


def hf_config(family: str, **config: Any) -> Any:
    """Returns a config of three blocks and inputs of up to 32 tokens."""
    kind, sizes = FAMILIES[family]
    return kind(**{"vocab_size": 100, **sizes, **config})


def hf_model(family: str, *, classifies: bool = True, noise: float = 0.1, **config: Any) -> Any:
    """A model of `transformers`; biases and norms are random too, so that none can be forgotten."""
    kind = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModel
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = kind.from_config(hf_config(family, **config)).eval()
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape))
    return model


def hf_inputs(encoded: Sequence[Encoded]) -> dict[str, Tensor]:
    """Token ids padded with 1, RoBERTa's padding, their types where inputs have any, and the mask."""
    columns = zip(*(each.tensors for each in encoded), strict=True)
    padded = [_padded([torch.from_numpy(row).long() for row in each], 1 - k) for k, each in enumerate(columns)]
    mask_BT = _padded([torch.ones(each.length, dtype=torch.long) for each in encoded], 0)
    return dict(zip(("input_ids", "token_type_ids"), padded, strict=False)) | {"attention_mask": mask_BT}


def _padded(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def resnet_state(*, blocks_per_stage: int, seed: int = 0) -> dict[str, Tensor]:
    """A CIFAR ResNet's, of ten classes; norms as if it had been trained."""
    generator = torch.Generator().manual_seed(seed)
    state = _convolution("conv1", 3, 16, generator) | _norm("bn1", 16, generator)
    width = 16
    for stage in (1, 2, 3):
        for block in range(blocks_per_stage):
            out, name = 8 * 2**stage, f"layer{stage}.{block}"
            state |= _convolution(f"{name}.conv1", width, out, generator) | _norm(f"{name}.bn1", out, generator)
            state |= _convolution(f"{name}.conv2", out, out, generator) | _norm(f"{name}.bn2", out, generator)
            width = out
    linear = {"linear.weight": (10, width), "linear.bias": (10,)}
    return state | {name: torch.randn(shape, generator=generator) for name, shape in linear.items()}


def _convolution(name: str, width: int, out: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.randn(out, width, 3, 3, generator=generator) * (2 / (9 * width)) ** 0.5}


def _norm(name: str, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        f"{name}.weight": 0.5 + torch.rand(width, generator=generator),
        f"{name}.bias": 0.2 * torch.randn(width, generator=generator),
        f"{name}.running_mean": 0.2 * torch.randn(width, generator=generator),
        f"{name}.running_var": 0.5 + torch.rand(width, generator=generator),
    }
