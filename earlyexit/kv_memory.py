"""What a decoder keeps of sequences: pages of keys and values, and tokens that left early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from earlyexit.errors import InputError, OfframpError
from earlyexit.generation.sequence import sequence_of
from earlyexit.kv import TRIAL, KvStore
from earlyexit.kv_places import Run
from earlyexit.memory import MemoryUse, lost
from earlyexit.pending import Pending
from earlyexit.piece import Piece
from earlyexit.wire import WirePiece

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

    def __init__(self, kv: KvStore, pending: Pending) -> None:
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
            try:
                self._admit(sequence, run)
            except OfframpError as error:
                found.append(error)
            else:
                found.append(None)
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
