from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from earlyexit.errors import DataError
from profiles.forecast import forecast_survival
from profiles.records import ExitRecords
from profiles.stream import UNSEEN, ExitStream, Observations, StreamShape, empty
from profiles.windows import Window, WindowEstimate, survival_history, windows

SHAPE = StreamShape(score="confidence", num_blocks=6, ramps=(1, 3))
#          after 1, after 3
SCORES = [[0.9, 0.95], [0.5, 0.8], [0.75, 0.6], [0.2, 0.3]]
LABELS = [[0, 0], [0, 1], [0, 2], [1, 1]]
RECORDS = ExitRecords(
    score="confidence",
    num_blocks=6,
    ramps=(1, 3),
    sample_ids=("a", "b", "c", "d"),
    scores_NR=np.array(SCORES, dtype=np.float32),
    labels_NR=np.array(LABELS),
    final_labels_N=np.array([0, 1, 2, 2]),
    true_labels_N=np.array([0, 1, 0, 1]),
)


def observe(
    records: ExitRecords, plan: dict[int, float], probe_N: npt.NDArray[np.bool_], times_s_N: Any = None
) -> Observations:
    """What a service that runs `plan` sees of these inputs."""
    exits_N = records.outcome(plan).exits_N
    active_NR = np.tile([ramp in plan for ramp in records.ramps], (len(records), 1))
    seen_NR = (active_NR & (np.array(records.ramps) <= exits_N[:, None])) | probe_N[:, None]
    assert records.true_labels_N is not None
    return Observations(
        shape=StreamShape(score=records.score, num_blocks=records.num_blocks, ramps=records.ramps),
        times_s_N=np.zeros(len(records)) if times_s_N is None else np.asarray(times_s_N, dtype=float),
        probe_N=probe_N,
        active_NR=active_NR,
        exits_N=exits_N.astype(np.int16),
        scores_NR=np.where(seen_NR, records.scores_NR, np.nan).astype(np.float32),
        labels_NR=np.where(seen_NR, records.labels_NR, UNSEEN).astype(np.int32),
        final_labels_N=np.where((exits_N == records.num_blocks - 1) | probe_N, records.final_labels_N, UNSEEN).astype(
            np.int32
        ),
        true_labels_N=records.true_labels_N.astype(np.int32),
    )


def estimate(records: ExitRecords, plan: dict[int, float], probe_N: Any, asked: dict[int, float]) -> WindowEstimate:
    seen = observe(records, plan, np.array(probe_N, dtype=bool))
    return Window(start_s=0, period_s=120, observations=seen).estimate(asked)


def values(found: WindowEstimate) -> list[float]:
    assert found.survival is not None
    return [share.value for share in found.survival]


NONE = [False] * 4


def test_what_the_plan_ran_is_known_without_any_probe() -> None:
    found = estimate(RECORDS, {1: 0.75, 3: 0.8}, NONE, {1: 0.75, 3: 0.8})
    # a and c leave after block 1, b after block 3, d after the last.
    assert values(found) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert found.mean_blocks == 1 + 1 + 0.5 + 0.5 + 0.25 + 0.25
    assert found.accuracy is not None
    assert found.accuracy.value == 0.75
    assert found.agreement is None  # of a, b and c the full model's answer is not known
    assert found.survival is not None
    assert found.survival[2].effective_inputs == pytest.approx(4)


def test_a_bolder_threshold_is_known_and_a_more_cautious_one_is_not() -> None:
    # d alone passed ramp 1, at 0.2; at a limit of 0.1 all leave there.
    assert values(estimate(RECORDS, {1: 0.5}, NONE, {1: 0.1})) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    # At 0.8 b and c would go on, and nobody looked whether ramp 3 lets them out.
    assert estimate(RECORDS, {1: 0.5}, NONE, {1: 0.8, 3: 0.7}).survival is None


def test_probes_stand_for_all_inputs_that_the_plan_hides() -> None:
    # The plan lets a, b and c out at ramp 1. At 0.8, only a still leaves there: known. b, c and d are the rest: of d
    # ramp 3 is not seen either, as it is off. The probe is b, which ramp 3 lets out.
    found = estimate(RECORDS, {1: 0.5}, [False, True, False, False], {1: 0.8, 3: 0.7})
    assert values(found) == [1.0, 1.0, 0.75, 0.75, 0.0, 0.0]
    # With c and d as probes, both go to the end: all three of the rest count as going there.
    found = estimate(RECORDS, {1: 0.5}, [False, False, True, True], {1: 0.8, 3: 0.7})
    assert values(found) == [1.0, 1.0, 0.75, 0.75, 0.75, 0.75]


