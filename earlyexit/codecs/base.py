"""The contract of a codec: what a model's inputs are, and how they become what its network takes. It needs no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from earlyexit.errors import InputError, PlanError
from earlyexit.named import Named
from earlyexit.network.boundary import Column, Encoded
from earlyexit.words import Words, kept_texts

Row = TypeVar("Row")
"""One input as its caller knows it: a text, a pair of texts, an image's bytes, an array."""
Columns: TypeAlias = Mapping[str, npt.NDArray[Any] | list[Any]]
"""By name, each (n, *shape). Elements of BYTES are `bytes`, or `str` where they came in JSON; an array of objects, or a
list where each is a row."""


class Encode(Protocol):
    """As `Codec.encode`."""

    def __call__(self, rows: Sequence[Any], *, truncate: bool) -> Sequence[Encoded]: ...


class Codec(Named, ABC, Generic[Row]):
    """Pure functions beside a declaration: checks, descriptions and clients follow from `inputs`."""

    inputs: tuple[Column, ...]
    """The v2 inputs, known before `load`; columns of one name are forms of one input, the preferred one first."""
    content_types: tuple[str, ...] = ()
    """Content types of bodies of `POST /predict` that are one input as they are; `from_content` reads them."""
    prunes: ClassVar[bool] = False
    """Whether its rows have words that `pruned` can remove."""
    reads_tokenizer: ClassVar[bool] = False
    """Whether `load` reads the tokenizer in a model's folder, which training then puts there."""
    described: ClassVar[str] = "One row, or a list of rows."
    """What `from_json` takes, in the OpenAPI document."""
    row_schema: Mapping[str, Any] = {}
    """The JSON schema of one row."""
    needed: ClassVar[str] = "a row or a list of rows"
    """What `from_json` takes, in error messages."""

    def load(self, folder: Path) -> None:
        """Read what it needs from a model's folder; raises ModelFolderError."""

    @abstractmethod
    def from_columns(self, columns: Columns) -> list[Row]:
        """Returns the rows of v2 inputs whose names, datatypes and shapes have been checked; raises InputError."""

    def is_row(self, inputs: object) -> bool:
        """Whether `{"inputs": ...}` is one row; here a text is."""
        return isinstance(inputs, str)

    def from_json(self, inputs: object) -> tuple[list[Row], bool]:
        """Returns the rows of `{"inputs": ...}`, and whether it was a list of rows; raises InputError."""
        if self.is_row(inputs):
            return [self.row_from_json(inputs, "inputs")], False
        if not isinstance(inputs, list) or not inputs:
            raise InputError(f"inputs: {self.needed} is needed")
        return [self.row_from_json(each, f"inputs.{k}") for k, each in enumerate(inputs)], True

    def row_from_json(self, value: object, where: str) -> Row:
        """Returns the row of a JSON value; raises InputError, which names `where` it was."""
        raise NotImplementedError(f"{type(self).__name__} needs from_json or row_from_json")

    def from_content(self, content_type: str, body: bytes) -> Row:
        """Returns the row of a body of one of `content_types`; raises InputError, for other types too."""
        raise InputError(f"a body of {content_type} is not taken; inputs are sent as JSON")

    @property
    def json_schema(self) -> Mapping[str, Any]:
        """The JSON schema of what `from_json` takes: one row, or a list of rows."""
        row = self.row_schema
        return {"anyOf": [row, {"type": "array", "items": row, "minItems": 1}], "description": self.described}

    def is_slow(self, rows: Sequence[Row]) -> bool:
        """Whether `encode` takes milliseconds and leaves the event loop."""
        return False

    def of(self, network: int) -> Codec[Any]:
        """Returns the codec of one of a chain's networks; for a single network this codec."""
        assert network == 0, f"there is one network, and no network {network}"
        return self

    def surely_takes(self, row: Row) -> bool:
        """Whether `encode` takes a row that another codec of the same kind took: a cheap test, False where unsure."""
        return False

    def words(self, row: Row) -> tuple[Words, ...]:
        """Returns the words of every text of a row, with the tokens that `encode` makes of them, cut if need be.

        Raises PlanError where rows have no words.
        """
        raise PlanError(f"words are pruned of texts; this model's inputs are encoded by {self.name!r}")

    def pruned(self, row: Row, importance_N: npt.NDArray[np.floating], alpha: float, *, rest: bool = True) -> Row:
        """Returns the row without the words that got little attention: see `words.kept_texts`.

        `importance_N`: of the tokens that `encode` makes of the row, cut if need be; `rest`: whether the part that was
        cut off stays. Raises PlanError for an invalid alpha, and where rows have no words.
        """
        return self.row_of(kept_texts(self.words(row), importance_N, alpha, rest=rest))

    def row_of(self, texts: Sequence[str]) -> Row:
        """Returns the row of texts, as many as `words` gives; raises PlanError as `words` does."""
        raise PlanError(f"words are pruned of texts; this model's inputs are encoded by {self.name!r}")

    @abstractmethod
    def encode(self, rows: Sequence[Row], *, truncate: bool = False) -> list[Encoded]:
        """Returns what the network takes, one per row; a row that is too long is cut if `truncate`.

        Raises UnprocessableInputError that names the row that this model cannot take.
        """


def texts_of(columns: Columns, name: str) -> list[str]:
    """Returns a column of texts; raises InputError for an empty text and for bytes that are not UTF-8."""
    texts: list[str] = []
    for k, element in enumerate(columns[name]):
        if not element:
            raise InputError(f"{name}: element {k} is empty")
        try:
            texts.append(element if isinstance(element, str) else element.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(f"{name}: element {k} is not UTF-8 at byte {error.start}") from error
    return texts
