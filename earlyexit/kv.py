"""Keys and values of the tokens that sequences have run, by block, in pages of one store per replica.

Pages for a sequence's prompt and all it may produce are reserved when it enters, so that nothing is ever evicted and no
two sequences wait for each other's pages, and they are free again the moment it ends (TCB section 4.2.2: early memory
cleaning). Legend beside `layout.py`: P places (of one token each) of the store, K key/value heads, d numbers of a head,
S inputs of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from earlyexit.errors import InputError, OverloadedError
from earlyexit.member import NO_SEQUENCE
from earlyexit.memory import MemoryUse

TRIAL = NO_SEQUENCE
"""Warm-ups and profiles: what they leave behind is nobody's."""
RETRY_S = 1.0
"""When pages may be free again: of what sequences last, about the least."""
PAGE_TOKENS = 16
"""As vLLM's: on average half a page of each sequence is reserved and never used."""


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

    @property
    def end(self) -> int:
        """How long the sequence is after them."""
        return self.start + self.length


class KvStore:
    """Pages of one replica, and who has them.

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
        self._keys = [torch.zeros(size, device=device, dtype=dtype) for _ in range(shape.num_blocks)]
        self._values = [torch.zeros(size, device=device, dtype=dtype) for _ in range(shape.num_blocks)]
        self._free = list(range(num_pages))[::-1]
        self._pages: dict[int, npt.NDArray[np.int64]] = {}
        self._peak_pages = 0
        self._of_trials = num_pages * page_tokens

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def sequences(self) -> frozenset[int]:
        """Who has pages."""
        return frozenset(self._pages)

    @property
    def use(self) -> MemoryUse:
        """How many pages are reserved, and were at most."""
        return MemoryUse(
            sequences=len(self._pages),
            pages=self.num_pages - len(self._free),
            peak_pages=self._peak_pages,
            num_pages=self.num_pages,
            page_tokens=self.page_tokens,
        )

    def room_of(self, sequence: int) -> int:
        """How many tokens its pages hold; 0 where it has none."""
        return len(self._pages.get(sequence, ())) * self.page_tokens

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
        if needed > len(self._free):
            message = f"{needed} pages are needed for keys and values, {len(self._free)} of {self.num_pages} are free"
            raise OverloadedError(message, retry_after_s=RETRY_S)
        self._peak_pages = max(self._peak_pages, self.num_pages - len(self._free) + needed)
        self._pages[sequence] = np.array([self._free.pop() for _ in range(needed)], dtype=np.int64)

    def free(self, sequence: int) -> None:
        """Give its pages back; nothing for a sequence that has none."""
        self._free += reversed(self._pages.pop(sequence, np.empty(0, np.int64)).tolist())

    def places(self, runs: Sequence[Run]) -> Places:
        """Where the rows of these runs are written, and what each of them reads."""
        return Places(self, runs)

    def place_of(self, run: Run, first: int) -> npt.NDArray[np.int64]:
        """The store's places of a sequence's tokens `first` to `run.end` - 1."""
        size = self.page_tokens
        tokens = np.arange(first, run.end)
        if run.sequence == TRIAL:
            return self._of_trials + tokens % size
        pages = self._pages[run.sequence]
        assert run.end <= len(pages) * size, f"sequence {run.sequence} has no page for token {run.end - 1}"
        found: npt.NDArray[np.int64] = pages[tokens // size] * size + tokens % size
        return found

    def write(self, block: int, places: Places, keys_NKd: Tensor, values_NKd: Tensor) -> None:
        """Keep what a block made of every row; writing a token again is no harm."""
        self._keys[block].index_copy_(0, places.write_N, keys_NKd)
        self._values[block].index_copy_(0, places.write_N, values_NKd)

    def attend(self, block: int, places: Places, queries_NHd: Tensor) -> Tensor:
        """Attention of every row to its sequence's tokens up to itself, (N, H, d)."""
        keys_PKd, values_PKd = self._keys[block], self._values[block]
        context_NHd = torch.empty_like(queries_NHd)
        if places.single_S is not None and places.read_ST is not None:
            keys_SKTd = keys_PKd[places.read_ST].transpose(1, 2)
            values_SKTd = values_PKd[places.read_ST].transpose(1, 2)
            queries_SH1d = queries_NHd[places.single_S][:, :, None]
            attended = F.scaled_dot_product_attention(
                queries_SH1d, keys_SKTd, values_SKTd, attn_mask=places.mask_S11T, enable_gqa=True
            )
            context_NHd[places.single_S] = attended[:, :, 0]
        for rows, read_T, mask in places.longer:
            queries_1HTd, keys_1KTd, values_1KTd = (
                each[None].transpose(1, 2) for each in (queries_NHd[rows], keys_PKd[read_T], values_PKd[read_T])
            )
            attended = F.scaled_dot_product_attention(
                queries_1HTd, keys_1KTd, values_1KTd, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            context_NHd[rows] = attended[0].transpose(0, 1)
        return context_NHd

    def held(self, block: int, sequence: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence's first tokens in a block, each (tokens, K, d)."""
        places = torch.from_numpy(self.place_of(Run(sequence=sequence, start=0, length=tokens), 0))
        places = places.to(self._keys[block].device)
        return self._keys[block][places], self._values[block][places]


class Places:
    """Index tensors of a packed batch into a store, the same for all blocks."""

    def __init__(self, store: KvStore, runs: Sequence[Run]) -> None:
        """Runs of one row attend together, padded to the longest; others, mostly prompts, each alone."""
        self._device = store.device
        self.runs = tuple(runs)
        self.write_N = self._tensor(np.concatenate([store.place_of(run, run.start) for run in runs]))
        self.position_N = self._tensor(np.concatenate([np.arange(run.start, run.end) for run in runs]))
        first_rows = np.cumsum([0, *(run.length for run in runs)]).tolist()
        singles = [k for k, run in enumerate(runs) if run.length == 1]
        self.single_S = self._tensor(np.array([first_rows[k] for k in singles])) if singles else None
        self.read_ST: Tensor | None = None
        self.mask_S11T: Tensor | None = None
        if singles:
            self.read_ST, self.mask_S11T = self._padded(store, [runs[k] for k in singles])
        self.longer = [
            (slice(first, first + run.length), self._tensor(store.place_of(run, 0)), self._mask(run))
            for first, run in zip(first_rows, runs, strict=False)
            if run.length > 1
        ]

    def _padded(self, store: KvStore, runs: Sequence[Run]) -> tuple[Tensor, Tensor | None]:
        lengths = [run.end for run in runs]
        longest = max(lengths)
        read = np.zeros((len(runs), longest), dtype=np.int64)
        for row, run in zip(read, runs, strict=True):
            row[: run.end] = store.place_of(run, 0)
        if min(lengths) == longest:
            return self._tensor(read), None
        mask = np.arange(longest)[None, :] < np.array(lengths)[:, None]
        return self._tensor(read), self._tensor(mask)[:, None, None, :]

    def _mask(self, run: Run) -> Tensor | None:
        """Which tokens each of a run's rows sees; None where it is the sequence from its beginning."""
        if run.start == 0:
            return None
        return self._tensor(np.arange(run.end)[None, :] <= np.arange(run.start, run.end)[:, None])

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
