"""Streams whose difficulty drifts, and request rates per window, for backtests of forecasts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from offramp.load.traces import in_gaps, read_counts
from profiles.outcome import ExitOutcome

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """Easy and hard inputs: shares by the block they leave after."""

    easy_K: FloatArray
    hard_K: FloatArray

    def exits(self, easy_W: FloatArray) -> FloatArray:
        """Per window, the shares by exit (W, K) of a mix with so many easy inputs."""
        return easy_W[:, None] * self.easy_K + (1 - easy_W[:, None]) * self.hard_K


def easy_and_hard(outcome: ExitOutcome) -> Kinds:
    """Easy is what leaves in the first half of the model, hard is the rest (E3 section 5.4 does not say its rule)."""
    easy_N = outcome.exits_N < outcome.num_blocks // 2
    shares = [
        np.bincount(outcome.exits_N[rows], minlength=outcome.num_blocks) / rows.sum() for rows in (easy_N, ~easy_N)
    ]
    return Kinds(easy_K=shares[0], hard_K=shares[1])


def switching(num_windows: int, every: int) -> FloatArray:
    """Shares of easy inputs: 80:20, 50:50, 20:80 and back (E3 section 5.4)."""
    return np.array([0.8, 0.5, 0.2, 0.5])[np.arange(num_windows) // every % 4]


def gradual(num_windows: int, one_way: int) -> FloatArray:
    """From 80:20 to 20:80 along a line, and back."""
    return 0.2 + 0.6 * np.abs(np.arange(num_windows) / one_way % 2 - 1)


def cycle(num_windows: int, period: int) -> FloatArray:
    """A sine between 80:20 and 20:80; two-minute windows make 720 a day."""
    return 0.5 + 0.3 * np.sin(2 * np.pi * np.arange(num_windows) / period)


def bursts(num_windows: int, rng: np.random.Generator) -> FloatArray:
    """80:20, broken by bursts of 20:80 that last one to four windows, about every twenty."""
    easy_W = np.full(num_windows, 0.8)
    window = 0
    while window < num_windows:
        window += int(rng.geometric(1 / 20))
        length = int(rng.integers(1, 5))
        easy_W[window : window + length] = 0.2
        window += length
    return easy_W


def wandering(num_windows: int, rng: np.random.Generator) -> FloatArray:
    """A random walk of 0.02 a window, reflected at 80:20 and 20:80."""
    walk_W = 0.5 + np.cumsum(rng.normal(0, 0.02, num_windows))
    return 0.2 + np.abs((walk_W - 0.2 + 0.6) % 1.2 - 0.6)


def draw_reach(exits_WK: FloatArray, num_inputs_W: IntArray, rng: np.random.Generator) -> FloatArray:
    """Numbers of inputs that reach each block (W, K), drawn at random from recorded ones."""
    counts_WK = np.array([rng.multinomial(num, shares) for num, shares in zip(num_inputs_W, exits_WK, strict=True)])
    return np.asarray(counts_WK[:, ::-1].cumsum(1)[:, ::-1], dtype=np.float64)


def twitter_rates(path: Path, period_s: int = 120) -> FloatArray:
    """Requests per second in windows of the Twitter trace; windows that touch a hole are NaN."""
    return rates_without_holes(read_counts(path).counts_B, period_s)


def rates_without_holes(per_second_S: FloatArray, period_s: int) -> FloatArray:
    """Mean rate per window, NaN for windows that touch a hole."""
    whole = len(per_second_S) // period_s * period_s
    rates_W = per_second_S[:whole].reshape(-1, period_s).mean(1)
    return np.where(in_gaps(per_second_S)[:whole].reshape(-1, period_s).any(1), np.nan, rates_W)


def azure_function_rates(path: Path) -> FloatArray:
    """Invocations per second of all sampled functions together, in windows of two minutes."""
    return np.asarray(read_counts(path).counts_B.reshape(-1, 2).sum(1) / 120)
