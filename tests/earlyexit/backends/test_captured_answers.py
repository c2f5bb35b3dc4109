from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from earlyexit.backends.captured import CapturedSegments
from earlyexit.engine.queue import Attention
from earlyexit.network.boundary import Budget, Encoded, Segment, Split
from earlyexit.network.cut import TorchRunner
from earlyexit.network.model import EarlyExitModel
from earlyexit.policies.ensemble import RecordedAnswers, RecordedPolicy
from earlyexit.policies.threshold import ConfidencePolicy, EntropyPolicy
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.backends.recordings import (
    EACH_SEGMENT,
    FIRST,
    HALVES,
    LAST,
    LONGEST,
    ON_EACH,
    WITH_RAMP,
    Log,
    answers_of,
    assert_as_the_model,
    piece_before,
    ready,
    recorder_on,
)
from tests.earlyexit.families.convolutions import pictures
from tests.earlyexit.families.test_tensor_family import fresh_model
from tests.earlyexit.network.cuts import answers_alone, answers_in_cuts, assert_same, every_bounds
from tests.earlyexit.network.models import small
from tests.earlyexit.network.tokens import random_inputs


def between_scores(model: EarlyExitModel, encoded: Sequence[Encoded]) -> ConfidencePolicy:
    """Half of the inputs are surer than this at every ramp."""
    scores = {block: model.task.score(outputs_NC) for block, outputs_NC in exit_outputs(model, encoded).items()}
    return ConfidencePolicy({block: float(score_N.quantile(0.5)) for block, score_N in scores.items()})


@EACH_SEGMENT
@pytest.mark.parametrize(
    "lengths",
    [[7], [1, 1], [9, 9, 9], [5, 32, 1, 12], [32], [32, 32, 32]],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
@ON_EACH
def test_rows_that_are_free_change_nothing(
    lengths: list[int], segment: Segment, device: str, small_model: EarlyExitModel
) -> None:
    model = small_model.to(device)
    segments = ready(model, recorder_on(device), FIRST, WITH_RAMP, LAST)
    for seed, before in enumerate([[LONGEST] * 4, [5, 32, 3, 30]]):  # they leave their rows behind
        for other in (LAST, segment, FIRST):
            segments.run(other, piece_before(model, other.first, before, seed=seed + 1))
    assert_as_the_model(segments, model, segment, piece_before(model, segment.first, lengths))


def test_what_is_no_number_reaches_nobody_who_comes_later(small_model: EarlyExitModel) -> None:
    segments = ready(small_model, Log(), LAST)
    broken = piece_before(small_model, 2, [5, 32, 3, 30])
    nothing = torch.full_like(broken.tensors[0], torch.nan)
    segments.run(LAST, replace(broken, tensors=(nothing,)))
    assert_as_the_model(segments, small_model, LAST, piece_before(small_model, 2, [4, 31, 3]))


def test_what_was_given_is_not_written_to_again(small_model: EarlyExitModel) -> None:
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
    policy = between_scores(model, encoded)
    model.to(device)
    expected = answers_alone(model, policy, encoded)
    segments = CapturedSegments(model, recorder_on(device))
    segments.prepare({each: Budget(inputs=6) for bounds in every_bounds(4) for each in segments_between(model, bounds)})
    for bounds in every_bounds(4):
        answers = answers_in_cuts(model, policy, encoded, bounds, segments=segments)
        assert_same(answers, expected, within=1e-5 if device == "cpu" else 1e-4)


def test_a_device_replays_all_that_it_runs_and_answers_the_same(small_model: EarlyExitModel) -> None:
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
def test_a_gpu_answers_by_the_records_with_graphs_and_lookahead(small_model: EarlyExitModel) -> None:
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
def test_a_batch_waits_for_the_device_only_where_it_says_so(small_model: EarlyExitModel) -> None:
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
def test_torch_runs_what_has_no_shape(lengths: list[int], attention: Attention, small_model: EarlyExitModel) -> None:
    small_model.attention = attention
    log = Log()
    segments = ready(small_model, log, LAST)
    assert_as_the_model(segments, small_model, LAST, piece_before(small_model, 2, lengths))
    assert log.replayed == 0
    assert_as_the_model(segments, small_model, LAST, piece_before(small_model, 2, [LONGEST] * 2))
    assert log.replayed == 1


def test_torch_runs_what_measures_attention_and_what_was_not_prepared(small_model: EarlyExitModel) -> None:
    log = Log()
    segments = ready(small_model, log, FIRST)
    piece = piece_before(small_model, 0, [3, 5])
    measured = replace(piece, tensors=(*piece.tensors, torch.zeros(8)))
    assert_as_the_model(segments, small_model, FIRST, measured)
    assert_as_the_model(segments, small_model, LAST, piece_before(small_model, 2, [3, 5]))
    assert log.replayed == 0
