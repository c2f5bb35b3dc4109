"""Recorded sequences: how many tokens every prompt had, and what came of it (Azure LLM inference 2023, both files)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from earlyexit.data.images import check_file
from earlyexit.data.text_tables import csv_rows
from earlyexit.errors import DataError
from profiles.lengths import Lengths, parse_length

PROMPT, ANSWER = "ContextTokens", "GeneratedTokens"
GROUPS = 32
Pairs = tuple[tuple[int, int], ...]
"""Tokens of prompt and answer, sequence by sequence."""


def read_sequences(path: Path) -> Pairs:
    """All rows of a table with these two columns; raises DataError naming file, line and what is wrong."""
    check_file(path)
    found = tuple(
        (parse_length(row[PROMPT], f"{path}:{line}", PROMPT), parse_length(row[ANSWER], f"{path}:{line}", ANSWER))
        for line, row in csv_rows(path, (PROMPT, ANSWER))
    )
    if not found:
        raise DataError(f"{path}:1: holds no sequences below its columns")
    return found


def grouped(tokens: Sequence[int]) -> Lengths:
    """Lengths of as many as planners weigh quickly: 32 groups of equally many, each of its mean in whole tokens."""
    parts = np.array_split(np.sort(np.array(tokens, dtype=np.float64)), min(GROUPS, len(tokens)))
    weights: dict[int, float] = {}
    for part in parts:
        length = max(1, round(float(part.mean())))
        weights[length] = weights.get(length, 0.0) + len(part)
    return Lengths.weighted(weights)
