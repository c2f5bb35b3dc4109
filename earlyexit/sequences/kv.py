"""Keys and values of sequences' tokens, by block, in pages of one store per replica.

Pages for a sequence's prompt and for all tokens that it may produce are reserved when it enters. So nothing is ever
evicted, and no two sequences wait for each other's pages. The pages are free again as soon as the sequence ends (TCB
section 4.2.2: early memory cleaning).

`KvIndex` says where the rows of a packed batch are in the store and what each of them attends to. It is made for every
batch and stretch of blocks, in whole arrays: a call for every row costs as much as a small model's blocks. Tensor
legend beside `piece.py`: P places of the store, of one token each, K key/value heads, G query heads that share one, d
numbers of a head, S inputs of one token, R runs, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from earlyexit.engine.device import MemoryUse
from earlyexit.engine.queue import NO_SEQUENCE
from earlyexit.errors import InputError, OverloadedError
from earlyexit.sequences.sequence import PAGE_TOKENS

COPIED_TOKENS = 128
"""Up to so many tokens, a CPU copies the keys and values of single rows side by side and attends to them in one call.
Longer sequences are read in place, one call each: between 64 and 256 tokens that becomes faster (SmolLM2's heads in
float32, eight sequences, one core)."""
FILLED_ROWS = 8
"""Up to so many rows of a sequence, a step and the tokens filled in beside it, attend in the common call."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The rows of one sequence in a packed batch: tokens `start` to `start + length - 1` of it."""

    sequence: int
    start: int
    length: int
    limit: int = 0
    """Tokens that the sequence may come to; 0 where this is known already."""
    source: int = 0
    """How many of the sequence's first tokens are its source, which only cross-attention sees."""

    @property
    def end(self) -> int:
        """The length of the sequence after them."""
        return self.start + self.length

    def seen(self, *, source: bool) -> Run:
        """Returns what its rows attend to: the sequence's source, or all tokens behind it, up to themselves."""
        first, end = (0, self.source) if source else (self.source, self.end)
        return Run(sequence=self.sequence, start=first, length=end - first)


@dataclass(frozen=True, slots=True)
class Together:
    """Single rows that attend in one call; the keys and values that they read are copied and padded to the longest."""

    rows_S: Tensor
    read_R: Tensor
    """Places of the store. Every row has as many as the longest row."""
    mask_SH1T: Tensor | None
    """Which tokens each row sees, or what is added to its score; H is 1 where all heads have the same."""


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
class KvIndex:
    """Index tensors of a packed batch into a store, the same for all blocks."""

    write_N: Tensor
    """The place of every row's own keys and values."""
    position_N: Tensor
    """Its token, counted from its sequence's first."""
    alone: Sequence[Alone]
    together: Together | None
    """None where all attend alone."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """The packed batch of a call of `KvStore.places`."""

    store: KvStore
    runs: Sequence[Run]
    source: bool
    bias_DH: Tensor | None

    def places(self) -> KvIndex:
        """Runs of few rows and few tokens attend together; others, such as prompts, attend alone."""
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
        # Scattered pages are copied anyway, and a GPU waits for the host in a call per sequence.
        few_R |= (length_R == 1) & ((begin_R < 0) | (store.device.type != "cpu"))
        run_S = np.repeat(np.where(few_R, np.arange(len(few_R)), -1), length_R)
        rows_S = np.flatnonzero(run_S >= 0)
        run_S, token_S = run_S[rows_S], position_N[rows_S]
        end_S = source_R[run_S] if source else token_S + 1
        padded = rows_S, run_S, begin_R[run_S], seen_R[run_S], end_S, token_S
        return KvIndex(
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
        """Returns rows that see tokens `first` to `end` - 1 of their sequences, and are token `token` themselves."""
        lengths_S1 = (end_S - first_S)[:, None]
        longest = int(lengths_S1.max())
        tokens_1T = np.arange(longest)[None, :]
        # Padding reads a row's own last token again, never another sequence's: 0 times NaN is NaN.
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
        """Returns the mask of a run that attends alone, and whether it is causal."""
        distance_nT = np.arange(run.start, run.end)[:, None] - np.arange(seen.start, seen.end)[None, :]
        if self.bias_DH is not None:
            return self._biased(distance_nT).permute(2, 0, 1)[None], False
        if run.start == seen.start or run.length == 1:
            return None, run.length > 1
        return self._tensor(distance_nT >= 0), False

    def _biased(self, distance: npt.NDArray[np.int64]) -> Tensor:
        """Returns the bias on scores by the distance of keys before their queries, (*distance, H); -inf behind them."""
        assert self.bias_DH is not None
        bias: Tensor = self.bias_DH[self._tensor(distance.clip(0))]
        return bias.masked_fill(self._tensor(distance < 0)[..., None], -torch.inf)

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.store.device, non_blocking=True)


TRIAL = NO_SEQUENCE
"""The sequence number of warm-ups and profiles, whose keys and values are not kept."""
RETRY_S = 1.0
"""When pages may be free again: about the shortest time that sequences last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """The keys and values of one token in every block."""

    num_blocks: int
    num_heads: int
    head_size: int

    def bytes_per_token(self, float_bytes: int) -> int:
        """Returns the bytes of one token in all blocks."""
        return 2 * self.num_blocks * self.num_heads * self.head_size * float_bytes


