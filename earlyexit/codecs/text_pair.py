"""A pair of texts per input, such as a question and a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from tokenizers import Encoding

from earlyexit.codecs.base import Columns, texts_of
from earlyexit.codecs.text import LONG_CHARS, TEXT, TokenizedCodec
from earlyexit.errors import InputError
from earlyexit.signature import Column, Encoded
from earlyexit.words import Words

PAIR = {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 2}


class TextPairCodec(TokenizedCodec[tuple[str, str]]):
    """Pairs of texts to token ids and, where the network takes them, token types, both int32 per token."""

    name = "text_pair"
    inputs = (Column(name="text", datatypes=("BYTES",)), Column(name="text_pair", datatypes=("BYTES",)))
    json_schema: ClassVar[Mapping[str, Any]] = {
        "anyOf": [PAIR, {"type": "array", "items": PAIR, "minItems": 1}],
        "description": "One pair of texts, or a list of pairs.",
    }

    def __init__(self, max_length: int, token_types: bool = True) -> None:
        """`token_types`: whether the network tells the texts apart by them; the tokenizer's marks do in any case."""
        super().__init__(max_length)
        self.token_types = token_types

    def spec(self) -> dict[str, Any]:
        return super().spec() | {"token_types": self.token_types}

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
