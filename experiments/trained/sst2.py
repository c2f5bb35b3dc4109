"""SST-2: phrases and sentences of film reviews and whether they praise, as the shared data has them."""

from __future__ import annotations

import csv
from random import Random

from experiments.data import require_data

TRAIN, DEV = "sst2/train.tsv", "sst2/dev.tsv"
OPINIONS = {"0": "negative", "1": "positive"}


def phrases(seed: int = 0) -> list[tuple[str, str]]:
    """The 67,349 phrases of train, in an order drawn once."""
    pairs = _pairs(TRAIN)
    Random(seed).shuffle(pairs)
    return pairs


def sentences() -> list[tuple[str, str]]:
    """The 872 whole sentences of dev."""
    return _pairs(DEV)


def _pairs(name: str) -> list[tuple[str, str]]:
    """GLUE's files hold bare quotes: no quoting."""
    with require_data(name).open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row["sentence"], OPINIONS[row["label"]]) for row in rows]
