"""The KV cache: the keys and values of all sequences of a replica, in pages.

When a sequence enters, pages are reserved for its prompt and for all tokens that it may generate. So nothing is ever
evicted, and sequences cannot block each other by waiting for pages. The pages are freed as soon as the sequence ends
(TCB section 4.2.2: early memory cleaning).

A token that leaves at a ramp has no keys and values in the blocks after the ramp, but later tokens of its sequence
attend to them. So its hidden state waits before these blocks until a later token of the sequence passes:

- *compute*: the blocks also run on the skipped token, in the same batch. Its keys and values equal the full model's;
- *copy*: every skipped block computes keys and values from the hidden state with which the token left (Schuster et al.
  2022, CALM: state propagation).

A token may pass a block twice, when a failed batch runs again. A token may also pass while an older one is still in the
network, because answered inputs may stay. So an update for one token never changes the records of newer tokens.

`KvIndex` holds the places of a packed batch's rows in the store, and the places to which each row attends. It is
computed with array operations for every batch and stretch of blocks, since a call per row would cost as much as a small
model's blocks. Tensor legend, in addition to `piece.py`: P places of the store (one token each), K key/value heads, G
query heads per key/value head, d size of a head, S inputs of one token, R runs, N rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from earlyexit.engine.device import MemoryUse, lost
from earlyexit.engine.queue import NO_SEQUENCE
from earlyexit.errors import InputError, OfframpError, OverloadedError
from earlyexit.network.boundary import WirePiece
from earlyexit.network.piece import Piece
from earlyexit.sequences.sequence import PAGE_TOKENS, sequence_of

COPIED_TOKENS = 128
"""On a CPU, rows that read at most this many tokens share one attention call, which copies their keys and values. For
longer sequences, one call each without a copy is faster: the crossing is between 64 and 256 tokens (SmolLM2's heads in
float32, eight sequences, one core)."""
FILLED_ROWS = 8
"""The most rows of a run that may share the call: a step and the skipped tokens that are computed with it."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The rows of one sequence in a packed batch: its tokens `start` to `start + length - 1`."""

    sequence: int
    start: int
    length: int
    limit: int = 0
    """The most tokens that the sequence may have; 0 if its pages are reserved already."""
    source: int = 0
    """The number of source tokens at the start of the sequence. Only cross-attention reads them."""

    @property
    def end(self) -> int:
        """One past the last token of the run."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Together:
    """Single rows that share one attention call. Their keys and values are copied, padded to the longest row."""

    rows_S: Tensor
    read_R: Tensor
    """The places that the rows read. Every row has as many as the longest row."""
    mask_SH1T: Tensor | None
    """A bool mask, or a bias that is added to scores; None: no mask. H is 1 if all heads have the same mask."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The rows of one run, which has its own attention call."""

    rows: slice
    read_T: slice | Tensor
    mask: Tensor | None
    """A bool mask, or a bias that is added to scores; None: no mask, or a causal mask if `causal`."""
    causal: bool
    """Whether the rows attend to exactly themselves with a causal mask."""


@dataclass(frozen=True, slots=True)
class KvIndex:
    """Index tensors of a packed batch into a store. All blocks share them."""

    write_N: Tensor
    """The place for the keys and values of every row."""
    position_N: Tensor
    """The position of every row's token in its sequence."""
    alone: Sequence[Alone]
    together: Together | None
    """None: all runs have their own call."""


TRIAL = NO_SEQUENCE
"""The sequence number of warm-ups and profiles. Their keys and values are not kept."""
RETRY_S = 1.0
"""The `retry_after_s` if pages are missing: about the shortest duration of sequences."""