class KvStore:
    """Pages of one replica, and the sequences that have them.

    A sequence gets adjacent pages if there are enough, so that its keys and values can be read in place. Otherwise it
    gets any free pages: no sequence is refused because the free pages are scattered.

    Not thread-safe: one thread at a time may call `enter` and `free`. Several may compute at once, each on its own
    sequences.
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
        """The sequences that have pages."""
        return frozenset(self._pages)

    @property
    def use(self) -> MemoryUse:
        """The pages reserved now, and at most so far."""
        return MemoryUse(
            sequences=len(self._pages),
            pages=self.num_pages - self.free_pages,
            peak_pages=self._peak_pages,
            num_pages=self.num_pages,
            page_tokens=self.page_tokens,
        )

    def room_of(self, sequence: int) -> int:
        """Returns how many tokens its pages hold; 0 for a sequence without pages."""
        pages = self._pages.get(sequence)
        return 0 if pages is None else len(pages.numbers) * self.page_tokens

    def enter(self, sequence: int, tokens: int) -> None:
        """Reserve pages for all the tokens that a sequence may come to, unless it has them.

        Raises InputError where the store could never hold them, OverloadedError where too few pages are free.
        """
        if sequence == TRIAL or sequence in self._pages:
            return
        needed = -(-tokens // self.page_tokens)
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
        """Free a sequence's pages, if it has any."""
        pages = self._pages.pop(sequence, None)
        if pages is not None:
            self._is_free[pages.numbers] = True

    def places(self, runs: Sequence[Run], *, source: bool = False, bias_DH: Tensor | None = None) -> KvIndex:
        """Returns where the rows of these runs are written, and what each of them reads.

        They read their sequences' sources if `source`. `bias_DH`: the bias on the score of a key by its distance before
        its query; None for no bias.
        """
        return _Packed(self, runs, source, bias_DH).places()

    def place_of(self, run: Run, first: int) -> npt.NDArray[np.int64]:
        """Returns the store's places of a sequence's tokens `first` to `run.end` - 1."""
        size = self.page_tokens
        tokens = np.arange(first, run.end)
        if run.sequence == TRIAL:
            return self._of_trials + tokens % size
        pages = self._pages[run.sequence].numbers
        assert run.end <= len(pages) * size, f"sequence {run.sequence} has no page for token {run.end - 1}"
        found: npt.NDArray[np.int64] = pages[tokens // size] * size + tokens % size
        return found

    def stretch_of(self, sequence: int) -> tuple[int, int]:
        """Returns the place of a sequence's first token, and how many tokens have room from there on.

        The place is -1 for scattered pages.
        """
        pages = self._pages.get(sequence)
        if pages is None or pages.first < 0:
            return -1, 0
        return pages.first * self.page_tokens, len(pages.numbers) * self.page_tokens

    def write(self, block: int, place_N: Tensor, keys_NKd: Tensor, values_NKd: Tensor) -> None:
        """Keep a block's keys and values of every row; a token may be written again."""
        self._keys[block].index_copy_(0, place_N, keys_NKd)
        self._values[block].index_copy_(0, place_N, values_NKd)

    def attend(self, block: int, places: KvIndex, queries_NHd: Tensor) -> Tensor:
        """Returns the attention of every row to what it sees, (N, H, d)."""
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


@dataclass(frozen=True, slots=True)
class _Pages:
    """A sequence's pages, in the order of its tokens."""

    numbers: npt.NDArray[np.int64]
    first: int
    """The number of the first page if they are adjacent, else -1."""


def _chosen(free: npt.NDArray[np.int64], needed: int) -> _Pages:
    """Returns free pages: the first of the shortest adjacent stretch that is long enough, else the first free ones."""
    firsts = np.flatnonzero(np.diff(free, prepend=-2) != 1)
    lengths = np.diff(firsts, append=len(free))
    fitting = np.flatnonzero(lengths >= needed)
    if not len(fitting):
        return _Pages(free[:needed], first=-1)
    first = firsts[fitting[lengths[fitting].argmin()]]
    return _Pages(free[first : first + needed], first=int(free[first]))


def _zeros(size: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns zeros that take a CPU's memory only when they are written to, unlike `torch.zeros`."""
    if device.type != "cpu":
        return torch.zeros(size, device=device, dtype=dtype)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.uint8)).view(dtype).view(size)
