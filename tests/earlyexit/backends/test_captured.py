"""Segments that a device captured as graphs: a recorder that logs stands in for the device."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from earlyexit.backends.captured import (
    MOST_TOKENS,
    CapturedSegments,
    CudaRecorder,
    Record,
    Shape,
    Work,
    shape_of,
    shapes_within,
)
from earlyexit.engine.queue import Attention
from earlyexit.network.boundary import Budget, Encoded, Segment, Split
from earlyexit.network.checkpoint import RampOptions
from earlyexit.network.model import Cut, EarlyExitModel, TorchRunner, from_wire
from earlyexit.network.piece import Piece
from earlyexit.policies.ensemble import RecordedAnswers, RecordedPolicy
from earlyexit.policies.threshold import ConfidencePolicy, EntropyPolicy
from earlyexit.ramps.pooling import Pooling
from tests.earlyexit.families.convolutions import pictures
from tests.earlyexit.families.test_own_family import fresh_model
from tests.earlyexit.network.cuts import answers_alone, answers_in_cuts, answers_of, assert_same, every_bounds, halves
from tests.earlyexit.network.models import small
from tests.earlyexit.network.tokens import random_inputs, wire_of

LONGEST = 32
FIRST, WITH_RAMP, LAST = (
    Segment(first=0, end=1, ramp=None),
    Segment(first=1, end=2, ramp=1),
    Segment(first=2, end=4, ramp=None),
)
EACH_SEGMENT = pytest.mark.parametrize(
    "segment", [FIRST, WITH_RAMP, LAST], ids=["from tokens", "with a ramp", "with the head"]
)
POLICY = ConfidencePolicy(1.1)
FOUR = Budget(inputs=4)
ON_EACH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@dataclass(eq=False)
class Log:
    """Torch in place of CUDA graphs. It logs recordings and replays, in tokens, and refuses too large shapes."""

    limit: int = MOST_TOKENS
    error: type[RuntimeError] = torch.OutOfMemoryError
    in_capture: bool = False
    tried: int = 0
    recorded: int = 0
    replayed: int = 0

    def __call__(self, work: Work) -> Work:
        self.tried += 1
        if self.tokens_of(work) > self.limit:
            try:
                raise self.error("no room\nand much advice")
            finally:
                if self.in_capture:
                    raise RuntimeError("the capture broke off")
        self.recorded += 1
        work()

        def replay() -> None:
            self.replayed += 1
            work()

        return replay

    @staticmethod
    def tokens_of(work: Work) -> int:
        shape = work.__self__._shape  # type: ignore[attr-defined]
        assert isinstance(shape, Shape)
        return shape.num_tokens


def recorder_on(device: str) -> Record:
    return Log() if device == "cpu" else CudaRecorder(torch.device(device)).record


def piece_before(model: EarlyExitModel, block: int, lengths: Sequence[int], *, seed: int = 0) -> Piece:
    wire = wire_of(random_inputs(np.random.default_rng(seed), lengths), prefix="s")
    piece = from_wire(model, wire, POLICY)
    if block == 0:
        return piece
    (step,) = Cut(model, 0, block, (), POLICY).run(piece)
    assert step.survivors is not None
    return step.survivors


def ready(model: EarlyExitModel, recorder: Record, *segments: Segment, budget: Budget = FOUR) -> CapturedSegments:
    captured = CapturedSegments(model, recorder)
    captured.prepare(dict.fromkeys(segments, budget))
    return captured


def assert_as_the_model(
    segments: CapturedSegments, model: EarlyExitModel, segment: Segment, piece: Piece, within: float = 1e-5
) -> None:
    with torch.inference_mode():
        expected = model.run(segment, piece)
    torch.testing.assert_close(segments.run(segment, piece), expected, rtol=within, atol=within)


HALVES = (Split(first=0, end=2, batch=4, ramps=(0, 1)), Split(first=2, end=4, batch=4, ramps=(2,)))


@EACH_SEGMENT
@pytest.mark.parametrize(
    "lengths",
    [[7], [1, 1], [9, 9, 9], [5, 32, 1, 12], [32], [32, 32, 32]],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
@ON_EACH
def test_unused_rows_change_nothing(
    lengths: list[int], segment: Segment, device: str, small_model: EarlyExitModel
) -> None:
    model = small_model.to(device)
    segments = ready(model, recorder_on(device), FIRST, WITH_RAMP, LAST)
    for seed, before in enumerate([[LONGEST] * 4, [5, 32, 3, 30]]):  # they leave their rows behind
        for other in (LAST, segment, FIRST):
            segments.run(other, piece_before(model, other.first, before, seed=seed + 1))
    assert_as_the_model(segments, model, segment, piece_before(model, segment.first, lengths))


def test_batches_do_not_share_results(small_model: EarlyExitModel) -> None:
    segments = ready(small_model, Log(), LAST)
    broken = piece_before(small_model, 2, [5, 32, 3, 30])
    nothing = torch.full_like(broken.tensors[0], torch.nan)
    segments.run(LAST, replace(broken, tensors=(nothing,)))
    assert_as_the_model(segments, small_model, LAST, piece_before(small_model, 2, [4, 31, 3]))
    segments = ready(small_model, Log(), WITH_RAMP)
    (hidden,), logits_BC = segments.run(WITH_RAMP, piece_before(small_model, 1, [5, 7]))
    assert logits_BC is not None
    before = hidden.clone(), logits_BC.clone()
    segments.run(WITH_RAMP, piece_before(small_model, 1, [7, 5], seed=1))
    assert hidden.equal(before[0])
    assert logits_BC.equal(before[1])


def texts() -> list[Encoded]:
    rng = np.random.default_rng(3)
    return random_inputs(rng, [*rng.integers(1, LONGEST + 1, 20).tolist(), *[LONGEST] * 4], least=2)


def segments_between(model: EarlyExitModel, bounds: Sequence[int]) -> list[Segment]:
    cuts = [
        (first, end, tuple(each for each in model.ramp_indices if first <= each < end))
        for first, end in pairwise(bounds)
    ]
    splits = [Split(first=first, end=end, batch=1, ramps=ramps) for first, end, ramps in cuts]
    return [segment for split in splits for segment in split.segments()]


@pytest.mark.parametrize("kind", ["bert", "mpnet", "pictures"])
@ON_EACH
def test_every_cut_answers_as_the_network_does(kind: str, device: str) -> None:
    model, encoded = (fresh_model(), pictures(20, seed=1)[0]) if kind == "pictures" else (small(family=kind), texts())
    policy = halves(model, encoded)
    model.to(device)
    expected = answers_alone(model, policy, encoded)
    segments = CapturedSegments(model, recorder_on(device))
    segments.prepare({each: Budget(inputs=6) for bounds in every_bounds(4) for each in segments_between(model, bounds)})
    for bounds in every_bounds(4):
        answers = answers_in_cuts(model, policy, encoded, bounds, segments=segments)
        assert_same(answers, expected, within=1e-5 if device == "cpu" else 1e-4)


def test_a_device_replays_every_segment_and_answers_the_same(small_model: EarlyExitModel) -> None:
    policy, log = ConfidencePolicy(0.42), Log()
    piece = piece_before(small_model, 0, [5] * 11 + [9] * 12)
    runner = TorchRunner(small_model, policy, CapturedSegments(small_model, log))
    runner.prepare(HALVES)
    recorded = log.recorded
    answers = answers_of(runner, HALVES, piece)
    assert answers == answers_of(TorchRunner(small_model, policy), HALVES, piece)
    assert len({place for place, _ in answers.values()}) > 1
    assert (log.recorded, log.replayed > 12) == (recorded, True)


@pytest.mark.gpu
def test_a_gpu_answers_like_the_records_with_graphs_and_lookahead(small_model: EarlyExitModel) -> None:
    model = small_model.to("cuda", torch.bfloat16)
    answers = RecordedAnswers(
        row_of={f"s{k}": k for k in range(23)},
        ramps=(0, 1, 2),
        scores_NR=np.array([[k % 4 > 0, k % 4 > 1, k % 4 > 2] for k in range(23)], dtype=np.float32),
        answers_NE=np.column_stack([np.tile([[0, 1, 2]], (23, 1)), np.full(23, 1)]),
    )
    policy = RecordedPolicy(answers, EntropyPolicy(0.5))
    runner = TorchRunner(model, policy, CapturedSegments(model, recorder_on("cuda")))
    runner.prepare(HALVES)
    found = answers_of(runner, HALVES, piece_before(model, 0, [5] * 23))
    assert found == {f"s{k}": (k % 4, [0, 1, 2, 1][k % 4]) for k in range(23)}


@pytest.mark.gpu
def test_a_batch_waits_for_the_device_only_where_it_must(small_model: EarlyExitModel) -> None:
    model = small_model.to("cuda")
    runner = TorchRunner(model, ConfidencePolicy(0.42), CapturedSegments(model, recorder_on("cuda")))
    runner.prepare(HALVES)
    piece = piece_before(model, 0, [5] * 11 + [9] * 12)
    expected = answers_of(runner, HALVES, piece)
    torch.cuda.set_sync_debug_mode("error")  # of hidden waits; an event that is waited for is none
    try:
        found = answers_of(runner, HALVES, piece)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found == expected


# What has no shape


@pytest.mark.parametrize(
    ("lengths", "attention"),
    [
        pytest.param([3] * 9, "auto", id="more inputs than a batch has"),
        pytest.param([3, 5], "apart", id="mixed lengths that attend apart"),
        pytest.param([3, 5], "slotted", id="or in slots"),
    ],
)
def test_torch_runs_batches_without_a_shape(
    lengths: list[int], attention: Attention, small_model: EarlyExitModel
) -> None:
    small_model.attention = attention
    log = Log()
    segments = ready(small_model, log, LAST)
    assert_as_the_model(segments, small_model, LAST, piece_before(small_model, 2, lengths))
    assert log.replayed == 0
    assert_as_the_model(segments, small_model, LAST, piece_before(small_model, 2, [LONGEST] * 2))
    assert log.replayed == 1


def test_torch_runs_pieces_with_importance_and_unprepared_segments(small_model: EarlyExitModel) -> None:
    log = Log()
    segments = ready(small_model, log, FIRST)
    piece = piece_before(small_model, 0, [3, 5])
    measured = replace(piece, tensors=(*piece.tensors, torch.zeros(8)))
    assert_as_the_model(segments, small_model, FIRST, measured)
    assert_as_the_model(segments, small_model, LAST, piece_before(small_model, 2, [3, 5]))
    assert log.replayed == 0


def test_recordings_of_the_last_plan_are_kept_while_the_next_is_prepared(small_model: EarlyExitModel) -> None:
    log = Log()
    segments = CapturedSegments(small_model, log)
    of_one = len(shapes_within(FOUR, LONGEST))
    for wanted, recorded, held in (
        ([FIRST], 1, {FIRST}),
        ([FIRST, LAST], 2, {FIRST, LAST}),
        ([LAST], 2, {FIRST, LAST}),
        ([LAST], 2, {FIRST, LAST}),
        ([WITH_RAMP], 3, {LAST, WITH_RAMP}),
        ([FIRST], 4, {WITH_RAMP, FIRST}),
    ):
        segments.prepare(dict.fromkeys(wanted, FOUR))
        assert (log.recorded, {segment for segment, _ in segments.captured}) == (recorded * of_one, held)


@dataclass(eq=False)
class Serving(Log):
    """Runs another piece during a recording."""

    segments: list[CapturedSegments] = field(default_factory=list)
    run: list[Work] = field(default_factory=list)

    def __call__(self, work: Work) -> Work:
        work()
        for meanwhile in self.run:
            meanwhile()
            work()
            meanwhile()
        return super().__call__(work)


def test_a_plan_is_prepared_while_batches_run(small_model: EarlyExitModel) -> None:
    serving = Serving()
    segments = ready(small_model, serving, LAST)
    piece = piece_before(small_model, 2, [5, 17, 9])
    serving.run.append(lambda: assert_as_the_model(segments, small_model, LAST, piece))
    segments.prepare({WITH_RAMP: FOUR})
    assert serving.replayed == 2 * len(shapes_within(FOUR, LONGEST))


def test_two_batches_that_overlap_do_not_mix(small_model: EarlyExitModel) -> None:
    segments = ready(small_model, Log(), LAST)
    pieces = [piece_before(small_model, 2, lengths, seed=k) for k, lengths in enumerate(([5, 17, 9], [6, 18, 8]))]
    wrong: list[AssertionError] = []
    begin = threading.Barrier(2)

    def run(piece: Piece) -> None:
        begin.wait()
        try:
            for _ in range(50):
                assert_as_the_model(segments, small_model, LAST, piece)
        except AssertionError as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(piece,)) for piece in pieces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# What cannot be recorded


@pytest.mark.parametrize("in_capture", [False, True], ids=["before the capture", "in it"])
def test_if_memory_runs_out_only_the_smaller_shapes_are_recorded(
    in_capture: bool, small_model: EarlyExitModel, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log(limit=64, in_capture=in_capture)
    segments = ready(small_model, log, FIRST, LAST)
    shapes = shapes_within(FOUR, LONGEST)
    fit = [shape for shape in shapes if shape.num_tokens <= 64]
    assert len(segments.captured) == 2 * len(fit)
    assert caplog.messages == [
        f"{2 * (len(shapes) - len(fit))} of {2 * len(shapes)} shapes are not captured, torch runs them: "
        "OutOfMemoryError: no room"
    ]
    for lengths in ([LONGEST] * 4, [5, 7]):
        assert_as_the_model(segments, small_model, LAST, piece_before(small_model, 2, lengths))
    assert log.replayed == 1


def test_an_unrecorded_segment_is_tried_once(small_model: EarlyExitModel, caplog: pytest.LogCaptureFixture) -> None:
    log = Log(limit=0, error=RuntimeError)
    with caplog.at_level(logging.WARNING):
        segments = ready(small_model, log, LAST)
    assert (log.tried, len(segments.captured), len(caplog.messages)) == (1, 0, 1)
    assert_as_the_model(segments, small_model, LAST, piece_before(small_model, 2, [5, 7]))


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_ramps_of_every_pooling_are_captured(pooling: Pooling) -> None:
    model = small(ramps=RampOptions(style="pooler", pooling=pooling))
    segments = ready(model, Log(), WITH_RAMP)
    assert segments.captured
    assert_as_the_model(segments, model, WITH_RAMP, piece_before(model, 1, [5, 7, 3]))


@pytest.mark.gpu
def test_segments_run_while_others_are_recorded(small_model: EarlyExitModel) -> None:
    model = small_model.to("cuda")
    segments, over = ready(model, recorder_on("cuda"), LAST), threading.Event()
    piece = piece_before(model, 2, [5, 7])

    def run_on() -> None:
        while not over.is_set():
            segments.run(LAST, piece)
        torch.cuda.synchronize()

    thread = threading.Thread(target=run_on, daemon=True)
    thread.start()
    for wanted in [FIRST, WITH_RAMP] * 8:
        segments.prepare({wanted: FOUR, LAST: FOUR})
    over.set()
    thread.join(10.0)
    assert not thread.is_alive(), "the GPU hangs"
    assert_as_the_model(segments, model, LAST, piece, within=1e-4)


@pytest.mark.gpu
def test_plans_that_come_and_go_leave_no_memory_behind(small_model: EarlyExitModel) -> None:
    model = small_model.to("cuda")
    segments = CapturedSegments(model, recorder_on("cuda"))
    reserved = []
    for wanted in [FIRST, WITH_RAMP, LAST] * 4:
        segments.prepare({wanted: FOUR})
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] <= 1.1 * reserved[5]


@pytest.mark.gpu
def test_a_segment_that_synchronizes_with_the_host_is_not_captured_but_runs(
    small_model: EarlyExitModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model.to("cuda")
    compute = model.compute
    monkeypatch.setattr(model, "compute", lambda *given: (float(given[1][0].sum()), compute(*given))[1])
    segments = ready(model, recorder_on("cuda"), LAST)
    assert (len(segments.captured), len(caplog.messages)) == (0, 1)
    assert_as_the_model(segments, model, LAST, piece_before(model, 2, [5, 7]), within=1e-4)


@pytest.mark.parametrize(
    ("lengths", "max_length", "expected"),
    [
        pytest.param([1] * 9, 1, (9, 9, 1, False), id="images, nearly every number"),
        pytest.param([1] * 17, 1, (18, 18, 1, False), id="and every second beyond sixteen"),
        pytest.param([32] * 3, 32, (96, 3, 32, False), id="texts of the full length"),
        pytest.param([11], 32, (16, 2, 16, True), id="a short text, and a row for tokens of no input"),
        pytest.param([5, 17, 30], 32, (56, 5, 32, True), id="mixed lengths"),
        pytest.param([100] * 3, 512, (320, 5, 128, True), id="a quarter more at most"),
    ],
)
def test_the_smallest_shape_is_chosen(
    lengths: list[int], max_length: int, expected: tuple[int, int, int, bool]
) -> None:
    shape = shape_of(np.array(lengths, dtype=np.int32), max_length)
    assert (shape.num_tokens, shape.num_rows, shape.longest, shape.mixed) == expected


@pytest.mark.parametrize("max_length", [1, 4, 20, 32, 100, 512])
@pytest.mark.parametrize("budget", [Budget(inputs=1), Budget(inputs=11), Budget(inputs=16, tokens=200)], ids=str)
def test_every_batch_that_can_remain_has_a_captured_shape(max_length: int, budget: Budget) -> None:
    rng = np.random.default_rng(0)
    shapes = shapes_within(budget, max_length)
    for _ in range(500):
        lengths_B = rng.integers(1, max_length + 1, rng.integers(1, budget.inputs + 1))
        if budget.tokens is not None and len(lengths_B) > 1 and lengths_B.sum() > budget.tokens:
            lengths_B = lengths_B[:1]
        shape = shape_of(lengths_B.astype(np.int32), max_length)
        assert shape in shapes or shape.num_tokens > MOST_TOKENS
        assert int(lengths_B.sum()) <= shape.num_tokens
        assert lengths_B.max() <= shape.longest
        assert len(lengths_B) + shape.mixed <= shape.num_rows
