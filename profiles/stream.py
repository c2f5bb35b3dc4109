"""The live stream of exit records: every input with what was seen of it, in windows, bounded by age.

Where a plan lets answered inputs run on, every input is seen: a thousand a second for two hours are seven million. So a
window keeps all probes, but only a uniform sample of the inputs that stayed. Each input gets a key from its own bits
that looks random, and a window keeps the smallest keys: a uniform sample without replacement, whatever the order of
arrival. Parts that are joined, cut or restored from a file give the same sample. A full window keeps keys below a limit
of its own. For windows that are pooled the smallest limit holds, so that every input counts the same. Probes are a
uniform sample too, and so is all that is kept of a window with one plan. In a window in which inputs began to stay, the
later part counts more.
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
    """What all records of a stream share."""

    score: Score
    num_blocks: int
    ramps: tuple[int, ...]
    zero_one: bool = True
    """Whether a loss is 0 or 1 by its nature, as of labels."""

    def __post_init__(self) -> None:
        check_score(self.score)
        check_ramps(self.ramps, self.num_blocks)


def shape_of(records: ExitRecords) -> StreamShape:
    """Of a stream of inputs like the recorded ones."""
    return StreamShape(
        score=records.score, num_blocks=records.num_blocks, ramps=records.ramps, zero_one=records.zero_one
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Inputs (N) and what was seen of them at the ramps (R); refuses to have seen what it cannot.

    An input whose plan has answered inputs stop is seen at its active ramps up to its exit, and by the full model if it
    got there. Where the plan has them stay it is seen at all of its active ramps, and by the full model. A probe is
    answered at the same exit as it would have been, but runs every ramp and goes to the end. What a ramp's answer costs
    is known where the full model was seen as well. Where it has a column, it is the last (E = R + 1). Of a text that
    lost words on its way the full model saw all of them beside: answers are held against that, the end's too.
    """

    shape: StreamShape
    times_s_N: FloatArray
    probe_N: BoolArray
    stayed_N: BoolArray
    """Whether its plan has it run on after its answer; of a probe as well, whose plan may be either."""
    active_NR: BoolArray
    """The ramps that were active for the input: those of its plan, for a probe as well."""
    exits_N: npt.NDArray[np.int16]
    """The block that the input was answered after."""
    scores_NR: SmallArray
    """NaN where not seen."""
    losses_NR: SmallArray
    """Against the full model's answer, in [0, 1]; NaN where one of the two was not seen."""
    true_losses_NE: SmallArray | None = None
    """Against the truth; NaN where not seen, and all along where the input's truth is not known. None: of no input."""
    end_losses_N: SmallArray | None = None
    """What the end costs of probes that lost words, against the full model's answer to the whole text; NaN of other
    inputs, of which it costs nothing. None: of no input."""

    def __post_init__(self) -> None:
        check_shapes(self.arrays(), len(self.times_s_N), len(self.shape.ramps))
        if not np.isfinite(self.times_s_N).all():
            raise DataError("arrival times must be finite")
        at_NR = self.exits_N[:, None] == np.array(self.shape.ramps)
        if not ((at_NR & self.active_NR).any(1) | (self.exits_N == self.shape.num_blocks - 1)).all():
            raise DataError("an input leaves at one of its active ramps or after the last block")
        seen_NR = self.would_see_NR | self.probe_N[:, None]
        if (np.isnan(self.scores_NR) == seen_NR).any():
            raise DataError("scores must be there for what an input ran, and for nothing else")
        compared_NR = seen_NR & self.at_end_N[:, None]
        if (np.isnan(self.losses_NR) == compared_NR).any():
            raise DataError("losses must be there for the ramps that ran of inputs that went to the end, and no others")
        check_losses(self.losses_NR[compared_NR], zero_one=self.shape.zero_one)
        if self.true_losses_NE is not None:
            self._check_truth(self.true_losses_NE, np.column_stack([seen_NR, self.at_end_N]))
        if self.end_losses_N is not None:
            self._check_ends(self.end_losses_N)

    def _check_truth(self, losses_NE: SmallArray, seen_NE: BoolArray) -> None:
        there_NE = ~np.isnan(losses_NE)
        if (there_NE[there_NE.any(1)] != seen_NE[there_NE.any(1)]).any():
            raise DataError("losses against the truth must be there for what an input ran, or not at all")
        check_losses(losses_NE[there_NE], zero_one=self.shape.zero_one)

    def _check_ends(self, losses_N: SmallArray) -> None:
        there_N = ~np.isnan(losses_N)
        if (there_N & ~self.probe_N).any():
            raise DataError("what the end costs is known of probes that lost words, and of no others")
        check_losses(losses_N[there_N], zero_one=self.shape.zero_one)

    def __len__(self) -> int:
        return len(self.times_s_N)

    @property
    def would_end_N(self) -> BoolArray:
        """Inputs that the plan ran to the end: seen there, probe or not."""
        return np.asarray((self.exits_N == self.shape.num_blocks - 1) | self.stayed_N)

    @property
    def at_end_N(self) -> BoolArray:
        """Inputs of which the full model's answer was seen."""
        return np.asarray(self.would_end_N | self.probe_N)

    @property
    def would_see_NR(self) -> BoolArray:
        """The ramps that the plan ran for each input, leaving aside what a probe ran in addition."""
        reached_NR = np.array(self.shape.ramps) <= self.exits_N[:, None]
        return np.asarray(self.active_NR & (reached_NR | self.stayed_N[:, None]))

    @property
    def losses_NE(self) -> SmallArray:
        """Against the full model's answer, the end's too: there 0 where it is that answer."""
        ends_N = np.zeros(len(self)) if self.end_losses_N is None else np.nan_to_num(self.end_losses_N)
        return np.column_stack([self.losses_NR, ends_N]).astype(np.float32)

    @property
    def known_end_losses_N(self) -> FloatArray | None:
        """What the end costs, 0 where it is the full model's answer; None: of every input."""
        return None if self.end_losses_N is None else np.nan_to_num(self.end_losses_N).astype(np.float64)

    @property
    def pruned_agreement(self) -> float | None:
        """1 - mean loss of the end's answers to texts that lost words against those to whole ones; None of none."""
        if self.end_losses_N is None or np.isnan(self.end_losses_N).all():
            return None
        return 1 - float(np.nanmean(self.end_losses_N, dtype=np.float64))

    @property
    def known_truth_NE(self) -> FloatArray | None:
        """Losses against the truth, where it is known of all inputs."""
        truth_NE = self.true_losses_NE
        return None if truth_NE is None or np.isnan(truth_NE[:, -1]).any() else truth_NE.astype(np.float64)

    def records(self, ramps: Collection[int], sample_ids: Sequence[str] | None = None) -> ExitRecords:
        """Exit records of these ramps, by default with numbers as ids.

        Raises DataError unless there are inputs, of each of which these ramps and the full model were seen.
        """
        ascending, truth_NE = tuple(sorted(ramps)), self.known_truth_NE
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
            end_losses_N=self.known_end_losses_N,
        )

    def take(self, rows: npt.NDArray[Any]) -> Observations:
        """Some inputs, by index or mask."""
        optional = {name: array[rows] for name in OPTIONAL if (array := getattr(self, name)) is not None}
        return Observations(shape=self.shape, **optional, **{name: getattr(self, name)[rows] for name in COLUMNS})

    @staticmethod
    def join(shape: StreamShape, parts: Sequence[Observations]) -> Observations:
        """All inputs of several parts, in their order."""
        if any(part.shape != shape for part in parts):
            raise DataError("observations of other ramps cannot join this stream")
        columns = {name: np.concatenate([getattr(part, name) for part in (empty(shape), *parts)]) for name in COLUMNS}
        if any(part.true_losses_NE is not None for part in parts):
            columns["true_losses_NE"] = np.concatenate([part.truth_or_nan_NE for part in parts])
        if any(part.end_losses_N is not None for part in parts):
            columns["end_losses_N"] = np.concatenate([part._ends_or_nan_N for part in parts])
        return Observations(shape=shape, **columns)

    @property
    def truth_or_nan_NE(self) -> SmallArray:
        """Losses against the truth, NaN where it is unknown."""
        if self.true_losses_NE is not None:
            return self.true_losses_NE
        return np.full((len(self), len(self.shape.ramps) + 1), np.nan, dtype=np.float32)

    @property
    def _ends_or_nan_N(self) -> SmallArray:
        return np.full(len(self), np.nan, dtype=np.float32) if self.end_losses_N is None else self.end_losses_N

    def arrays(self) -> dict[str, npt.NDArray[Any] | None]:
        """Its columns by name, as files hold them."""
        return {name: getattr(self, name) for name in (*COLUMNS, *OPTIONAL)}


