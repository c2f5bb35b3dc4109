"""Tokens that left early, and the blocks that have not seen them yet.

A token that leaves at a ramp has no keys and values in the blocks behind it, but later tokens of its sequence attend to
them. Its hidden state waits before these blocks and is filled in when a later token passes:

- *compute*: the blocks run on it as well, in the same batch, so that what they keep is what the full model would;
- *copy*: every block makes keys and values of the state that it left with (Schuster et al. 2022, CALM: state
  propagation).

Tokens of one sequence may pass a block twice, when a failed batch runs again. A token may also pass while an older one
is still on its way, since answered inputs may stay inside. So notes on one token never change those on newer ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from earlyexit.engine.device import MemoryUse, lost
from earlyexit.errors import InputError, OfframpError
from earlyexit.network.boundary import WirePiece
from earlyexit.network.piece import Piece
from earlyexit.sequences.kv import TRIAL, KvStore, Run
from earlyexit.sequences.sequence import sequence_of


@dataclass(frozen=True, slots=True)
class SkippedTokens:
    """Hidden states of consecutive tokens of a sequence, from token `start` on."""

    start: int
    hidden_nD: Tensor

    @property
    def end(self) -> int:
        return self.start + self.hidden_nD.shape[0]

    def before(self, end: int) -> SkippedTokens | None:
        """Of the tokens before `end`; None where there are none."""
        kept = min(self.end, end) - self.start
        return None if kept <= 0 else SkippedTokens(self.start, self.hidden_nD[:kept])

    def since(self, start: int) -> SkippedTokens | None:
        """Of the tokens from `start` on; None where there are none."""
        if start >= self.end:
            return None
        return SkippedTokens(max(start, self.start), self.hidden_nD[max(0, start - self.start) :])


@dataclass(slots=True)
class PendingTokens:
    """Of every sequence, what waits before which block."""

    _by_sequence: dict[int, dict[int, SkippedTokens]] = field(default_factory=dict)

    def blocks(self, run: Run, first: int, end: int) -> list[int]:
        """Where from block `first` on, and before `end`, tokens older than the run's wait."""
        waiting = self._by_sequence.get(run.sequence)
        if not waiting:
            return []
        return [block for block, each in waiting.items() if first <= block < end and each.start < run.start]

    def older(self, sequence: int, block: int, start: int) -> SkippedTokens | None:
        """What waits before a block of the tokens before `start`, which it must reach up to."""
        found = self._by_sequence.get(sequence, {}).get(block)
        older = None if found is None else found.before(start)
        assert older is None or older.end == start, f"tokens {older.end} to {start - 1} are nowhere"
        return older

    def moved(self, sequence: int, first: int, end: int, rows: SkippedTokens) -> None:
        """Blocks `first` to `end` - 1 have seen `rows`, which now wait before `end`, behind what waits there."""
        self.through(sequence, first, rows.end, until=end)
        waiting = self._by_sequence.setdefault(sequence, {})
        there = waiting.get(end)
        before = self.older(sequence, end, rows.start)
        after = None if there is None else there.since(rows.end)
        waiting[end] = concatenate(rows if before is None else concatenate(before, rows), after)

    def through(self, sequence: int, first: int, token: int, *, until: int | None = None) -> None:
        """All blocks from `first` on, or those before `until`, have seen the tokens before `token`."""
        waiting = self._by_sequence.get(sequence, {})
        for block in [block for block in waiting if block >= first and (until is None or block < until)]:
            newer = waiting.pop(block).since(token)
            if newer is not None:
                waiting[block] = newer

    def leave(self, sequence: int, block: int, end: int) -> SkippedTokens | None:
        """Take away what waits before a block of the tokens before `end`; None where nothing does."""
        found = self._by_sequence.get(sequence, {}).get(block)
        if found is None:
            return None
        self.through(sequence, block, end, until=block + 1)
        return found.before(end)

    def forget(self, sequence: int) -> None:
        """The sequence is over."""
        self._by_sequence.pop(sequence, None)


