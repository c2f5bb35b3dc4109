"""Foreign models, which come as ONNX files or torch modules: reading them, and dividing them into blocks at tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from earlyexit.foreign.model import ForeignModel, ForeignOptions
from earlyexit.named import is_own


def read_foreign(name: str, options: ForeignOptions, *, open_size: int) -> ForeignModel:
    """Reads an ONNX file, or the torch module that `module:function` returns.

    `open_size`: the assumed size of an ONNX file's open axes, for timing. Raises InputError if it is not a model.
    """
    if is_own(name):
        from earlyexit.foreign.torch_module import read_torch

        return replace(read_torch(name), options=options)
    from earlyexit.foreign.onnx_model import read_onnx

    return replace(read_onnx(Path(name), open_size=open_size), options=options)
