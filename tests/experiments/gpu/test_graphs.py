from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from earlyexit.clock import ManualClock
from earlyexit.cut import cut_out
from earlyexit.device import Device
from earlyexit.engine import BatchEngine
from earlyexit.errors import PlanError
from earlyexit.member import Member
from earlyexit.model import EarlyExitModel
from earlyexit.network import from_wire
from earlyexit.piece import Piece
from earlyexit.policies.recorded import RecordedAnswers, RecordedPolicy
from earlyexit.policies.threshold import ConfidencePolicy, EntropyPolicy
from earlyexit.release import Release, Told
from earlyexit.runner import TorchRunner
from earlyexit.split import Segment, Split
from earlyexit.times import ObservedTimes
from experiments.gpu.graphs import CapturedSegment, GraphSegments, Shape, StaticSegment, shapes_up_to, static_inputs
from tests.answers import label_of
from tests.earlyexit.convolutions import pictures
from tests.earlyexit.cuts import answers_alone, answers_in_cuts, assert_same
from tests.earlyexit.models import small
from tests.earlyexit.test_tensor_family import between_scores, fresh_model
from tests.earlyexit.tokens import random_inputs, wire_of

LENGTH = 5
FIRST, WITH_RAMP, LAST = (
    Segment(first=0, end=1, ramp=None),
    Segment(first=1, end=2, ramp=1),
    Segment(first=2, end=4, ramp=None),
)
POLICY = ConfidencePolicy(1.1)
SHAPES = (Shape(num_inputs=2, length=LENGTH), Shape(num_inputs=4, length=LENGTH))


@pytest.fixture
def small_model() -> EarlyExitModel:
    return small()


class EagerCapture:
    """Static tensors as a graph has them, but torch computes between them; logs what it captured and replayed."""

    def __init__(self, model: EarlyExitModel) -> None:
        self.model = model
        self.captured: list[tuple[Segment, int]] = []
        self.replayed: list[tuple[Segment, int]] = []

    @torch.inference_mode()
    def __call__(self, segment: Segment, shape: Shape) -> CapturedSegment:
        inputs = static_inputs(self.model, segment, shape)
        hidden, logits_BC = self.model.compute(segment, inputs.tensors, inputs.layout)

        def replay() -> None:
            self.replayed.append((segment, shape.num_inputs))
            new, new_BC = self.model.compute(segment, inputs.tensors, inputs.layout)
            for held, computed in zip(hidden, new, strict=True):
                held.copy_(computed)
            if logits_BC is not None and new_BC is not None:
                logits_BC.copy_(new_BC)

        self.captured.append((segment, shape.num_inputs))
        return StaticSegment(replay, shape, inputs, hidden, logits_BC)


def piece_before(model: EarlyExitModel, block: int, lengths: Sequence[int], *, seed: int = 0) -> Piece:
    wire = wire_of(random_inputs(np.random.default_rng(seed), lengths), prefix="s")
    piece = from_wire(model, wire, POLICY)
    if block == 0:
        return piece
    (step,) = cut_out(model, 0, block, (), POLICY).run(piece)
    assert step.survivors is not None
    return step.survivors


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        pytest.param(1, [1], id="one"),
        pytest.param(6, [1, 2, 3, 4, 5, 6], id="all of a small batch"),
        pytest.param(8, [1, 2, 3, 4, 5, 6, 7, 8], id="eight"),
        pytest.param(18, [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 18], id="every fourth, and the batch itself"),
    ],
)
def test_shapes_leave_at_most_three_rows_free(batch: int, sizes: list[int]) -> None:
    assert shapes_up_to(batch, LENGTH) == tuple(Shape(num_inputs=size, length=LENGTH) for size in sizes)


def test_a_shape_of_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="at least one input of one token, not 0 of 5"):
        Shape(num_inputs=0, length=5)


