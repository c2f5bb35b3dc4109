"""Tokens of plain texts word by word, each word's looked up: for tokenizers that cut a text into words first.

BERT's tokenizers (Devlin et al., section 4.1; WordPiece) clean and lower a text, cut it at spaces and punctuation, and
give every word its pieces, whatever stands around it. Of printable ASCII that is one regular expression and a lookup
per word; other texts, and those that may hold special tokens, are left to the tokenizer itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

MOST_WORDS = 20_000
"""That are remembered, about 4 MB; then all are forgotten, and learnt again as they come."""
LONGEST_TEXT = 2_000
"""Characters; longer ones are encoded in threads, where the tokenizer holds nobody up."""
_WORDS = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]")
_PLAIN = re.compile(r"[ -~]*")
_PROBES = ("", "a", "a-b", "The CAT's 3.5!")


class WordPieces:
    """Of one tokenizer; used by several threads, which at worst learn a word twice."""

    def __init__(self, tokenizer: Tokenizer, first: Sequence[int], last: Sequence[int], *, lowers: bool) -> None:
        self._tokenizer = tokenizer
        self._first = list(first)
        self._last = list(last)
        self._lowers = lowers
        self._pieces: dict[str, list[int]] = {}
        special = {token.content[0] for token in tokenizer.get_added_tokens_decoder().values() if token.content}
        self._may_be_special = re.compile("[" + re.escape("".join(sorted(special))) + "]") if special else None

    def ids(self, text: str) -> list[int] | None:
        """Token ids with special tokens; None of a text that is not as plain as that."""
        if len(text) > LONGEST_TEXT or _PLAIN.fullmatch(text) is None:
            return None
        if self._may_be_special is not None and self._may_be_special.search(text) is not None:
            return None
        pieces, ids = self._pieces, self._first.copy()
        for word in _WORDS.findall(text.lower() if self._lowers else text):
            known = pieces.get(word)
            ids += self._learn(word) if known is None else known
        ids += self._last
        return ids

    def _learn(self, word: str) -> list[int]:
        if len(self._pieces) >= MOST_WORDS:
            self._pieces.clear()
        found = self._pieces[word] = list(self._tokenizer.encode(word, add_special_tokens=False).ids)
        return found


def word_pieces_of(tokenizer: Tokenizer) -> WordPieces | None:
    """None of a tokenizer that works otherwise, or does not give some texts the same ids this way."""
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.model)
    if not all(
        isinstance(part, kind) for part, kind in zip(parts, (BertNormalizer, BertPreTokenizer, WordPiece), strict=True)
    ):
        return None
    alone, within = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    if len(alone) != 1 or within.count(alone[0]) != 1:
        return None
    at = within.index(alone[0])
    lowers = bool(cast(BertNormalizer, tokenizer.normalizer).lowercase)
    found = WordPieces(tokenizer, within[:at], within[at + 1 :], lowers=lowers)
    return found if all(found.ids(text) in (None, tokenizer.encode(text).ids) for text in _PROBES) else None
