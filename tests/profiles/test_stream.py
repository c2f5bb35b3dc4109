from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from profiles.stream import ExitStream, Observations, SmallArray, StreamShape, keys_N, sampled_N
from profiles.windows import windows

SHAPE = StreamShape(score="confidence", num_blocks=6, ramps=(1, 3))


def inputs_at(*times_s: float) -> Observations:
    """Returns inputs under a plan with only ramp 1; every other input leaves there."""
    early_N = np.arange(len(times_s)) % 2 == 0
    seen_NR = np.tile([True, False], (len(times_s), 1))
    return Observations(
        shape=SHAPE,
        times_s_N=np.array(times_s, dtype=np.float64),
        probe_N=np.zeros(len(times_s), dtype=bool),
        stayed_N=np.zeros(len(times_s), dtype=bool),
        active_NR=seen_NR,
        exits_N=np.where(early_N, 1, 5).astype(np.int16),
        scores_NR=np.where(seen_NR, np.where(early_N, 0.9, 0.2)[:, None], np.nan).astype(np.float32),
        losses_NR=np.where(seen_NR & ~early_N[:, None], 0.0, np.nan).astype(np.float32),
    )


def stream_of(*times_s: float, **settings: Any) -> ExitStream:
    stream = ExitStream(SHAPE, since_s=0, **settings)
    stream.append(inputs_at(*times_s))
    return stream


def sizes(stream: ExitStream, now_s: float) -> list[tuple[float, int]]:
    return [(window.start_s, window.num_inputs) for window in windows(stream, now_s)]


def test_forgotten_windows_do_not_come_back() -> None:
    stream = stream_of(5, 125, 245, keep_s=240)
    stream.forget(now_s=400)  # entries from before 160 are removed
    assert sizes(stream, 400) == [(240, 1)]
    stream.append(inputs_at(5, 125, 250, 260))
    assert sizes(stream, 400) == [(240, 3)]
    stream = stream_of(5, 125, 245, keep_s=240)
    stream.forget(now_s=400)
    stream.forget(now_s=100)
    assert sizes(stream, 400) == [(240, 1)]
    stream.append(inputs_at(125))
    assert sizes(stream, 400) == [(240, 1)]


LATE = inputs_at(5, 6)  # the first leaves after block 1, the second runs to the end; ramp 3 is off


def floats(*values: float) -> SmallArray:
    return np.array(values, dtype=np.float32)


PROBES = replace(
    LATE,
    probe_N=np.array([True, True]),
    scores_NR=np.array([[0.9, 0.5], [0.2, 0.5]], dtype=np.float32),
    losses_NR=np.array([[1, 0], [0, 0]], dtype=np.float32),
)
PRUNED = replace(PROBES, end_losses_N=floats(1, np.nan))
"""The first of both has pruned words."""


def test_losses_of_pruned_inputs_at_the_end_count_in_their_agreement() -> None:
    stream = ExitStream(SHAPE, since_s=0)
    stream.append(PROBES)
    stream.append(PRUNED)
    found = stream.window(0)
    assert found.end_losses_N is not None
    np.testing.assert_array_equal(found.end_losses_N, [np.nan, np.nan, 1, np.nan])
    assert found.losses_NE[:, -1].tolist() == [0, 0, 1, 0]
    assert (found.pruned_agreement, PROBES.pruned_agreement) == (0.0, None)
    records = windows(stream, 120)[0].records()
    np.testing.assert_array_equal(records.end_losses_N, [0, 0, 1, 0])
    stream = ExitStream(SHAPE, since_s=0)
    stream.append(PRUNED)
    [window] = windows(stream, 120)
    at_the_end, at_block_1 = window.estimate({}).agreement, window.estimate({1: 0.8}).agreement
    assert at_the_end is not None
    assert at_block_1 is not None
    # Without exits both are answered at the end, where the first is wrong; at ramp 1 it is wrong as well.
    assert (at_the_end.value, at_block_1.value) == (0.5, 0.5)


SAMPLED = StreamShape(score="confidence", num_blocks=3, ramps=(0, 1))


