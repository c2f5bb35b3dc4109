"""Inputs of a chain: callers see the first network's codec, and every network gets what its own makes of a row."""

from __future__ import annotations

import math
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
from earlyexit.network.boundary import Boundary, Encoded, mismatch


@dataclass(frozen=True, slots=True)
class CutRow:
    """A row as one network is given it, words pruned."""

    row: Any
    encoded: Encoded


@dataclass(frozen=True, slots=True)
class ChainEncoded(Encoded):
    """An input as the network that it enters takes it, and its row, from which the other networks' are made."""

    row: Any
    network: int
    """The network of the chain that `length` and `tensors` are for."""
    others: dict[int, Encoded] = field(default_factory=dict)
    """By network: encodings for other networks, so that each is made once."""
    cut: dict[int, CutRow] = field(default_factory=dict)
    """By network: the row without pruned words, for this attempt only; networks without pruning get the whole row."""

    def of(self, network: int) -> Encoded | None:
        """Returns the input as a network takes it; None while that has not been made."""
        return self if network == self.network else self.others.get(network)


class ChainCodec(Codec[Any]):
    """The codecs of a chain's networks.

    A row is accepted only if all of them accept it, even networks that the plan leaves out: a plan may change while the
    row is under way, and a later network must not be the first to find it too long.
    """

    name = "chain"

    def __init__(self, members: Sequence[NamedSpec], models: Sequence[str], max_length: int | None = None) -> None:
        """`members`: their codecs, as their cards have them; `models`: their folders, relative to the chain's.

        `max_length`: in tokens, of the longest row that all take; what is here for a card's readers is checked by the
        members. Raises ValueError.
        """
        if len(members) < 2 or len(members) != len(models):
            raise ValueError(f"{len(members)} codecs for {len(models)} models; a chain has several, with one each")
        self.members: tuple[Codec[Any], ...] = tuple(map(make_codec, members))
        self.inputs = self.members[0].inputs
        self.content_types = self.members[0].content_types
        self._models = tuple(models)
        self._max_length = max_length
        self._inputs: tuple[Boundary | None, ...] = (None,) * len(models)
        self._alike = tuple(range(len(models)))

    def load(self, folder: Path) -> None:
        from earlyexit.network.store import read_card  # the store knows all codecs

        folders = [folder / model for model in self._models]
        cards = [read_card(each) for each in folders]
        self.members = tuple(find_codec(card.codec, each) for card, each in zip(cards, folders, strict=True))
        self.inputs = self.members[0].inputs
        self._inputs = tuple(card.inputs for card in cards)
        made = [_fingerprint(codec, each) for codec, each in zip(self.members, folders, strict=True)]
        self._alike = tuple(map(made.index, made))

    def of(self, network: int) -> Codec[Any]:
        return self.members[network]

    def alike(self, network: int) -> int:
        """Returns the first network whose codec encodes every row alike; such networks share encodings."""
        return self._alike[network]

    def pruned_for(
        self, network: int, before: int, row: Any, importance_N: npt.NDArray[np.floating], alpha: float
    ) -> CutRow:
        """Returns what a network gets of a row after the network `before`, words pruned by that network's attention.

        The part that the codec of `before` cut off goes on only to a network that may take more tokens.
        """
        of_before, of_this = self.members[before], self.members[network]
        rest = getattr(of_this, "max_length", math.inf) > getattr(of_before, "max_length", 0)
        left = of_before.pruned(row, importance_N, alpha, rest=rest)
        return self.cut_row(network, left)

    def cut_row(self, network: int, row: Any) -> CutRow:
        """Returns a row that has lost words, as a network takes it."""
        return CutRow(row, self.encoded([row], network, truncate=True)[0])

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

    def surely_takes(self, row: Any) -> bool:
        return all(codec.surely_takes(row) for codec in self.members)

    def encode(self, rows: Sequence[Any], *, truncate: bool = False) -> list[Encoded]:
        """As `encode_for` the first network."""
        return list(self.encode_for(rows, range(len(self.members)), truncate=truncate))

    def encode_for(self, rows: Sequence[Any], used: Sequence[int], *, truncate: bool = False) -> list[ChainEncoded]:
        """Returns what the first of the networks `used` takes, one per row; slow rows are encoded for all of them.

        Raises UnprocessableInputError naming the row that one of the chain's networks cannot take, used or not.
        """
        entry = self._alike[used[0]]
        arrived = [
            ChainEncoded(each.length, each.tensors, row, entry)
            for row, each in zip(rows, self.encoded(rows, entry, truncate=truncate), strict=True)
        ]
        wanted = {self._alike[network] for network in used} if self.is_slow(rows) else set()
        for network in sorted(set(self._alike) - {entry}):
            asked = range(len(rows)) if network in wanted else self._unsure(rows, network, truncate)
            for k, each in zip(asked, self._made(rows, asked, network, truncate), strict=True):
                arrived[k].others[network] = each
        return arrived

    def encoded(self, rows: Sequence[Any], network: int, *, truncate: bool) -> list[Encoded]:
        """Returns what one network takes; raises UnprocessableInputError, also for tensors that would fail a batch."""
        made = self.members[network].encode(rows, truncate=truncate)
        inputs = self._inputs[network]
        for k, each in enumerate(made if inputs is not None else ()):
            said = mismatch(inputs or (), each)
            if said is not None:
                raise UnprocessableInputError(f"input {k}: {said}")
        return made

    def _unsure(self, rows: Sequence[Any], network: int, truncate: bool) -> list[int]:
        """Returns the places of rows that must be encoded to know whether they fit."""
        if truncate and isinstance(self.members[network], TokenizedCodec):
            return []  # rows that are too long are cut
        takes = self.members[network].surely_takes
        return [k for k, row in enumerate(rows) if not takes(row)]

    def _made(self, rows: Sequence[Any], asked: Sequence[int], network: int, truncate: bool) -> list[Encoded]:
        if not asked:
            return []
        try:
            return self.encoded([rows[k] for k in asked], network, truncate=truncate)
        except UnprocessableInputError:
            for place in asked:  # name the row by its place in the request
                try:
                    self.encoded([rows[place]], network, truncate=truncate)
                except UnprocessableInputError as error:
                    said, model = str(error).replace("input 0", f"input {place}", 1), Path(self._models[network]).name
                    raise UnprocessableInputError(f"{said}; the chain goes on with {model}") from error
            raise


def _fingerprint(codec: Codec[Any], folder: Path) -> tuple[object, ...]:
    """Equal where two codecs make the same of every row."""
    path = folder / TOKENIZER_FILE
    try:
        tokenizer = path.read_bytes() if codec.reads_tokenizer else b""
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error
    # A user's own codec may read other files of its model's folder.
    whose = None if type(codec).load in (Codec.load, TokenizedCodec.load) else folder
    return type(codec), repr(codec.spec()), tokenizer, whose
