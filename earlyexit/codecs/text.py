"""Texts, or pairs of texts such as a question and a sentence, to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding

from earlyexit.codecs.base import Codec, Columns, Row, texts_of
from earlyexit.codecs.tokenizer import TextTokenizer
from earlyexit.errors import InputError
from earlyexit.network.boundary import Column, Encoded
from earlyexit.words import Words

LONG_CHARS = 20_000
"""Characters of a request's texts above which tokenizing takes milliseconds."""
TEXT: Mapping[str, Any] = {"type": "string", "minLength": 1}


class TokenizedCodec(Codec[Row]):
    """A codec by the tokenizer in the model's folder, up to `max_length` tokens."""

    prunes = True
    reads_tokenizer = True
    _tokenizer: TextTokenizer

    def __init__(self, max_length: int) -> None:
        """`max_length`: of an input, in tokens; raises ValueError below 1."""
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}; at least 1 is needed")
        self.max_length = max_length

    def load(self, folder: Path) -> None:
        self._tokenizer = TextTokenizer.load(folder, self.max_length)


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

    def is_slow(self, rows: Sequence[str]) -> bool:
        return sum(map(len, rows)) > LONG_CHARS

    def surely_takes(self, row: str) -> bool:
        return self._tokenizer.surely_takes((row,))

    def encode(self, rows: Sequence[str], *, truncate: bool = False) -> list[Encoded]:
        return self._tokenizer.encode(rows, truncate=truncate)

    def words(self, row: str) -> tuple[Words, ...]:
        offsets_N2, _ = self._tokenizer.offsets(row)
        return (Words.of(row, offsets_N2),)

    def row_of(self, texts: Sequence[str]) -> str:
        (text,) = texts
        return text


PAIR: Mapping[str, Any] = {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 2}


class TextPairCodec(TokenizedCodec[tuple[str, str]]):
    """Pairs of texts to token ids and, where the network takes them, token types, both int32 per token."""

    name = "text_pair"
    inputs = (Column(name="text", datatypes=("BYTES",)), Column(name="text_pair", datatypes=("BYTES",)))
    row_schema = PAIR
    described = "One pair of texts, or a list of pairs."

    def __init__(self, max_length: int, token_types: bool = True) -> None:
        """`token_types`: whether the network tells the texts apart by them; the tokenizer's marks do in any case."""
        super().__init__(max_length)
        self.token_types = token_types

    def from_columns(self, columns: Columns) -> list[tuple[str, str]]:
        return list(zip(texts_of(columns, "text"), texts_of(columns, "text_pair"), strict=True))

    def from_json(self, inputs: object) -> tuple[list[tuple[str, str]], bool]:
        if not isinstance(inputs, list) or not inputs:
            raise InputError("inputs: a pair of texts, or a list of pairs, is needed")
        many = not all(isinstance(each, str) for each in inputs)
        pairs = inputs if many else [inputs]
        return [_pair(each, f"inputs.{k}" if many else "inputs") for k, each in enumerate(pairs)], many

    def is_slow(self, rows: Sequence[tuple[str, str]]) -> bool:
        return sum(len(one) + len(another) for one, another in rows) > LONG_CHARS

    def surely_takes(self, row: tuple[str, str]) -> bool:
        return self._tokenizer.surely_takes(row)

    def encode(self, rows: Sequence[tuple[str, str]], *, truncate: bool = False) -> list[Encoded]:
        return [self._encoded(encoding) for encoding in self._tokenizer.encodings(rows, truncate=truncate)]

    def words(self, row: tuple[str, str]) -> tuple[Words, ...]:
        offsets_N2, text_N = self._tokenizer.offsets(row)
        own = (np.where((text_N == k)[:, None], offsets_N2, 0) for k in range(len(row)))
        return tuple(map(Words.of, row, own))

    def row_of(self, texts: Sequence[str]) -> tuple[str, str]:
        one, another = texts
        return one, another

    def _encoded(self, encoding: Encoding) -> Encoded:
        columns = (encoding.ids, encoding.type_ids) if self.token_types else (encoding.ids,)
        return Encoded(len(encoding.ids), tuple(np.array(column, dtype=np.int32) for column in columns))


def _pair(row: object, where: str) -> tuple[str, str]:
    match row:
        case [str(one), str(another)] if one and another:
            return one, another
        case [str(), str()]:
            raise InputError(f"{where}: a text of the pair is empty")
    raise InputError(f'{where}: two texts are needed, as in {{"inputs": [["a text", "another"]]}}')
