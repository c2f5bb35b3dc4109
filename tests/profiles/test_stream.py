from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from earlyexit.errors import DataError
from profiles.stream import ExitStream, Observations, StreamShape, empty
from profiles.windows import windows
from tests.profiles.broken_files import broken

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


def stream_of(*times_s: float, **settings: float) -> ExitStream:
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


def test_forgotten_windows_are_not_kept_in_memory_when_late_inputs_come(tmp_path: Path) -> None:
    stream = stream_of(5, 125, 245, keep_s=240)
    stream.forget(now_s=400)
    stream.append(inputs_at(5, 125))
    stream.save(tmp_path / "s.npz")
    with np.load(tmp_path / "s.npz") as file:
        assert file["times_s_N"].tolist() == [245]


def test_a_window_is_joined_once() -> None:
    stream = stream_of(5, 6)
    assert stream.window(0) is stream.window(0)
    stream.append(inputs_at(7))
    joined = stream.window(0)
    assert joined.times_s_N.tolist() == [5, 6, 7]
    assert windows(stream, 120)[0].observations is joined


def test_a_saved_stream_is_loaded_equal(tmp_path: Path) -> None:
    stream = stream_of(5, 119, 120, 361, 130, keep_s=600)
    stream.forget(now_s=730)
    stream.save(tmp_path / "stream")
    loaded = ExitStream.load(tmp_path / "stream")
    assert (loaded.shape, loaded.period_s, loaded.keep_s, loaded.since_s) == (SHAPE, 120, 600, 0)
    assert sizes(loaded, 480) == sizes(stream, 480) == [(240, 0), (360, 1)]
    for ours, theirs in zip(windows(stream, 480), windows(loaded, 480), strict=True):
        np.testing.assert_array_equal(ours.observations.scores_NR, theirs.observations.scores_NR)
        np.testing.assert_array_equal(ours.observations.exits_N, theirs.observations.exits_N)


def test_no_window_is_lost_between_saving_and_loading(tmp_path: Path) -> None:
    stream = stream_of(0.05, 0.35, period_s=0.1, keep_s=1.0)
    stream.forget(now_s=1.25)  # 3 * 0.1 / 0.1 is a little above 3
    stream.save(tmp_path / "s.npz")
    assert ExitStream.load(tmp_path / "s.npz").whole_windows(0.45) == stream.whole_windows(0.45) == range(3, 4)


HEADER: dict[str, Any] = {
    "schema_version": 4,
    "score": "confidence",
    "num_blocks": 6,
    "ramps": [1, 3],
    "period_s": 120.0,
    "keep_s": 7200.0,
    "since_s": 0.0,
    "first_window": 0,
}


def write(path: Path, header: str, **changes: npt.NDArray[Any]) -> None:
    """A stream's file with another header, or some arrays changed."""
    stream_of(5, 130).save(path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files if name != "header"} | changes
    np.savez(path, header=np.array(header), **arrays)


def test_a_file_is_what_the_next_test_changes(tmp_path: Path) -> None:
    write(tmp_path / "s.npz", json.dumps(HEADER))
    assert sizes(ExitStream.load(tmp_path / "s.npz"), 240) == [(0, 1), (120, 1)]


WRONG_HEADERS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"schema_version": 5}, "has schema 5, this version reads 4, 3, 2, 1"),
    ({"score": "margin"}, "does not hold a stream .* score: "),
    ({"num_blocks": 6.0}, "num_blocks: "),
    ({"num_blocks": 3}, "ramps must ascend"),
    ({"ramps": [1, 3.0]}, r"ramps\.1: "),
    ({"ramps": [True, 3]}, r"ramps\.0: "),
    ({"ramps": [1]}, "2 rows and 1 columns"),
    ({"since_s": np.inf}, "since_s: "),
    ({"since_s": np.nan}, "since_s: "),
    ({"since_s": 1e300}, "cannot begin at"),
    ({"period_s": np.nan}, "period_s: "),
    ({"period_s": 1e-300}, "too large to be told apart"),
    ({"first_window": -1}, "window -1 cannot be the first"),
    ({"first_window": 10**30}, "cannot be the first"),
    ({"more": 1}, "more: "),
)


def test_headers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for changes, message in WRONG_HEADERS:
        write(tmp_path / "s.npz", json.dumps(HEADER | changes))
        with pytest.raises(DataError, match=message):
            ExitStream.load(tmp_path / "s.npz")


def test_files_that_hold_no_stream_are_refused(tmp_path: Path) -> None:
    for header in ("{", "3", json.dumps({"schema_version": 2}), "\x00"):
        write(tmp_path / "s.npz", header)
        with pytest.raises(DataError, match="does not hold a stream"):
            ExitStream.load(tmp_path / "s.npz")
    with pytest.raises(DataError, match="does not hold a stream"):
        ExitStream.load(tmp_path / "none.npz")