def test_an_input_that_would_go_to_the_end_agrees_even_if_it_left_later() -> None:
    # Ramp 1 passes b, c, d at 0.9; ramp 3 of the plan lets b and c out. With ramp 1 alone they would reach the end.
    found = estimate(RECORDS, {1: 0.9, 3: 0.5}, [True, False, False, False], {1: 0.9})
    assert found.agreement is not None
    assert found.agreement.value == 1.0  # a is the rest and the probe: its answer at ramp 1 is the full model's


PLANS: tuple[dict[int, float], ...] = ({}, {1: 0.75, 3: 0.8}, {1: 0.5}, {3: 0.6})
ASKED: tuple[dict[int, float], ...] = ({}, {1: 0.9}, {3: 0.7}, {1: 0.75, 3: 0.55}, {1: 0.25, 3: 0.9})


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("num_probes", [1, 2, 3])
def test_over_all_ways_to_draw_the_probes_estimates_are_right_on_average(
    plan: dict[int, float], asked: dict[int, float], num_probes: int
) -> None:
    truth = RECORDS.outcome(asked)
    by_sampled: dict[str, list[list[float]]] = {"survival": [], "agreement": [], "accuracy": []}
    for drawn in itertools.combinations(range(4), num_probes):
        found = estimate(RECORDS, plan, np.isin(range(4), drawn), asked)
        for name, share in (("agreement", found.agreement), ("accuracy", found.accuracy)):
            if share is not None:  # a probe fell among the rest, or there is no rest
                by_sampled[name].append([share.value])
        if found.survival is not None:
            by_sampled["survival"].append(values(found))
    assert np.mean(by_sampled["survival"], axis=0) == pytest.approx(truth.survival)
    assert np.mean(by_sampled["agreement"], axis=0) == pytest.approx([truth.agreement])
    assert np.mean(by_sampled["accuracy"], axis=0) == pytest.approx([truth.accuracy])


def random_records(num_inputs: int, seed: int) -> ExitRecords:
    """Inputs of different difficulty: whoever leaves early is easy, so what was seen is no fair sample."""
    rng = np.random.default_rng(seed)
    ramps = (0, 1, 3, 4)
    ease_N1 = rng.beta(1, 1, (num_inputs, 1))
    scores_NR = np.clip(ease_N1 + 0.1 * np.array(ramps) + rng.normal(0, 0.2, (num_inputs, 4)), 0, 1)
    final_labels_N = rng.integers(0, 3, num_inputs)
    right_NR = rng.random((num_inputs, 4)) < scores_NR
    return ExitRecords(
        score="confidence",
        num_blocks=6,
        ramps=ramps,
        sample_ids=tuple(map(str, range(num_inputs))),
        scores_NR=scores_NR.astype(np.float32),
        labels_NR=np.where(right_NR, final_labels_N[:, None], 3),
        final_labels_N=final_labels_N,
        true_labels_N=np.where(rng.random(num_inputs) < 0.9, final_labels_N, 4),
    )


def figures(found: WindowEstimate) -> list[float]:
    assert found.agreement is not None
    assert found.accuracy is not None
    return [*values(found), found.agreement.value, found.accuracy.value]


@pytest.mark.parametrize(
    ("plan", "asked"),
    [
        pytest.param({1: 0.8, 4: 0.9}, {0: 0.7, 3: 0.8}, id="other ramps"),
        pytest.param({0: 0.6, 1: 0.6, 3: 0.6, 4: 0.6}, {1: 0.8, 3: 0.8}, id="more cautious"),
        pytest.param({3: 0.9}, {0: 0.95, 3: 0.85}, id="one more ramp"),
    ],
)
def test_batches_of_probes_show_no_bias_and_less_error_than_probes_alone(
    plan: dict[int, float], asked: dict[int, float]
) -> None:
    records = random_records(4000, seed=1)
    truth = records.outcome(asked)
    expected = np.array([*truth.survival, truth.agreement, truth.accuracy])
    rng = np.random.default_rng(2)
    errors, plain = [], []
    for _ in range(200):
        probe_N = np.repeat(rng.random(500) < 0.04, 8)
        errors.append(np.array(figures(estimate(records, plan, probe_N, asked))) - expected)
        alone = records.subset(np.flatnonzero(probe_N)).outcome(asked)
        plain.append(np.array([*alone.survival, alone.agreement, alone.accuracy]) - expected)
    error_TF = np.array(errors)
    deviation_F = error_TF.std(0)
    # The mean of 200 draws stays within 3.5 of its standard errors of the truth, and ours never errs more.
    assert (np.abs(error_TF.mean(0)) <= 3.5 * deviation_F / np.sqrt(200) + 1e-12).all()
    assert (deviation_F <= np.std(plain, axis=0) * 1.02 + 1e-12).all()