class KvStore:
    """The pages of one replica, and the sequences to which they are assigned.

    A sequence gets adjacent pages if possible, so that its keys and values can be read in place. Otherwise it gets any
    free pages.

    Only one thread at a time may call `enter` and `free`. Several threads may compute at once, on different sequences.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_pages: int,
        *,
        page_tokens: int = PAGE_TOKENS,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`shape`: blocks, heads, and size of a head. Raises InputError for a store without pages."""
        if num_pages < 1 or page_tokens < 1:
            raise InputError(f"a store of {num_pages} pages of {page_tokens} tokens holds nothing")
        num_blocks, *rest = shape
        size = ((num_pages + 1) * page_tokens, *rest)
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self.device = torch.device(device)
        self._keys = [_zeros(size, self.device, dtype) for _ in range(num_blocks)]
        self._values = [_zeros(size, self.device, dtype) for _ in range(num_blocks)]
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._places: dict[int, Ints] = {}
        """The places of every sequence's tokens, on all its pages."""
        self._peak_pages = 0
        self._first_trial_place = num_pages * page_tokens

    @property
    def free_pages(self) -> int:
        return int(self._is_free.sum())

    @property
    def use(self) -> MemoryUse:
        """The number of reserved pages, now and at most so far."""
        return MemoryUse(
            sequences=len(self._places),
            pages=self.num_pages - self.free_pages,
            peak_pages=self._peak_pages,
            num_pages=self.num_pages,
            page_tokens=self.page_tokens,
        )

    def room_of(self, sequence: int) -> int:
        """Returns how many tokens fit into a sequence's pages; 0 if it has none."""
        return len(self._places.get(sequence, ()))

    def enter(self, sequence: int, tokens: int) -> None:
        """Reserves pages for all `tokens` that a sequence may have, unless it has pages already.

        Raises InputError if the store is too small, and OverloadedError if too few pages are free now.
        """
        if sequence == TRIAL or sequence in self._places:
            return
        needed = -(-tokens // self.page_tokens)
        if not 1 <= needed <= self.num_pages:
            raise InputError(
                f"{tokens} tokens of prompt and answer need {needed} pages of {self.page_tokens} tokens; 1 to "
                f"{self.num_pages} are possible"
            )
        free = np.flatnonzero(self._is_free)
        if needed > len(free):
            message = f"{needed} pages are needed for keys and values, {len(free)} of {self.num_pages} are free"
            raise OverloadedError(message, retry_after_s=RETRY_S)
        pages = _choose_pages(free, needed)
        self._places[sequence] = (pages[:, None] * self.page_tokens + np.arange(self.page_tokens)).ravel()
        self._is_free[pages] = False
        self._peak_pages = max(self._peak_pages, self.num_pages - self.free_pages)

    def free(self, sequence: int) -> None:
        """Frees a sequence's pages, if it has any."""
        if (places := self._places.pop(sequence, None)) is not None:
            self._is_free[places // self.page_tokens] = True

    def places(self, runs: Sequence[Run], *, source: bool = False, bias_DH: Tensor | None = None) -> KvIndex:
        """Returns the index of a batch of these runs.

        Runs of few rows and few tokens share an attention call. Others, such as prompts, have their own. `source`:
        whether the rows attend to their sequences' sources. `bias_DH`: the bias of scores by the distance of a key
        before its query; None: no bias.
        """
        numbers = [(run.start, run.length, run.source, max(run.end, run.source)) for run in runs]
        start_R, length_R, source_R, size_R = np.array(numbers, dtype=np.int64).T
        place_P = np.concatenate([self.place_of(run.sequence, max(run.end, run.source)) for run in runs])
        row_R, at_R = length_R.cumsum() - length_R, size_R.cumsum() - size_R
        run_N = np.repeat(np.arange(len(runs)), length_R)
        position_N = np.arange(len(run_N)) + (start_R - row_R)[run_N]
        first_R, end_R = (0 * source_R, source_R) if source else (source_R, start_R + length_R)
        read_R, num_R = at_R + first_R, end_R - first_R
        is_adjacent_R = place_P[read_R + num_R - 1] - place_P[read_R] == num_R - 1
        few_R = (length_R <= FILLED_ROWS) & (num_R <= COPIED_TOKENS)
        if self.device.type != "cpu":  # a call per sequence would be bound by the host
            few_R |= length_R == 1
        alone: list[Alone] = []
        for k in np.flatnonzero(~few_R).tolist():
            read_T = place_P[read_R[k] : read_R[k] + num_R[k]]
            adjacent = slice(int(read_T[0]), int(read_T[-1]) + 1)
            mask = (None, False) if source else self._mask(runs[k], bias_DH)
            rows = slice(int(row_R[k]), int(row_R[k] + length_R[k]))
            alone.append(Alone(rows, adjacent if is_adjacent_R[k] else self._tensor(read_T), *mask))
        together, rows_S = None, np.flatnonzero(few_R[run_N])
        if len(rows_S):
            run_S = run_N[rows_S]
            own_S = position_N[rows_S] - first_R[run_S]
            num_S1 = (num_R[run_S] if source else own_S + 1)[:, None]
            tokens_1T = np.arange(num_S1.max())[None, :]
            # Padding repeats the row's last token. Tokens of other sequences may be NaN, and 0 times NaN is NaN.
            read_ST = place_P[read_R[run_S][:, None] + np.minimum(tokens_1T, num_S1 - 1)]
            mask_SH1T = None
            if bias_DH is not None:
                mask_SH1T = self._biased(own_S[:, None] - tokens_1T, bias_DH).transpose(1, 2)[:, :, None]
            elif int(num_S1.min()) < tokens_1T.size:
                mask_SH1T = self._tensor(tokens_1T < num_S1)[:, None, None, :]
            together = Together(self._tensor(rows_S), self._tensor(read_ST.ravel()), mask_SH1T)
        write_N = place_P[at_R[run_N] + position_N]
        return KvIndex(self._tensor(write_N), self._tensor(position_N), alone, together)

    def _mask(self, run: Run, bias_DH: Tensor | None) -> tuple[Tensor | None, bool]:
        """Returns the mask of a run with its own call, and whether to use a causal mask instead."""
        distance_nT = np.arange(run.start, run.end)[:, None] - np.arange(run.source, run.end)[None, :]
        if bias_DH is not None:
            return self._biased(distance_nT, bias_DH).permute(2, 0, 1)[None], False
        if run.start == run.source or run.length == 1:
            return None, run.length > 1
        return self._tensor(distance_nT >= 0), False

    def _biased(self, distance: Ints, bias_DH: Tensor) -> Tensor:
        """Returns the bias by the distance of keys before their queries, (*distance, H); -inf for later keys."""
        bias: Tensor = bias_DH[self._tensor(distance.clip(0))]
        return bias.masked_fill(self._tensor(distance < 0)[..., None], -torch.inf)

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def place_of(self, sequence: int, end: int) -> Ints:
        """Returns the places of a sequence's first `end` tokens."""
        if sequence == TRIAL:
            return self._first_trial_place + np.arange(end) % self.page_tokens
        places = self._places[sequence]
        assert end <= len(places), f"sequence {sequence} has no page for token {end - 1}"
        return places[:end]

    def write(self, block: int, place_N: Tensor, keys_NKd: Tensor, values_NKd: Tensor) -> None:
        """Writes the keys and values of every row for one block. A place may be written again."""
        self._keys[block].index_copy_(0, place_N, keys_NKd)
        self._values[block].index_copy_(0, place_N, values_NKd)

    def attend(self, block: int, places: KvIndex, queries_NHd: Tensor) -> Tensor:
        """Returns the attention of every row in one block, (N, H, d)."""
        keys_and_values = self._keys[block], self._values[block]
        if places.together is not None and not places.alone:
            return self._attend_together(places.together, queries_NHd, *keys_and_values)
        context_NHd = torch.empty_like(queries_NHd)
        if places.together is not None:
            rows_S = places.together.rows_S
            context_NHd[rows_S] = self._attend_together(places.together, queries_NHd[rows_S], *keys_and_values)
        for run in places.alone:
            context_NHd[run.rows] = self._attend_alone(run, queries_NHd[run.rows], *keys_and_values)
        return context_NHd

    def _attend_together(self, rows: Together, queries_SHd: Tensor, keys_PKd: Tensor, values_PKd: Tensor) -> Tensor:
        keys_SKTd, values_SKTd = (
            each.flatten(1).index_select(0, rows.read_R).view(len(queries_SHd), -1, *each.shape[1:]).transpose(1, 2)
            for each in (keys_PKd, values_PKd)
        )
        # Query heads that share a key are rows of one product, so that each key is read once.
        queries_SKGd = queries_SHd.reshape(len(queries_SHd), keys_PKd.shape[1], -1, keys_PKd.shape[2])
        attended = F.scaled_dot_product_attention(queries_SKGd, keys_SKTd, values_SKTd, attn_mask=rows.mask_SH1T)
        return attended.flatten(1, 2)

    def _attend_alone(self, run: Alone, queries_THd: Tensor, keys_PKd: Tensor, values_PKd: Tensor) -> Tensor:
        read = run.read_T  # if it is a tensor, indexing would take several times as long as `index_select`
        keys_1KTd, values_1KTd = (
            (each[read] if isinstance(read, slice) else each.index_select(0, read)).transpose(0, 1)[None]
            for each in (keys_PKd, values_PKd)
        )
        if len(queries_THd) == 1:
            queries_1KGd = queries_THd.reshape(1, keys_PKd.shape[1], -1, keys_PKd.shape[2])
            attended = F.scaled_dot_product_attention(queries_1KGd, keys_1KTd, values_1KTd, attn_mask=run.mask)
            return attended.flatten(1, 2)
        attended = F.scaled_dot_product_attention(
            queries_THd.transpose(0, 1)[None],
            keys_1KTd,
            values_1KTd,
            attn_mask=run.mask,
            is_causal=run.causal,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)


def _choose_pages(free: Ints, needed: int) -> Ints:
    """Returns free pages: from the shortest adjacent stretch that is long enough, else the first free pages."""
    firsts = np.flatnonzero(np.diff(free, prepend=-2) != 1)
    lengths = np.diff(firsts, append=len(free))
    fitting = np.flatnonzero(lengths >= needed)
    first = firsts[fitting[lengths[fitting].argmin()]] if len(fitting) else 0
    return free[first : first + needed]


def _zeros(size: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns zeros. On a CPU, unlike `torch.zeros`, they take memory only once they are written to."""
    if device.type != "cpu":
        return torch.zeros(size, device=device, dtype=dtype)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.uint8)).view(dtype).view(size)


@dataclass(frozen=True, slots=True)
class SkippedTokens:
    """The hidden states of consecutive tokens of a sequence, from token `start` on."""

    start: int
    hidden_nD: Tensor

    @property
    def end(self) -> int:
        return self.start + self.hidden_nD.shape[0]

    def part(self, first: int, end: int) -> SkippedTokens | None:
        """Returns the tokens from `first` on and before `end`; None if there are none."""
        first, end = max(first, self.start), min(end, self.end)
        return SkippedTokens(first, self.hidden_nD[first - self.start : end - self.start]) if first < end else None


def concatenate(*parts: SkippedTokens | None) -> SkippedTokens:
    """Returns adjacent tokens together. Some part must not be None."""
    tokens = [part for part in parts if part is not None]
    for before, after in pairwise(tokens):
        assert before.end == after.start, f"tokens {before.end} to {after.start - 1} are missing"
    return SkippedTokens(tokens[0].start, torch.cat([part.hidden_nD for part in tokens])) if tokens[1:] else tokens[0]


RUN, BEHIND = 1, 2
"""The indices of these tensors in a decoder's piece. Before block 0 there is no tensor `behind`."""


def places_of(wire: WirePiece) -> npt.NDArray[np.int32]:
    """Returns which token of its answer each input requests, counted from 0, (B,), for a piece before block 0.

    For a part of a prompt that yields no token it is 0.
    """
    run_B5 = wire.tensors[RUN].astype(np.int64)
    return np.asarray(np.maximum(run_B5[:, 2] + wire.lengths_B - run_B5[:, 4], 0), dtype=np.int32)


class KvMemory:
    """The `Memory` of a decoder: its KV cache, and the skipped tokens of every sequence, which wait for a block."""

    def __init__(self, kv: KvStore) -> None:
        self.kv = kv
        self._pending: defaultdict[int, dict[int, SkippedTokens]] = defaultdict(dict)
        """The skipped tokens by sequence, and by the block for which they wait."""
        self.num_tokens: dict[int, int] = {}
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
        self._pending.pop(sequence, None)
        self.num_tokens.pop(sequence, None)

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
            sequence, block, end = sequence_of(high, low), piece.next_block, start + num_own
            waiting = self.older(sequence, block, end)
            self.mark_seen(sequence, block, end, until=block + 1)
            if waiting is not None and len(waiting.hidden_nD) > len(rows_nD):
                rows_nD = waiting.hidden_nD
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

    def pending_blocks(self, run: Run, first: int, end: int) -> list[int]:
        """Returns the blocks from `first` to `end` - 1 for which tokens older than the run wait."""
        waiting = self._pending[run.sequence].items()
        return [block for block, each in waiting if first <= block < end and each.start < run.start]

    def older(self, sequence: int, block: int, start: int) -> SkippedTokens | None:
        """Returns the tokens before `start` that wait for a block, which must include the last one; None: none wait."""
        waiting = self._pending[sequence].get(block)
        older = None if waiting is None else waiting.part(0, start)
        assert older is None or older.end == start, f"tokens {older.end} to {start - 1} are missing"
        return older

    def advance(self, sequence: int, first: int, end: int, tokens: SkippedTokens) -> None:
        """Notes that blocks `first` to `end` - 1 have seen `tokens`, which now wait for block `end`."""
        self.mark_seen(sequence, first, tokens.end, until=end)
        waiting = self._pending[sequence]
        newer = waiting[end].part(tokens.end, waiting[end].end) if end in waiting else None
        waiting[end] = concatenate(self.older(sequence, end, tokens.start), tokens, newer)

    def mark_seen(self, sequence: int, first: int, token: int, *, until: int | None = None) -> None:
        """Notes that all blocks from `first` on, or those before `until`, have seen the tokens before `token`."""
        waiting = self._pending[sequence]
        for block in [block for block in waiting if block >= first and (until is None or block < until)]:
            seen = waiting.pop(block)
            newer = seen.part(token, seen.end)
            if newer is not None:
                waiting[block] = newer

    def _admit(self, sequence: int, run: Run) -> None:
        """Admits one input, and reserves the memory of a new sequence. Raises the errors of `Memory.admit`."""
        if sequence == TRIAL:
            raise InputError("this model generates text: send a request for generation")
        if sequence != run.sequence:
            raise InputError(f"an input of sequence {run.sequence} was sent as one of sequence {sequence}")
        known = self.num_tokens.get(sequence, 0)
        if run.start > known:
            raise lost(sequence, f"its tokens {known} to {run.start - 1} are missing")
        self.kv.enter(sequence, run.limit)
        if run.end > self.kv.room_of(sequence):
            raise InputError(f"sequence {sequence} reserved {run.limit} tokens, but has {run.end}")
        self.num_tokens[sequence] = max(run.end, known)
