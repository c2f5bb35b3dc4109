"""Recorded sequences: how many tokens every prompt had, and what came of it (Azure LLM inference 2023, both files)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from earlyexit.data.images import check_file
from earlyexit.data.text_tables import csv_rows
from earlyexit.errors import DataError
from profiles.lengths import Lengths, check_length

PROMPT, ANSWER = "ContextTokens", "GeneratedTokens"
GROUPS = 32
Pairs = tuple[tuple[int, int], ...]
"""Tokens of prompt and answer, sequence by sequence."""


def read_sequences(path: Path) -> Pairs:
    """All rows of a table with these two columns; raises DataError naming file, line and what is wrong."""
    check_file(path)
    rows = csv_rows(path, (PROMPT, ANSWER))
    found = tuple((_tokens(path, line, row, PROMPT), _tokens(path, line, row, ANSWER)) for line, row in rows)
    if not found:
        raise DataError(f"{path}:1: holds no sequences below its columns")
    return found


def _tokens(path: Path, line: int, row: Mapping[str, str], name: str) -> int:
    word = row[name]
    try:
        return check_length(float(word), name)
    except ValueError as error:
        raise DataError(f"{path}:{line}: {name} is {word!r}; needed: a number of tokens") from error
    except DataError as error:
        raise DataError(f"{path}:{line}: {error}") from error


def grouped(tokens: Sequence[int]) -> Lengths:
    """Lengths of as many as planners weigh quickly: 32 groups of equally many, each of its mean in whole tokens."""
    parts = np.array_split(np.sort(np.array(tokens, dtype=np.float64)), min(GROUPS, len(tokens)))
    weights: dict[int, float] = {}
    for part in parts:
        length = max(1, round(float(part.mean())))
        weights[length] = weights.get(length, 0.0) + len(part)
    return Lengths.weighted(weights)
