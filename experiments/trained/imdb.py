"""IMDB: film reviews and whether they praise, as the shared data has them."""

from __future__ import annotations

import csv

from experiments.data import require_data
from experiments.trained.sst2 import OPINIONS

REVIEWS = "imdb/imdb.csv"


def pairs() -> list[tuple[str, str]]:
    """2,000 reviews and their opinions, in the order of the file."""
    with require_data(REVIEWS).open(newline="", encoding="utf-8") as file:
        return [(row["reviews"], OPINIONS[row["labels"]]) for row in csv.DictReader(file)]
