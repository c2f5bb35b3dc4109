"""Word pruning: removes the words of a text that received the least attention (Tabi, EuroSys'23, section 4.2).

This module needs neither torch nor a tokenizer. A word is any text between white space, such as an emoji or a whole
Chinese sentence. A word is kept or removed as a whole.

In contrast to the paper's equation 5, the mean attention is over the tokens of words only. Special tokens receive a
third of all attention (`experiments.cascades.word_pruning@654e280`), so a mean over all tokens would depend on the
length of the text.
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
"""The first character of every token and one past its last, (N, 2). Both are equal for tokens without text."""
Importance = npt.NDArray[np.floating]
"""The attention that every token received, (N,), including special tokens. NaN: unknown."""
LARGEST_ALPHA = 2.0
"""Tabi tries 0.5 to 0.9, which removes up to 62 % of the words (section 7.4). At 2.0 hardly any word remains."""

_WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class Words:
    """The words of one text, and which tokens belong to them. W is the number of words, N the number of tokens."""

    text: str
    starts_W: npt.NDArray[np.int64]
    """The first character of every word."""
    first_N: npt.NDArray[np.int64]
    """The first word of each token."""
    end_N: npt.NDArray[np.int64]
    """One past each token's last word. For tokens of no word, such as special tokens, at most `first_N`."""

    @classmethod
    def of(cls, text: str, offsets_N2: Offsets) -> Words:
        """Returns the words of a text. A token belongs to every word that it overlaps."""
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

    def importance_W(self, importance_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the largest importance among the tokens of each word; -inf for words without tokens."""
        sizes_N = np.maximum(self.end_N - self.first_N, 0)  # words per token
        nth = np.arange(sizes_N.sum()) - np.repeat(np.cumsum(sizes_N) - sizes_N, sizes_N)
        largest_W = np.full(len(self.starts_W), -np.inf)
        np.maximum.at(largest_W, np.repeat(self.first_N, sizes_N) + nth, np.repeat(importance_N, sizes_N))
        return largest_W

    def kept_text(self, importance_N: npt.NDArray[np.float64], limit: float, *, rest: bool) -> str:
        """Returns the words with an importance above the limit or without tokens, each with the white space after it.

        Returns the whole text if no importance is above the limit. `rest`: see `kept_texts`.
        """
        importance_W = self.importance_W(importance_N)
        kept_W, has_tokens_W = importance_W > limit, importance_W > -np.inf
        if not kept_W.any():
            return self.text
        kept_W |= ~has_tokens_W
        if not rest:
            first, last = np.flatnonzero(has_tokens_W)[[0, -1]].tolist()
            kept_W[:first] = kept_W[last + 1 :] = False
        if kept_W.all():
            return self.text
        begins = [*self.starts_W.tolist(), len(self.text)]
        words = (self.text[begins[k] : begins[k + 1]] for k in np.flatnonzero(kept_W).tolist())
        return self.text[: begins[0]] + "".join(words).rstrip()


def kept_texts(words: Sequence[Words], importance_N: Importance, alpha: float, *, rest: bool = True) -> tuple[str, ...]:
    """Returns an input's texts with the important words only.

    A word is removed if the importance of each of its tokens is at most `alpha` times the mean over all words' tokens.
    `words` has an entry per text, in which tokens of the other texts belong to no word. All texts are unchanged if the
    importance of a word's token is NaN, and a text is unchanged if all its words would be removed. `rest`: whether to
    keep the words before the first token and after the last, which a truncated text has.

    Raises ValueError unless each token has an importance, and PlanError for an invalid `alpha`.
    """
    check_alpha(alpha)
    if any(len(each.first_N) != len(importance_N) for each in words):
        raise ValueError(f"{len(importance_N)} importances for {len(words[0].first_N)} tokens")
    exact_N: npt.NDArray[np.float64] = importance_N.astype(np.float64)  # compare in full precision
    limit = alpha * _mean_importance(words, exact_N)
    if math.isnan(limit):
        return tuple(each.text for each in words)
    return tuple(each.kept_text(exact_N, limit, rest=rest) for each in words)


def _mean_importance(words: Sequence[Words], importance_N: Importance) -> float:
    """Returns the mean importance over the tokens of words; NaN if there are none, or if one is NaN."""
    are_words_N = np.logical_or.reduce([each.are_words_N for each in words])
    return float(importance_N[are_words_N].mean(dtype=np.float64)) if are_words_N.any() else math.nan


def relative_importance(words: Sequence[Words], importance_N: Importance) -> npt.NDArray[np.float64]:
    """Returns the smallest alpha that removes each word: its largest token importance divided by the mean.

    Words without tokens are left out. The result is empty if an importance is NaN.
    """
    exact_N: npt.NDArray[np.float64] = importance_N.astype(np.float64)
    mean = _mean_importance(words, exact_N)
    if math.isnan(mean):
        return np.zeros(0)
    importance_W = np.concatenate([each.importance_W(exact_N) for each in words])
    return importance_W[importance_W > -np.inf] / mean


def alpha_for(share: float, relative_importances: npt.NDArray[np.float64]) -> float:
    """Returns the alpha that removes a share of words. Raises DataError without words, or if no valid alpha does."""
    check_share(share)
    if not len(relative_importances):
        raise DataError("the attention of words is unknown, so no alpha can be chosen")
    alpha = float(np.quantile(relative_importances, share))
    if not 0 < alpha <= LARGEST_ALPHA:
        raise DataError(
            f"{share:.0%} of the words get up to {alpha:.3g} times the mean attention; alpha is at most "
            f"{LARGEST_ALPHA:g}: prune a smaller share"
        )
    return alpha


def check_share(share: float) -> None:
    """Raises DataError unless `share` is above 0 and below 1."""
    if not 0 < share < 1:
        raise DataError(f"the share of words to prune must be above 0 and below 1, not {share}")


def num_words(row: str | Sequence[str]) -> int:
    """Returns the number of words of a text or of several."""
    return len(row.split()) if isinstance(row, str) else sum(map(num_words, row))


def check_alpha(alpha: float) -> None:
    """Raises PlanError unless alpha is above 0 and at most `LARGEST_ALPHA`."""
    if not 0 < alpha <= LARGEST_ALPHA:
        raise PlanError(f"the alpha of word pruning must be above 0 and at most {LARGEST_ALPHA:g}, not {alpha}")


def check_prune(prune: Mapping[int, float], networks: Sequence[int]) -> None:
    """Raises PlanError for an invalid alpha, and for a block that is not the end of a network before another network.

    `prune`: alphas by block. `networks`: one past the last block of each network; empty for a single network.
    """
    ends = [bound - 1 for bound in networks[:-1]]
    for block, alpha in prune.items():
        if block not in ends:
            after = f"its networks end after blocks {ends}" if ends else "the model is a single network"
            raise PlanError(f"words can only be pruned between two networks, not after block {block}: {after}")
        check_alpha(alpha)
