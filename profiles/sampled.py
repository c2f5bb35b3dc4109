"""A live stream that stays small: of inputs that stay a uniform sample per window, of probes all.

Where a plan has answered inputs run on, every input is seen; a thousand a second for two hours are seven million. Each
gets a key from its own bits that looks like drawn at random, and a window keeps those with the smallest keys. They are
a uniform sample of the window without replacement, whatever came when; joined or cut in any order, or restored from a
file that holds what was kept, it is the same sample. A full window keeps keys below a limit, each another; of windows
that are pooled the smallest limit holds for all, so that every input counts the same. Probes are a uniform sample too,
so all that is kept of a window in which one plan was in force is one. In a window with a change from stop to stay the
part that stayed counts more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from profiles.stream import ExitStream, Observations, StreamShape

KeyArray = npt.NDArray[np.uint64]

MOST_STAYED = 240_000
"""In all that is kept: of the default two hours 4,000 in two minutes, by which a share is known to 0.8 points (one
standard deviation). At 11 ramps they take 27 MB; the present window may hold twice as many until it is asked for."""
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Of splitmix64 (Steele, Lea and Flood, 2014): after its three shifts and two products no bit tells of another."""


class SampledStream(ExitStream):
    """An `ExitStream` that forgets all but so many inputs of a window that stayed."""

    def __init__(
        self,
        shape: StreamShape,
        *,
        since_s: float,
        period_s: float = 120.0,
        keep_s: float = 7200.0,
        most_stayed: int = MOST_STAYED,
    ) -> None:
        """`most_stayed`: in all windows that are kept, each has its part."""
        super().__init__(shape, since_s=since_s, period_s=period_s, keep_s=keep_s)
        self.most_of_window = max(1, round(most_stayed * period_s / keep_s))
        self._below: dict[int, np.uint64] = {}
        """By window: from which key on nothing is kept any more, once it has been full."""

    def take_in(self, observations: Observations) -> Observations:
        """Add inputs; gives those that are kept for now: whoever adds only these has the same sample in the end."""
        kept = observations.take(self._is_wanted_N(observations))
        self.append(kept)
        window_N = np.floor(kept.times_s_N / self.period_s).astype(np.int64)
        for window in np.unique(window_N[sampled_N(kept)]).tolist():
            held = sum(_num_sampled(part) for part in self._parts.get(window, []))
            if held >= 2 * self.most_of_window:
                self.window(window)
        return kept

    def window(self, window: int) -> Observations:
        """See `ExitStream.window`; of inputs that stayed no more than the sample."""
        joined = super().window(window)
        rows = np.flatnonzero(sampled_N(joined))
        if len(rows) <= self.most_of_window:
            return joined
        keys = keys_N(joined.take(rows))
        order = keys.argsort(kind="stable")
        self._below[window] = keys[order[self.most_of_window]]
        left_out = rows[order[self.most_of_window :]]
        thinned = joined.take(np.delete(np.arange(len(joined)), left_out))
        self._parts[window] = [thinned]
        return thinned

    def pooled(self, windows: Sequence[int]) -> Observations:
        """The inputs of several windows; of those that stayed one uniform sample of them all."""
        parts = [self.window(window) for window in windows]
        limits = [self._below[window] for window in windows if window in self._below]
        joined = Observations.join(self.shape, parts)
        if len(parts) < 2 or not limits:
            return joined
        return joined.take(~sampled_N(joined) | (keys_N(joined) < min(limits)))

    def forget(self, now_s: float) -> None:
        super().forget(now_s)
        self._below = {window: key for window, key in self._below.items() if window >= self._first}

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


def _num_sampled(part: Observations) -> int:
    return int(sampled_N(part).sum())
