"""The contract of a codec: what a model's inputs are, and how they become what its network takes. Without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from earlyexit.errors import InputError, PlanError
from earlyexit.network.wire import Column, Encoded
from earlyexit.words import Words, left_of

Row = TypeVar("Row")
"""One input as its caller knows it: a text, a pair of texts, an image's bytes, an array."""
Columns: TypeAlias = Mapping[str, npt.NDArray[Any] | list[Any]]
"""By name, each (n, *shape). Elements of BYTES are `bytes`, or `str` where they came in JSON; an array of objects, or a
list where each is a row."""


class Encode(Protocol):
    """As `Codec.encode`."""

    def __call__(self, rows: Sequence[Any], *, truncate: bool) -> Sequence[Encoded]: ...


class Codec(ABC, Generic[Row]):
    """Pure functions beside a declaration: checks, descriptions and clients follow from `inputs`."""

    name: ClassVar[str]
    content_types: tuple[str, ...] = ()
    """Of bodies of `POST /predict` that are one input as they are; `from_content` reads them."""
    prunes: ClassVar[bool] = False
    """Whether its rows have words that `pruned` can leave out."""
    reads_tokenizer: ClassVar[bool] = False
    """Whether `load` reads the tokenizer in a model's folder, which training then puts there."""

    def load(self, folder: Path) -> None:
        """Read what it needs of a model's folder; raises ModelFolderError."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[Column, ...]:
        """The v2 inputs, known before `load`; columns of one name are forms of one input, the preferred one first."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """What a model card holds of it; `find_codec` makes an equal one."""

    @abstractmethod
    def from_columns(self, columns: Columns) -> list[Row]:
        """Rows of v2 inputs whose names, datatypes and shapes have been checked; raises InputError."""

    @abstractmethod
    def from_json(self, inputs: object) -> tuple[list[Row], bool]:
        """Rows of `{"inputs": ...}`, and whether it was a list of them rather than one; raises InputError."""

    def from_content(self, content_type: str, body: bytes) -> Row:
        """The row that a body of one of `content_types` is; raises InputError, of other types too."""
        raise InputError(f"a body of {content_type} is not taken; inputs are sent as JSON")

    @property
    @abstractmethod
    def json_schema(self) -> Mapping[str, Any]:
        """The JSON schema of what `from_json` takes."""

    def is_slow(self, rows: Sequence[Row]) -> bool:
        """Whether `encode` takes milliseconds and leaves the event loop."""
        return False

    def of(self, network: int) -> Codec[Any]:
        """The codec of one of a chain's networks; of a single network it is this one."""
        assert network == 0, f"there is one network, and no network {network}"
        return self

    def surely_takes(self, row: Row) -> bool:
        """Whether `encode` takes a row that another codec of the same kind took: a cheap look, False where unsure."""
        return False

    def words(self, row: Row) -> tuple[Words, ...]:
        """Of every text of a row its words, and whose the tokens are that `encode` makes of it, cut if need be.

        Raises PlanError where rows have no words.
        """
        raise PlanError(f"words are pruned of texts; this model's inputs are encoded by {self.name!r}")

    def pruned(self, row: Row, importance_N: npt.NDArray[np.floating], alpha: float, *, rest: bool = True) -> Row:
        """The row without the words that got little attention: see `words.pruned`.

        `importance_N`: of the tokens that `encode` makes of the row, cut if need be; `rest`: whether what was cut off
        stays. Raises PlanError for alphas that are none, and where rows have no words.
        """
        return self.row_of(left_of(self.words(row), importance_N, alpha, rest=rest))

    def row_of(self, texts: Sequence[str]) -> Row:
        """The row of these texts, which are as many as `words` gives; raises PlanError as that does."""
        raise PlanError(f"words are pruned of texts; this model's inputs are encoded by {self.name!r}")

    @abstractmethod
    def encode(self, rows: Sequence[Row], *, truncate: bool = False) -> list[Encoded]:
        """What the network takes, one per row; too long a row is cut if `truncate`.

        Raises UnprocessableInputError naming the row that this model cannot take.
        """


def texts_of(columns: Columns, name: str) -> list[str]:
    """A column of texts; raises InputError for an empty one and for other bytes than UTF-8."""
    texts: list[str] = []
    for k, element in enumerate(columns[name]):
        if not element:
            raise InputError(f"{name}: element {k} is empty")
        try:
            texts.append(element if isinstance(element, str) else element.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(f"{name}: element {k} is not UTF-8 at byte {error.start}") from error
    return texts
