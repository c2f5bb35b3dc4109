"""Foreign models, which come as ONNX files or torch modules: reading them, and dividing them into blocks at tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from earlyexit.foreign.model import Divisible, ForeignModel, ForeignOptions
from earlyexit.named import NamedSpec, is_own


def read_foreign(name: str, options: ForeignOptions, *, open_size: int) -> ForeignModel:
    """Reads an ONNX file, or the torch module that `module:function` returns.

    `open_size`: the assumed size of an ONNX file's open axes, for timing. Raises InputError if it is not a model.
    """
    if is_own(name):
        from earlyexit.foreign.torch_module import read_torch

        return replace(read_torch(name, tokens=not options.arrays), options=options)
    from earlyexit.foreign.onnx_model import read_onnx

    return replace(read_onnx(Path(name), open_size=open_size, arrays=options.arrays), options=options)


def open_foreign(model: ForeignModel, codec: NamedSpec, folder: Path) -> Divisible:
    """Returns a model that can be cut, with the answer as its only output. `folder`: a model folder, for its graph."""
    if is_own(model.name):
        from earlyexit.foreign.torch_module import TorchModel

        assert isinstance(model, TorchModel)
        return replace(model, codec=codec).with_outputs(model.output)
    from earlyexit.foreign.onnx_cut import open_onnx
    from earlyexit.foreign.onnx_model import OnnxModel

    assert isinstance(model, OnnxModel)
    return open_onnx(model, codec, folder)
