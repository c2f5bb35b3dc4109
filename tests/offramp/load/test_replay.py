from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.load.arrivals import CountReplay, Modulated, StampReplay, parse_arrivals, read_trace
from tests.data import data_folder
from tests.offramp.load.scripted_server import draw, per_second, trace


def test_counts_per_second_or_minute_are_spread_evenly(tmp_path: Path) -> None:
    counts = per_second(draw(trace(tmp_path, "0 400 0 10000 0"), 5.0), 5)
    assert [counts[0], counts[2], counts[4]] == [0, 0, 0]
    assert abs(counts[1] - 400) < 3 * 20
    assert abs(counts[3] - 10_000) < 3 * 100
    within_s = draw(trace(tmp_path, "20000 20000"), 2.0) % 1
    assert np.histogram(within_s, bins=4, range=(0, 1))[0] == pytest.approx([10_000] * 4, rel=0.03)
    arrivals_s_N = draw(trace(tmp_path, "f,minute_1,minute_2\na,0,6000\nb,0,6000\n"), 120.0)
    assert arrivals_s_N.min() > 60
    assert abs(len(arrivals_s_N) - 12_000) < 3 * 110


def test_a_rate_is_the_mean_of_the_window_and_counts_repeat(tmp_path: Path) -> None:
    spec = trace(tmp_path, "10 30 9999") + ",rate=10000"
    counts = per_second(draw(spec, 2.0), 2)
    assert abs(counts[0] - 5_000) < 3 * 71
    assert abs(counts[1] - 15_000) < 3 * 123
    assert abs(len(draw(spec + ",from=1", 1.0)) - 10_000) < 3 * 100
    assert abs(len(draw(spec + ",from=1.5", 0.25)) - 2_500) < 3 * 50
    assert abs(len(draw(trace(tmp_path, "1 " * 4000) + ",rate=0.25", 4000.0)) - 1000) < 3 * 32
    counts = per_second(draw(trace(tmp_path, "0 1000") + ",from=1", 5.0), 5)
    assert [counts[1], counts[3]] == [0, 0]
    assert min(counts[0], counts[2], counts[4]) > 1000 - 3 * 32


def test_counts_are_replayed_from_a_second_of_the_file(tmp_path: Path) -> None:
    process, notes = parse_arrivals(trace(tmp_path, "1 2 3" + " 0" * 60 + " 4 0 5") + ",from=64.5")
    assert isinstance(process, CountReplay)
    assert (len(process.counts_B), process.start_s) == (66, 64.5)
    assert notes == (
        f"{tmp_path / 'trace'}: read as 66 counts, requests per second (times: reads them as the time of each request)",
        "the trace is 66 s long, and repeats if more is drawn",
    )


def test_whole_numbers_are_counts_or_times_as_the_caller_says(tmp_path: Path) -> None:
    spec = trace(tmp_path, "0\n1000\n3000\n").removeprefix("trace:")
    (counted, counted_notes), (_, timed_notes) = parse_arrivals(f"counts:{spec}"), parse_arrivals(f"times:{spec}")
    assert isinstance(counted, CountReplay)
    assert counted_notes[0] == f"{spec}: read as 3 counts, requests per second"
    assert timed_notes[0] == f"{spec}: read as the times of 3 requests"
    assert draw(f"times:{spec}", 3000.0).tolist() == [0.0, 1000.0]
    spec = trace(tmp_path, "0\n1000\n0\n1000").removeprefix("trace:")
    of_counts = per_second(draw(f"counts:{spec},rate=250", 4.0), 4)
    assert (of_counts[0], of_counts[2]) == (0, 0)  # bursts stay where they were, and as long
    spec = trace(tmp_path, "0\n1\n3\n6").removeprefix("trace:")
    assert draw(f"times:{spec},rate=1", 4.0).tolist() == [0.0, 0.5, 1.5, 3.0]  # the round of 8 s in 4 s


def test_recorded_times_are_replayed_and_repeat_after_a_mean_interval(tmp_path: Path) -> None:
    spec = trace(tmp_path, "0.0\n1.0\n3.0\n")  # mean gap 1.5 s, so the next round begins at 4.5 s
    assert draw(spec, 3.0).tolist() == [0.0, 1.0]
    assert draw(spec, 6.0).tolist() == [0.0, 1.0, 3.0, 4.5, 5.5]
    assert draw(spec + ",from=1", 3.6).tolist() == [0.0, 2.0, 3.5]
    spec = trace(tmp_path, "2.0\n4.0\n")
    assert draw(spec, 7.0).tolist() == [2.0, 4.0, 6.0]
    dates = trace(tmp_path, "1700000000.0\n1700000001.5\n")
    assert draw(dates + ",from=1700000000", 2.0).tolist() == [0.0, 1.5]


def test_a_rate_fits_recorded_arrivals_and_names_may_hold_commas(tmp_path: Path) -> None:
    spec = trace(tmp_path, "0.0\n1.0\n3.0\n")
    assert draw(spec + ",rate=2", 1.0).tolist() == pytest.approx([0, 1 / 3])  # the window ends where the third is
    # Seconds 1, 3, 4.5 and 5.5 of the trace, up to the next at 7.5: 6.5 s become 1 s.
    assert draw(spec + ",rate=4,from=1", 1.0).tolist() == pytest.approx([0, 2 / 6.5, 3.5 / 6.5, 4.5 / 6.5])
    assert len(draw(spec + ",rate=1000", 60.0)) == 60_000
    assert draw(trace(tmp_path, "0.0\n1.0\n1.0\n1.0\n4.0\n") + ",rate=2", 1.0).tolist() == [0.0, 0.25]
    process, _ = parse_arrivals(" " + trace(tmp_path, "1 2 3", name="a,b.txt") + ",rate=5 ")
    assert isinstance(process, CountReplay)
    assert process.rate_per_s == 5.0