def test_effective_inputs_predict_the_spread_of_estimates() -> None:
    # Fresh inputs each time: the spread is that of drawing inputs and of drawing probes.
    rng = np.random.default_rng(4)
    estimates = []
    for seed in range(150):
        found = estimate(random_records(1500, seed), {3: 0.9}, rng.random(1500) < 0.05, {0: 0.7, 3: 0.9})
        assert found.survival is not None
        estimates.append((found.survival[2].value, found.survival[2].effective_inputs))
    value, inputs = np.mean(estimates, axis=0)
    assert np.std([each for each, _ in estimates]) == pytest.approx(np.sqrt(value * (1 - value) / inputs), rel=0.15)
    assert 65 < inputs < 85  # about the 75 probes: of what is asked here, all is unseen without them


def test_a_small_unseen_rest_is_guessed_in_the_middle_and_a_large_one_is_not() -> None:
    # 24 of 25 inputs leave at ramp 1 at 0.9; one left at 0.5, and at 0.6 it would go on, past ramp 3 or not.
    sure, unsure = [0, 0, 0, 0], [1]
    many = RECORDS.subset(np.array(sure * 6 + unsure))
    found = estimate(many, {1: 0.5}, [False] * 25, {1: 0.6, 3: 0.7})
    assert values(found) == pytest.approx([1.0, 1.0, 1 / 25, 1 / 25, 0.5 / 25, 0.5 / 25])
    few = RECORDS.subset(np.array(sure + unsure))
    assert estimate(few, {1: 0.5}, [False] * 5, {1: 0.6, 3: 0.7}).survival is None


def test_accuracy_counts_only_inputs_with_a_true_label() -> None:
    seen = observe(RECORDS, {1: 0.75, 3: 0.8}, np.array(NONE))
    labelled = replace(seen, true_labels_N=np.array([0, 1, UNSEEN, UNSEEN], dtype=np.int32))
    found = Window(start_s=0, period_s=120, observations=labelled).estimate({1: 0.75, 3: 0.8})
    assert found.accuracy is not None
    assert found.accuracy.value == 1.0
    unlabelled = replace(seen, true_labels_N=np.full(4, UNSEEN, dtype=np.int32))
    assert Window(start_s=0, period_s=120, observations=unlabelled).estimate({}).accuracy is None


def test_a_window_gives_its_probes_as_exit_records() -> None:
    seen = observe(RECORDS, {1: 0.75}, np.array([False, True, False, True]), [120, 121, 122, 123])
    window = Window(start_s=120, period_s=120, observations=seen)
    records = window.records()
    assert (window.num_probes, records.sample_ids) == (2, ("120-1", "120-3"))
    assert records.scores_NR.tolist() == RECORDS.subset(np.array([1, 3])).scores_NR.tolist()
    assert records.times_s_N is not None
    assert records.times_s_N.tolist() == [121, 123]
    assert records.outcome({1: 0.75, 3: 0.8}).exits_N.tolist() == [3, 5]


def stream_of(times_s: list[float], **settings: float) -> ExitStream:
    stream = ExitStream(SHAPE, since_s=0, **settings)
    rows = np.arange(len(times_s)) % 4
    stream.append(observe(RECORDS.subset(rows), {1: 0.75}, np.zeros(len(times_s), dtype=bool), times_s))
    return stream


def test_windows_begin_at_multiples_of_the_period_and_only_whole_ones_are_given() -> None:
    stream = stream_of([5, 119.9, 120, 361, 130])
    found = windows(stream, now_s=480)
    assert [(window.start_s, window.num_inputs) for window in found] == [(0, 2), (120, 2), (240, 0), (360, 1)]
    assert found[0].rate_rps == 2 / 120
    assert len(windows(stream, now_s=479)) == 3
    assert found[2].estimate({1: 0.75}).survival is None


def test_a_window_that_recording_began_in_is_left_out() -> None:
    stream = ExitStream(SHAPE, since_s=100)
    stream.append(observe(RECORDS, {}, np.array(NONE), [110, 130, 140, 150]))
    assert [(window.start_s, window.num_inputs) for window in windows(stream, 240)] == [(120, 3)]


def test_old_windows_are_forgotten_and_do_not_come_back() -> None:
    stream = stream_of([5, 125, 245], keep_s=240)
    stream.forget(now_s=400)  # what began before 160 is gone
    assert [window.start_s for window in windows(stream, 400)] == [240]
    stream.append(observe(RECORDS, {}, np.array(NONE), [5, 125, 250, 260]))
    assert [window.num_inputs for window in windows(stream, 400)] == [3]


