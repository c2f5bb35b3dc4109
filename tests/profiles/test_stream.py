from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from profiles.stream import ExitStream, Observations, SmallArray, StreamShape
from profiles.windows import windows

SHAPE = StreamShape(score="confidence", num_blocks=6, ramps=(1, 3))


def inputs_at(*times_s: float) -> Observations:
    """Inputs under a plan with ramp 1 alone: every other one leaves there."""
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


def test_old_windows_are_forgotten_and_do_not_come_back_whatever_the_clock_does() -> None:
    stream = stream_of(5, 125, 245, keep_s=240)
    stream.forget(now_s=400)  # what began before 160 is gone
    assert sizes(stream, 400) == [(240, 1)]
    stream.append(inputs_at(5, 125, 250, 260))
    assert sizes(stream, 400) == [(240, 3)]
    stream = stream_of(5, 125, 245, keep_s=240)
    stream.forget(now_s=400)
    stream.forget(now_s=100)
    assert sizes(stream, 400) == [(240, 1)]
    stream.append(inputs_at(125))
    assert sizes(stream, 400) == [(240, 1)]


LATE = inputs_at(5, 6)  # the first leaves after block 1, the second goes to the end; ramp 3 is off


def floats(*values: float) -> SmallArray:
    return np.array(values, dtype=np.float32)


PROBES = replace(
    LATE,
    probe_N=np.array([True, True]),
    scores_NR=np.array([[0.9, 0.5], [0.2, 0.5]], dtype=np.float32),
    losses_NR=np.array([[1, 0], [0, 0]], dtype=np.float32),
)
PRUNED = replace(PROBES, end_losses_N=floats(1, np.nan))
"""The first of both lost words."""


def test_what_the_end_costs_is_kept_where_words_were_pruned_and_counted_by_agreement() -> None:
    stream = ExitStream(SHAPE, since_s=0)
    stream.append(PROBES)
    stream.append(PRUNED)
    found = stream.window(0)
    assert found.end_losses_N is not None
    np.testing.assert_array_equal(found.end_losses_N, [np.nan, np.nan, 1, np.nan])
    assert found.losses_NE[:, -1].tolist() == [0, 0, 1, 0]
    assert (found.pruned_agreement, PROBES.pruned_agreement) == (0.0, None)
    records = windows(stream, 120)[0].records()
    assert records.end_losses_N is not None
    assert records.end_losses_N.tolist() == [0, 0, 1, 0]
    stream = ExitStream(SHAPE, since_s=0)
    stream.append(PRUNED)
    [window] = windows(stream, 120)
    at_the_end, at_block_1 = window.estimate({}).agreement, window.estimate({1: 0.8}).agreement
    assert at_the_end is not None
    assert at_block_1 is not None
    # Without exits both are answered at the end, of which the first is wrong; at ramp 1 it is wrong as well.
    assert (at_the_end.value, at_block_1.value) == (0.5, 0.5)