@settings(deadline=None)  # a shared machine
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any),
    start_s=st.floats(0, 8),
    duration_s=st.floats(8, 50),
    rate_per_s=st.none() | st.floats(1, 50),
)
def test_replayed_counts_ascend_within_the_duration_and_skip_empty_seconds(
    counts: list[int], start_s: float, duration_s: float, rate_per_s: float | None
) -> None:
    replay = CountReplay(counts_B=np.array(counts, dtype=np.float64), bin_s=1.0, start_s=start_s, rate_per_s=rate_per_s)
    arrivals_s_N = replay.draw(duration_s, np.random.default_rng(0))
    assert (np.diff(arrivals_s_N) >= 0).all()
    assert ((arrivals_s_N >= 0) & (arrivals_s_N < duration_s)).all()
    middle_N = (arrivals_s_N + start_s) % 1
    clear_N = (middle_N > 1e-6) & (middle_N < 1 - 1e-6)  # which second an edge belongs to is a matter of rounding
    seconds_N = (arrivals_s_N + start_s)[clear_N].astype(np.int64) % len(counts)
    assert all(counts[second] for second in seconds_N)


@settings(deadline=None)  # a shared machine
@given(
    hundredths=st.lists(st.integers(0, 1000), min_size=2, max_size=8).filter(lambda found: len(set(found)) > 1),
    start_s=st.floats(0, 12),
    duration_s=st.floats(30, 50),
    rate_per_s=st.none() | st.floats(1, 50),
)
def test_replayed_seconds_ascend_within_the_duration_and_are_as_many_as_asked_for(
    hundredths: list[int], start_s: float, duration_s: float, rate_per_s: float | None
) -> None:
    replay = StampReplay(arrivals_s_N=np.sort([0, *hundredths]) / 100, start_s=start_s, rate_per_s=rate_per_s)
    arrivals_s_N = replay.draw(duration_s, np.random.default_rng(0))
    assert (np.diff(arrivals_s_N) >= 0).all()
    assert ((arrivals_s_N >= 0) & (arrivals_s_N < duration_s)).all()
    if rate_per_s is not None:
        assert len(arrivals_s_N) == round(rate_per_s * duration_s)


FUNCTIONS = "HashFunction,HashApp,minute_1,minute_2\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def counts(folder: Path, text: str) -> tuple[list[float], float]:
    trace = read_trace(write(folder, text))
    assert isinstance(trace, CountReplay)
    return trace.counts_B.tolist(), trace.bin_s


def seconds(folder: Path, text: str) -> list[float]:
    trace = read_trace(write(folder, text))
    assert isinstance(trace, StampReplay)
    return list(trace.arrivals_s_N)


def real(name: str) -> Path:
    folder = data_folder()
    if folder is None or not (folder / "traces" / name).is_file():
        pytest.skip(f"traces/{name} is not in OFFRAMP_DATA")
    return folder / "traces" / name


@pytest.mark.parametrize("text", ["3 0 12 1", "3\n0\n12\n1\n", "\ufeff3 0\n\n 12\t1 \n", "3.0 0 12 1"])
def test_whole_numbers_are_requests_per_second(tmp_path: Path, text: str) -> None:
    assert counts(tmp_path, text) == ([3.0, 0.0, 12.0, 1.0], 1.0)


def test_a_decimal_point_makes_all_numbers_times(tmp_path: Path) -> None:
    assert seconds(tmp_path, "0.25\n1\n1\n\n3e0\n") == [0.25, 1.0, 1.0, 3.0]
    path = tmp_path / "no_ending"
    path.write_bytes(gzip.compress(b"1 2 3"))
    zipped = read_trace(path)
    assert isinstance(zipped, CountReplay)
    assert zipped.counts_B.tolist() == [1.0, 2.0, 3.0]


def test_counts_of_functions_are_summed(tmp_path: Path) -> None:
    assert counts(tmp_path, FUNCTIONS + "f,a,60,0\n\ng,a,1,2\n") == ([61.0, 2.0], 60.0)
    assert counts(tmp_path, "HashFunction,1,2\nf,60,0\n") == ([60.0, 0.0], 60.0)  # the columns as first published


def test_the_twitter_trace_is_the_one_described() -> None:
    trace = read_trace(real("twitter_per_second_infadapter.txt.gz"))
    assert isinstance(trace, CountReplay)
    per_second_S = trace.counts_B
    assert len(per_second_S) == 1_899_061
    assert (per_second_S.mean(), per_second_S.max()) == (pytest.approx(63.6, abs=0.05), 388)
    assert per_second_S[1_436_400:1_440_000].mean() == pytest.approx(59.9, abs=0.05)


MMPP = "mmpp:100,peak=300,calm_s=100,burst_s=20"


def test_uniform_arrivals_end_before_the_duration() -> None:
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
    bursty = parse_arrivals("gamma:10,cv=4")[0]
    # One standard deviation of the mean of 2000 counts is at most 0.28; a first gap like any other would give 17.5.
    assert np.mean([len(bursty.draw(1.0, rng)) for _ in range(2000)]) == pytest.approx(10, abs=0.85)


@pytest.mark.parametrize("cv", [0.5, 2.0])
def test_gamma_gaps_have_the_coefficient_of_variation_asked_for(cv: float) -> None:
    gaps_s = np.diff(draw(f"gamma:1000,cv={cv}", 200.0))
    assert np.mean(gaps_s) == pytest.approx(1e-3, rel=0.02)
    assert np.std(gaps_s) / np.mean(gaps_s) == pytest.approx(cv, rel=0.02)


def test_a_modulated_process_spends_its_share_of_time_in_each_state() -> None:
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
