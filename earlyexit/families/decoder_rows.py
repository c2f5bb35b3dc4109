"""The rows that a decoder's blocks run on in one call: of tokens that came, and of those that left before them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from earlyexit.kv import TRIAL, KvStore
from earlyexit.kv_places import Run
from earlyexit.memory import Fill
from earlyexit.pending import Behind, Pending, joined


class Block(nn.Module, ABC):
    """What a decoder's chain consists of."""

    @abstractmethod
    def forward(self, index: int, hidden_ND: Tensor, where: Any, kv: KvStore) -> Tensor:
        """(N, D) to (N, D); what the rows leave behind is written to the store first, then attended to.

        `where`: what the backbone's own `where` says of the rows.
        """

    @abstractmethod
    def keep(self, index: int, hidden_ND: Tensor, where: Any, kv: KvStore) -> None:
        """Only leave keys and values behind, of states that the block is not run on."""

    def forward_beside(
        self, index: int, hidden_ND: Tensor, where: Any, copies: tuple[Tensor, Any], kv: KvStore
    ) -> Tensor:
        """`forward` of some rows, and `keep` of others and where they are, before that."""
        self.keep(index, *copies, kv)
        after_ND: Tensor = self(index, hidden_ND, where, kv)
        return after_ND


class RowChain(Protocol):
    """What runs blocks on them: a decoder."""

    num_blocks: int
    blocks: nn.ModuleList
    fill: Fill

    @property
    def kv(self) -> KvStore:
        """Where keys and values are."""
        ...

    @property
    def pending(self) -> Pending:
        """Tokens that left early."""
        ...

    def where(self, runs: Sequence[Run]) -> Any:
        """What blocks must know of the rows of these runs."""
        ...


class Rows:
    """The rows of one call of `run_blocks`: every run's own and, before them, those of its tokens that are behind."""

    def __init__(self, backbone: RowChain, runs: Sequence[Run], came: Sequence[int], hidden_ND: Tensor) -> None:
        """`came`: how many of each run's first rows came along from another replica."""
        self.runs = runs
        self._backbone = backbone
        self._copied: list[Behind | None] = [None] * len(runs)
        self._came: list[Tensor | None] = [None] * len(runs)
        """Of these, what is passed on as it came."""
        self._rows_MD = hidden_ND
        if backbone.fill == "copy" and any(came):
            self._set_apart(came)
        self._spans = list(self.runs)
        self._is_indexed = False

    def _set_apart(self, behind: Sequence[int]) -> None:
        """What came along is copied, not run."""
        rows = torch.split(self._rows_MD, [run.length for run in self.runs])
        self._copied = [
            Behind(run.start, rows_nD[:count]) if count else None
            for run, rows_nD, count in zip(self.runs, rows, behind, strict=True)
        ]
        self._came = [None if each is None else each.hidden_nD for each in self._copied]
        self._rows_MD = torch.cat([rows_nD[count:] for rows_nD, count in zip(rows, behind, strict=True)])
        self.runs = [
            replace(run, start=run.start + count, length=run.length - count)
            for run, count in zip(self.runs, behind, strict=True)
        ]

    def join(self, block: int) -> None:
        """Take along what waits before a block."""
        pending = self._backbone.pending
        starts = [(older or run).start for older, run in zip(self._copied, self._spans, strict=True)]
        found = [pending.older(run.sequence, block, start) for run, start in zip(self.runs, starts, strict=True)]
        if not any(found):
            return
        if self._backbone.fill == "copy":
            self._copied = [
                old if new is None else joined(new, old) for new, old in zip(found, self._copied, strict=True)
            ]
        else:
            parts = zip(found, self._split(), strict=True)
            self._rows_MD = torch.cat([each for older, rows in parts for each in _stacked(older, rows)])
            self._spans = [
                run if older is None else replace(run, start=older.start, length=run.end - older.start)
                for older, run in zip(found, self._spans, strict=True)
            ]
        self._is_indexed = False

    def run(self, first: int, end: int) -> None:
        """Blocks `first` to `end` - 1."""
        kv = self._backbone.kv
        if not self._is_indexed:
            self._index()
        for index in range(first, end):
            block = self._backbone.blocks[index]
            assert isinstance(block, Block)
            if self._copies is None:
                self._rows_MD = block(index, self._rows_MD, self._where, kv)
            else:
                self._rows_MD = block.forward_beside(index, self._rows_MD, self._where, self._copies, kv)

    def settle(self, first: int, end: int) -> Tensor:
        """Note who is behind from here on: what was, and the own rows too, which may leave at an exit here.

        Gives the rows of what was given, packed (N, D).
        """
        pending, is_last = self._backbone.pending, end == self._backbone.num_blocks
        rows = self._split()
        for run, span, rows_nD, copied in zip(self.runs, self._spans, rows, self._copied, strict=True):
            if is_last:
                pending.through(run.sequence, first, run.end)
            elif run.sequence != TRIAL:
                waiting = Behind(span.start, rows_nD)
                pending.moved(run.sequence, first, end, waiting if copied is None else joined(copied, waiting))
        if not any(came is not None for came in self._came) and all(map(is_, self._spans, self.runs)):
            return self._rows_MD
        own = (rows_nD[-run.length :] for run, rows_nD in zip(self.runs, rows, strict=True))
        parts = zip(self._came, own, strict=True)
        return torch.cat([each for pair in parts for each in pair if each is not None])

    def _split(self) -> tuple[Tensor, ...]:
        return torch.split(self._rows_MD, [span.length for span in self._spans])

    def _index(self) -> None:
        self._is_indexed = True
        self._where = self._backbone.where(self._spans)
        self._copies: tuple[Tensor, Any] | None = None
        copied = [(each, run) for each, run in zip(self._copied, self.runs, strict=True) if each is not None]
        if copied:
            runs = [replace(run, start=each.start, length=len(each.hidden_nD)) for each, run in copied]
            self._copies = torch.cat([each.hidden_nD for each, _ in copied]), self._backbone.where(runs)


def _stacked(older: Behind | None, rows_nD: Tensor) -> tuple[Tensor, ...]:
    return (rows_nD,) if older is None else (older.hidden_nD, rows_nD)
