"""Keys and values of the tokens that sequences have run, by block, in pages of one store per replica.

Pages for a sequence's prompt and all it may produce are reserved when it enters, so that nothing is ever evicted and no
two sequences wait for each other's pages, and they are free again the moment it ends (TCB section 4.2.2: early memory
cleaning). Legend beside `layout.py`: P places (of one token each) of the store, K key/value heads, G query heads that
share one, d numbers of a head, S inputs of one token.

Where the rows of a packed batch are in a store of keys and values, and what each of them attends to.

Made anew for every batch and stretch of blocks, so whole arrays at once: a call for every row costs as much as small
models' blocks do. Legend beside `kv.py`: R runs, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from earlyexit.engine.queue import NO_SEQUENCE
from earlyexit.errors import InputError, OverloadedError
from earlyexit.sequences.memory import PAGE_TOKENS, MemoryUse

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


TRIAL = NO_SEQUENCE
"""Warm-ups and profiles: what they leave behind is nobody's."""
RETRY_S = 1.0
"""When pages may be free again: of what sequences last, about the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What one token leaves behind in every block."""

    num_blocks: int
    num_heads: int
    head_size: int

    def bytes_per_token(self, float_bytes: int) -> int:
        """Keys and values of all blocks."""
        return 2 * self.num_blocks * self.num_heads * self.head_size * float_bytes