@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        pytest.param([5], 2, id="fewer inputs than the smallest"),
        pytest.param([5, 5], 2, id="exactly"),
        pytest.param([5, 5, 5], 4, id="the next larger"),
        pytest.param([5] * 5, None, id="more than the largest"),
        pytest.param([4, 4], None, id="another length"),
        pytest.param([5, 4], None, id="unequal lengths"),
    ],
)
def test_the_smallest_shape_that_holds_a_piece_is_taken(
    lengths: list[int], size: int | None, small_model: EarlyExitModel
) -> None:
    segments = GraphSegments(small_model, SHAPES, EagerCapture(small_model))
    expected = None if size is None else Shape(num_inputs=size, length=LENGTH)
    assert segments.shape_of(np.array(lengths, dtype=np.int32)) == expected


def test_the_largest_shape_is_captured_first(small_model: EarlyExitModel) -> None:
    capture = EagerCapture(small_model)
    GraphSegments(small_model, SHAPES, capture).prepare([FIRST])
    assert capture.captured == [(FIRST, 4), (FIRST, 2)]


def test_what_is_captured_is_not_captured_again_and_given_up_after_two_other_plans(small_model: EarlyExitModel) -> None:
    capture = EagerCapture(small_model)
    segments = GraphSegments(small_model, SHAPES[:1], capture)
    for wanted in ([FIRST], [FIRST, LAST], [LAST], [LAST]):
        segments.prepare(wanted)
    assert capture.captured == [(FIRST, 2), (LAST, 2)]
    assert [segments.is_ready(each) for each in (FIRST, LAST)] == [True, True]
    segments.prepare([WITH_RAMP])
    assert [segments.is_ready(each) for each in (FIRST, LAST, WITH_RAMP)] == [False, True, True]


@pytest.mark.parametrize("segment", [FIRST, WITH_RAMP, LAST], ids=["from tokens", "with a ramp", "with the head"])
@pytest.mark.parametrize("num_inputs", [1, 2, 3, 4])
def test_a_shape_with_free_rows_gives_what_torch_gives(
    num_inputs: int, segment: Segment, small_model: EarlyExitModel
) -> None:
    segments = GraphSegments(small_model, SHAPES, EagerCapture(small_model))
    segments.prepare([segment])
    segments.run(segment, piece_before(small_model, segment.first, [LENGTH] * 4, seed=1))  # leaves its rows behind
    piece = piece_before(small_model, segment.first, [LENGTH] * num_inputs)
    hidden, logits_BC = segments.run(segment, piece)
    with torch.inference_mode():
        expected, expected_BC = small_model.run(segment, piece)
    torch.testing.assert_close(hidden, expected)
    torch.testing.assert_close(logits_BC, expected_BC)


def test_what_a_replay_gave_survives_the_next(small_model: EarlyExitModel) -> None:
    segments = GraphSegments(small_model, SHAPES, EagerCapture(small_model))
    segments.prepare([WITH_RAMP])
    (first_ND,), first_BC = segments.run(WITH_RAMP, piece_before(small_model, 1, [LENGTH] * 2, seed=1))
    assert first_BC is not None
    before = first_ND.clone(), first_BC.clone()
    (second_ND,), _ = segments.run(WITH_RAMP, piece_before(small_model, 1, [LENGTH] * 2, seed=2))
    assert not second_ND.equal(first_ND)
    assert first_ND.equal(before[0])
    assert first_BC.equal(before[1])


def test_torch_runs_what_no_shape_holds(small_model: EarlyExitModel) -> None:
    capture = EagerCapture(small_model)
    segments = GraphSegments(small_model, SHAPES, capture)
    segments.prepare([LAST])
    piece = piece_before(small_model, 2, [3, 5])
    with torch.inference_mode():
        given = segments.run(LAST, piece)
        expected = small_model.run(LAST, piece)
    torch.testing.assert_close(given, expected)
    assert capture.replayed == []


def answers_of(runner: TorchRunner, splits: Sequence[Split], piece: Piece) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}

    def deliver(releases: list[Release[Piece]]) -> None:
        for release in releases:
            assert isinstance(release, Told)
            assert release.answer.sample_id not in found
            found[release.answer.sample_id] = (release.answer.exit, label_of(release.answer))

    device = Device(BatchEngine(splits, ObservedTimes()), runner, ManualClock(), deliver)
    members = [Member(sample_id=one.sample_ids[0], payload=one) for one in piece.singles()]
    device.engine.submit(0, members, 0.0)
    device.run_until_idle()
    return found