OPTIONAL = ("true_losses_NE", "end_losses_N")
COLUMNS = tuple(field.name for field in fields(Observations) if field.name not in ("shape", *OPTIONAL))
MOST_WINDOWS = 2**53
"""Above, floating point does not tell one window from the next."""


@cache
def empty(shape: StreamShape) -> Observations:
    """No inputs."""
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
"""In all that is kept: of the default two hours 4,000 in two minutes, by which a share is known to 0.8 points (one
standard deviation). At 11 ramps they take 27 MB; the present window may hold twice as many until it is asked for."""
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Of splitmix64 (Steele, Lea and Flood, 2014): after its three shifts and two products no bit tells of another."""


class ExitStream:
    """Observations by window, which forgets all but so many inputs of a window that stayed.

    A window that was asked for (`window`, `windows`) takes 9 bytes a ramp and 12 an input, where the truth is known 4
    more an exit: at 11 ramps a million inputs take 111 MB, or 159. Until then what was appended stays in its parts, and
    every part costs some 700 bytes more: in batches of 16, 150 bytes an input.
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
        """`since_s`: when the recording began; the window it falls into is not whole unless it begins there.

        `most_stayed`: the inputs that are kept of those that stayed, in all windows together; each has its part.
        """
        if not (0 < period_s <= keep_s and math.isfinite(keep_s)):
            raise DataError(f"windows of {period_s} s need a positive length, at most the {keep_s} s that are kept")
        if not abs(since_s) / period_s < MOST_WINDOWS:
            raise DataError(f"a recording cannot begin at {since_s} s in windows of {period_s} s")
        self.shape = shape
        self.period_s = period_s
        self.keep_s = keep_s
        self.since_s = since_s
        self.most_of_window = max(1, round(most_stayed * period_s / keep_s))
        self._parts: dict[int, list[Observations]] = {}
        self._first = int(np.ceil(since_s / period_s))
        self._below: dict[int, np.uint64] = {}
        """By window: from which key on nothing is kept any more, once it has been full."""

    def append(self, observations: Observations) -> None:
        """Add inputs in any order of time; those of windows already forgotten are dropped."""
        if observations.shape != self.shape:
            raise DataError("observations of other ramps cannot join this stream")
        if (np.abs(observations.times_s_N) >= MOST_WINDOWS * self.period_s).any():
            raise DataError(f"arrival times are too large to be told apart by windows of {self.period_s} s")
        window_N = np.floor(observations.times_s_N / self.period_s).astype(np.int64)
        for window in np.unique(window_N).tolist():
            if window >= self._first:
                self._parts.setdefault(window, []).append(observations.take(window_N == window))

    def forget(self, now_s: float) -> None:
        """Drop the windows that began more than `keep_s` ago."""
        self._first = max(self._first, int(np.ceil((now_s - self.keep_s) / self.period_s)))
        self._parts = {window: parts for window, parts in self._parts.items() if window >= self._first}
        self._below = {window: key for window, key in self._below.items() if window >= self._first}

    def whole_windows(self, now_s: float) -> range:
        """Windows kept that were recorded from begin to end, oldest first; those without inputs as well."""
        return range(self._first, int(np.floor(now_s / self.period_s)))

    def take_in(self, observations: Observations) -> Observations:
        """Add inputs; returns those that are kept for now. Adding only these leads to the same final sample."""
        kept = observations.take(self._is_wanted_N(observations))
        self.append(kept)
        window_N = np.floor(kept.times_s_N / self.period_s).astype(np.int64)
        for window in np.unique(window_N[sampled_N(kept)]).tolist():
            held = sum(int(sampled_N(part).sum()) for part in self._parts.get(window, []))
            if held >= 2 * self.most_of_window:
                self.window(window)
        return kept

    def window(self, window: int) -> Observations:
        """The inputs that arrived from `window * period_s` until the next; of those that stayed, at most the sample."""
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
        """The inputs of several windows; of those that stayed one uniform sample of them all."""
        parts = [self.window(window) for window in windows]
        limits = [self._below[window] for window in windows if window in self._below]
        joined = Observations.join(self.shape, parts)
        if len(parts) < 2 or not limits:
            return joined
        return joined.take(~sampled_N(joined) | (keys_N(joined) < min(limits)))

    def _is_wanted_N(self, observations: Observations) -> npt.NDArray[np.bool_]:
        """Probes, and what may still be among the smallest keys of its window."""
        wanted_N = ~sampled_N(observations)
        stayed = np.flatnonzero(~wanted_N)
        if not len(stayed):
            return wanted_N
        keys = keys_N(observations.take(stayed))
        windows = np.floor(observations.times_s_N[stayed] / self.period_s).astype(np.int64)
        for window in np.unique(windows).tolist():
            mine = windows == window
            below = self._below.get(window)
            wanted_N[stayed[mine]] = True if below is None else keys[mine] < below
        return wanted_N


def sampled_N(observations: Observations) -> npt.NDArray[np.bool_]:
    """Inputs that stayed and are no probes: those of which a sample is enough."""
    return np.asarray(observations.stayed_N & ~observations.probe_N)


def keys_N(observations: Observations) -> KeyArray:
    """Of inputs, from when they came and what was seen of them: inputs of one request came at once."""
    key_N = observations.times_s_N.astype(np.float64).view(np.uint64).copy()
    for scores_N in observations.scores_NR.T:
        key_N = _mixed(key_N ^ np.ascontiguousarray(scores_N, dtype=np.float32).view(np.uint32).astype(np.uint64))
    return _mixed(key_N ^ observations.exits_N.astype(np.uint64))


def _mixed(key_N: KeyArray) -> KeyArray:
    """Multiplication wraps, as it shall."""
    key_N = (key_N ^ (key_N >> np.uint64(30))) * _MIX[0]
    key_N = (key_N ^ (key_N >> np.uint64(27))) * _MIX[1]
    return np.asarray(key_N ^ (key_N >> np.uint64(31)))
