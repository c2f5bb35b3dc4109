"""Distributions of input and sequence lengths, in tokens, and the expected size of batches with a token budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from earlyexit.data.images import check_file
from earlyexit.data.text_tables import csv_rows, stream_lines
from earlyexit.errors import DataError, within

MOST_TOKENS = 1_000_000
"""Maximum tokens of an input, far above any model's, so that a typing error does not cost memory."""
MANY = 128
"""Budgets above this multiple of the longest input leave as many tokens unused as this budget."""
STEPS = 64
"""Maximum iterations to find the stationary distribution of batches' first inputs."""
SETTLED = 1e-13
"""Change of the distribution at which the iteration ends."""
FloatArray = npt.NDArray[np.float64]
Shares = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The distribution of a workload's input lengths. Raises DataError for invalid lengths.

    If only the mean is known, batches are assumed to fill their token budget, or to have one mean input.
    """

    mean: float
    """Tokens per input."""
    shares: Shares | None = None
    """Lengths that occur, ascending, each with its share of inputs; None if only the mean is known."""

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= MOST_TOKENS:
            raise DataError(f"a mean length must be from 1 to {MOST_TOKENS} tokens, not {self.mean:.10g}")

    @classmethod
    def of(cls, tokens: Iterable[float]) -> Lengths:
        """Returns the lengths of inputs with these tokens. Raises DataError for no inputs and for invalid lengths."""
        tokens_N = np.array(list(tokens), dtype=np.float64)
        if not len(tokens_N):
            raise DataError("there are no lengths; at least one is needed")
        for position, length in enumerate(tokens_N.tolist()):
            with within(position):
                check_length(length, f"the {position + 1}. length")
        values, counts = np.unique(tokens_N.astype(np.int64), return_counts=True)
        return cls.weighted(dict(zip(values.tolist(), (counts / len(tokens_N)).tolist(), strict=True)))

    @classmethod
    def weighted(cls, weights: Mapping[int, float]) -> Lengths:
        """Returns lengths with shares in proportion to weights. Raises DataError for invalid lengths and weights."""
        total = sum(weights.values())
        if not (weights and math.isfinite(total) and min(weights.values()) > 0):
            raise DataError("at least one length is needed, and each needs a share above 0")
        total = 1.0 if math.isclose(total, 1.0, abs_tol=1e-9) else total
        shares = tuple((check_length(tokens, "a length"), weight / total) for tokens, weight in sorted(weights.items()))
        return cls(mean=sum(length * share for length, share in shares), shares=shares)

    def stretched(self, mean: float, *, most: int) -> Lengths:
        """Returns these lengths scaled to another mean, rounded to whole tokens from 1 to `most`."""
        if self.shares is None:
            return Lengths(mean=min(mean, float(most)))
        weights: dict[int, float] = {}
        for length, share in self.shares:
            scaled = min(most, max(1, round(length * mean / self.mean)))
            weights[scaled] = weights.get(scaled, 0.0) + share
        return Lengths.weighted(weights)

    @property
    def shortest(self) -> int:
        """The fewest tokens of an input; 1 if only the mean is known."""
        return self.shares[0][0] if self.shares is not None else 1

    @property
    def longest(self) -> int | None:
        """The most tokens of an input; None if only the mean is known."""
        return self.shares[-1][0] if self.shares is not None else None

    def filled(self, budget: int) -> float:
        """Returns the mean tokens of a batch that takes inputs in order until the next one exceeds the budget.

        An input above the budget runs alone. The result is exact for independent lengths. An input that does not fit
        begins the next batch: the first inputs of batches are a Markov chain, and the other inputs a renewal process.
        """
        if self.shares is None:
            return float(max(budget, self.mean))
        if self.shares[0][0] == self.shares[-1][0]:
            return float(max(self.shares[0][0], budget // self.shares[0][0] * self.shares[0][0]))
        unit = math.gcd(*(length for length, _ in self.shares))
        shares, room = tuple((length // unit, share) for length, share in self.shares), budget // unit
        most = min(room, MANY * shares[-1][0])
        return unit * (room - most + _filled(shares, most))


def check_length(tokens: float, name: str) -> int:
    """Returns a length as an integer; raises DataError with `name` unless it is a whole number in range."""
    if not (math.isfinite(tokens) and 1 <= tokens <= MOST_TOKENS and tokens == int(tokens)):
        raise DataError(f"{name} is {tokens:.10g}; an input has a whole number of tokens, from 1 to {MOST_TOKENS}")
    return int(tokens)


def read_lengths(path: Path) -> npt.NDArray[np.int64]:
    """Returns the lengths in a file with one length per line; raises DataError with file, line and mistake."""
    lines = stream_lines(path)
    lengths = [parse_length(line.strip(), f"{path}:{number}", "a length") for number, (line,), _ in lines]
    if not lengths:
        raise DataError(f"{path}:1: there are no lengths; needed: the tokens of an input on each line")
    return np.array(lengths, dtype=np.int64)


def parse_length(text: str, where: str, name: str) -> int:
    """Returns the length in a text; raises DataError that begins with `where` for an invalid length."""
    try:
        return check_length(float(text), name)
    except ValueError as error:
        raise DataError(f"{where}: {name} is {text!r}; needed: a number of tokens") from error
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


PROMPT, ANSWER = "ContextTokens", "GeneratedTokens"
"""Columns of a table of sequences, as in the Azure LLM inference trace of 2023."""
GROUPS = 32
Pairs = tuple[tuple[int, int], ...]
"""Tokens of prompt and answer, for each sequence."""


def read_sequences(path: Path) -> Pairs:
    """Returns the tokens of all sequences in a CSV table; raises DataError with file, line and mistake."""
    check_file(path)
    sequences = tuple(
        (parse_length(row[PROMPT], f"{path}:{line}", PROMPT), parse_length(row[ANSWER], f"{path}:{line}", ANSWER))
        for line, row in csv_rows(path, (PROMPT, ANSWER))
    )
    if not sequences:
        raise DataError(f"{path}:1: there are no sequences after the header")
    return sequences


def grouped(tokens: Sequence[int]) -> Lengths:
    """Returns at most 32 lengths, few enough for planners: the rounded means of groups of equal size."""
    parts = np.array_split(np.sort(np.array(tokens, dtype=np.float64)), min(GROUPS, len(tokens)))
    weights: dict[int, float] = {}
    for part in parts:
        length = max(1, round(float(part.mean())))
        weights[length] = weights.get(length, 0.0) + len(part)
    return Lengths.weighted(weights)


@lru_cache(maxsize=256)
def _filled(shares: Shares, budget: int) -> float:
    length_L, share_L = np.array([length for length, _ in shares]), np.array([share for _, share in shares])
    alone_L = length_L > budget  # inputs that run alone
    alone, share_T = float(share_L[alone_L].sum()), np.zeros(budget + 1)
    share_T[length_L[~alone_L]] = share_L[~alone_L]
    further_T = _renewals(share_T)
    first_T, first_alone = share_T, alone  # the distribution of a batch's first input
    for _ in range(STEPS):
        passed_T = _convolved(first_T, further_T).cumsum()  # expected number of prefix sums up to T
        # The next batch begins with an input that does not fit, which is longer than the remaining budget.
        next_T = share_T * (passed_T[-1] - passed_T[::-1] + first_alone)
        next_alone = alone * (passed_T[-1] + first_alone)
        total = float(next_T.sum()) + next_alone
        change = float(np.abs(next_T / total - first_T).sum())
        first_T, first_alone = next_T / total, next_alone / total
        if change < SETTLED:
            break
    longer_T = 1.0 - share_T.cumsum()  # the share of inputs with more than T tokens
    final_T = _convolved(first_T, further_T) * longer_T[::-1]  # the distribution of a batch's tokens
    mean_alone = float(length_L[alone_L] @ share_L[alone_L]) / alone if alone else 0.0
    return float(final_T @ np.arange(budget + 1)) + first_alone * mean_alone


def _renewals(share_T: FloatArray) -> FloatArray:
    """Returns, for each number of tokens, the probability that the sum of some first inputs is that number.

    It is the inverse of 1 - shares as a power series. Each step of Newton's iteration doubles the number of terms.
    """
    series_T, inverse_T = -share_T, np.ones(1)
    series_T[0] = 1.0
    while len(inverse_T) < len(series_T):
        num = min(2 * len(inverse_T), len(series_T))
        inverse_T = np.pad(inverse_T, (0, num - len(inverse_T)))
        error_T = -_convolved(series_T[:num], inverse_T)
        error_T[0] += 2.0
        inverse_T = _convolved(inverse_T, error_T)
    return inverse_T


def _convolved(left_T: FloatArray, right_T: FloatArray) -> FloatArray:
    """Returns the convolution of two arrays, truncated to their length."""
    num, size = len(left_T), 1 << (2 * len(left_T)).bit_length()
    return np.fft.irfft(np.fft.rfft(left_T, size) * np.fft.rfft(right_T, size), size)[:num]
