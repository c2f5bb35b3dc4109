"""Multi30k (Elliott et al. 2016), raw: what is said of a picture in English and in German, line by line."""

from __future__ import annotations

import gzip

from experiments.data import require_data

Pairs = list[tuple[str, str]]
"""English and German of one picture."""

TRAIN, VALIDATION, TEST = "train", "val", "test_2016_flickr"


def pairs_of(part: str) -> Pairs:
    """29,000 pairs of `train`, 1,014 of `val`, 1,000 of `test_2016_flickr`."""
    english, german = (_lines(f"multi30k/{part}.{language}.gz") for language in ("en", "de"))
    return list(zip(english, german, strict=True))


def directed(pairs: Pairs, direction: str) -> Pairs:
    """Source and target; `direction` is en-de or de-en."""
    return pairs if direction == "en-de" else [(german, english) for english, german in pairs]


def _lines(name: str) -> list[str]:
    with gzip.open(require_data(name), "rt", encoding="utf-8") as file:
        return [line.strip() for line in file]
