"""The codec of a chain: callers use the first network's input format, and each network's codec encodes the row."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from earlyexit.codecs import find_codec, make_codec
from earlyexit.codecs.base import Codec, Columns
from earlyexit.codecs.text import TOKENIZER_FILE, TokenizedCodec
from earlyexit.errors import ModelFolderError, UnprocessableInputError
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Boundary, Encoded, check_fit


@dataclass(frozen=True, slots=True)
class PrunedRow:
    """A row without its pruned words, and its encoding for one network."""

    row: Any
    encoded: Encoded


@dataclass(frozen=True, slots=True)
class ChainEncoded(Encoded):
    """The encoding of an input for the first network that it runs, and its row, to encode it for other networks."""

    row: Any
    network: int
    """The number of the network that `length` and `tensors` are for."""
    others: dict[int, Encoded] = field(default_factory=dict)
    """Network -> cached encoding for that network."""
    cut: dict[int, PrunedRow] = field(default_factory=dict)
    """Network -> the row without pruned words, in this attempt. Networks without pruning get the whole row."""

    def of(self, network: int) -> Encoded | None:
        """Returns the encoding for a network; None if the row has not been encoded for it yet."""
        return self if network == self.network else self.others.get(network)


class ChainCodec(Codec[Any]):
    """The codecs of a chain's networks.

    A row is accepted only if all networks accept it, even those that the plan does not use. The plan may change while
    the input is in the system, and an input must not fail after it was accepted.
    """

    name = "chain"

    def __init__(self, members: Sequence[NamedSpec], models: Sequence[str], max_length: int | None = None) -> None:
        """`members`: the codecs in the networks' cards. `models`: the networks' folders, relative to the chain's.

        `max_length`: the longest row in tokens, for readers of the card; members check lengths. Raises ValueError.
        """
        if len(members) < 2 or len(members) != len(models):
            raise ValueError(f"{len(members)} codecs for {len(models)} models; a chain has two or more, one codec each")
        self.members: tuple[Codec[Any], ...] = tuple(map(make_codec, members))
        self.inputs = self.members[0].inputs
        self.content_types = self.members[0].content_types
        self._models = tuple(models)
        self._max_length = max_length
        self._inputs: tuple[Boundary | None, ...] = (None,) * len(models)
        self._alike = tuple(range(len(models)))

    def load(self, folder: Path) -> None:
        from earlyexit.network.store import read_card  # not at the top: the store imports all codecs

        folders = [folder / model for model in self._models]
        cards = [read_card(path) for path in folders]
        self.members = tuple(find_codec(card.codec, path) for card, path in zip(cards, folders, strict=True))
        self.inputs = self.members[0].inputs
        self._inputs = tuple(card.inputs for card in cards)
        fingerprints = [_fingerprint(codec, path) for codec, path in zip(self.members, folders, strict=True)]
        self._alike = tuple(map(fingerprints.index, fingerprints))

    def of(self, network: int) -> Codec[Any]:
        return self.members[network]

    def alike(self, network: int) -> int:
        """Returns the first network with an equivalent codec. Networks with equivalent codecs share encodings."""
        return self._alike[network]

    def pruned_for(
        self, network: int, before: int, row: Any, importance_N: npt.NDArray[np.floating], alpha: float
    ) -> PrunedRow:
        """Returns the row for a network, without the words that got little attention in the network `before`.

        The part of a text that the codec of `before` truncated is kept only if `network` accepts more tokens.
        """
        codec_before, codec = self.members[before], self.members[network]
        rest = getattr(codec, "max_length", math.inf) > getattr(codec_before, "max_length", 0)
        return self.pruned_row(network, codec_before.pruned(row, importance_N, alpha, rest=rest))

    def pruned_row(self, network: int, row: Any) -> PrunedRow:
        """Returns a pruned row with its encoding for a network."""
        return PrunedRow(row, self.encoded([row], network, truncate=True)[0])

    def spec(self) -> dict[str, Any]:
        limit = {} if self._max_length is None else {"max_length": self._max_length}
        members = [codec.spec() for codec in self.members]
        return {"name": self.name, "members": members, "models": list(self._models), **limit}

    def from_columns(self, columns: Columns) -> list[Any]:
        return self.members[0].from_columns(columns)

    def from_json(self, inputs: object) -> tuple[list[Any], bool]:
        return self.members[0].from_json(inputs)

    def from_content(self, content_type: str, body: bytes) -> Any:
        return self.members[0].from_content(content_type, body)

    @property
    def json_schema(self) -> Mapping[str, Any]:
        return self.members[0].json_schema

    def is_slow(self, rows: Sequence[Any]) -> bool:
        return any(codec.is_slow(rows) for codec in self.members)

    def surely_accepts(self, row: Any) -> bool:
        return all(codec.surely_accepts(row) for codec in self.members)

    def encode(self, rows: Sequence[Any], *, truncate: bool = False) -> list[Encoded]:
        """Returns the encodings for the first network; see `encode_for`."""
        return list(self.encode_for(rows, range(len(self.members)), truncate=truncate))

    def encode_for(self, rows: Sequence[Any], used: Sequence[int], *, truncate: bool = False) -> list[ChainEncoded]:
        """Returns the encoding of each row for the first of the networks `used`; slow rows are encoded for all of them.

        Raises UnprocessableInputError that names a row which one of the chain's networks, used or not, cannot process.
        """
        entry = self._alike[used[0]]
        inputs = [
            ChainEncoded(encoded.length, encoded.tensors, row, entry)
            for row, encoded in zip(rows, self.encoded(rows, entry, truncate=truncate), strict=True)
        ]
        eager = {self._alike[network] for network in used} if self.is_slow(rows) else set()
        for network in sorted(set(self._alike) - {entry}):
            positions = range(len(rows)) if network in eager else self._unsure(rows, network, truncate)
            for k, encoded in zip(positions, self._encoded_at(rows, positions, network, truncate), strict=True):
                inputs[k].others[network] = encoded
        return inputs

    def encoded(self, rows: Sequence[Any], network: int, *, truncate: bool) -> list[Encoded]:
        """Returns the encodings for one network. Raises UnprocessableInputError, also if one does not fit."""
        encodings = self.members[network].encode(rows, truncate=truncate)
        if (boundary := self._inputs[network]) is not None:
            check_fit(boundary, encodings)
        return encodings

    def _unsure(self, rows: Sequence[Any], network: int, truncate: bool) -> list[int]:
        """Returns the positions of rows that must be encoded to check whether the network accepts them."""
        if truncate and isinstance(self.members[network], TokenizedCodec):
            return []  # rows that are too long are truncated
        surely_accepts = self.members[network].surely_accepts
        return [k for k, row in enumerate(rows) if not surely_accepts(row)]

    def _encoded_at(self, rows: Sequence[Any], positions: Sequence[int], network: int, truncate: bool) -> list[Encoded]:
        """Returns the encodings of the rows at some positions. Errors name a row by its position in the request."""
        if not positions:
            return []
        try:
            return self.encoded([rows[k] for k in positions], network, truncate=truncate)
        except UnprocessableInputError as error:
            reason = re.sub(r"^input (\d+)", lambda found: f"input {positions[int(found[1])]}", str(error))
            model = Path(self._models[network]).name
            raise UnprocessableInputError(f"{reason}; {model} is a later network of the chain") from error


def _fingerprint(codec: Codec[Any], folder: Path) -> tuple[object, ...]:
    """Returns a value that is equal for two codecs only if they encode every row alike."""
    path = folder / TOKENIZER_FILE
    try:
        tokenizer = path.read_bytes() if codec.reads_tokenizer else b""
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error
    # A codec with its own `load` may read other files of the folder.
    depends_on = None if type(codec).load in (Codec.load, TokenizedCodec.load) else folder
    return type(codec), repr(codec.spec()), tokenizer, getattr(codec, "side", None), depends_on
