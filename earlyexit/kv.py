"""Keys and values of the tokens that sequences have run, by block, in pages of one store per replica.

Pages for a sequence's prompt and all it may produce are reserved when it enters, so that nothing is ever evicted and no
two sequences wait for each other's pages, and they are free again the moment it ends (TCB section 4.2.2: early memory
cleaning). Legend beside `layout.py`: P places (of one token each) of the store, K key/value heads, G query heads that
share one, d numbers of a head, S inputs of one token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from earlyexit.errors import InputError, OverloadedError
from earlyexit.member import NO_SEQUENCE
from earlyexit.memory import PAGE_TOKENS, MemoryUse

TRIAL = NO_SEQUENCE
"""Warm-ups and profiles: what they leave behind is nobody's."""
RETRY_S = 1.0
"""When pages may be free again: of what sequences last, about the least."""
COPIED_TOKENS = 128
"""Up to so many tokens, what single rows read is copied side by side on a CPU and attended to in one call; above, every
sequence is looked at where it lies. Eight sequences of 64 tokens take 0.28 ms a block so and 0.40 ms one by one, of 256
tokens 0.98 and 0.83, of 1,000 tokens 4.6 and 3.0 (SmolLM2's heads in float32, one core)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What one token leaves behind in every block."""

    num_blocks: int
    num_heads: int
    head_size: int

    def bytes_per_token(self, float_bytes: int) -> int:
        """Keys and values of all blocks."""
        return 2 * self.num_blocks * self.num_heads * self.head_size * float_bytes


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
        return Places(self, runs, source=source, bias_DH=bias_DH)

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

    def stretch_of(self, run: Run, first: int = 0) -> slice | None:
        """The store's places of a sequence's tokens `first` to `run.end` - 1; None where they are scattered."""
        pages = self._pages.get(run.sequence)
        if pages is None or not pages.side_by_side:
            return None
        begin = int(pages.numbers[0]) * self.page_tokens
        return slice(begin + first, begin + run.end)

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

    def _attend_together(self, those: _Together, queries_SHd: Tensor, keys_PKd: Tensor, values_PKd: Tensor) -> Tensor:
        keys_SKTd, values_SKTd = (
            each.flatten(1).index_select(0, those.read_R).view(len(queries_SHd), -1, *each.shape[1:]).transpose(1, 2)
            for each in (keys_PKd, values_PKd)
        )
        # Query heads that share a key are rows of one product, so that it is read once for all of them.
        queries_SKGd = queries_SHd.reshape(len(queries_SHd), self.shape.num_heads, -1, self.shape.head_size)
        attended = F.scaled_dot_product_attention(queries_SKGd, keys_SKTd, values_SKTd, attn_mask=those.mask_SH1T)
        return attended.flatten(1, 2)

    def _attend_alone(self, one: _Alone, queries_THd: Tensor, keys_PKd: Tensor, values_PKd: Tensor) -> Tensor:
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
    side_by_side: bool


def _chosen(free: npt.NDArray[np.int64], needed: int) -> _Pages:
    """Of the free pages the first of the shortest stretch that holds so many, else those that come first."""
    firsts = np.flatnonzero(np.diff(free, prepend=-2) != 1)
    lengths = np.diff(firsts, append=len(free))
    fitting = np.flatnonzero(lengths >= needed)
    if not len(fitting):
        return _Pages(free[:needed], side_by_side=False)
    first = firsts[fitting[lengths[fitting].argmin()]]
    return _Pages(free[first : first + needed], side_by_side=True)


@dataclass(frozen=True, slots=True)
class _Together:
    """Single rows that attend in one call, what they read copied and padded to the longest."""

    rows_S: Tensor
    read_R: Tensor
    """Places, of every row as many as of the longest."""
    mask_SH1T: Tensor | None
    """Which tokens each row sees, or what is added to its score; H is 1 where that is the same for all heads."""


