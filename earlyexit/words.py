"""Word pruning: a text without the words to which a network's attention went least (Tabi, EuroSys'23, section 4.2).

Pure; needs neither torch nor a tokenizer. A word is what stands between white space, whatever the language: an emoji is
one, and so is a Chinese sentence, which therefore stays unless all of it may go.

Where we differ from the paper's equation 5: the mean is over words' tokens. Special tokens take a third of all
attention (`experiments.cascades.word_pruning@654e280` says how much), so that a mean over all would mean something
else for every length of text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError, PlanError

Offsets = npt.NDArray[np.int64]
"""For every token its first character in the text and one past its last, (N, 2); equal for tokens of no text."""
Importance = npt.NDArray[np.floating]
"""The attention that every token received, (N,), special tokens included. NaN: unknown."""
LARGEST_ALPHA = 2.0
"""Tabi tries 0.5 to 0.9, which is up to 62 % of the words (section 7.4); at twice the mean hardly any is left."""

_WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class Words:
    """The words of one text and their tokens."""

    text: str
    starts_W: npt.NDArray[np.int64]
    """First character of every word."""
    first_N: npt.NDArray[np.int64]
    """The first word of each token."""
    end_N: npt.NDArray[np.int64]
    """One past the last word; at most the first for tokens of no word, such as special tokens and lone spaces."""

    @classmethod
    def of(cls, text: str, offsets_N2: Offsets) -> Words:
        """Returns the words by the places of tokens; a token belongs to all words that it touches."""
        spans = np.array([word.span() for word in _WORD.finditer(text)], dtype=np.int64).reshape(-1, 2)
        starts_W, ends_W = spans[:, 0], spans[:, 1]
        offsets_N2 = offsets_N2.reshape(-1, 2)
        first_N = np.searchsorted(ends_W, offsets_N2[:, 0], side="right")
        end_N = np.searchsorted(starts_W, offsets_N2[:, 1], side="left")
        return cls(text, starts_W, first_N, np.where(offsets_N2[:, 0] < offsets_N2[:, 1], end_N, first_N))

    @property
    def are_words_N(self) -> npt.NDArray[np.bool_]:
        """Whether each token belongs to a word."""
        return self.first_N < self.end_N

    def left(self, stays_N: npt.NDArray[np.bool_], *, rest: bool) -> str:
        """Returns the text of the words that stay, by the tokens that stay; the whole text if no token stays."""
        stays_N = stays_N & self.are_words_N
        return self.without(self.kept_W(stays_N, rest=rest)) if stays_N.any() else self.text

    def kept_W(self, stays_N: npt.NDArray[np.bool_], *, rest: bool) -> npt.NDArray[np.bool_]:
        """Returns which words stay: those with a token that stays, and those without any token.

        `rest`: whether words behind the last token, where the text was cut, stay too.
        """
        told_W = self._touched_W(self.are_words_N)
        untold_W = ~told_W
        if not rest and told_W.any():
            untold_W[int(np.flatnonzero(told_W)[-1]) + 1 :] = False
        kept_W: npt.NDArray[np.bool_] = self._touched_W(stays_N) | untold_W
        return kept_W

    def without(self, kept_W: npt.NDArray[np.bool_]) -> str:
        """Returns the text of the words that stay, each with the white space behind it."""
        if kept_W.all():
            return self.text
        begins = [*self.starts_W.tolist(), len(self.text)]
        words = (self.text[begins[k] : begins[k + 1]] for k in np.flatnonzero(kept_W).tolist())
        return self.text[: begins[0]] + "".join(words).rstrip()

    def best_W(self, importance_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the largest importance of every word's tokens, without words that have no token."""
        sizes_N = np.maximum(self.end_N - self.first_N, 0)
        nth = np.arange(sizes_N.sum()) - np.repeat(np.cumsum(sizes_N) - sizes_N, sizes_N)
        best_W = np.full(len(self.starts_W), -np.inf)
        np.maximum.at(best_W, np.repeat(self.first_N, sizes_N) + nth, np.repeat(importance_N, sizes_N))
        return best_W[best_W > -np.inf]

    def _touched_W(self, chosen_N: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        steps = np.zeros(len(self.starts_W) + 1, dtype=np.int64)
        np.add.at(steps, self.first_N[chosen_N], 1)
        np.add.at(steps, self.end_N[chosen_N], -1)
        touched: npt.NDArray[np.bool_] = np.cumsum(steps)[:-1] > 0
        return touched


def kept_texts(words: Sequence[Words], importance_N: Importance, alpha: float, *, rest: bool = True) -> tuple[str, ...]:
    """Returns an input's texts without words whose tokens all get at most alpha times the mean of all words' tokens.

    `words`: of every text; in each, tokens of other texts belong to no word. Texts are unchanged if the importance of a
    word's token is unknown, and a text if all its words would go. Text behind the last token, where it was cut, stays
    unless `rest` is false. Raises ValueError unless there is one importance per token, PlanError for an invalid alpha.
    """
    check_alpha(alpha)
    if any(len(each.first_N) != len(importance_N) for each in words):
        raise ValueError(f"{len(importance_N)} tokens have an importance, of {len(words[0].first_N)}")
    importance_N = importance_N.astype(np.float64)  # compare in full precision
    limit = alpha * mean_of_words(words, importance_N)
    if math.isnan(limit):
        return tuple(each.text for each in words)
    stays_N = importance_N > limit
    return tuple(each.left(stays_N, rest=rest) for each in words)


def mean_of_words(words: Sequence[Words], importance_N: Importance) -> float:
    """Returns the mean importance of the tokens of words; NaN if there are none, or if one is unknown."""
    of_words_N = np.logical_or.reduce([each.are_words_N for each in words])
    return float(importance_N[of_words_N].mean(dtype=np.float64)) if of_words_N.any() else math.nan


def relative_importance(words: Sequence[Words], importance_N: Importance) -> npt.NDArray[np.float64]:
    """Returns the importance of each word's best token relative to the mean: the smallest alpha that cuts the word.

    It has only words with tokens, and is empty if an importance is unknown.
    """
    exact_N: npt.NDArray[np.float64] = importance_N.astype(np.float64)
    mean = mean_of_words(words, exact_N)
    if math.isnan(mean):
        return np.zeros(0)
    return np.concatenate([each.best_W(exact_N) for each in words]) / mean


def alpha_for(share: float, standings: npt.NDArray[np.float64]) -> float:
    """Returns the alpha that cuts a share of these words; raises DataError without words, or if no alpha does."""
    check_share(share)
    if not len(standings):
        raise DataError("nothing is known of how much attention words get: no alpha cuts a share of them")
    alpha = float(np.quantile(standings, share))
    if not 0 < alpha <= LARGEST_ALPHA:
        raise DataError(
            f"{share:.0%} of the words get up to {alpha:.3g} times the mean: alphas go to {LARGEST_ALPHA:g}"
        )
    return alpha


def check_share(share: float) -> None:
    """Raise DataError unless `share` is above 0 and below 1."""
    if not 0 < share < 1:
        raise DataError(f"a share of the words to be pruned is above 0 and below 1, not {share}")


def num_words(row: str | Sequence[str]) -> int:
    """Returns the number of words of a text or of several."""
    return len(row.split()) if isinstance(row, str) else sum(map(num_words, row))


def check_alpha(alpha: float) -> None:
    """Raise PlanError for an alpha outside 0 to `LARGEST_ALPHA`."""
    if not 0 < alpha <= LARGEST_ALPHA:
        raise PlanError(
            f"words are pruned that get up to alpha times the mean attention, with alpha above 0 and up to "
            f"{LARGEST_ALPHA:g}, not {alpha}"
        )


def check_prune(prune: Mapping[int, float], networks: Sequence[int]) -> None:
    """Raise PlanError for invalid alphas, or for blocks that are not a network's end before another network.

    `networks`: one past the last block of each, as in a plan; empty for a single network.
    """
    ends = [bound - 1 for bound in networks[:-1]]
    for block, alpha in prune.items():
        if block not in ends:
            after = f"networks end after blocks {ends}" if ends else "the model is a single one"
            raise PlanError(f"words are pruned where inputs go on to another network, not after block {block}: {after}")
        check_alpha(alpha)