def test_a_saved_stream_is_loaded_equal(tmp_path: Path) -> None:
    stream = stream_of([5, 119, 120, 361, 130], keep_s=600)
    stream.forget(now_s=730)
    stream.save(tmp_path / "stream")
    loaded = ExitStream.load(tmp_path / "stream")
    assert (loaded.shape, loaded.period_s, loaded.keep_s, loaded.since_s) == (SHAPE, 120, 600, 240)
    for ours, theirs in zip(windows(stream, 480), windows(loaded, 480), strict=True):
        assert ours.start_s == theirs.start_s
        np.testing.assert_array_equal(ours.observations.scores_NR, theirs.observations.scores_NR)
        np.testing.assert_array_equal(ours.observations.exits_N, theirs.observations.exits_N)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        pytest.param("{", "does not hold a stream", id="not JSON"),
        pytest.param(json.dumps({"schema_version": 2}), "has schema 2, this version reads 1", id="schema"),
        pytest.param(json.dumps({"schema_version": 1}), "does not hold a stream", id="no fields"),
    ],
)
def test_files_that_hold_no_stream_are_refused(tmp_path: Path, header: str, message: str) -> None:
    np.savez(tmp_path / "s.npz", header=np.array(header))
    with pytest.raises(DataError, match=message):
        ExitStream.load(tmp_path / "s.npz")
    with pytest.raises(DataError, match="does not hold a stream"):
        ExitStream.load(tmp_path / "none.npz")


SEEN = observe(RECORDS, {1: 0.75}, np.array([True, False, False, False]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"times_s_N": np.full(4, np.nan)}, "must be finite", id="no time"),
        pytest.param(
            {"exits_N": np.array([1, 3, 1, 5])}, "at one of its active ramps", id="exit at a ramp that is off"
        ),
        pytest.param({"probe_N": np.zeros(4, dtype=bool)}, "what an input ran", id="saw too much"),
        pytest.param({"probe_N": np.ones(4, dtype=bool)}, "what an input ran", id="a probe that saw too little"),
        pytest.param({"final_labels_N": np.full(4, UNSEEN)}, "went to the end", id="no final label"),
        pytest.param({"labels_NR": np.zeros((4, 1))}, "4 rows and 2 columns", id="shape of labels"),
        pytest.param({"probe_N": np.zeros(3, dtype=bool)}, "needs 4 values", id="shape of probes"),
    ],
)
def test_observations_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(SEEN, **changes)


def test_streams_refuse_other_ramps_and_senseless_windows() -> None:
    other = StreamShape(score="entropy", num_blocks=6, ramps=(1, 3))
    with pytest.raises(DataError, match="other ramps"):
        ExitStream(SHAPE, since_s=0).append(empty(other))
    with pytest.raises(DataError, match="other ramps"):
        Observations.join(SHAPE, [empty(other)])
    with pytest.raises(DataError, match="positive length"):
        ExitStream(SHAPE, since_s=0, period_s=0)
    with pytest.raises(DataError, match="ramps must ascend"):
        StreamShape(score="entropy", num_blocks=4, ramps=(1, 3))
    with pytest.raises(DataError, match=r"no records of ramps \[2\]"):
        estimate(RECORDS, {}, NONE, {2: 0.5})


def test_estimates_become_a_history_with_missing_windows() -> None:
    asked = {1: 0.8, 3: 0.7}
    found = [
        estimate(RECORDS, {1: 0.5}, [False, True, False, False], asked),
        estimate(RECORDS, {1: 0.5}, NONE, asked),
    ]
    history = survival_history(found)
    assert history.missing_W.tolist() == [False, True]
    assert history.survival_WK[0].tolist() == [1.0, 1.0, 0.75, 0.75, 0.0, 0.0]
    with pytest.raises(DataError, match="no window says anything"):
        survival_history(found[1:])


def test_a_stream_becomes_a_forecast_of_ramps_that_are_off() -> None:
    # Twelve windows of 1,600 inputs in batches of 8; the plan runs ramp 3 alone, asked is about ramps 0 and 3.
    rng = np.random.default_rng(5)
    asked = {0: 0.7, 3: 0.9}
    stream = ExitStream(StreamShape(score="confidence", num_blocks=6, ramps=(0, 1, 3, 4)), since_s=0)
    for index in range(12):
        probe_N = np.repeat(rng.random(200) < 0.1, 8)
        times_s = index * 120 + np.sort(rng.random(1600)) * 120
        stream.append(observe(random_records(1600, seed=index), {3: 0.9}, probe_N, times_s))
    found = [window.estimate(asked) for window in windows(stream, now_s=12 * 120)]
    forecast = forecast_survival(survival_history(found))
    truth = random_records(50_000, seed=99).outcome(asked).survival
    np.testing.assert_allclose(forecast.survival_HK[0], truth, atol=0.03)
    assert [round(each.rate_rps, 2) for each in found] == [13.33] * 12
