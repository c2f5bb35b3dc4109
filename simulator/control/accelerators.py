"""The accelerators of one type: who holds which, and which are gone."""

from __future__ import annotations

from collections.abc import Iterable


class Accelerators:
    """Numbered from 0; the lowest free one is taken first, so a plan's first stage has the lowest numbers."""

    def __init__(self, count: int) -> None:
        self._holders: list[object] = [None] * count
        self._lost_s: dict[int, float] = {}
        """When those were lost that are gone."""

    def take(self, holder: object) -> int | None:
        """The number of one that is free until now; None where none is."""
        for number, held in enumerate(self._holders):
            if held is None and number not in self._lost_s:
                self._holders[number] = holder
                return number
        return None

    def hand_over(self, holder: object, other: object) -> None:
        """Give what one holds to another."""
        self._holders[self._holders.index(holder)] = other

    def release(self, holder: object) -> None:
        """Take back what somebody holds, if anything."""
        self._holders = [None if held is holder else held for held in self._holders]

    def lose(self, numbers: Iterable[int], now_s: float) -> list[object]:
        """Have some be gone; gives those who held them."""
        lost = [number for number in numbers if number not in self._lost_s]
        self._lost_s |= dict.fromkeys(lost, now_s)
        holders = [self._holders[number] for number in lost]
        for number in lost:
            self._holders[number] = None
        return [holder for holder in holders if holder is not None]

    def bring_back(self, numbers: Iterable[int]) -> None:
        """Have some be there again."""
        for number in numbers:
            self._lost_s.pop(number, None)

    def counted(self, noticed_s: float) -> int:
        """Those that are there, and those lost after `noticed_s`."""
        return len(self._holders) - sum(lost_s <= noticed_s for lost_s in self._lost_s.values())
