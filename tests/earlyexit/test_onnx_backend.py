from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from earlyexit.checkpoint import RampOptions, random_model
from earlyexit.cut import cut_out
from earlyexit.errors import PlanError
from earlyexit.model import EarlyExitModel
from earlyexit.network import SegmentRunner, from_wire
from earlyexit.onnx_backend import OnnxSegments
from earlyexit.piece import Piece
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.split import Segment
from earlyexit.wire import Answer
from tests.answers import label_of
from tests.earlyexit.tokens import random_inputs, wire_of

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_blocks": 4,
    "num_heads": 4,
    "intermediate_size": 64,
    "max_length": 64,
}
# One input, one token, equal lengths, mixed lengths up to the longest the model takes.
BATCHES = ([7], [1], [1, 1], [9, 9, 9], [5, 64, 1, 12, 5, 30])
# Between the confidences of the random ramps, so that every ramp lets some inputs leave and some pass.
POLICY = ConfidencePolicy(0.55)


def fresh_model(ramps: RampOptions | None = None) -> EarlyExitModel:
    model = random_model(SIZES, ramps=ramps)
    model.temperatures_E.copy_(torch.tensor([0.5, 1.0, 2.0, 0.7]))
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    return fresh_model()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx")


@pytest.fixture(scope="module")
def segments(model: EarlyExitModel, cache: Path) -> OnnxSegments:
    return OnnxSegments(model, cache=cache, num_threads=1)


def piece_before(model: EarlyExitModel, block: int, lengths: Sequence[int]) -> Piece:
    wire = wire_of(random_inputs(np.random.default_rng(sum(lengths)), lengths), prefix="s")
    piece = from_wire(model, wire, POLICY)
    if block == 0:
        return piece
    (step,) = cut_out(model, 0, block, (), POLICY).run(piece)
    assert step.survivors is not None
    return step.survivors


def run_chain(
    model: EarlyExitModel, piece: Piece, ends: Sequence[int], segments: SegmentRunner | None
) -> list[list[tuple[str, int, int]]]:
    """Run the whole model, all ramps active, as cuts that end where told; ids, labels and exits, step by step."""
    steps: list[list[tuple[str, int, int]]] = []
    inside: Piece | None = piece
    for first, end in zip([0, *ends], ends, strict=False):
        if inside is None:
            break
        ramps = tuple(ramp for ramp in model.ramp_indices if first <= ramp < end)
        for step in cut_out(model, first, end, ramps, POLICY, segments).run(inside):
            steps.append([_facts(answer) for answer in step.answers])
            inside = step.survivors
    return steps


def _facts(answer: Answer) -> tuple[str, int, int]:
    return answer.sample_id, label_of(answer), answer.exit


def assert_runners_agree(model: EarlyExitModel, segments: OnnxSegments, segment: Segment) -> None:
    for lengths in BATCHES:
        piece = piece_before(model, segment.first, lengths)
        with torch.inference_mode():
            hidden, logits_BC = model.run(segment, piece)
            onnx_hidden, onnx_logits_BC = segments.run(segment, piece)
        torch.testing.assert_close(onnx_hidden, hidden, atol=1e-4, rtol=0)
        assert (logits_BC is None) == (onnx_logits_BC is None)
        if logits_BC is not None:
            torch.testing.assert_close(onnx_logits_BC, logits_BC, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("first", "end"), [(first, end) for end in range(1, 5) for first in range(end)])
def test_every_segment_gives_the_hidden_state_and_logits_of_torch(
    model: EarlyExitModel, segments: OnnxSegments, first: int, end: int
) -> None:
    ramp = end - 1 if end < model.num_blocks else None
    assert_runners_agree(model, segments, Segment(first=first, end=end, ramp=ramp))


def test_a_segment_without_an_exit_gives_no_logits(model: EarlyExitModel, segments: OnnxSegments) -> None:
    assert_runners_agree(model, segments, Segment(first=0, end=2, ramp=None))


def test_pooler_ramps_on_the_first_token_give_the_logits_of_torch(tmp_path: Path) -> None:
    model = fresh_model(RampOptions(style="pooler", pooling="first"))
    assert_runners_agree(model, OnnxSegments(model, cache=tmp_path), Segment(first=0, end=1, ramp=0))


@pytest.mark.parametrize("ends", [(4,), (2, 4), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_chained_cuts_give_the_labels_and_exits_of_torch(
    model: EarlyExitModel, segments: OnnxSegments, ends: Sequence[int], lengths: Sequence[int]
) -> None:
    piece = piece_before(model, 0, lengths)
    expected = run_chain(model, piece, ends, None)
    assert sum(map(len, expected)) == len(lengths)
    assert run_chain(model, piece, ends, segments) == expected


def test_the_chain_is_a_test_of_exits_inside_the_model(model: EarlyExitModel) -> None:
    steps = run_chain(model, piece_before(model, 0, BATCHES[-1]), (4,), None)
    assert sum(len(answers) > 0 for answers in steps) > 1


def test_a_file_in_the_cache_is_used_again(model: EarlyExitModel, segments: OnnxSegments) -> None:
    segment = Segment(first=3, end=4, ramp=None)
    piece = piece_before(model, 3, [4, 2])
    segments.run(segment, piece)
    path = segments.file(segment)
    os.utime(path, (1, 1))
    OnnxSegments(model, cache=path.parent).run(segment, piece)
    assert path.stat().st_mtime == 1


def test_a_changed_weight_does_not_use_the_old_file(model: EarlyExitModel, segments: OnnxSegments, cache: Path) -> None:
    segment = Segment(first=3, end=4, ramp=None)
    changed = fresh_model()
    same = OnnxSegments(changed, cache=cache).file(segment)
    next(changed.backbone.parameters())[0, 0] += 1
    next(changed.head.parameters())[0, 0] += 1
    other = OnnxSegments(changed, cache=cache)
    assert same == segments.file(segment)
    assert other.file(segment) != same
    assert_runners_agree(changed, other, segment)


def test_a_changed_temperature_does_not_use_the_old_file(segments: OnnxSegments, cache: Path) -> None:
    segment = Segment(first=3, end=4, ramp=None)
    changed = fresh_model()
    changed.temperatures_E[3] = 1.5
    assert OnnxSegments(changed, cache=cache).file(segment) != segments.file(segment)


def test_the_cache_holds_whole_files_only(model: EarlyExitModel, segments: OnnxSegments, cache: Path) -> None:
    segments.run(Segment(first=3, end=4, ramp=None), piece_before(model, 3, [4, 2]))
    assert {path.suffix for path in cache.iterdir()} == {".onnx"}


def test_a_model_in_bfloat16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="float32 models here, not bfloat16"):
        OnnxSegments(random_model(SIZES).to(torch.bfloat16), cache=tmp_path)


def test_a_provider_that_is_not_there_is_refused(model: EarlyExitModel, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"has no NoSuchProvider; it has .*CPUExecutionProvider"):
        OnnxSegments(model, cache=tmp_path, providers=["NoSuchProvider", "CPUExecutionProvider"])


def test_a_missing_onnxruntime_says_what_to_install(
    model: EarlyExitModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(PlanError, match=r"install offramp\[onnx\] or offramp\[gpu\]"):
        OnnxSegments(model, cache=tmp_path)