def concatenate(before: SkippedTokens, after: SkippedTokens | None) -> SkippedTokens:
    """Both, the one ending where the other begins."""
    if after is None:
        return before
    assert before.end == after.start, f"tokens {before.end} to {after.start - 1} are nowhere"
    return SkippedTokens(before.start, torch.cat([before.hidden_nD, after.hidden_nD]))


RUN, BEHIND = 1, 2
"""Places of these tensors among those that wait for a block; before the first nothing is behind."""


def places_of(wire: WirePiece) -> npt.NDArray[np.int32]:
    """Before the first block, the place in its answer of the token that each input asks for, (B,), from 0.

    Of a part of a prompt that brings no token 0 too.
    """
    run_B5 = wire.tensors[RUN].astype(np.int64)
    return np.asarray(np.maximum(run_B5[:, 2] + wire.lengths_B - run_B5[:, 4], 0), dtype=np.int32)


class KvMemory:
    """A `Memory` of pieces, over a decoder's store."""

    def __init__(self, kv: KvStore, pending: PendingTokens) -> None:
        self.kv = kv
        self.pending = pending
        self._until: dict[int, int] = {}
        """Of every sequence, the first token that no input has brought."""

    def admit(self, wire: WirePiece, sequences: Sequence[int]) -> list[OfframpError | None]:
        """Of every input's `run`, and what came along; see `Memory`."""
        run_B5 = wire.tensors[RUN]
        behind_B = wire.tensors[BEHIND] if wire.next_block else np.zeros(len(run_B5), np.int32)
        found: list[OfframpError | None] = []
        numbers = zip(sequences, run_B5.tolist(), behind_B.tolist(), wire.lengths_B.tolist(), strict=True)
        for sequence, (high, low, start, limit, *_), came_along, length in numbers:
            run = Run(sequence=sequence_of(high, low), start=start - came_along, length=length, limit=limit)
            found.append(None)
            try:
                self._admit(sequence, run)
            except OfframpError as error:
                found[-1] = error
        return found

    def end(self, sequence: int) -> None:
        self.kv.free(sequence)
        self.pending.forget(sequence)
        self._until.pop(sequence, None)

    def use(self) -> MemoryUse:
        return self.kv.use

    def take_along(self, piece: Piece) -> Piece:
        """In front of every input's rows those of its sequence's tokens that wait for the same block."""
        hidden_ND, run_B5, behind_B = piece.tensors[:3]
        lengths = piece.lengths_B.tolist()
        rows, longer, behind = [], [], []
        parts = zip(run_B5.tolist(), behind_B.tolist(), torch.split(hidden_ND, lengths), strict=True)
        for (high, low, start, *_), came_along, own_nD in parts:
            own = len(own_nD) - came_along
            waiting = self.pending.leave(sequence_of(high, low), piece.next_block, start + own)
            if waiting is not None:
                more = start - came_along - waiting.start
                own_nD = torch.cat([waiting.hidden_nD[:more], own_nD]) if more > 0 else own_nD
            rows.append(own_nD)
            longer.append(len(own_nD))
            behind.append(len(own_nD) - own)
        if longer == lengths:
            return piece
        return replace(
            piece,
            lengths_B=np.array(longer, dtype=np.int32),
            tensors=(torch.cat(rows), run_B5, behind_B.new_tensor(behind), *piece.tensors[3:]),
        )

    def _admit(self, sequence: int, run: Run) -> None:
        if sequence == TRIAL:
            raise InputError("this model answers steps of sequences: ask it to generate")
        if sequence != run.sequence:
            raise InputError(f"an input of sequence {run.sequence} came as one of sequence {sequence}")
        if sequence not in self._until and run.start:
            raise lost(sequence, f"nothing is known of its first {run.start} tokens")
        if run.start > self._until.get(sequence, 0):
            raise lost(sequence, f"tokens {self._until[sequence]} to {run.start - 1} are nowhere")
        self.kv.enter(sequence, run.limit)
        if run.end > self.kv.room_of(sequence):
            raise InputError(f"sequence {sequence} reserved {run.limit} tokens, and comes to {run.end}")
        self._until[sequence] = max(run.end, self._until.get(sequence, 0))
