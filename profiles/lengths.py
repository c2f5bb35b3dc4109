"""How long a service's inputs and sequences are, in tokens, and how full batches of a token budget get."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from earlyexit.data.images import check_file
from earlyexit.data.text_tables import csv_rows
from earlyexit.errors import DataError

MOST_TOKENS = 1_000_000
"""Of one input: far above any model, so that a slip is found before it costs memory."""
MANY = 128
"""Times the longest input: larger batches leave the same at their end as those do."""
STEPS = 64
"""After which the first inputs of batches, one after the other, are what they always are,"""
SETTLED = 1e-13
"""and sooner where they do not change by more than this any longer."""
FloatArray = npt.NDArray[np.float64]
Shares = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of a workload's inputs; refuses lengths that no input has.

    Of a mean alone it is not known how batches fill: budgets of at least the mean are then taken as full.
    """

    mean: float
    """Tokens per input."""
    shares: Shares | None = None
    """Every length that occurs, ascending, with the share of inputs that have it; None: only the mean is known."""

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= MOST_TOKENS:
            raise DataError(f"a mean length is from 1 to {MOST_TOKENS} tokens, not {self.mean:.10g}")

    @classmethod
    def of(cls, tokens: Iterable[float]) -> Lengths:
        """Of inputs, each with its tokens; raises DataError for none, and for lengths that no input has."""
        given = np.array(list(tokens), dtype=np.float64)
        if not len(given):
            raise DataError("lengths of no input; at least one is needed")
        for position, each in enumerate(given.tolist(), start=1):
            check_length(each, f"the {position}. length")
        values, counts = np.unique(given.astype(np.int64), return_counts=True)
        return cls.weighted(dict(zip(values.tolist(), (counts / len(given)).tolist(), strict=True)))

    @classmethod
    def weighted(cls, weights: Mapping[int, float]) -> Lengths:
        """Of lengths and how often each occurs, in any unit; raises DataError for what no input has."""
        total = sum(weights.values())
        if not (weights and math.isfinite(total) and min(weights.values()) > 0):
            raise DataError("each length needs a share above 0, and there must be at least one")
        total = 1.0 if math.isclose(total, 1.0, abs_tol=1e-9) else total
        shares = tuple((check_length(tokens, "a length"), weight / total) for tokens, weight in sorted(weights.items()))
        return cls(mean=sum(length * share for length, share in shares), shares=shares)

    def stretched(self, mean: float, *, most: int) -> Lengths:
        """Lengths of another mean, of the same kind: each as many times as long, in whole tokens, `most` at most."""
        if self.shares is None:
            return Lengths(mean=min(mean, float(most)))
        weights: dict[int, float] = {}
        for length, share in self.shares:
            longer = min(most, max(1, round(length * mean / self.mean)))
            weights[longer] = weights.get(longer, 0.0) + share
        return Lengths.weighted(weights)

    @property
    def shortest(self) -> int:
        """The fewest tokens an input has; 1 where only the mean is known."""
        return self.shares[0][0] if self.shares is not None else 1

    @property
    def longest(self) -> int | None:
        """The most; None where only the mean is known."""
        return self.shares[-1][0] if self.shares is not None else None

    def filled(self, budget: int) -> float:
        """Mean tokens of a batch that takes inputs in turn while the budget has room; one larger input runs alone.

        Exact for lengths drawn independently. What does not fit begins the next batch, so that long inputs begin more
        batches than short ones: first inputs are a Markov chain, and further ones a renewal process.
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
    """A length as a whole number; raises DataError, naming it, for what is none."""
    if not (math.isfinite(tokens) and 1 <= tokens <= MOST_TOKENS and tokens == int(tokens)):
        raise DataError(f"{name} is {tokens:.10g}; an input has a whole number of tokens, from 1 to {MOST_TOKENS}")
    return int(tokens)


def read_lengths(path: Path) -> npt.NDArray[np.int64]:
    """Tokens of inputs, in order, one a line; raises DataError naming file, line, what is wrong and what is allowed."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise DataError(f"{path}: cannot be read: {reason}") from error
    found = [
        parse_length(line.strip(), f"{path}:{number}", "a length")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise DataError(f"{path}:1: holds no lengths; needed: the tokens of an input on each line")
    return np.array(found, dtype=np.int64)


def parse_length(word: str, where: str, name: str) -> int:
    """Returns a length of a file; raises DataError that begins with `where` for a word that is none."""
    try:
        return check_length(float(word), name)
    except ValueError as error:
        raise DataError(f"{where}: {name} is {word!r}; needed: a number of tokens") from error
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


PROMPT, ANSWER = "ContextTokens", "GeneratedTokens"
"""The columns of recorded sequences, as in both files of the Azure LLM inference trace of 2023."""
GROUPS = 32
Pairs = tuple[tuple[int, int], ...]
"""Tokens of prompt and answer, sequence by sequence."""


def read_sequences(path: Path) -> Pairs:
    """Returns the tokens in all rows of a table; raises DataError that names the file, the line and the mistake."""
    check_file(path)
    found = tuple(
        (parse_length(row[PROMPT], f"{path}:{line}", PROMPT), parse_length(row[ANSWER], f"{path}:{line}", ANSWER))
        for line, row in csv_rows(path, (PROMPT, ANSWER))
    )
    if not found:
        raise DataError(f"{path}:1: holds no sequences below its columns")
    return found


def grouped(tokens: Sequence[int]) -> Lengths:
    """Returns few enough lengths for planners: those of 32 groups of equal size, each with its mean in whole tokens."""
    parts = np.array_split(np.sort(np.array(tokens, dtype=np.float64)), min(GROUPS, len(tokens)))
    weights: dict[int, float] = {}
    for part in parts:
        length = max(1, round(float(part.mean())))
        weights[length] = weights.get(length, 0.0) + len(part)
    return Lengths.weighted(weights)


@lru_cache(maxsize=256)
def _filled(shares: Shares, budget: int) -> float:
    length_L, share_L = np.array([length for length, _ in shares]), np.array([share for _, share in shares])
    alone_L = length_L > budget
    alone, share_T = float(share_L[alone_L].sum()), np.zeros(budget + 1)
    share_T[length_L[~alone_L]] = share_L[~alone_L]
    further_T = _renewals(share_T)
    first_T, first_alone = share_T, alone  # the chance of each length to be a batch's first
    for _ in range(STEPS):
        ever_T = _convolved(first_T, further_T).cumsum()  # how many sums of at most so many tokens a batch passes
        # The next begins with an input that does not fit: whose length is above what is left.
        next_T, next_alone = share_T * (ever_T[-1] - ever_T[::-1] + first_alone), alone * (ever_T[-1] + first_alone)
        total = float(next_T.sum()) + next_alone
        moved = float(np.abs(next_T / total - first_T).sum())
        first_T, first_alone = next_T / total, next_alone / total
        if moved < SETTLED:
            break
    beyond_T = 1.0 - share_T.cumsum()  # the share of inputs that have more tokens
    held_T = _convolved(first_T, further_T) * beyond_T[::-1]
    mean_alone = float(length_L[alone_L] @ share_L[alone_L]) / alone if alone else 0.0
    return float(held_T @ np.arange(budget + 1)) + first_alone * mean_alone


def _renewals(share_T: FloatArray) -> FloatArray:
    """Per sum of tokens, the chance that some inputs add up to it; of no input that is 0.

    As a power series the inverse of 1 - shares: Newton's iteration doubles its terms.
    """
    left_T, found_T = -share_T, np.ones(1)
    left_T[0] = 1.0
    while len(found_T) < len(left_T):
        num = min(2 * len(found_T), len(left_T))
        found_T = np.pad(found_T, (0, num - len(found_T)))
        error_T = -_convolved(left_T[:num], found_T)
        error_T[0] += 2.0
        found_T = _convolved(found_T, error_T)
    return found_T


def _convolved(left_T: FloatArray, right_T: FloatArray) -> FloatArray:
    """By their sum, as far as they go themselves."""
    num, size = len(left_T), 1 << (2 * len(left_T)).bit_length()
    return np.fft.irfft(np.fft.rfft(left_T, size) * np.fft.rfft(right_T, size), size)[:num]
