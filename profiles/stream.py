"""Observations of the live stream: scores and losses of inputs, in windows, for a bounded time.

If the plan lets answered inputs stay, every input is fully observed: 1,000 inputs per second are 7 million in two
hours. Therefore, a window keeps all probes, but only a uniform sample of the inputs that stayed. Each input has a hash
of its own data as a key, and a window keeps the inputs with the smallest keys. This is a uniform sample without
replacement that does not depend on the order of arrival, or on how windows are joined, cut or restored from files. A
full window has a limit, the smallest key that it dropped. The smallest limit applies to windows that are pooled, so
that all inputs have equal weight. Probes are a uniform sample too. In a window with one plan, all kept inputs are a
uniform sample. In a window in which inputs began to stay, the later part has more weight.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError
from profiles.records import ExitRecords, check_losses, check_shapes
from profiles.scores import BoolArray, FloatArray, Score, check_score
from profiles.table import check_ramps

SmallArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamShape:
    """Properties that all observations of a stream share."""

    score: Score
    num_blocks: int
    ramps: tuple[int, ...]
    zero_one: bool = True
    """Whether every loss is 0 or 1, as for labels."""

    def __post_init__(self) -> None:
        check_score(self.score)
        check_ramps(self.ramps, self.num_blocks)


def shape_of(records: ExitRecords) -> StreamShape:
    """Returns the shape of a stream whose inputs are like the recorded ones."""
    return StreamShape(
        score=records.score, num_blocks=records.num_blocks, ramps=records.ramps, zero_one=records.zero_one
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Inputs (N) and the scores and losses that were observed at ramps (R). Raises DataError for impossible values.

    If the plan's answered inputs stop, an input is observed at its active ramps up to its exit, and by the full model
    if it reached the end. If they stay, it is observed at all active ramps and by the full model. A probe is answered
    at the same exit as without probing, but runs all ramps and the whole model. The loss of a ramp's answer is known if
    the full model's answer is observed. Arrays of exits (E = R + 1) have the full model as the last column. If words of
    a text were pruned, the full model also ran on the whole text, and all losses are against this answer.
    """

    shape: StreamShape
    times_s_N: FloatArray
    probe_N: BoolArray
    stayed_N: BoolArray
    """Whether the input's plan lets it run on after its answer. It is also set for probes under such a plan."""
    active_NR: BoolArray
    """The active ramps of the input's plan, also for probes."""
    exits_N: npt.NDArray[np.int16]
    """The block after which the input was answered."""
    scores_NR: SmallArray
    """NaN if not observed."""
    losses_NR: SmallArray
    """Loss against the full model's answer, in [0, 1]; NaN if one of the two answers was not observed."""
    true_losses_NE: SmallArray | None = None
    """Loss against the right answer; NaN if not observed or unknown. None if it is unknown for all inputs."""
    end_losses_N: SmallArray | None = None
    """For probes with pruned words, the loss of the end's answer against the full model's for the whole text; NaN for
    other inputs, whose loss at the end is 0. None if there are no such probes."""

    def __post_init__(self) -> None:
        check_shapes(self.arrays(), len(self.times_s_N), len(self.shape.ramps))
        if not np.isfinite(self.times_s_N).all():
            raise DataError("arrival times must be finite")
        at_NR = self.exits_N[:, None] == np.array(self.shape.ramps)
        if not ((at_NR & self.active_NR).any(1) | (self.exits_N == self.shape.num_blocks - 1)).all():
            raise DataError("an input must leave at one of its active ramps or after the last block")
        seen_NR = self.would_see_NR | self.probe_N[:, None]
        if (np.isnan(self.scores_NR) == seen_NR).any():
            raise DataError("an input must have a score for each ramp that it ran, and for no other")
        compared_NR = seen_NR & self.at_end_N[:, None]
        if (np.isnan(self.losses_NR) == compared_NR).any():
            raise DataError("an input that ran to the end must have a loss for each ramp that it ran, and for no other")
        check_losses(self.losses_NR[compared_NR], zero_one=self.shape.zero_one)
        if self.true_losses_NE is not None:
            self._check_truth(self.true_losses_NE, np.column_stack([seen_NR, self.at_end_N]))
        if self.end_losses_N is not None:
            self._check_ends(self.end_losses_N)

    def _check_truth(self, losses_NE: SmallArray, seen_NE: BoolArray) -> None:
        known_NE = ~np.isnan(losses_NE)
        if (known_NE[known_NE.any(1)] != seen_NE[known_NE.any(1)]).any():
            raise DataError("an input must have losses against the right answer for all exits that it ran, or for none")
        check_losses(losses_NE[known_NE], zero_one=self.shape.zero_one)

    def _check_ends(self, losses_N: SmallArray) -> None:
        known_N = ~np.isnan(losses_N)
        if (known_N & ~self.probe_N).any():
            raise DataError("only probes can have a loss of the end")
        check_losses(losses_N[known_N], zero_one=self.shape.zero_one)

    def __len__(self) -> int:
        return len(self.times_s_N)

    @property
    def would_end_N(self) -> BoolArray:
        """Whether the plan alone, without probing, runs the input to the end."""
        return np.asarray((self.exits_N == self.shape.num_blocks - 1) | self.stayed_N)

    @property
    def at_end_N(self) -> BoolArray:
        """Whether the full model's answer was observed."""
        return np.asarray(self.would_end_N | self.probe_N)

    @property
    def would_see_NR(self) -> BoolArray:
        """The ramps that the plan alone, without probing, runs for each input."""
        reached_NR = np.array(self.shape.ramps) <= self.exits_N[:, None]
        return np.asarray(self.active_NR & (reached_NR | self.stayed_N[:, None]))

    @property
    def losses_NE(self) -> SmallArray:
        """Losses against the full model's answer, also of the end, where they are 0 without pruned words."""
        ends_N = np.zeros(len(self)) if self.end_losses_N is None else np.nan_to_num(self.end_losses_N)
        return np.column_stack([self.losses_NR, ends_N]).astype(np.float32)

    @property
    def pruned_agreement(self) -> float | None:
        """1 - mean loss of the end's answers to texts with pruned words; None if there are none."""
        if self.end_losses_N is None or np.isnan(self.end_losses_N).all():
            return None
        return 1 - float(np.nanmean(self.end_losses_N, dtype=np.float64))

    @property
    def known_truth_NE(self) -> FloatArray | None:
        """Losses against right answers; None unless these are known for all inputs."""
        truth_NE = self.true_losses_NE
        return None if truth_NE is None or np.isnan(truth_NE[:, -1]).any() else truth_NE.astype(np.float64)

    def records(self, ramps: Collection[int], sample_ids: Sequence[str] | None = None) -> ExitRecords:
        """Returns exit records of these ramps. By default, sample ids are numbers.

        Losses of the end are 0 for inputs without pruned words. Raises DataError if there are no inputs, or if a ramp
        or the full model was not observed for an input.
        """
        ascending, truth_NE, ends_N = tuple(sorted(ramps)), self.known_truth_NE, self.end_losses_N
        columns = [self.shape.ramps.index(ramp) for ramp in ascending]
        return ExitRecords(
            score=self.shape.score,
            num_blocks=self.shape.num_blocks,
            ramps=ascending,
            sample_ids=tuple(map(str, range(len(self))) if sample_ids is None else sample_ids),
            scores_NR=self.scores_NR[:, columns],
            losses_NR=self.losses_NR[:, columns].astype(np.float64),
            zero_one=self.shape.zero_one,
            true_losses_NE=None if truth_NE is None else truth_NE[:, [*columns, -1]],
            times_s_N=self.times_s_N,
            end_losses_N=None if ends_N is None else np.nan_to_num(ends_N).astype(np.float64),
        )

    def take(self, rows: npt.NDArray[Any]) -> Observations:
        """Returns some inputs, by index or mask."""
        optional = {name: array[rows] for name in OPTIONAL if (array := getattr(self, name)) is not None}
        return Observations(shape=self.shape, **optional, **{name: getattr(self, name)[rows] for name in COLUMNS})

    @staticmethod
    def join(shape: StreamShape, parts: Sequence[Observations]) -> Observations:
        """Returns the concatenation of several parts."""
        if any(part.shape != shape for part in parts):
            raise DataError("observations with another shape cannot join this stream")
        columns = {name: np.concatenate([getattr(part, name) for part in (empty(shape), *parts)]) for name in COLUMNS}
        for name, axes in (("true_losses_NE", (len(shape.ramps) + 1,)), ("end_losses_N", ())):
            arrays = [getattr(part, name) for part in parts]
            if any(array is not None for array in arrays):  # NaN in the parts that do not have them
                unknown = [np.full((len(part), *axes), np.nan, dtype=np.float32) for part in parts]
                pairs = zip(arrays, unknown, strict=True)
                columns[name] = np.concatenate([nan if array is None else array for array, nan in pairs])
        return Observations(shape=shape, **columns)

    def arrays(self) -> dict[str, npt.NDArray[Any] | None]:
        """Returns the columns by name, as in files."""
        return {name: getattr(self, name) for name in (*COLUMNS, *OPTIONAL)}


