from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from earlyexit.errors import InputError
from offramp.load.arrivals import Modulated, parse_arrivals, unit_points
from tests.offramp.load.drawn import draw, per_second, trace

MMPP = "mmpp:100,peak=300,calm_s=100,burst_s=20"


def test_equal_gaps_begin_at_0_and_end_before_the_end() -> None:
    assert draw("uniform:4", 1.0).tolist() == [0.0, 0.25, 0.5, 0.75]
    assert draw("uniform:4", 1.1).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert draw("uniform:0.1", 1.0).tolist() == [0.0]


def test_poisson_counts_and_gaps_are_those_of_its_rate() -> None:
    arrivals_s_N = draw("poisson:1000", 100.0)
    assert abs(len(arrivals_s_N) - 100_000) < 3 * 100_000**0.5
    gaps_s = np.diff(arrivals_s_N)
    assert np.mean(gaps_s) == pytest.approx(1e-3, rel=0.01)
    assert np.std(gaps_s) == pytest.approx(1e-3, rel=0.01)
    counts = per_second(arrivals_s_N, 100)
    assert np.var(counts) == pytest.approx(1000, rel=0.4)  # of 100 counts: three standard deviations are 42 %


@pytest.mark.parametrize("cv", [0.5, 2.0])
def test_gamma_gaps_have_the_coefficient_of_variation_asked_for(cv: float) -> None:
    gaps_s = np.diff(draw(f"gamma:1000,cv={cv}", 200.0))
    assert np.mean(gaps_s) == pytest.approx(1e-3, rel=0.02)
    assert np.std(gaps_s) / np.mean(gaps_s) == pytest.approx(cv, rel=0.02)


def test_gamma_arrivals_have_their_rate_in_short_windows_too() -> None:
    rng = np.random.default_rng(0)
    bursty = parse_arrivals("gamma:10,cv=4")
    # One standard deviation of the mean of 2000 counts is at most 0.28; a first gap like any other would give 17.5.
    assert np.mean([len(bursty.draw(1.0, rng)) for _ in range(2000)]) == pytest.approx(10, abs=0.85)


def test_the_calm_rate_makes_the_mean_come_out() -> None:
    process = Modulated(mean_per_s=1000, peak_per_s=5000, calm_s=10, burst_s=1)
    assert process.calm_per_s == 600  # 10 s of 600/s and 1 s of 5000/s are 11,000 in 11 s


def test_a_modulated_process_is_in_either_state_for_its_share_of_the_time() -> None:
    counts = np.array(per_second(draw(MMPP, 40_000.0), 40_000))  # 60/s for 100 s, 300/s for 20 s
    bursting = counts > 150
    assert counts.mean() == pytest.approx(100, rel=0.1)  # some 333 bursts: one standard deviation is 4 %
    assert bursting.mean() == pytest.approx(1 / 6, abs=0.03)
    assert np.median(counts[~bursting]) == pytest.approx(60, abs=1)
    assert np.median(counts[bursting]) == pytest.approx(300, abs=3)
    assert np.diff(bursting.astype(int)).clip(0).sum() == pytest.approx(40_000 / 120, rel=0.2)


def test_a_modulated_process_may_be_silent_between_bursts() -> None:
    arrivals_s_N = draw("mmpp:100,peak=600,calm_s=10,burst_s=2", 1000.0)
    assert np.diff(arrivals_s_N).max() > 10
    assert len(arrivals_s_N) == pytest.approx(100_000, rel=0.3)


@pytest.mark.parametrize("spec", ["poisson:50", "uniform:50", "gamma:50,cv=3", MMPP])
def test_equal_seeds_give_equal_arrivals_and_others_do_not(spec: str) -> None:
    np.testing.assert_array_equal(draw(spec, 30.0, seed=1), draw(spec, 30.0, seed=1))
    assert (draw(spec, 30.0, seed=1).tolist() == draw(spec, 30.0, seed=2).tolist()) == spec.startswith("uniform")


def test_a_higher_rate_draws_the_same_points_closer_together() -> None:
    slow_s_N, fast_s_N = draw("poisson:10", 100.0), draw("poisson:20", 50.0)
    np.testing.assert_allclose(slow_s_N, 2 * fast_s_N)


