"""One text per input, and what codecs of texts have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from earlyexit.codecs.base import Codec, Columns, Row, texts_of
from earlyexit.errors import InputError
from earlyexit.signature import Column, Encoded
from earlyexit.tokenizer import TextTokenizer
from earlyexit.words import Words

LONG_CHARS = 20_000
"""Of a request's texts together; above this, tokenizing takes milliseconds."""
TEXT = {"type": "string", "minLength": 1}


class TokenizedCodec(Codec[Row]):
    """By the tokenizer in the model's folder, up to so many tokens."""

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

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "max_length": self.max_length}


class TextCodec(TokenizedCodec[str]):
    """Texts to token ids, int32 per token."""

    name = "text"
    inputs = (Column(name="text", datatypes=("BYTES",)),)
    json_schema: ClassVar[Mapping[str, Any]] = {
        "anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1}],
        "description": "One text, or a list of texts.",
    }

    def from_columns(self, columns: Columns) -> list[str]:
        return texts_of(columns, "text")

    def from_json(self, inputs: object) -> tuple[list[str], bool]:
        many = isinstance(inputs, list)
        if not isinstance(inputs, str | list) or inputs == []:
            raise InputError("inputs: a text or a list of texts is needed")
        rows = inputs if isinstance(inputs, list) else [inputs]
        for k, row in enumerate(rows):
            if not isinstance(row, str) or not row:
                problem = "the text is empty" if row == "" else f"a text is needed, not {type(row).__name__}"
                raise InputError(f"inputs{f'.{k}' if many else ''}: {problem}")
        return rows, many

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
