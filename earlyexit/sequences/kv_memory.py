"""The hidden states of tokens that left early, which wait for the blocks that they skipped.

A token that leaves at a ramp has no keys and values in the blocks after the ramp, but later tokens of its sequence
attend to them. So its hidden state waits before these blocks until a later token of the sequence passes:

- *compute*: the blocks also run on the skipped token, in the same batch. Its keys and values equal the full model's;
- *copy*: every skipped block computes keys and values from the hidden state with which the token left (Schuster et al.
  2022, CALM: state propagation).

A token may pass a block twice, when a failed batch runs again. A token may also pass while an older one is still in the
network, because answered inputs may stay. So an update for one token never changes the records of newer tokens.
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
    """The hidden states of consecutive tokens of a sequence, from token `start` on."""

    start: int
    hidden_nD: Tensor

    @property
    def end(self) -> int:
        return self.start + self.hidden_nD.shape[0]

    def before(self, end: int) -> SkippedTokens | None:
        """Returns the tokens before `end`; None if there are none."""
        kept = min(self.end, end) - self.start
        return None if kept <= 0 else SkippedTokens(self.start, self.hidden_nD[:kept])

    def since(self, start: int) -> SkippedTokens | None:
        """Returns the tokens from `start` on; None if there are none."""
        if start >= self.end:
            return None
        return SkippedTokens(max(start, self.start), self.hidden_nD[max(0, start - self.start) :])


@dataclass(slots=True)
class PendingTokens:
    """The skipped tokens of every sequence, by the block for which they wait."""

    _by_sequence: dict[int, dict[int, SkippedTokens]] = field(default_factory=dict)

    def blocks(self, run: Run, first: int, end: int) -> list[int]:
        """Returns the blocks from `first` to `end` - 1 for which tokens older than the run wait."""
        waiting = self._by_sequence.get(run.sequence)
        if not waiting:
            return []
        return [block for block, each in waiting.items() if first <= block < end and each.start < run.start]

    def older(self, sequence: int, block: int, start: int) -> SkippedTokens | None:
        """Returns the tokens before `start` that wait for a block, which must include the last one; None: none wait."""
        waiting = self._by_sequence.get(sequence, {}).get(block)
        older = None if waiting is None else waiting.before(start)
        assert older is None or older.end == start, f"tokens {older.end} to {start - 1} are missing"
        return older

    def advance(self, sequence: int, first: int, end: int, tokens: SkippedTokens) -> None:
        """Notes that blocks `first` to `end` - 1 have seen `tokens`, which now wait for block `end`."""
        self.mark_seen(sequence, first, tokens.end, until=end)
        waiting = self._by_sequence.setdefault(sequence, {})
        at_end = waiting.get(end)
        before = self.older(sequence, end, tokens.start)
        after = None if at_end is None else at_end.since(tokens.end)
        waiting[end] = concatenate(tokens if before is None else concatenate(before, tokens), after)

    def mark_seen(self, sequence: int, first: int, token: int, *, until: int | None = None) -> None:
        """Notes that all blocks from `first` on, or those before `until`, have seen the tokens before `token`."""
        waiting = self._by_sequence.get(sequence, {})
        for block in [block for block in waiting if block >= first and (until is None or block < until)]:
            newer = waiting.pop(block).since(token)
            if newer is not None:
                waiting[block] = newer

    def take(self, sequence: int, block: int, end: int) -> SkippedTokens | None:
        """Removes and returns the tokens before `end` that wait for a block; None if there are none."""
        waiting = self._by_sequence.get(sequence, {}).get(block)
        if waiting is None:
            return None
        self.mark_seen(sequence, block, end, until=block + 1)
        return waiting.before(end)

    def forget(self, sequence: int) -> None:
        """Removes the tokens of a sequence that ended."""
        self._by_sequence.pop(sequence, None)


def concatenate(before: SkippedTokens, after: SkippedTokens | None) -> SkippedTokens:
    """Returns adjacent tokens together."""
    if after is None:
        return before
    assert before.end == after.start, f"tokens {before.end} to {after.start - 1} are missing"
    return SkippedTokens(before.start, torch.cat([before.hidden_nD, after.hidden_nD]))


RUN, BEHIND = 1, 2
"""The indices of these tensors in a decoder's piece. Before block 0 there is no tensor `behind`."""