class KvStore:
    """Pages of one replica, and who has them.

    A sequence gets pages side by side where there are so many, so that what it has written need not be copied to be
    looked at; else any that are free: nobody is refused because the free ones are scattered.

    Not thread-safe: who enters and who is freed is for one thread at a time to say. Several may compute at once, each
    on sequences of its own.
    """

    def __init__(
        self,
        shape: KvShape,
        num_pages: int,
        *,
        page_tokens: int = PAGE_TOKENS,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Raises InputError for a store without pages."""
        if num_pages < 1 or page_tokens < 1:
            raise InputError(f"a store of {num_pages} pages of {page_tokens} tokens holds nothing")
        size = ((num_pages + 1) * page_tokens, shape.num_heads, shape.head_size)
        self.shape = shape
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self.device = torch.device(device)
        self._keys = [_zeros(size, self.device, dtype) for _ in range(shape.num_blocks)]
        self._values = [_zeros(size, self.device, dtype) for _ in range(shape.num_blocks)]
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._pages: dict[int, _Pages] = {}
        self._peak_pages = 0
        self._of_trials = num_pages * page_tokens

    @property
    def free_pages(self) -> int:
        return int(self._is_free.sum())

    @property
    def sequences(self) -> frozenset[int]:
        """Who has pages."""
        return frozenset(self._pages)

    @property
    def use(self) -> MemoryUse:
        """How many pages are reserved, and were at most."""
        return MemoryUse(
            sequences=len(self._pages),
            pages=self.num_pages - self.free_pages,
            peak_pages=self._peak_pages,
            num_pages=self.num_pages,
            page_tokens=self.page_tokens,
        )

    def room_of(self, sequence: int) -> int:
        """How many tokens its pages hold; 0 where it has none."""
        pages = self._pages.get(sequence)
        return 0 if pages is None else len(pages.numbers) * self.page_tokens

    def pages_for(self, tokens: int) -> int:
        """How many so many tokens take."""
        return -(-tokens // self.page_tokens)

    def enter(self, sequence: int, tokens: int) -> None:
        """Reserve pages for all the tokens that a sequence may come to, unless it has them.

        Raises InputError where the store could never hold them, OverloadedError where too few pages are free.
        """
        if sequence == TRIAL or sequence in self._pages:
            return
        needed = self.pages_for(tokens)
        if not 1 <= needed <= self.num_pages:
            raise InputError(
                f"{tokens} tokens, prompt and answer, are {needed} pages of {self.page_tokens}; 1 to {self.num_pages} "
                f"are possible"
            )
        free = np.flatnonzero(self._is_free)
        if needed > len(free):
            message = f"{needed} pages are needed for keys and values, {len(free)} of {self.num_pages} are free"
            raise OverloadedError(message, retry_after_s=RETRY_S)
        self._pages[sequence] = pages = _chosen(free, needed)
        self._is_free[pages.numbers] = False
        self._peak_pages = max(self._peak_pages, self.num_pages - self.free_pages)

    def free(self, sequence: int) -> None:
        """Give its pages back; nothing for a sequence that has none."""
        pages = self._pages.pop(sequence, None)
        if pages is not None:
            self._is_free[pages.numbers] = True

    def places(self, runs: Sequence[Run], *, source: bool = False, bias_DH: Tensor | None = None) -> Places:
        """Where the rows of these runs are written, and what each of them reads.

        That is their sequences' sources, where `source`. `bias_DH`: what is added to the score of a key so many tokens
        before its query; None for nothing.
        """
        return places_of(self, runs, source=source, bias_DH=bias_DH)

    def place_of(self, run: Run, first: int) -> npt.NDArray[np.int64]:
        """The store's places of a sequence's tokens `first` to `run.end` - 1."""
        size = self.page_tokens
        tokens = np.arange(first, run.end)
        if run.sequence == TRIAL:
            return self._of_trials + tokens % size
        pages = self._pages[run.sequence].numbers
        assert run.end <= len(pages) * size, f"sequence {run.sequence} has no page for token {run.end - 1}"
        found: npt.NDArray[np.int64] = pages[tokens // size] * size + tokens % size
        return found

    def stretch_of(self, sequence: int) -> tuple[int, int]:
        """The store's place of a sequence's first token, behind which the others lie, -1 where they are scattered.

        And how many tokens it has room for there.
        """
        pages = self._pages.get(sequence)
        if pages is None or pages.first < 0:
            return -1, 0
        return pages.first * self.page_tokens, len(pages.numbers) * self.page_tokens

    def write(self, block: int, place_N: Tensor, keys_NKd: Tensor, values_NKd: Tensor) -> None:
        """Keep what a block made of every row; writing a token again is no harm."""
        self._keys[block].index_copy_(0, place_N, keys_NKd)
        self._values[block].index_copy_(0, place_N, values_NKd)

    def attend(self, block: int, places: Places, queries_NHd: Tensor) -> Tensor:
        """Attention of every row to what it sees, (N, H, d)."""
        kept = self._keys[block], self._values[block]
        if places.together is not None and not places.alone:
            return self._attend_together(places.together, queries_NHd, *kept)
        context_NHd = torch.empty_like(queries_NHd)
        if places.together is not None:
            rows_S = places.together.rows_S
            context_NHd[rows_S] = self._attend_together(places.together, queries_NHd[rows_S], *kept)
        for each in places.alone:
            context_NHd[each.rows] = self._attend_alone(each, queries_NHd[each.rows], *kept)
        return context_NHd

    def _attend_together(self, those: Together, queries_SHd: Tensor, keys_PKd: Tensor, values_PKd: Tensor) -> Tensor:
        keys_SKTd, values_SKTd = (
            each.flatten(1).index_select(0, those.read_R).view(len(queries_SHd), -1, *each.shape[1:]).transpose(1, 2)
            for each in (keys_PKd, values_PKd)
        )
        # Query heads that share a key are rows of one product, so that it is read once for all of them.
        queries_SKGd = queries_SHd.reshape(len(queries_SHd), self.shape.num_heads, -1, self.shape.head_size)
        attended = F.scaled_dot_product_attention(queries_SKGd, keys_SKTd, values_SKTd, attn_mask=those.mask_SH1T)
        return attended.flatten(1, 2)

    def _attend_alone(self, one: Alone, queries_THd: Tensor, keys_PKd: Tensor, values_PKd: Tensor) -> Tensor:
        keys_1KTd, values_1KTd = (each[one.read_T].transpose(0, 1)[None] for each in (keys_PKd, values_PKd))
        if len(queries_THd) == 1:
            queries_1KGd = queries_THd.reshape(1, self.shape.num_heads, -1, self.shape.head_size)
            attended = F.scaled_dot_product_attention(queries_1KGd, keys_1KTd, values_1KTd, attn_mask=one.mask)
            return attended.flatten(1, 2)
        attended = F.scaled_dot_product_attention(
            queries_THd.transpose(0, 1)[None],
            keys_1KTd,
            values_1KTd,
            attn_mask=one.mask,
            is_causal=one.causal,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)

    def held(self, block: int, sequence: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence's first tokens in a block, each (tokens, K, d)."""
        places = torch.from_numpy(self.place_of(Run(sequence=sequence, start=0, length=tokens), 0))
        places = places.to(self._keys[block].device)
        return self._keys[block][places], self._values[block][places]


@dataclass(frozen=True, slots=True)
class _Pages:
    """What a sequence has, in the order of its tokens."""

    numbers: npt.NDArray[np.int64]
    first: int
    """The number of the first, where they lie side by side, else -1."""


def _chosen(free: npt.NDArray[np.int64], needed: int) -> _Pages:
    """Of the free pages the first of the shortest stretch that holds so many, else those that come first."""
    firsts = np.flatnonzero(np.diff(free, prepend=-2) != 1)
    lengths = np.diff(firsts, append=len(free))
    fitting = np.flatnonzero(lengths >= needed)
    if not len(fitting):
        return _Pages(free[:needed], first=-1)
    first = firsts[fitting[lengths[fitting].argmin()]]
    return _Pages(free[first : first + needed], first=int(free[first]))


def _zeros(size: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Of a CPU's memory none is taken before it is written to, as `torch.zeros` would."""
    if device.type != "cpu":
        return torch.zeros(size, device=device, dtype=dtype)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.uint8)).view(dtype).view(size)