def test_a_device_gives_the_same_answers_with_captured_segments(small_model: EarlyExitModel) -> None:
    splits = (Split(first=0, end=2, batch=4, ramps=(0, 1)), Split(first=2, end=4, batch=4, ramps=(2,)))
    policy = ConfidencePolicy(0.42)
    piece = piece_before(small_model, 0, [LENGTH] * 23)
    capture = EagerCapture(small_model)
    runner = TorchRunner(small_model, policy, GraphSegments(small_model, SHAPES, capture))
    runner.prepare(splits)
    answers = answers_of(runner, splits, piece)
    assert answers == answers_of(TorchRunner(small_model, policy), splits, piece)
    assert len({place for place, _ in answers.values()}) > 1
    assert {size for _, size in capture.replayed} == {2, 4}


def gpu_model(model: EarlyExitModel) -> EarlyExitModel:
    return model.to("cuda", torch.bfloat16).requires_grad_(False)


@pytest.mark.gpu
@pytest.mark.parametrize("segment", [FIRST, WITH_RAMP, LAST], ids=["from tokens", "with a ramp", "with the head"])
@pytest.mark.parametrize("num_inputs", [1, 2, 3, 4])
def test_a_cuda_graph_gives_what_torch_gives(num_inputs: int, segment: Segment, small_model: EarlyExitModel) -> None:
    model = gpu_model(small_model)
    segments = GraphSegments(model, SHAPES)
    segments.prepare([FIRST, WITH_RAMP, LAST])
    for seed in range(3):  # in another order than that of the captures, and over what others left in the pool
        for other in (LAST, segment, FIRST):
            segments.run(other, piece_before(model, other.first, [LENGTH] * 4, seed=seed))
    piece = piece_before(model, segment.first, [LENGTH] * num_inputs)
    hidden, logits_BC = segments.run(segment, piece)
    with torch.inference_mode():
        expected, expected_BC = model.run(segment, piece)
    torch.testing.assert_close(hidden, expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(logits_BC, expected_BC, rtol=0.05, atol=0.05)


@pytest.mark.gpu
def test_a_gpu_answers_by_the_records_with_graphs_and_lookahead(small_model: EarlyExitModel) -> None:
    model = gpu_model(small_model)
    answers = RecordedAnswers(
        row_of={f"s{k}": k for k in range(23)},
        ramps=(0, 1, 2),
        scores_NR=np.array([[k % 4 > 0, k % 4 > 1, k % 4 > 2] for k in range(23)], dtype=np.float32),
        answers_NE=np.column_stack([np.tile([[0, 1, 2]], (23, 1)), np.full(23, 1)]),
    )
    splits = (Split(first=0, end=2, batch=4, ramps=(0, 1)), Split(first=2, end=4, batch=4, ramps=(2,)))
    runner = TorchRunner(model, RecordedPolicy(answers, EntropyPolicy(0.5)), GraphSegments(model, SHAPES))
    runner.prepare(splits)
    found = answers_of(runner, splits, piece_before(model, 0, [LENGTH] * 23))
    assert found == {f"s{k}": (k % 4, [0, 1, 2, 1][k % 4]) for k in range(23)}


def single(block: int) -> Split:
    return Split(first=block, end=block + 1, batch=4, ramps=(block,) if block < 3 else ())


@pytest.mark.parametrize(
    ("device", "capture"),
    [pytest.param("cpu", EagerCapture, id="torch"), pytest.param("cuda", None, id="CUDA", marks=pytest.mark.gpu)],
)
def test_captured_segments_of_a_network_of_many_shapes_answer_as_it_does(
    device: str, capture: type[EagerCapture] | None
) -> None:
    model, encoded = fresh_model().to(device), pictures(20, seed=1)[0]
    policy = between_scores(model, encoded)
    segments = GraphSegments(model, shapes_up_to(4, 1), None if capture is None else capture(model))
    segments.prepare({segment for block in range(4) for segment in single(block).segments()})
    answers = answers_in_cuts(model, policy, encoded, (0, 1, 2, 3, 4), segments=segments)
    assert_same(answers, answers_alone(model, policy, encoded), within=1e-4)
