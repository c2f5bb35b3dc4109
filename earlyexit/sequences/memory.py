"""What a network keeps of sequences from one of their inputs to the next, such as keys and values, and when it goes.

Nobody above the network knows what that is. Sequences have numbers. What is kept of one lives from its first input
until whoever sent that ends it, and longer only while a batch computes with it. Without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

from earlyexit.engine.queue import Member
from earlyexit.engine.release import PayloadT
from earlyexit.errors import OfframpError, SequenceLostError
from earlyexit.network.wire import WirePiece

PAGE_TOKENS = 16
"""As vLLM's: on average half a page of each sequence is reserved and never used."""
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
    touch only what is kept of their own inputs' sequences, which nobody ends meanwhile: see `Hands`.
    """

    def admit(self, wire: WirePiece, sequences: Sequence[int]) -> list[OfframpError | None]:
        """Reserve whatever a sequence may come to with its first input; of each input why it cannot run, or None.

        OverloadedError where there is no room now, InputError where there never is, SequenceLostError where nothing is
        known of tokens that came before.
        """
        ...

    def end(self, sequence: int) -> None:
        """Give up what is kept of a sequence; nothing of one that is not known."""
        ...

    def take_along(self, piece: PayloadT) -> PayloadT:
        """Survivors that go on elsewhere, with all that waits here for the same block and has to be there before."""
        ...

    def use(self) -> MemoryUse:
        """How much is taken."""
        ...


class SequencePins(Generic[PayloadT]):
    """Which sequences a device has in its hands, running or about to be queued again; ends others at once.

    Not thread-safe: asked with the device's lock held.
    """

    def __init__(self, memory: Memory[PayloadT]) -> None:
        self._memory = memory
        self._held: Counter[int] = Counter()
        self._over: set[int] = set()

    def take(self, members: Iterable[Member[Any]]) -> None:
        """They are in a batch."""
        self._held.update([member.sequence for member in members])

    def let_go(self, members: Iterable[Member[Any]]) -> None:
        """They are in none any more; what was ended meanwhile goes."""
        for member in members:
            sequence = member.sequence
            self._held[sequence] -= 1
            if self._held[sequence] > 0:
                continue
            del self._held[sequence]
            if sequence in self._over:
                self._over.remove(sequence)
                self._memory.end(sequence)

    def end(self, sequences: Iterable[int]) -> None:
        """These are over; what is kept of them goes now, or when it is let go."""
        for sequence in sequences:
            if sequence in self._held:
                self._over.add(sequence)
            else:
                self._memory.end(sequence)

    def is_over(self, member: Member[Any]) -> bool:
        """Whether its sequence was ended while it was in a batch."""
        return member.sequence in self._over


def lost(sequence: int, why: str) -> SequenceLostError:
    """Of a sequence that cannot go on here, and why."""
    return SequenceLostError(f"sequence {sequence} cannot go on here: {why}", retry_after_s=RETRY_S)
