"""Writes a segment of a model as an ONNX file: the graph of its blocks, and of the exit at its end if it has one.

    python -m earlyexit.backends.onnx_export JOB

does so in a process of its own, on a job that `export_elsewhere` wrote.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from earlyexit.errors import PlanError
from earlyexit.network.layout import Layout
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.network import arbitrary_tensors
from earlyexit.network.piece import Tensors
from earlyexit.network.split import Segment

# Part of every file's name: raise it when `_SegmentGraph` or the export changes, so that older files are not used.
EXPORT_VERSION = 5
# The first opset with Gelu as one node is 20. From 23 on attention is one node too, but ONNX Runtime 1.31 refuses it
# with a mask that is the same for all queries, as ours is.
OPSET = 20
# A file is one protobuf message, which cannot be longer; the graph beside the weights is far below the margin.
MAX_WEIGHT_BYTES = 2**31 - 2**24

EXIT_NAME = "outputs"
LONGEST = torch.export.Dim("T")
"""A single dimension for the exporter: slots are as long as the padded form."""


def export(model: EarlyExitModel, segment: Segment, path: Path) -> None:
    """Write a segment's file; no other thread may run torch meanwhile: the exporter changes shared state."""
    values, tensors = _example_inputs(model, segment)
    inputs, outputs = value_names(model, segment.first), value_names(model, segment.end)
    with quiet_exporter(), torch.inference_mode(False), torch.no_grad():
        program = torch.onnx.export(
            _SegmentGraph(model, segment).eval(),
            kwargs={"values": values, "tensors": tensors},
            dynamo=True,
            opset_version=OPSET,
            input_names=[*inputs, *tensors],
            output_names=[*map(after_name, outputs), *([EXIT_NAME] if model.has_exit(segment) else [])],
            dynamic_shapes={
                "values": tuple(_free_sizes(name) for name in inputs),
                "tensors": {name: _free_sizes(name) for name in tensors},
            },
            verbose=False,
        )
    assert program is not None
    _check_size(program.model.graph.initializers.values(), segment)
    # Another process may export the same segment: the last one replaces a whole file by an equal one.
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        program.save(Path(folder) / path.name, external_data=False)
        os.replace(Path(folder) / path.name, path)


def export_elsewhere(model: EarlyExitModel, files: Mapping[Segment, Path]) -> None:
    """Write several segments' files while other threads run the model. Raises PlanError for what cannot be exported.

    It runs in a process of its own: the exporter changes state that all threads share (the model's weights, torch's
    modes, warnings), and holds Python's lock for seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.pt"
        torch.save((model, dict(files)), job)
        done = subprocess.run(
            [sys.executable, "-m", "earlyexit.backends.onnx_export", str(job)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        *_, reason = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise PlanError(f"the model could not be exported for ONNX Runtime: {reason}")


class _GraphLayout(Layout):
    """A layout whose tensors are a graph's inputs; it is never uniform.

    Attention is in slots, which are the padded form if each holds one input: one graph serves both.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        vars(self).update(tensors, scheme="slotted", _shares_rows=True)  # instead of what Layout would compute
        self.num_inputs, self.longest = tensors["mask_BT"].shape

    def _masked(self, seen: Tensor, bias_HTT: Tensor | None) -> Tensor:
        # Numbers, once for all blocks: each block would convert booleans to numbers otherwise.
        return torch.where(seen, 0.0 if bias_HTT is None else bias_HTT, -torch.inf)

    @property
    def uniform(self) -> bool:
        return False

    def per_input(self, values: Tensor) -> bool:
        return False


class _NoTokens(Layout):
    """The layout of inputs without tokens in a graph: rows are inputs, of any number."""

    def __init__(self) -> None:
        self.longest = 1

    def per_input(self, values: Tensor) -> bool:
        return True


_NO_TOKENS = _NoTokens()


class _SegmentGraph(nn.Module):
    """The exported module: a segment, with the exit at its end if there is one."""

    def __init__(self, model: EarlyExitModel, segment: Segment) -> None:
        super().__init__()
        self.model = model
        self.segment = segment

    def forward(self, values: Tensors, tensors: dict[str, Tensor]) -> Tensors:
        layout = _GraphLayout(tensors) if tensors else _NO_TOKENS
        hidden, outputs_BC = self.model.compute(self.segment, values, layout)
        return hidden if outputs_BC is None else (*hidden, outputs_BC)


def after_name(name: str) -> str:
    """Returns the name of an output; the input of a graph may have the same name in the boundary."""
    return f"{name}_after"


def value_names(model: EarlyExitModel, block: int) -> list[str]:
    """Returns the names of a graph's tensors that cross before `block`."""
    return [each.name for each in model.boundary(block - 1)]


def index_tensors(model: EarlyExitModel, layout: Layout) -> dict[str, Tensor]:
    """Returns the graph's inputs beside the values: none for inputs without tokens."""
    if model.max_length == 1:
        return {}
    names = ("mask_BT", "place_N", "owner_RT", "row_place_N", "position_N", "first_token_B", "lengths_B1")
    return {name: getattr(layout, name) for name in names}


def _example_inputs(model: EarlyExitModel, segment: Segment) -> tuple[Tensors, dict[str, Tensor]]:
    # No sizes of 0 and 1, which the exporter would take for constants.
    lengths = [1, 1] if model.max_length == 1 else [4, 3, 1]
    layout = Layout(np.array(lengths, dtype=np.int32), model.device, "slotted")
    values = arbitrary_tensors(model, segment.first, layout.lengths_B, np.random.default_rng(0))
    return values, index_tensors(model, layout)


def _free_sizes(name: str) -> dict[int, Any]:
    free: dict[int, Any] = {0: torch.export.Dim.DYNAMIC}
    return free | {1: LONGEST} if name in ("mask_BT", "owner_RT") else free


def _check_size(weights: Iterable[Any], segment: Segment) -> None:
    num_bytes = sum(weight.const_value.nbytes for weight in weights)
    if num_bytes > MAX_WEIGHT_BYTES:
        raise PlanError(
            f"blocks {segment.first} to {segment.end - 1} hold {num_bytes / 1e9:.1f} GB of weights, more than one ONNX "
            "file can: split them, or run them with torch"
        )


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silences messages of the exporter's own parts; its failures are exceptions."""
    registry = logging.getLogger("torch.onnx._internal.exporter._registration")  # speaks of torchvision's operators
    level = registry.level
    registry.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # One name for two sizes is what is meant: they are equal.
            warnings.filterwarnings("ignore", message=r"# The axis name: \w+ will not be used", category=UserWarning)
            warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
            yield
    finally:
        registry.setLevel(level)


def _main(job: Path) -> None:
    model, files = torch.load(job, map_location="cpu", weights_only=False)
    for segment, path in files.items():
        export(model, segment, path)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
