"""What a replica's splits have done since the start."""

from __future__ import annotations

from dataclasses import dataclass, field

from earlyexit.split import Split

MOST_SPLITS = 64
"""Splits whose times are kept: a few dozen plans, at some kilobytes in all."""


@dataclass(slots=True)
class SplitCounts:
    """What a hosted split has done since it was first hosted, its probes included."""

    batches: int = 0
    inputs: int = 0
    capacity: int = 0
    """Inputs that full batches would have held."""
    busy_s: float = 0.0
    dropped: int = 0

    @property
    def fill(self) -> float | None:
        """Mean share of the target batch that was filled; None before the first batch."""
        return self.inputs / self.capacity if self.capacity else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesRun:
    """Batches of one split and one size, whatever the batch it was fused to, and their seconds."""

    first: int
    end: int
    ramps: tuple[int, ...]
    size: int
    """Inputs at the split's first block."""
    batches: int
    seconds: float


@dataclass(slots=True)
class _Sums:
    serial: int = 0
    by_size: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Batches and seconds, by size."""


class RunSums:
    """Batches and seconds by split and size; the split that has not run for longest makes room for a new one.

    One thread adds while another may read.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int, tuple[int, ...]], _Sums] = {}
        self._serial = 0

    def add(self, split: Split, size: int, seconds: float) -> None:
        """Count a batch."""
        key = (split.first, split.end, split.ramps)
        sums = self._sums.get(key)
        if sums is None:
            self._make_room()
            sums = self._sums[key] = _Sums()
        self._serial += 1
        sums.serial = self._serial
        batches, before_s = sums.by_size.get(size, (0, 0.0))
        sums.by_size[size] = (batches + 1, before_s + seconds)

    def all(self) -> tuple[TimesRun, ...]:
        """Every split and size that ran and is still kept."""
        return tuple(
            TimesRun(first=first, end=end, ramps=ramps, size=size, batches=batches, seconds=seconds)
            for (first, end, ramps), sums in self._sums.copy().items()
            for size, (batches, seconds) in sums.by_size.copy().items()
        )

    def _make_room(self) -> None:
        if len(self._sums) >= MOST_SPLITS:
            del self._sums[min(self._sums, key=lambda key: self._sums[key].serial)]
