"""AG News: texts and their topics, as the shared data has them."""

from __future__ import annotations

import csv

from experiments.data import require_data

LEARN, TEST = "ag_news/alps_dev.tsv", "ag_news/test.csv"
TOPICS = ("World", "Sports", "Business", "Sci/Tech")
"""Classes 1 to 4 of the test file."""


def learn_pairs() -> list[tuple[str, str]]:
    """10,001 texts to learn from and to calibrate with, and their topics; the file knows no quoting."""
    with require_data(LEARN).open(newline="", encoding="utf-8") as file:
        return [(text, label) for text, label in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]


def unseen_pairs() -> list[tuple[str, str]]:
    """7,600 others; title and description are one text."""
    with require_data(TEST).open(newline="", encoding="utf-8") as file:
        return [(f"{title} {text}", TOPICS[int(topic) - 1]) for topic, title, text in csv.reader(file)]