def inputs(times_s: np.ndarray, *, probe: bool = False, seed: int = 0) -> Observations:
    """Returns inputs of a plan that stays with ramp 1 on; later inputs are surer."""
    num = len(times_s)
    scores_NR = np.random.default_rng(seed).random((num, 2)).astype(np.float32)
    scores_NR[:, 1] = (times_s % 120.0) / 120.0
    if not probe:
        scores_NR[:, 0] = np.nan
    losses_NR = np.where(np.isnan(scores_NR), np.nan, 0.0).astype(np.float32)
    return Observations(
        shape=SAMPLED,
        times_s_N=times_s,
        probe_N=np.full(num, probe),
        stayed_N=np.ones(num, dtype=bool),
        active_NR=np.tile([False, True], (num, 1)),
        exits_N=np.full(num, 2, dtype=np.int16),
        scores_NR=scores_NR,
        losses_NR=losses_NR,
    )


def stream(most_of_window: int) -> ExitStream:
    return ExitStream(SAMPLED, since_s=0.0, period_s=120.0, keep_s=1200.0, most_stayed=10 * most_of_window)


def test_a_window_keeps_a_sample_of_inputs_that_stayed_and_all_probes() -> None:
    kept = stream(50)
    kept.take_in(inputs(np.arange(0.0, 120.0, 0.1)))
    kept.take_in(inputs(np.arange(0.0, 120.0, 1.0), probe=True))
    window = kept.window(0)
    assert (int(sampled_N(window).sum()), int(window.probe_N.sum())) == (50, 120)


def test_the_sample_does_not_depend_on_the_order_of_arrival() -> None:
    times_s = np.arange(0.0, 120.0, 0.05)
    at_once, bit_by_bit = stream(40), stream(40)
    at_once.take_in(inputs(times_s))
    kept_number = 0
    for part in np.random.default_rng(1).permutation(len(times_s)).reshape(-1, 60):
        kept_number += len(bit_by_bit.take_in(inputs(times_s).take(part)))
    one, other = at_once.window(0), bit_by_bit.window(0)
    assert sorted(one.times_s_N) == sorted(other.times_s_N)
    # Data that is not needed is removed long before the window ends.
    assert kept_number < len(times_s) / 4
    first, restored = stream(40), stream(40)
    for begin in range(0, len(times_s), 60):
        restored.take_in(first.take_in(inputs(times_s[begin : begin + 60])))
    assert sorted(restored.window(0).times_s_N) == sorted(first.window(0).times_s_N)


def test_early_inputs_of_a_window_are_kept_as_often_as_late_ones() -> None:
    """The mean of 20 windows' samples of 100: standard deviation 0.289 / sqrt(2000) = 0.0065 of the window."""
    means = list[float]()
    for index in range(20):
        window = stream(100)
        times_s = np.sort(np.random.default_rng(index).uniform(0.0, 120.0, 3000))
        for begin in range(0, 3000, 100):
            window.take_in(inputs(times_s[begin : begin + 100], seed=index))
        means.append(float(window.window(0).times_s_N.mean()) / 120.0)
        assert len(window.window(0)) == 100
    assert np.mean(means) == pytest.approx(0.5, abs=4 * 0.0065)


def test_in_pooled_windows_every_input_counts_the_same_whatever_its_window_kept() -> None:
    """Both windows keep 200 inputs: of 6000 in 120 s, and of 1000 in 20 s. Pooled, one is late per six early ones."""
    kept = stream(200)
    kept.take_in(inputs(np.linspace(0.0, 119.9, 6000)))
    kept.take_in(inputs(np.linspace(120.0, 139.9, 1000)))
    kept.take_in(inputs(np.array([130.0]), probe=True))
    assert [int(sampled_N(kept.window(index)).sum()) for index in (0, 1)] == [200, 200]
    pooled = kept.pooled(range(2))
    is_early_N = pooled.times_s_N < 120
    early, late = (int((sampled_N(pooled) & rows_N).sum()) for rows_N in (is_early_N, ~is_early_N))
    assert early == 200
    assert late == pytest.approx(200 / 6, abs=4 * np.sqrt(200 / 6))
    assert int(pooled.probe_N.sum()) == 1
    assert len(kept.pooled([1])) == 201


def test_inputs_of_one_request_have_different_keys() -> None:
    same_s = np.full(1000, 7.0)
    together = inputs(same_s, probe=True)
    assert len(set(keys_N(together).tolist())) == 1000
