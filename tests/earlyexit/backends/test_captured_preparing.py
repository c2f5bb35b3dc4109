from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from earlyexit.backends.captured import MOST_TOKENS, CapturedSegments, Shape, Work, shape_of, shapes_within
from earlyexit.network.boundary import Budget, Segment
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Piece
from tests.earlyexit.backends.recordings import (
    FIRST,
    FOUR,
    LAST,
    LONGEST,
    WITH_RAMP,
    Log,
    assert_as_the_model,
    piece_before,
    ready,
    recorder_on,
)


def segments_of(places: Collection[tuple[Segment, Shape]]) -> set[Segment]:
    return {segment for segment, _ in places}


def test_a_plan_s_recordings_are_kept_while_the_next_is_made_ready_and_not_made_again(
    small_model: EarlyExitModel,
) -> None:
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
        assert (log.recorded, segments_of(segments.captured)) == (recorded * of_one, held)


@dataclass(eq=False)
class Serving(Log):
    """Runs another piece while something is recorded."""

    segments: list[CapturedSegments] = field(default_factory=list)
    run: list[Work] = field(default_factory=list)

    def record(self, work: Work) -> Work:
        work()
        for meanwhile in self.run:
            meanwhile()
            work()
            meanwhile()
        return super().record(work)


def test_a_plan_is_made_ready_beside_batches_that_run(small_model: EarlyExitModel) -> None:
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
def test_where_memory_runs_out_the_smaller_shapes_are_recorded_and_one_line_says_so(
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


def test_a_segment_that_cannot_be_recorded_is_tried_once(
    small_model: EarlyExitModel, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log(limit=0, error=RuntimeError)
    with caplog.at_level(logging.WARNING):
        segments = ready(small_model, log, LAST)
    assert (log.tried, len(segments.captured), len(caplog.messages)) == (1, 0, 1)
    assert_as_the_model(segments, small_model, LAST, piece_before(small_model, 2, [5, 7]))


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
def test_what_asks_the_device_for_numbers_is_not_captured_and_runs(
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
def test_the_smallest_shape_is_taken(lengths: list[int], max_length: int, expected: tuple[int, int, int, bool]) -> None:
    shape = shape_of(np.array(lengths, dtype=np.int32), max_length)
    assert (shape.num_tokens, shape.num_rows, shape.longest, shape.mixed) == expected


@pytest.mark.parametrize("max_length", [1, 4, 20, 32, 100, 512])
@pytest.mark.parametrize("budget", [Budget(inputs=1), Budget(inputs=11), Budget(inputs=16, tokens=200)], ids=str)
def test_whatever_a_batch_shrinks_to_has_a_shape_that_was_captured(max_length: int, budget: Budget) -> None:
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
