"""Networks over images by ONNX Runtime, as torch computes them: heads that give maps, and bridges, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from earlyexit.backends.onnx import OnnxSegments
from earlyexit.network.split import Segment
from earlyexit.policies.threshold import ConfidencePolicy
from tests.earlyexit.cuts import piece_of
from tests.earlyexit.vision import MODELS, noise

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

QUICK = {"segmentation, bridges"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_segments_give_what_torch_gives_in_batches_of_one_two_and_seven(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    segments = OnnxSegments(model, cache=tmp_path, num_threads=1)
    middle = model.num_blocks // 2
    halves = (
        Segment(first=0, end=middle, ramp=middle - 1),
        Segment(first=middle, end=model.num_blocks, ramp=None),
    )
    segments.prepare(halves)  # by one process, which needs seconds to begin
    for number in (1, 2, 7):
        piece = piece_of(model, ConfidencePolicy(2.0), noise(model, number))
        for segment in halves:
            hidden, outputs = model.run(segment, piece)
            found, answered = segments.run(segment, piece)
            assert outputs is not None
            assert answered is not None
            for ours, theirs in zip((*hidden, outputs), (*found, answered), strict=True):
                np.testing.assert_allclose(theirs.numpy(), ours.numpy(), rtol=1e-3, atol=1e-4)
            piece = replace(piece, next_block=segment.end, tensors=hidden)