def test_arrays_of_a_stream_that_are_missing_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "s.npz", json.dumps(HEADER), probe_N=np.zeros(2))
    with pytest.raises(DataError, match="no array 'probe_N' of float64 belongs there"):
        ExitStream.load(tmp_path / "s.npz")
    np.savez(tmp_path / "s.npz", header=np.array(json.dumps(HEADER)), probe_N=np.zeros(2, dtype=bool))
    with pytest.raises(DataError, match="no array 'active_NR'"):
        ExitStream.load(tmp_path / "s.npz")


def test_a_broken_file_is_refused_or_still_holds_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    stream_of(*np.arange(0, 1000, 5.0)).save(path)
    whole = path.read_bytes()
    for seed in range(60):
        path.write_bytes(broken(whole, seed))
        assert inputs_in(path) in (None, 192), seed  # of 200, those of the first eight windows


def inputs_in(path: Path) -> int | None:
    """In the whole windows; None where the file is refused."""
    try:
        return sum(window.num_inputs for window in windows(ExitStream.load(path), 960))
    except DataError:
        return None


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
    senseless: tuple[tuple[dict[str, float], str], ...] = (
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


def test_a_stream_of_schema_1_becomes_losses(tmp_path: Path) -> None:
    # Of three inputs at ramp 1 alone the first leaves, the second goes to the end and agrees, the third does not.
    np.savez(
        tmp_path / "s.npz",
        header=np.array(json.dumps(HEADER | {"schema_version": 1})),
        times_s_N=np.array([5.0, 6.0, 7.0]),
        probe_N=np.zeros(3, dtype=bool),
        active_NR=np.tile([True, False], (3, 1)),
        exits_N=np.array([1, 5, 5], dtype=np.int16),
        scores_NR=np.array([[0.9, np.nan], [0.2, np.nan], [0.1, np.nan]], dtype=np.float32),
        labels_NR=np.array([[1, -1], [2, -1], [2, -1]], dtype=np.int32),
        final_labels_N=np.array([-1, 2, 1], dtype=np.int32),
        true_labels_N=np.array([1, -1, 1], dtype=np.int32),
    )
    found = ExitStream.load(tmp_path / "s.npz").window(0)
    np.testing.assert_array_equal(found.losses_NR, [[np.nan, np.nan], [0, np.nan], [1, np.nan]])
    assert found.true_losses_NE is not None
    np.testing.assert_array_equal(found.true_losses_NE, [[0, np.nan, np.nan], [np.nan, np.nan, np.nan], [1, np.nan, 0]])


def test_in_a_stream_of_schema_2_nobody_stayed(tmp_path: Path) -> None:
    stream_of(5, 6).save(tmp_path / "s.npz")
    with np.load(tmp_path / "s.npz") as file:
        arrays = {name: file[name] for name in file.files if name not in ("header", "stayed_N")}
    np.savez(tmp_path / "s.npz", header=np.array(json.dumps(HEADER | {"schema_version": 2})), **arrays)
    assert ExitStream.load(tmp_path / "s.npz").window(0).stayed_N.tolist() == [False, False]


def test_a_saved_stream_keeps_what_is_known_of_the_truth_and_of_its_losses(tmp_path: Path) -> None:
    shape = replace(SHAPE, zero_one=False)
    known = replace(
        inputs_at(6, 7),
        shape=shape,
        losses_NR=np.array([[np.nan, np.nan], [0.25, np.nan]], dtype=np.float32),
        true_losses_NE=np.array([[0.5, np.nan, np.nan], [0.75, np.nan, 1]], dtype=np.float32),
    )
    stream = ExitStream(shape, since_s=0)
    stream.append(replace(inputs_at(5), shape=shape))
    stream.append(known)
    stream.save(tmp_path / "s.npz")
    found = ExitStream.load(tmp_path / "s.npz").window(0)
    assert found.shape == shape
    assert found.true_losses_NE is not None
    np.testing.assert_array_equal(found.true_losses_NE[1:], known.true_losses_NE)
    assert np.isnan(found.true_losses_NE[0]).all()
    np.testing.assert_array_equal(found.losses_NR[1:], known.losses_NR)


LATE = inputs_at(5, 6)  # the first leaves after block 1, the second goes to the end; ramp 3 is off


def test_who_stayed_is_seen_at_all_its_ramps_and_at_the_end() -> None:
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


def test_losses_of_what_nobody_saw_are_refused() -> None:
    for changes, message in UNSEEN:
        arrays: dict[str, Any] = {name: np.array(rows, dtype=np.float32) for name, rows in changes.items()}
        with pytest.raises(DataError, match=message):
            replace(LATE, **arrays)
