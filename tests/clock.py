from __future__ import annotations


class ManualClock:
    """A clock that only `advance` moves."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves time forward; `seconds` must not be negative."""
        assert seconds >= 0
        self._now_s += seconds
