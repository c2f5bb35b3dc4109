from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from profiles.forecast import forecast_survival
from profiles.stream import ExitStream, Observations, StreamShape
from profiles.windows import Window, survival_history, windows
from tests.profiles.windows_of import NONE, RECORDS, SHAPE, estimate, observe, random_records, worth

SLIGHT = StreamShape(score="confidence", num_blocks=3, ramps=(0,))


def unplanned(go_on_N: npt.NDArray[np.bool_], probe_N: npt.NDArray[np.bool_], start_s: float = 0) -> Window:
    """A window under a plan without ramps: of its one ramp, at 0.5, only the probes tell who would go on."""
    num_inputs = len(go_on_N)
    return Window(
        start_s=start_s,
        period_s=120,
        observations=Observations(
            shape=SLIGHT,
            times_s_N=np.full(num_inputs, start_s),
            probe_N=probe_N,
            stayed_N=np.zeros(num_inputs, dtype=bool),
            active_NR=np.zeros((num_inputs, 1), dtype=bool),
            exits_N=np.full(num_inputs, 2, dtype=np.int16),
            scores_NR=np.where(probe_N, np.where(go_on_N, 0.1, 0.9), np.nan).astype(np.float32)[:, None],
            losses_NR=np.where(probe_N, 0, np.nan).astype(np.float32)[:, None],
        ),
    )


@pytest.mark.parametrize("going", [0, 1, 10, 19, 20])
def test_probes_alone_are_worth_their_number_whatever_they_did(going: int) -> None:
    found = unplanned(np.arange(1000) < going, np.arange(1000) < 20).estimate({0: 0.5})
    assert found.survival is not None
    assert found.survival[1].value == pytest.approx(going / 20)
    assert found.survival[1].effective_inputs == pytest.approx(20)
    assert worth(found) == pytest.approx([20, 1000 * going / 20])  # nobody asks whether they leave after block 1


@pytest.mark.parametrize("go_on", [0.995, 0.98, 0.02])
def test_windows_of_few_probes_together_show_no_bias(go_on: float) -> None:
    rng = np.random.default_rng(6)
    live = [unplanned(rng.random(1200) < go_on, rng.random(1200) < 0.02, start_s=120.0 * index) for index in range(200)]
    history = survival_history([window.estimate({0: 0.5}) for window in live])
    pooled = history.go_on_WR[:, 0].sum() / history.reach_WR[:, 0].sum()
    # 200 windows of 24 probes: three standard errors.
    assert pooled == pytest.approx(go_on, abs=3 * np.sqrt(go_on * (1 - go_on) / 4800))
    forecast = forecast_survival(history)
    assert forecast.survival_HK[0, 1] == pytest.approx(go_on, abs=4 * np.sqrt(go_on * (1 - go_on) / 4800))


def test_windows_whose_probes_are_of_one_mind_count_no_more_than_others() -> None:
    # Ramp 1 of the plan lets out four fifths, of which nine tenths would pass ramp 3; what it passes leaves there.
    rng = np.random.default_rng(8)
    found = []
    for _ in range(400):
        out_N = rng.random(400) < 0.8
        scores_NR = np.stack([np.where(out_N, 0.6, 0.1), np.where(out_N & (rng.random(400) < 0.9), 0.1, 0.9)], axis=1)
        records = replace(RECORDS.subset(np.zeros(400, dtype=np.int64)), scores_NR=scores_NR.astype(np.float32))
        found.append(estimate(records, {1: 0.5, 3: 0.5}, rng.random(400) < 0.02, {1: 0.8, 3: 0.5}))
    history = survival_history(found)
    pooled = history.go_on_WR[:, 3].sum() / history.reach_WR[:, 3].sum()
    # Some six probes a window: three standard errors. Weighed by its own probes each, the windows say 0.75.
    assert pooled == pytest.approx(0.8 * 0.9, abs=0.015)


def stream_of(times_s: list[float], **settings: Any) -> ExitStream:
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


def test_rates_are_by_the_second() -> None:
    found = windows(stream_of([5, 59, 60], period_s=60), now_s=120)
    assert [window.rate_rps for window in found] == [2 / 60, 1 / 60]


def test_estimates_become_a_history_with_missing_windows() -> None:
    asked = {1: 0.8, 3: 0.7}
    found = [
        estimate(RECORDS, {1: 0.5}, [False, True, False, False], asked),
        estimate(RECORDS, {1: 0.5}, NONE, asked),
    ]
    history = survival_history(found)
    assert history.missing_W.tolist() == [False, True]
    assert history.survival_WK[0].tolist() == [1.0, 1.0, 0.75, 0.75, 0.0, 0.0]


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
