"""What a sequence must keep to count: so long to its first token, so long per further one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol


class SequenceTimes(Protocol):
    """A sequence that is over; seconds, infinite where it failed."""

    @property
    def ttft_s(self) -> float:
        """To the first token, from when the sequence was due."""
        ...

    @property
    def tpot_s(self) -> float:
        """Per token behind the first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Slos:
    """Both in seconds."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def of(cls, alone: Sequence[SequenceTimes], times: float) -> Slos:
        """So many times what it takes of one sequence at a time."""
        ttft_s, tpot_s = median(each.ttft_s for each in alone), median(each.tpot_s for each in alone)
        return cls(ttft_s=times * ttft_s, tpot_s=times * tpot_s)

    def kept(self, sequences: Sequence[SequenceTimes]) -> float:
        """The share of them that keep both; 0 of none."""
        within = [each.ttft_s <= self.ttft_s and each.tpot_s <= self.tpot_s for each in sequences]
        return sum(within) / max(1, len(within))