OPTIONAL = ("true_losses_NE", "end_losses_N")
COLUMNS = tuple(field.name for field in fields(Observations) if field.name not in ("shape", *OPTIONAL))
MOST_WINDOWS = 2**53
"""Upper bound of a window's number, because floating point cannot represent all larger integers."""


@cache
def empty(shape: StreamShape) -> Observations:
    """Returns observations of no inputs."""
    none_NR = (0, len(shape.ramps))
    return Observations(
        shape=shape,
        times_s_N=np.zeros(0),
        probe_N=np.zeros(0, dtype=bool),
        stayed_N=np.zeros(0, dtype=bool),
        active_NR=np.zeros(none_NR, dtype=bool),
        exits_N=np.zeros(0, dtype=np.int16),
        scores_NR=np.zeros(none_NR, dtype=np.float32),
        losses_NR=np.zeros(none_NR, dtype=np.float32),
    )


KeyArray = npt.NDArray[np.uint64]

MOST_STAYED = 240_000
"""Maximum inputs that stayed, in all windows: 4,000 per two minutes by default, so that the standard deviation of a
share is at most 0.8 points. They take 27 MB for 11 ramps; the newest window may have twice its part meanwhile."""
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Constants of splitmix64 (Steele, Lea and Flood, 2014), whose output bits are uncorrelated."""


class ExitStream:
    """Observations by window, with a bounded number of inputs that stayed.

    A window takes 9 bytes per ramp and 12 bytes per input, and 4 bytes per exit if right answers are known: 111 or 159
    MB for a million inputs and 11 ramps. Appended parts are joined when the window is read (`window`, `pooled`). Until
    then, each part takes about 700 bytes more.
    """

    def __init__(
        self,
        shape: StreamShape,
        *,
        since_s: float,
        period_s: float = 120.0,
        keep_s: float = 7200.0,
        most_stayed: int = MOST_STAYED,
    ) -> None:
        """`since_s`: the start of the recording. The window that contains it is skipped unless it begins there.

        `most_stayed`: maximum inputs that stayed, in all windows together, which have equal parts.
        """
        if not (0 < period_s <= keep_s and math.isfinite(keep_s)):
            raise DataError(f"0 < period_s <= keep_s is needed, and both must be finite, not {period_s} and {keep_s}")
        if not abs(since_s) / period_s < MOST_WINDOWS:
            raise DataError(f"since_s must be finite, and not too large for windows of {period_s} s, not {since_s}")
        self.shape = shape
        self.period_s = period_s
        self.keep_s = keep_s
        self.most_of_window = max(1, round(most_stayed * period_s / keep_s))
        self._parts: dict[int, list[Observations]] = {}
        self._first = int(np.ceil(since_s / period_s))
        self._below: dict[int, np.uint64] = {}
        """The limit of each window that has been full: inputs with this key or a larger one are dropped."""

    def append(self, observations: Observations) -> None:
        """Adds inputs in any order of time. Inputs of forgotten windows are dropped."""
        if observations.shape != self.shape:
            raise DataError("observations with another shape cannot join this stream")
        if (np.abs(observations.times_s_N) >= MOST_WINDOWS * self.period_s).any():
            raise DataError(f"arrival times are too large for windows of {self.period_s} s")
        window_N = np.floor(observations.times_s_N / self.period_s).astype(np.int64)
        for window in np.unique(window_N).tolist():
            if window >= self._first:
                self._parts.setdefault(window, []).append(observations.take(window_N == window))

    def forget(self, now_s: float) -> None:
        """Drops windows that began more than `keep_s` ago."""
        self._first = max(self._first, int(np.ceil((now_s - self.keep_s) / self.period_s)))
        self._parts = {window: parts for window, parts in self._parts.items() if window >= self._first}
        self._below = {window: key for window, key in self._below.items() if window >= self._first}

    def whole_windows(self, now_s: float) -> range:
        """Returns the numbers of windows that were recorded completely, oldest first, also those without inputs."""
        return range(self._first, int(np.floor(now_s / self.period_s)))

    def take_in(self, observations: Observations) -> Observations:
        """Adds inputs, and returns those that are kept for now. Adding only these leads to the same final sample."""
        kept = observations.take(self._is_wanted_N(observations))
        self.append(kept)
        window_N = np.floor(kept.times_s_N / self.period_s).astype(np.int64)
        for window in np.unique(window_N[sampled_N(kept)]).tolist():
            held = sum(int(sampled_N(part).sum()) for part in self._parts.get(window, []))
            if held >= 2 * self.most_of_window:
                self.window(window)
        return kept

    def window(self, window: int) -> Observations:
        """Returns the inputs of a window, which begins at `window * period_s`, with a sample of those that stayed."""
        parts = self._parts.get(window, [])
        joined = parts[0] if len(parts) == 1 else Observations.join(self.shape, parts)
        rows = np.flatnonzero(sampled_N(joined))
        if len(rows) > self.most_of_window:
            keys = keys_N(joined.take(rows))
            order = keys.argsort(kind="stable")
            self._below[window] = keys[order[self.most_of_window]]
            joined = joined.take(np.delete(np.arange(len(joined)), rows[order[self.most_of_window :]]))
        if parts:
            self._parts[window] = [joined]
        return joined

    def pooled(self, windows: Sequence[int]) -> Observations:
        """Returns the inputs of several windows; of those that stayed, a uniform sample over all these windows."""
        parts = [self.window(window) for window in windows]
        limits = [self._below[window] for window in windows if window in self._below]
        joined = Observations.join(self.shape, parts)
        if len(parts) < 2 or not limits:
            return joined
        return joined.take(~sampled_N(joined) | (keys_N(joined) < min(limits)))

    def _is_wanted_N(self, observations: Observations) -> npt.NDArray[np.bool_]:
        """Returns whether inputs are probes, or have keys below the limit of their window."""
        wanted_N = ~sampled_N(observations)
        stayed = np.flatnonzero(~wanted_N)
        if not len(stayed):
            return wanted_N
        keys = keys_N(observations.take(stayed))
        windows = np.floor(observations.times_s_N[stayed] / self.period_s).astype(np.int64)
        for window in np.unique(windows).tolist():
            in_window, limit = windows == window, self._below.get(window)
            wanted_N[stayed[in_window]] = True if limit is None else keys[in_window] < limit
        return wanted_N


def sampled_N(observations: Observations) -> npt.NDArray[np.bool_]:
    """Returns whether inputs stayed and are not probes. Only a sample of these inputs is kept."""
    return np.asarray(observations.stayed_N & ~observations.probe_N)


def keys_N(observations: Observations) -> KeyArray:
    """Returns a hash of each input's arrival time, scores and exit. Times alone are equal within a request."""
    key_N = observations.times_s_N.astype(np.float64).view(np.uint64).copy()
    for scores_N in observations.scores_NR.T:
        key_N = _mixed(key_N ^ np.ascontiguousarray(scores_N, dtype=np.float32).view(np.uint32).astype(np.uint64))
    return _mixed(key_N ^ observations.exits_N.astype(np.uint64))


def _mixed(key_N: KeyArray) -> KeyArray:
    """Returns the hash of splitmix64, whose multiplications overflow on purpose."""
    key_N = (key_N ^ (key_N >> np.uint64(30))) * _MIX[0]
    key_N = (key_N ^ (key_N >> np.uint64(27))) * _MIX[1]
    return np.asarray(key_N ^ (key_N >> np.uint64(31)))
