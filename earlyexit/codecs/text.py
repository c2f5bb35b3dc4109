"""Texts, or pairs of texts such as a question and a sentence, to token ids. This needs neither torch nor transformers.

BERT's tokenizers (Devlin et al., section 4.1; WordPiece) clean and lower a text, cut it at spaces and punctuation, and
give every word its pieces, whatever stands around it. `WordPieces` does this for printable ASCII by one regular
expression and a look-up per word. Other texts, and those that may hold special tokens, are left to the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from earlyexit.codecs.base import Codec, Columns, Row, texts_of
from earlyexit.errors import InputError, ModelFolderError, UnprocessableInputError, first_line
from earlyexit.network.boundary import Column, Encoded
from earlyexit.words import Words

LONG_CHARS = 20_000
"""Characters of a request's texts above which tokenizing takes milliseconds."""
TEXT: Mapping[str, Any] = {"type": "string", "minLength": 1}
TOKENIZER_FILE = "tokenizer.json"
TextOrPair = str | tuple[str, str]
CHARACTERS_PER_TOKEN = 16
"""Characters per token of the model's length limit that are tokenized first, of a text that cannot fit."""
MARGIN = 64
"""Tokens beyond the limit that a prefix must have: the last tokens may change where a text is cut."""
LONG = 2048
"""Characters from which a text is encoded by a call that releases the interpreter's lock; short texts are slower so."""


def read_tokenizer(folder: Path) -> Tokenizer:
    """Returns a model folder's tokenizer, without padding and truncation; raises ModelFolderError without one."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ModelFolderError(f"{path} is missing: Offramp needs the fast tokenizer's file")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises this class alone
        raise ModelFolderError(f"{path} holds no fast tokenizer that can be read: {first_line(error)}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


class TokenizedCodec(Codec[Row]):
    """A codec by the tokenizer in the model's folder, up to `max_length` tokens."""

    prunes = True
    reads_tokenizer = True

    def __init__(self, max_length: int) -> None:
        """`max_length`: of an input, in tokens; raises ValueError below 1."""
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}; at least 1 is needed")
        self.max_length = max_length

    def load(self, folder: Path) -> None:
        self.use(read_tokenizer(folder))

    def use(self, tokenizer: Tokenizer) -> None:
        """Encode by this tokenizer from now on; it neither pads nor truncates."""
        self._tokenizer = tokenizer
        # Truncation is a state of a tokenizer, and other threads encode at the same time: so there are two.
        self._cutting = Tokenizer.from_str(tokenizer.to_str())
        self._cutting.enable_truncation(self.max_length)
        self._words = word_pieces_of(tokenizer)
        self._special = tuple(tokenizer.num_special_tokens_to_add(is_pair) for is_pair in (False, True))
        """Special tokens of a text, and of a pair."""

    def texts(self, row: Row) -> tuple[str, ...]:
        """Returns the texts of a row, which is one text or several."""
        return (row,) if isinstance(row, str) else cast(tuple[str, ...], row)

    def row_of(self, texts: Sequence[str]) -> Row:
        return cast(Row, texts[0] if len(texts) == 1 else tuple(texts))

    def is_slow(self, rows: Sequence[Row]) -> bool:
        return sum(len(text) for row in rows for text in self.texts(row)) > LONG_CHARS

    def surely_takes(self, row: Row) -> bool:
        """A token of ASCII has at least one character, except special tokens and one that some tokenizers put first."""
        texts = self.texts(row)
        special = self._special[len(texts) - 1]
        most = special + sum(map(len, texts)) + len(texts)
        return special > 0 and most <= self.max_length and all(map(str.isascii, texts))

    def words(self, row: Row) -> tuple[Words, ...]:
        shortened = self._shortened(row)
        [encoding] = _encode(self._tokenizer, shortened, with_offsets=True)
        if len(encoding.ids) > self.max_length:
            [encoding] = _encode(self._cutting, shortened, with_offsets=True)
        text_N = np.array([-1 if text is None else text for text in encoding.sequence_ids], dtype=np.int64)
        offsets_N2 = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)  # special tokens are of no text
        own = (np.where((text_N == k)[:, None], offsets_N2, 0) for k in range(len(self.texts(row))))
        return tuple(map(Words.of, self.texts(row), own))

    def encodings(self, rows: Sequence[Row], *, truncate: bool = False) -> list[Encoding]:
        """Returns the tokenizer's encoding of every row.

        One that is too long is cut if `truncate`: its special tokens are kept, and a pair is cut where it is longest.
        Without `truncate` it raises UnprocessableInputError, which names the input. A text that the tokenizer cannot
        encode raises it too: for example an unknown word, if the vocabulary has no token for unknown words.
        """
        shortened = list(map(self._shortened, rows))
        encodings = _encode(self._tokenizer, *shortened) if rows else []
        too_long = [k for k, encoding in enumerate(encodings) if len(encoding.ids) > self.max_length]
        for k in too_long:
            if truncate:
                [encodings[k]] = _encode(self._cutting, shortened[k])
            if len(encodings[k].ids) > self.max_length:  # special tokens alone may be too many
                count = f"{'' if shortened[k] is rows[k] else 'at least '}{len(encodings[k].ids)} tokens"
                raise UnprocessableInputError(
                    f"input {k} has {count}, the model takes {self.max_length}"
                    + ("" if truncate else '; send "truncate": true to have it cut')
                )
        empty = next((k for k, encoding in enumerate(encodings) if not encoding.ids), None)
        if empty is not None:
            raise UnprocessableInputError(f"input {empty} has no tokens")
        return encodings

    def _shortened(self, row: Row) -> TextOrPair:
        """Returns the row, or prefixes of its texts that still have more tokens than the model takes.

        Tokenizing takes time for characters that are cut off afterwards too. The first `max_length` tokens of a long
        enough prefix are the text's own.
        """
        if isinstance(row, str):
            return self._prefix(row)
        pair = cast(tuple[str, str], row)
        first, second = map(self._prefix, pair)
        return pair if first is pair[0] and second is pair[1] else (first, second)

    def _prefix(self, text: str) -> str:
        size = (self.max_length + MARGIN) * CHARACTERS_PER_TOKEN
        while size < len(text):
            space = max(text.rfind(" ", 0, size), text.rfind("\n", 0, size))
            prefix = text[: space if 2 * space > size else size]
            if len(_encode(self._tokenizer, prefix)[0].ids) > self.max_length + MARGIN:
                return prefix
            size *= 4  # long words, or much white space
        return text


