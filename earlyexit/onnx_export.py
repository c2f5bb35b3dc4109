"""Writes a segment of a model as an ONNX file: the graph of its blocks, and of the exit at its end if it has one.

    python -m earlyexit.onnx_export JOB

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
from earlyexit.layout import Layout
from earlyexit.model import EarlyExitModel
from earlyexit.split import Segment

# Part of every file's name: raise it when `_SegmentGraph` or the export changes, so that older files are not used.
EXPORT_VERSION = 3
# The first opset with Gelu as one node is 20. From 23 on attention is one node too, but ONNX Runtime 1.31 refuses it
# with a mask that is the same for all queries, as ours is.
OPSET = 20
# A file is one protobuf message, which cannot be longer; the graph beside the weights is far below the margin.
MAX_WEIGHT_BYTES = 2**31 - 2**24


def export(model: EarlyExitModel, segment: Segment, path: Path) -> None:
    """Write a segment's file; meanwhile no other thread may run torch, for the exporter changes what threads share."""
    values, tensors = _example_inputs(model, segment)
    with _quiet_exporter(), torch.inference_mode(False), torch.no_grad():
        program = torch.onnx.export(
            _SegmentGraph(model, segment).eval(),
            kwargs={"values": values, "tensors": tensors},
            dynamo=True,
            opset_version=OPSET,
            input_names=["values", *tensors],
            output_names=["hidden_ND", "logits_BC"] if has_exit(model, segment) else ["hidden_ND"],
            dynamic_shapes={"values": _free_sizes("values"), "tensors": {name: _free_sizes(name) for name in tensors}},
            verbose=False,
        )
    assert program is not None
    _check_size(program.model.graph.initializers.values(), segment)
    # Another process may export the same segment: whoever is last replaces a whole file by an equal one.
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        program.save(Path(folder) / path.name, external_data=False)
        os.replace(Path(folder) / path.name, path)


def export_elsewhere(model: EarlyExitModel, files: Mapping[Segment, Path]) -> None:
    """Write several segments' files while other threads run the model. Raises PlanError for what cannot be exported.

    In a process of its own: the exporter changes what all threads share (the model's weights, for stand-ins; the modes
    of torch; warnings), and holds Python's lock for seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.pt"
        torch.save((model, dict(files)), job)
        done = subprocess.run(
            [sys.executable, "-m", "earlyexit.onnx_export", str(job)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        *_, reason = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise PlanError(f"the model could not be exported for ONNX Runtime: {reason}")


class _GraphLayout(Layout):
    """A layout whose tensors are a graph's inputs, and whose sizes are theirs; never taken for uniform."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        vars(self).update(tensors)  # in the place of what Layout would compute
        self.num_inputs, self.longest = tensors["mask_BT"].shape

    @property
    def uniform(self) -> bool:
        return False


class _SegmentGraph(nn.Module):
    """What is exported: a segment, with the exit at its end if there is one."""

    def __init__(self, model: EarlyExitModel, segment: Segment) -> None:
        super().__init__()
        self.model = model
        self.segment = segment
        self.has_exit = has_exit(model, segment)

    def forward(self, values: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        layout = _GraphLayout(tensors)
        hidden_ND = self.model.run_blocks(self.segment.first, self.segment.end, values, layout)
        if not self.has_exit:
            return (hidden_ND,)
        return hidden_ND, self.model.exit_logits(self.segment.end - 1, hidden_ND, layout)


def index_tensors(layout: Layout) -> dict[str, Tensor]:
    """The graph's inputs beside the values."""
    names = ("mask_BT", "slot_N", "position_N", "first_token_B", "lengths_B1")
    return {name: getattr(layout, name) for name in names}


def has_exit(model: EarlyExitModel, segment: Segment) -> bool:
    """Whether a segment ends at an exit that is evaluated."""
    return segment.ramp is not None or segment.end == model.num_blocks


def _example_inputs(model: EarlyExitModel, segment: Segment) -> tuple[Tensor, dict[str, Tensor]]:
    # Any sizes but 0 and 1, which the exporter would take for constants.
    layout = Layout(np.array([3, 2], dtype=np.int32), model.device)
    if segment.first == 0:
        values = torch.zeros(layout.num_tokens, dtype=torch.int32, device=model.device)
    else:
        values = torch.zeros(layout.num_tokens, model.backbone.hidden_size, device=model.device)
    return values, index_tensors(layout)


def _free_sizes(name: str) -> dict[int, Any]:
    return dict.fromkeys((0, 1) if name == "mask_BT" else (0,), torch.export.Dim.DYNAMIC)


def _check_size(weights: Iterable[Any], segment: Segment) -> None:
    num_bytes = sum(weight.const_value.nbytes for weight in weights)
    if num_bytes > MAX_WEIGHT_BYTES:
        raise PlanError(
            f"blocks {segment.first} to {segment.end - 1} hold {num_bytes / 1e9:.1f} GB of weights, more than one ONNX "
            "file can: split them, or run them with torch"
        )


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """No word of what the exporter itself is built on; its failures are exceptions."""
    registry = logging.getLogger("torch.onnx._internal.exporter._registration")  # speaks of torchvision's operators
    level = registry.level
    registry.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
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
