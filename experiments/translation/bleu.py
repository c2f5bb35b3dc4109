"""BLEU (Papineni et al. 2002) of a corpus, as sacrebleu's `13a` counts it: one reference, words by mteval's rules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import exp, log

ORDERS = range(1, 5)


def bleu(answers: Sequence[str], references: Sequence[str]) -> float:
    """In percent; 0 where no four words in a row are right."""
    right, all_of_them = Counter[int](), Counter[int]()
    said = wanted = 0
    for answer, reference in zip(answers, references, strict=True):
        words, expected = words_of(answer), words_of(reference)
        said, wanted = said + len(words), wanted + len(expected)
        for order in ORDERS:
            found, known = _grams(words, order), _grams(expected, order)
            right[order] += (found & known).total()
            all_of_them[order] += found.total()
    if not all(right[order] for order in ORDERS):
        return 0.0
    precision = sum(log(right[order] / all_of_them[order]) for order in ORDERS) / len(ORDERS)
    return 100 * exp(precision + min(0.0, 1 - wanted / said))


def words_of(text: str) -> list[str]:
    """By the rules of mteval-v13a, for languages that put spaces between words."""
    for found, put in _RULES:
        text = found.sub(put, text)
    return text.split()


_RULES = [
    (re.compile(pattern), put)
    for pattern, put in (
        (r"([\{-\~\[-\` -\&\(-\+\:-\@\/])", r" \1 "),
        (r"([^0-9])([\.,])", r"\1 \2 "),
        (r"([\.,])([^0-9])", r" \1 \2"),
        (r"([0-9])(-)", r"\1 \2 "),
    )
]


def _grams(words: list[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[at : at + order]) for at in range(len(words) - order + 1))
