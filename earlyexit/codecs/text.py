"""The codecs of texts and of pairs of texts. Does not import torch or transformers.

BERT's tokenizers (Devlin et al., section 4.1; WordPiece) clean a text, split it at spaces and punctuation, and split
every word into pieces independently of its neighbours. `WordPieces` does this faster for printable ASCII, with one
regular expression and a dictionary of words. The tokenizer encodes other texts, and texts that may have special tokens.
"""

from __future__ import annotations

import json
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
from earlyexit.named import in_one_line
from earlyexit.network.boundary import Column, Encoded
from earlyexit.words import Words

LONG_CHARS = 20_000
"""Characters of a request above which tokenizing takes milliseconds."""
TEXT: Mapping[str, Any] = {"type": "string", "minLength": 1}
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHARACTERS_PER_TOKEN = 16
"""Length of the part of a long text that is tokenized first, in characters per token of `max_length`."""
MARGIN = 64
"""Tokens beyond `max_length` that a part must have, because the tokens at a cut depend on where it is."""
LONG = 2048
"""Characters from which texts are encoded by a batch call, which releases the GIL but is slower for short texts."""


def read_tokenizer(path: Path) -> Tokenizer:
    """Returns the tokenizer of a file, without padding and truncation; raises ModelFolderError without one."""
    if not path.is_file():
        raise ModelFolderError(f"{path} is missing: Offramp needs the fast tokenizer's file")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no other class
        raise ModelFolderError(f"{path} cannot be read as a fast tokenizer: {first_line(error)}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


class TokenizedCodec(Codec[Row]):
    """Base of codecs that encode texts with the tokenizer in the model's folder."""

    prunes = True
    reads_tokenizer = True

    def __init__(self, max_length: int) -> None:
        """`max_length`: maximum tokens of an input; raises ValueError below 1."""
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}; at least 1 is needed")
        self.max_length = max_length

    def load(self, folder: Path) -> None:
        config = folder / TOKENIZER_CONFIG_FILE
        with in_one_line(f"{config} cannot be used"):
            options = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
            self.use(read_tokenizer(folder / TOKENIZER_FILE), options.get("truncation_side", "right"))

    def use(self, tokenizer: Tokenizer, side: str = "right") -> None:
        """Sets the tokenizer, which must neither pad nor truncate. `side`: the side at which long texts are cut."""
        self.side = side
        self._tokenizer = tokenizer
        # A second tokenizer, because truncation is a state of the object, and other threads encode at the same time.
        self._truncating = Tokenizer.from_str(tokenizer.to_str())
        self._truncating.enable_truncation(self.max_length, direction=side)
        self._words = word_pieces_of(tokenizer)
        self._special = tuple(tokenizer.num_special_tokens_to_add(is_pair) for is_pair in (False, True))
        """Number of special tokens that are added to a text, and to a pair."""

    def texts(self, row: Row) -> tuple[str, ...]:
        """Returns the texts of a row, which is one text or a tuple of texts."""
        return (row,) if isinstance(row, str) else cast(tuple[str, ...], row)

    def row_of(self, texts: Sequence[str]) -> Row:
        return cast(Row, texts[0] if len(texts) == 1 else tuple(texts))

    def is_slow(self, rows: Sequence[Row]) -> bool:
        return sum(len(text) for row in rows for text in self.texts(row)) > LONG_CHARS

    def surely_accepts(self, row: Row) -> bool:
        """Returns True for ASCII texts that are short enough for any tokenizer."""
        texts = self.texts(row)
        num_special = self._special[len(texts) - 1]
        # Other tokens have at least one character, except one per text that some tokenizers put first.
        most_tokens = num_special + sum(map(len, texts)) + len(texts)
        return num_special > 0 and most_tokens <= self.max_length and all(map(str.isascii, texts))

    def words(self, row: Row) -> tuple[Words, ...]:
        shortened = self._shortened(row)
        [encoding] = tokenize(self._truncating, shortened, with_offsets=True)
        text_index_N = np.array([-1 if k is None else k for k in encoding.sequence_ids], dtype=np.int64)
        offsets_N2 = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        are_ends = self.side == "left"  # whether the parts lack the beginnings of the texts
        return tuple(  # offsets of special tokens and of the other text are set to 0
            Words.of(text, np.where((text_index_N == k)[:, None], offsets_N2 + are_ends * (len(text) - len(part)), 0))
            for k, (text, part) in enumerate(zip(self.texts(row), self.texts(shortened), strict=True))
        )

    def encodings(self, rows: Sequence[Row], *, truncate: bool = False) -> list[Encoding]:
        """Returns the tokenizer's encoding of every row.

        With `truncate`, a row that is too long is truncated. Its special tokens are kept, and of a pair the longer text
        is shortened first. Raises UnprocessableInputError that names a row which is too long without `truncate`, or
        which the tokenizer cannot encode, such as an unknown word if the vocabulary has no token for unknown words.
        """
        shortened = list(map(self._shortened, rows))
        encodings = tokenize(self._truncating if truncate else self._tokenizer, *shortened) if rows else []
        for k, encoding in enumerate(encodings):
            if not encoding.ids:
                raise UnprocessableInputError(f"input {k} has no tokens")
            if len(encoding.ids) > self.max_length:  # even if truncated: special tokens alone can be too many
                count = f"{'' if shortened[k] is rows[k] else 'at least '}{len(encoding.ids)} tokens"
                advice = "" if truncate else '; send "truncate": true to have it cut'
                raise UnprocessableInputError(f"input {k} has {count}, the model takes {self.max_length}{advice}")
        return encodings

    def _shortened(self, row: Row) -> Row:
        """Returns the row, or the parts of its texts that are kept, which still have more than `max_length` tokens.

        It saves time. If a part is long enough, its `max_length` tokens far from the cut equal the text's own tokens.
        """
        texts = self.texts(row)
        parts = tuple(map(self._part, texts))
        return row if parts == texts else self.row_of(parts)

    def _part(self, text: str) -> str:
        size = (self.max_length + MARGIN) * CHARACTERS_PER_TOKEN
        while size < len(text):
            part = text[-size:] if self.side == "left" else text[:size]
            spaced = part.replace("\n", " ")
            whole_words = part[spaced.find(" ") :] if self.side == "left" else part[: max(spaced.rfind(" "), 0)]
            if 2 * len(whole_words) > size:
                part = whole_words
            if len(tokenize(self._tokenizer, part)[0].ids) > self.max_length + MARGIN:
                return part
            size *= 4  # the part has few tokens, because of long words or much white space
        return text


