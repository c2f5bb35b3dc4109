"""Graphs as torch's exporters write them, with all their `Shape` operators: a ResNet, and BERT of `transformers`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx

from earlyexit.families.resnet import BlockSizes, ResidualBlock
from earlyexit.foreign.onnx_backbone import OnnxBackbone
from earlyexit.network.boundary import Encoded
from earlyexit.network.model import EarlyExitModel
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.families.checkpoints import hf_model
from tests.earlyexit.foreign.onnx_graphs import Array, random_words, read_graph, uncut, with_ramps, words_feeds
from tests.earlyexit.foreign.test_onnx_graph import halves
from tests.earlyexit.network.cuts import answers_alone, answers_in_cuts, assert_same, every_bounds

TEXT = {"name": "text", "max_length": 24}
ROWS = {"name": "tensor", "columns": [{"name": "x", "datatype": "FP32", "shape": [3, 12, 12]}]}
Feeds = Callable[[Encoded], dict[str, Array]]


class Residual(nn.Module):
    """Two widths of residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(16, 16, 1), (16, 32, 2), (32, 32, 1)]
        blocks = [ResidualBlock(BlockSizes(before=a, inner=b, after=b, stride=stride)) for a, b, stride in sizes]
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *blocks)
        self.classifier = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.body(x).mean((2, 3)))
        return logits


class Logits(nn.Module):
    """Of a classifier of `transformers`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def exported(module: nn.Module, inputs: dict[str, Tensor], path: Path, *, by_dynamo: bool) -> Path:
    """Open to any batch, and for whole numbers to any length."""
    open_axes = {name: (0, 1) if values.dtype == torch.int64 else (0,) for name, values in inputs.items()}
    settings: dict[str, Any] = {
        "dynamic_axes": {name: {axis: f"{name}_{axis}" for axis in axes} for name, axes in open_axes.items()}
    }
    if by_dynamo:
        dynamic = torch.export.Dim.DYNAMIC
        settings = {"dynamic_shapes": {name: dict.fromkeys(axes, dynamic) for name, axes in open_axes.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            path,
            dynamo=by_dynamo,
            input_names=list(inputs),
            output_names=["logits"],
            **settings,
        )
    return path


def joins(path: Path, operator: str) -> list[str]:
    """What operators of a kind give, in order."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    return [node.output[0] for node in nodes if node.op_type == operator]


@dataclass(frozen=True, kw_only=True)
class Exported:
    path: Path
    model: EarlyExitModel
    encoded: list[Encoded]
    feeds: Feeds


def resnet(folder: Path, *, by_dynamo: bool) -> Exported:
    torch.manual_seed(0)
    path = exported(Residual(), {"x": torch.randn(2, 3, 12, 12)}, folder / "theirs.onnx", by_dynamo=by_dynamo)
    stem, _, first, _, second, _, _ = joins(path, "Relu")
    cuts = [[stem], [first], [second]]
    model = with_ramps(read_graph(path).take(cuts, ROWS, folder / "model"))
    rng = np.random.default_rng(0)
    encoded = [Encoded(1, (rng.standard_normal((1, 3, 12, 12)).astype(np.float32),)) for _ in range(8)]
    return Exported(path=path, model=model, encoded=encoded, feeds=lambda each: {"x": each.tensors[0]})


def bert(folder: Path, *, by_dynamo: bool) -> Exported:
    module = Logits(hf_model("bert", num_labels=3))
    ids = torch.randint(1, 50, (2, 5))
    path = exported(
        module, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, folder / "theirs.onnx", by_dynamo=by_dynamo
    )
    embedded, *norms = joins(path, "LayerNormalization")
    cuts = [[embedded], *([norm] for norm in norms[1:-1:2])]
    model = with_ramps(read_graph(path).take(cuts, TEXT, folder / "model"))
    return Exported(path=path, model=model, encoded=random_words((5, 1, 24, 3, 5, 9, 2, 12)), feeds=words_feeds)


CASES = [
    pytest.param(resnet, False, id="resnet"),
    pytest.param(bert, False, id="bert"),
    pytest.param(resnet, True, id="resnet-dynamo", marks=pytest.mark.slow),
    pytest.param(bert, True, id="bert-dynamo", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("make", "by_dynamo"), CASES)
def test_every_cut_answers_as_the_exported_file_does(
    make: Callable[..., Exported], by_dynamo: bool, tmp_path: Path
) -> None:
    case = make(tmp_path, by_dynamo=by_dynamo)
    last = case.model.num_blocks - 1
    assert last >= 2
    answer = uncut(case.path)
    expected = np.concatenate([answer(case.feeds(each)) for each in case.encoded])
    np.testing.assert_allclose(exit_outputs(case.model, case.encoded)[last].numpy(), expected, atol=1e-4)
    policy = halves(case.model, case.encoded)
    for count in (1, 2, 7):
        alone = answers_alone(case.model, policy, case.encoded[:count])
        for seed, bounds in enumerate(each for each in every_bounds(last + 1) if len(each) <= 4):
            answers = answers_in_cuts(case.model, policy, case.encoded[:count], bounds, seed=seed)
            assert_same(answers, alone, within=1e-4)
    backbone = case.model.backbone
    assert isinstance(backbone, OnnxBackbone)
    assert bool(backbone.config.sizes) == (make is bert)