class TextCodec(TokenizedCodec[str]):
    """Texts to token ids, int32 per token."""

    name = "text"
    inputs = (Column(name="text", datatypes=("BYTES",)),)
    row_schema = TEXT
    described = "One text, or a list of texts."
    needed = "a text or a list of texts"

    def from_columns(self, columns: Columns) -> list[str]:
        return texts_of(columns, "text")

    def row_from_json(self, value: object, where: str) -> str:
        if not isinstance(value, str) or not value:
            problem = "the text is empty" if value == "" else f"a text is needed, not {type(value).__name__}"
            raise InputError(f"{where}: {problem}")
        return value

    def encode(self, rows: Sequence[str], *, truncate: bool = False) -> list[Encoded]:
        # Most requests hold one short text. The tokenizer encodes long ones without the interpreter's lock.
        if len(rows) == 1 and self._words is not None and type(rows[0]) is str and len(rows[0]) < LONG:
            plain = self._words.ids(rows[0])
            if plain is not None and 0 < len(plain) <= self.max_length:
                return [_encoded(plain)]
        return [_encoded(encoding.ids) for encoding in self.encodings(rows, truncate=truncate)]


PAIR: Mapping[str, Any] = {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 2}


class TextPairCodec(TokenizedCodec[tuple[str, str]]):
    """Pairs of texts to token ids and, where the network takes them, token types, both int32 per token."""

    name = "text_pair"
    inputs = (Column(name="text", datatypes=("BYTES",)), Column(name="text_pair", datatypes=("BYTES",)))
    row_schema = PAIR
    described = "One pair of texts, or a list of pairs."
    needed = "a pair of texts, or a list of pairs,"

    def __init__(self, max_length: int, token_types: bool = True) -> None:
        """`token_types`: whether the network tells the texts apart by them; the tokenizer's marks do in any case."""
        super().__init__(max_length)
        self.token_types = token_types

    def from_columns(self, columns: Columns) -> list[tuple[str, str]]:
        return list(zip(texts_of(columns, "text"), texts_of(columns, "text_pair"), strict=True))

    def is_row(self, inputs: object) -> bool:
        return isinstance(inputs, list) and bool(inputs) and all(isinstance(each, str) for each in inputs)

    def row_from_json(self, value: object, where: str) -> tuple[str, str]:
        match value:
            case [str(one), str(another)] if one and another:
                return one, another
            case [str(), str()]:
                raise InputError(f"{where}: a text of the pair is empty")
        raise InputError(f'{where}: two texts are needed, as in {{"inputs": [["a text", "another"]]}}')

    def encode(self, rows: Sequence[tuple[str, str]], *, truncate: bool = False) -> list[Encoded]:
        return [self._encoded(encoding) for encoding in self.encodings(rows, truncate=truncate)]

    def _encoded(self, encoding: Encoding) -> Encoded:
        columns = (encoding.ids, encoding.type_ids) if self.token_types else (encoding.ids,)
        return Encoded(len(encoding.ids), tuple(np.array(column, dtype=np.int32) for column in columns))


