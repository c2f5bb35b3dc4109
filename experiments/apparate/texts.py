"""Text streams that drift: sentences of SST-2, IMDB and AG News in changing mixes (Apparate section 5.1).

Apparate streams Amazon's reviews by category and user, and IMDB's reviews sentence by sentence. Amazon's reviews are
not available. Phrases of SST-2, reviews of IMDB and news replace their categories. The sentiment model was not trained
on news.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from earlyexit.data.rows import LabelledRows, read_labelled
from experiments.data import require_data

SST2 = "sst2/train.tsv"
IMDB = "imdb/imdb.csv"
AG_NEWS = "ag_news/test.csv"
FILES = (SST2, IMDB, AG_NEWS)
LEARNT = 12_000
"""Number of SST-2 phrases that train the model. Streams hold other phrases."""
LEAST_WORDS = 3
"""Sentences of reviews with fewer words are left out."""
SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+|<br\s*/?>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Sentences by source."""

    reviews: tuple[str, ...]
    """Sentences of IMDB's reviews, in the order of the file."""
    phrases: tuple[str, ...]
    """Phrases of SST-2, in random order."""
    news: Mapping[str, tuple[str, ...]]
    """Sentences of AG News, by category."""


def read_phrases(rng: np.random.Generator) -> tuple[LabelledRows, tuple[str, ...]]:
    """Returns labelled phrases for training, and other phrases for streams."""
    rows = read_labelled(require_data(SST2), text_column="sentence")
    order = rng.permutation(len(rows)).tolist()
    return rows.select(order[:LEARNT]), rows.select(order[LEARNT:]).texts


def read_pools(phrases: tuple[str, ...], rng: np.random.Generator) -> Pools:
    """Returns all sentences; exits the process with a message if a file is missing."""
    reviews = read_labelled(require_data(IMDB), text_column="reviews", label_column="labels").texts
    with require_data(AG_NEWS).open(newline="", encoding="utf-8") as file:
        rows = [(category, f"{title}. {words}".replace("\\", " ")) for category, title, words in csv.reader(file)]
    categories = sorted({category for category, _ in rows})
    news = {name: [text for category, text in rows if category == name] for name in categories}
    sentences = (each for review in reviews for each in SENTENCE_ENDS.split(review))
    return Pools(
        reviews=tuple(each.strip() for each in sentences if len(each.split()) >= LEAST_WORDS),
        phrases=phrases,
        news={name: tuple(rng.permutation(np.array(texts, dtype=object))) for name, texts in news.items()},
    )


Share = Mapping[str, float]
"""Shares of phrases, reviews and news, which add up to 1."""


def mixed(pools: Pools, share_at: Callable[[float], Share], num_inputs: int, rng: np.random.Generator) -> list[str]:
    """Returns sentences, each from a pool that is drawn by the shares at its position in the stream, from 0 to 1."""
    every_news = [text for texts in zip(*pools.news.values(), strict=False) for text in texts]
    of_pool = {"phrases": cycle(pools.phrases), "reviews": cycle(pools.reviews), "news": cycle(every_news)}
    names = list(of_pool)
    sentences = []
    for place in range(num_inputs):
        shares = share_at(place / num_inputs)
        sentences.append(next(of_pool[names[rng.choice(len(names), p=[shares.get(name, 0.0) for name in names])]]))
    return sentences


def reviews_in_order(pools: Pools, num_inputs: int, _rng: np.random.Generator) -> list[str]:
    """Returns reviews sentence by sentence, in the order of the data: Apparate's own IMDB stream."""
    return list(pools.reviews[:num_inputs])


def by_category(pools: Pools, num_inputs: int, _rng: np.random.Generator) -> list[str]:
    """Returns one category after another, as Apparate does with Amazon's: phrases, reviews, and news between them."""
    phrases, reviews = iter(pools.phrases), iter(pools.reviews)
    news = {name: iter(texts) for name, texts in pools.news.items()}
    first, second, third, fourth = news.values()
    parts = (phrases, reviews, first, phrases, second, reviews, third, phrases, fourth, reviews)
    share = num_inputs // len(parts)
    return [text for part in parts for _, text in zip(range(share), part, strict=False)]


def gradually(pools: Pools, num_inputs: int, rng: np.random.Generator) -> list[str]:
    """Returns a mix that changes linearly from only phrases to half reviews and half news."""
    return mixed(
        pools, lambda at: {"phrases": 1 - at, "reviews": at / 2, "news": 1 - (1 - at) - at / 2}, num_inputs, rng
    )


def returning(pools: Pools, num_inputs: int, rng: np.random.Generator) -> list[str]:
    """Returns three mixes in turn, four times: phrases; reviews; reviews with two fifths of news."""
    mixes: tuple[Share, ...] = ({"phrases": 1.0}, {"reviews": 1.0}, {"reviews": 0.6, "news": 0.4})
    return mixed(pools, lambda at: mixes[int(at * 4 * len(mixes)) % len(mixes)], num_inputs, rng)


STREAMS: Mapping[str, Callable[[Pools, int, np.random.Generator], list[str]]] = {
    "imdb": reviews_in_order,
    "categories": by_category,
    "gradual": gradually,
    "returning": returning,
}