@dataclass(frozen=True, slots=True)
class _Alone:
    """Rows of one run, which attends by itself."""

    rows: slice
    read_T: slice | Tensor
    mask: Tensor | None
    """Which tokens each of the rows sees, or what is added to its score; None for all, or where it is `causal`."""
    causal: bool
    """Whether the rows are all that they see, each up to itself."""


class Places:
    """Index tensors of a packed batch into a store, the same for all blocks."""

    def __init__(self, store: KvStore, runs: Sequence[Run], *, source: bool, bias_DH: Tensor | None) -> None:
        """Runs of a row and of few tokens attend together; others, long ones and prompts, each alone."""
        self._device = store.device
        self._bias_DH = bias_DH
        self.runs = tuple(runs)
        self.write_N = self._tensor(np.concatenate([store.place_of(run, run.start) for run in runs]))
        self.position_N = self._tensor(np.concatenate([np.arange(run.start, run.end) for run in runs]))
        self.together: _Together | None = None
        self.alone: list[_Alone] = []
        together: list[tuple[int, Run, Run]] = []
        first = 0
        for run in runs:
            seen = run.seen(source=source)
            stretch = store.stretch_of(seen, seen.start)
            if run.length == 1 and (stretch is None or seen.length <= COPIED_TOKENS or store.device.type != "cpu"):
                together.append((first, run, seen))
            else:
                read_T = stretch or self._tensor(store.place_of(seen, seen.start))
                rows = slice(first, first + run.length)
                self.alone.append(_Alone(rows, read_T, *((None, False) if source else self._mask(run, seen))))
            first += run.length
        if together:
            self.together = self._padded(store, together)

    def _padded(self, store: KvStore, those: Sequence[tuple[int, Run, Run]]) -> _Together:
        rows_S = self._tensor(np.array([row for row, _, _ in those]))
        lengths_S1 = np.array([[seen.length] for _, _, seen in those])
        longest = int(lengths_S1.max())
        read_ST = np.empty((len(those), longest), dtype=np.int64)
        for read_T, (_, _, seen) in zip(read_ST, those, strict=True):
            read_T[:] = np.resize(store.place_of(seen, seen.start), longest)  # never another's: 0 times NaN is NaN
        read_R = self._tensor(read_ST.ravel())
        if self._bias_DH is not None:
            positions_S1 = np.array([[run.end - 1 - seen.start] for _, run, seen in those])
            bias_STH = self._biased(positions_S1 - np.arange(longest)[None, :])
            return _Together(rows_S, read_R, bias_STH.transpose(1, 2)[:, :, None])
        if int(lengths_S1.min()) == longest:
            return _Together(rows_S, read_R, None)
        mask_ST = self._tensor(np.arange(longest)[None, :] < lengths_S1)
        return _Together(rows_S, read_R, mask_ST[:, None, None, :])

    def _mask(self, run: Run, seen: Run) -> tuple[Tensor | None, bool]:
        """And whether it is causal."""
        distance_nT = np.arange(run.start, run.end)[:, None] - np.arange(seen.start, seen.end)[None, :]
        if self._bias_DH is not None:
            return self._biased(distance_nT).permute(2, 0, 1)[None], False
        if run.start == seen.start or run.length == 1:
            return None, run.length > 1
        return self._tensor(distance_nT >= 0), False

    def _biased(self, distance: npt.NDArray[np.int64]) -> Tensor:
        """What is added to scores, by how far keys are before their queries, (*distance, H); none sees those behind."""
        assert self._bias_DH is not None
        bias: Tensor = self._bias_DH[self._tensor(distance.clip(0))]
        return bias.masked_fill(self._tensor(distance < 0)[..., None], -torch.inf)

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _zeros(size: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Of a CPU's memory none is taken before it is written to, as `torch.zeros` would."""
    if device.type != "cpu":
        return torch.zeros(size, device=device, dtype=dtype)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.uint8)).view(dtype).view(size)