MOST_WORDS = 20_000
"""Words that are remembered, about 4 MB; then all are forgotten."""
LONGEST_TEXT = 2_000
"""Characters; the tokenizer encodes longer texts in threads, where it does not block the event loop."""
_WORDS = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]")
_PLAIN = re.compile(r"[ -~]*")
_PROBES = ("", "a", "a-b", "The CAT's 3.5!")


class WordPieces:
    """The pieces of one tokenizer's words; several threads may use it, and at worst learn a word twice."""

    def __init__(self, tokenizer: Tokenizer, first: Sequence[int], last: Sequence[int], *, lowers: bool) -> None:
        self._tokenizer = tokenizer
        self._first = list(first)
        self._last = list(last)
        self._lowers = lowers
        self._pieces: dict[str, list[int]] = {}
        special = {token.content[0] for token in tokenizer.get_added_tokens_decoder().values() if token.content}
        self._may_be_special = re.compile("[" + re.escape("".join(sorted(special))) + "]") if special else None

    def ids(self, text: str) -> list[int] | None:
        """Returns token ids with special tokens; None for a text that is not plain."""
        if len(text) > LONGEST_TEXT or _PLAIN.fullmatch(text) is None:
            return None
        if self._may_be_special is not None and self._may_be_special.search(text) is not None:
            return None
        pieces, ids = self._pieces, self._first.copy()
        for word in _WORDS.findall(text.lower() if self._lowers else text):
            known = pieces.get(word)
            if known is None:
                if len(pieces) >= MOST_WORDS:
                    pieces.clear()
                known = pieces[word] = list(self._tokenizer.encode(word, add_special_tokens=False).ids)
            ids += known
        ids += self._last
        return ids


def word_pieces_of(tokenizer: Tokenizer) -> WordPieces | None:
    """Returns None for a tokenizer that works otherwise, or gives some texts other ids."""
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


def _encoded(ids: list[int]) -> Encoded:
    return Encoded(len(ids), (np.array(ids, dtype=np.int32),))


def _encode(tokenizer: Tokenizer, *rows: TextOrPair, with_offsets: bool = False) -> list[Encoding]:
    # A batch wakes the tokenizer's thread pool, which a single short text does not repay.
    row = rows[0]
    is_short = len(rows) == 1 and (len(row) if isinstance(row, str) else len(row[0]) + len(row[1])) < LONG
    try:
        if is_short:
            return [tokenizer.encode(row) if isinstance(row, str) else tokenizer.encode(*row)]
        encode = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast
        encodings: list[Encoding] = encode(list(rows))
    except Exception as error:  # the library raises this class alone
        raise UnprocessableInputError(f"the tokenizer cannot encode a text: {first_line(error)}") from error
    return encodings
