from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from earlyexit.errors import DataError
from profiles.stream import ExitStream, Observations, StreamShape, empty
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


def test_old_windows_are_forgotten_and_do_not_come_back() -> None:
    stream = stream_of(5, 125, 245, keep_s=240)
    stream.forget(now_s=400)  # what began before 160 is gone
    assert sizes(stream, 400) == [(240, 1)]
    stream.append(inputs_at(5, 125, 250, 260))
    assert sizes(stream, 400) == [(240, 3)]


def test_what_is_forgotten_stays_so_when_the_clock_goes_back() -> None:
    stream = stream_of(5, 125, 245, keep_s=240)
    stream.forget(now_s=400)
    stream.forget(now_s=100)
    assert sizes(stream, 400) == [(240, 1)]
    stream.append(inputs_at(125))
    assert sizes(stream, 400) == [(240, 1)]


def test_a_window_is_joined_once() -> None:
    stream = stream_of(5, 6)
    assert stream.window(0) is stream.window(0)
    stream.append(inputs_at(7))
    joined = stream.window(0)
    assert joined.times_s_N.tolist() == [5, 6, 7]
    assert windows(stream, 120)[0].observations is joined


def test_streams_refuse_other_ramps() -> None:
    other = StreamShape(score="entropy", num_blocks=6, ramps=(1, 3))
    with pytest.raises(DataError, match="other ramps"):
        ExitStream(SHAPE, since_s=0).append(empty(other))
    with pytest.raises(DataError, match="other ramps"):
        Observations.join(SHAPE, [empty(other)])
    with pytest.raises(DataError, match="ramps must ascend"):
        StreamShape(score="entropy", num_blocks=4, ramps=(1, 3))
    with pytest.raises(DataError, match="a score is one of entropy, confidence"):
        replace(SHAPE, score="margin")  # type: ignore[arg-type]  # what a caller without types may pass


def test_senseless_windows_are_refused() -> None:
    senseless: tuple[tuple[dict[str, Any], str], ...] = (
        ({"period_s": 0.0}, "positive length"),
        ({"period_s": np.nan}, "positive length"),
        ({"keep_s": 60.0}, "at most the 60.0 s"),
        ({"keep_s": np.inf}, "at most the inf s"),
        ({"since_s": np.inf}, "cannot begin at inf"),
        ({"since_s": np.nan}, "cannot begin at nan"),
    )
    for settings, message in senseless:
        with pytest.raises(DataError, match=message):
            ExitStream(SHAPE, **({"since_s": 0.0} | settings))


def test_times_beyond_all_windows_are_refused() -> None:
    with pytest.raises(DataError, match="too large to be told apart"):
        stream_of(1e300)


LATE = inputs_at(5, 6)  # the first leaves after block 1, the second goes to the end; ramp 3 is off


def test_an_input_that_stayed_is_seen_at_all_its_ramps_and_at_the_end() -> None:
    scores_NR = np.array([[0.9, 0.5], [0.2, 0.5]], dtype=np.float32)
    seen = replace(
        LATE,
        stayed_N=np.array([True, True]),
        active_NR=np.ones((2, 2), dtype=bool),
        scores_NR=scores_NR,
        losses_NR=np.zeros((2, 2), dtype=np.float32),
    )
    assert seen.would_see_NR.all()
    assert seen.at_end_N.all()
    assert seen.would_end_N.all()
    with pytest.raises(DataError, match="an input leaves at one of its active ramps or after the last block"):
        replace(seen, exits_N=np.array([2, 5], dtype=np.int16))
    with pytest.raises(DataError, match="scores must be there for what an input ran"):
        replace(seen, stayed_N=np.array([False, True]))


UNSEEN: tuple[tuple[dict[str, Any], str], ...] = (
    ({"losses_NR": [[0, np.nan], [0, np.nan]]}, "losses must be there for"),
    ({"losses_NR": [[np.nan, np.nan]] * 2}, "losses must be there for"),
    ({"losses_NR": [[np.nan, np.nan], [2, np.nan]]}, "numbers from 0 to 1"),
    ({"losses_NR": [[np.nan, np.nan], [0.5, np.nan]]}, "to be 0 or 1"),
    ({"true_losses_NE": [[0, np.nan]] * 2}, "needs 2 rows and 3 columns"),
    ({"true_losses_NE": [[0, 0, np.nan]] * 2}, "against the truth must be"),
)


def test_losses_of_what_was_not_seen_are_refused() -> None:
    for changes, message in UNSEEN:
        arrays: dict[str, Any] = {name: np.array(rows, dtype=np.float32) for name, rows in changes.items()}
        with pytest.raises(DataError, match=message):
            replace(LATE, **arrays)
