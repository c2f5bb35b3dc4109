"""Whose turn a device is where sequences are probes, which run in batches of their own. Pure.

A probe waits for nobody, and its sequence's next step is back a moment after its batch: two of them would have a device
to themselves, one running while the other is on its way. So after a batch of probes others go first, if any wait; after
a batch of others probes do, as they always do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from earlyexit.member import NO_SEQUENCE, Member, Queue


class Turns:
    """Of one engine; where there are no sequences it is always anybody's turn."""

    __slots__ = ("is_others",)

    def __init__(self) -> None:
        self.is_others = False
        """Whether the latest batch was of probes, whose next steps nobody waits for either."""

    def took(self, members: Sequence[Member[Any]]) -> None:
        """These are the next batch."""
        self.is_others = members[0].probe and members[0].sequence != NO_SEQUENCE

    def first(self, waiting: Sequence[Queue[Any]]) -> Sequence[Queue[Any]]:
        """Whose batch goes first, should one begin now: of the queues in which somebody waits."""
        return [queue for queue in waiting if not queue.probe] if self.is_others else ()
