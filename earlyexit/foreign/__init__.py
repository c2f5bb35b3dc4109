"""Models from elsewhere, as ONNX files or torch modules: read, cut at tensors, and given ramps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from earlyexit.foreign.model import ForeignModel, ForeignOptions
from earlyexit.named import is_own


def read_foreign(name: str, asked: ForeignOptions, *, open_size: int) -> ForeignModel:
    """Read an ONNX file, or the torch module that `module:function` gives.

    Axes that an ONNX file leaves open are `open_size` long where it is timed. Raises InputError for what is no model.
    """
    if is_own(name):
        from earlyexit.foreign.torch_module import read_torch

        return replace(read_torch(name), asked=asked)
    from earlyexit.foreign.onnx_model import read_onnx

    return replace(read_onnx(Path(name), open_size=open_size), asked=asked)
