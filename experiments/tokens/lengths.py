"""Tokens of real texts, as the packaged MiniLM's tokenizer counts them: mixes of short and long inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from earlyexit.dataset import read_labelled
from earlyexit.tokenizer import TextTokenizer
from experiments.data import require_data
from experiments.trained import ag_news, imdb
from offramp.jobs.packaged import resolve_backbone
from simulator.decisions import IntArray

LONGEST = 512
"""Tokens at which texts are cut: BERT's most."""
EACH = 2000
"""Texts of either kind in the mix: all reviews that there are."""


def text_lengths() -> Mapping[str, IntArray]:
    """By name of the mix, in an order of chance (seed 0); ends the experiment where the data is absent."""
    news = _tokens(text for text, _ in ag_news.unseen_pairs())
    reviews = _tokens(text for text, _ in imdb.pairs())
    intents = _tokens(read_labelled(require_data("clinc150/data_full.json"), part="test").texts)
    rng = np.random.default_rng(0)
    news = rng.permutation(news)
    return {
        "AG News + IMDB": rng.permutation(np.concatenate([news[:EACH], reviews[:EACH]])),
        "AG News": news,
        "CLINC150": rng.permutation(intents),
    }


def batches(lengths: IntArray, size: int) -> list[list[int]]:
    """Full batches in order."""
    return [lengths[at : at + size].tolist() for at in range(0, len(lengths) - size + 1, size)]


def _tokens(texts: Iterable[str]) -> IntArray:
    tokenizer = TextTokenizer.load(Path(resolve_backbone("minilm")), LONGEST)
    return np.array([each.length for each in tokenizer.encode(list(texts), truncate=True)], dtype=np.int64)