def places_of(wire: WirePiece) -> npt.NDArray[np.int32]:
    """Returns which token of its answer each input requests, counted from 0, (B,), for a piece before block 0.

    For a part of a prompt that yields no token it is 0.
    """
    run_B5 = wire.tensors[RUN].astype(np.int64)
    return np.asarray(np.maximum(run_B5[:, 2] + wire.lengths_B - run_B5[:, 4], 0), dtype=np.int32)


class KvMemory:
    """The `Memory` of a decoder: its KV cache and its skipped tokens."""

    def __init__(self, kv: KvStore, pending: PendingTokens) -> None:
        self.kv = kv
        self.pending = pending
        self._num_tokens: dict[int, int] = {}
        """The number of tokens of every sequence that inputs have brought so far."""

    def admit(self, wire: WirePiece, sequences: Sequence[int]) -> list[OfframpError | None]:
        run_B5 = wire.tensors[RUN]
        behind_B = wire.tensors[BEHIND] if wire.next_block else np.zeros(len(run_B5), np.int32)
        errors: list[OfframpError | None] = []
        inputs = zip(sequences, run_B5.tolist(), behind_B.tolist(), wire.lengths_B.tolist(), strict=True)
        for sequence, (high, low, start, limit, *_), num_skipped, length in inputs:
            run = Run(sequence=sequence_of(high, low), start=start - num_skipped, length=length, limit=limit)
            try:
                self._admit(sequence, run)
                errors.append(None)
            except OfframpError as error:
                errors.append(error)
        return errors

    def end(self, sequence: int) -> None:
        self.kv.free(sequence)
        self.pending.forget(sequence)
        self._num_tokens.pop(sequence, None)

    def use(self) -> MemoryUse:
        return self.kv.use

    def take_along(self, piece: Piece) -> Piece:
        """Returns the piece with the skipped tokens that wait for its block in front of each input's own rows."""
        hidden_ND, run_B5, behind_B = piece.tensors[:3]
        old_lengths = piece.lengths_B.tolist()
        rows, lengths, behind = [], [], []
        inputs = zip(run_B5.tolist(), behind_B.tolist(), torch.split(hidden_ND, old_lengths), strict=True)
        for (high, low, start, *_), num_skipped, rows_nD in inputs:
            num_own = len(rows_nD) - num_skipped
            waiting = self.pending.take(sequence_of(high, low), piece.next_block, start + num_own)
            if waiting is not None:
                num_added = start - num_skipped - waiting.start
                rows_nD = torch.cat([waiting.hidden_nD[:num_added], rows_nD]) if num_added > 0 else rows_nD
            rows.append(rows_nD)
            lengths.append(len(rows_nD))
            behind.append(len(rows_nD) - num_own)
        if lengths == old_lengths:
            return piece
        return replace(
            piece,
            lengths_B=np.array(lengths, dtype=np.int32),
            tensors=(torch.cat(rows), run_B5, behind_B.new_tensor(behind), *piece.tensors[3:]),
        )

    def _admit(self, sequence: int, run: Run) -> None:
        """Admits one input, and reserves the memory of a new sequence. Raises the errors of `Memory.admit`."""
        if sequence == TRIAL:
            raise InputError("this model generates text: send a request for generation")
        if sequence != run.sequence:
            raise InputError(f"an input of sequence {run.sequence} was sent as one of sequence {sequence}")
        if sequence not in self._num_tokens and run.start:
            raise lost(sequence, f"its first {run.start} tokens are missing")
        if run.start > self._num_tokens.get(sequence, 0):
            raise lost(sequence, f"its tokens {self._num_tokens[sequence]} to {run.start - 1} are missing")
        self.kv.enter(sequence, run.limit)
        if run.end > self.kv.room_of(sequence):
            raise InputError(f"sequence {sequence} reserved {run.limit} tokens, but has {run.end}")
        self._num_tokens[sequence] = max(run.end, self._num_tokens.get(sequence, 0))
