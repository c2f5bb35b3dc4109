"""What a network keeps of sequences between their inputs, such as keys and values, and when it is freed.

The code above the network does not know what is kept. Sequences have numbers. The memory of a sequence lives from its
first input until the sender ends the sequence, and longer only while a batch computes with it. This needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

from earlyexit.engine.queue import Member
from earlyexit.engine.release import PayloadT
from earlyexit.errors import OfframpError, SequenceLostError
from earlyexit.network.boundary import WirePiece

PAGE_TOKENS = 16
"""The page size of vLLM: on average half a page of each sequence is reserved and never used."""
RETRY_S = 0.05
"""When a lost sequence may begin anew: at once, elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """How much of a replica's memory sequences have."""

    sequences: int = 0
    pages: int = 0
    """Reserved now."""
    peak_pages: int = 0
    """Reserved at most, since the start."""
    num_pages: int = 0
    page_tokens: int = 0
    """Tokens of a page."""


class Memory(Protocol[PayloadT]):
    """What a network keeps of sequences.

    Not thread-safe: `admit`, `end` and `use` are called with the device's lock held. A running batch, and `take_along`,
    use only the memory of their own inputs' sequences, which `SequencePins` keeps from being ended meanwhile.
    """

    def admit(self, wire: WirePiece, sequences: Sequence[int]) -> list[OfframpError | None]:
        """Reserve all memory that a sequence may need with its first input; returns for each input an error or None.

        OverloadedError where there is no room now, InputError where there never is, SequenceLostError where earlier
        tokens of the sequence are unknown.
        """
        ...

    def end(self, sequence: int) -> None:
        """Free the memory of a sequence, if there is any."""
        ...

    def take_along(self, piece: PayloadT) -> PayloadT:
        """Returns survivors that go on elsewhere, with earlier tokens that wait here for the same block."""
        ...

    def use(self) -> MemoryUse:
        """Returns how much memory is used."""
        ...


class SequencePins(Generic[PayloadT]):
    """The sequences that a device is using, in a batch or about to be queued again; others end at once.

    Not thread-safe: called with the device's lock held.
    """

    def __init__(self, memory: Memory[PayloadT] | None) -> None:
        """`memory`: None for a network that keeps nothing; there is then nothing to pin."""
        self._memory = memory
        self._held: Counter[int] = Counter()
        self._over: set[int] = set()

    def take(self, members: Iterable[Member[Any]]) -> None:
        """Pin the sequences of a batch."""
        if self._memory is not None:
            self._held.update([member.sequence for member in members])

    def let_go(self, members: Iterable[Member[Any]], *, but: Iterable[Member[Any]] = ()) -> None:
        """Unpin sequences, except those of `but`; the memory of those that were ended meanwhile is freed."""
        if self._memory is None:
            return
        kept = {id(member) for member in but}
        for sequence in [member.sequence for member in members if id(member) not in kept]:
            self._held[sequence] -= 1
            if self._held[sequence] > 0:
                continue
            del self._held[sequence]
            if sequence in self._over:
                self._over.remove(sequence)
                self._memory.end(sequence)

    def end(self, sequences: Iterable[int]) -> None:
        """End sequences: their memory is freed now, or when they are unpinned."""
        if self._memory is None:
            return
        for sequence in sequences:
            if sequence in self._held:
                self._over.add(sequence)
            else:
                self._memory.end(sequence)

    def is_over(self, member: Member[Any]) -> bool:
        """Whether its sequence was ended while it was in a batch."""
        return member.sequence in self._over


def lost(sequence: int, why: str) -> SequenceLostError:
    """Returns the error of a sequence that cannot go on here."""
    return SequenceLostError(f"sequence {sequence} cannot go on here: {why}", retry_after_s=RETRY_S)
