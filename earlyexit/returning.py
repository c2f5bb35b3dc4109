"""Steps of sequences that are on their way back to a device, since their last ones were just answered. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from earlyexit.member import Queue

SHARE = 0.05
"""Of what a batch took, how long the next waits at most for sequences whose steps it answered: two ms of a step of 40
for the way to the ingress and back."""


class Returning:
    """Whose next steps are worth waiting for.

    Those of others that came while a batch ran would make the next one without them at once, and so on by turns: two
    groups, each of which reads all weights.
    """

    __slots__ = ("_over", "_sequences", "until_s")

    def __init__(self) -> None:
        self._sequences: set[int] = set()
        self._over: set[int] = set()
        """Since a batch last answered steps: one that runs meanwhile may answer others of theirs at its end."""
        self.until_s = -math.inf
        """When nobody is waited for any longer."""

    def __bool__(self) -> bool:
        """Whether anybody may be."""
        return bool(self._sequences)

    def answered(self, sequences: Iterable[int], *, took_s: float, now_s: float) -> None:
        """A batch that took so long has answered steps of these."""
        self._sequences = set(sequences) - self._over
        self._over.clear()
        self.until_s = now_s + SHARE * took_s

    def take_out(self, sequences: Collection[int]) -> None:
        """They are over; who left early may be before its batch is."""
        self._sequences.difference_update(sequences)
        self._over.update(sequences)

    def are_awaited(self, waiting: Sequence[Queue[Any]], now_s: float) -> bool:
        """Whether some are not among those that wait, and may still come in time."""
        self._sequences.difference_update(member.sequence for queue in waiting for member in queue.members)
        if now_s >= self.until_s:
            self._sequences.clear()
        return bool(self._sequences)
