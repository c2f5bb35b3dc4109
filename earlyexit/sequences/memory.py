"""What a network keeps of sequences between their inputs, such as keys and values, and when it is freed.

The code above the network does not know what is kept. Sequences have numbers. The memory of a sequence lives from its
first input until the sender ends the sequence, and longer only while a batch computes with it. This needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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


def lost(sequence: int, why: str) -> SequenceLostError:
    """Returns the error of a sequence that cannot go on here."""
    return SequenceLostError(f"sequence {sequence} cannot go on here: {why}", retry_after_s=RETRY_S)
