"""Where the rows of a packed batch are in a store of keys and values, and what each of them attends to.

Made anew for every batch and stretch of blocks, so whole arrays at once: a call for every row costs as much as small
models' blocks do. Legend beside `kv.py`: R runs, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

COPIED_TOKENS = 128
"""Up to so many tokens, what single rows read is copied side by side on a CPU and attended to in one call; above, every
sequence is looked at where it lies. Eight sequences of 64 tokens take 0.28 ms a block so and 0.40 ms one by one, of 256
tokens 0.98 and 0.83, of 1,000 tokens 4.6 and 3.0 (SmolLM2's heads in float32, one core)."""
FILLED_ROWS = 8
"""A step, and what is filled in beside it: up to so many rows of a sequence attend with all others."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The rows of one sequence in a packed batch: tokens `start` to `start + length - 1` of it."""

    sequence: int
    start: int
    length: int
    limit: int = 0
    """How many tokens the sequence may come to; 0 where it is known already."""
    source: int = 0
    """How many of the sequence's first tokens are no part of the answer, and seen only by attention to them."""

    @property
    def end(self) -> int:
        """How long the sequence is after them."""
        return self.start + self.length

    def seen(self, *, source: bool) -> Run:
        """What its rows attend to: the sequence's source, or all that is behind it, up to themselves."""
        first, end = (0, self.source) if source else (self.source, self.end)
        return Run(sequence=self.sequence, start=first, length=end - first)


class Store(Protocol):
    """Who has which places: `KvStore`."""

    device: torch.device

    def stretch_of(self, sequence: int) -> tuple[int, int]:
        """The place of a sequence's first token, -1 where its places are scattered, and how many it has there."""
        ...

    def place_of(self, run: Run, first: int) -> Ints:
        """The places of a sequence's tokens `first` to `run.end` - 1."""
        ...


@dataclass(frozen=True, slots=True)
class Together:
    """Single rows that attend in one call, what they read copied and padded to the longest."""

    rows_S: Tensor
    read_R: Tensor
    """Places, of every row as many as of the longest."""
    mask_SH1T: Tensor | None
    """Which tokens each row sees, or what is added to its score; H is 1 where that is the same for all heads."""


@dataclass(frozen=True, slots=True)
class Alone:
    """Rows of one run, which attends by itself."""

    rows: slice
    read_T: slice | Tensor
    mask: Tensor | None
    """Which tokens each of the rows sees, or what is added to its score; None for all, or where it is `causal`."""
    causal: bool
    """Whether the rows are all that they see, each up to itself."""


@dataclass(frozen=True, slots=True)
class Places:
    """Index tensors of a packed batch into a store, the same for all blocks."""

    write_N: Tensor
    """The place of every row's own keys and values."""
    position_N: Tensor
    """Its token, counted from its sequence's first."""
    alone: Sequence[Alone]
    together: Together | None
    """None where all attend alone."""


def places_of(store: Store, runs: Sequence[Run], *, source: bool, bias_DH: Tensor | None) -> Places:
    """Those of the runs, or of what they read of their sources; see `KvStore.places`."""
    return _Packed(store, runs, source, bias_DH).places()


@dataclass(frozen=True, slots=True)
class _Packed:
    """A packed batch whose places are asked for."""

    store: Store
    runs: Sequence[Run]
    source: bool
    bias_DH: Tensor | None

    def places(self) -> Places:
        """Runs of few rows and of few tokens attend together; others, long ones and prompts, each alone."""
        store, runs, source = self.store, self.runs, self.source
        numbers = [(*store.stretch_of(run.sequence), run.start, run.length, run.source) for run in runs]
        begin_R, room_R, start_R, length_R, source_R = np.array(numbers, dtype=np.int64).T
        assert ((start_R + length_R <= room_R) | (begin_R < 0)).all(), "a sequence has no page for its last token"
        seen_R, end_R = (0 * source_R, source_R) if source else (source_R, start_R + length_R)
        row_R = length_R.cumsum() - length_R
        position_N = np.repeat(start_R - row_R, length_R) + np.arange(length_R.sum())
        write_N = np.repeat(begin_R, length_R) + position_N
        for k in np.flatnonzero(begin_R < 0).tolist():
            write_N[row_R[k] : row_R[k] + length_R[k]] = store.place_of(runs[k], runs[k].start)
        few_R = (length_R <= FILLED_ROWS) & (end_R - seen_R <= COPIED_TOKENS)
        # Scattered pages are copied anyhow, and a GPU is kept waiting by a call for each sequence.
        few_R |= (length_R == 1) & ((begin_R < 0) | (store.device.type != "cpu"))
        run_S = np.repeat(np.where(few_R, np.arange(len(few_R)), -1), length_R)
        rows_S = np.flatnonzero(run_S >= 0)
        run_S, token_S = run_S[rows_S], position_N[rows_S]
        end_S = source_R[run_S] if source else token_S + 1
        padded = rows_S, run_S, begin_R[run_S], seen_R[run_S], end_S, token_S
        return Places(
            write_N=self._tensor(write_N),
            position_N=self._tensor(position_N),
            alone=[self._alone(runs[k], int(row_R[k])) for k in np.flatnonzero(~few_R).tolist()],
            together=self._padded(*padded) if len(rows_S) else None,
        )

    def _alone(self, run: Run, row: int) -> Alone:
        seen, (begin, _) = run.seen(source=self.source), self.store.stretch_of(run.sequence)
        lie = slice(begin + seen.start, begin + seen.end)
        read_T = lie if begin >= 0 else self._tensor(self.store.place_of(seen, seen.start))
        mask = (None, False) if self.source else self._mask(run, seen)
        return Alone(slice(row, row + run.length), read_T, *mask)

    def _padded(self, rows_S: Ints, run_S: Ints, begin_S: Ints, first_S: Ints, end_S: Ints, token_S: Ints) -> Together:
        """Of rows that see tokens `first` to `end` - 1 of their sequences, and are token `token` themselves."""
        lengths_S1 = (end_S - first_S)[:, None]
        longest = int(lengths_S1.max())
        tokens_1T = np.arange(longest)[None, :]
        # Behind its own, a row reads its last token again, never another's: 0 times NaN is NaN.
        read_ST = (begin_S + first_S)[:, None] + np.minimum(tokens_1T, lengths_S1 - 1)
        for s in np.flatnonzero(begin_S < 0).tolist():
            first, end = int(first_S[s]), int(end_S[s])
            seen = replace(self.runs[run_S[s]], start=first, length=end - first)
            read_ST[s] = np.resize(self.store.place_of(seen, first), longest)
        where = self._tensor(rows_S), self._tensor(read_ST.ravel())
        if self.bias_DH is not None:
            bias_STH = self._biased((token_S - first_S)[:, None] - tokens_1T)
            return Together(*where, bias_STH.transpose(1, 2)[:, :, None])
        if int(lengths_S1.min()) == longest:
            return Together(*where, None)
        mask_ST = self._tensor(tokens_1T < lengths_S1)
        return Together(*where, mask_ST[:, None, None, :])

    def _mask(self, run: Run, seen: Run) -> tuple[Tensor | None, bool]:
        """And whether it is causal."""
        distance_nT = np.arange(run.start, run.end)[:, None] - np.arange(seen.start, seen.end)[None, :]
        if self.bias_DH is not None:
            return self._biased(distance_nT).permute(2, 0, 1)[None], False
        if run.start == seen.start or run.length == 1:
            return None, run.length > 1
        return self._tensor(distance_nT >= 0), False

    def _biased(self, distance: npt.NDArray[np.int64]) -> Tensor:
        """What is added to scores, by how far keys are before their queries, (*distance, H); none sees those behind."""
        assert self.bias_DH is not None
        bias: Tensor = self.bias_DH[self._tensor(distance.clip(0))]
        return bias.masked_fill(self._tensor(distance < 0)[..., None], -torch.inf)

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.store.device, non_blocking=True)