class TextCodec(TokenizedCodec[str]):
    """Encodes texts to int32 token ids."""

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
        # Most requests have one short text. The tokenizer encodes long texts without the GIL.
        if len(rows) == 1 and self._words is not None and type(rows[0]) is str and len(rows[0]) < LONG:
            ids = self._words.ids(rows[0])
            if ids is not None and 0 < len(ids) <= self.max_length:
                return [_encoded(ids)]
        return [_encoded(encoding.ids) for encoding in self.encodings(rows, truncate=truncate)]


PAIR: Mapping[str, Any] = {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 2}


class TextPairCodec(TokenizedCodec[tuple[str, str]]):
    """Encodes pairs of texts to int32 token ids and, if the network uses them, int32 token types."""

    name = "text_pair"
    inputs = (Column(name="text", datatypes=("BYTES",)), Column(name="text_pair", datatypes=("BYTES",)))
    row_schema = PAIR
    described = "One pair of texts, or a list of pairs."
    needed = "a pair of texts, or a list of pairs,"

    def __init__(self, max_length: int, token_types: bool = True) -> None:
        """`token_types`: whether the network has token types as a second input, to distinguish the texts."""
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
        encodings = self.encodings(rows, truncate=truncate)
        return [_encoded(each.ids, each.type_ids) if self.token_types else _encoded(each.ids) for each in encodings]


MOST_WORDS = 20_000
"""Size of the cache in words, about 4 MB. A full cache is cleared."""
LONGEST_TEXT = 2_000
"""Maximum characters of a text. The tokenizer encodes longer texts in threads, to not block the event loop."""
_WORDS = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]")
_PLAIN = re.compile(r"[ -~]*")
_SAMPLES = ("", "a", "a-b", "The CAT's 3.5!")


class WordPieces:
    """A cache of the pieces of words, which encodes plain texts like one WordPiece tokenizer. It is thread-safe."""

    def __init__(self, tokenizer: Tokenizer, first: Sequence[int], last: Sequence[int], *, lowers: bool) -> None:
        self._tokenizer = tokenizer
        self._first = list(first)
        self._last = list(last)
        self._lowers = lowers
        self._pieces: dict[str, list[int]] = {}
        special = {token.content[0] for token in tokenizer.get_added_tokens_decoder().values() if token.content}
        # Tokens that a user added match text in either case if the tokenizer lowers it.
        self._may_be_special = re.compile(f"[{re.escape(''.join(sorted(special)))}]" if special else "(?!)", re.I)

    def ids(self, text: str) -> list[int] | None:
        """Returns token ids with special tokens; None if the text is long, not ASCII, or may have special tokens."""
        if len(text) > LONGEST_TEXT or not _PLAIN.fullmatch(text) or self._may_be_special.search(text):
            return None
        pieces, ids = self._pieces, self._first.copy()
        for word in _WORDS.findall(text.lower() if self._lowers else text):
            word_ids = pieces.get(word)
            if word_ids is None:
                if len(pieces) >= MOST_WORDS:
                    pieces.clear()
                word_ids = pieces[word] = list(self._tokenizer.encode(word, add_special_tokens=False).ids)
            ids += word_ids
        ids += self._last
        return ids


def word_pieces_of(tokenizer: Tokenizer) -> WordPieces | None:
    """Returns the word pieces of a BERT tokenizer; None for other tokenizers, and if sample texts get other ids."""
    normalizer = tokenizer.normalizer
    if not (isinstance(normalizer, BertNormalizer) and isinstance(tokenizer.pre_tokenizer, BertPreTokenizer)):
        return None
    alone, with_special = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    if not isinstance(tokenizer.model, WordPiece) or len(alone) != 1 or with_special.count(alone[0]) != 1:
        return None
    at = with_special.index(alone[0])
    found = WordPieces(tokenizer, with_special[:at], with_special[at + 1 :], lowers=bool(normalizer.lowercase))
    return found if all(found.ids(text) in (None, tokenizer.encode(text).ids) for text in _SAMPLES) else None


def _encoded(*columns: list[int]) -> Encoded:
    return Encoded(len(columns[0]), tuple([np.array(column, dtype=np.int32) for column in columns]))


def tokenize(tokenizer: Tokenizer, *rows: Any, with_offsets: bool = False, **options: Any) -> list[Encoding]:
    """Returns the encoding of each row. A batch call releases the GIL, but is too slow for a single short text."""
    texts = (rows[0],) if isinstance(rows[0], str) else rows[0]
    try:
        if len(rows) == 1 and sum(map(len, texts)) < LONG:
            return [tokenizer.encode(*texts, **options)]
        encode = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast
        encodings: list[Encoding] = encode(list(rows), **options)
    except Exception as error:  # tokenizers raises no other class
        raise UnprocessableInputError(f"the tokenizer cannot encode a text: {first_line(error)}") from error
    return encodings
