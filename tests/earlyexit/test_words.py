"""Word pruning: words are kept by the attention of their tokens, and words without tokens are kept too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from earlyexit.words import LARGEST_ALPHA, Words, alpha_for, kept_texts, num_words, relative_importance

CLS = (0, 0)


def offsets(*spans: tuple[int, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(spans, dtype=np.int64).reshape(-1, 2)


def pruned(text: str, offsets_N2: Any, importance_N: Any, alpha: float, *, rest: bool = True) -> str:
    return kept_texts([Words.of(text, offsets_N2)], importance_N, alpha, rest=rest)[0]


def cut(text: str, spans: list[tuple[int, int]], importance: list[float], alpha: float = 0.8) -> str:
    return pruned(text, offsets(*spans), np.array(importance), alpha)


def test_a_word_is_kept_if_a_token_gets_more_than_alpha_times_the_mean() -> None:
    # [CLS] this | film | shines [SEP]; the mean over words is 4, so that 0.8 of it is 3.2.
    spans = [CLS, (0, 4), (5, 9), (10, 16), CLS]
    assert cut("this film shines", spans, [90.0, 3.0, 4.0, 5.0, 90.0]) == "film shines"
    assert cut("this film shines", spans, [90.0, 4.0, 3.2, 4.8, 90.0]) == "this shines", "no more than the limit is cut"
    # beautiful|ly gone: only "gone" is below half of the mean of 2.
    spans = [CLS, (0, 9), (9, 11), (12, 16), CLS]
    assert cut("beautifully gone", spans, [9.0, 5.0, 0.1, 0.9, 9.0], alpha=0.5) == "beautifully"
    assert cut("beautifully gone", spans, [9.0, 0.1, 5.0, 0.9, 9.0], alpha=0.5) == "beautifully"


def test_a_text_is_unchanged_if_an_importance_is_unknown_or_it_has_no_words() -> None:
    spans = [CLS, (0, 1), (2, 3), CLS]
    assert cut("a b", spans, [1.0, math.nan, 9.0, 1.0]) == "a b"
    assert cut("a b", spans, [math.nan, 1.0, 9.0, math.nan]) == "b", "that of special tokens is never asked"
    assert cut("", [CLS, CLS], [1.0, 1.0]) == ""
    assert cut(" \t\n", [CLS, CLS], [1.0, 1.0]) == " \t\n"
    assert cut("a b", [CLS, CLS], [1.0, 1.0]) == "a b"
    assert pruned("a b", offsets(), np.zeros(0), 0.5) == "a b"


def test_words_without_tokens_are_kept() -> None:
    # A text cut after "b"; and a character that the tokenizer dropped.
    spans = [CLS, (0, 1), (2, 3), CLS]
    assert cut("a b c d", spans, [0.0, 1.0, 9.0, 0.0]) == "b c d"
    assert cut("a b c d", spans, [0.0, 1.0, 1.0, 0.0], alpha=1.0) == "a b c d"
    assert pruned("a b c d", offsets(*spans), np.array([0.0, 1.0, 9.0, 0.0]), 0.8, rest=False) == "b"
    assert pruned("a b c d", offsets(*spans), np.array([0.0, 9.0, 9.0, 0.0]), 0.8, rest=False) == "a b"
    assert cut("a \u200b b", [CLS, (0, 1), (4, 5), CLS], [0.0, 1.0, 9.0, 0.0]) == "\u200b b"


def test_white_space_belongs_to_the_word_before_it() -> None:
    spans = [(1, 2), (4, 5), (6, 7)]
    assert cut(" a  b\nc ", spans, [9.0, 1.0, 9.0]) == " a  c"
    assert cut(" a  b\nc ", spans, [9.0, 9.0, 1.0]) == " a  b"
    assert cut(" a  b\nc ", spans, [9.0, 9.0, 9.0]) == " a  b\nc ", "what loses no word is the very text"
    assert cut("a b c", [(0, 1), (1, 3), (3, 5)], [9.0, 0.1, 9.0]) == "a c"
    assert cut("a b", [(0, 1), (1, 2), (2, 3)], [9.0, 500.0, 9.0]) == "a b", "a lone space is no word's"


def test_the_texts_of_a_pair_share_one_mean_and_a_words_largest_importance_counts() -> None:
    # [CLS] a b [SEP] c d [SEP]: the mean is 4; of the second text alone it would be 1.5.
    first = offsets(CLS, (0, 1), (2, 3), CLS, CLS, CLS, CLS)
    second = offsets(CLS, CLS, CLS, CLS, (0, 1), (2, 3), CLS)
    importance = np.array([50.0, 3.0, 10.0, 50.0, 1.0, 2.0, 50.0])
    words = [Words.of("a b", first), Words.of("c d", second)]
    assert kept_texts(words, importance, 0.4) == ("a b", "d")
    assert kept_texts(words, importance, 0.8) == ("b", "c d"), "no text is left empty"
    assert relative_importance(words, importance).tolist() == [0.75, 2.5, 0.25, 0.5]
    words = [Words.of("ab c \u200b d", offsets(CLS, (0, 1), (1, 2), (3, 4), (7, 8), CLS))]
    assert relative_importance(words, np.array([9.0, 1.0, 3.0, 2.0, 2.0, 9.0])).tolist() == [1.5, 1.0, 1.0]
    assert relative_importance(words, np.array([9.0, 1.0, math.nan, 2.0, 2.0, 9.0])).size == 0


@given(
    words=st.lists(st.text("ab🎉好", min_size=1, max_size=4), max_size=12),
    seed=st.integers(0, 999),
    alpha=st.floats(0.01, LARGEST_ALPHA),
)
def test_kept_words_stay_in_their_order(words: list[str], seed: int, alpha: float) -> None:
    text = " ".join(words)
    spans = offsets(CLS, *((k, k + 1) for k, letter in enumerate(text) if letter != " "), CLS)
    importance = np.random.default_rng(seed).exponential(size=len(spans))
    left = pruned(text, spans, importance, alpha).split()
    rest = iter(words)
    assert all(word in rest for word in left)
    assert bool(left) == bool(words)


@given(seed=st.integers(0, 999))
def test_a_larger_alpha_keeps_fewer_words(seed: int) -> None:
    text = " ".join("abcdefghij")
    spans = offsets(*((2 * k, 2 * k + 1) for k in range(10)))
    importance = np.random.default_rng(seed).exponential(size=10)
    limit = np.max(importance) / np.mean(importance)
    counts = [num_words(pruned(text, spans, importance, alpha)) for alpha in (0.1, 0.4, 0.7, 1.0) if alpha < limit]
    assert counts == sorted(counts, reverse=True)


@given(seed=st.integers(0, 999), share=st.floats(0.05, 0.6))
def test_an_alpha_is_found_for_a_share_of_the_words(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    text = " ".join("ab" for _ in range(200))
    spans = offsets(CLS, *((3 * k + part, 3 * k + part + 1) for k in range(200) for part in (0, 1)), CLS)
    importance = rng.uniform(1, 3, size=len(spans))
    alpha = alpha_for(share, relative_importance([Words.of(text, spans)], importance))
    assert abs(200 * (1 - share) - num_words(pruned(text, spans, importance, alpha))) <= 1
