from __future__ import annotations

import numpy as np
import pytest

from offramp.load.arrivals import parse_arrivals
from offramp.load.processes import Modulated
from tests.offramp.load.drawn import draw, per_second

MMPP = "mmpp:100,peak=300,calm_s=100,burst_s=20"


def test_equal_gaps_end_before_the_end_and_higher_rates_draw_closer_points() -> None:
    assert draw("uniform:4", 1.0).tolist() == [0.0, 0.25, 0.5, 0.75]
    assert draw("uniform:4", 1.1).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert draw("uniform:0.1", 1.0).tolist() == [0.0]
    slow_s_N, fast_s_N = draw("poisson:10", 100.0), draw("poisson:20", 50.0)
    np.testing.assert_allclose(slow_s_N, 2 * fast_s_N)


def test_poisson_and_gamma_counts_are_those_of_their_rates() -> None:
    arrivals_s_N = draw("poisson:1000", 100.0)
    assert abs(len(arrivals_s_N) - 100_000) < 3 * 100_000**0.5
    gaps_s = np.diff(arrivals_s_N)
    assert np.mean(gaps_s) == pytest.approx(1e-3, rel=0.01)
    assert np.std(gaps_s) == pytest.approx(1e-3, rel=0.01)
    counts = per_second(arrivals_s_N, 100)
    assert np.var(counts) == pytest.approx(1000, rel=0.4)  # of 100 counts: three standard deviations are 42 %
    rng = np.random.default_rng(0)
    bursty = parse_arrivals("gamma:10,cv=4")
    # One standard deviation of the mean of 2000 counts is at most 0.28; a first gap like any other would give 17.5.
    assert np.mean([len(bursty.draw(1.0, rng)) for _ in range(2000)]) == pytest.approx(10, abs=0.85)


@pytest.mark.parametrize("cv", [0.5, 2.0])
def test_gamma_gaps_have_the_coefficient_of_variation_asked_for(cv: float) -> None:
    gaps_s = np.diff(draw(f"gamma:1000,cv={cv}", 200.0))
    assert np.mean(gaps_s) == pytest.approx(1e-3, rel=0.02)
    assert np.std(gaps_s) / np.mean(gaps_s) == pytest.approx(cv, rel=0.02)


def test_a_modulated_process_is_in_either_state_for_its_share_of_the_time() -> None:
    process = Modulated(mean_per_s=1000, peak_per_s=5000, calm_s=10, burst_s=1)
    assert process.calm_per_s == 600  # 10 s of 600/s and 1 s of 5000/s are 11,000 in 11 s
    counts = np.array(per_second(draw(MMPP, 40_000.0), 40_000))  # 60/s for 100 s, 300/s for 20 s
    bursting = counts > 150
    assert counts.mean() == pytest.approx(100, rel=0.1)  # some 333 bursts: one standard deviation is 4 %
    assert bursting.mean() == pytest.approx(1 / 6, abs=0.03)
    assert np.median(counts[~bursting]) == pytest.approx(60, abs=1)
    assert np.median(counts[bursting]) == pytest.approx(300, abs=3)
    assert np.diff(bursting.astype(int)).clip(0).sum() == pytest.approx(40_000 / 120, rel=0.2)


@pytest.mark.parametrize("spec", ["poisson:50", "uniform:50", "gamma:50,cv=3", MMPP])
def test_equal_seeds_give_equal_arrivals_and_others_do_not(spec: str) -> None:
    np.testing.assert_array_equal(draw(spec, 30.0, seed=1), draw(spec, 30.0, seed=1))
    assert (draw(spec, 30.0, seed=1).tolist() == draw(spec, 30.0, seed=2).tolist()) == spec.startswith("uniform")
