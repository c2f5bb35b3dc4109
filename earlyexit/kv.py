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
from earlyexit.kv_places import Alone, Places, Run, Together, places_of
from earlyexit.member import NO_SEQUENCE
from earlyexit.memory import PAGE_TOKENS, MemoryUse

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
