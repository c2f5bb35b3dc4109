"""Recorded sequences: how many tokens every prompt had, and what came of it (Azure LLM inference 2023, both files)."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from earlyexit.errors import DataError
from profiles.lengths import Lengths, check_length

PROMPT, ANSWER = "ContextTokens", "GeneratedTokens"
GROUPS = 32
Pairs = tuple[tuple[int, int], ...]
"""Tokens of prompt and answer, sequence by sequence."""


def read_sequences(path: Path) -> Pairs:
    """All rows of a table with these two columns; raises DataError naming file, line and what is wrong."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise DataError(f"{path}: cannot be read: {reason}") from error
    reader = csv.DictReader(lines)
    missing = [name for name in (PROMPT, ANSWER) if name not in (reader.fieldnames or ())]
    if missing:
        raise DataError(f"{path}:1: no column {missing[0]}; needed are {PROMPT} and {ANSWER}")
    found = tuple(_pair(path, reader.line_num, row) for row in reader)
    if not found:
        raise DataError(f"{path}:1: holds no sequences below its columns")
    return found


def _pair(path: Path, line: int, row: dict[str, str | None]) -> tuple[int, int]:
    return _tokens(path, line, row, PROMPT), _tokens(path, line, row, ANSWER)


def _tokens(path: Path, line: int, row: dict[str, str | None], name: str) -> int:
    word = row[name] or ""
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