def test_points_go_on_where_the_first_draw_falls_short() -> None:
    halves = unit_points(100.0, lambda num: np.full(num, 0.5))  # 100 + 40 + 16 at first, which reach 78
    assert halves.tolist() == [0.5 * k for k in range(1, 200)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param("posson:9", "no such process 'posson'; allowed: poisson:RATE, uniform:RATE", id="process"),
        pytest.param("", "no such process ''", id="nothing"),
        pytest.param("poisson", "its rate is ''; a number above 0", id="no rate"),
        pytest.param("poisson:fast", "its rate is 'fast'", id="word"),
        pytest.param("poisson:0", "its rate is '0'", id="zero"),
        pytest.param("poisson:-5", "its rate is '-5'", id="negative"),
        pytest.param("uniform:nan", "its rate is 'nan'", id="nan"),
        pytest.param("uniform:inf", "its rate is 'inf'", id="infinite"),
        pytest.param("poisson:5,cv=2", "no such key 'cv'; allowed: poisson:RATE", id="key of another"),
        pytest.param("poisson:5,2", "its rate is '5,2'", id="two rates"),
        pytest.param("gamma:5", "cv= is missing", id="missing key"),
        pytest.param("gamma:5,cv=0", "cv is '0'; a number above 0", id="cv of 0"),
        pytest.param("gamma:5,cv=1000", "cv=1000; allowed: 0.01 to 100", id="cv too high"),
        pytest.param("gamma:5,cv=1,cv=2", "cv= is given twice", id="twice"),
        pytest.param("mmpp:5,peak=9,calm_s=1", "burst_s= is missing", id="missing length"),
        pytest.param(
            "mmpp:1000,peak=12000,calm_s=10,burst_s=1", "above the mean and at most 11000/s", id="calm below 0"
        ),
        pytest.param("mmpp:1000,peak=900,calm_s=10,burst_s=1", "above the mean and at most 11000/s", id="low peak"),
        pytest.param("trace:", "the file is missing", id="no file"),
        pytest.param("trace:gone.txt", "gone.txt: no such file", id="file not there"),
    ],
)
def test_words_that_say_no_arrivals_are_refused_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_arrivals(spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        pytest.param("1 2", ",rate=0", "rate is '0'; a number above 0", id="rate"),
        pytest.param("1 2", ",from=-1", "from='-1'; a second of the trace", id="negative from"),
        pytest.param("1 2", ",from=nan", "from='nan'; a second of the trace", id="nan from"),
        pytest.param("1 2", ",from=2", "from=2 is beyond the trace's 2 s", id="from beyond counts"),
        pytest.param("0.5\n1.5", ",from=1.6", "from=1.6 is beyond the trace's 1.5 s", id="from beyond seconds"),
        pytest.param("1 2", ",to=2", "no such key 'to'", id="key"),
        pytest.param("1 2", ",gaps=1", "gaps='1'; allowed: cut, keep", id="gaps"),
        pytest.param("0.5\n1.5", ",gaps=keep", "gaps= is for counts per second", id="gaps of seconds"),
        pytest.param("f,minute_1\na,3", ",gaps=cut", "gaps= is for counts per second", id="gaps of minutes"),
    ],
)
def test_wrong_keys_of_a_trace_are_refused(tmp_path: Path, text: str, options: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_arrivals(trace(tmp_path, text) + options)
    assert message in str(caught.value)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_duration_must_be_finite_and_above_0(duration_s: float) -> None:
    with pytest.raises(InputError, match="a finite one above 0 is needed"):
        draw("poisson:5", duration_s)


@pytest.mark.parametrize(
    "spec", ["poisson:3e6", "uniform:3e6", "gamma:3e6,cv=2", "mmpp:3e6,peak=4e6,calm_s=10,burst_s=1"]
)
def test_more_arrivals_than_fit_are_refused_before_they_are_drawn(spec: str) -> None:
    with pytest.raises(InputError, match=r"about 3e\+08 arrivals in one draw; at most 200,000,000 are drawn"):
        draw(spec, 100.0)


def test_more_changes_of_state_than_fit_are_refused_too() -> None:
    with pytest.raises(InputError, match="changes between calm and burst in one draw"):
        draw("mmpp:1,peak=2,calm_s=1e-9,burst_s=1e-9", 100.0)
