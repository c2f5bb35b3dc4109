"""The contract of a codec: the form of a model's inputs, and their encoding to tensors. Does not import torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from earlyexit.errors import InputError, PlanError
from earlyexit.named import Named
from earlyexit.network.boundary import Column, Encoded
from earlyexit.words import Words, kept_texts

Row = TypeVar("Row")
"""One input in the caller's form: a text, a pair of texts, an image file, an array."""
Columns: TypeAlias = Mapping[str, npt.NDArray[Any] | list[Any]]
"""Name -> values, (n, *shape). BYTES columns are object arrays or lists of `bytes`, or of `str` if sent as JSON."""


class Codec(Named, ABC, Generic[Row]):
    """Base class of codecs. Checks of requests, the API's documentation and clients follow from `inputs`."""

    inputs: tuple[Column, ...]
    """The v2 inputs, known before `load`. Columns with the same name are alternative forms, the preferred one first."""
    content_types: tuple[str, ...] = ()
    """Content types of `POST /predict` bodies that are one input; `from_content` reads them."""
    prunes: ClassVar[bool] = False
    """Whether rows have words that `pruned` can remove."""
    reads_tokenizer: ClassVar[bool] = False
    """Whether `load` reads the tokenizer in the model's folder. Training then writes it there."""
    described: ClassVar[str] = "One row, or a list of rows."
    """Description of the inputs of `from_json`, for the OpenAPI document."""
    row_schema: Mapping[str, Any] = {}
    """The JSON schema of one row."""
    needed: ClassVar[str] = "a row or a list of rows"
    """Description of the inputs of `from_json`, for error messages."""

    def load(self, folder: Path) -> None:
        """Loads files such as the tokenizer from a model's folder; raises ModelFolderError."""

    @abstractmethod
    def from_columns(self, columns: Columns) -> list[Row]:
        """Returns the rows of v2 inputs whose names, datatypes and shapes are checked already; raises InputError."""

    def is_row(self, inputs: object) -> bool:
        """Whether `{"inputs": ...}` is one row rather than a list of rows. By default, a string is one row."""
        return isinstance(inputs, str)

    def from_json(self, inputs: object) -> tuple[list[Row], bool]:
        """Returns the rows of `{"inputs": ...}`, and whether it was a list of rows; raises InputError."""
        if self.is_row(inputs):
            return [self.row_from_json(inputs, "inputs")], False
        if not isinstance(inputs, list) or not inputs:
            raise InputError(f"inputs: {self.needed} is needed")
        return [self.row_from_json(value, f"inputs.{k}") for k, value in enumerate(inputs)], True

    def row_from_json(self, value: object, where: str) -> Row:
        """Returns the row of a JSON value. Raises InputError, which begins with `where`, the value's path."""
        raise NotImplementedError(f"{type(self).__name__} needs from_json or row_from_json")

    def from_content(self, content_type: str, body: bytes) -> Row:
        """Returns the row of a body in one of `content_types`. Raises InputError, also for other content types."""
        raise InputError(f"a body of {content_type} is not supported; inputs are sent as JSON")

    @property
    def json_schema(self) -> Mapping[str, Any]:
        """The JSON schema of the inputs of `from_json`: one row, or a list of rows."""
        row = self.row_schema
        return {"anyOf": [row, {"type": "array", "items": row, "minItems": 1}], "description": self.described}

    def is_slow(self, rows: Sequence[Row]) -> bool:
        """Whether `encode` takes milliseconds, so that it must run in a thread rather than in the event loop."""
        return False

    def of(self, network: int) -> Codec[Any]:
        """Returns the codec of a network of a chain. A single network has number 0 and this codec."""
        assert network == 0, f"there is one network, and no network {network}"
        return self

    def surely_accepts(self, row: Row) -> bool:
        """Returns True if `encode` certainly accepts a row that a codec of the same kind accepted. A cheap test."""
        return False

    def words(self, row: Row) -> tuple[Words, ...]:
        """Returns the words of every text of a row, with the tokens that `encode` makes of them, truncated if too long.

        Raises PlanError if rows have no words.
        """
        raise PlanError(f"only words of texts can be pruned; this model's inputs are encoded by {self.name!r}")

    def pruned(self, row: Row, importance_N: npt.NDArray[np.floating], alpha: float, *, rest: bool = True) -> Row:
        """Returns the row without the words that received little attention; see `words.kept_texts`.

        `importance_N`: the attention of the tokens of `encode`, truncated if too long. `rest`: whether to keep the part
        of the text that was truncated. Raises PlanError for an invalid alpha, and if rows have no words.
        """
        return self.row_of(kept_texts(self.words(row), importance_N, alpha, rest=rest))

    def row_of(self, texts: Sequence[str]) -> Row:
        """Returns the row made of texts, as many as `words` returns. Raises PlanError as `words` does."""
        raise PlanError(f"only words of texts can be pruned; this model's inputs are encoded by {self.name!r}")

    @abstractmethod
    def encode(self, rows: Sequence[Row], *, truncate: bool = False) -> list[Encoded]:
        """Returns the network's input for each row. With `truncate`, rows that are too long are truncated.

        Raises UnprocessableInputError that names a row which the model cannot process.
        """


def texts_of(columns: Columns, name: str) -> list[str]:
    """Returns the texts of a column; raises InputError for an empty text and for bytes that are not UTF-8."""
    texts: list[str] = []
    for k, element in enumerate(columns[name]):
        if not element:
            raise InputError(f"{name}: element {k} is empty")
        try:
            texts.append(element if isinstance(element, str) else element.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(f"{name}: element {k} is not UTF-8 at byte {error.start}") from error
    return texts
