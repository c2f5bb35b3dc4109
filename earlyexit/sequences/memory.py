"""How much of a replica's memory sequences have, and the error of a sequence that is lost. This needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from earlyexit.errors import SequenceLostError

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


def lost(sequence: int, why: str) -> SequenceLostError:
    """Returns the error of a sequence that cannot go on here."""
    return SequenceLostError(f"sequence {sequence} cannot go on here: {why}", retry_after_s=RETRY_S)
